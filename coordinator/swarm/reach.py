"""Who reaches whom, and who should reduce when not everybody reaches everybody. Pure.

Nodes say which members they have no connection to and could not dial. A connection serves both
ways, so a pair counts as cut off as soon as one of the two says so: the other may not have noticed.
What is told is looked at once, never all pairs: a thousand members are half a million of them.

Nobody knows which of the two is at fault, and either may lie or refuse the other. So a pair costs both
sides the same weight: who lies keeps no more of the others from reducing than it weighs itself.

A helper weighs nothing and is no liar: the run owner vouches for it. So with helpers whoever cannot be
dialled dials one of them, and it reduces; no other's word keeps all of them from that.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from coordinator.swarm.state import PRESENT, Member, Say, SwarmState
from coordinator.swarm.turn import present_members
from coordinator.swarm.weighing import weight_of
from protocol.wire.rounds import NodeId

TIMES_REACHED = 2
"""Those that everybody reaches reduce alone unless the others that are cleared weigh more than so many times
as much. What nodes have done differs: of three, the one between two that cannot reach each other is not to
lose its part to the faster of them, for then the slower one's work stays with it for ever."""

KNOWN_AFTER_SECONDS = 30.0
"""Nodes tell whom they do not reach within 20 s of its coming, and by a heartbeat."""

LESS_THAN_ALL = 1 - 1e-9
"""A sum of parts that is 1 up to rounding is all."""


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


def best_reducers(
    participants: Sequence[Member], say: Say, *, new: Collection[NodeId] = ()
) -> list[Member]:
    """Those that everybody reaches, if they weigh enough; never only those whom a few liars leave over.

    A contribution does not get to a reducer that its node does not reach, and stays in the residual
    for as long as that lasts. Results come to it through a third node.

    Each member divides its weight among those that it is cut off from, by what they weigh, and takes it
    from them. Who keeps some of its own is cleared: of two parts that do not reach each other the heavier
    one, and all whom a single member accuses. Those that everybody reaches reduce alone if they weigh at
    least half of what the others weigh that are cleared, as with most swarms behind NAT. So when some
    members of weight w together say and refuse what they like, and the others reach each other, others of
    at least (1 - 3 w) / 3 of the weight reduce.

    With helpers only those reduce beside them that everybody reaches, and only where they reduced alone
    without helpers. Of helpers those reduce that most of the weight reaches. Those who are `new` reduce
    nothing beside helpers.
    """
    cut = cut_off_from(participants)
    lost = {node_id: weight_of(say, others) for node_id, others in cut.items()}
    training = [member for member in participants if not member.is_helper]
    helpers = _best_helpers([member for member in participants if member.is_helper], lost, say)
    reached = [member for member in training if not lost.get(member.node_id)]
    cleared = [
        member
        for member in training
        if lost.get(member.node_id) and _part_taken(member.node_id, cut, lost, say) < LESS_THAN_ALL
    ]
    if not reached and not cleared and not helpers:
        fewest = min(lost.get(member.node_id, 0) for member in participants)
        return [member for member in participants if lost.get(member.node_id, 0) == fewest]
    weights = (weight_of(say, (m.node_id for m in members)) for members in (reached, cleared))
    chosen = [*helpers, *reached]
    if TIMES_REACHED * next(weights) < next(weights):
        chosen = helpers or [*reached, *cleared]
    chosen_ids = {member.node_id for member in chosen}.difference(new if helpers else ())
    return [member for member in participants if member.node_id in chosen_ids]


def newcomers(members: Iterable[Member], say: Say, now: float) -> frozenset[NodeId]:
    """Of whom nobody knows yet whom they reach, or that have no confirmed work."""
    worked = say.weights if say.is_confirmed else {}
    return frozenset(
        member.node_id
        for member in members
        if not member.is_helper
        and (now - member.came_at < KNOWN_AFTER_SECONDS or not worked.get(member.node_id))
    )


def _best_helpers(helpers: Sequence[Member], lost: Mapping[NodeId, int], say: Say) -> list[Member]:
    """The helpers that fewest are cut off from, by weight; none if half of the weight is."""
    fewest = min((lost.get(member.node_id, 0) for member in helpers), default=0)
    if fewest and 2 * fewest >= weight_of(say, say.weights):
        return []
    return [member for member in helpers if lost.get(member.node_id, 0) == fewest]


def _part_taken(
    node_id: NodeId,
    cut: Mapping[NodeId, frozenset[NodeId]],
    lost: Mapping[NodeId, int],
    say: Say,
) -> float:
    """How much of a member's weight those take from it that it is cut off from; 1 is all."""
    parts = ((weight_of(say, (other,)), lost[other]) for other in sorted(cut[node_id]))
    return sum(weight / among if among else 1.0 for weight, among in parts if weight)


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


def helper_between(state: SwarmState, one: Member, other: Member) -> Member | None:
    """The first helper, by node id, that two members both reach; None for helpers themselves."""
    if one.is_helper or other.is_helper:
        return None
    for helper in present_members(state):
        if helper.is_helper and not (
            _is_cut(state, one.node_id, helper.node_id)
            or _is_cut(state, other.node_id, helper.node_id)
        ):
            return helper
    return None


def _is_cut(state: SwarmState, one: NodeId, other: NodeId) -> bool:
    """Whether both are present, and one of them says that it does not reach the other."""
    member, another = state.members.get(one), state.members.get(other)
    if member is None or another is None or not {member.state, another.state} <= PRESENT:
        return False
    return other in member.unreachable or one in another.unreachable
