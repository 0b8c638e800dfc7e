"""Where the run's schedule is at one inner step of a node, and how learning rates rise after a start."""

from node.island.island import InnerWork
from protocol.run.run_spec import RunSpec
from protocol.run.schedule import Position, Schedule, Span


def position_of(spec: RunSpec, work: InnerWork, step: float) -> Position:
    """The middle of the inner step `step` of this work, counted from 0.

    There, neither the first inner step nor the last has the rate of a schedule's end, which may be 0.
    """
    steps = work.steps_before + work.inner_steps
    part = (work.steps_before + step + 0.5) / steps
    span = Schedule.of(spec).span_of(work.round)
    if work.progress_begin is not None:  # amendments have changed the number of rounds
        span = Span(begin=work.progress_begin, end=work.progress_end)
    return Position.at(
        spec.inner,
        part,
        span=span,
        token_clock=work.token_clock,
        round_tokens=work.round_tokens,
    )


def rewarming_steps(spec: RunSpec) -> int:
    """Inner steps over which learning rates rise when moments begin at zero in the midst of a run.

    2 / (1 - beta2), the rule of Ma and Yarats, 2021, "On the adequacy of untuned warmup for adaptive
    optimization", section 5: so long the second moment is a mean of too few gradients, and steps are
    too large. A round's steps at most: a restart should not cost more than one.
    """
    return min(spec.node_steps, round(2 / (1 - spec.inner.beta2)))


class Rewarming:
    """The rise of learning rates after a start with zero moments, unless the run itself begins."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._is_decided = False
        self.steps_left = 0

    def begin(self, token_clock: int) -> None:
        """Before inner steps of a round. Where the clock is at 0 the run's own warm-up is what there is."""
        if not self._is_decided and token_clock > 0:
            self.steps_left = self._num_steps
        self._is_decided = True

    def go_on(self, steps_left: int) -> None:
        """The moments are not zero: only what an earlier rise had left is to be done."""
        self.steps_left = min(steps_left, self._num_steps)
        self._is_decided = True

    def share(self) -> float:
        """What the learning rates of the next inner step are multiplied by."""
        return (self._num_steps - self.steps_left + 1) / (self._num_steps + 1)

    def stepped(self) -> None:
        """An inner step was taken."""
        self.steps_left = max(0, self.steps_left - 1)
