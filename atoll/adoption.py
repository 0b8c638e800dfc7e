"""Whether a loop trains on from the weights that it has taken over, or puts its own back.

Optimizers do that which keep weights in their state, as fp32 masters of bf16 parameters, and loops that
restore what they had put aside. What such a loop contributes is the way from the global parameters to its
own, in each round anew, and the swarm's work never reaches it.
"""

from dataclasses import dataclass

from torch import Tensor

from atoll.errors import ModelMismatchError

FAR = 4.0
"""Inner steps that lie between a loop's own weights and those taken over: nearer ones say nothing."""

NEAR = 1 / 3
"""Share of that way within which the first inner step has to bring the weights back."""

MOST_TIMES = 2
"""Rounds one after another in which that may happen."""


@dataclass(slots=True, kw_only=True)
class AdoptionWatch:
    """What a few values of the weights were, before and after they were taken over, and a step later."""

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
                next_step="give an optimizer that keeps no weights of its own, as fp32 masters in its state; "
                "and restore no average or checkpoint into the model that joined",
            )

    @property
    def wants_values(self) -> bool:
        """Whether the next step's values are of use."""
        return self._adopted is not None
