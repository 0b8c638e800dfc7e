"""What differs between kinds of GPUs: how tensors get there and back, and which precision each one does.

"cuda" is NVIDIA's, and AMD's in torch's builds for ROCm; "xpu" is Intel's and "mps" Apple's. Nothing
here has run on the last two. The choice among them is node.island.ranks.devices'.

Copies between shared memory and a GPU go on a stream of their own: straight, where the driver has pinned that
memory and a box is one piece of it, else through pinned buffers. While the GPU moves one piece, the CPU fills
or empties the buffer of the next. Without either each tensor would be waited for, at the speed of memory that
is not pinned.

Mixed precision of the inner steps has a loss scale where it is fp16. Master weights, gradients, their sums
over samples and ranks, clipping, the optimizer and the loss are fp32 whatever the precision; matrix products
and attention are in the lower one (torch.autocast: "Mixed precision training", Micikevicius et al., 2018).
"""

import contextlib
import math
import os
import resource
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, assert_never

import structlog
import torch
from torch import Tensor

from node.island.parallel.mesh_shape import Precision
from node.island.ranks.faults import TrainingDivergedError
from node.outer_state import Vector
from protocol.errors import ConfigError
from protocol.run.amendments import LOWER_RATES

log = structlog.get_logger()

_COLLECTIVES = {"cuda": "nccl", "xpu": "xccl"}  # in builds for ROCm, "nccl" is AMD's RCCL
_HAVE_STREAMS = ("cuda", "xpu")


def select(device: torch.device) -> None:
    """Makes the rank's GPU the one that torch takes when none is named."""
    if device.type in _HAVE_STREAMS:
        _module_of(device).set_device(device)


def collectives_of(device: torch.device) -> str:
    """What carries CPU tensors and the GPU's between ranks, as torch has it."""
    if device.type == "cpu":
        return "gloo"
    # Decisions and offloaded gradients are CPU tensors, also when the others stay on the GPU.
    return f"cpu:gloo,{device.type}:{_COLLECTIVES[device.type]}"


def has_fast_bf16(device: torch.device) -> bool:
    """Whether the GPU computes in bf16 itself; torch would emulate it without a word."""
    if device.type == "mps":
        return bool(torch.backends.mps.is_macos_or_newer(14, 0))
    with _module_of(device).device(device):
        return bool(_module_of(device).is_bf16_supported(including_emulation=False))


def has_tf32(device: torch.device) -> bool:
    """Whether the GPU's tensor cores take fp32: NVIDIA's since Ampere."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def bind_to_near_cores(device: torch.device, root: Path = Path("/")) -> None:
    """Keeps the rank on the cores that are next to its GPU, where Linux says which those are.

    Copies to a GPU of another socket cross the link between both. Cores that the process may not use
    stay out of it; nothing changes where none are left.
    """
    if device.type != "cuda":
        return
    properties: Any = torch.cuda.get_device_properties(device)  # typed without its PCI place
    place = (
        f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:"
        f"{properties.pci_device_id:02x}.0"
    )
    try:
        listed = (root / "sys/bus/pci/devices" / place / "local_cpulist").read_text()
    except OSError:
        return  # not shown in a container, say
    near = cores_of(listed) & os.sched_getaffinity(0)
    if near:
        os.sched_setaffinity(0, near)


def cores_of(listed: str) -> set[int]:
    """The kernel's lists of cores, such as "0-3,8"."""
    cores: set[int] = set()
    for part in filter(None, listed.strip().split(",")):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores


def name_of(device: torch.device) -> str:
    """The device's name by its maker; "cpu" and "mps" are their own."""
    return (
        str(_module_of(device).get_device_name(device)) if device.index is not None else device.type
    )


def tally_dtype(device: torch.device) -> torch.dtype:
    """What sums over inner steps are kept in: fp64 where every device of the kind has it."""
    return torch.float64 if device.type in ("cpu", "cuda") else torch.float32


def carries_pinned_memory(device: torch.device) -> bool:
    """Whether copies from and to pinned memory go on while others compute."""
    return device.type in _HAVE_STREAMS


def pin(vector: Vector, device: torch.device) -> bool:
    """Has the driver pin memory that another process made, until this one ends; whether it does.

    A GPU then copies from and to it by itself, at the speed of its bus.
    """
    if device.type != "cuda" or not vector.nbytes:
        return False
    runtime: Any = torch.cuda
    with torch.cuda.device(device):
        refusal = int(runtime.cudart().cudaHostRegister(vector.ctypes.data, vector.nbytes, 0))
        if refusal:
            # The runtime would tell its last error to whoever starts the next kernel.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=device)
            log.warning(
                "the driver pins no shared memory, so each exchange copies by a core",
                megabytes=vector.nbytes >> 20,
                cuda_error=refusal,
            )
    return not refusal


def begin_measuring_memory(device: torch.device) -> None:
    """Forgets the peak so far, where the device has one of its own."""
    if device.type in _HAVE_STREAMS:
        _module_of(device).reset_peak_memory_stats(device)


def peak_memory_bytes(device: torch.device) -> int:
    """Most that the rank has held at once: of its GPU, or of the machine's memory."""
    if device.type in _HAVE_STREAMS:
        return int(_module_of(device).max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def _module_of(device: torch.device) -> ModuleType:
    module: ModuleType = torch.get_device_module(device)
    return module


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
        straight: list[Callable[[], None]] = []
        for place, (target, source) in enumerate(self._pieces(self._less(pairs, straight))):
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
        for wait in straight:
            wait()

    def _less(self, pairs: Iterable[Pair], straight: list[Callable[[], None]]) -> Iterator[Pair]:
        """The pairs that need a buffer; the others are begun, and the ends to wait for kept."""
        for target, source in pairs:
            here = source if source.device.type == "cpu" else target
            # Of columns torch would make a copy first, which nothing pins.
            if here.is_contiguous() and here.is_pinned():
                straight.append(self._lane.send(target, source))
            else:
                yield target, source

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


_HIGHEST_LOSS_SCALE = 2.0**16
_STEPS_BEFORE_RISING = 2000
_DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def dtype_of(asked: Precision, device: torch.device) -> torch.dtype:
    """What matrix products are computed in; "auto" is bf16 on a GPU that has it, else fp32.

    Raises ConfigError for a GPU without bf16, which torch would emulate without a word.
    """
    match asked:
        case "auto":
            has_it = device.type in ("cuda", "xpu") and has_fast_bf16(device)
            return torch.bfloat16 if has_it else torch.float32
        case "bf16":
            if device.type != "cpu" and not has_fast_bf16(device):
                raise ConfigError(
                    f'precision = "bf16" asked for, but {name_of(device)} ({device}) has no bf16',
                    next_step='set precision = "fp16" or "fp32" in node.toml',
                )
        case "tf32":
            if not has_tf32(device):
                raise ConfigError(
                    f'precision = "tf32" asked for, but {name_of(device)} ({device}) has no TF32',
                    next_step='set precision = "bf16" or "fp32" in node.toml',
                )
        case "fp16" | "fp32":
            pass
        case _:
            assert_never(asked)
    return _DTYPES[asked]


def autocast(dtype: torch.dtype, device: torch.device) -> torch.autocast:
    """The context in which a loss is computed; it does nothing for fp32."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)


class LossScale:
    """Keeps the gradients of fp16 above its smallest numbers and below its largest.

    Dynamic loss scaling (Micikevicius et al., 2018, section 3.2): an inner step whose gradient is
    not finite is left out and the scale halved; it doubles after many good ones in a row. All ranks
    see the same gradient, so they agree without a word. Scales are powers of two: scaling is exact.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._is_needed = dtype == torch.float16
        self._steps_since_change = 0
        self.value = _HIGHEST_LOSS_SCALE if self._is_needed else 1.0

    def kept(self) -> tuple[float, int] | None:
        """The scale, and the steps since it was changed; None where there is none."""
        return (self.value, self._steps_since_change) if self._is_needed else None

    def take_up(self, value: float, steps_since_change: int) -> None:
        """Goes on from what was kept, where a scale is needed."""
        if self._is_needed:
            self.value, self._steps_since_change = value, steps_since_change

    def remove_from(self, gradients: list[Tensor]) -> None:
        """Divides the gradients by the scale, in place."""
        if self._is_needed:
            for gradient in gradients:
                gradient.div_(self.value)

    def allows(self, norm: Tensor) -> bool:
        """Whether to take the step with this gradient norm; moves the scale.

        Raises TrainingDivergedError when no scale is low enough. Only fp16 waits for the norm.
        """
        if not self._is_needed:
            return True
        self._steps_since_change += 1
        if not math.isfinite(norm.item()):
            if self.value <= 1.0:
                raise TrainingDivergedError(
                    "gradients overflow in fp16 even without a loss scale",
                    next_step=f'set precision = "bf16" or "fp32" in node.toml, or {LOWER_RATES}',
                )
            self.value /= 2
            self._steps_since_change = 0
            return False
        if self._steps_since_change >= _STEPS_BEFORE_RISING:
            self.value = min(_HIGHEST_LOSS_SCALE, 2 * self.value)
            self._steps_since_change = 0
        return True
