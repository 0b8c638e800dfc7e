"""Who decides, by confirmed work, and whom others wait for. Pure.

Identities are free and work is not. Confirmed work is tokens of a member's contributions that commits took,
in each slice by its part of the fragment: a reducer that names somebody who sent nothing, or leaves somebody
out, changes no more than its own part. No round counts for more than the speed that the coordinator has seen
explains. Rounds of half a life ago count half, in steps: all sums are of whole numbers, so copies of a
coordinator that learn the same commits agree, and a round that is taken back leaves nothing.

There is no cap for a single key: whoever has much work could have split it over many, and a cap by the
number of keys would let many small ones take the say of a large one. A helper earns nothing and weighs
nothing: that it may reduce is the run owner's word. A member can earn no more in a round
than twice the mean of its participants (coordinator.swarm.deadlines). An invite is not free, and may be one
person with many keys whose work nobody has checked yet. So the largest weighs less than all others together,
and at most twice what is usual among these. The run owner may say that an invite is of machines of his own:
those weigh by their work alone. Work that nobody can check weighs less than what is checked:
coordinator.swarm.checking.

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

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from coordinator.swarm.checking import unchecked
from coordinator.swarm.events import Tell
from coordinator.swarm.members import PRESENT, Member, Standing, Work
from coordinator.swarm.state import Round, RoundPhase, Say, SwarmState
from coordinator.swarm.turn import (
    Turn,
    assignments_of,
    available_members,
    awaited_participants,
    others_in,
    present_participants,
    remembered,
    training_among,
)
from protocol.wire.messages import ParticipantsIdle, Trained, TrainingEnded
from protocol.wire.rounds import WHOLE as WHOLE_FACTOR
from protocol.wire.rounds import Assignment, Commit, CorpusSummary, NodeId

Told = TypeVar("Told")

HALF_LIFE_ROUNDS = 64
"""Newcomers have half of the say that their work deserves in the long run after so many rounds. Shorter
than most runs, and so long that nobody gets most of the say by an hour's work."""

KEPT_STRETCHES = 8
"""Half lives after which work counts no more: the last of them counts 1 in 128."""

WHOLE = 1 << 40
"""What an invite weighs while nobody has confirmed work; its members share it."""


# Earning


def credited(state: SwarmState, commit: Commit) -> Mapping[NodeId, int]:
    """Tokens of confirmed work that a commit brings its contributors; of what was clipped its factor."""
    num_elements = max(1, sum(outcome.num_elements for outcome in commit.slices))
    sums: dict[NodeId, int] = {}
    for outcome in commit.slices:
        factors = outcome.factors or [WHOLE_FACTOR] * len(outcome.contributors)
        for contributor, factor in zip(outcome.contributors, factors, strict=True):
            tokens = contributor.tokens * outcome.num_elements * factor // WHOLE_FACTOR
            sums[contributor.node_id] = sums.get(contributor.node_id, 0) + tokens
    current = state.open_round
    most: dict[NodeId, int] = {}
    if current is not None and current.number == commit.round:
        step_tokens = state.rules.batch * state.rules.context
        most = {n: steps * step_tokens for n, steps in current.credible_steps.items()}
        most |= {
            n: min(trained.tokens, most.get(n, trained.tokens))
            for n, trained in current.trained.items()
        }
    return {n: min(tokens // num_elements, most.get(n, tokens)) for n, tokens in sums.items()}


def earned(work: Work, round_number: int, tokens: int) -> Work:
    """A member's work with what a round brought it."""
    if not tokens:
        return work
    stretch = round_number // HALF_LIFE_ROUNDS
    sums = dict(work.by_stretch)
    sums[stretch] = sums.get(stretch, 0) + tokens
    kept = sorted((s, t) for s, t in sums.items() if t and s > stretch - KEPT_STRETCHES)
    return Work(by_stretch=tuple(kept), newest_round=round_number, newest_tokens=tokens)


def taken_back(work: Work, round_number: int, *, at_most: int = 0) -> Work:
    """The same without what that round brought: exactly, where it is the newest that brought anything.

    Of an earlier one the commit says what it brought at most, in the same stretch.
    """
    tokens = work.newest_tokens if work.newest_round == round_number else at_most
    if not tokens:
        return work
    stretch = round_number // HALF_LIFE_ROUNDS
    sums = ((s, max(0, t - tokens * (s == stretch))) for s, t in work.by_stretch)
    newest = (
        (0, 0) if work.newest_round >= round_number else (work.newest_round, work.newest_tokens)
    )
    return Work(
        by_stretch=tuple((s, t) for s, t in sums if t),
        newest_round=newest[0],
        newest_tokens=newest[1],
    )


def without_rounds_after(work: Work, round_number: int) -> Work:
    """The same once what later rounds brought has been taken from it, and is the newest of it no more."""
    stretch = round_number // HALF_LIFE_ROUNDS
    kept = tuple((s, t) for s, t in work.by_stretch if s <= stretch)
    if work.newest_round > round_number:
        return Work(by_stretch=kept)
    return replace(work, by_stretch=kept)


def worth(work: Work, round_number: int) -> int:
    """What the work counts at a round: a token of the stretch that the round is in counts 128."""
    stretch = round_number // HALF_LIFE_ROUNDS
    ages = ((stretch - s, t) for s, t in work.by_stretch)
    return sum(t << (KEPT_STRETCHES - 1 - age) for age, t in ages if 0 <= age < KEPT_STRETCHES)


# Deciding


def say_of(
    members: Iterable[Member], round_number: int, unchecked_ids: Collection[NodeId] = ()
) -> Say:
    """What each of the members weighs when they decide together.

    While none of them has confirmed work each invite weighs alike, and its members share it; each of the
    run owner's own nodes weighs like an invite. Helpers weigh nothing. Those of `unchecked_ids` weigh
    less together than the others, where any of these has work: coordinator.swarm.checking.
    """
    members = [member for member in members if not member.is_helper]
    worths = {member.node_id: worth(member.work, round_number) for member in members}
    by_invite: dict[str, list[NodeId]] = {}
    own = 0
    for member in members:
        if member.is_own:
            own += worths[member.node_id]
        else:
            by_invite.setdefault(member.invite_id, []).append(member.node_id)
    if not any(worths.values()):
        shares = {member.node_id: WHOLE for member in members if member.is_own}
        shares |= {n: WHOLE // len(alike) for alike in by_invite.values() for n in alike}
        return Say(weights=shares)
    together = [sum(worths[n] for n in alike) for alike in by_invite.values()]
    cap = cap_of(together, own=own)
    for alike, whole in zip(by_invite.values(), together, strict=True):
        if whole > cap:
            _shrink(worths, alike, whole, cap)
    others = [n for n, worth in worths.items() if worth and n in unchecked_ids]
    whole = sum(worths[n] for n in others)
    checked = sum(worths.values()) - whole
    if whole >= checked > 0:
        # In parts so fine that each keeps some: whoever weighs nothing is a newcomer, whom nobody waits for.
        parts = len(others) + 2
        worths = {n: worth * parts for n, worth in worths.items()}
        _shrink(worths, others, whole * parts, checked * parts - 1 - len(others))
        worths |= {n: worths[n] + 1 for n in others}
    return Say(weights=worths, is_confirmed=True)


def _shrink(worths: dict[NodeId, int], alike: Sequence[NodeId], whole: int, cap: int) -> None:
    """Has members who are worth `whole` weigh `cap` together, by their work."""
    so_far = 0
    for node_id in sorted(alike):
        before, so_far = so_far, so_far + worths[node_id]
        worths[node_id] = so_far * cap // whole - before * cap // whole


def cap_of(values: Sequence[int], *, own: int = 0) -> int:
    """What the members of one invite weigh together at most, given what those of each are worth.

    It follows from all invites but the largest, so none moves its own: less than all others together, with
    the run owner's `own` nodes; and twice what is usual among those others. With two invites there is no
    cap, for the smaller one would decide alone. Where `own` is something it bounds even a single other.
    """
    some = sorted(filter(None, values), reverse=True)
    if len(some) < (1 if own else 3):
        return sum(some)
    others = some[1:]
    less_than_others = own + sum(others) - 1
    return min(less_than_others, 2 * _usual(others)) if others else less_than_others


def _usual(values: Sequence[int]) -> int:
    """The mean of those values that are at least half of the middle one, in order from the largest down.

    The middle one is where the larger ones make up half of all. So no number of small values takes
    anything from one that is no larger than the middle one.
    """
    whole, so_far, middle = sum(values), 0, 0
    for value in values:
        so_far, middle = so_far + value, value
        if 2 * so_far >= whole:
            break
    usual = [value for value in values if 2 * value >= middle]
    return sum(usual) // len(usual)


def weight_of(say: Say, node_ids: Iterable[NodeId]) -> int:
    """What the nodes weigh together."""
    weights = say.weights
    return sum(weights.get(node_id, 0) for node_id in node_ids)


@remembered
def weights_of(say: Say, node_ids: Iterable[NodeId]) -> list[int]:
    """What each of some weighs; all of them alike where none weighs anything."""
    weights = [say.weights.get(node_id, 0) for node_id in node_ids]
    return weights if any(weights) else [1] * len(weights)


def is_enough(say: Say, some: Collection[NodeId], among: Collection[NodeId]) -> bool:
    """Whether some nodes decide for all those among whom they are.

    More than half of the confirmed work; two thirds of the weight while nobody has any. And both of two.
    """
    if len(some) < min(2, len(among)) or not among:
        return False
    held, whole = weight_of(say, some), weight_of(say, among)
    return 2 * held > whole if say.is_confirmed else 3 * held >= 2 * whole


def say_in(state: SwarmState, current: Round, among: Collection[NodeId]) -> Say:
    """What participants of a round weigh: as when it was opened, while any of those asked for does."""
    if current.say is not None and weight_of(current.say, among):
        return current.say
    return say_of((state.members[n] for n in among), current.number - 1, unchecked(state))


def heaviest(say: Say, reports: Mapping[NodeId, Told]) -> Told:
    """What members of most weight tell; of equals, the smallest node id's. `reports` is not empty."""
    votes: dict[Told, list[NodeId]] = {}
    for node_id in sorted(reports):
        votes.setdefault(reports[node_id], []).append(node_id)
    return min(votes, key=lambda told: (-weight_of(say, votes[told]), votes[told][0]))


def common_corpus(state: SwarmState) -> CorpusSummary | None:
    """The data that members of most weight tell of; of those that are gone where nobody present has any.

    Helpers tell of none, and neither do members that have yet to get theirs.
    """
    known = [m for m in state.members.values() if not m.is_helper and m.corpus.num_samples]
    known = [member for member in known if member.state in PRESENT] or known
    if not known:
        return None
    say = say_of(known, state.committed_round, unchecked(state))
    return heaviest(say, {m.node_id: m.corpus for m in known})


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


def rounds_out(num_times: int) -> int:
    """How many rounds somebody stays away that is at fault for the so many-th time: 1, 2, 4 and so on."""
    return min(MOST_ROUNDS_OUT, 1 << (num_times - 1))


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
