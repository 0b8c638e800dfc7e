"""Whom a round waits for, and who is left out of what the next ones wait for. Pure.

A member that misses deadlines is left out of what the next ones wait for. A member that does nothing in a
round though it is here is at fault, and so is one that is late twice in a row, or in two of three rounds:
with a commit, or with work that reducers who decide went without. It has lengthened those rounds, to their
deadlines at most. No plan counts on it for 1, 2, 4, … rounds, by the number of its faults. Then it takes
part on trial: it reduces nothing, decides nothing, and nobody waits for it much longer than for the others.
Once it has done its part in a round it is as before; every so many rounds in time one fault is forgotten.
What the others were given meanwhile does not grow by it.

Members without confirmed work are waited for no longer than those on trial, once members who decide have
trained. The coordinator first tells all that are late then to hand in what they have: a slow node loses
nothing.

A helper trains nothing, and one whom no plan asks to reduce does its part by being there. It is late in a
round in which a slice of its own is overdue.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from coordinator.swarm.events import Tell, Turn
from coordinator.swarm.members import PRESENT, Member, Standing
from coordinator.swarm.state import (
    Round,
    RoundPhase,
    Say,
    SwarmState,
    assignments_of,
    available_members,
    awaited_participants,
    others_in,
    present_participants,
    remembered,
    training_among,
)
from coordinator.swarm.weighing import is_enough, say_in, say_of, unchecked, weight_of, worth
from protocol.wire.messages import ParticipantsIdle, Trained, TrainingEnded
from protocol.wire.rounds import Assignment, Commit, NodeId

MOST_ROUNDS_OUT = 64
"""Whoever stays away for whichever reason, as often as may be, is tried again after so many rounds."""

FORGOTTEN_AFTER = 16
"""Rounds in time in a row, after each of which one fault is forgotten."""

LATE, TOO_LATE = 2, 4
"""What a late round counts, and when it is a fault; a round in time takes 1 away."""

HURRY_MARGIN, TRIAL_MARGIN = 1.25, 1.5
"""So many times as long as the slowest of the others has trained, those that are late may train, and are
waited for."""

LEAST_HURRY_SECONDS, LEAST_TRIAL_SECONDS = 1.0, 4.0
"""Newcomers have so much longer than the others at least: an inner step and the reports take their time."""

PATIENT_TRIALS = 3
"""Of a member without confirmed work: so often others wait for it as long as it needs to fetch results."""

BRIEF_HURRY_SECONDS, BRIEF_TRIAL_SECONDS = 0.5, 1.0
"""Those on trial likewise: where others train in no time, nobody could come back by being in time."""


def counted_on(ready: Sequence[Member], number: int, *, least: int) -> list[Member]:
    """Those of the ready members whom the plan of a round counts on, in their order.

    Those who are left out for a while come back sooner where fewer than `least` would be left.
    """

    def back_at(member: Member) -> int:
        return max(member.standing.back_at_round, member.against.back_at_round)

    by_standing = sorted(ready, key=lambda m: (back_at(m), m.standing.num_faults))
    in_time = sum(back_at(member) <= number for member in ready)
    chosen = {member.node_id for member in by_standing[: max(in_time, least)]}
    return [member for member in ready if member.node_id in chosen]


def note_parts(turn: Turn, current: Round, commit: Commit) -> None:
    """Who did its part in a round that closes now, and who is at fault.

    Nobody, when nobody has trained. Nor who has trained and is in no result, when that is most of them:
    then it was the deadline. Nor who began a new session since the plan, or leaves.
    """
    state = turn.state
    _note_helpers(turn, current)
    here = [
        n
        for n in training_among(current, present_participants(state, current))
        if state.members[n].session_id < current.later_session_id
        and not state.members[n].is_draining
    ]
    trained = {n for n in here if n in current.trained and current.trained[n].samples > 0}
    without_tokens = {n for n in trained if current.trained[n].tokens == 0}
    say = say_in(state, current, present_participants(state, current))
    missed = frozenset() if commit.is_void else _missed_by_most(state, current, commit, say)
    done = trained - (missed - without_tokens)
    is_too_short = 2 * weight_of(say, done) < weight_of(say, here)
    for node_id in here:
        if node_id in done:
            _in_time(turn, node_id)
        elif node_id in trained and not is_too_short:
            _late(turn, node_id, current.number)
        elif trained and node_id not in trained:
            _at_fault(turn, node_id, current.number)
    members = turn.state.members
    on_trial = tuple(
        a.node_id
        for a in current.assignments
        if a.node_id in members and members[a.node_id].standing.is_on_trial
    )
    if turn.state.open_round is not None and on_trial != current.on_trial:
        turn.put_round(replace(turn.state.open_round, on_trial=on_trial))


def _missed_by_most(
    state: SwarmState, current: Round, commit: Commit, say: Say
) -> frozenset[NodeId]:
    """Whom reducers that decide, or helpers that reduce most, have waited for in vain.

    What a member contributes to slices of its own shows nothing. Fewer reducers may be those that lie.
    """
    among = present_participants(state, current)
    outcomes = [
        (progress.slice.reducer_id, outcome, {c.node_id for c in outcome.contributors})
        for progress, outcome in zip(current.slices, commit.slices, strict=True)
        if outcome.digest is not None
    ]
    missed = set()
    for node_id in training_among(current, among):
        lacking, num_elements, of_helpers = set(), 0, 0
        for reducer_id, outcome, named in outcomes:
            if reducer_id == node_id:
                continue
            num_elements += outcome.num_elements
            if node_id not in named:
                lacking.add(reducer_id)
                reducer = state.members.get(reducer_id)
                is_helper = reducer is not None and reducer.is_helper
                of_helpers += outcome.num_elements if is_helper else 0
        if 2 * of_helpers > num_elements or (lacking and is_enough(say, lacking, among)):
            missed.add(node_id)
    return frozenset(missed)


def _note_helpers(turn: Turn, current: Round) -> None:
    """Which helpers did their part in a round that closes now: `late_helper` has said who did not."""
    for node_id in present_participants(turn.state, current):
        standing = turn.state.members[node_id].standing
        is_helper = not assignments_of(current)[node_id].trains
        if is_helper and standing.late_round != current.number:
            _in_time(turn, node_id)


def late_helper(turn: Turn, node_id: NodeId, number: int) -> None:
    """A slice that this present helper should have reduced is overdue."""
    member = turn.state.members.get(node_id)
    if member is not None and member.is_helper and member.state in PRESENT:
        _late(turn, node_id, number)


def note_appliers(turn: Turn, current: Round, awaited: Sequence[NodeId]) -> None:
    """Who of those awaited has not applied the round in time; not when that is most of them."""
    state = turn.state
    say = say_of((state.members[n] for n in awaited), current.number, unchecked(state))
    in_time = [n for n in awaited if n in current.applied]
    if 2 * weight_of(say, in_time) < weight_of(say, awaited):
        return
    takes_part = {a.node_id for a in current.assignments}
    members = state.members
    for node_id in awaited:
        is_old = state.members[node_id].session_id < current.later_session_id
        if node_id in current.applied or not is_old:
            continue
        if node_id in takes_part:
            _late(turn, node_id, current.number)
        else:
            _at_fault(turn, node_id, current.number)
    for node_id in current.applied:
        member = members.get(node_id)
        if member and member.cannot_train and not member.is_helper:  # no plan will ever try it
            _in_time(turn, node_id)


def returning(state: SwarmState, current: Round) -> list[Member]:
    """Those who were left out, are due back in the next plan, and lack the state that it builds on."""
    known = {*assignments_of(current), *current.applied}
    return [
        member
        for member in available_members(state)
        if member.standing.is_on_trial and member.standing.back_at_round <= current.number + 1
        if not member.cannot_train and member.node_id not in known
    ]


def await_returning(turn: Turn, current: Round) -> bool:
    """Whether a settled round waits a little for those who were left out, and are due back in the next plan.

    They fetch results that participants are sent: without the wait they would hold the state that a plan
    builds on only after it has gone out, each time. As many bytes took the others the round's exchange; those
    with confirmed work have half as long again, others a few times. Who does not use it is at fault once
    more, so it costs others that much less often.
    """
    if not (due := returning(turn.state, current)):
        return False
    if (until := current.returns_until) is None:
        applied_in = turn.now - current.committed_at
        trained_at = max(current.trained_at.values(), default=current.committed_at)
        is_patient = any(
            one.standing.num_faults <= PATIENT_TRIALS or worth(one.work, current.number)
            for one in due
        )
        fetching = is_patient * TRIAL_MARGIN * (current.committed_at - trained_at)
        wait = max((TRIAL_MARGIN - 1) * applied_in, fetching, BRIEF_TRIAL_SECONDS)
        until, latest = turn.now + wait, max(current.apply_deadline, turn.now + wait)
        turn.put_round(replace(current, returns_until=until, apply_deadline=latest))
    if turn.now < until:
        return True
    for one in due:
        _at_fault(turn, one.node_id, current.number)
    return False


def excuses_at(state: SwarmState) -> float | None:
    """When those who are late are told to hand in what they have, and then the others not to wait."""
    current = state.uncommitted_round
    if current is None or current.is_excused:
        return None
    told = _overdue(state, current)
    if not told.late or not told.others or any(n not in current.trained_at for n in told.others):
        return None
    hurry = LEAST_HURRY_SECONDS if told.are_new else BRIEF_HURRY_SECONDS
    trial = LEAST_TRIAL_SECONDS if told.are_new else BRIEF_TRIAL_SECONDS
    if (hurried_at := current.hurried_at) is None:
        took = max(current.trained_at[n] for n in told.others) - current.opened_at
        return current.opened_at + max(HURRY_MARGIN * took, took + hurry)
    waited = hurried_at - current.opened_at  # not who trained last: it may be one of them
    took = min(waited / HURRY_MARGIN, waited - hurry)
    return current.opened_at + max(TRIAL_MARGIN * took, took + trial)


def excuse(turn: Turn) -> None:
    """Tells those who are late, once, to hand in what they have; and reducers, once, not to wait for them.

    What has come of them by then counts. The round goes on as if they were on trial, and so without the
    slices that they were to reduce: others take these over.
    """
    at, current = excuses_at(turn.state), turn.state.open_round
    if at is None or current is None or turn.now < at:
        return
    late = _overdue(turn.state, current).late
    idle = ParticipantsIdle(round=current.number, node_ids=late)
    if current.hurried_at is None:
        turn.put_round(replace(current, hurried_at=turn.now))
        turn.act(Tell(message=idle, to=late))
        excuse(turn)  # in the same instant, where the others have taken no time
        return
    on_trial = (*current.on_trial, *(n for n in late if n not in current.on_trial))
    turn.put_round(replace(current, is_excused=True, on_trial=on_trial))
    turn.act(Tell(message=idle, to=others_in(current, late)))


def tell_training_ended(turn: Turn) -> None:
    """Tells participants, once, that nobody trains whom they wait for: what has not begun to come is kept.

    Those that are late are told to hand in first, and then excused.
    """
    state, current = turn.state, turn.state.open_round
    if current is None or current.has_trained or current.phase is not RoundPhase.EXCHANGING:
        return
    told = _overdue(state, current)
    if not told.others or (told.late and not current.is_excused):
        return
    if all(node_id in current.trained_at for node_id in told.others):
        turn.put_round(replace(current, has_trained=True))
        turn.act(Tell(message=TrainingEnded(round=current.number), to=others_in(current, ())))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Overdue:
    """Of a round's participants that are here and train."""

    late: tuple[NodeId, ...]  # those on trial; and those without work, where those that have decide
    others: tuple[NodeId, ...]  # whom the round waits for all the same
    are_new: bool  # whether it waits for some of the late ones too: for those without work


def _overdue(state: SwarmState, current: Round) -> _Overdue:
    """The same for many decisions in a row: a thousand nodes send hundreds of heartbeats a second."""
    awaited = awaited_participants(state, current)
    return _late_among(
        current.assignments,
        present_participants(state, current),
        awaited,
        current.trained,
        say_in(state, current, awaited),
    )


@remembered
def _late_among(
    assignments: tuple[Assignment, ...],
    present: tuple[NodeId, ...],
    awaited: tuple[NodeId, ...],
    trained: Mapping[NodeId, Trained],
    say: Say,
) -> _Overdue:
    trains = {a.node_id for a in assignments if a.trains}
    waited_for, done = frozenset(awaited), trained
    untrained = trains - done.keys()
    in_time = [n for n in awaited if n in done]
    weights = say.weights if say.is_confirmed else {}
    are_enough = is_enough(say, in_time, awaited)
    late = tuple(
        n
        for n in present
        if n in untrained and (n not in waited_for or (are_enough and not weights.get(n, 0)))
    )
    others = trains.difference(late)
    return _Overdue(
        late=late,
        others=tuple(n for n in awaited if n in others),
        are_new=not waited_for.isdisjoint(late),
    )


def _late(turn: Turn, node_id: NodeId, number: int) -> None:
    """Once the deadline may have been too short: the next ones are longer."""
    member = turn.state.members[node_id]
    if member.standing.late_round == number:
        return  # with its work, and then with the commit
    lateness = member.standing.lateness + LATE
    if lateness >= TOO_LATE:
        _at_fault(turn, node_id, number)
    else:
        was = member.standing
        standing = replace(was, lateness=lateness, late_round=number, num_in_time=0)
        turn.put_member(replace(member, standing=standing))


def _at_fault(turn: Turn, node_id: NodeId, number: int) -> None:
    member = turn.state.members[node_id]
    num_faults = member.standing.num_faults + 1
    standing = Standing(
        num_faults=num_faults,
        back_at_round=number + 1 + rounds_out(num_faults),
        is_on_trial=True,
        late_round=number,
    )
    turn.put_member(replace(member, standing=standing))


def rounds_out(num_times: int, *, first: int = 1) -> int:
    """How many rounds somebody stays away that is at fault for the so many-th time: 1, 2, 4 and so on."""
    return min(MOST_ROUNDS_OUT, first << (num_times - 1))


def _in_time(turn: Turn, node_id: NodeId) -> None:
    member = turn.state.members[node_id]
    was = member.standing
    if was == Standing():
        return
    num_in_time, lateness = was.num_in_time + 1, max(0, was.lateness - 1)
    standing = replace(was, is_on_trial=False, num_in_time=num_in_time, lateness=lateness)
    if num_in_time >= FORGOTTEN_AFTER:
        standing = replace(standing, num_faults=max(0, was.num_faults - 1), num_in_time=0)
    if not standing.num_faults and not lateness:
        standing = Standing()
    turn.put_member(replace(member, standing=standing))


def waiting_in_words(member: Member, number: int) -> str:
    """What a member is told that sits out when this round is planned next; empty for others."""
    if member.state not in PRESENT:
        return ""
    if member.against.back_at_round > number:
        return (
            f"waits until round {member.against.back_at_round}: most of the others point against what came "
            "of it; see whether its data, its model code and its devices are as theirs"
        )
    if member.standing.back_at_round > number:
        return (
            f"waits until round {member.standing.back_at_round}: it was too late in round "
            f"{member.standing.late_round}; see whether its link or its machine stalls"
        )
    return ""
