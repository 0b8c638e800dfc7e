"""When two members that do not reach each other are told to dial each other at the same time. Pure.

Both sit behind routers that let nobody in whom they have not sent something to. A member without a way to
another one sends datagrams to the coordinator, from the very socket that it would dial from. So the
coordinator knows where each router lets its member be reached. It tells both at once, and each one's first
packet opens its router for the packets of the other (Ford, Srisuresh and Kegel, "Peer-to-peer communication
across network address translators", 2005).

By IPv6 nothing is translated, and firewalls let in what answers: a member itself says where it is. That way
is tried first, and in turns with the other one where there are both.

A router that gives a port for each place it sends to (symmetric) shows each looker another one. What is seen
of it is not where another member could be let in, unless the other router lets in everybody: such a pair is
tried a few times, and then left to helpers.
"""

from dataclasses import replace
from ipaddress import ip_address

from coordinator.swarm.events import Tell
from coordinator.swarm.members import PRESENT, Member, PunchTries
from coordinator.swarm.turn import Turn, is_present
from protocol.wire.messages import PunchAsked
from protocol.wire.rounds import NodeId

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
        ways = [way for way in ways if _is_by_ipv6(way[0])]
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

    Who is seen in the coordinator's own network is not let in there from elsewhere.
    """
    first, second = ip_address(one), ip_address(other)
    if first.is_global or second.is_global:
        return first.is_global and second.is_global
    # One site's addresses of IPv6 have 48 bits in common (RFC 4193).
    return first.version == 4 or first.packed[:6] == second.packed[:6]


def _host_in(multiaddr: str) -> str:
    """The address in it, of a router or of the machine itself; ports may change."""
    return multiaddr.split("/")[2]


def _is_by_ipv6(multiaddr: str) -> bool:
    return multiaddr.startswith("/ip6/")


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
