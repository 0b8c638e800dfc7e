"""A small model trained on any mesh, in real processes, with what its ranks saw on the way."""

import faulthandler
import signal
import warnings
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lab.simulation.inline_island import lone_work, unseen
from node.island.data.dataset import Dataset
from node.island.data.opening import open_dataset
from node.island.data.places import DataPlaces
from node.island.models.decoder_modules import Attention
from node.island.models.first_weights import initial_parameters
from node.island.parallel.mesh import Mesh
from node.island.parallel.mesh_shape import PLAIN, LocalTraining, MeshShape
from node.island.parallel.modules import be_deterministic, compile_layers
from node.island.training import engine
from node.island.training.engine import Engine
from node.island.training.trainer import Trainer
from node.outer_state import SharedNames, SharedVectors
from protocol.run.models import DecoderModel, RopeScaling
from protocol.run.run_spec import (
    DataSection,
    EvaluationSection,
    ExchangeSection,
    InnerSection,
    RunSpec,
)
from tests.islands.rank_scene import ranks_that

# 5 layers and 24 × 40 matrices: pipelines and shards get parts of different sizes. More ranks than
# some tensors have rows would be empty shards: norms have 24 values, of which tensor ranks share.
MODEL = DecoderModel(
    hidden_size=24, num_layers=5, num_heads=4, num_kv_heads=2, ffn_size=40, context=16
)
LIKE_QWEN = MODEL.model_copy(
    update={
        "head_size": 8,  # 4 heads of it are wider than the stream
        "qk_norm": True,
        "attention_bias": "all",
        "mlp_bias": True,
        "tie_embeddings": False,
        "rope_scaling": RopeScaling(factor=4.0, original_context=8),
    }
)
LIKE_MISTRAL = MODEL.model_copy(
    update={"sliding_window": 5, "sliding_layers": (0, 2, 4), "logit_softcap": 2.0}
)
LIKE_BOTH = LIKE_QWEN.model_copy(
    update=LIKE_MISTRAL.model_dump(include={"sliding_window", "sliding_layers", "logit_softcap"})
)
STEPS = 3
PATIENCE_SECONDS = 600  # for a hang only

Figures = tuple[float, float, float, list[float], list[int], set[tuple[str, torch.dtype]]]
"""Held-out loss before and after, mean training loss, gradient norms of the steps; samples in each
pass through a layer while it trains, and what its matrices and norms are then."""

Outcome = tuple[Figures, np.ndarray, np.ndarray]
"""Figures of rank 0, and the vectors that all ranks published before and after."""


def spec_of(*, tied: bool = True, model: DecoderModel = MODEL) -> RunSpec:
    return RunSpec(
        model=model if tied else model.model_copy(update={"tie_embeddings": False}),
        data=DataSection(source="text", paths=("*.txt",), held_out=0.2),
        inner=InnerSection(
            batch=8, learning_rate=1e-2, schedule="constant", warmup_tokens=0, clip=0.5
        ),
        exchange=ExchangeSection(overlap="keep"),
        evaluation=EvaluationSection(samples=11),  # no multiple of any number of ranks
    )


def with_muon(spec: RunSpec) -> RunSpec:
    inner = spec.inner.model_copy(update={"optimizer": "muon"})
    return spec.model_copy(update={"inner": inner})


def run_rank(
    pipe: Connection,
    spec: RunSpec,
    shape: MeshShape,
    rank: int,
    names: SharedNames,
    place: Path,
    local: LocalTraining,
    overflows: bool,
    backend: str,
) -> None:
    """Trains as a rank of the mesh; `published` then has the first weights, `parameters` the last."""
    faulthandler.enable(file=2)
    torch.set_num_threads(1)
    vars(engine)["compile_layers"] = partial(
        compile_layers, backend=backend
    )  # in this process only
    if local.deterministic:
        be_deterministic()
    vectors = SharedVectors.attach(names)
    device = torch.device("cpu")
    mesh = Mesh.joined(shape=shape, rank=rank, device=device, meeting=place / "store")
    corpus = open_dataset(spec, DataPlaces(folder=place))
    trainer = Trainer(
        spec=spec, corpus=corpus, device=device, mesh=mesh, clock=lambda: 0.0, local=local
    )
    norms: list[float] = []
    clip = Engine.clip

    def spied(self: Engine, max_norm: float) -> torch.Tensor:
        if overflows and len(norms) == 1:
            for parameter in self.named_parameters.parameters():
                assert parameter.grad is not None
                with torch.no_grad():
                    parameter.grad.fill_(torch.inf)
        norms.append(clip(self, max_norm).item())
        return torch.tensor(norms[-1])

    Engine.clip = spied  # type: ignore[method-assign]  # likewise
    passes: list[int] = []
    weights: set[tuple[str, torch.dtype]] = set()
    normalise = torch.nn.RMSNorm.forward
    attend = Attention.forward

    def counted(
        self: Attention, x: torch.Tensor, *tables: torch.Tensor, **mask: Any
    ) -> torch.Tensor:
        passes.append(len(x))
        weights.add(("matrix", self.q_proj.weight.dtype))
        return attend(self, x, *tables, **mask)

    def noted(self: torch.nn.RMSNorm, x: torch.Tensor) -> torch.Tensor:
        weights.add(("norm", self.weight.dtype))
        return normalise(self, x)

    Attention.forward = counted  # type: ignore[method-assign]  # likewise
    torch.nn.RMSNorm.forward = noted  # type: ignore[method-assign]  # likewise
    # A forward alone leaves FSDP's parameters gathered, where edits are lost: so adopt after one.
    trainer.adopt(2 * vectors.parameters)
    trainer.evaluate_at(3 * vectors.parameters)
    _measure_singles(trainer, vectors, spec, corpus, is_plain=local == PLAIN)
    # Nothing was trained since "publishing" twice the weights: what is left is the weights, exactly.
    trainer.merge(vectors.parameters, 2 * vectors.parameters, 0, is_taken=True)
    before = trainer.evaluate().loss
    trainer.publish(vectors.published, 0)
    passes.clear()
    weights.clear()
    report = trainer.train(lone_work(spec, STEPS), unseen)
    seen = (sorted(passes), set(weights))
    mesh.decided_by_first(True)  # nobody adopts any more
    trainer.publish(vectors.parameters, 0)
    pipe.send((before, trainer.evaluate().loss, report.loss, norms, *seen))
    pipe.close()


def _measure_singles(
    trainer: Trainer, vectors: SharedVectors, spec: RunSpec, corpus: Dataset, *, is_plain: bool
) -> None:
    """Losses of single samples are those of one process; all ranks say the same."""
    places = (0, 5, 1 << 38, 7, 3)  # no multiple of any number of ranks
    alone = Trainer(
        spec=spec, corpus=corpus, device=torch.device("cpu"), mesh=Mesh(), clock=lambda: 0.0
    )
    tolerance = 1e-5 if is_plain else 0.05
    expected = pytest.approx(alone.losses_at(vectors.parameters, places), abs=tolerance)
    assert trainer.losses_at(vectors.parameters, places) == expected


def tell_ends(processes: Sequence[BaseProcess], shape: MeshShape) -> None:
    """Raises what the end of a rank in mid-training is, once all others have ended of it."""
    for process in processes:
        process.join(60)
    codes = [process.exitcode for process in processes]
    said = f"the ranks of {shape} ended with {codes}"
    if {-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS} & set(codes):
        raise NativeCrashError(said)
    pytest.fail(said)


class NativeCrashError(Exception):
    """Native code has ended a rank, which no error of ours does."""


def trained(
    spec: RunSpec,
    shape: MeshShape,
    place: Path,
    local: LocalTraining = PLAIN,
    *,
    overflows_on: int | None = None,
    backend: str = "inductor",
) -> Outcome:
    """Trains with a process for each rank; the gradient of one may overflow at the second step.

    Once more where native code ends a rank: torch 2.13 over gloo does so about once in a thousand
    such trainings (docs/footguns.md), and nodes start their ranks again then. A second time fails.
    """
    arguments = (spec, shape, place, local, overflows_on, backend)
    try:
        return _trained(*arguments)
    except NativeCrashError as error:
        warnings.warn(f"{error}; once more", stacklevel=2)
        return _trained(*arguments)


def _trained(
    spec: RunSpec,
    shape: MeshShape,
    place: Path,
    local: LocalTraining,
    overflows_on: int | None,
    backend: str,
) -> Outcome:
    first = initial_parameters(spec)
    with ranks_that(
        run_rank, spec, shape, place, first, lambda rank: (local, rank == overflows_on, backend)
    ) as (vectors, pipes, processes):
        figures = []
        for pipe in pipes:
            assert wait([pipe], timeout=PATIENCE_SECONDS), f"{shape} hangs"
            try:
                figures.append(pipe.recv())
            except EOFError:
                tell_ends(processes, shape)
        for process in processes:
            process.join(PATIENCE_SECONDS)
        # Reports are of the island, so all ranks say the same; and every rank clips alike.
        assert all(repr(own[:4]) == repr(figures[0][:4]) for own in figures[1:])
        return figures[0], vectors.published.copy(), vectors.parameters.copy()
