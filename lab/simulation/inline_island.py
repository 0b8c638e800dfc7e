"""An island in the calling process, for tests and simulation: no threads, bit-equal repeats.

Its calls never yield to the event loop, so a daemon must not use it.
"""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from node.island.data.dataset import Dataset
from node.island.data.opening import open_dataset
from node.island.data.places import DataPlaces
from node.island.island import Evaluation, InnerReport, InnerWork, Island, Progress
from node.island.parallel.mesh import Mesh
from node.island.parallel.mesh_shape import PLAIN, LocalTraining
from node.island.training.trainer import Clock, Trainer
from node.outer_state import Vector
from protocol.run.run_spec import RunSpec
from protocol.wire.rounds import CorpusSummary

# What an island trains that has no swarm: what a plan for one participant would ask, without an end.


def lone_work(spec: RunSpec, inner_steps: int, *, round: int = 1) -> InnerWork:
    """A round of so many inner steps, after others that were as long."""
    samples, done = inner_steps * spec.inner.batch, round - 1
    return InnerWork(
        round=round,
        inner_steps=inner_steps,
        first_sample=done * samples,
        num_samples=samples,
        token_clock=done * inner_steps * spec.tokens_per_inner_step,
        round_tokens=inner_steps * spec.tokens_per_inner_step,
        max_seconds=math.inf,
        num_participants=1,
    )


def unseen(progress: Progress) -> None:
    """For those who wait for the report."""


class InlineIsland(Island):
    """Trains one model on the CPU in the calling thread; implements Island.

    `corpus` spares many islands of one simulation the reading of the same text.
    """

    def __init__(
        self,
        *,
        spec: RunSpec,
        parameters: Vector,
        published: Vector,
        folder: Path,
        corpus: Dataset | None = None,
        clock: Clock = time.monotonic,
        local: LocalTraining = PLAIN,
    ) -> None:
        self._spec = spec
        self._parameters = parameters
        self._published = published
        self._folder = folder
        self._corpus = corpus
        self._clock = clock
        self._local = local
        self._trainer: Trainer | None = None

    async def start(self) -> CorpusSummary:
        """Builds the model and reads the text."""
        corpus = self._corpus or open_dataset(self._spec, DataPlaces(folder=self._folder))
        self._trainer = Trainer(
            spec=self._spec,
            corpus=corpus,
            device=torch.device("cpu"),
            mesh=Mesh(),
            clock=self._clock,
            local=self._local,
        )
        self._trainer.take_base(None)
        return corpus.summary()

    async def stop(self, why: str = "") -> None:
        """Forgets model and optimizer."""
        self._trainer = None

    async def adopt(self, fragment: int | None = None, *, is_taken: bool = True) -> None:
        """See Island."""
        if fragment is None:
            self._running.adopt(self._parameters)
        else:
            self._running.merge(self._parameters, self._published, fragment, is_taken=is_taken)

    async def train(
        self,
        work: InnerWork,
        on_progress: Callable[[Progress], None],
        is_halted: Callable[[], bool] = lambda: False,
    ) -> InnerReport:
        """See Island; `is_halted` as Trainer.train has it."""
        return self._running.train(work, on_progress, is_halted)

    def halt(self) -> None:
        """See Island. Nothing to do: nobody can ask while it trains."""

    async def publish(self, fragment: int) -> None:
        """See Island."""
        self._running.publish(self._published, fragment)

    async def keep(self, round: int, *, is_last: bool = False) -> None:
        """See Island. Nothing to do: no rank of it can die alone."""

    async def begin_anew(self, round: int) -> None:
        """See Island. Nothing was set aside."""
        await self.stop()
        await self.start()

    async def evaluate(self) -> Evaluation:
        """See Island."""
        return self._running.evaluate_at(self._parameters)

    async def losses_at(self, parameters: Vector, places: Sequence[int]) -> Sequence[float]:
        """See Island."""
        return self._running.losses_at(parameters, places)

    @property
    def _running(self) -> Trainer:
        if self._trainer is None:
            raise RuntimeError("call start() first")
        return self._trainer
