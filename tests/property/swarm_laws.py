"""What must hold of members, leases and deadlines after every step of the core, whatever the world."""

from typing import TYPE_CHECKING

from coordinator.swarm.events import Event, HeartbeatSeen, Reported, StreamBroken, Ticked, Woke
from coordinator.swarm.members import PRESENT, Member
from coordinator.swarm.membership import HEARTBEATS_PER_LEASE
from coordinator.swarm.state import SwarmState, members_of
from coordinator.swarm.transition import next_deadline, step
from protocol.wire.messages import Draining

if TYPE_CHECKING:
    from protocol.wire.rounds import NodeId


class MembersStay:
    """No step changes the members of the state that it began with; no two have one name."""

    def __init__(self) -> None:
        self._before: tuple[object, dict[NodeId, Member]] | None = None

    def check(self, before: SwarmState, after: SwarmState, now: float) -> None:
        """What is known of all members is so, and those of the state before are as they were."""
        if self._before is not None and self._before[0] is before.members:
            assert self._before[1] == before.members, "changed in place"
        self._before = before.members, dict(before.members)
        known, plain = members_of(after), dict(after.members)
        assert known.ids == tuple(sorted(plain))
        assert known.present_ids == tuple(n for n in sorted(plain) if plain[n].state in PRESENT)
        assert len({member.node_name for member in plain.values()}) == len(plain)
        ends = [member.lease_until for member in plain.values() if member.state in PRESENT]
        for at in (now, *ends):  # asked of another each time, for asking makes it know better
            asked = known.with_member(next(iter(plain.values()))) if plain else known
            assert asked.is_lease_over(at) == any(end <= at for end in ends)


def check_leases(before: SwarmState, event: Event, after: SwarmState, now: float) -> None:
    """A broken stream leaves one heartbeat's time, and a coordinator that slept a whole lease."""
    lease_seconds = after.rules.lease_seconds
    match event:
        case StreamBroken() if after.members[event.node_id].state in PRESENT:
            member = after.members[event.node_id]
            was = before.members[event.node_id].lease_until
            if member.session_id == event.session_id:
                due = now + lease_seconds / HEARTBEATS_PER_LEASE
                assert member.lease_until == min(was, due)
        case Woke():
            until = now + lease_seconds + event.pause_seconds
            for node_id, member in before.members.items():
                is_awaited = before.awaited is not None  # who is not back has no session yet
                if member.state in PRESENT and not is_awaited:
                    renewed = after.members[node_id]
                    assert renewed.state in PRESENT and renewed.lease_until >= until
        case Reported(report=Draining()):
            member = after.members[event.node_id]
            assert member.is_draining or member.state not in PRESENT
        case _:
            pass


def check_deadline(before: SwarmState, event: Event, after: SwarmState, now: float) -> None:
    """Before its deadline a tick changes nothing; at it something happens, so nobody spins.

    A heartbeat that only renews a lease does not have this tried: the tick after it does.
    """
    deadline = next_deadline(after)
    if isinstance(event, HeartbeatSeen) and (
        before.open_round is after.open_round and before.evaluating is after.evaluating
    ):
        assert deadline is None or deadline > now
        return
    if deadline is None:
        later = step(after, Ticked(), now + 1e6)
        assert (later.state, later.actions) == (after, ())
        return
    assert deadline > now
    early = step(after, Ticked(), (now + deadline) / 2)
    assert (early.state, early.actions) == (after, ())
    due = step(after, Ticked(), deadline)
    assert due.state != after
    following = next_deadline(due.state)
    assert following is None or following > deadline
