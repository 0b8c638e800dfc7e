"""Any run trained on any mesh, in real processes, against one process."""

import multiprocessing.forkserver
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lab.simulation.inline_island import lone_work, unseen
from node.island.data.dataset import Corpus, Dataset, read_corpus
from node.island.data.opening import open_dataset
from node.island.data.places import DataPlaces
from node.island.island import Evaluation, InnerReport
from node.island.models.describing import describe, first_vector
from node.island.parallel.mesh import Mesh
from node.island.parallel.mesh_shape import PLAIN, LocalTraining, MeshShape
from node.island.parallel.modules import compile_layers
from node.island.ranks import forkserver
from node.island.ranks.forkserver import end_forkserver, prepare_forkserver
from node.island.training import engine
from node.island.training.trainer import Trainer
from node.outer_state import SharedNames, SharedVectors, Vector
from protocol.errors import AtollError
from protocol.run.models import TransformersModel
from protocol.run.run_spec import DataSection, EvaluationSection, InnerSection, RunSpec
from tests.islands.rank_scene import ranks_that

STEPS = 4
PATIENCE_SECONDS = 240  # for a hang only


class RefusedError(Exception):
    """A rank has refused what it is to train."""


Outcome = tuple[Evaluation, Evaluation, InnerReport, Vector, Vector]
"""Held-out loss before and after, the report, and what the ranks published before and after."""

Data = Callable[[RunSpec, Path], Any]


def prepare_with_transformers() -> None:
    """A forkserver that has loaded transformers too, as else each rank does, which takes a second.

    Nodes have none such: what transformers looks for at import may touch GPUs, and ranks are forked after.
    """
    wanted = "transformers.modeling_utils"
    running: Any = multiprocessing.forkserver._forkserver
    if running._forkserver_pid is None or wanted not in running._preload_modules:
        end_forkserver()
        preload = running.set_forkserver_preload
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                forkserver._context,
                "set_forkserver_preload",
                lambda names: preload([*names, wanted]),
            )
            prepare_forkserver()


def text_run(config: Any, folder: Path, **inner: Any) -> RunSpec:
    """A run of a transformers config over text in a folder."""
    config.save_pretrained(folder)
    spec = RunSpec(
        model=TransformersModel(source="transformers", context=16),
        data=DataSection(source="text", paths=("*.txt",), held_out=0.2),
        inner=InnerSection(
            batch=8, learning_rate=1e-2, schedule="constant", warmup_tokens=0, clip=0.5, **inner
        ),
        evaluation=EvaluationSection(samples=11),  # no multiple of any number of ranks
    )
    return spec.model_copy(update={"description": describe(spec, folder)})


def check_alike(spec: RunSpec, found: Outcome, alone: Outcome) -> None:
    """It has begun with the run's weights, and come to what one process alone comes to."""
    before, after, report, first, last = found
    one_before, one_after, one_report, _, one_last = alone
    assert first.tobytes() == first_vector(spec).tobytes()
    assert before.loss == pytest.approx(one_before.loss, abs=1e-5)
    assert report.loss == pytest.approx(one_report.loss, abs=1e-5)
    assert after.loss == pytest.approx(one_after.loss, abs=1e-4)
    np.testing.assert_allclose(last, one_last, rtol=0, atol=3e-4)
    assert not np.array_equal(last, first)


def dataset_of(spec: RunSpec, place: Path) -> Dataset:
    """What ranks train on, as nodes open it."""
    return open_dataset(spec, DataPlaces(folder=place))


def texts(spec: RunSpec, place: Path) -> Corpus:
    """The text of `text_run`, which lies outside of the place."""
    return read_corpus(spec.data, context=spec.model.context, batch=spec.inner.batch, folder=place)


def trained(
    spec: RunSpec,
    shape: MeshShape,
    place: Path,
    data: Data,
    local: LocalTraining = PLAIN,
    *,
    base: Path | None = None,
) -> Outcome:
    """Trains with a process for each rank from the run's first weights."""
    first = first_vector(spec)
    with ranks_that(_run_rank, spec, shape, place, first, lambda _: (data, local, base)) as (
        vectors,
        pipes,
        _,
    ):
        said = []
        for pipe in pipes:
            assert wait([pipe], timeout=PATIENCE_SECONDS), f"{shape} hangs"
            said.append(pipe.recv())
        for answer in said:
            if isinstance(answer, str):
                raise RefusedError(answer)
        assert all(repr(own[:2]) == repr(said[0][:2]) for own in said[1:])
        return (*said[0], vectors.published.copy(), vectors.parameters.copy())


def _run_rank(
    pipe: Connection,
    spec: RunSpec,
    shape: MeshShape,
    rank: int,
    names: SharedNames,
    place: Path,
    data: Data,
    local: LocalTraining,
    base: Path | None,
) -> None:
    torch.set_num_threads(1)
    # Code is made of what was traced, whatever the mesh, so running the trace will do.
    # In this process only.
    vars(engine)["compile_layers"] = partial(compile_layers, backend="aot_eager")
    vectors = SharedVectors.attach(names)
    device = torch.device("cpu")
    mesh = Mesh.joined(shape=shape, rank=rank, device=device, meeting=place / "store")
    trainer = Trainer(
        spec=spec,
        corpus=data(spec, place),
        device=device,
        mesh=mesh,
        clock=lambda: 0.0,
        local=local,
    )
    try:
        trainer.take_base(base)
        trainer.adopt(2 * vectors.parameters)
    except AtollError as error:
        pipe.send(str(error))
        pipe.close()
        mesh.decided_by_first(True)  # the others have found the same
        return
    before = trainer.evaluate_at(vectors.parameters)
    trainer.adopt(vectors.parameters)
    trainer.publish(vectors.published, 0)
    report = trainer.train(lone_work(spec, STEPS), unseen)
    mesh.decided_by_first(True)  # nobody adopts any more
    trainer.publish(vectors.parameters, 0)
    after = trainer.evaluate()
    pipe.send((before, after, report))
    pipe.close()
