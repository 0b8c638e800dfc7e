"""Every mesh trains as one process does where ranks have different numbers of tokens that count."""

import json
from pathlib import Path

import numpy as np
import pytest
from mesh_scene import Figures, spec_of, trained

from node.island.data.manifest import read_manifest
from node.island.forkserver import prepare_forkserver
from node.island.local_training import PLAIN, LocalTraining
from node.island.mesh_shape import MeshShape
from protocol.run_spec import DataSection, RunSpec
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
        (MeshShape(replicate=2), PLAIN),
        (MeshShape(shard=2, zero=2), LocalTraining(micro_batch=3)),
        (MeshShape(shard=2, zero=3), PLAIN),
        (MeshShape(tensor=2), PLAIN),
        (MeshShape(context=2), PLAIN),
        (MeshShape(pipeline=2), PLAIN),
        (MeshShape(shard=2, pipeline=2), PLAIN),
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
