"""A round from its plan to its end: what commits, and what settles it. Pure."""

from dataclasses import replace

from coordinator.swarm import spot_checks
from coordinator.swarm.agreement import agree_on
from coordinator.swarm.audit import audits_in_words, draw, draw_what_leads_elsewhere, pending_audits
from coordinator.swarm.books import book
from coordinator.swarm.bounds import bounded, norms_after, stride_of
from coordinator.swarm.deadlines import times_at_commit, times_when_applied
from coordinator.swarm.events import Tell, Turn
from coordinator.swarm.members import MemberState
from coordinator.swarm.penalties import contradict, note_contradicted, rest_of_void
from coordinator.swarm.reports import errors_after, forget_errors
from coordinator.swarm.retraction import retract_lost
from coordinator.swarm.standing import await_returning, note_appliers, note_parts
from coordinator.swarm.state import (
    ClosedRound,
    Round,
    RoundPhase,
    SliceProgress,
    SwarmState,
    available_members,
    awaited_participants,
    is_present,
    members_of,
    name_of,
    present_participants,
    ready_members,
    trimmed,
)
from coordinator.swarm.weighing import (
    deciders,
    heaviest,
    held_in_words,
    holders_of,
    is_enough,
    is_held_by_enough,
    refusers_of,
    say_of,
    unchecked,
    votes_of,
)
from protocol.wire.messages import RoundCommitted
from protocol.wire.rounds import (
    Commit,
    Contributor,
    Digest,
    NodeId,
    Plan,
    Planned,
    Result,
    SliceOutcome,
    same_fields,
)


def plan_of(current: Round, now: float) -> Plan:
    """The round's plan with what remains of its durations: who reconnects gets no extra time."""
    return Plan(
        **same_fields(current, Planned),
        round=current.number,
        slices=tuple(progress.slice for progress in current.slices),
        train_seconds=max(0.0, current.train_deadline - now),
        contribute_seconds=max(0.0, current.contribute_deadline - now),
        commit_seconds=max(0.0, current.commit_deadline - now),
        votes=votes_of(current.say, [a.node_id for a in current.assignments]),
    )


# What commits


def close_round(turn: Turn) -> None:
    """Commits the round once every slice is decided, or at its deadline."""
    state = turn.state
    current = state.uncommitted_round
    if current is None:
        return
    is_late = turn.now >= current.commit_deadline
    if not is_late and (undecided := _first_undecided(state, current)) is not None:
        turn.put_round(replace(current, undecided=undecided))
        return
    plan = plan_of(current, current.opened_at)
    stride = stride_of(state.rules, plan, current.trained)
    commit = _commit_of(state, current, stride, is_late=is_late)
    reasons = (_closing_reason(commit, is_late=is_late), audits_in_words(state))
    closed = ClosedRound(
        plan=plan,
        commit=commit,
        trained=current.trained,
        tokens=sum(commit.tokens.values()),
        seconds=turn.now - current.opened_at,
        reason="; ".join(filter(None, reasons)),
    )
    if state.errors_incarnation != state.incarnation:
        state = forget_errors(state)
    turn.state = replace(
        book(state, commit),
        committed_round=current.number,
        outer_digest=None,
        phase_times=times_at_commit(state, current, turn.now),
        open_round=replace(
            current,
            phase=RoundPhase.APPLYING,
            commit=commit,
            committed_at=turn.now,
            apply_deadline=turn.now + (current.apply_seconds or state.rules.apply_seconds),
            later_session_id=state.next_session_id,
        ),
        recent=trimmed((*state.recent, closed)),
        earlier=state.recent,
        norms=norms_after(state.norms, commit, stride),
        errors=errors_after(state, current, commit),
        audits=pending_audits(state),
    )
    note_parts(turn, current, commit)
    turn.act(Tell(message=RoundCommitted(commit=commit)))
    for progress, outcome in zip(current.slices, commit.slices, strict=True):
        for node_id in refusers_of(current, progress) if outcome.digest is not None else ():
            contradict(turn, node_id)  # more than half of the weight holds what it refuses
    rest_of_void(turn, current, commit)
    note_contradicted(turn, current, commit)
    draw(turn, current, commit)
    spot_checks.draw(turn, current, commit)
    if commit.is_void:
        for member in ready_members(turn.state):
            turn.put_member(replace(member, outer_round=current.number))
        end_round(turn, current.base_digest)


def _first_undecided(state: SwarmState, current: Round) -> int | None:
    """A slice that is undecided, looked for from the one that was when this was asked last.

    Each report of a thousand nodes asks it: others of the slices may be decided by then, and are not to be
    looked through each time.
    """
    first = current.undecided
    for progress in (*current.slices[first:], *current.slices[:first]):
        if is_undecided(state, current, progress):
            return progress.slice.index
    return None


def is_undecided(state: SwarmState, current: Round, progress: SliceProgress) -> bool:
    """Whether waiting longer can change what becomes of the slice.

    A slice whose reducer is gone without a report, and which nobody took over, is given up rather
    than waited for until the deadline.
    """
    if progress.is_empty or not present_participants(state, current):
        return False
    if progress.digest is None:
        return is_present(state, progress.slice.reducer_id)
    if progress.refused or _have_all_told(state, current, progress):
        return False
    return not is_held_by_enough(state, current, progress, is_late=False)


def _have_all_told(state: SwarmState, current: Round, progress: SliceProgress) -> bool:
    """Whether all who decide hold the result or have refused it: then nobody is waited for."""
    if not progress.refusals:
        return False
    told = {*refusers_of(current, progress), *holders_of(state, current, progress)}
    return told.issuperset(deciders(state, current, is_late=False))


def _commit_of(state: SwarmState, current: Round, stride: float, *, is_late: bool) -> Commit:
    """What is decided of each slice, and how much of each result moves the state."""
    commit = Commit(
        round=current.number,
        fragment=current.fragment,
        base_digest=current.base_digest,
        slices=tuple(_outcome(state, current, p, is_late=is_late) for p in current.slices),
        incarnation=state.incarnation,
        assignments=current.assignments,
        without_tokens=_without_tokens(current),
    )
    if state.rules.bounds_results:
        reducers = [progress.slice.reducer_id for progress in current.slices]
        commit = bounded(state.norms, commit, stride, reducers)
    if commit.is_void:  # the state does not change, so there is nothing to agree on
        commit = replace(commit, outer_digest=current.base_digest)
    return commit


def _outcome(
    state: SwarmState, current: Round, progress: SliceProgress, *, is_late: bool
) -> SliceOutcome:
    part = progress.slice
    void = SliceOutcome(
        index=part.index,
        start=part.start,
        num_elements=part.num_elements,
        digest=None,
        void_reason=void_reason(state, current, progress, is_late=is_late),
    )
    if void.void_reason:
        return void
    holders = holders_of(state, current, progress)
    return replace(void, **same_fields(progress, Result), holder_ids=holders)


def void_reason(
    state: SwarmState, current: Round, progress: SliceProgress, *, is_late: bool = True
) -> str:
    """Why a slice cannot commit now, in words; empty when it can."""
    if current.cannot_commit:
        return current.cannot_commit
    reducer = name_of(state, progress.slice.reducer_id)
    num_present = len(present_participants(state, current))
    if num_present == 0:
        return "no participant is left"
    if not is_base_held(state):
        return "nobody who is here holds the state that it builds on"
    if progress.is_empty:
        return f"its reducer {reducer} had nothing to reduce"
    if progress.digest is None and not is_present(state, progress.slice.reducer_id):
        return f"its reducer {reducer} is gone"
    if progress.digest is None:
        return f"its reducer {reducer} never reported"
    if progress.refused:
        return progress.refused
    if not is_held_by_enough(state, current, progress, is_late=is_late):
        refusers = refusers_of(current, progress)
        more = f", and {len(refusers)} say that it does not decode" if refusers else ""
        return f"held by {held_in_words(state, current, progress)}{more}"
    return ""


def is_base_held(state: SwarmState) -> bool:
    """Whether somebody present holds the state that the round in flight builds on.

    A participant may have lost it since the plan. What it then commits nobody could apply, and the
    round before, which is lost, could not be taken back any more.
    """
    members = members_of(state)
    return any(members[node_id].state is MemberState.READY for node_id in members.present_ids)


def _without_tokens(current: Round) -> tuple[Contributor, ...]:
    """Participants that found nothing to learn in their samples, which count as used up all the same.

    Leased again they would be the same samples, and a node alone would never come past them.
    """
    return tuple(
        Contributor(node_id=node_id, samples=trained.samples, tokens=0)
        for node_id, trained in sorted(current.trained.items())
        if trained.tokens == 0 and trained.samples > 0
    )


def _closing_reason(commit: Commit, *, is_late: bool) -> str:
    num_slices = len(commit.slices)
    void = [outcome for outcome in commit.slices if outcome.digest is None]
    if not void:
        return "all slices are committed"
    when = " at the deadline" if is_late else ""
    reasons = ", ".join(f"slice {outcome.index} is void: {outcome.void_reason}" for outcome in void)
    return f"{num_slices - len(void)} of {num_slices} slices are committed{when}; {reasons}"


# What settles it


def awaited_appliers(state: SwarmState, current: Round) -> list[NodeId]:
    """Whose reports settle a committed round, in the order of their ids.

    The present participants, and the ready members that joined during the round: these fetch the results
    rather than being sent them, and would miss the start of every next round by that little. Those on trial
    are not awaited, as long as there is anybody else.
    """
    joined = (member.node_id for member in available_members(state))
    here = sorted({*present_participants(state, current), *joined})
    return [n for n in here if not state.members[n].standing.is_on_trial] or here


def settle_round(turn: Turn) -> None:
    """Fixes the digest of the state after the commit: what nodes of most weight report.

    Once all that are awaited have reported, or at the deadline when one digest has enough of their
    weight. Otherwise they get as much time again, and again until the run file's time is over: only then
    those decide that have reported, whatever they weigh. When nobody has, takes back what nobody can
    supply, or waits on: a digest is never invented.
    """
    current = turn.state.open_round
    if current is None or current.phase is not RoundPhase.APPLYING:
        return
    is_late = turn.now >= current.apply_deadline
    if not is_late and len(current.applied) < len(awaited_participants(turn.state, current)):
        return  # at once, as most reports are: these are awaited in any case
    present = frozenset(members_of(turn.state).present_ids)
    reports = {node: digest for node, digest in current.applied.items() if node in present}
    awaited = awaited_appliers(turn.state, current)
    if (awaited and all(node in reports for node in awaited)) or (reports and is_late):
        voters = sorted({*awaited, *reports})
        members = (turn.state.members[node_id] for node_id in voters)
        say = say_of(members, current.number, unchecked(turn.state))
        digest = heaviest(say, reports)
        agreeing = [node_id for node_id, told in reports.items() if told == digest]
        most, waited = turn.state.rules.apply_seconds, turn.now - current.committed_at
        may_wait = waited < most or not current.is_prolonged
        if is_late and may_wait and not is_enough(say, agreeing, voters):
            more = max(current.apply_seconds or most, min(waited, most - waited))
            later = replace(current, apply_deadline=turn.now + more, is_prolonged=True)
            turn.put_round(later)
            return
        is_waiting = current.returns_until is not None
        if (is_waiting or not is_late) and await_returning(turn, current):
            return
        times = times_when_applied(turn.state, current, awaited, turn.now)
        turn.state = replace(turn.state, phase_times=times)
        note_appliers(turn, current, awaited)
        end_round(turn, digest)
    elif is_late and retract_lost(turn):
        retracted = turn.state.open_round
        assert retracted is not None and retracted.commit is not None
        if retracted.commit.outer_digest is not None:  # nothing of it is left: the base stays
            end_round(turn, retracted.base_digest)
    elif is_late:
        deadline = turn.now + turn.state.rules.apply_seconds
        turn.put_round(replace(current, apply_deadline=deadline))


def end_round(turn: Turn, digest: Digest) -> None:
    """The round in flight is over, and `digest` is the committed state's."""
    if (current := turn.state.open_round) is not None:
        draw_what_leads_elsewhere(turn, current)
    *before, closed = turn.state.recent
    commit = replace(closed.commit, outer_digest=digest)
    closed = replace(closed, commit=commit, wire=turn.state.round_wire)
    recent = (*before, closed)
    turn.state = replace(turn.state, open_round=None, recent=recent, earlier=(), round_wire={})
    agree_on(turn, digest)
    turn.has_new_state = True
