"""Who reaches whom; who reduces, carries and dials anew when not everybody reaches everybody. Pure.

Nodes say which members they have no connection to and could not dial. A connection serves both
ways, so a pair counts as cut off as soon as one of the two says so: the other may not have noticed.
What is told is looked at once, never all pairs: a thousand members are half a million of them.

Nobody knows which of the two is at fault, and either may lie or refuse the other. So a pair costs both
sides the same weight: who lies keeps no more of the others from reducing than it weighs itself.

A helper weighs nothing and is no liar: the run owner vouches for it. So with helpers whoever cannot be
dialled dials one of them, and it reduces; no other's word keeps all of them from that.

A member that everybody reaches reduces alone where it has the weight for that: its link then carries less
than if it passed on what others reduce. Elsewhere reducers are cut off from some of those that contribute to
them, and what these train would stay out for ever. Then a member that both of a pair reach carries for the
two: the one that is done soonest by what owners allow and what links were measured to carry. A carrier sees
times and sizes. What it does not deliver, another one carries in the next round.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from heapq import nsmallest
from ipaddress import ip_address

from coordinator.swarm.events import Tell, Turn
from coordinator.swarm.members import PRESENT, Member, PunchTries
from coordinator.swarm.state import Say, SwarmState, is_present, present_members
from coordinator.swarm.weighing import weight_of
from protocol.wire.messages import PunchAsked
from protocol.wire.rounds import NodeId, Slice, Way

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
    if TIMES_REACHED * next(weights) < next(weights) or not chosen:
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

    def cost(pair: Pair, num_elements: int, carrier: Member) -> tuple[bool, float, NodeId]:
        one, other = pair
        working = by_id[one].through.get(other), by_id[other].through.get(one)
        took = seconds[carrier.node_id] + num_elements / carrier.carry_bytes_per_second
        is_working = carrier.node_id in working
        has_failed = not is_working and carrier.node_id in failed.get(pair, ())
        return has_failed, took / FASTER_BY if is_working else took, carrier.node_id

    for pair, num_elements in _loads(by_id, cut, slices)[:MOST_WAYS]:
        apart = cut[pair[0]] | cut[pair[1]] | {*pair}
        able = (carrier for carrier in carriers if carrier.node_id not in apart)
        best = nsmallest(MOST_CARRIERS, able, key=partial(cost, pair, num_elements))
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


# When two members that do not reach each other are told to dial each other at the same time.
#
# Both sit behind routers that let nobody in whom they have not sent something to. A member without a way to
# another one sends datagrams to the coordinator, from the very socket that it would dial from. So the
# coordinator knows where each router lets its member be reached. It tells both at once, and each one's first
# packet opens its router for the packets of the other (Ford, Srisuresh and Kegel, "Peer-to-peer communication
# across network address translators", 2005).
#
# By IPv6 nothing is translated, and firewalls let in what answers: a member itself says where it is. That way
# is tried first, and in turns with the other one where there are both.
#
# A router that gives a port for each place it sends to (symmetric) shows each looker another one. What is
# seen of it is not where another member could be let in, unless the other router lets in everybody: such a
# pair is tried a few times, and then left to helpers.


FIRST_WAIT_SECONDS = 15.0
"""Until a pair is tried a second time. A try takes 5 s, and libp2p leaves an address that failed alone for
5 s more, later for longer: each wait is longer than that."""

LAST_WAIT_SECONDS = 600.0

MOST_SYMMETRIC_TRIES = 3

MOST_PAIRS_AT_ONCE = 8
"""That one heartbeat can set off: a member that reaches nobody is not to dial hundreds at once."""


def is_symmetric(member: Member) -> bool:
    """Whether its router gives it another port for each that it sends to."""
    return len(set(member.outside)) > 1


def punch(turn: Turn, node_id: NodeId) -> None:
    """Has a member and those that it says it does not reach dial each other, those that are due."""
    _forget_those_that_reach(turn, node_id)
    member = turn.state.members[node_id]
    if not _has_place(member):
        return
    num_told = 0
    for other_id in member.unreachable:
        other = turn.state.members.get(other_id)
        if other is None or other.state not in PRESENT or other_id == node_id:
            continue
        if not _has_place(other):
            continue
        num_told += _tell_if_due(turn, turn.state.members[node_id], other)
        if num_told == MOST_PAIRS_AT_ONCE:
            break


def _tell_if_due(turn: Turn, member: Member, other: Member) -> bool:
    low, high = sorted((member, other), key=lambda each: each.node_id)
    ways = _ways_between(low, high)
    between = tuple(_host_in(place) for way in ways for place in way)
    tries = low.punches.get(high.node_id)
    if tries is not None and tries.between != between:  # a router elsewhere may be another kind
        tries = replace(tries, between=between, num=1)
    num = 0 if tries is None else tries.num
    if num >= MOST_SYMMETRIC_TRIES and (is_symmetric(low) or is_symmetric(high)):
        ways = [way for way in ways if way[0].startswith("/ip6/")]
    if not ways or (tries is not None and turn.now < tries.latest_at + wait_after(num)):
        return False
    tried = PunchTries(between=between, num=num + 1, latest_at=turn.now)
    turn.put_member(replace(low, punches={**low.punches, high.node_id: tried}))
    of_low, of_high = ways[num % len(ways)]
    for one, peer, place in ((low, high, of_high), (high, low, of_low)):
        asked = PunchAsked(node_id=peer.node_id, multiaddr=place)
        turn.act(Tell(message=asked, to=(one.node_id,)))
    return True


def _has_place(member: Member) -> bool:
    return bool(member.outside or member.outside_by_ipv6)


def _ways_between(low: Member, high: Member) -> list[tuple[str, str]]:
    """Multiaddresses of both by which they may let each other in, the likeliest first."""
    ways = []
    if low.outside_by_ipv6 and high.outside_by_ipv6:
        ways.append((low.outside_by_ipv6, high.outside_by_ipv6))
    if low.outside and high.outside:
        ways.append((low.outside[0], high.outside[0]))
    return [way for way in ways if _is_one_network(*map(_host_in, way))]


def wait_after(num_tries: int) -> float:
    """Seconds between the beginning of a try, the first or a later one, and the next."""
    return min(LAST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2.0 ** min(num_tries - 1, 16))


def _is_one_network(one: str, other: str) -> bool:
    """Whether both are in the internet, or in one network that is not.

    A member that is seen in the coordinator's own network is not let in there from elsewhere.
    """
    first, second = ip_address(one), ip_address(other)
    if first.is_global or second.is_global:
        return first.is_global and second.is_global
    # One site's addresses of IPv6 have 48 bits in common (RFC 4193).
    return first.version == 4 or first.packed[:6] == second.packed[:6]


def _host_in(multiaddr: str) -> str:
    """The address in it, of a router or of the machine itself; ports may change."""
    return multiaddr.split("/")[2]


def _forget_those_that_reach(turn: Turn, node_id: NodeId) -> None:
    """A pair that has come to reach each other is tried at once when it does not any more."""
    member = turn.state.members[node_id]
    told = frozenset(member.unreachable)  # a thousand may be
    kept = {
        other: tries
        for other, tries in member.punches.items()
        if is_present(turn.state, other)
        and (other in told or node_id in turn.state.members[other].unreachable)
    }
    if len(kept) != len(member.punches):
        turn.put_member(replace(member, punches=kept))
