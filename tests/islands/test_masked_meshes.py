"""Every mesh trains as one process does where ranks have different numbers of tokens that count."""

import json
from pathlib import Path

import numpy as np
import pytest

from node.island.data.manifest import read_manifest
from node.island.parallel.mesh_shape import PLAIN, LocalTraining, MeshShape, check_shape
from node.island.ranks.forkserver import prepare_forkserver
from protocol.errors import ConfigError
from protocol.run.run_spec import DataSection, RunSpec
from tests.islands.mesh_scene import Figures, spec_of, trained
from tests.unit.tokens_scene import prepared


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> RunSpec:
    """Rows that are padded from their third to their last token."""
    place = tmp_path_factory.mktemp("data")
    texts = [" ".join(f"{i}:{j * j}" for j in range(9))[: 9 + i % 7] for i in range(300)]
    (place / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepared(place / "a.jsonl", out=place / "tokens", row=17)
    digest = read_manifest(place / "tokens").digest().hex()
    data = DataSection(source="tokens", paths=(str(place / "tokens"),), digest=digest)
    return spec_of().model_copy(update={"data": data})


@pytest.fixture(scope="module")
def alone(spec: RunSpec, tmp_path_factory: pytest.TempPathFactory) -> tuple[Figures, np.ndarray]:
    prepare_forkserver()
    figures, _, last = trained(spec, MeshShape(), tmp_path_factory.mktemp("alone"))
    return figures, last


@pytest.mark.parametrize(
    ("shape", "local"),
    [
        pytest.param(MeshShape(replicate=2), PLAIN, marks=pytest.mark.nightly),
        (MeshShape(shard=2, zero=2), LocalTraining(micro_batch=3)),
        (MeshShape(shard=2, zero=3), PLAIN),
        (MeshShape(tensor=2), PLAIN),
        (MeshShape(context=2), PLAIN),
        (MeshShape(pipeline=2), PLAIN),
        pytest.param(MeshShape(shard=2, pipeline=2), PLAIN, marks=pytest.mark.nightly),
    ],
    ids=lambda value: str(value) if isinstance(value, MeshShape) else f"parts {value.micro_batch}",
)
def test_a_mesh_weighs_each_token_that_counts_alike(
    shape: MeshShape,
    local: LocalTraining,
    spec: RunSpec,
    alone: tuple[Figures, np.ndarray],
    tmp_path: Path,
) -> None:
    (before, after, loss, norms, *_), _, last = trained(spec, shape, tmp_path, local)
    (one_before, one_after, one_loss, one_norms, *_), one_last = alone
    assert (before, after, loss) == pytest.approx((one_before, one_after, one_loss), abs=1e-5)
    assert norms == pytest.approx(one_norms, abs=1e-5)
    np.testing.assert_allclose(last, one_last, rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def apart(spec: RunSpec) -> RunSpec:
    """The same rows, and attention that keeps to the documents in them; every third layer slides."""
    data = spec.data.model_copy(update={"across_documents": False})
    model = spec.decoder.model_copy(update={"sliding_window": 6, "sliding_layers": (0, 3)})
    return spec.model_copy(update={"data": data, "model": model})


@pytest.fixture(scope="module")
def apart_alone(
    apart: RunSpec, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Figures, np.ndarray]:
    prepare_forkserver()
    figures, _, last = trained(apart, MeshShape(), tmp_path_factory.mktemp("apart"))
    return figures, last


@pytest.mark.parametrize(
    ("shape", "local"),
    [
        (MeshShape(replicate=2), LocalTraining(micro_batch=3)),
        (MeshShape(shard=2, zero=3), LocalTraining(activation_checkpointing="full")),
        (MeshShape(tensor=2), PLAIN),
        pytest.param(MeshShape(shard=2, tensor=2), PLAIN, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_a_mesh_keeps_documents_apart_as_one_process_does(
    shape: MeshShape,
    local: LocalTraining,
    apart: RunSpec,
    apart_alone: tuple[Figures, np.ndarray],
    alone: tuple[Figures, np.ndarray],
    tmp_path: Path,
) -> None:
    (before, after, loss, norms, *_), _, last = trained(apart, shape, tmp_path, local)
    (one_before, one_after, one_loss, one_norms, *_), one_last = apart_alone
    assert one_loss != pytest.approx(alone[0][2], abs=1e-5)
    assert (before, after, loss) == pytest.approx((one_before, one_after, one_loss), abs=1e-5)
    assert norms == pytest.approx(one_norms, abs=1e-5)
    np.testing.assert_allclose(last, one_last, rtol=0, atol=1e-4)


@pytest.mark.parametrize("shape", [MeshShape(pipeline=2), MeshShape(context=2)], ids=str)
def test_a_mesh_that_cannot_keep_documents_apart_is_refused(
    shape: MeshShape, apart: RunSpec
) -> None:
    with pytest.raises(ConfigError, match=r"= 2 does not go with .* across_documents = false"):
        check_shape(shape, apart)
