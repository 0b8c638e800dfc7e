"""Atoll's islands beside loops without Atoll, in turns: how fast, and with how much of the cores.

Both train the same samples from the same weights, so their losses must agree: that is checked. A
chunk of Atoll's is what an island does in a round: adopt, train, publish.
"""

import asyncio
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.island.loops import Chunk, Kind, Loop
from node.island.data.places import DataPlaces
from node.island.island import InnerWork
from node.island.models.first_weights import initial_parameters
from node.island.parallel.mesh_shape import LocalTraining, MeshShape
from node.island.ranks.launcher import ProcessIsland, RanksHere
from node.outer_state import SharedVectors
from protocol.files.leftovers import TemporaryFolder
from protocol.run.models import layout_of
from protocol.run.run_spec import RunSpec

LOSSES_AGREE = {"fp32": 2e-3, "bf16": 2e-2}
"""Of the mean loss of a chunk, relative; sums in another order part slowly, and in bf16 less so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One chunk of one contender."""

    seconds: float
    training_seconds: float  # without adopt and publish
    cpu_seconds: float  # of all ranks, likewise; what else runs on the machine hardly moves it
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The median and the quartiles of a ratio."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of at least two values."""
        low, median, high = statistics.quantiles(values, n=4)
        return cls(low=low, median=median, high=high)

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


class AtollIsland:
    """An island as a daemon would drive it, without the daemon."""

    def __init__(
        self, spec: RunSpec, shape: MeshShape, devices: tuple[str, ...], local: LocalTraining
    ) -> None:
        self._spec = spec
        self.vectors = SharedVectors.create(layout_of(spec).num_elements)
        self.vectors.parameters[:] = initial_parameters(spec)
        self.island = ProcessIsland(
            ranks=RanksHere(
                devices=devices,
                shape=shape,
                num_threads=1,
            ),
            spec=spec,
            names=self.vectors.names,
            data=DataPlaces(folder=Path.cwd(), may_read=(Path("/"),)),
            local=local,
        )
        self._round = 0

    async def train(self, chunk: Chunk) -> Measured:
        """A round: its outcome is where the next one begins, as if all of it were committed."""
        self._round += 1
        began_at = time.perf_counter()
        await self.island.adopt()
        cpu_before, adopted_at = cpu_seconds(self.island.process_ids), time.perf_counter()
        report = await self.island.train(
            InnerWork(
                round=self._round,
                inner_steps=chunk.inner_steps,
                first_sample=chunk.first_sample,
                num_samples=chunk.inner_steps * self._spec.inner.batch,
                token_clock=chunk.first_sample * self._spec.model.context,
                round_tokens=chunk.inner_steps * self._spec.tokens_per_inner_step,
                max_seconds=math.inf,
                num_participants=1,
            ),
            lambda progress: None,
        )
        cpu = cpu_seconds(self.island.process_ids) - cpu_before
        trained_at = time.perf_counter()
        await self.island.publish(0)
        ended_at = time.perf_counter()
        self.vectors.parameters[:] = self.vectors.published  # the exchange's work, not the island's
        return Measured(
            seconds=ended_at - began_at,
            training_seconds=trained_at - adopted_at,
            cpu_seconds=cpu,
            loss=report.loss,
        )

    async def stop(self) -> None:
        """Ends the ranks."""
        await self.island.stop()
        self.vectors.close()


def cpu_seconds(process_ids: Sequence[int]) -> float:
    """Time that all threads of these processes have run, by the scheduler's nanoseconds."""
    return sum(
        int(task.read_text().split()[0]) / 1e9
        for process_id in process_ids
        for task in Path(f"/proc/{process_id}/task").glob("*/schedstat")
    )


async def compare(
    spec: RunSpec,
    shape: MeshShape,
    kind: Kind,
    devices: tuple[str, ...],
    local: LocalTraining,
    *,
    chunks: int,
) -> dict[str, Any]:
    """Lets an island and a loop train in turns; a row of results."""
    temporary = TemporaryFolder("benchmark")
    meeting = temporary.path
    atoll = AtollIsland(spec, shape, devices, local)
    await atoll.island.start()
    loop = await asyncio.to_thread(Loop, kind, spec, devices, local, Path.cwd(), meeting / "store")
    mine: list[Measured] = []
    theirs: list[Measured] = []
    try:
        for number in range(chunks + 1):  # the first is for warming up
            chunk = Chunk(
                first_sample=number * spec.inner.steps * spec.inner.batch,
                inner_steps=spec.inner.steps,
            )
            for is_atoll in (True, False) if number % 2 else (False, True):
                if is_atoll:
                    mine.append(await atoll.train(chunk))
                else:
                    theirs.append(await asyncio.to_thread(_train_loop, loop, chunk))
            _check_losses(mine[-1], theirs[-1], LOSSES_AGREE[local.precision])
    finally:
        loop.close()
        await atoll.stop()
        (meeting / "store").unlink(missing_ok=True)
        meeting.rmdir()
    tokens = spec.inner.steps * spec.tokens_per_inner_step
    pairs = list(zip(mine, theirs, strict=True))[1:]
    return {
        "island": str(shape),
        "loop": kind,
        "ranks": len(devices),
        "island_tokens_per_second": tokens / statistics.median(m.seconds for m, _ in pairs),
        "loop_tokens_per_second": tokens / statistics.median(t.seconds for _, t in pairs),
        "time_ratio": asdict(Spread.of([m.seconds / t.seconds for m, t in pairs])),
        "training_time_ratio": asdict(
            Spread.of([m.training_seconds / t.seconds for m, t in pairs])
        ),
        "cpu_ratio": asdict(Spread.of([m.cpu_seconds / t.cpu_seconds for m, t in pairs])),
        "raw": [(asdict(m), asdict(t)) for m, t in pairs],
    }


def _train_loop(loop: Loop, chunk: Chunk) -> Measured:
    cpu_before, began_at = cpu_seconds(loop.process_ids), time.perf_counter()
    loss = loop.train(chunk)
    seconds = time.perf_counter() - began_at
    return Measured(
        seconds=seconds,
        training_seconds=seconds,
        cpu_seconds=cpu_seconds(loop.process_ids) - cpu_before,
        loss=loss,
    )


def _check_losses(mine: Measured, theirs: Measured, agree: float) -> None:
    if abs(mine.loss - theirs.loss) > agree * theirs.loss:
        raise AssertionError(f"not the same work: losses {mine.loss} and {theirs.loss}")


async def copy_speeds(
    spec: RunSpec,
    shape: MeshShape,
    devices: tuple[str, ...],
    local: LocalTraining,
    *,
    repeats: int,
) -> dict[str, Any]:
    """Adopt and publish of all parameters, beside a copy of as many bytes, in turns."""
    atoll = AtollIsland(spec, shape, devices, local)
    await atoll.island.start()
    source, target = atoll.vectors.parameters.copy(), np.zeros_like(atoll.vectors.parameters)
    gigabytes = source.nbytes / 1e9
    rates: dict[str, list[float]] = {"memcpy": [], "adopt": [], "publish": []}
    try:
        for repeat in range(repeats + 1):  # the first touches all pages
            began_at = time.perf_counter()
            np.copyto(target, source)
            copied_at = time.perf_counter()
            await atoll.island.adopt()
            adopted_at = time.perf_counter()
            await atoll.island.publish(0)
            published_at = time.perf_counter()
            if repeat:
                rates["memcpy"].append(gigabytes / (copied_at - began_at))
                rates["adopt"].append(gigabytes / (adopted_at - copied_at))
                rates["publish"].append(gigabytes / (published_at - adopted_at))
    finally:
        await atoll.stop()
    memcpy = rates["memcpy"]
    return {
        "island": str(shape),
        "ranks": len(devices),
        "gigabytes": gigabytes,
        **{f"{what}_gb_per_second": asdict(Spread.of(some)) for what, some in rates.items()},
        **{
            f"{what}_of_memcpy": asdict(
                Spread.of([a / b for a, b in zip(rates[what], memcpy, strict=True)])
            )
            for what in ("adopt", "publish")
        },
    }
