"""When two members that do not reach each other are told to dial each other at the same time. Pure.

Both sit behind routers that let nobody in whom they have not sent something to. A member without a way to
another one sends datagrams to the coordinator, from the very socket that it would dial from. So the
coordinator knows where each router lets its member be reached. It tells both at once, and each one's first
packet opens its router for the packets of the other (Ford, Srisuresh and Kegel, "Peer-to-peer communication
across network address translators", 2005).

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
    if not member.outside:
        return
    num_told = 0
    for other_id in member.unreachable:
        other = turn.state.members.get(other_id)
        if other is None or other.state not in PRESENT or not other.outside or other_id == node_id:
            continue
        if _is_seen_from_inside(member) != _is_seen_from_inside(other):
            continue
        num_told += _tell_if_due(turn, turn.state.members[node_id], other)
        if num_told == MOST_PAIRS_AT_ONCE:
            break


def _tell_if_due(turn: Turn, member: Member, other: Member) -> bool:
    low, high = sorted((member, other), key=lambda each: each.node_id)
    between = (_host_of(low), _host_of(high))
    tries = low.punches.get(high.node_id)
    if tries is not None and tries.between != between:  # a router elsewhere may be another kind
        tries = replace(tries, between=between, num=1)
    num = 0 if tries is None else tries.num
    is_hopeless = num >= MOST_SYMMETRIC_TRIES and (is_symmetric(low) or is_symmetric(high))
    if is_hopeless or (tries is not None and turn.now < tries.latest_at + wait_after(num)):
        return False
    tried = PunchTries(between=between, num=num + 1, latest_at=turn.now)
    turn.put_member(replace(low, punches={**low.punches, high.node_id: tried}))
    for one, peer in ((low, high), (high, low)):
        asked = PunchAsked(node_id=peer.node_id, multiaddr=peer.outside[0])
        turn.act(Tell(message=asked, to=(one.node_id,)))
    return True


def wait_after(num_tries: int) -> float:
    """Seconds between the beginning of a try, the first or a later one, and the next."""
    return min(LAST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2.0 ** min(num_tries - 1, 16))


def _is_seen_from_inside(member: Member) -> bool:
    """Whether it is in the coordinator's own network: nobody elsewhere is let in where it is seen there."""
    return not ip_address(_host_of(member)).is_global


def _host_of(member: Member) -> str:
    """The address of its router, whose ports may change."""
    return member.outside[0].split("/")[2]


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
