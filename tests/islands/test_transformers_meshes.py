"""Models of transformers on meshes: as one process, as transformers itself, the same bytes published."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from node.island.data.manifest import read_manifest
from node.island.models.describing import describe
from node.island.parallel.mesh_shape import PLAIN, LocalTraining, MeshShape
from protocol.run.run_spec import DataSection, LoraSection, RunSpec
from tests.islands.any_model_scene import (
    Outcome,
    check_alike,
    dataset_of,
    prepare_with_transformers,
    text_run,
    texts,
    trained,
)
from tests.transformers_configs import CONFIGS
from tests.unit.tokens_scene import prepared

RECOMPUTED = LocalTraining(activation_checkpointing="full", micro_batch=3)


@pytest.mark.parametrize(
    ("kind", "shape", "local"),
    [
        pytest.param("gpt2", MeshShape(replicate=2), PLAIN, marks=pytest.mark.nightly),
        pytest.param("gpt2", MeshShape(shard=2, zero=1), PLAIN, marks=pytest.mark.nightly),
        pytest.param("gpt2", MeshShape(shard=2, zero=2), PLAIN, marks=pytest.mark.nightly),
        ("gpt2", MeshShape(shard=2), RECOMPUTED),
        pytest.param(
            "gpt2", MeshShape(shard=2), LocalTraining(compile=True), marks=pytest.mark.nightly
        ),
        pytest.param("mixtral", MeshShape(replicate=2), PLAIN, marks=pytest.mark.nightly),
        ("mixtral", MeshShape(shard=2), PLAIN),
        pytest.param("gemma", MeshShape(shard=2), PLAIN, marks=pytest.mark.nightly),
        ("gemma", MeshShape(tensor=2), PLAIN),
        # By day it keeps documents apart on that mesh.
        pytest.param("qwen3", MeshShape(tensor=2), PLAIN, marks=pytest.mark.nightly),
        pytest.param("qwen3", MeshShape(shard=2, tensor=2), PLAIN, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_a_mesh_trains_as_one_process_and_publishes_the_same_bytes(
    kind: str,
    shape: MeshShape,
    local: LocalTraining,
    transformers_alone: Callable[[str], tuple[RunSpec, Outcome]],
    tmp_path: Path,
) -> None:
    spec, one = transformers_alone(kind)
    found = trained(spec, shape, tmp_path, texts, local)
    check_alike(spec, found, one)
    assert found[1].loss < found[0].loss - 0.05


@pytest.mark.parametrize(
    "shape",
    [pytest.param(MeshShape(replicate=2), marks=pytest.mark.nightly), MeshShape(shard=2)],
    ids=str,
)
def test_adapters_train_on_copies_and_shards_of_a_frozen_model_as_in_one_process(
    shape: MeshShape, tmp_path: Path
) -> None:
    prepare_with_transformers()
    base = tmp_path / "base"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS["gpt2"], dtype=torch.float32).save_pretrained(base)
    plain = text_run(CONFIGS["gpt2"], tmp_path)
    spec = plain.model_copy(update={"lora": LoraSection(rank=4), "description": None})
    spec = spec.model_copy(update={"description": describe(spec, base)})
    one = trained(spec, MeshShape(), tmp_path, texts, base=base)
    many = trained(spec, shape, tmp_path, texts, base=base)
    assert many[0].loss == pytest.approx(one[0].loss, abs=1e-5)
    assert many[1].loss == pytest.approx(one[1].loss, abs=1e-4)
    assert many[1].loss < many[0].loss - 0.02
    np.testing.assert_allclose(many[4], one[4], rtol=0, atol=3e-4)


@pytest.mark.nightly
def test_muon_takes_the_matrices_of_layers_on_shards_as_in_one_process(tmp_path: Path) -> None:
    prepare_with_transformers()
    config: Any = CONFIGS["gpt2"]
    spec = text_run(config, tmp_path, optimizer="muon")
    *_, one_last = trained(spec, MeshShape(), tmp_path, texts)
    *_, last = trained(spec, MeshShape(shard=2), tmp_path, texts)
    np.testing.assert_allclose(last, one_last, rtol=0, atol=3e-4)


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> RunSpec:
    """Rows of several short documents each, which attention keeps apart."""
    place = tmp_path_factory.mktemp("apart")
    texts = [" ".join(f"{i}:{j * j}" for j in range(9))[: 5 + i % 7] for i in range(300)]
    (place / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepared(place / "a.jsonl", out=place / "tokens", row=17)
    digest = read_manifest(place / "tokens").digest().hex()
    data = DataSection(
        source="tokens", paths=(str(place / "tokens"),), digest=digest, across_documents=False
    )
    spec = text_run(CONFIGS["qwen3"], place)
    return spec.model_copy(update={"data": data})


def test_a_mesh_keeps_documents_apart_as_one_process_does(apart: RunSpec, tmp_path: Path) -> None:
    prepare_with_transformers()
    across = apart.data.model_copy(update={"across_documents": True})
    one = trained(apart, MeshShape(), tmp_path, dataset_of)
    other = trained(apart.model_copy(update={"data": across}), MeshShape(), tmp_path, dataset_of)
    many = trained(apart, MeshShape(tensor=2), tmp_path, dataset_of, RECOMPUTED)
    assert many[2].loss == pytest.approx(one[2].loss, abs=1e-5)
    assert many[2].loss != pytest.approx(other[2].loss, abs=1e-4)
    np.testing.assert_allclose(many[4], one[4], rtol=0, atol=3e-4)
