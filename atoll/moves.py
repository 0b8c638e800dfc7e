"""What has moved the weights of a loop, by a few of their values, and whether that is training.

An optimizer's step is. What else may have moved them: the loop itself, which clips or normalises after each
step, or has put old weights back.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.errors import ModelMismatchError

FAR = 4.0
"""Inner steps that lie between weights that are told apart: nearer ones say nothing."""

NEAR = 1 / 3
"""Share of the way back to the loop's own weights that no step of training goes."""

ALONG = 0.5
"""Cosine with the way down its gradient from which on a step is one of training, wherever it leads."""

MOST_TIMES = 2
"""Rounds one after another in which that may happen."""


@dataclass(slots=True, kw_only=True)
class Adoption:
    """Whether the loop trains on from what it has taken over, or a step leads back to its own weights.

    An optimizer that keeps weights where nobody finds them does that, and a loop that restores what it had
    put aside. What they contribute is the way from the global parameters to those, in each round anew, and
    the swarm's work reaches them in part, or never.

    Looked at are values that the swarm has brought nearer to zero. Those that it has taken further out may
    come back by an optimizer that clips or normalises within its step, to where the loop's own were clipped.
    """

    _own: Tensor | None = None  # before the weights were taken over …
    _values: Tensor | None = None  # … and now
    _back: Tensor | None = None  # the way to the loop's own, of those that are nearer to zero now
    _steps: int = 0  # since then
    _lengths: Tensor | float = 0.0  # of all steps together
    _most: Tensor | float = 0.0  # of the way that one step has gone back, as a share
    _its_length: Tensor | float = 0.0
    _times: int = 0  # rounds one after another in which one has gone far

    def took_over(self, own: Tensor, adopted: Tensor) -> None:
        """The values before and after; of several takings before a step those of the first and the last."""
        if self._own is None or self._steps:
            self._own = own
        is_nearer = adopted.abs() < self._own.abs()
        self._values, self._back = adopted, (self._own - adopted).where(is_nearer, 0.0)
        self._steps, self._lengths, self._most, self._its_length = 0, 0.0, 0.0, 0.0

    def took_a_step(self, values: Tensor, gradient: Tensor | None = None) -> None:
        """The values after an inner step, and the gradient of it where it is known.

        On data of its own a loop may train back to its own optimum, and by a few steps where it is easy.
        """
        if self._back is None or self._values is None:
            return
        step, self._values = values - self._values, values
        share = step.dot(self._back) / self._back.dot(self._back).clamp(min=1e-30)
        if gradient is not None and len(gradient) == len(step):
            along = -step.dot(gradient) / (step.norm() * gradient.norm()).clamp(min=1e-30)
            share = share.where(along < ALONG, 0.0)
        most = torch.as_tensor(self._most).to(share)
        self._its_length = torch.where(
            share > most, step.norm(), torch.as_tensor(self._its_length).to(share)
        )
        self._most, self._lengths = most.maximum(share), self._lengths + step.norm()
        self._steps += 1

    def is_undone(self) -> bool:
        """At a round's end: whether a step has led back, far further than the others, and again so."""
        if self._back is None or self._steps < 2:
            return False
        usual = float(self._lengths - self._its_length) / (self._steps - 1)
        is_back = 0 < FAR * usual < float(self._back.norm()) and float(self._most) > NEAR
        self._times = self._times + 1 if is_back else 0
        self._own = self._back = None
        return self._times >= MOST_TIMES

    def refusal(self) -> ModelMismatchError:
        """What to say then."""
        return ModelMismatchError(
            f"in {MOST_TIMES} rounds one after another a step has put weights of this loop's own back over "
            "those taken over from the swarm, all or in part",
            next_step="give an optimizer that keeps weights nowhere but in its state, if at all; "
            "and restore no average or checkpoint into the model that joined",
        )


@dataclass(slots=True, kw_only=True)
class Moves:
    """How far a few values of the weights have been moved in a round, and by what.

    Kept where the weights are: reading them makes a GPU wait.
    """

    held: Tensor  # as they were given to the loop, or an optimizer left them
    steps: int = 0
    optimizer_steps: int = 0
    by_optimizers: Tensor | float = 0.0  # the furthest that a step has moved them …
    by_others: Tensor | float = 0.0  # … and anything else …
    times_by_others: Tensor | int = 0  # … and how often

    def came_to(self, values: Tensor, *, by_optimizer: bool) -> None:
        """Takes in what they are now."""
        if len(values) == len(self.held):
            way = (values - self.held).norm()
            if by_optimizer:
                self.by_optimizers = torch.as_tensor(self.by_optimizers).to(way).maximum(way)
            else:
                self.by_others = torch.as_tensor(self.by_others).to(way).maximum(way)
                self.times_by_others = self.times_by_others + (way > 0)
        self.held = values
        self.optimizer_steps += by_optimizer

    def went_astray(self, usual: float) -> bool:
        """Whether anything but an optimizer has moved them, seldom and further than `usual`.

        What moves them at most steps is a part of training. What brings them back into bounds now and then
        moves them less than what has taken them out.
        """
        by_optimizers, by_others = float(self.by_optimizers), float(self.by_others)
        return (
            2 * int(self.times_by_others) < self.steps
            and by_optimizers > 0
            and max(FAR * by_optimizers, usual) < by_others
        )

    def refusal(self) -> ModelMismatchError:
        """What to say then."""
        times = float(self.by_others) / max(float(self.by_optimizers), 1e-30)
        return ModelMismatchError(
            f"something beside the optimizer has moved the weights {times:.3g} times as far as its longest "
            "step of this round, and further than the swarm has: as a checkpoint does that is loaded after "
            "join, or an average that is left in the model",
            next_step="load before join, which takes the global parameters over, and put back what you swap "
            "in for an evaluation",
        )
