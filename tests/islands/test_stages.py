"""Models that are not Atoll's decoder train in a pipeline as in one process, and publish the same bytes."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from node.island.models.describing import describe
from node.island.parallel.mesh_shape import PLAIN, LocalTraining, MeshShape
from node.island.ranks.forkserver import prepare_forkserver
from protocol.run.models import FunctionModel
from protocol.run.run_spec import DataSection, EvaluationSection, InnerSection, RunSpec
from tests.islands.any_model_scene import (
    Outcome,
    RefusedError,
    check_alike,
    dataset_of,
    texts,
    trained,
)


def spec_of(*, tied: bool = True, counts: bool = False, optimizer: str = "adamw") -> RunSpec:
    spec = RunSpec(
        model=FunctionModel(
            source="function",
            function="tests.run_functions:chain",
            arguments={"tied": tied, "counts": counts},
        ),
        data=DataSection(source="function", function="tests.run_functions:samples"),
        inner=InnerSection.model_validate(
            {
                "batch": 8,
                "learning_rate": 1e-2,
                "schedule": "constant",
                "warmup_tokens": 0,
                "clip": 0.5,
                "optimizer": optimizer,
            }
        ),
        evaluation=EvaluationSection(samples=31),
    )
    return spec.model_copy(update={"description": describe(spec, Path.cwd())})


def test_stages_that_only_values_show_to_be_wrong_are_refused_before_the_first_step(
    tmp_path: Path,
) -> None:
    prepare_forkserver()
    model = FunctionModel(
        source="function", function="tests.run_functions:unchained", arguments={"how": "in place"}
    )
    spec = spec_of().model_copy(update={"model": model, "description": None})
    spec = spec.model_copy(update={"description": describe(spec, Path.cwd())})
    with pytest.raises(RefusedError, match="the plan for stages gives a loss of"):
        trained(spec, MeshShape(pipeline=2), tmp_path, dataset_of)


KINDS = {
    "tied": spec_of(),
    "counted": spec_of(counts=True),
    "a head of its own": spec_of(tied=False),
    "muon": spec_of(tied=False, optimizer="muon"),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """What one process comes to, with each kind of module, loss and optimizer."""
    prepare_forkserver()
    place = tmp_path_factory.mktemp("alone")
    return cache(lambda kind: trained(KINDS[kind], MeshShape(), place, dataset_of))


@pytest.mark.parametrize(
    ("kind", "shape", "local"),
    [
        ("tied", MeshShape(pipeline=2), PLAIN),
        ("tied", MeshShape(pipeline=2, schedule="interleaved-1f1b"), PLAIN),
        pytest.param("tied", MeshShape(tensor=2, pipeline=2), PLAIN, marks=pytest.mark.nightly),
        pytest.param(
            "tied", MeshShape(pipeline=2), LocalTraining(compile=True), marks=pytest.mark.nightly
        ),
        ("counted", MeshShape(shard=2, pipeline=2), PLAIN),
        ("a head of its own", MeshShape(pipeline=2, schedule="zbv"), PLAIN),
        pytest.param("muon", MeshShape(pipeline=2), PLAIN, marks=pytest.mark.nightly),
    ],
    ids=lambda value: f"{value}, {value.schedule}" if isinstance(value, MeshShape) else str(value),
)
def test_a_function_of_stages_trains_in_a_pipeline_as_in_one_process_and_publishes_the_same_bytes(
    kind: str,
    shape: MeshShape,
    local: LocalTraining,
    alone: Callable[[str], Outcome],
    tmp_path: Path,
) -> None:
    spec = KINDS[kind]
    found = trained(spec, shape, tmp_path, dataset_of, local)
    check_alike(spec, found, alone(kind))
    assert (found[0].metric, found[0].tokens) == (pytest.approx(alone(kind)[0].metric), 31)


def test_a_pipeline_takes_its_loss_in_the_precision_that_losses_are_taken_in(
    tmp_path: Path,
) -> None:
    prepare_forkserver()
    spec, local = KINDS["tied"], LocalTraining(precision="bf16")
    *_, one_report, first, one_last = trained(spec, MeshShape(), tmp_path, dataset_of, local)
    *_, report, _, last = trained(spec, MeshShape(pipeline=2), tmp_path, dataset_of, local)
    assert report.loss == pytest.approx(
        one_report.loss, rel=8e-4
    )  # bf16 itself is off by twice that
    assert np.linalg.norm(last - one_last) < 0.05 * np.linalg.norm(one_last - first)


def test_a_sum_that_overflows_in_fp16_is_no_fault_of_a_plan(tmp_path: Path) -> None:
    prepare_forkserver()
    spec, local = KINDS["counted"], LocalTraining(precision="fp16")
    *_, first, last = trained(spec, MeshShape(pipeline=2), tmp_path, dataset_of, local)
    assert not np.array_equal(first, last)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        pytest.param("qwen3", MeshShape(tensor=2, pipeline=2), marks=pytest.mark.nightly),  # tied
        ("llama", MeshShape(pipeline=2, schedule="zbv")),
        pytest.param("mixtral", MeshShape(pipeline=2), marks=pytest.mark.nightly),
    ],
    ids=lambda value: f"{value}, {value.schedule}" if isinstance(value, MeshShape) else value,
)
def test_a_model_of_transformers_trains_in_a_pipeline_by_its_own_plan(
    kind: str,
    shape: MeshShape,
    transformers_alone: Callable[[str], tuple[RunSpec, Outcome]],
    tmp_path: Path,
) -> None:
    spec, one = transformers_alone(kind)
    found = trained(spec, shape, tmp_path, texts)
    check_alike(spec, found, one)
    assert found[1].loss < found[0].loss - 0.05
