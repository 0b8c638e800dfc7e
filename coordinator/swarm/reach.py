"""Who reaches whom, and who should reduce when not everybody reaches everybody. Pure.

Nodes say which members they have no connection to and could not dial. A connection serves both
ways, so a pair counts as cut off as soon as one of the two says so: the other may not have noticed.
What is told is looked at once, never all pairs: a thousand members are half a million of them.
"""

from collections.abc import Iterable, Mapping, Sequence

from coordinator.swarm.state import PRESENT, Member, SwarmState
from coordinator.swarm.turn import present_members
from protocol.rounds import NodeId


def cut_off_from(members: Sequence[Member]) -> Mapping[NodeId, frozenset[NodeId]]:
    """Of those that are cut off from any: from which of the others."""
    ids = frozenset(member.node_id for member in members)
    cut: dict[NodeId, set[NodeId]] = {}
    for member in members:
        told = ids.intersection(member.unreachable) - {member.node_id}
        if told:
            cut.setdefault(member.node_id, set()).update(told)
            for other in told:
                cut.setdefault(other, set()).add(member.node_id)
    return {node_id: frozenset(others) for node_id, others in cut.items()}


def best_reducers(participants: Sequence[Member]) -> list[Member]:
    """Those that are cut off from the fewest participants: all of them in a healthy swarm.

    A contribution does not get to a reducer that its node does not reach, and stays in the residual
    for as long as that lasts. Results come to it through a third node.
    """
    cut = cut_off_from(participants)
    num_cut = {m.node_id: len(cut.get(m.node_id, ())) for m in participants}
    fewest = min(num_cut.values())
    return [member for member in participants if num_cut[member.node_id] == fewest]


def newly_cut_pairs(
    before: SwarmState, after: SwarmState, changed: Iterable[NodeId]
) -> list[tuple[Member, Member]]:
    """The pairs of present members that were not cut off from each other, in the order of their ids.

    Only what the `changed` members say, and, of those that come, what is said of them, can make one.
    """
    pairs: set[tuple[NodeId, NodeId]] = set()
    for node_id in changed:
        member, was = after.members[node_id], before.members.get(node_id)
        if member.state not in PRESENT:
            continue
        told = set(member.unreachable)
        if was is None or was.state not in PRESENT:
            present = present_members(after)
            told.update(other.node_id for other in present if node_id in other.unreachable)
        else:
            told -= set(was.unreachable)
        pairs.update((min(node_id, other), max(node_id, other)) for other in told - {node_id})
    return [
        (after.members[one], after.members[other])
        for one, other in sorted(pairs)
        if _is_cut(after, one, other) and not _is_cut(before, one, other)
    ]


def _is_cut(state: SwarmState, one: NodeId, other: NodeId) -> bool:
    """Whether both are present, and one of them says that it does not reach the other."""
    member, another = state.members.get(one), state.members.get(other)
    if member is None or another is None or not {member.state, another.state} <= PRESENT:
        return False
    return other in member.unreachable or one in another.unreachable
