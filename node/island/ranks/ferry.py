"""Copies between shared memory and a GPU: through pinned memory, on a stream of their own.

While the GPU moves one piece, the CPU fills or empties the buffer of the next. Without it each
tensor would be waited for, and go at the speed of memory that is not pinned.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from node.island.ranks.accelerator import carries_pinned_memory

_BUFFER_ELEMENTS = 1 << 22  # 16 MiB: its way takes far longer than the start of a copy

Pair = tuple[Tensor, Tensor]
"""Where to, and from where; of one shape, fp32."""

Copies = Callable[[Iterable[Pair]], None]
"""Copies pairs, of which one side is in the CPU's memory; all are there when it returns."""


def copies_of(device: torch.device) -> Copies:
    """How a rank whose weights are on this device copies."""
    if not carries_pinned_memory(device):
        return copy_in_turn
    buffers = [torch.empty(_BUFFER_ELEMENTS, pin_memory=True) for _ in range(2)]
    return Ferry(_StreamLane(device), buffers)


def copy_in_turn(pairs: Iterable[Pair]) -> None:
    """Where nothing can go on meanwhile."""
    for target, source in pairs:
        target.copy_(source)


class Lane(Protocol):
    """Copies one after the other, while the caller goes on."""

    def send(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        """Begins a copy; what it returns waits for its end."""


@dataclass(slots=True, kw_only=True)
class _Buffer:
    memory: Tensor
    wait: Callable[[], None] | None = None  # until its copy has ended
    unload: Pair | None = None  # what is to be done with it then


class Ferry:
    """Buffers that take turns between the CPU and a lane."""

    def __init__(self, lane: Lane, buffers: list[Tensor]) -> None:
        self._lane = lane
        self._buffers = [_Buffer(memory=memory) for memory in buffers]
        self._num_elements = len(buffers[0])

    def __call__(self, pairs: Iterable[Pair]) -> None:
        """See Copies."""
        for place, (target, source) in enumerate(self._pieces(pairs)):
            buffer = self._buffers[place % len(self._buffers)]
            _empty(buffer)
            staged = buffer.memory[: source.numel()].view(source.shape)
            if source.device.type == "cpu":
                staged.copy_(source)
                buffer.wait = self._lane.send(target, staged)
            else:
                buffer.wait = self._lane.send(staged, source)
                buffer.unload = (target, staged)
        for buffer in self._buffers:
            _empty(buffer)

    def _pieces(self, pairs: Iterable[Pair]) -> Iterator[Pair]:
        """As many rows as fit into a buffer; columns are cut only if one row does not."""
        for target, source in pairs:
            if not source.numel():
                continue
            of_row = source[0].numel()
            if of_row > self._num_elements:
                yield from self._pieces(zip(target.unbind(), source.unbind(), strict=True))
                continue
            rows = self._num_elements // of_row
            yield from zip(torch.split(target, rows), torch.split(source, rows), strict=True)


def _empty(buffer: _Buffer) -> None:
    if buffer.wait is not None:
        buffer.wait()
        buffer.wait = None
    if buffer.unload is not None:
        target, staged = buffer.unload
        target.copy_(staged)
        buffer.unload = None


class _StreamLane:
    """A stream of the GPU beside the one that trains."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._torch: Any = torch.get_device_module(device)
        self._stream = self._torch.Stream(device)

    def send(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        """See Lane."""
        # The optimizer may still be at the weights that leave, and a forward at those that go.
        self._stream.wait_stream(self._torch.current_stream(self._device))
        with self._torch.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = self._torch.Event()
            event.record(self._stream)
        wait: Callable[[], None] = event.synchronize
        return wait
