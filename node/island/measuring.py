"""What a rank's device could do and what it did, and how long its inner steps waited for other ranks.

Operations are counted by formula (docs/watching.md). Names are compared whole, since a part of a GPU is named
like the GPU, and slower. A device that the table does not name has the peak that its rank has measured by
matrix products, or none.

A trace of one step tells how much of it a rank spends on the other ranks of its island. Exposed
communication: a collective is under way and nothing is computed. What overlaps with computing costs nothing
and is not in it; a rank that waits for a slower one of its island is. One step now and then is traced, so
that tracing takes a hundredth of training at most. The node's share is the mean over its ranks of

    |collectives without computing| / |the traced step| * share of the time in inner steps

A trace tells what runs when. A CPU's tells operators on their threads, and collectives of gloo on threads of
its own. A GPU's tells kernels and copies on its streams; there the host only orders what is to be done. The
arithmetic on traces comes first, and is pure.
"""

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.autograd import profiler

from node.island.parallel.mesh import Mesh
from node.island.ranks.accelerator import name_of, peak_memory_bytes
from protocol.run.models import DecoderModel
from protocol.run.run_spec import RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Most that a GPU does, in FLOP/s, by its vendor: dense, summed in fp32."""

    half: float  # bf16 or fp16, on tensor cores; TF32 has half of it there
    single: float  # fp32, outside them


_PEAKS = {
    "NVIDIA GB200": Peak(half=2500e12, single=80e12),
    "NVIDIA B200": Peak(half=2250e12, single=75e12),
    "NVIDIA H200": Peak(half=989.4e12, single=66.9e12),
    "NVIDIA H20": Peak(half=148e12, single=44e12),
    "NVIDIA H800": Peak(half=989.4e12, single=66.9e12),
    "NVIDIA H100 80GB HBM3": Peak(half=989.4e12, single=66.9e12),
    "NVIDIA H100 PCIe": Peak(half=756e12, single=51.2e12),
    "NVIDIA A100-SXM4-40GB": Peak(half=312e12, single=19.5e12),
    "NVIDIA A100-SXM4-80GB": Peak(half=312e12, single=19.5e12),
    "NVIDIA A100-PCIE-40GB": Peak(half=312e12, single=19.5e12),
    "NVIDIA A100 80GB PCIe": Peak(half=312e12, single=19.5e12),
    "NVIDIA A800-SXM4-80GB": Peak(half=312e12, single=19.5e12),
    "NVIDIA L40S": Peak(half=362e12, single=91.6e12),
    "NVIDIA L4": Peak(half=121e12, single=30.3e12),
    "NVIDIA A10": Peak(half=125e12, single=31.2e12),
    "NVIDIA RTX A6000": Peak(half=154.8e12, single=38.7e12),
    "NVIDIA GeForce RTX 5090": Peak(half=209.5e12, single=104.8e12),
    "NVIDIA GeForce RTX 4090": Peak(half=165.2e12, single=82.6e12),
    "NVIDIA GeForce RTX 3090": Peak(half=71e12, single=35.6e12),
    "Tesla V100-SXM2-16GB": Peak(half=125e12, single=15.7e12),
    "Tesla V100-SXM2-32GB": Peak(half=125e12, single=15.7e12),
    "Tesla T4": Peak(half=65e12, single=8.1e12),
    "AMD Instinct MI300X": Peak(half=1307.4e12, single=163.4e12),
    "AMD Instinct MI325X": Peak(half=1307.4e12, single=163.4e12),
    "AMD Instinct MI250X": Peak(half=191.5e12, single=23.9e12),  # of one of its two dies
}


def flops_per_token(spec: RunSpec) -> int:
    """Floating-point operations of forward and backward for one token.

    PaLM (Chowdhery et al., 2022, appendix B): 6 for each weight of a matrix product (the head is
    one, the embedding is not), and 12 · layers · hidden size · context for attention, without a
    discount for the causal mask; a layer with a sliding window counts that for the context. What is
    computed again does not count.
    """
    if spec.description is not None and spec.description.flops_per_token is not None:
        return spec.description.flops_per_token
    if not isinstance(spec.model, DecoderModel):
        return 6 * spec.num_parameters // spec.model.context  # nobody could count them
    model = spec.model
    weights = model.vocab_size * model.hidden_size  # of the head, also when it is the embedding
    weights += sum(
        tensor.num_elements
        for tensor in spec.tensors
        if tensor.layer is not None and len(tensor.shape) == 2
    )
    attended = sum(model.window_of(i) or model.context for i in range(model.num_layers))
    attention = model.num_heads * model.values_of_head * attended
    return 6 * weights + 12 * attention


def peak_of(device_name: str, dtype: torch.dtype) -> float | None:
    """Most FLOP/s of a GPU with that name; None when it is not known."""
    peak = _PEAKS.get(device_name)
    if peak is None:
        return None
    if dtype != torch.float32:
        return peak.half
    return peak.half / 2 if torch.get_float32_matmul_precision() != "highest" else peak.single


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandHardware:
    """Over all ranks of an island."""

    peak_flops_per_second: float | None  # None: not known of every rank
    is_peak_measured: bool  # of some rank, for no table names its device
    peak_memory_bytes: int  # of the rank that took most


def measure_peak_if_unknown(device: torch.device, dtype: torch.dtype) -> None:
    """Takes a moment on a device that the table does not name."""
    if peak_of(name_of(device), dtype) is None:
        measure_peak(device, dtype)


def measured(device: torch.device, dtype: torch.dtype, mesh: Mesh) -> IslandHardware:
    """What all ranks' devices can do and have taken; all ranks ask together."""
    own = torch.zeros(3, mesh.num_ranks, dtype=torch.float64)
    known = peak_of(name_of(device), dtype)
    own[0, mesh.rank] = known or measured_peak_of(device, dtype) or 0.0
    own[1, mesh.rank] = peak_memory_bytes(device)
    own[2, mesh.rank] = known is None
    peaks, memory, is_measured = mesh.added(own)
    return IslandHardware(
        peak_flops_per_second=peaks.sum().item() if bool((peaks > 0).all()) else None,
        is_peak_measured=bool((peaks > 0).all() and is_measured.any()),
        peak_memory_bytes=int(memory.max()),
    )


_SIZES = {"cpu": 512}
_SIZE_ELSEWHERE = 4096
_MOST_PRODUCTS = 8
_MOST_SECONDS = 0.1

Key = tuple[str, torch.dtype]

_peaks: dict[Key, float] = {}  # of this process


def measure_peak(
    device: torch.device, dtype: torch.dtype, clock: Callable[[], float] | None = None
) -> float:
    """Measures and keeps the peak of a device, in FLOP/s; a rank has one device."""
    if clock is None:
        clock = time.thread_time if device.type == "cpu" else time.perf_counter
    size = _SIZES.get(device.type, _SIZE_ELSEWHERE)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = left @ right  # libraries load and choose at the first one
    wait_for(device)
    began_at = clock()
    least = float("inf")
    for _ in range(_MOST_PRODUCTS):
        started_at = clock()
        torch.mm(left, right, out=product)
        wait_for(device)
        least = min(least, clock() - started_at)
        if clock() - began_at >= _MOST_SECONDS:
            break
    _peaks[device.type, dtype] = 2 * size**3 / least
    return _peaks[device.type, dtype]


def measured_peak_of(device: torch.device, dtype: torch.dtype) -> float | None:
    """What was measured; None when nothing was."""
    return _peaks.get((device.type, dtype))


def wait_for(device: torch.device) -> None:
    """Returns when the device has done all that it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


Span = tuple[int, int]
"""Beginning and end, in nanoseconds."""

_COLLECTIVES = ("gloo:", "c10d::", "_c10d_functional::")
_COMPUTING = ("aten::", "## Call CompiledFxGraph")
_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})  # and not what only names them


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """An entry of a trace."""

    name: str
    thread: int
    began_at: int  # ns
    ended_at: int  # ns
    on_device: str = ""  # kind of activity there; empty for what a CPU did


def exposed_share(operations: Iterable[Operation], *, within: str) -> float | None:
    """Share of the entry named `within` in which a collective runs and nothing is computed.

    By the GPU's own activities where there are any, else by what the CPU did. None without that
    entry, and when the trace of a GPU holds nothing that it did.
    """
    held = list(operations)
    windows = [o for o in held if o.name == within and not o.on_device]
    if len(windows) != 1 or windows[0].ended_at <= windows[0].began_at:
        return None
    window = [(windows[0].began_at, windows[0].ended_at)]
    on_device = [o for o in held if o.on_device in _ON_DEVICE]
    if on_device:
        communicating = _joined(_span(o) for o in on_device if _is_nccl(o))
        computing = _joined(_span(o) for o in on_device if not _is_nccl(o))
    else:
        communicating = _joined(_span(o) for o in held if o.name.startswith(_COLLECTIVES))
        computing = _computing_on_threads(held)
    exposed = _without(_common(communicating, window), computing)
    return _length(exposed) / _length(window)


def _is_nccl(operation: Operation) -> bool:
    return operation.name.startswith("nccl")


def _computing_on_threads(operations: Iterable[Operation]) -> list[Span]:
    """An operator on a cut tensor holds the collective that it waits for: that is left out."""
    by_thread: dict[int, tuple[list[Span], list[Span]]] = defaultdict(lambda: ([], []))
    for operation in operations:
        computing, waiting = by_thread[operation.thread]
        if operation.name.startswith(_COMPUTING):
            computing.append(_span(operation))
        elif operation.name.startswith(_COLLECTIVES):
            waiting.append(_span(operation))
    return _joined(
        span
        for computing, waiting in by_thread.values()
        for span in _without(_joined(computing), _joined(waiting))
    )


def _span(operation: Operation) -> Span:
    return operation.began_at, operation.ended_at


def _joined(spans: Iterable[Span]) -> list[Span]:
    """The same time, as spans that neither overlap nor touch, in order."""
    joined: list[Span] = []
    for began, ended in sorted(spans):
        if joined and began <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(ended, joined[-1][1]))
        else:
            joined.append((began, ended))
    return joined


def _without(spans: list[Span], others: list[Span]) -> list[Span]:
    """What of joined spans lies in none of the others, which are joined too."""
    left: list[Span] = []
    first = 0
    for began, ended in spans:
        while first < len(others) and others[first][1] <= began:
            first += 1
        at, place = began, first
        while place < len(others) and others[place][0] < ended:
            if others[place][0] > at:
                left.append((at, others[place][0]))
            at = max(at, others[place][1])
            place += 1
        if at < ended:
            left.append((at, ended))
    return left


def _common(spans: list[Span], others: list[Span]) -> list[Span]:
    return _without(spans, _without(spans, others))


def _length(spans: Iterable[Span]) -> int:
    return sum(ended - began for began, ended in spans)


LEAST_STEPS_BETWEEN: float = 100
"""Training between two traces, in the time that the last one took with its step and all."""

SMOOTHING = 0.5
"""What a new trace counts beside all before it: one step says little."""

_TRACED = "traced inner step"
_DEVICES = ("cpu", "cuda")  # whose traces node.island.measuring can read


class LocalCommunication:
    """Traces inner steps of a rank. All ranks make the same calls in the same order."""

    def __init__(
        self,
        device: torch.device,
        mesh: Mesh,
        clock: Callable[[], float] = time.perf_counter,
        *,
        may_trace: bool = True,
    ) -> None:
        self._device = device
        self._mesh = mesh
        self._clock = clock
        self._may_trace = may_trace
        self._share = None if mesh.num_ranks > 1 else 0.0
        self._has_stepped = False
        self._cost_seconds = 0.0
        self._trained_seconds = 0.0  # since the last trace
        self._is_traced = False  # a step of the training in progress
        self._traced_share: float | None = None

    @property
    def share(self) -> float | None:
        """Of the time in inner steps, mean over the ranks; None: not measured."""
        return self._share

    def prepare(self) -> None:
        """Pays for the first trace, which takes longest, before anything is trained."""
        if self._can_measure:
            with self._trace():
                pass

    def step_to_trace(self, num_steps: int) -> int | None:
        """The place of the inner step to be traced among those that are about to be trained.

        Never the first step of a process, which allocates and builds what later ones find.
        """
        self._is_traced = False
        if not self._can_measure:
            return None
        is_wanted = self._trained_seconds >= LEAST_STEPS_BETWEEN * self._cost_seconds
        is_possible = self._has_stepped or num_steps > 1
        if not self._mesh.decided_by_first(is_wanted and is_possible):
            return None
        return min(1, num_steps - 1)

    @contextlib.contextmanager
    def traced(self) -> Iterator[None]:
        """Traces the inner step within."""
        began_at = self._clock()
        self._finish_earlier_work()
        with self._trace() as trace, profiler.record_function(_TRACED):
            yield
            self._finish_earlier_work()
        self._traced_share = exposed_share(_operations(trace), within=_TRACED)
        self._is_traced = True
        self._trained_seconds = 0.0
        self._cost_seconds = self._clock() - began_at

    def trained(self, seconds: float) -> None:
        """So long was trained; the ranks tell each other what they have traced of it."""
        self._has_stepped = True
        self._trained_seconds += seconds
        if not self._is_traced:
            return
        own = math.nan if self._traced_share is None else self._traced_share
        total = self._mesh.added(torch.tensor(own, dtype=torch.float64)).item()
        mean = total / self._mesh.num_ranks
        if math.isnan(mean):  # of some rank, whose device keeps no trace
            self._share = None
        elif self._share is None:
            self._share = mean
        else:
            self._share += SMOOTHING * (mean - self._share)

    @property
    def _can_measure(self) -> bool:
        return self._may_trace and self._mesh.num_ranks > 1 and self._device.type in _DEVICES

    def _trace(self) -> profiler.profile:
        on_device = None if self._device.type == "cpu" else self._device.type
        return profiler.profile(use_kineto=True, use_device=on_device)

    def _finish_earlier_work(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)


def _operations(trace: profiler.profile) -> list[Operation]:
    assert trace.kineto_results is not None
    return [
        Operation(
            name=event.name(),
            thread=event.start_thread_id(),
            began_at=event.start_ns(),
            ended_at=event.start_ns() + event.duration_ns(),
            on_device=event.activity_type() if event.device_type().name != "CPU" else "",
        )
        for event in trace.kineto_results.events()
    ]
