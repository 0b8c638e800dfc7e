"""What islands of real ranks train on, a dozen small texts and first weights, and their processes."""

import multiprocessing
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from node.island.checkpoints.folder import CheckpointFolder
from node.island.data.places import DataPlaces
from node.island.island import InnerWork
from node.island.models.first_weights import initial_parameters
from node.island.parallel.mesh_shape import PLAIN, LocalTraining, MeshShape
from node.island.ranks.launcher import ProcessIsland, RanksHere
from node.outer_state import SharedVectors, Vector
from protocol.run.models import DecoderModel, Model, layout_of
from protocol.run.run_spec import DataSection, EvaluationSection, InnerSection, RunSpec
from tests.unit.work_scene import inner_work

ONE_RANK = MeshShape()


def small_spec(batch: int = 4) -> RunSpec:
    return RunSpec(
        model=DecoderModel(
            hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, ffn_size=24, context=16
        ),
        data=DataSection(source="text", paths=("*.txt",), held_out=0.2),
        inner=InnerSection(batch=batch, learning_rate=1e-2, schedule="constant"),
        evaluation=EvaluationSection(samples=7),
    )


def with_texts(folder: Path) -> Path:
    for i in range(12):
        text = " ".join(f"{i}:{j * j}" for j in range(60 + 10 * i))
        (folder / f"{i}.txt").write_text(text)
    return folder


@contextmanager
def initial_vectors(model: Model) -> Iterator[SharedVectors]:
    vectors = SharedVectors.create(layout_of(RunSpec(model=model)).num_elements)
    vectors.parameters[:] = initial_parameters(RunSpec(model=model))
    try:
        yield vectors
    finally:
        vectors.close()


def island_of(
    spec: RunSpec,
    vectors: SharedVectors,
    place: Path,
    *,
    kind: str = "cpu",
    shape: MeshShape = ONE_RANK,
    local: LocalTraining = PLAIN,
    checkpoints: CheckpointFolder | None = None,
    hang_seconds: float = 0.0,
) -> ProcessIsland:
    devices = [f"cuda:{i}" if kind == "cuda" else kind for i in range(shape.num_ranks)]
    return ProcessIsland(
        ranks=RanksHere(devices=tuple(devices), shape=shape, num_threads=1),
        spec=spec,
        names=vectors.names,
        data=DataPlaces(folder=place),
        local=local,
        checkpoints=checkpoints,
        hang_seconds=hang_seconds,
    )


@asynccontextmanager
async def started(island: ProcessIsland) -> AsyncIterator[ProcessIsland]:
    try:
        await island.start()
        await island.adopt()
        yield island
    finally:
        await island.stop()


def work_of(spec: RunSpec, round_: int = 1, *, inner_steps: int) -> InnerWork:
    """As if every round before had been as long, with this node alone."""
    samples = inner_steps * spec.inner.batch
    round_tokens = inner_steps * spec.tokens_per_inner_step
    return inner_work(
        inner_steps,
        round=round_,
        first_sample=(round_ - 1) * samples,
        num_samples=samples,
        token_clock=(round_ - 1) * round_tokens,
        round_tokens=round_tokens,
    )


@contextmanager
def ranks_that(
    run: Callable[..., None],
    spec: RunSpec,
    shape: MeshShape,
    place: Path,
    first: Vector,
    more_of: Callable[[int], tuple[Any, ...]],
) -> Iterator[tuple[SharedVectors, list[Connection], list[BaseProcess]]]:
    """A process for each rank: it calls `run` with its pipe, its island, and what `more_of` the rank gives.

    The shared vectors hold the first weights, and nothing that was published.
    """
    context = multiprocessing.get_context("forkserver")
    vectors = SharedVectors.create(first.size)
    vectors.parameters[:] = first
    vectors.published[:] = np.nan
    pipes: list[Connection] = []
    processes: list[BaseProcess] = []
    with tempfile.TemporaryDirectory(dir=place) as meeting:
        with_texts(Path(meeting))
        try:
            for rank in range(shape.num_ranks):
                ours, theirs = context.Pipe()
                island = (theirs, spec, shape, rank, vectors.names, Path(meeting))
                process = context.Process(target=run, args=island + more_of(rank), daemon=True)
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            yield vectors, pipes, processes
        finally:
            for started in processes:
                started.kill()
            vectors.close()
