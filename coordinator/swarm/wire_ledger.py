"""What rounds cost on the wire, against averaging gradients at every inner step. Pure.

Nodes tell with each applied round what their process has sent and received so far, so a report that
is lost or comes twice changes nothing: what counts is how far the totals have grown.
"""

from dataclasses import replace

from coordinator.swarm.ledger import committed_samples
from coordinator.swarm.state import SwarmState
from coordinator.swarm.turn import Turn
from protocol.wire.rounds import Commit, NodeId
from protocol.wire.wire_count import WireTotals, grown

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
    num_nodes = sum(assignment.trains for assignment in commit.assignments)
    if not num_nodes:
        return 0
    batch = state.rules.batch
    num_node_steps = sum(committed_samples(commit, batch=batch).values()) / batch
    vector_bytes = FP32_BYTES * sum(state.rules.layout.fragment_elements)
    return round(num_node_steps * 2 * (num_nodes - 1) / num_nodes * vector_bytes)


def _sum(one: WireTotals, other: WireTotals) -> WireTotals:
    return {
        kind: (
            one.get(kind, (0, 0))[0] + other.get(kind, (0, 0))[0],
            one.get(kind, (0, 0))[1] + other.get(kind, (0, 0))[1],
        )
        for kind in sorted({*one, *other})
    }
