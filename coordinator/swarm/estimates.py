"""When things will be done, by what recent rounds took: for people, beside deadlines. Pure.

A deadline bounds the slowest case; most rounds end long before theirs. An estimate is the median of
what each phase took, so it needs `ROUNDS_NEEDED` rounds, and says nothing before.
"""

from collections.abc import Sequence
from statistics import median

from coordinator.swarm.deadlines import ROUNDS_NEEDED
from coordinator.swarm.state import Measured, RoundPhase, SwarmState


def phase_seconds_left(state: SwarmState, now: float) -> float | None:
    """Until the phase of the round in flight ends; None when nobody can tell."""
    current = state.open_round
    if current is None:
        return None
    times = state.phase_times
    if current.phase is RoundPhase.APPLYING:
        return _left(times.apply, since=current.committed_at, now=now)
    if current.phase is RoundPhase.TRAINING:
        return _left(times.train, since=current.opened_at, now=now)
    after_training = _sum(_median(times.exchange), _median(times.commit))
    if after_training is None:
        return None
    began = max(current.trained_at.values(), default=current.opened_at)
    return max(0.0, began + after_training - now)


def run_seconds_left(state: SwarmState, now: float) -> float | None:
    """Until the last round has ended, at the pace of recent rounds; 0 once the run is finished."""
    if state.is_finished:
        return 0.0
    a_round = round_seconds(state)
    if a_round is None:
        return None
    rounds_left = state.rules.total_rounds - state.committed_round
    spent = 0.0
    if (current := state.open_round) is not None:
        spent = min(a_round, now - current.opened_at)
        # The commit of a round that is being applied counts already.
        rounds_left += current.phase is RoundPhase.APPLYING
    return max(0.0, rounds_left * a_round - spent)


def round_seconds(state: SwarmState) -> float | None:
    """From one plan to the next, with nodes that are here."""
    times = state.phase_times
    return _sum(*map(_median, (times.train, times.exchange, times.commit, times.apply)))


def left_in_words(state: SwarmState, deadline: float, now: float) -> str:
    """Until the phase of the round in flight ends: as it usually does, and at its deadline."""
    at_most = f"{max(0.0, deadline - now):.0f} s"
    left = phase_seconds_left(state, now)
    if left is None or left > deadline - now:
        return f"{at_most} left"
    if left < 1:
        return f"later than usual, {at_most} left at most"
    return f"about {left:.0f} s left, {at_most} at most"


def _left(history: Sequence[Measured], *, since: float, now: float) -> float | None:
    expected = _median(history)
    return None if expected is None else max(0.0, since + expected - now)


def _median(history: Sequence[Measured]) -> float | None:
    """What a phase took; where nodes were cut off, the time that it was given."""
    taken = [
        measured.given_seconds if measured.seconds is None else measured.seconds
        for measured in history
    ]
    return median(taken) if len(taken) >= ROUNDS_NEEDED else None


def _sum(*parts: float | None) -> float | None:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None
