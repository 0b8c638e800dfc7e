"""How a codec goes through a slice: in runs of tiles, one for each thread.

Tiles do not depend on each other, so the bytes are the same for any number of threads. Of some codecs
a tile has a stream of its own.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import numpy as np

from node.outer_state import Vector

Result = TypeVar("Result")

TILE_ELEMENTS = 1 << 16
"""256 KiB of fp32: whole blocks and chunks. The bodies of entropy.py depend on it."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Works on runs of tiles, on so many threads.

    One thread by default: on a node without GPUs every core is a training rank's. Kernels run
    without Python's lock, so threads help where cores are idle.
    """

    num_threads: int = 1

    def each_run(
        self, num_elements: int, work: Callable[[int, int], Result], *, unit: int = TILE_ELEMENTS
    ) -> list[Result]:
        """Calls `work(start, end)` for runs of whole units that cover all elements, in order.

        The first of its errors, by place, is raised.
        """
        num_units = -(-num_elements // unit)
        num_runs = 1 if hasattr(_POOLED, "is_one") else min(self.num_threads, num_units)
        bounds = [num_units * run // num_runs * unit for run in range(num_runs)]
        runs = list(zip(bounds, [*bounds[1:], num_elements], strict=True))
        if num_runs == 1:
            return [work(*runs[0])]
        futures = [_pool_of(self.num_threads).submit(work, *run) for run in runs]
        wait(futures)  # all of them: what follows an error may free what the others write to
        return [future.result() for future in futures]

    def each_tile(
        self,
        num_elements: int,
        work: Callable[[int, int, Vector], object],
        *,
        unit: int = TILE_ELEMENTS,
    ) -> None:
        """Calls `work(start, end, scratch)` for each unit; the scratch [unit] is its thread's alone."""

        def run(first: int, past: int) -> None:
            scratch = np.empty(min(unit, past - first), dtype=np.float32)
            for start in range(first, past, unit):
                work(start, min(start + unit, past), scratch)

        self.each_run(num_elements, run, unit=unit)


ONE_THREAD = Tiles()

_POOLED = threading.local()
"""What marks the threads of a pool. Work in one of them that asks for threads again gets its own: waiting for
others that all wait likewise would never end."""


@cache
def _pool_of(num_threads: int) -> ThreadPoolExecutor:
    """One for all slices that are worked on at once: together they use no more threads."""
    return ThreadPoolExecutor(
        num_threads,
        thread_name_prefix="tiles",
        initializer=lambda: setattr(_POOLED, "is_one", True),
    )


def threads_beside(*, num_ranks: int, num_cores: int, ranks_compute_on_cores: bool) -> int:
    """How many threads the exchange's arithmetic may use on a node with so many ranks and cores.

    A rank on a GPU keeps one core busy; those that are left are free. Ranks on CPUs use all cores, and
    train while the node encodes.
    """
    return 1 if ranks_compute_on_cores else max(1, num_cores - num_ranks)
