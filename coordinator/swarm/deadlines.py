"""How long the next round may take: what recent rounds took, with a margin, a floor and caps. Pure.

A round has four phases: training; the exchange, until the last slice is reduced; the commit; and applying it.
Each is measured by itself where it ends, and given its own time in the next plan.

All but training takes as long as the round's fragment is large, and fragments may differ by times: an
embedding is one tensor. So what rounds of smaller fragments took counts times that.

What did not finish counts as having taken all the time it was given. So a deadline that is too
short grows by the margin in every round, until everybody finishes or the run file's bound is
reached. Nodes that are gone, or began a new session meanwhile, are no measurement: deaths must not
make rounds longer.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from coordinator.swarm.state import (
    Measured,
    PhaseTimes,
    Round,
    SwarmState,
    awaited_participants,
    is_held_by,
    is_present,
    num_of,
    present_members,
    training_among,
)
from coordinator.swarm.weighing import is_enough, say_in
from protocol.wire.rounds import Assignment, NodeId

MARGIN = 1.5
"""What a phase is given, as a multiple of what it is expected to take."""

QUANTILE = 0.9
"""The part of the measured rounds that took no longer than what is expected. Each is measured by
its slowest node: of all nodes' times together it would always cut off the slowest tenth."""

KEPT_ROUNDS = 16
"""Measurements kept of each phase. With more than nine, one unusual round is passed over."""

ROUNDS_NEEDED = 3
"""Measurements without which a phase keeps the run file's time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """A plan's durations: from the start of the round, `apply_seconds` from its commit."""

    train_seconds: float
    contribute_seconds: float
    commit_seconds: float
    apply_seconds: float
    reason: str  # to be added to the plan's; empty when they are the run file's for good


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """What a phase is given, and why."""

    seconds: float
    why: str
    is_measured: bool = True


def next_deadlines(
    state: SwarmState, assignments: Sequence[Assignment], *, fragment: int
) -> Deadlines:
    """The durations of the next plan, whose round is of that fragment.

    The run file's are bounds that hold from the start of the round, so a phase may use what those
    before it leave. Training is also given what the nodes' own speeds say that its steps take:
    when the fastest node leaves, the others are asked for more than they ever did.
    """
    rules = state.rules
    if not rules.adapts_deadlines:
        return Deadlines(
            train_seconds=rules.train_seconds,
            contribute_seconds=rules.contribute_seconds,
            commit_seconds=rules.commit_seconds,
            apply_seconds=rules.apply_seconds,
            reason="",
        )
    here = _sessions_here(state)
    times, floor = state.phase_times, rules.floor_seconds
    num_elements = rules.layout.fragment_elements[fragment]
    train = _window(
        _Past.of(times.train, here),
        by_speed=_seconds_by_speed(state, assignments),
        unmeasured=rules.train_seconds,
        cap=rules.train_seconds,
        floor=floor,
    )
    exchange = _window(
        _Past.of(times.exchange, here, num_elements),
        unmeasured=rules.contribute_seconds - rules.train_seconds,
        cap=rules.contribute_seconds - train.seconds,
        floor=floor,
    )
    contribute_seconds = train.seconds + exchange.seconds
    commit = _window(
        _Past.of(times.commit, here, num_elements),
        unmeasured=rules.commit_seconds - rules.contribute_seconds,
        cap=rules.commit_seconds - contribute_seconds,
        floor=floor,
    )
    apply = _applying(state, here, num_elements)
    return Deadlines(
        train_seconds=train.seconds,
        contribute_seconds=contribute_seconds,
        commit_seconds=contribute_seconds + commit.seconds,
        apply_seconds=apply.seconds,
        reason=_in_words(train=train, exchange=exchange, commit=commit, apply=apply),
    )


def next_apply_seconds(state: SwarmState) -> float:
    """How long nodes may take to apply a commit that is made now."""
    if not state.rules.adapts_deadlines:
        return state.rules.apply_seconds
    elements = state.rules.layout.fragment_elements
    num_elements = elements[state.committed_round % len(elements)]
    return _applying(state, _sessions_here(state), num_elements).seconds


def _sessions_here(state: SwarmState) -> frozenset[int]:
    """The sessions of those whom deadlines are for: not of who is on trial after missing one."""
    present = present_members(state)
    return frozenset(m.session_id for m in present if not m.standing.is_on_trial)


def _applying(state: SwarmState, here: Collection[int], num_elements: int) -> _Window:
    rules = state.rules
    return _window(
        _Past.of(state.phase_times.apply, here, num_elements),
        unmeasured=rules.apply_seconds,
        cap=rules.apply_seconds,
        floor=rules.floor_seconds,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Past:
    """What is known of a phase, as far as it concerns the nodes that are here."""

    taken: tuple[float, ...]  # seconds, one for each round that counts
    last_cut_seconds: float = 0.0  # what the latest round gave, when it was too short
    num_cut: int = 0  # for so many

    @classmethod
    def of(
        cls, history: Sequence[Measured], here: Collection[int], num_elements: int = 0
    ) -> "_Past":
        """`here` are the sessions of the present members; `num_elements` those of the next fragment.

        A smaller fragment is given no less than a larger one took: a part of it are round trips.
        """
        taken, num_cut, last_cut = list[float](), 0, 0.0
        for measured in history:
            times = max(1.0, measured.times_for(num_elements))
            num_cut = sum(session_id in here for session_id in measured.cut_session_ids)
            seconds = measured.seconds
            if num_cut:
                seconds = max(measured.given_seconds, seconds or 0.0)
            if seconds is not None:
                taken.append(times * seconds)
            last_cut = times * measured.given_seconds if num_cut else 0.0
        return cls(taken=tuple(taken), last_cut_seconds=last_cut, num_cut=num_cut)


def _window(
    past: _Past, *, unmeasured: float, cap: float, floor: float, by_speed: float = 0.0
) -> _Window:
    """The time of one phase. The floor yields to the cap: a run file may have short bounds."""
    num_rounds = len(past.taken)
    if num_rounds < ROUNDS_NEEDED:
        why = f"{num_rounds} of {ROUNDS_NEEDED} rounds measured"
        return _Window(seconds=min(unmeasured, cap), why=why, is_measured=False)
    usual = quantile(past.taken)
    expected = max(usual, by_speed, past.last_cut_seconds)
    if expected == usual:
        why = f"the {QUANTILE * 100:g} % quantile of {num_rounds} rounds"
    elif expected == by_speed:
        why = "by the nodes' speeds"
    else:
        why = f"too short for {num_of(past.num_cut, 'node')}"
    seconds = MARGIN * expected
    if seconds < floor:
        seconds, reason = floor, "the floor"
    else:
        reason = f"{MARGIN:g} × {_rounded(expected)}, {why}"
    if seconds >= cap:
        seconds, reason = cap, "the run file's bound"
    return _Window(seconds=seconds, why=reason)


def quantile(values: Sequence[float]) -> float:
    """The smallest of the values that QUANTILE of them do not exceed."""
    return sorted(values)[math.ceil(QUANTILE * len(values)) - 1]


def _seconds_by_speed(state: SwarmState, assignments: Sequence[Assignment]) -> float:
    """What the assigned inner steps take the slowest of the nodes whose speed is known."""
    return max(
        (
            a.inner_steps / speed
            for a in assignments
            if (speed := state.members[a.node_id].inner_steps_per_second) is not None
        ),
        default=0.0,
    )


def _in_words(**windows: _Window) -> str:
    if not any(window.is_measured for window in windows.values()):
        return f"; deadlines of the run file until {ROUNDS_NEEDED} rounds are measured"
    parts = [
        f"{name} {_rounded(window.seconds)} ({window.why})" for name, window in windows.items()
    ]
    return f"; deadlines: {', '.join(parts)}"


def _rounded(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


# Measuring


def times_at_commit(state: SwarmState, current: Round, now: float) -> PhaseTimes:
    """The measurements with those of a round that closes now: all phases but the last."""
    times = state.phase_times
    nodes: Sequence[NodeId] = training_among(current, awaited_participants(state, current))
    if (hurried_at := current.hurried_at) is not None:
        # Who was told to end trained for as long as it was let.
        nodes = [n for n in nodes if current.trained_at.get(n, 0.0) < hurried_at]
    steady = [n for n in nodes if state.members[n].session_id < current.later_session_id]
    unheard = [n for n in steady if n not in current.trained]
    if not steady or (unheard and now < current.train_deadline):
        return times  # closed before training could be over, which no honest reducers do
    times = replace(times, train=_with(times.train, _training(state, current, steady)))
    if len(steady) < len(nodes) or any(not _has_work(current, n) for n in nodes):
        return times  # it was them that the others waited for, and not the exchange
    exchange = _exchange(state, current)
    if exchange is not None:
        times = replace(times, exchange=_with(times.exchange, exchange))
    return replace(times, commit=_with(times.commit, _committing(state, current, now)))


def times_when_applied(
    state: SwarmState, current: Round, awaited: Sequence[NodeId], now: float
) -> PhaseTimes:
    """The measurements with how long the round's commit took to be applied by those awaited."""
    members = [state.members[node_id] for node_id in awaited]
    if any(member.session_id >= current.later_session_id for member in members):
        return state.phase_times
    cut = [node_id for node_id in awaited if node_id not in current.applied]
    since = max(current.committed_at, current.gone_at or 0.0)
    measured = Measured(
        given_seconds=current.apply_deadline - current.committed_at,
        seconds=None if cut else now - since,
        cut_session_ids=_sessions(state, cut),
        num_elements=_num_elements(state, current),
    )
    return replace(state.phase_times, apply=_with(state.phase_times.apply, measured))


def _training(state: SwarmState, current: Round, nodes: Sequence[NodeId]) -> Measured:
    """From the plan to the report of who took all its steps; who took fewer ran out of time."""
    budgets = {a.node_id: a.inner_steps for a in current.assignments}
    done = {
        n for n in nodes if n in current.trained and current.trained[n].inner_steps >= budgets[n]
    }
    return Measured(
        given_seconds=current.train_deadline - current.opened_at,
        seconds=max((current.trained_at[n] - current.opened_at for n in done), default=None),
        cut_session_ids=_sessions(state, [n for n in nodes if n not in done]),
    )


def _has_work(current: Round, node_id: NodeId) -> bool:
    """Whether the node has trained, so that there is something for reducers to wait for."""
    trained = current.trained.get(node_id)
    return trained is not None and trained.tokens > 0 and node_id in current.trained_at


def _exchange(state: SwarmState, current: Round) -> Measured | None:
    """From the end of all training to the last slice reduced.

    A missed contribution was too late, if reducers waited until the deadline.
    """
    since = max(*current.trained_at.values(), current.gone_at or 0.0)
    given = current.contribute_deadline - since
    if current.reduced_at is None or given <= 0:
        return None
    was_waited_for = current.reduced_at >= current.contribute_deadline
    missed = {
        node_id
        for progress in current.slices
        if was_waited_for
        if progress.digest is not None or progress.is_empty
        for node_id in set(current.trained_at) - {c.node_id for c in progress.contributors}
        if is_present(state, node_id) and node_id not in current.on_trial
    }
    return Measured(
        given_seconds=given,
        seconds=None if missed else max(0.0, current.reduced_at - since),
        cut_session_ids=_sessions(state, missed),
        num_elements=_num_elements(state, current),
    )


def _committing(state: SwarmState, current: Round, now: float) -> Measured:
    """From the last slice reduced to the commit; who reported or held nothing by then was too late."""
    nodes = awaited_participants(state, current)
    late: set[NodeId] = set()
    for progress in current.slices:
        holders = [n for n in nodes if is_held_by(n, current, progress)]
        if progress.is_empty:
            continue
        if progress.digest is None:
            late.update({progress.slice.reducer_id}.intersection(nodes))
        elif not is_enough(say_in(state, current, nodes), holders, nodes):
            late.update(set(nodes).difference(holders))
    since = max(current.reduced_at or current.contribute_deadline, current.gone_at or 0.0)
    return Measured(
        given_seconds=max(0.0, current.commit_deadline - since),
        seconds=None if late else now - since,
        cut_session_ids=_sessions(state, late),
        num_elements=_num_elements(state, current),
    )


def _num_elements(state: SwarmState, current: Round) -> int:
    return state.rules.layout.fragment_elements[current.fragment]


def _sessions(state: SwarmState, node_ids: Collection[NodeId]) -> tuple[int, ...]:
    return tuple(sorted(state.members[node_id].session_id for node_id in node_ids))


def _with(history: tuple[Measured, ...], measured: Measured) -> tuple[Measured, ...]:
    return (*history, measured)[-KEPT_ROUNDS:]
