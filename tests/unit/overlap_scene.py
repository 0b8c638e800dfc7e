"""A daemon whose island takes one inner step a second, each of which lowers every parameter by one.

So the parameters, what is owed and what the ranks hold on top can be added up to all inner steps.
"""

import asyncio
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from node.exchange.outer import Outer
from node.exchange.state.on_disk import StateOnDisk
from node.heavy import Heavy, in_place
from node.island.island import ALL, Ability, Evaluation, InnerReport, InnerWork, Island, Progress
from node.island.ranks.faults import RankDiedError
from protocol.run.models import Layout
from protocol.run.run_files import validated
from protocol.wire.rounds import BLOCK, Assignment, CorpusSummary, Digest, Plan, cut_into_slices
from tests.unit.daemon_scene import Life
from tests.unit.exchange_scene import A

STEPS = 5
BATCH = 2
CONTEXT = 128
STEP_TOKENS = BATCH * CONTEXT
ONE = Layout.of([("w", (BLOCK,))])
TWO = Layout.of([("w", (BLOCK,))], [("v", (BLOCK,))])


class CountingIsland(Island):
    """Ranks that keep what they trained ahead, as node.island.training.trainer does."""

    def __init__(self, outer: Outer) -> None:
        self._outer = outer
        self.local = np.zeros_like(outer._parameters)
        self.works: list[InnerWork] = []
        self.steps: list[tuple[float, int]] = []  # when each was over, and its first sample
        self.merges: list[tuple[int | None, bool]] = []
        self.ended = ""  # why it was stopped
        self.num_starts = 0
        self.dies_at_step: int | None = None  # counted over its whole life
        self.fault: Exception | None = None  # raised by the next step
        self._halted = asyncio.Event()

    @property
    def ability(self) -> Ability:
        return ALL

    async def start(self) -> CorpusSummary:
        self.num_starts += 1
        self.local[:] = 1000  # nothing, before it has adopted
        return CorpusSummary(digest=Digest(bytes(32)), num_samples=1, num_bytes=1)

    async def stop(self, why: str = "") -> None:
        self.ended = why

    async def adopt(self, fragment: int | None = None, *, is_taken: bool = True) -> None:
        self.merges.append((fragment, is_taken))
        if fragment is None:
            self.local[:] = self._outer._parameters
            return
        span = self._outer.layout.fragments[fragment].span
        published = self._outer.owing._published[: span.stop - span.start]
        self.local[span] += self._outer._parameters[span] - published

    async def begin_anew(self, round: int) -> None:
        pass

    async def keep(self, round: int, *, is_last: bool = False) -> None:
        pass

    async def train(self, work: InnerWork, on_progress: Callable[[Progress], None]) -> InnerReport:
        self.works.append(work)
        self._halted.clear()
        clock = asyncio.get_running_loop().time
        began_at = clock()
        taken = 0
        while not taken or (
            taken < work.inner_steps
            and not self._halted.is_set()
            and clock() - began_at < work.max_seconds
        ):
            await asyncio.sleep(1)
            if self.fault is not None:
                raise self.fault
            if len(self.steps) + 1 == self.dies_at_step:
                self.dies_at_step = None
                raise RankDiedError("rank 0 on cpu was ended by SIGKILL")
            self.local -= 1
            self.steps.append((clock(), work.first_sample + taken * BATCH))
            taken += 1
            on_progress(
                Progress(round=work.round, inner_step=taken, loss=1.0, tokens_per_second=1.0)
            )
        return InnerReport(
            round=work.round,
            inner_steps=taken,
            samples=taken * BATCH,
            tokens=taken * STEP_TOKENS,
            loss=1.0,
            seconds=float(taken),
        )

    def halt(self) -> None:
        self._halted.set()

    async def publish(self, fragment: int) -> None:
        span = self._outer.layout.fragments[fragment].span
        self._outer.owing._published[: span.stop - span.start] = self.local[span]

    async def evaluate(self) -> Evaluation:
        await asyncio.sleep(2)
        return Evaluation(loss=1.0, tokens=1)


class OverlapLife(Life):
    """A node that may train ahead; the test is its coordinator and its only peer is itself."""

    island: CountingIsland

    def __init__(
        self,
        *,
        layout: Layout = ONE,
        overlap: str = "keep",
        disk: StateOnDisk | None = None,
        heavy: Heavy = in_place,
    ) -> None:
        fragments = len(layout.fragments)
        spec = validated({"exchange": {"fragments": fragments, "overlap": overlap}}, origin="")
        super().__init__(
            spec=spec,
            layout=layout,
            make_island=CountingIsland,
            disk=disk,
            heavy=heavy,
        )

    def plan(self, round: int, **changes: Any) -> Plan:
        """Plans after which the samples of the next round begin where those of this one end."""
        layout = self.outer.layout
        fragment = layout.fragments[round % len(layout.fragments)]
        return super().plan(
            round,
            fragment=fragment.index,
            slices=cut_into_slices(fragment.num_elements, (A,)),
            train_seconds=100.0,
            contribute_seconds=110.0,
            commit_seconds=120.0,
            **{"assignments": (lease(round),), "ahead": (lease(round + 1),), **changes},
        )

    @property
    def accounted(self) -> list[float]:
        """Of each fragment: inner steps that are in the parameters, owed, or in the ranks' hands."""
        outer = self.outer
        owed = outer.owed().residual
        assert math.isclose(np.ptp(self.island.local[: outer.layout.fragments[0].num_elements]), 0)
        held = outer._parameters - self.island.local
        total = owed + held - outer._parameters
        return [float(total[fragment.start]) for fragment in outer.layout.fragments]


def lease(round: int, steps: int = STEPS) -> Assignment:
    first = (round - 1) * STEPS * BATCH
    return Assignment(node_id=A, inner_steps=steps, first_sample=first, num_samples=steps * BATCH)
