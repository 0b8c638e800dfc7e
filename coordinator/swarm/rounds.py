"""A round from its plan to its commit: what participants report, what commits, what settles it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from coordinator.swarm import spot_checks
from coordinator.swarm.audit import (
    audits_in_words,
    contradict,
    draw,
    draw_what_leads_elsewhere,
    pending_audits,
    strike,
)
from coordinator.swarm.committed import agree_on, book, bounded, norms_after, stride_of
from coordinator.swarm.deadlines import device_of, measured, times_at_commit, times_when_applied
from coordinator.swarm.events import Tell, Turn
from coordinator.swarm.members import KeptError, MemberState
from coordinator.swarm.retraction import retract_lost
from coordinator.swarm.standing import await_returning, note_appliers, note_contradicted, note_parts
from coordinator.swarm.state import (
    ClosedRound,
    Round,
    RoundPhase,
    SliceProgress,
    SwarmState,
    assignments_of,
    available_members,
    awaited_participants,
    in_exchange,
    is_present,
    members_of,
    name_of,
    others_in,
    present_participants,
    ready_members,
    trimmed,
)
from coordinator.swarm.takeover import offer_to_deceived, rest_of_void
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
from protocol.wire.messages import (
    Held,
    ParticipantsIdle,
    Reduced,
    RoundCommitted,
    Trained,
)
from protocol.wire.rounds import (
    Assignment,
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


# What participants report


def training_done(turn: Turn, node_id: NodeId, round: int, report: Trained) -> None:
    """Remembers a participant's first report of its training; impossible ones are ignored.

    How fast it was decides how many inner steps the next plans ask of it.
    """
    current = in_exchange(turn.state, round, node_id)
    if current is None or node_id in current.trained:
        return
    asked = assignments_of(current)[node_id]
    if not asked.trains or not _is_possible(report, asked, turn.state.rules.context):
        return  # a helper says by its results that it is there
    if report.inner_steps > asked.inner_steps:
        return
    member = turn.state.members[node_id]
    is_ahead = turn.state.rules.has_overlap  # then it may have begun before the plan
    found = measured(
        member.inner_steps_per_second,
        report,
        seen_seconds=0.0 if is_ahead else turn.now - current.opened_at,
        usual=current.usual_speeds.get(device_of(member)),
    )
    turn.put_member(replace(member, inner_steps_per_second=found.speed))
    if found.credible_steps < report.inner_steps:
        credible = {**current.credible_steps, node_id: found.credible_steps}
        current = replace(current, credible_steps=credible)
    trained = {**current.trained, node_id: report}
    trained_at = {**current.trained_at, node_id: turn.now}
    turn.put_round(
        replace(current, trained=trained, trained_at=trained_at, phase=RoundPhase.EXCHANGING)
    )
    if report.tokens == 0:
        idle = ParticipantsIdle(round=current.number, node_ids=(node_id,))
        turn.act(Tell(message=idle, to=others_in(current, (node_id,))))


def slice_reduced(turn: Turn, node_id: NodeId, round: int, report: Reduced) -> None:
    """Fixes a slice's digest or that it is empty: the first valid report of its reducer counts.

    The reducer holds what it has encoded, so the report counts as its Held too. A report with contributors
    who did not take part, with more samples than they were leased or more tokens than these have, or without
    saying which bytes each of them contributed, leaves the slice open.
    """
    current = in_exchange(turn.state, round, node_id)
    if current is None or not 0 <= report.slice_index < len(current.slices):
        return
    progress = current.slices[report.slice_index]
    if progress.slice.reducer_id != node_id:
        return
    is_news = False
    if not progress.is_empty and progress.digest is None:
        if report.digest is None:
            current = replace(current, reduced_at=turn.now)
            turn.put_slice(current, replace(progress, is_empty=True))
            return
        if not _is_valid(report, current, turn.state.rules.context):
            return
        report = report.in_order
        progress = replace(
            progress,
            **same_fields(report, Result),
            reduced_at=turn.now,
            reduced=report if turn.state.rules.audited_share else None,
        )
        is_news = True
        current = replace(current, reduced_at=turn.now)
    if report.digest is not None and report.digest == progress.digest:
        held = _with_held(current.held, node_id, {report.slice_index: report.digest})
        turn.put_slice(replace(current, held=held), progress)
        if is_news:
            refuse_untraced(turn, report.slice_index)
            refusing = (refusal.node_id for refusal in progress.refusals)
            offer_to_deceived(turn, report.slice_index, {*current.held, *refusing})


def _is_valid(report: Reduced, current: Round, context: int) -> bool:
    """Whether a result of this round can be of what its reducer says."""
    asked, num_told = assignments_of(current), len(report.contributors)
    named = {contributor.node_id for contributor in report.contributors}
    return (
        num_told > 0
        and len(named) == num_told
        and len(report.contributions) == num_told
        and len(report.factors) in (0, num_told)
        and named.isdisjoint(report.late)
        and all(_is_possible(c, asked.get(c.node_id), context) for c in report.contributors)
    )


def _is_possible(told: Trained | Contributor, asked: Assignment | None, context: int) -> bool:
    """Whether a participant can have used up so many samples, and found so many tokens in them."""
    return (
        asked is not None
        and 0 <= told.samples <= asked.num_samples
        and 0 <= told.tokens <= told.samples * context
    )


def results_held(turn: Turn, node_id: NodeId, told: Sequence[tuple[int, Held]]) -> None:
    """Remembers what a participant holds, by round; it may come before the reducer's own report.

    After the commit as well: who holds a result then can supply it to others.
    """
    current = turn.state.open_round
    if current is None or node_id not in assignments_of(current):
        return
    reports = {
        report.slice_index: report
        for round, report in told
        if round == current.number and 0 <= report.slice_index < len(current.slices)
    }
    news = {index: report.digest for index, report in reports.items()}
    if news and is_present(turn.state, node_id):
        turn.put_round(
            replace(
                current,
                held=_with_held(current.held, node_id, news),
                agreements=_with_agreements(current.agreements, node_id, reports),
            )
        )
        if current.phase is not RoundPhase.APPLYING:
            before = current.held.get(node_id, {})
            for index in (index for index, digest in news.items() if before.get(index) != digest):
                offer_to_deceived(turn, index, (node_id,))


def _with_held(
    held: Mapping[NodeId, Mapping[int, Digest]], node_id: NodeId, news: Mapping[int, Digest]
) -> Mapping[NodeId, Mapping[int, Digest]]:
    return {**held, node_id: {**held.get(node_id, {}), **news}}


def _with_agreements(
    before: Mapping[NodeId, Mapping[int, float]], node_id: NodeId, reports: Mapping[int, Held]
) -> Mapping[NodeId, Mapping[int, float]]:
    """What was told of other results of these slices holds no more."""
    own = before.get(node_id, {})
    told = {i: r.agreement for i, r in reports.items() if r.agreement is not None}
    if not told and own.keys().isdisjoint(reports):
        return before
    kept = {index: agreement for index, agreement in own.items() if index not in reports}
    return {**before, node_id: kept | told}


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


# What reducers keep: the error that one adds must be what a committed result of its own has left.

UNKNOWN_ROUNDS = 64
"""For so many rounds after history was taken back or learnt, reducers may keep what is not known here."""


def refuse_untraced(turn: Turn, index: int) -> None:
    """Refuses a result that was just reported if it has in it what no committed result has left."""
    state, current = turn.state, turn.current
    progress = current.slices[index]
    if progress.reduced is None or not (why := _untraced(state, current, progress)):
        return
    turn.put_slice(current, replace(progress, refused=why))
    strike(turn, progress.slice.reducer_id)


def errors_after(state: SwarmState, current: Round, commit: Commit) -> tuple[KeptError, ...]:
    """What reducers keep once a commit is settled: of each slice that it took, what its result left."""
    errors = list(state.errors)
    for progress, outcome in zip(current.slices, commit.slices, strict=True):
        if outcome.digest is None or progress.reduced is None:
            continue
        part = progress.slice
        first, past = part.start, part.start + part.num_elements
        errors = [
            e
            for e in errors
            if (e.reducer_id, e.fragment) != (part.reducer_id, current.fragment)
            or e.start >= past
            or e.start + e.num_elements <= first
        ]
        if progress.reduced.error_after:
            kept = KeptError(
                reducer_id=part.reducer_id,
                fragment=current.fragment,
                start=part.start,
                num_elements=part.num_elements,
                digest=progress.reduced.error_after,
            )
            errors.append(kept)
    return tuple(errors)


def forget_errors(state: SwarmState) -> SwarmState:
    """The state after history was taken back, or learnt from a node: who keeps what shows again."""
    return replace(
        state,
        errors=(),
        errors_unknown_until=state.committed_round + UNKNOWN_ROUNDS,
        errors_incarnation=state.incarnation,
    )


def _untraced(state: SwarmState, current: Round, progress: SliceProgress) -> str:
    """Why the error that a reducer adds is none that a committed result has left; empty when it is one."""
    told = progress.reduced
    assert told is not None
    if not told.error_before or state.errors_incarnation != state.incarnation:
        return ""  # after history was taken back, what is known here is of undone rounds
    part = progress.slice
    place = part.reducer_id, current.fragment, part.start, part.num_elements
    for error in state.errors:
        if (error.reducer_id, error.fragment, error.start, error.num_elements) == place:
            return "" if error.digest == told.error_before else _UNTRACED
    return "" if current.number <= state.errors_unknown_until else _UNTRACED


_UNTRACED = "its reducer adds an error that no committed result of its own has left"
