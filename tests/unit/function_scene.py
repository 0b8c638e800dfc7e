"""Runs whose model and data are functions."""

from pathlib import Path
from typing import Any

import torch

from node.island.data.opening import open_dataset
from node.island.data.places import DataPlaces
from node.island.models.describing import describe, first_vector
from node.island.parallel.mesh import Mesh
from node.island.parallel.mesh_shape import PLAIN, LocalTraining
from node.island.training.trainer import Trainer
from protocol.run.models import FunctionModel
from protocol.run.run_spec import DataSection, EvaluationSection, InnerSection, RunSpec

HERE = Path.cwd()
EXAMPLES = HERE / "examples" / "functions"


def spec_of(
    model: str = "tests.run_functions:net",
    data: str = "tests.run_functions:samples",
    *,
    folder: Path | None = None,
    **inner: Any,
) -> RunSpec:
    spec = undescribed(model, data, **inner)
    return spec.model_copy(update={"description": describe(spec, folder)})


def undescribed(model: str, data: str, **inner: Any) -> RunSpec:
    return RunSpec(
        model=FunctionModel(source="function", function=model),
        data=DataSection(source="function", function=data),
        inner=InnerSection.model_validate(
            {"batch": 8, "learning_rate": 1e-2, "schedule": "constant", "warmup_tokens": 0} | inner
        ),
        evaluation=EvaluationSection(samples=10_000),
    )


def described_with(model: str, data: str, **arguments: str | bool) -> RunSpec:
    spec = undescribed(f"tests.run_functions:{model}", f"tests.run_functions:{data}")
    told = spec.model.model_copy(update={"arguments": arguments})
    spec = spec.model_copy(update={"model": told})
    return spec.model_copy(update={"description": describe(spec, None)})


def trainer_of(spec: RunSpec, local: LocalTraining = PLAIN) -> Trainer:
    trainer = Trainer(
        spec=spec,
        corpus=open_dataset(spec, DataPlaces(folder=HERE)),
        device=torch.device("cpu"),
        mesh=Mesh(),
        clock=lambda: 0.0,
        local=local,
    )
    trainer.adopt(first_vector(spec))
    return trainer
