"""Who is in the swarm: sessions and leases. Which state members hold stands in agreement.py."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from itertools import chain, count

from coordinator.swarm.agreement import judge, note_outer_state, without
from coordinator.swarm.books import note_wire
from coordinator.swarm.events import (
    Attached,
    Detached,
    EndSession,
    HeartbeatSeen,
    OpenSession,
    SendRoster,
    StreamBroken,
    Tell,
    Turn,
    Woke,
)
from coordinator.swarm.members import BARRED, PRESENT, Condition, Member, MemberState
from coordinator.swarm.reach import punch
from coordinator.swarm.state import (
    KEPT_ROUNDS,
    RoundPhase,
    SwarmState,
    members_of,
    others_in,
    present_members,
)
from protocol.errors import (
    CopyAttachedError,
    HeldBackError,
    ProtocolMismatchError,
    SessionEndedError,
)
from protocol.trust.rulings import refuse_barred
from protocol.wire.messages import Applied, ParticipantsDeparted
from protocol.wire.payload import WireTotals
from protocol.wire.rounds import NodeId, RosterEntry, same_fields
from protocol.wire.versions import MERGE
from protocol.wire.vitals import LinkRates

HEARTBEATS_PER_LEASE = 5
"""A node is lost only when so many heartbeats in a row are."""

KEPT = (
    *("committed_tokens", "rates", "work", "screenings", "against", "standing", "audits", "spots"),
    "evaluates_by",  # until its next heartbeat tells
)
"""What stays of a member, whichever of its processes attaches."""

ANNOUNCED = frozenset(each.name for each in fields(Attached)) & {e.name for e in fields(Member)}
"""What a member is by its latest announcement."""

MOST_NAMED = 4
"""In a sentence about members of one invite."""


def roster_of(state: SwarmState) -> tuple[RosterEntry, ...]:
    """The present members as their peers need to know them, in the order of their ids."""
    return tuple(
        RosterEntry(
            node_id=m.node_id, node_name=m.node_name, address=m.address, process_id=m.process_id
        )
        for m in present_members(state)
    )


def require_session(state: SwarmState, node_id: NodeId, session_id: int) -> Member:
    """The member that the session speaks for; raises SessionEndedError when it is not current.

    Reports carry no session into the core, so the edge calls this before it makes them events.
    """
    member = state.members.get(node_id)
    if member is None:
        raise SessionEndedError(f"node {node_id} has no session here", next_step="attach again")
    if session_id != member.session_id:
        raise SessionEndedError(
            f"session {session_id} of {member.node_name} has ended: "
            f"its session is {member.session_id} now",
            next_step="attach again",
        )
    if member.state not in PRESENT:
        raise SessionEndedError(
            f"session {session_id} of {member.node_name} has ended: the node is {member.state}",
            next_step="attach again",
        )
    return member


def attach(turn: Turn, event: Attached) -> None:
    """Opens a session.

    Raises ProtocolMismatchError when the node works on something else, CopyAttachedError while another
    process with its key is attached, and HeldBackError while as many are here as its invite lets in.
    """
    refuse_barred(turn.state.latest_rulings.get(event.node_id))  # ruled since the edge let it in
    _refuse_strangers(turn.state, event)
    _refuse_copies(turn, event)
    _refuse_beyond_invite(turn.state, event)
    state = turn.state
    before = state.members.get(event.node_id)
    is_same_process = before is not None and before.process_id == event.process_id
    session_id = state.next_session_id
    turn.state = replace(state, next_session_id=session_id + 1)
    told = {name: getattr(event, name) for name in ANNOUNCED}
    kept = {name: getattr(before, name) for name in KEPT} if before else {}
    turn.put_member(
        Member(
            **told | kept | {"node_name": _distinct_name(state, event)},
            asked_name=event.node_name,
            state=MemberState.JOINING,
            session_id=session_id,
            lease_until=turn.now + turn.state.rules.lease_seconds,
            inner_steps_per_second=_speed_before(before, event),
            wire_told=_wire_told_before(before, event),
            is_own=event.invite_id in state.own_invites,
            came_at=before.came_at if before and is_same_process else turn.now,
        )
    )
    if before is not None and not is_same_process:
        _forget_what_it_held(turn, event.node_id)
    turn.act(OpenSession(node_id=event.node_id, session_id=session_id))
    turn.act(SendRoster())
    judge(turn, event.node_id, is_news=True)


def heartbeat(turn: Turn, event: HeartbeatSeen) -> None:
    """Renews the lease, and takes note of the outer state. Raises SessionEndedError."""
    member = require_session(turn.state, event.node_id, event.session_id)
    lease_until = turn.now + turn.state.rules.lease_seconds
    told = same_fields(event, Condition) | {
        "carry_bytes_per_second": steadied_carriage(
            member.carry_bytes_per_second, event.carry_bytes_per_second
        )
    }
    turn.put_member(
        replace(
            member,
            lease_until=lease_until,
            is_heard=True,
            rates=steadied(member.rates, event.rates),
            outside=event.outside,
            **told,
        )
    )
    punch(turn, event.node_id)
    note_outer_state(
        turn, event.node_id, event.outer_round, event.outer_digest, event.outer_incarnation
    )


STICKY = 0.25
"""A rate that is told counts only when it differs from the one in use by more than this: slices
stay with their reducers, who keep their rounding errors there."""

SLOWEST, FASTEST = 1e2, 1e12
"""Bytes per second. What lies outside is a broken clock or a lie, and no measurement."""


def steadied(before: LinkRates, told: LinkRates) -> LinkRates:
    """The rates to go by after a node told some: those before, as long as little has changed."""
    return LinkRates(
        up_bytes_per_second=steadied_rate(before.up_bytes_per_second, told.up_bytes_per_second),
        down_bytes_per_second=steadied_rate(
            before.down_bytes_per_second, told.down_bytes_per_second
        ),
    )


def steadied_rate(before: float | None, told: float | None) -> float | None:
    """One of them, in bytes a second."""
    if told is None or not (math.isfinite(told) and SLOWEST <= told <= FASTEST):
        return before
    if before is not None and abs(told - before) <= STICKY * before:
        return before
    return told


def steadied_carriage(before: float, told: float) -> float:
    """What to count on of what a member may carry, in bytes a second; 0: it carries nothing."""
    if not SLOWEST <= told <= FASTEST:
        return 0.0
    return steadied_rate(before or None, told) or 0.0


def stream_broken(turn: Turn, event: StreamBroken) -> None:
    """Gives a member whose stream broke only until its next heartbeat is due.

    The kernel ends a dead process's connections at once, long before its lease is over. One that
    lives attaches anew, or goes on with its heartbeats. Until then another process may take its place.
    A stream that may have broken by our own fault does the latter alone.
    """
    member = turn.state.members.get(event.node_id)
    if member is None or member.session_id != event.session_id or member.state not in PRESENT:
        return
    lease_until = turn.now + turn.state.rules.lease_seconds / HEARTBEATS_PER_LEASE
    if event.may_be_ours:
        lease_until = member.lease_until
    turn.put_member(
        replace(member, lease_until=min(member.lease_until, lease_until), is_heard=False)
    )


def applied(turn: Turn, node_id: NodeId, round: int, report: Applied) -> None:
    """Takes note of the outer state. A round that is not committed yet cannot have been applied."""
    member = turn.state.members.get(node_id)
    if member and member.state in PRESENT and round <= turn.state.committed_round:
        note_wire(turn, node_id, round, report.wire)
        note_outer_state(turn, node_id, round, report.outer_digest, report.incarnation)


def drain(turn: Turn, node_id: NodeId) -> None:
    """A present member leaves after this round: others reduce for it, and no plan counts on it."""
    member = turn.state.members.get(node_id)
    if member and member.state in PRESENT:
        turn.put_member(replace(member, is_draining=True))


def detach(turn: Turn, event: Detached) -> None:
    """Ends the member's session at its own wish. Raises SessionEndedError."""
    member = require_session(turn.state, event.node_id, event.session_id)
    turn.put_member(_gone(turn, member, MemberState.LEFT))
    turn.act(EndSession(node_id=event.node_id, reason=event.reason or "left"))
    _announce_departed(turn, (event.node_id,))


def expire_leases(turn: Turn) -> None:
    """Gives up members that were silent for as long as their lease."""
    if not members_of(turn.state).is_lease_over(turn.now):
        return
    silent = [m for m in present_members(turn.state) if m.lease_until <= turn.now]
    cut_off = [member for member in silent if not member.is_heard]
    give_up(turn, cut_off, reason="its connection ended, and it has not come back")
    still = [member for member in silent if member.is_heard]
    give_up(turn, still, reason=f"silent for {turn.state.rules.lease_seconds:g} s")


def give_up(turn: Turn, members: Sequence[Member], *, reason: str) -> None:
    """Ends the sessions of present members that are not heard any more."""
    for member in members:
        turn.put_member(_gone(turn, member, MemberState.LOST))
        turn.act(EndSession(node_id=member.node_id, reason=reason))
    if members:
        _announce_departed(turn, tuple(m.node_id for m in members))


def bar(turn: Turn, node_id: NodeId, how: MemberState, *, reason: str) -> None:
    """Ends a member's session for as long as the run owner says: peers refuse its calls from now on.

    The round in flight goes on without it. One that is gone already is only called otherwise.
    """
    member = turn.state.members.get(node_id)
    if member is None:
        return
    was_present = member.state in PRESENT
    turn.put_member(_gone(turn, member, how))
    if was_present:
        turn.act(EndSession(node_id=node_id, reason=reason))
        _announce_departed(turn, (node_id,))


def unbar(turn: Turn, node_id: NodeId) -> None:
    """A member that was barred may attach again."""
    member = turn.state.members.get(node_id)
    if member is not None and member.state in BARRED:
        turn.put_member(replace(member, state=MemberState.LEFT))


def _gone(turn: Turn, member: Member, how: MemberState) -> Member:
    return replace(member, state=how, gone_at_round=turn.state.committed_round)


def own(turn: Turn, invite_id: str) -> None:
    """Who joined by that invite is the run owner's own from now on."""
    for member in list(turn.state.members.values()):
        if member.invite_id == invite_id:
            turn.put_member(replace(member, is_own=True))


def forget_long_gone(turn: Turn) -> None:
    """Forgets members that were gone for as many rounds as commits are kept whole.

    What they owed no commit can settle any more, and no commit that is kept names them. Their keys
    stay signed and enrolled: one that comes back attaches as one that was never here. For each that is
    in the round in flight, or has samples leased ahead, this waits.
    """
    state = turn.state
    members = members_of(state)
    oldest = state.committed_round - KEPT_ROUNDS
    if oldest <= 0 or len(members.ids) == len(members.present_ids):
        return
    assignments = () if state.open_round is None else state.open_round.assignments
    named = {assignment.node_id for assignment in (*assignments, *state.ledger.ahead)}
    kept = {
        node_id: member
        for node_id, member in members.items()
        if member.state in PRESENT
        or max(member.gone_at_round, member.outer_round) >= oldest
        or node_id in named
    }
    if len(kept) < len(members):
        turn.state = replace(state, members=kept)


def renew_leases(turn: Turn, event: Woke) -> None:
    """Gives present members as long as after a restart: they may be in their longest pause.

    Which of them has been started again meanwhile nobody could hear.
    """
    until = turn.now + turn.state.rules.lease_seconds + event.pause_seconds
    for member in present_members(turn.state):
        lease_until = max(member.lease_until, until)
        turn.put_member(replace(member, lease_until=lease_until, is_heard=False))


def _refuse_strangers(state: SwarmState, event: Attached) -> None:
    """Raises unless the node trains this run, this model, and has a state that can be of it."""
    if event.run_digest != state.run_digest:
        raise ProtocolMismatchError(
            f"{event.node_name} was refused: it works by run {event.run_digest.hex()[:8]} "
            f"and the coordinator by run {state.run_digest.hex()[:8]}",
            next_step="run 'atoll node start' again, which fetches the coordinator's run file",
        )
    layout, codecs = state.rules.layout, state.rules.codecs
    if event.layout != layout:
        raise _of_another_version(
            event,
            f"cuts the model by layout {event.layout.digest.hex()[:8]} "
            f"and the run by {layout.digest.hex()[:8]}",
        )
    if event.codecs != codecs:
        told = " and ".join(event.codecs) or "no codecs"
        raise _of_another_version(event, f"has {told} where the run has {' and '.join(codecs)}")
    if (merges := event.merge_version or 1) != MERGE:
        raise _of_another_version(
            event, f"merges by version {merges} of the arithmetic and the coordinator by {MERGE}"
        )


def _of_another_version(event: Attached, why: str) -> ProtocolMismatchError:
    return ProtocolMismatchError(
        f"{event.node_name} was refused: it {why}",
        next_step="install the coordinator's version of Atoll: 'atoll --version'",
    )


def _refuse_copies(turn: Turn, event: Attached) -> None:
    """Raises while another process with the node's key is heard: two would end each other's sessions.

    A process that was ended is not: the kernel breaks its stream at once, and after a power cut its
    lease runs out.
    """
    member = turn.state.members.get(event.node_id)
    if (
        member is None
        or member.state not in PRESENT
        or member.process_id == event.process_id
        or not member.is_heard
        or member.lease_until <= turn.now
    ):
        return
    raise CopyAttachedError(
        f"another process with the key of {member.node_name} is attached, so this one waits until "
        "that one is gone",
        next_step=CopyAttachedError.NEXT_STEP,
    )


def members_by(state: SwarmState, invite_id: str) -> list[Member]:
    """Those present that joined with an invite."""
    return [m for m in present_members(state) if m.invite_id == invite_id]


def _refuse_beyond_invite(state: SwarmState, event: Attached) -> None:
    most = state.invite_limits.get(event.invite_id)
    here = sorted(
        m.node_name for m in members_by(state, event.invite_id) if m.node_id != event.node_id
    )
    if most is None or len(here) < most:
        return
    named = ", ".join(here[:MOST_NAMED]) + (", …" if len(here) > MOST_NAMED else "")
    raise HeldBackError(
        f"invite {event.invite_id} lets {most} of its nodes take part at once, and so many are here: {named}",
        next_step="it goes on when one of them leaves; the run owner lets in more by "
        f"'atoll invite limit {event.invite_id} --max-nodes {most + 1}'",
    )


def _distinct_name(state: SwarmState, event: Attached) -> str:
    """What the node is called: its own name, with a number behind it where another member has it.

    The one that it was given stays its own for as long as it asks for the same.
    """
    others = {m.node_name for m in state.members.values() if m.node_id != event.node_id}
    before = state.members.get(event.node_id)
    was = before.node_name if before and before.asked_name == event.node_name else event.node_name
    numbered = (f"{event.node_name}-{number}" for number in count(2))
    return next(name for name in chain((was, event.node_name), numbered) if name not in others)


def _speed_before(before: Member | None, event: Attached) -> float | None:
    """What was measured of the node, unless it trains on something else now."""
    if before is None or (before.device, before.num_ranks) != (event.device, event.num_ranks):
        return None
    return before.inner_steps_per_second


def _wire_told_before(before: Member | None, event: Attached) -> WireTotals:
    """What the node's process has told of its bytes; another process counts from zero."""
    if before is None or before.process_id != event.process_id:
        return {}
    return before.wire_told


def _forget_what_it_held(turn: Turn, node_id: NodeId) -> None:
    """Held results and contributions live in a process's memory, and this node has a new one.

    It stays a participant, but what it was sent to reduce is gone.
    """
    current = turn.state.open_round
    if current is None:
        return
    slices = tuple(
        replace(progress, is_orphaned=progress.is_orphaned or progress.slice.reducer_id == node_id)
        for progress in current.slices
    )
    turn.put_round(
        replace(
            current,
            slices=slices,
            held=without(current.held, node_id),
            agreements=without(current.agreements, node_id),
            applied=without(current.applied, node_id),
        )
    )


def _announce_departed(turn: Turn, node_ids: Iterable[NodeId]) -> None:
    """Tells everyone who is still here, and the round's participants whom not to wait for."""
    turn.act(SendRoster())
    current = turn.state.open_round
    if current is None:
        return
    is_applying = current.phase is RoundPhase.APPLYING
    participants = {a.node_id for a in current.assignments}
    gone = tuple(sorted(participants.intersection(node_ids)))
    if gone or is_applying:  # whoever waited for them did so until now
        turn.put_round(replace(current, gone_at=turn.now))
    if gone and not is_applying:
        departed = ParticipantsDeparted(round=current.number, node_ids=gone)
        turn.act(Tell(message=departed, to=others_in(current, gone)))
