"""How a coordinator starts: whom it hears before anything is decided. Pure.

Its database may be older than what nodes know, and it cannot tell. So it first hears the nodes of the
newest round that it knows of, and takes over the commits that they bring back (coordinator.swarm.learned).
Nothing is decided meanwhile: no round is closed, opened, settled or taken back, and its deadlines wait.
"""

from collections.abc import Iterable
from dataclasses import replace

from coordinator.swarm.agreement import holds_undone
from coordinator.swarm.events import Turn
from coordinator.swarm.members import BARRED, PRESENT, Member, MemberState
from coordinator.swarm.membership import give_up
from coordinator.swarm.state import (
    Awaited,
    Round,
    SwarmState,
    present_members,
    present_participants,
    training_among,
)
from protocol.wire.rounds import Assignment, NodeId, training_in

GONE_FOR_GOOD = frozenset({MemberState.LEFT}) | BARRED
"""Nobody waits for these: they have said goodbye, or the run owner bars them."""

MARGIN = 1.5
"""The next round is given so many times what the newest one took, within the longest round's time."""

RETURN_SECONDS = 30.0
"""Within so long a node that lives has attached again, whatever the lease: it tries every 16 s at least, and
looks elsewhere after 20 (node.link.session)."""


def start(turn: Turn) -> None:
    """Begins to wait for the newest round's nodes. What the database says of who is here is old."""
    state = turn.state
    if state.is_finished:  # nobody is waited for, and processes that began anew are no copies
        unheard = {n: replace(member, is_heard=False) for n, member in state.members.items()}
        turn.state = replace(state, members=unheard)
        return
    node_ids = _newest_participants(state)
    members = {node_id: _not_yet_heard(member) for node_id, member in state.members.items()}
    was = state.awaited
    state = replace(state, members=members, awaited=None, unsupplied_since=None, unfollowed=None)
    if node_ids:
        until = turn.now + longest_wait_seconds(state)
        awaited = Awaited(
            node_ids=node_ids,
            until=until,
            living_until=turn.now + max(state.rules.lease_seconds, RETURN_SECONDS),
            from_session_id=state.next_session_id,
        )
        state = replace(state, awaited=awaited)
        state = _with_deadlines_later(state, until - (turn.now if was is None else was.until))
    turn.state = state


def waits_until(state: SwarmState, awaited: Awaited) -> float:
    """When the run goes on without those who are not back.

    Once one of them is back and a round could open, the others are waited for as long as a node that falls
    silent: who lives has found the coordinator by then. Else the longest wait holds: nobody could go on, and
    those who come may be the only ones with commits that this coordinator lacks.
    """
    back = [member for member in present_members(state) if _is_back(member, awaited)]
    able = [member for member in back if not (member.is_helper or member.is_draining)]
    is_one_back = any(member.node_id in awaited.node_ids for member in back)
    if not is_one_back or len(able) < state.rules.min_nodes or bringing(state):
        return awaited.until
    return min(awaited.until, awaited.living_until)


def longest_wait_seconds(state: SwarmState) -> float:
    """How long nodes are waited for at most: the next commit comes within the longest round's time.

    The longest round is the run file's: `[deadlines] commit`. Half of it at least, and more where
    the newest round was short.
    """
    longest = state.rules.commit_seconds
    taken = max((c.seconds for c in state.recent if not c.is_void), default=0.0)
    return max(longest / 2, longest - MARGIN * taken) if taken else longest / 2


def await_participants(state: SwarmState, assignments: Iterable[Assignment]) -> SwarmState:
    """A newer round was learned: its nodes are waited for instead."""
    if state.awaited is None:
        return state
    return replace(state, awaited=replace(state.awaited, node_ids=_known(state, assignments)))


def missing(state: SwarmState) -> list[NodeId]:
    """Who of those that are waited for has not come back, in the order of their ids."""
    awaited = state.awaited
    if awaited is None:
        return []
    return [n for n in awaited.node_ids if not _is_back(state.members[n], awaited)]


def bringing(state: SwarmState) -> list[Member]:
    """Who is here and ahead: it has commits to bring back."""
    ahead = (m for m in present_members(state) if m.outer_round > state.committed_round)
    return [member for member in ahead if not holds_undone(state, member)]


def end_waiting(turn: Turn) -> None:
    """The run goes on once all are back and nobody has commits to bring, or at the time limit.

    A node that has not come back by then counts as lost, whatever its lease was in the database.
    """
    awaited = turn.state.awaited
    if awaited is None:
        return
    is_over = turn.now >= waits_until(turn.state, awaited)
    if not is_over and (missing(turn.state) or bringing(turn.state)):
        return
    turn.state = replace(
        _with_deadlines_later(turn.state, min(0.0, turn.now - awaited.until)), awaited=None
    )
    silent = [m for m in present_members(turn.state) if not _is_back(m, awaited)]
    give_up(turn, silent, reason="it has not come back since the coordinator started")
    _void_with_too_few(turn)


def _void_with_too_few(turn: Turn) -> None:
    """A round in flight commits nothing if fewer of its nodes are back than a round may open with.

    Those who are missing may have committed it, and more, after the copy was made.
    """
    current, needed = turn.state.uncommitted_round, turn.state.rules.min_nodes
    if current is None:
        return
    back = training_among(current, present_participants(turn.state, current))
    num_training = len(training_in(current.assignments))
    if len(back) < min(needed, num_training):
        why = f"only {len(back)} of its nodes came back after the coordinator started"
        turn.put_round(replace(current, cannot_commit=why, commit_deadline=turn.now))


def wait_longer(turn: Turn, seconds: float) -> None:
    """Nodes could not be heard for a while: whoever is waited for has this much time at least."""
    awaited = turn.state.awaited
    if awaited is None:
        return
    until = turn.now + seconds
    living_until = max(awaited.living_until, until + turn.state.rules.lease_seconds)
    awaited = replace(awaited, living_until=living_until)
    later = max(0.0, until - awaited.until)
    state = _with_deadlines_later(turn.state, later)
    turn.state = replace(state, awaited=replace(awaited, until=awaited.until + later))


def time_of_round(state: SwarmState, now: float) -> float:
    """The time that the deadlines of the round in flight are measured from."""
    return now if state.awaited is None else state.awaited.until


def _newest_participants(state: SwarmState) -> tuple[NodeId, ...]:
    """Those of the newest round; before there was one, all members. Not who said goodbye or is barred."""
    if state.open_round is not None:
        return _known(state, state.open_round.assignments)
    if state.last_closed is not None:
        return _known(state, state.last_closed.commit.assignments)
    return tuple(n for n, m in sorted(state.members.items()) if m.state not in GONE_FOR_GOOD)


def _known(state: SwarmState, assignments: Iterable[Assignment]) -> tuple[NodeId, ...]:
    """Who joined after the copy of a database was made is no member in it, and cannot come back."""
    members = state.members
    return tuple(
        sorted(
            a.node_id
            for a in assignments
            if a.node_id in members and members[a.node_id].state not in GONE_FOR_GOOD
        )
    )


def _not_yet_heard(member: Member) -> Member:
    """Whether it is still ready, and still the same process, shows when it says so again."""
    if member.state is not MemberState.READY:
        return replace(member, is_heard=False)
    return replace(member, state=MemberState.JOINING, is_heard=False)


def _is_back(member: Member, awaited: Awaited) -> bool:
    """Whether it was heard since the start, or has said goodbye."""
    if member.state not in PRESENT:
        return member.state in GONE_FOR_GOOD
    return member.session_id >= awaited.from_session_id or member.state is MemberState.READY


def _with_deadlines_later(state: SwarmState, seconds: float) -> SwarmState:
    """Moves what the run file gives for a round, or for its end, by so much."""
    ends = state.end_waits_until
    return replace(
        state,
        end_waits_until=None if ends is None else ends + seconds,
        open_round=None if state.open_round is None else _later(state.open_round, seconds),
    )


def _later(current: Round, seconds: float) -> Round:
    return replace(
        current,
        train_deadline=current.train_deadline + seconds,
        contribute_deadline=current.contribute_deadline + seconds,
        commit_deadline=current.commit_deadline + seconds,
        committed_at=current.committed_at + seconds,
        apply_deadline=current.apply_deadline + seconds,
        slices=tuple(
            progress
            if progress.contribute_deadline is None
            else replace(progress, contribute_deadline=progress.contribute_deadline + seconds)
            for progress in current.slices
        ),
    )
