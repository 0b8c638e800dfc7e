"""Inner steps of a set length: where in a step the time is spent, and when a step was late."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from benchmarks.wan.peers.pace import BACKWARD_ENDS, FORWARD_ENDS, Pace

STEP_SECONDS = 3.0


class Times:
    """A clock that only sleep and work move."""

    def __init__(self) -> None:
        self.now = 100.0

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


class Working(nn.Module):
    """A layer whose forward pass takes time, and that notes when its gradient came."""

    def __init__(self, times: Times, work: Callable[[], float]) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self._times = times
        self._work = work

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._times.now += self._work()
        out: torch.Tensor = self.linear(x)
        return out


def stepped(seconds_of_layer: float, *, step_seconds: float = STEP_SECONDS) -> tuple[Pace, Times]:
    """One step of two layers, to its end."""
    times = Times()
    layers = nn.ModuleDict({str(i): Working(times, lambda: seconds_of_layer) for i in range(2)})
    pace = Pace(step_seconds, clock=lambda: times.now, sleep=times.sleep)
    pace.attach(layers)
    pace.begin()
    x = torch.ones(1, 2, requires_grad=True)
    for layer in layers.values():
        x = layer(x)
    assert times.now >= 100.0 + FORWARD_ENDS * step_seconds
    loss = x.sum()
    loss.backward()
    assert times.now >= 100.0 + BACKWARD_ENDS * step_seconds - 1e-9
    pace.end()
    return pace, times


def test_a_step_takes_its_length_however_short_its_work_is() -> None:
    pace, times = stepped(0.01)
    assert times.now == pytest.approx(100.0 + STEP_SECONDS)
    assert (pace.steps, pace.late_steps) == (1, 0)


def test_a_step_with_too_much_work_is_late_and_counted() -> None:
    pace, times = stepped(0.6 * STEP_SECONDS)
    assert times.now == pytest.approx(100.0 + 1.2 * STEP_SECONDS)
    assert (pace.steps, pace.late_steps) == (1, 1)


def test_without_a_length_nothing_is_slept_and_nothing_is_late() -> None:
    pace, times = stepped(0.5, step_seconds=0.0)
    assert times.now == pytest.approx(101.0)
    assert pace.late_steps == 0


def test_outside_of_steps_nothing_is_slept() -> None:
    times = Times()
    layers = nn.ModuleDict({"0": Working(times, lambda: 0.0)})
    pace = Pace(STEP_SECONDS, clock=lambda: times.now, sleep=times.sleep)
    pace.attach(layers)
    with torch.no_grad():
        layers["0"](torch.ones(1, 2))
    assert times.now == 100.0
