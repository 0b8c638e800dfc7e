"""The round in flight on disk: a row for each part of it that changes by itself.

A report of one node changes one slice or one entry. Writing the whole round for it would cost as
much as there are nodes and slices, for every one of as many reports.
"""

import sqlite3
import zlib
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from pydantic import ConfigDict, TypeAdapter

from coordinator.swarm.state import Round, SliceProgress, Trained
from protocol.errors import BadDataError
from protocol.rounds import Digest, NodeId

JSON = ConfigDict(ser_json_bytes="hex", val_json_bytes="hex", ser_json_inf_nan="constants")

# One-tuples, because pydantic takes a configuration only for types that are not dataclasses.
_ROUND = TypeAdapter(tuple[Round], config=JSON)
_SLICE = TypeAdapter(tuple[SliceProgress], config=JSON)
_TRAINED = TypeAdapter(tuple[Trained], config=JSON)

Key = tuple[str, int, str]
"""What a row holds ("slice", "held", …), of which slice, of which node."""

V = TypeVar("V", bound=Hashable)

PACKED_FROM = 16384
"""Characters; shorter texts stay readable with any SQLite tool, and would hardly be smaller."""


def load_round(connection: sqlite3.Connection) -> Round | None:
    """The round in flight as last saved; None when none was open."""
    row = connection.execute("SELECT round FROM open_round").fetchone()
    if row is None:
        return None
    head = _ROUND.validate_json(unpacked(row[0]))[0]
    parts = {
        (kind, slice_index, node_id): unpacked(part)
        for kind, slice_index, node_id, part in connection.execute(
            "SELECT kind, slice_index, node_id, part FROM round_parts"
        )
    }
    return _joined(head, parts) if parts else head


def save_round(connection: sqlite3.Connection, held: Round | None, current: Round | None) -> None:
    """Brings the database to this round from the one that it holds.

    `held` is None when nobody knows in what rows it holds one: then all are written.
    """
    if held is None or current is None or not _is_same(held, current):
        connection.execute("DELETE FROM open_round")
        connection.execute("DELETE FROM round_parts")
        held = None
    if current is None:
        return
    if held is None or _head_of(held) != _head_of(current):
        connection.execute(
            "INSERT OR REPLACE INTO open_round VALUES (1, ?)",
            (packed(_ROUND.dump_json((_head_of(current),)).decode()),),
        )
    gone = [] if held is None else list(_gone(held, current))
    connection.executemany(
        "DELETE FROM round_parts WHERE kind = ? AND slice_index = ? AND node_id = ?", gone
    )
    connection.executemany(
        "INSERT OR REPLACE INTO round_parts VALUES (?, ?, ?, ?)",
        [(*key, packed(part)) for key, part in _changed(held, current)],
    )


def _is_same(before: Round, current: Round) -> bool:
    """Whether both come of one plan."""
    return (before.number, before.opened_at, len(before.slices)) == (
        current.number,
        current.opened_at,
        len(current.slices),
    )


def _head_of(current: Round) -> Round:
    return replace(current, slices=(), trained={}, trained_at={}, held={}, applied={})


def _changed(before: Round | None, current: Round) -> Iterator[tuple[Key, str]]:
    """The parts that the database does not hold as they are now."""
    for progress in current.slices:
        index = progress.slice.index
        if before is None or before.slices[index] != progress:
            yield ("slice", index, ""), _SLICE.dump_json((progress,)).decode()
    if before is None or before.held is not current.held:
        was = {} if before is None else before.held
        for node_id, results in current.held.items():
            if was.get(node_id) is not results:
                yield ("held", 0, node_id), _held_in_words(results)
    if before is None or before.trained is not current.trained:
        for node_id, trained in _news({} if before is None else before.trained, current.trained):
            yield ("trained", 0, node_id), _TRAINED.dump_json((trained,)).decode()
    if before is None or before.trained_at is not current.trained_at:
        for node_id, at in _news({} if before is None else before.trained_at, current.trained_at):
            yield ("trained_at", 0, node_id), repr(at)
    if before is None or before.applied is not current.applied:
        for node_id, digest in _news({} if before is None else before.applied, current.applied):
            yield ("applied", 0, node_id), digest.hex()


def _gone(before: Round, current: Round) -> Iterator[Key]:
    """The parts that the database holds and that are no more: a slice was taken over."""
    for kind, old, new in (
        ("held", before.held, current.held),
        ("trained", before.trained, current.trained),
        ("trained_at", before.trained_at, current.trained_at),
        ("applied", before.applied, current.applied),
    ):
        if old is not new:
            for node_id in old.keys() - new.keys():
                yield kind, 0, node_id


def _news(before: Mapping[NodeId, V], after: Mapping[NodeId, V]) -> Iterable[tuple[NodeId, V]]:
    return after.items() - before.items()


def _joined(head: Round, parts: Mapping[Key, str]) -> Round:
    slices: dict[int, SliceProgress] = {}
    held: dict[NodeId, Mapping[int, Digest]] = {}
    trained: dict[NodeId, Trained] = {}
    trained_at: dict[NodeId, float] = {}
    applied: dict[NodeId, Digest] = {}
    for (kind, index, node), part in parts.items():
        node_id = NodeId(node)
        match kind:
            case "slice":
                slices[index] = _SLICE.validate_json(part)[0]
            case "held":
                held[node_id] = _held_of(part)
            case "holder":  # one row for each slice, as it was written before "held" was
                held[node_id] = {**held.get(node_id, {}), index: Digest(bytes.fromhex(part))}
            case "trained":
                trained[node_id] = _TRAINED.validate_json(part)[0]
            case "trained_at":
                trained_at[node_id] = float(part)
            case "applied":
                applied[node_id] = Digest(bytes.fromhex(part))
    return replace(
        head,
        slices=tuple(slices[index] for index in sorted(slices)),
        held=held,
        trained=trained,
        trained_at=trained_at,
        applied=applied,
    )


def _held_in_words(results: Mapping[int, Digest]) -> str:
    return " ".join(f"{index}:{digest.hex()}" for index, digest in results.items())


def _held_of(words: str) -> Mapping[int, Digest]:
    told = (word.split(":") for word in words.split())
    return {int(index): Digest(bytes.fromhex(digest)) for index, digest in told}


def packed(text: str) -> str | bytes:
    """What to write for a text: long ones name the same nodes for every slice, and are deflated."""
    return text if len(text) < PACKED_FROM else zlib.compress(text.encode(), level=1)


def unpacked(written: str | bytes) -> str:
    """The text; raises BadDataError when it is damaged."""
    if isinstance(written, str):
        return written
    try:
        return zlib.decompress(written).decode()
    except (zlib.error, UnicodeDecodeError) as error:
        raise BadDataError(
            f"a row of the database is damaged: {error}",
            next_step="restore it from a backup, or start a new run with "
            "'atoll coordinator init NEWDIR'",
        ) from error
