"""The round in flight on disk: a row for each part of it that changes by itself.

A report of one node changes one slice or one entry. Writing the whole round for it would cost as
much as there are nodes and slices, for every one of as many reports.
"""

import sqlite3
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from pydantic import ConfigDict, TypeAdapter

from coordinator.rows import packed, put, row_of, rows_of, unpacked
from coordinator.swarm.state import Round, SliceProgress
from protocol.v1 import round_pb2
from protocol.wire import convert
from protocol.wire.messages import Trained
from protocol.wire.rounds import Digest, NodeId

JSON = ConfigDict(ser_json_bytes="hex", val_json_bytes="hex", ser_json_inf_nan="constants")

# One-tuples, because pydantic takes a configuration only for types that are not dataclasses.
_ROUND = TypeAdapter(tuple[Round], config=JSON)
_SLICE = TypeAdapter(tuple[SliceProgress], config=JSON)
_TRAINED = TypeAdapter(tuple[Trained], config=JSON)

Key = tuple[str, int, str]
"""What a row holds ("slice", "held", …), of which slice, of which node."""

V = TypeVar("V", bound=Hashable)


def load_round(connection: sqlite3.Connection) -> Round | None:
    """The round in flight as last saved; None when none was open."""
    row = row_of(connection, "open_round")
    if row is None:
        return None
    head = _ROUND.validate_json(unpacked(row[1]))[0]
    parts = {
        (kind, slice_index, node_id): unpacked(part)
        for kind, slice_index, node_id, part in rows_of(connection, "round_parts")
    }
    return joined(head, parts) if parts else head


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
        put(connection, "open_round", [(1, packed(_ROUND.dump_json((_head_of(current),))))])
    gone = [] if held is None else list(_gone(held, current))
    connection.executemany(
        "DELETE FROM round_parts WHERE kind = ? AND slice_index = ? AND node_id = ?", gone
    )
    changed = ((*key, packed(part)) for key, part in _changed(held, current))
    put(connection, "round_parts", changed)


def _is_same(before: Round, current: Round) -> bool:
    """Whether both come of one plan."""
    return (before.number, before.opened_at, len(before.slices)) == (
        current.number,
        current.opened_at,
        len(current.slices),
    )


def _head_of(current: Round) -> Round:
    return replace(current, slices=(), commit=None, trained={}, trained_at={}, held={}, applied={})


def _changed(before: Round | None, current: Round) -> Iterator[tuple[Key, bytes]]:
    """The parts that the database does not hold as they are now."""
    for progress in current.slices:
        index = progress.slice.index
        if before is None or before.slices[index] != progress:
            yield ("slice", index, ""), _SLICE.dump_json((progress,))
    if current.commit is not None and (before is None or before.commit != current.commit):
        message = convert.commit_to_wire(current.commit)
        yield ("commit", 0, ""), message.SerializeToString(deterministic=True)
    if before is None or before.held is not current.held:
        was = {} if before is None else before.held
        for node_id, results in current.held.items():
            if was.get(node_id) is not results:
                yield ("held", 0, node_id), _held_in_words(results).encode()
    if before is None or before.trained is not current.trained:
        for node_id, trained in _news({} if before is None else before.trained, current.trained):
            yield ("trained", 0, node_id), _TRAINED.dump_json((trained,))
    if before is None or before.trained_at is not current.trained_at:
        for node_id, at in _news({} if before is None else before.trained_at, current.trained_at):
            yield ("trained_at", 0, node_id), repr(at).encode()
    if before is None or before.applied is not current.applied:
        for node_id, digest in _news({} if before is None else before.applied, current.applied):
            yield ("applied", 0, node_id), digest.hex().encode()


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


def joined(head: Round, parts: Mapping[Key, bytes]) -> Round:
    """The round whose head and parts these are."""
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
                held[node_id] = _held_of(part.decode())
            case "holder":  # one row for each slice, as it was written before "held" was
                digest = Digest(bytes.fromhex(part.decode()))
                held[node_id] = {**held.get(node_id, {}), index: digest}
            case "commit":
                head = replace(
                    head, commit=convert.commit_from_wire(round_pb2.Commit.FromString(part))
                )
            case "trained":
                trained[node_id] = _TRAINED.validate_json(part)[0]
            case "trained_at":
                trained_at[node_id] = float(part)
            case "applied":
                applied[node_id] = Digest(bytes.fromhex(part.decode()))
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
