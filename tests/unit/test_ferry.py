"""Copies through buffers: everything arrives, however late the lane is."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from node.island.ranks import accelerator
from node.island.ranks.accelerator import Ferry, Pair, copies_of, copy_in_turn


class LateLane:
    """Copies as late as it may: when its end is waited for."""

    def __init__(self) -> None:
        self.under_way: list[Pair] = []
        self.most_under_way = 0
        self.largest = 0

    def send(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        own = (target, source)
        self.under_way.append(own)
        self.most_under_way = max(self.most_under_way, len(self.under_way))
        self.largest = max(self.largest, source.numel())

        def wait() -> None:
            self.under_way = [pair for pair in self.under_way if pair is not own]
            target.copy_(source)

        return wait


class OnGpu(torch.Tensor):
    """Says that it is on a GPU; its values are where all are."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # torch has an attribute
        return torch.device("cuda:0")


SHAPES = [(7, 3), (1,), (2, 30), (0, 4), (5,), (16,), (3, 2, 5)]  # 30 in a row: more than a buffer


@pytest.mark.parametrize("from_gpu", [True, False])
def test_pieces_of_every_size_arrive_whole_through_two_small_buffers(from_gpu: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    sources = [torch.randn(shape, generator=generator) for shape in SHAPES]
    # Columns of something wider, as boxes of tensor-parallel ranks are.
    targets = [torch.zeros((*shape, 2))[..., 0] for shape in SHAPES]
    near = [source.as_subclass(OnGpu) if from_gpu else source for source in sources]
    lane = LateLane()
    ferry = Ferry(lane, [torch.zeros(16), torch.zeros(16)])
    for _ in range(2):  # buffers are used again
        for target in targets:
            target.zero_()
        ferry(zip(targets, near, strict=True))
        assert all(torch.equal(t, s) for t, s in zip(targets, sources, strict=True))
    assert lane.largest == 16


def test_one_piece_is_under_way_while_the_next_is_filled() -> None:
    lane = LateLane()
    Ferry(lane, [torch.zeros(4), torch.zeros(4)])([(torch.zeros(40), torch.ones(40))])
    assert lane.most_under_way == 2


@pytest.mark.parametrize("from_gpu", [True, False])
def test_what_is_pinned_already_needs_no_buffer_unless_it_is_columns(
    from_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    lane = LateLane()
    whole = torch.arange(120.0).view(40, 3)
    outer = torch.zeros(40, 3)
    near = whole.as_subclass(OnGpu) if from_gpu else whole
    ferry = Ferry(lane, [torch.zeros(8), torch.zeros(8)])
    ferry([(outer, near)])
    assert lane.largest == 120
    assert torch.equal(outer, whole)
    assert not lane.under_way
    lane.largest = 0
    ferry([(outer[:, 1], near[:, 2])])
    assert lane.largest == 8
    assert torch.equal(outer[:, 1], whole[:, 2])


def test_a_cpu_copies_straight_and_gpus_of_two_makers_by_ferry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accelerator, "_StreamLane", lambda device: LateLane())
    monkeypatch.setattr(torch, "empty", lambda number, pin_memory: torch.zeros(number))
    assert copies_of(torch.device("cpu")) is copy_in_turn
    assert copies_of(torch.device("mps")) is copy_in_turn
    for gpu in ("cuda:0", "xpu:1"):
        assert isinstance(copies_of(torch.device(gpu)), Ferry)
