"""Exposed communication by a trace of operations: what runs when, on threads or on a GPU. Pure.

A CPU's trace tells operators on their threads, and collectives of gloo on threads of its own. A GPU's
tells kernels and copies on its streams; there the host only orders what is to be done.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

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
