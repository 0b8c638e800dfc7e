"""A simulated node's island with ranks in processes of their own, on any mesh.

Virtual time stands still while they work: a call blocks its caller until the ranks have answered,
on a real event loop in a thread of its own. So a simulation stays deterministic, however fast the
machine is.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from node.island.data.places import DataPlaces
from node.island.island import Evaluation, InnerReport, InnerWork, Island, Progress
from node.island.parallel.mesh_shape import MeshShape
from node.island.ranks.launcher import ProcessIsland, RanksHere
from node.outer_state import SharedVectors, Vector
from protocol.run.models import layout_of
from protocol.run.run_spec import RunSpec
from protocol.wire.rounds import CorpusSummary

Answer = TypeVar("Answer")

PATIENCE_SECONDS = 180.0
"""For a hang only: the ranks of a test answer within a second or two."""


class MeshedIsland(Island):
    """Ranks on the CPU, one thread each, on a mesh of the given shape; implements Island.

    It takes no virtual time, and its reports say 0 s, which is no measurement: plans stay equal.
    """

    compute_seconds = 0.0  # virtual

    def __init__(
        self,
        *,
        spec: RunSpec,
        shape: MeshShape,
        parameters: Vector,
        published: Vector,
        folder: Path,
    ) -> None:
        self._spec = spec
        self._layout = layout_of(spec)
        self._shape = shape
        self._parameters = parameters
        self._published = published
        self._folder = folder
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None
        self._shared: SharedVectors | None = None
        self._ranks: ProcessIsland | None = None

    async def start(self) -> CorpusSummary:
        """See Island."""
        self._thread = threading.Thread(target=self._loop.run_forever, name="ranks", daemon=True)
        self._thread.start()
        self._shared = SharedVectors.create(self._parameters.size, self._layout.largest_fragment)
        self._ranks = ProcessIsland(
            ranks=RanksHere(
                devices=("cpu",) * self._shape.num_ranks,
                shape=self._shape,
                num_threads=1,
            ),
            spec=self._spec,
            names=self._shared.names,
            data=DataPlaces(folder=self._folder, may_read=(Path("/"),)),
        )
        return self._answer_of(self._ranks.start())

    async def stop(self, why: str = "") -> None:
        """See Island."""
        if self._thread is None:
            return
        try:
            if self._ranks is not None:
                self._answer_of(self._ranks.stop())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._thread = None
            if self._shared is not None:
                self._shared.close()

    async def adopt(self, fragment: int | None = None, *, is_taken: bool = True) -> None:
        """See Island. What the ranks share is a copy: the node's own vectors outlive them."""
        self._share()
        self._answer_of(self._running.adopt(fragment, is_taken=is_taken))

    async def train(self, work: InnerWork, on_progress: Callable[[Progress], None]) -> InnerReport:
        """See Island. No limit of time: virtual seconds are not the ranks'."""
        told: list[Progress] = []
        limitless = replace(work, max_seconds=float("inf"))
        report = self._answer_of(self._running.train(limitless, told.append))
        for progress in told:  # here, for the node knows nothing of the other thread
            on_progress(progress)
        return replace(report, seconds=0.0)

    def halt(self) -> None:
        """See Island. Nothing to do: nobody can ask while it trains."""

    async def publish(self, fragment: int) -> None:
        """See Island."""
        self._answer_of(self._running.publish(fragment))
        assert self._shared is not None
        self._published[:] = self._shared.published

    async def evaluate(self) -> Evaluation:
        """See Island."""
        self._share()
        return self._answer_of(self._running.evaluate())

    async def losses_at(self, parameters: Vector, places: Sequence[int]) -> Sequence[float]:
        """See Island."""
        return self._answer_of(self._running.losses_at(parameters, places))

    async def keep(self, round: int, *, is_last: bool = False) -> None:
        """See Island. Nothing to do: it has no folder for checkpoints."""

    async def begin_anew(self, round: int) -> None:
        """See Island."""
        self._answer_of(self._running.begin_anew(round))

    def _share(self) -> None:
        assert self._shared is not None
        self._shared.parameters[:] = self._parameters
        self._shared.published[:] = self._published

    @property
    def _running(self) -> ProcessIsland:
        if self._ranks is None:
            raise RuntimeError("call start() first")
        return self._ranks

    def _answer_of(self, call: Coroutine[Any, Any, Answer]) -> Answer:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(PATIENCE_SECONDS)
