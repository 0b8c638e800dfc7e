"""Whether held-out losses say that the run was harmed, and what follows from that. Pure.

A loss is implausible when it is no finite number, or further above what it was than the run's own history
explains. What it was is the median of the latest plausible ones, so one odd loss does not move it; what
the history explains is JUMP_SHARE of that, or MOST_TIMES_USUAL what losses usually move from one to the
next. Losses fall in runs that learn, so a rise is compared with moves in either direction.

Then the run goes back by itself to the state after the latest round with a plausible loss, once for each
place: where it finds the same again after going back, it pauses, for the cause is then in its rules or data.
Two members at least must say so, and each of those that were asked: one that lies can start nothing.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from coordinator.swarm.reach_back import latest_in_reach
from coordinator.swarm.state import Alarm, HeldOut, HolderLoss, SwarmState
from coordinator.swarm.turn import present_members
from coordinator.swarm.weighing import worth
from protocol.trust.rulings import RulingKind

COORDINATOR = "the coordinator"
"""Who decides by itself, in rulings."""

KEPT_LOSSES = 5
"""Of the latest losses, what is usual follows from so many."""

LEAST_LOSSES = 3
"""With fewer nothing but a loss that is not finite is implausible: it is not known how losses move."""

JUMP_SHARE = 0.2
"""A rise by so much of the loss is a jump, where losses hardly move."""

MOST_TIMES_USUAL = 6.0
"""Where they move more, a rise by so many times the usual move is one."""


def is_plausible(before: Sequence[float], loss: float) -> bool:
    """Whether the loss may follow on these, oldest first."""
    if not math.isfinite(loss):
        return False
    latest = before[-KEPT_LOSSES:]
    if len(latest) < LEAST_LOSSES:
        return True
    reference = median(latest[-LEAST_LOSSES:])
    moves = [abs(later - earlier) for earlier, later in pairwise(latest)]
    return loss <= reference + max(JUMP_SHARE * abs(reference), MOST_TIMES_USUAL * median(moves))


def plausible_losses(held_out: Sequence[HeldOut]) -> list[HeldOut]:
    """Those of them that may follow on those before."""
    kept: list[HeldOut] = []
    for each in held_out:
        if is_plausible([one.loss for one in kept], each.loss):
            kept.append(each)
    return kept


def heaviest_loss(state: SwarmState, found: Sequence[HolderLoss]) -> HolderLoss:
    """Of losses of one state on one text: the median by confirmed work, so that outliers do not count."""
    weighed = sorted(
        ((one.loss if math.isfinite(one.loss) else math.inf, one.node_id, one) for one in found),
        key=lambda each: each[:2],
    )
    weights = [worth(state.members[n].work, state.committed_round) for _, n, _ in weighed]
    if not any(weights):
        weights = [1] * len(weighed)
    so_far = 0
    for weight, (_, _, one) in zip(weights, weighed, strict=True):
        so_far += weight
        if 2 * so_far >= sum(weights):
            return one
    raise AssertionError("the last of them reaches the whole weight")


def alarm_of(state: SwarmState, round: int, found: Sequence[HolderLoss]) -> Alarm | None:
    """What follows from what members found of the state after a round; None where all is well.

    Of one member alone nothing follows, unless the swarm has no other.
    """
    good = plausible_losses([each for each in state.held_out if each.round < round])
    before = [each.loss for each in good]
    losses = [one.loss for one in found]
    if not losses or any(is_plausible(before, loss) for loss in losses):
        return None
    if len(found) < 2 and sum(not m.cannot_evaluate for m in present_members(state)) > 1:
        return None
    if not good:
        return Alarm(round=None, reason=f"{_found(losses)} after round {round}, and was never good")
    last = good[-1]
    what = f"{_found(losses)} after round {round}, and was {last.loss:.3f} after round {last.round}"
    if _was_here_before(state, round):
        return Alarm(round=None, reason=f"{what}, again after the run went back from there")
    reached = latest_in_reach(state, last.round)
    if reached is None:
        return Alarm(round=None, reason=f"{what}, and no node that is here can go back so far")
    return Alarm(round=reached, reason=what)


def _was_here_before(state: SwarmState, round: int) -> bool:
    """Whether the run went back by itself from here once: by a ruling, which outlasts this coordinator."""
    later = round - state.rules.evaluate_every_rounds
    return any(
        ruling.kind is RulingKind.ROLLED_BACK
        and ruling.by == COORDINATOR
        and ruling.from_round <= round
        and later <= ruling.last_round
        for ruling in state.rulings  # also those that were withdrawn since
    )


def _found(losses: Sequence[float]) -> str:
    finite = [loss for loss in losses if math.isfinite(loss)]
    return (
        f"the held-out loss was {min(finite):.3f}" if finite else "the held-out loss was no number"
    )
