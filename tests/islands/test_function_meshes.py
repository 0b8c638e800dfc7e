"""What a run's function returns trains on meshes as in one process."""

from pathlib import Path

import pytest

from node.island.models.describing import describe
from node.island.parallel.mesh_shape import PLAIN, LocalTraining, MeshShape
from node.island.ranks.forkserver import prepare_forkserver
from protocol.run.models import FunctionModel
from protocol.run.run_spec import DataSection, EvaluationSection, InnerSection, RunSpec
from tests.islands.any_model_scene import Outcome, RefusedError, check_alike, dataset_of, trained


def spec_of(*, counts: bool, sparse: bool, optimizer: str = "adamw") -> RunSpec:
    spec = RunSpec(
        model=FunctionModel(
            source="function", function="tests.run_functions:net", arguments={"counts": counts}
        ),
        data=DataSection(source="function", function="tests.run_functions:samples"),
        inner=InnerSection.model_validate(
            {
                "batch": 8,
                "learning_rate": 1e-2,
                "schedule": "constant",
                "warmup_tokens": 0,
                "clip": 0.5,
                "sparse": sparse,
                "optimizer": optimizer,
            }
        ),
        evaluation=EvaluationSection(samples=31),
    )
    return spec.model_copy(update={"description": describe(spec, Path.cwd())})


@pytest.mark.parametrize("how", ["gradient", "shapes"])
def test_a_plan_that_trains_something_else_is_refused_before_the_first_step(
    how: str, tmp_path: Path
) -> None:
    prepare_forkserver()
    spec = spec_of(counts=False, sparse=False)
    model = FunctionModel(
        source="function",
        function="tests.run_functions:net_with_wrong_plan",
        arguments={"how": how},
    )
    spec = spec.model_copy(update={"model": model, "description": None})
    spec = spec.model_copy(update={"description": describe(spec, Path.cwd())})
    with pytest.raises(RefusedError, match="the plan for tensor parallel gives") as caught:
        trained(spec, MeshShape(tensor=2), tmp_path, dataset_of)
    expected = {"gradient": "a gradient of", "shapes": "no loss at all"}[how]
    assert expected in str(caught.value)


Kind = tuple[bool, bool, str]
MEAN, COUNTED, SPARSE = (False, False, "adamw"), (True, False, "adamw"), (True, True, "adamw")
MUON = (False, True, "muon")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[Kind, Outcome]:
    """What one process comes to, with each kind of loss and optimizer."""
    prepare_forkserver()
    place = tmp_path_factory.mktemp("alone")
    return {
        kind: trained(
            spec_of(counts=kind[0], sparse=kind[1], optimizer=kind[2]),
            MeshShape(),
            place,
            dataset_of,
        )
        for kind in (MEAN, COUNTED, SPARSE, MUON)
    }


@pytest.mark.parametrize(
    ("kind", "shape", "local"),
    [
        pytest.param(MEAN, MeshShape(replicate=2), PLAIN, marks=pytest.mark.nightly),
        (COUNTED, MeshShape(replicate=2), LocalTraining(micro_batch=3)),
        (COUNTED, MeshShape(shard=2), LocalTraining(activation_checkpointing="full")),
        (SPARSE, MeshShape(shard=2), PLAIN),
        (SPARSE, MeshShape(shard=2, zero=1), PLAIN),
        pytest.param(SPARSE, MeshShape(shard=2, tensor=2), PLAIN, marks=pytest.mark.nightly),
        (MEAN, MeshShape(tensor=2), PLAIN),
        (MUON, MeshShape(shard=2), PLAIN),
    ],
    ids=str,
)
def test_a_mesh_trains_as_one_process_and_publishes_the_same_bytes(
    kind: Kind,
    shape: MeshShape,
    local: LocalTraining,
    alone: dict[Kind, Outcome],
    tmp_path: Path,
) -> None:
    spec = spec_of(counts=kind[0], sparse=kind[1], optimizer=kind[2])
    found = trained(spec, shape, tmp_path, dataset_of, local)
    check_alike(spec, found, alone[kind])
    assert (found[0].metric, found[0].tokens) == (pytest.approx(alone[kind][0].metric), 31)


@pytest.mark.parametrize(
    ("norm", "shape", "local"),
    [
        ("batch", MeshShape(replicate=2), PLAIN),
        ("batch", MeshShape(replicate=2), LocalTraining(compile=True)),
        ("batch", MeshShape(shard=2), LocalTraining(activation_checkpointing="full")),
        ("spectral", MeshShape(replicate=2), PLAIN),
        ("spectral", MeshShape(shard=2), PLAIN),
    ],
    ids=str,
)
def test_what_norms_remember_of_the_same_parameters_is_the_same_on_any_mesh(
    norm: str, shape: MeshShape, local: LocalTraining, tmp_path: Path
) -> None:
    prepare_forkserver()
    spec = spec_of(counts=False, sparse=False)
    function = f"tests.run_functions:deep_net_with_{norm}_norm"
    spec = spec.model_copy(
        update={
            "model": FunctionModel(source="function", function=function),
            "data": DataSection(source="function", function="tests.run_functions:draws"),
            "description": None,
        }
    )
    spec = spec.model_copy(update={"description": describe(spec, Path.cwd())})
    (tmp_path / "alone").mkdir()
    alone = trained(spec, MeshShape(), tmp_path / "alone", dataset_of)
    found = trained(spec, shape, tmp_path, dataset_of, local)
    assert found[3].tobytes() == alone[3].tobytes()
    assert found[0].loss == pytest.approx(alone[0].loss, abs=1e-5), "of the first weights"
    assert found[1].loss != found[0].loss
