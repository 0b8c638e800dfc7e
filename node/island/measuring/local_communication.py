"""How much of an inner step a rank spends on the other ranks of its island, by a trace of one step.

Exposed communication: a collective is under way and nothing is computed. What overlaps with computing
costs nothing and is not in it; a rank that waits for a slower one of its island is. One step now and
then is traced, so that tracing takes a hundredth of training at most; the formula is in
docs/watching.md.

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
_DEVICES = ("cpu", "cuda")  # whose traces node.island.measuring.local_communication can read


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
