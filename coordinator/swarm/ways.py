"""Who carries what two participants of a round exchange that do not reach each other. Pure.

A member that everybody reaches reduces alone where it has the weight for that (coordinator.swarm.reach): its
link then carries less than if it passed on what others reduce. Elsewhere reducers are cut off from some of
those that contribute to them, and what these train would stay out for ever. Then a member that both of a pair
reach carries for the two: the one that is done soonest by what owners allow and what links were measured to
carry.

A carrier sees times and sizes. What it does not deliver, another one carries in the next round.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from heapq import nsmallest

from coordinator.swarm.reach import cut_off_from
from coordinator.swarm.shares import FASTEST, SLOWEST, Rates, steadied
from coordinator.swarm.state import Member
from protocol.wire.rounds import NodeId, Slice, Way

Pair = tuple[NodeId, NodeId]
"""Two members, in the order of their ids."""

MOST_WAYS = 256
"""In a plan, those with most to exchange: each is a hundred bytes to everybody."""

MOST_CARRIERS = 2
"""Of a pair: the second one carries when the first is gone in mid-round."""

MOST_NAMED = 4
"""Carriers in a plan's reason; of more the number."""

FASTER_BY = 2.0
"""A carrier that works is left for another that would be done so many times sooner."""


def steadied_carriage(before: float, told: float) -> float:
    """What to count on of what a member may carry, in bytes a second; 0: it carries nothing."""
    if not SLOWEST <= told <= FASTEST:
        return 0.0
    return steadied(Rates(up=before or None), Rates(up=told)).up or 0.0


def ways_between(
    members: Sequence[Member], slices: Iterable[Slice], last: Sequence[Way] = ()
) -> tuple[Way, ...]:
    """A way for each pair that is cut off, where one of the two reduces and some participant reaches both.

    By the `last` plan's ways it is known who was asked to carry: if neither of the pair says that it does, it
    is asked again only where nobody else is left.
    """
    by_id = {member.node_id: member for member in members}
    cut = cut_off_from(members)
    carriers = [member for member in members if member.carry_bytes_per_second]
    failed = {_pair(way.one, way.other): way.through[:1] for way in last}
    seconds: defaultdict[NodeId, float] = defaultdict(float)
    ways: dict[Pair, Way] = {}
    for pair, num_elements in _loads(by_id, cut, slices)[:MOST_WAYS]:
        one, other = (by_id[node_id] for node_id in pair)
        working = {one.through.get(pair[1]), other.through.get(pair[0])}

        def cost(carrier: Member) -> tuple[bool, float, NodeId]:
            took = seconds[carrier.node_id] + num_elements / carrier.carry_bytes_per_second  # noqa: B023
            is_working = carrier.node_id in working  # noqa: B023
            has_failed = not is_working and carrier.node_id in failed.get(pair, ())  # noqa: B023
            return has_failed, took / FASTER_BY if is_working else took, carrier.node_id

        apart = cut[pair[0]] | cut[pair[1]] | {*pair}
        able = (carrier for carrier in carriers if carrier.node_id not in apart)
        best = nsmallest(MOST_CARRIERS, able, key=cost)
        if best:
            ways[pair] = Way(one=pair[0], other=pair[1], through=tuple(c.node_id for c in best))
            seconds[best[0].node_id] += num_elements / best[0].carry_bytes_per_second
    return tuple(ways[pair] for pair in sorted(ways))


def _loads(
    members: Mapping[NodeId, Member],
    cut: Mapping[NodeId, frozenset[NodeId]],
    slices: Iterable[Slice],
) -> list[tuple[Pair, int]]:
    """What pairs exchange that are cut off: elements of contributions and results, the largest first."""
    reduced: Counter[NodeId] = Counter()
    for part in slices:
        reduced[part.reducer_id] += part.num_elements
    loads: Counter[Pair] = Counter()
    for reducer_id, num_elements in reduced.items():
        for other in cut.get(reducer_id, ()):
            contributes = not members[other].is_helper
            loads[_pair(reducer_id, other)] += num_elements * (1 + contributes)
    return sorted(loads.items(), key=lambda pair_and_load: (-pair_and_load[1], pair_and_load[0]))


def _pair(one: NodeId, other: NodeId) -> Pair:
    return min(one, other), max(one, other)


def ways_in_words(members: Sequence[Member], slices: Iterable[Slice], ways: Sequence[Way]) -> str:
    """What the plan's reason adds; empty where all that exchange reach each other."""
    names = {member.node_id: member.node_name for member in members}
    carried = Counter(names[way.through[0]] for way in ways)
    words = [
        f"{name} carries for {num} {'pair' if num == 1 else 'pairs'}"
        for name, num in sorted(carried.items())
    ]
    if len(carried) > MOST_NAMED:
        words = [f"{len(carried)} members carry for {len(ways)} pairs"]
    num_apart = len(_loads({m.node_id: m for m in members}, cut_off_from(members), slices)) - len(
        ways
    )
    if num_apart:
        pairs = "1 pair does" if num_apart == 1 else f"{num_apart} pairs do"
        words.append(f"{pairs} not reach each other, and nobody carries for them")
    return "; " + ", ".join(words) if words else ""
