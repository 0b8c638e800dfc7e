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
"""Share of the way to the adopted weights within which the first inner step brings the own ones back."""

MOST_TIMES = 2
"""Rounds one after another in which that may happen."""


@dataclass(slots=True, kw_only=True)
class Adoption:
    """A few values of the weights before and after they were taken over, and a step later.

    An optimizer that keeps weights of its own where nobody finds them, and a loop that restores what it had
    put aside, bring their own weights back. What they contribute is the way from the global parameters to
    those, in each round anew, and the swarm's work never reaches them.
    """

    _own: Tensor | None = None
    _adopted: Tensor | None = None
    _first: Tensor | None = None
    _times: int = 0

    def took_over(self, own: Tensor, adopted: Tensor) -> None:
        """The values before and after; of several takings before a step those of the first and the last."""
        if self._own is None or self._first is not None:
            self._own, self._first = own, None
        self._adopted = adopted

    def took_a_step(self, values: Tensor) -> None:
        """The values after the first inner step since, and after the second.

        Raises ModelMismatchError. The second step tells how long one is: a single long step is no return.
        """
        if self._own is None or self._adopted is None:
            return
        if self._first is None:
            self._first = values
            return
        own, adopted, first = self._own, self._adopted, self._first
        self._own = self._adopted = self._first = None
        way, step = float((own - adopted).norm()), float((values - first).norm())
        is_back = 0 < FAR * step < way and float((first - own).norm()) < NEAR * way
        self._times = self._times + 1 if is_back else 0
        if self._times >= MOST_TIMES:
            raise ModelMismatchError(
                f"in {self._times} rounds one after another the first inner step has put this loop's own "
                "weights back over those taken over from the swarm",
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
        is_rare = 2 * int(self.times_by_others) < self.steps
        return is_rare and by_optimizers > 0 and max(FAR * by_optimizers, usual) < by_others

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
