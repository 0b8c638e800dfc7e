"""What islands of real ranks train on, a dozen small texts and first weights, and their processes."""

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from node.island.models.first_weights import initial_parameters
from node.island.parallel.mesh_shape import MeshShape
from node.outer_state import SharedVectors, Vector
from protocol.run.layout import layout_of
from protocol.run.models import DecoderModel
from protocol.run.run_spec import DataSection, EvaluationSection, InnerSection, RunSpec


def small_spec(learning_rate: float = 1e-2, batch: int = 4) -> RunSpec:
    return RunSpec(
        model=DecoderModel(
            hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, ffn_size=24, context=16
        ),
        data=DataSection(source="text", paths=("*.txt",), held_out=0.2),
        inner=InnerSection(batch=batch, learning_rate=learning_rate, schedule="constant"),
        evaluation=EvaluationSection(samples=7),
    )


def with_texts(folder: Path) -> Path:
    for i in range(12):
        text = " ".join(f"{i}:{j * j}" for j in range(60 + 10 * i))
        (folder / f"{i}.txt").write_text(text)
    return folder


@contextmanager
def initial_vectors(model: DecoderModel) -> Iterator[SharedVectors]:
    vectors = SharedVectors.create(layout_of(RunSpec(model=model)).num_elements)
    vectors.parameters[:] = initial_parameters(RunSpec(model=model))
    try:
        yield vectors
    finally:
        vectors.close()


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
            for process in processes:
                process.kill()
            vectors.close()
