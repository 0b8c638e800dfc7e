"""Rounds on disk: the one in flight by its parts, and closed ones whole for a while.

The round in flight has a row for each part of it that changes by itself: a report of one node changes one
slice or one entry. Writing the whole round for it would cost as much as there are nodes and slices, for every
one of as many reports.

Of closed rounds the latest KEPT_ROUNDS are whole: who was away for as long can catch up, and what it owes is
settled by the commits that it missed. For the whole run stay each commit's digests and signature, 200 bytes,
and figures for curves: of rounds that are older, every tenth; ten times as old, every hundredth; and so on.
"""

import sqlite3
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from blake3 import blake3
from pydantic import ConfigDict, TypeAdapter

from coordinator.database import put, row_of, rows_of
from coordinator.swarm.books import all_reduce_bytes, screenings_of
from coordinator.swarm.members import Screening
from coordinator.swarm.state import KEPT_ROUNDS, ClosedRound, Round, SliceProgress, SwarmState
from protocol.trust.signing import statement_of
from protocol.v1 import round_pb2
from protocol.v1 import status_pb2 as pb
from protocol.wire import convert
from protocol.wire.messages import Trained
from protocol.wire.payload import WireTotals
from protocol.wire.rounds import Commit, Digest, NodeId, Plan

JSON = ConfigDict(ser_json_bytes="hex", val_json_bytes="hex", ser_json_inf_nan="constants")

# One-tuples, because pydantic takes a configuration only for types that are not dataclasses.
_ROUND = TypeAdapter(tuple[Round], config=JSON)
_SLICE = TypeAdapter(tuple[SliceProgress], config=JSON)
_TRAINED = TypeAdapter(tuple[Trained], config=JSON)
_AGREEMENTS = TypeAdapter(dict[int, float])

Key = tuple[str, int, str]
"""What a row holds ("slice", "held", …), of which slice, of which node."""


PACKED_FROM = 512
"""Bytes; what is shorter would hardly be smaller."""


def packed(message: bytes) -> bytes:
    """What to write for a message: long ones name the same nodes again and again."""
    return message if len(message) < PACKED_FROM else b"\0" + zlib.compress(message, level=1)


def unpacked(written: bytes) -> bytes:
    """The message that was packed. Messages begin with no zero byte, so one tells what is packed."""
    return zlib.decompress(written[1:]) if written[:1] == b"\0" else written


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
    changed = [(*key, packed(part)) for key, part in _changed(held, current)]
    put(connection, "round_parts", changed)


def _is_same(before: Round, current: Round) -> bool:
    """Whether both come of one plan."""
    return (before.number, before.opened_at, len(before.slices)) == (
        current.number,
        current.opened_at,
        len(current.slices),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ByNode:
    """What a round knows of each node: how one node's is written, and read."""

    write: Callable[[Any], bytes]
    read: Callable[[bytes], Any]


_BY_NODE: Mapping[str, _ByNode] = {
    "held": _ByNode(
        write=lambda results: " ".join(f"{i}:{d.hex()}" for i, d in results.items()).encode(),
        read=lambda part: _held_of(part.decode()),
    ),
    "agreements": _ByNode(
        write=lambda told: _AGREEMENTS.dump_json(dict(told)), read=_AGREEMENTS.validate_json
    ),
    "trained": _ByNode(
        write=lambda told: _TRAINED.dump_json((told,)),
        read=lambda part: _TRAINED.validate_json(part)[0],
    ),
    "silent": _ByNode(
        write=lambda told: " ".join(map(str, told)).encode(),
        read=lambda part: tuple(map(int, part.decode().split())),
    ),
    "trained_at": _ByNode(write=lambda at: repr(at).encode(), read=float),
    "applied": _ByNode(
        write=lambda digest: digest.hex().encode(),
        read=lambda part: Digest(bytes.fromhex(part.decode())),
    ),
}
"""By the names that a round has for it."""


def _head_of(current: Round) -> Round:
    nothing: dict[str, Any] = {kind: {} for kind in _BY_NODE}
    return replace(current, slices=(), commit=None, **nothing)


def _changed(before: Round | None, current: Round) -> Iterator[tuple[Key, bytes]]:
    """The parts that the database does not hold as they are now."""
    for progress in current.slices:
        index = progress.slice.index
        if before is None or before.slices[index] != progress:
            yield ("slice", index, ""), _SLICE.dump_json((progress,))
    if current.commit is not None and (before is None or before.commit != current.commit):
        message = convert.commit_to_wire(current.commit)
        yield ("commit", 0, ""), message.SerializeToString(deterministic=True)
    for kind, by_node in _BY_NODE.items():
        old = {} if before is None else getattr(before, kind)
        new = getattr(current, kind)
        if new is not old:
            for node_id, told in new.items():
                if old.get(node_id) is not told:
                    yield (kind, 0, node_id), by_node.write(told)


def _gone(before: Round, current: Round) -> Iterator[Key]:
    """The parts that the database holds and that are no more: a slice was taken over."""
    for kind in _BY_NODE:
        old, new = getattr(before, kind), getattr(current, kind)
        if old is not new:
            for node_id in old.keys() - new.keys():
                yield kind, 0, node_id


def joined(head: Round, parts: Mapping[Key, bytes]) -> Round:
    """The round whose head and parts these are."""
    slices: dict[int, SliceProgress] = {}
    told: dict[str, Any] = {kind: {} for kind in _BY_NODE}
    for (kind, index, node), part in parts.items():
        node_id = NodeId(node)
        match kind:
            case "slice":
                slices[index] = _SLICE.validate_json(part)[0]
            case "commit":
                commit = convert.commit_from_wire(round_pb2.Commit.FromString(part))
                head = replace(head, commit=commit)
            case _ if kind in _BY_NODE:
                told[kind][node_id] = _BY_NODE[kind].read(part)
    in_order = tuple(slices[index] for index in sorted(slices))
    return replace(head, slices=in_order, **told)


def _held_of(words: str) -> Mapping[int, Digest]:
    told = (word.split(":") for word in words.split())
    return {int(index): Digest(bytes.fromhex(digest)) for index, digest in told}


# Closed rounds


THINNED_BY = 10
"""Of figures that are so many times older, so many times fewer are kept."""

MOST_SCREENED = 16
"""Nodes that a round's figures name because screening took not all of their contributions."""

MOST_REASON = 400
"""Characters of a round's reason in its figures: a round of many void slices gives one for each."""

Sign = Callable[[bytes], bytes]
"""Gives the coordinator's signature under what protocol.trust.signing.statement_of says of a commit."""


# What of a closed round is in neither of its messages: who trained what, tokens, seconds, reason, bytes.
_REST = TypeAdapter(
    tuple[Mapping[NodeId, Trained], int, float, str, WireTotals],
    config=JSON,
)


def save_closed(
    connection: sqlite3.Connection, state: SwarmState, closed: ClosedRound, sign: Sign | None
) -> None:
    """Writes one closed round as it is in `state`; what is too old to stay whole goes."""
    commit = closed.commit
    message = convert.commit_to_wire(commit)
    statement = statement_of(message)
    if sign is not None:
        message.signature = sign(statement)
    plan = convert.to_wire(closed.plan, round_pb2.Plan)
    if closed.plan.assignments == commit.assignments:
        plan.ClearField("assignments")  # the commit has them, and they are most of it
    rest = (closed.trained, closed.tokens, closed.seconds, closed.reason, closed.wire)
    parts = (
        message.SerializeToString(deterministic=True),
        plan.SerializeToString(deterministic=True),
        _REST.dump_json(rest),
    )
    put(connection, "closed_rounds", [(commit.round, *map(packed, parts))])
    kept = (  # for the whole run, for whoever wants to know what was signed; nothing here reads it
        *(commit.round, commit.incarnation, commit.base_digest),
        *(convert.optional_digest_to_wire(commit.outer_digest),),
        *(blake3(statement).digest(), message.signature),
    )
    put(connection, "commits", [kept])
    figures = figures_of(state, closed).SerializeToString(deterministic=True)
    put(connection, "figures", [(commit.round, figures)])


def forget_after(connection: sqlite3.Connection, round_number: int) -> None:
    """Removes all that is kept of later rounds: they were taken back."""
    for table in ("closed_rounds", "commits", "figures"):
        connection.execute(f"DELETE FROM {table} WHERE round > ?", (round_number,))


def thin_out(connection: sqlite3.Connection, newest: int) -> None:
    """Removes what is not kept of rounds that old."""
    oldest = newest - KEPT_ROUNDS
    connection.execute("DELETE FROM closed_rounds WHERE round <= ?", (oldest,))
    if newest % THINNED_BY:
        return
    age, each = KEPT_ROUNDS, THINNED_BY
    while age < newest:
        connection.execute(
            "DELETE FROM figures WHERE round <= ? AND round > ? AND round % ?",
            (newest - age, newest - THINNED_BY * age, each),
        )
        age, each = THINNED_BY * age, THINNED_BY * each


def latest_closed(
    connection: sqlite3.Connection, limit: int, *, last: int = 1 << 62
) -> Iterator[ClosedRound]:
    """The latest closed rounds that are kept whole, of round `last` and before, newest first."""
    where = "WHERE round <= ? ORDER BY round DESC LIMIT ?"
    for row in rows_of(connection, "closed_rounds", where, (last, limit)):
        commit_message, plan_message, rest = map(unpacked, row[1:])
        signed = convert.commit_from_wire(round_pb2.Commit.FromString(commit_message))
        commit = replace(signed, signature=b"")  # in the core nobody needs it
        plan = convert.from_wire(round_pb2.Plan.FromString(plan_message), Plan)
        trained, tokens, seconds, reason, wire = _REST.validate_json(rest)
        yield ClosedRound(
            plan=plan if plan.assignments else replace(plan, assignments=commit.assignments),
            commit=commit,
            trained=trained,
            tokens=tokens,
            seconds=seconds,
            reason=reason,
            wire=wire,
        )


def commits_after(
    connection: sqlite3.Connection, round_number: int, limit: int
) -> Iterator[round_pb2.Commit]:
    """The commits of later rounds than this one that are kept whole, oldest first, read one by one."""
    rest = "WHERE round > ? ORDER BY round LIMIT ?"
    for _, message, *_ in rows_of(connection, "closed_rounds", rest, (round_number, limit)):
        yield round_pb2.Commit.FromString(unpacked(message))


def latest_figures(connection: sqlite3.Connection, limit: int) -> Iterator[pb.RoundSummary]:
    """The figures that are kept, newest first."""
    for _, message in rows_of(connection, "figures", "ORDER BY round DESC LIMIT ?", (limit,)):
        yield pb.RoundSummary.FromString(message)


def figures_at(connection: sqlite3.Connection, round_number: int) -> pb.RoundSummary | None:
    """The figures of one round; None where they are not kept."""
    row = row_of(connection, "figures", "WHERE round = ?", (round_number,))
    return None if row is None else pb.RoundSummary.FromString(row[1])


def figures_of(state: SwarmState, closed: ClosedRound) -> pb.RoundSummary:
    """One closed round in a line."""
    commit = closed.commit
    committed = [outcome for outcome in commit.slices if outcome.digest is not None]
    # Mostly one set for all slices, and then one object.
    sets = {id(outcome.contributors): outcome.contributors for outcome in committed}
    in_each = [{c.node_id for c in contributors} for contributors in sets.values()]
    # Loops need not tell a loss: then it is 0.
    told = [trained for trained in closed.trained.values() if trained.loss]
    weight = sum(trained.tokens for trained in told)
    weighted = sum(trained.tokens * trained.loss for trained in told)
    reason = closed.reason
    return pb.RoundSummary(
        round=commit.round,
        fragment=commit.fragment,
        num_participants=closed.plan.num_training,
        num_slices=len(commit.slices),
        num_committed_slices=len(committed),
        num_contributors=len(set.intersection(*in_each)) if in_each else 0,
        tokens=closed.tokens,
        seconds=closed.seconds,
        loss=weighted / weight if weight else 0.0,
        outer_digest=convert.optional_digest_to_wire(commit.outer_digest),
        reason=reason if len(reason) <= MOST_REASON else f"{reason[:MOST_REASON]}…",
        incarnation=commit.incarnation,
        wire=wire_ledger(closed.wire, all_reduce_bytes(state, commit)),
        screened=_screened(state, commit),
    )


def screening_to_wire(state: SwarmState, node_id: NodeId, told: Screening) -> pb.Screening:
    """What screening did to a node's contributions."""
    member = state.members.get(node_id)
    return pb.Screening(
        node_id=node_id,
        node_name="" if member is None else member.node_name,
        num_contributions=told.num_contributions,
        num_clipped=told.num_clipped,
        num_left_out=told.num_left_out,
    )


def _screened(state: SwarmState, commit: Commit) -> list[pb.Screening]:
    cut = [
        (-told.num_left_out, -told.num_clipped, node_id, told)
        for node_id, told in screenings_of(commit).items()
        if told.num_clipped or told.num_left_out
    ]
    return [screening_to_wire(state, n, told) for *_, n, told in sorted(cut)[:MOST_SCREENED]]


def wire_ledger(totals: WireTotals, averaging_bytes: int) -> pb.WireLedger:
    """What rounds have cost on the wire, and what averaging gradients would have."""
    return pb.WireLedger(
        counts=convert.wire_counts_to_wire(totals),
        all_reduce_bytes=averaging_bytes,
    )
