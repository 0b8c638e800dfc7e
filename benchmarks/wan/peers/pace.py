"""Inner steps of a set length, as on a GPU of one's own: what is not computed is slept.

Two cores carry all nodes and the network between them, so real steps would take as long as the
others leave time for. Each layer has its time instead, within the step: the forward pass takes a third
of it, the backward pass nearly all of the rest. A peer that sends gradients while others are still
computed has as long for it as it would have on a GPU.
"""

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

FORWARD_ENDS = 1 / 3
BACKWARD_ENDS = 0.95
"""Shares of a step; what comes after it is the optimizer's."""

LATE = 1.1
"""A step whose own work took more than so much of its time was late: the machine was too busy."""


class Pace:
    """Slows one node's model down; the same for every contender. 0 seconds leave it as it is."""

    def __init__(
        self,
        step_seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._step_seconds = step_seconds
        self._clock = clock
        self._sleep = sleep
        self._began_at: float | None = None
        self._is_late = False
        self.steps = 0
        self.late_steps = 0

    def attach(self, layers: nn.ModuleDict) -> None:
        """Gives each layer its times."""
        num = len(layers)
        for i, layer in enumerate(layers.values()):
            forward = FORWARD_ENDS * (i + 1) / num
            backward = FORWARD_ENDS + (BACKWARD_ENDS - FORWARD_ENDS) * (num - i) / num
            layer.register_forward_hook(self._after(forward))
            layer.register_forward_pre_hook(self._watch_gradient(backward, is_last=i == 0))

    def begin(self) -> None:
        """An inner step begins."""
        self._began_at = self._clock()
        self._is_late = False

    def end(self) -> None:
        """It ends, with the optimizer's part, once its time is over."""
        self.wait_until(1.0)
        self.steps += 1
        self.late_steps += self._is_late
        self._began_at = None

    def wait_until(self, share: float) -> None:
        """Waits for that share of the step's time; outside of steps, as in evaluation, it does not."""
        if self._began_at is None or not self._step_seconds:
            return
        left = self._began_at + share * self._step_seconds - self._clock()
        if left > 0:
            self._sleep(left)

    def _after(self, share: float) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self.wait_until(share)

        return hook

    def _watch_gradient(self, share: float, *, is_last: bool) -> Callable[..., None]:
        """The gradient of a layer's input is there when those of its weights are."""

        def on_gradient(_: Tensor) -> None:
            if is_last and self._began_at is not None and self._step_seconds:
                # Own work only: what a peer waits for the network comes after the last gradient.
                self._is_late = self._clock() - self._began_at > LATE * self._step_seconds
            self.wait_until(share)

        def hook(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            if isinstance(inputs[0], Tensor) and inputs[0].requires_grad:
                inputs[0].register_hook(on_gradient)  # type: ignore[no-untyped-call]  # torch's

        return hook
