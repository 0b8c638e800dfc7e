"""What rounds count: tokens, per member and in all, samples in the ledger, and bytes on the wire. Pure.

Bytes are counted against averaging gradients at every inner step. Nodes tell with each applied round what
their process has sent and received so far, so a report that is lost or comes twice changes nothing: what
counts is how far the totals have grown.
"""

from dataclasses import replace

from coordinator.swarm.ledger import (
    committed_samples,
    committed_tokens,
    lease_again,
    reopen,
    settle,
)
from coordinator.swarm.state import SwarmState
from coordinator.swarm.turn import Turn
from protocol.rounds import Commit, NodeId
from protocol.wire_count import WireTotals, grown

FP32_BYTES = 4


def note_wire(turn: Turn, node_id: NodeId, round: int, told: WireTotals) -> None:
    """Books what a member's totals have grown by, and for the round in flight if it is about that."""
    member = turn.state.members[node_id]
    news = grown(member.wire_told, told)
    if not any(map(any, news.values())):
        return
    turn.put_member(replace(member, wire_told=_sum(member.wire_told, news)))
    turn.state = replace(turn.state, wire=_sum(turn.state.wire, news))
    current = turn.state.open_round
    if current is not None and current.number == round:
        turn.state = replace(turn.state, round_wire=_sum(turn.state.round_wire, news))


def all_reduce_bytes(state: SwarmState, commit: Commit) -> int:
    """What all nodes would have sent for the same inner steps, had they averaged their gradients.

    By a ring all-reduce in fp32 at every inner step, in which each of N participants sends
    2 (N - 1) / N of the vector (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce
    algorithms"). Framing is left out for it and counted for us.
    """
    if state.layout is None or not commit.assignments:
        return 0
    num_nodes = len(commit.assignments)
    batch = state.rules.batch
    num_node_steps = sum(committed_samples(commit, batch=batch).values()) / batch
    vector_bytes = FP32_BYTES * sum(state.layout.fragment_elements)
    return round(num_node_steps * 2 * (num_nodes - 1) / num_nodes * vector_bytes)


def _sum(one: WireTotals, other: WireTotals) -> WireTotals:
    return {
        kind: (
            one.get(kind, (0, 0))[0] + other.get(kind, (0, 0))[0],
            one.get(kind, (0, 0))[1] + other.get(kind, (0, 0))[1],
        )
        for kind in sorted({*one, *other})
    }


def book(state: SwarmState, commit: Commit) -> SwarmState:
    """Counts what the commit took; the rest of its leases is free again."""
    samples = committed_samples(commit, batch=state.rules.batch)
    state = _with_tokens(state, commit, sign=1)
    return replace(state, ledger=settle(state.ledger, commit.assignments, samples))


def unbook(state: SwarmState, commit: Commit) -> SwarmState:
    """Undoes `book`: its samples are leased as they were when the round was in flight."""
    samples = committed_samples(commit, batch=state.rules.batch)
    state = _with_tokens(state, commit, sign=-1)
    return replace(state, ledger=reopen(state.ledger, commit.assignments, samples))


def book_learned(state: SwarmState, commit: Commit) -> SwarmState:
    """Books a commit whose plan this coordinator has no memory of."""
    state = replace(state, ledger=lease_again(state.ledger, commit.assignments))
    return book(state, commit)


def _with_tokens(state: SwarmState, commit: Commit, *, sign: int) -> SwarmState:
    tokens = committed_tokens(commit)
    members = {
        node_id: replace(m, committed_tokens=m.committed_tokens + sign * tokens.get(node_id, 0))
        for node_id, m in state.members.items()
    }
    token_clock = state.token_clock + sign * sum(tokens.values())
    averaging_bytes = state.all_reduce_bytes + sign * all_reduce_bytes(state, commit)
    return replace(
        state, members=members, token_clock=token_clock, all_reduce_bytes=averaging_bytes
    )
