"""When an inner step is traced, and what becomes of what ranks find: no guess, and no great cost."""

from typing import cast

import pytest
import torch
from torch import Tensor

from node.island.island import InnerReport, both
from node.island.measuring import LEAST_STEPS_BETWEEN, LocalCommunication
from node.island.parallel.mesh import Mesh


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class TwoRanks:
    """A mesh as its first rank sees it; the other rank has found `theirs`."""

    num_ranks = 2

    def __init__(self, theirs: float = 0.0) -> None:
        self.theirs = theirs

    def decided_by_first(self, decision: bool) -> bool:
        return decision

    def added(self, values: Tensor) -> Tensor:
        return values + self.theirs


def of_two(
    clock: Clock, *, theirs: float = 0.0, device: str = "cpu"
) -> tuple[LocalCommunication, TwoRanks]:
    mesh = TwoRanks(theirs)
    return LocalCommunication(torch.device(device), cast("Mesh", mesh), clock), mesh


def trace(communication: LocalCommunication, clock: Clock, seconds: float) -> None:
    with communication.traced():
        torch.ones(4, 4) @ torch.ones(4, 4)
        clock.now += seconds


def test_one_rank_has_none_and_nothing_is_traced_for_it() -> None:
    alone = LocalCommunication(torch.device("cpu"), Mesh())
    alone.prepare()
    assert alone.step_to_trace(5) is None
    alone.trained(1.0)
    assert alone.share == 0.0


def test_the_first_step_of_a_process_is_not_traced() -> None:
    communication, _ = of_two(Clock())
    communication.prepare()
    assert communication.step_to_trace(1) is None
    assert communication.share is None
    communication.trained(1.0)
    assert communication.step_to_trace(1) == 0
    assert of_two(Clock())[0].step_to_trace(5) == 1


def test_the_next_trace_waits_until_a_hundred_times_its_cost_was_trained() -> None:
    clock = Clock()
    communication, _ = of_two(clock)
    assert communication.step_to_trace(3) is not None
    trace(communication, clock, seconds=2.0)
    communication.trained(6.0)
    communication.trained(LEAST_STEPS_BETWEEN * 2.0 - 7.0)
    assert communication.step_to_trace(3) is None
    communication.trained(1.0)
    assert communication.step_to_trace(3) is not None


def test_the_island_has_the_mean_of_its_ranks_and_the_latest_counts_half() -> None:
    clock = Clock()
    communication, mesh = of_two(clock, theirs=0.4)
    for expected, theirs in ((0.2, 0.4), (0.25, 0.6)):
        mesh.theirs = theirs
        communication.step_to_trace(3)
        trace(communication, clock, seconds=0.0)
        communication.trained(1.0)
        assert communication.share == pytest.approx(expected)
    communication.step_to_trace(3)
    communication.trained(1.0)  # nothing was traced this time
    assert communication.share == pytest.approx(0.25)


def test_what_one_rank_cannot_measure_the_island_has_not_measured() -> None:
    clock = Clock()
    communication, mesh = of_two(clock, theirs=0.4)
    for theirs in (0.4, float("nan")):
        mesh.theirs = theirs
        communication.step_to_trace(3)
        trace(communication, clock, seconds=0.0)
        communication.trained(1.0)
    assert communication.share is None


def test_a_device_whose_trace_cannot_be_read_is_not_measured() -> None:
    communication, _ = of_two(Clock(), device="mps")
    communication.prepare()
    communication.trained(1.0)
    assert communication.step_to_trace(5) is None
    assert communication.share is None


@pytest.mark.parametrize(
    ("first", "second", "together"), [(1.0, 0.5, 1.5), (None, 0.5, None), (0.5, None, None)]
)
def test_two_parts_of_a_rounds_training_add_up_if_both_were_measured(
    first: float | None, second: float | None, together: float | None
) -> None:
    def report_of(seconds: float | None) -> InnerReport:
        return InnerReport(
            round=1,
            inner_steps=1,
            samples=1,
            tokens=8,
            loss=1.0,
            seconds=4.0,
            communication_seconds=seconds,
        )

    assert both(report_of(first), report_of(second)).communication_seconds == together
