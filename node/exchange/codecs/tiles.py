"""How a codec goes through a slice: in runs of tiles, one for each thread.

Tiles do not depend on each other, so the bytes are the same for any number of threads. Of some codecs
a tile has a stream of its own.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
        num_runs = min(self.num_threads, num_units)
        bounds = [num_units * run // num_runs * unit for run in range(num_runs)]
        runs = list(zip(bounds, [*bounds[1:], num_elements], strict=True))
        if num_runs == 1:
            return [work(*runs[0])]
        with ThreadPoolExecutor(num_runs) as pool:
            return list(pool.map(lambda run: work(*run), runs))

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

MOST_THREADS = 4
"""More would wait for the memory."""


def threads_beside(*, num_ranks: int, num_cores: int, ranks_compute_on_cores: bool) -> int:
    """How many threads codecs may use on a node with so many ranks and cores.

    A rank on a GPU keeps one core busy; those that are left are free. Ranks on CPUs use all cores, and
    train while the node encodes.
    """
    if ranks_compute_on_cores:
        return 1
    return max(1, min(MOST_THREADS, num_cores - num_ranks))
