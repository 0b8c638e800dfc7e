"""The pace of a rank: how its rates rise at first, and when it tells of inner steps, rests, or asks to go on.

The steps themselves are in trainer.py.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from node.island.island import Progress
from node.island.ranks.accelerator import tally_dtype
from node.island.ranks.faults import TrainingDivergedError
from protocol.run.amendments import LOWER_RATES

PROGRESS_SECONDS = 0.5

LOOK_SECONDS = 0.1
"""How long ranks train at most before the first tells the others again whether to go on."""


class Tally:
    """Sums of loss and gradient norm, kept on the device: reading them makes a GPU wait."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(2, dtype=tally_dtype(device), device=device)
        self._loss_before = 0.0
        self._steps_before = 0
        self._losses_before = 0
        self._mean = 0.0
        self.steps = 0
        self.num_losses = 0
        self.skipped_steps = 0
        self.loss_sum = 0.0

    def add(self, loss: Tensor | None, norm: Tensor | None) -> None:
        """Without a norm the step was skipped: its loss counts, if it is finite.

        Without a loss there was nothing to learn from.
        """
        self.steps += 1
        if loss is not None:
            self._sums += torch.stack((loss, torch.zeros_like(loss) if norm is None else norm))
            self.num_losses += 1
            self.skipped_steps += norm is None

    def read(self, training_round: int) -> float:
        """Mean loss since the last reading that found any; raises TrainingDivergedError."""
        self.loss_sum, norm_sum = self._sums.tolist()
        # A finite loss with an infinite gradient has ruined the weights as well.
        if not (math.isfinite(self.loss_sum) and math.isfinite(norm_sum)):
            is_first = training_round == 1 and not self._steps_before
            raise TrainingDivergedError(
                f"round {training_round}: the loss or its gradient is no longer finite "
                f"(inner step {self._steps_before + 1} to {self.steps})",
                next_step=(
                    "look at the loss and its samples: targets that are all left out, a logarithm or a "
                    "division of 0; else "
                    if is_first
                    else ""
                )
                + LOWER_RATES,
            )
        if self.num_losses > self._losses_before:
            num_new = self.num_losses - self._losses_before
            self._mean = (self.loss_sum - self._loss_before) / num_new
        self._loss_before, self._losses_before = self.loss_sum, self.num_losses
        self._steps_before = self.steps
        return self._mean


class Telling:
    """Tells of a round's inner steps while they go on; not after each, as to read a loss makes a GPU wait."""

    def __init__(
        self,
        tally: Tally,
        *,
        round: int,
        since: float,
        clock: Callable[[], float],
        tell: Callable[[Progress], None],
    ) -> None:
        self._tally = tally
        self._round = round
        self._clock = clock
        self._tell = tell
        self._at, self._steps, self._tokens = since, 0, 0  # when it told last, and of what

    def look(self, now: float, *, tokens: int) -> float:
        """Tells if it is time to, with so many tokens until now; returns the time after that."""
        if now - self._at < PROGRESS_SECONDS:
            return now
        loss = self._tally.read(self._round)
        now = self._clock()  # a GPU has caught up only now
        self._tell(
            Progress(
                round=self._round,
                inner_step=self._tally.steps,
                loss=loss,
                tokens_per_second=(tokens - self._tokens) / (now - self._at),
            )
        )
        self._at, self._steps, self._tokens = now, self._tally.steps, tokens
        return now

    def end(self) -> None:
        """Reads what steps since then have summed."""
        if self._tally.steps > self._steps:
            self._tally.read(self._round)


def steps_until_next_look(seconds_left: float, *, per_step: float, num_ranks: int) -> int:
    """Inner steps until the ranks agree again, at least one; a lone rank looks after each.

    All wait for what the first one says: after each of many short steps that would cost more than
    they do.
    """
    if num_ranks == 1 or per_step <= 0:
        return 1
    return max(1, int(min(LOOK_SECONDS, seconds_left) / per_step))


class Rests:
    """The rests of a rank between inner steps: of all its time since a moment, `load` is training."""

    def __init__(
        self, load: float, *, clock: Callable[[], float], rest: Callable[[float], None]
    ) -> None:
        self.seconds = 0.0  # until now
        self._load = load
        self._clock = clock
        self._rest = rest

    def take(self, *, since: float, most_seconds: float) -> float:
        """Rests for as long as is due, not beyond so many seconds since then; returns the time."""
        began_at = self._clock()
        elapsed = began_at - since
        due = (elapsed - self.seconds) / self._load - elapsed
        self._rest(max(0.0, min(due, most_seconds - elapsed)))
        now = self._clock()
        self.seconds += now - began_at
        return now


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
