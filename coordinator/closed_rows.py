"""Closed rounds on disk: whole for a while, and what is worth keeping of each for the whole run.

The latest KEPT_ROUNDS are whole: who was away for as long can catch up, and what it owes is settled by
the commits that it missed. For the whole run stay each commit's digests and signature, 200 bytes, and
figures for curves: of rounds that are older, every tenth; ten times as old, every hundredth; and so on.
"""

import sqlite3
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from blake3 import blake3
from pydantic import TypeAdapter

from coordinator.round_rows import JSON
from coordinator.rows import packed, put, row_of, rows_of, unpacked
from coordinator.swarm.books import screenings_of
from coordinator.swarm.state import KEPT_ROUNDS, ClosedRound, Screening, SwarmState
from coordinator.swarm.wire_ledger import all_reduce_bytes
from protocol.trust.signing import statement_of
from protocol.v1 import round_pb2
from protocol.v1 import status_pb2 as pb
from protocol.wire import convert
from protocol.wire.messages import Trained
from protocol.wire.rounds import Commit, Digest, NodeId
from protocol.wire.wire_count import WireTotals

THINNED_BY = 10
"""Of figures that are so many times older, so many times fewer are kept."""

MOST_SCREENED = 16
"""Nodes that a round's figures name because screening took not all of their contributions."""

MOST_REASON = 400
"""Characters of a round's reason in its figures: a round of many void slices gives one for each."""

Sign = Callable[[bytes], bytes]
"""Gives the coordinator's signature under what protocol.trust.signing.statement_of says of a commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCommit:
    """What stays of a commit for the whole run."""

    round: int
    incarnation: int
    base_digest: Digest
    outer_digest: Digest | None  # None until nodes have agreed on it
    statement_digest: Digest  # BLAKE3 of what is signed: protocol.trust.signing.commit_statement
    signature: bytes  # empty where the store was opened without a signer


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
    plan = convert.plan_to_wire(closed.plan)
    if closed.plan.assignments == commit.assignments:
        plan.ClearField("assignments")  # the commit has them, and they are most of it
    rest = (closed.trained, closed.tokens, closed.seconds, closed.reason, closed.wire)
    parts = (
        message.SerializeToString(deterministic=True),
        plan.SerializeToString(deterministic=True),
        _REST.dump_json(rest),
    )
    put(connection, "closed_rounds", [(commit.round, *map(packed, parts))])
    kept = (
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
        plan = convert.plan_from_wire(round_pb2.Plan.FromString(plan_message))
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


def kept_commit(connection: sqlite3.Connection, round_number: int) -> KeptCommit | None:
    """What stays of a round's commit for the whole run; None when the round is not closed."""
    row = row_of(connection, "commits", "WHERE round = ?", (round_number,))
    if row is None:
        return None
    number, incarnation, base, outer, statement, signature = row
    return KeptCommit(
        round=number,
        incarnation=incarnation,
        base_digest=Digest(base),
        outer_digest=convert.optional_digest_from_wire(outer, of="the outer state"),
        statement_digest=Digest(statement),
        signature=signature,
    )


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
    weight = sum(trained.tokens for trained in closed.trained.values())
    weighted = sum(trained.tokens * trained.loss for trained in closed.trained.values())
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
