"""An exported model is whole or absent, and reads back to the bit."""

import json
import os
import signal
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from node.island.models.describing import describe, first_vector
from node.island.models.first_weights import initial_parameters
from node.models.card import DType, Origin, contributions_of
from node.models.export import export_model
from node.models.folders import read_json
from node.models.reading import read_weights, tensors_in
from node.outer_state import Vector
from protocol.errors import (
    BadDataError,
    CannotCreateError,
    SystemRefusedError,
    UsageError,
)
from protocol.run.models import DecoderModel, Description, FunctionModel, layout_of
from protocol.run.run_spec import DataSection, RunSpec
from protocol.wire.rounds import (
    Commit,
    Contributor,
    Digest,
    NodeId,
    SliceOutcome,
)
from tests.tiny_runs import run_of

SPEC = DecoderModel(hidden_size=16, num_layers=2, num_heads=4, ffn_size=24, context=16)
WEIGHTS = initial_parameters(run_of(SPEC, seed=1))


ORIGIN = Origin(
    run="my-run", run_digest=Digest(b"\1" * 32), round=40, outer_digest=Digest(b"\2" * 32)
)


def export(out: Path, spec: DecoderModel = SPEC, **options: Any) -> str:
    return export_model(
        spec=run_of(spec),
        parameters=initial_parameters(run_of(spec, seed=1)),
        origin=ORIGIN,
        out=out,
        **options,
    )


@pytest.mark.parametrize("is_tied", [True, False])
def test_an_export_reads_back_to_the_bit(is_tied: bool, tmp_path: Path) -> None:
    spec = SPEC.model_copy(update={"tie_embeddings": is_tied, "rope_theta": 5e5})
    export(tmp_path / "a" / "b", spec)
    again, parameters = load_exported(tmp_path / "a" / "b")
    assert again == spec
    assert np.array_equal(parameters, initial_parameters(run_of(spec, seed=1)))


def test_the_folder_says_what_it_is_to_people_and_to_transformers(tmp_path: Path) -> None:
    out = tmp_path / "model"
    export(out)
    assert sorted(path.name for path in out.iterdir()) == [
        "README.md",
        "atoll.json",
        "config.json",
        "model.safetensors",
    ]
    assert json.loads((out / "atoll.json").read_text())["round"] == 40
    assert "The tokenizer is not in this folder" in (out / "README.md").read_text()
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["vocab_size"], config["num_key_value_heads"], config["head_dim"]) == (256, 2, 4)
    tensors = load_file(out / "model.safetensors")
    assert tensors["model.layers.1.mlp.down_proj.weight"].shape == (16, 24)
    assert "lm_head.weight" not in tensors


def test_an_existing_folder_is_left_as_it_is_and_an_empty_one_is_filled(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("x")
    (tmp_path / "file").write_text("x")
    for name in ("full", "file"):
        with pytest.raises(CannotCreateError, match=f"{name} exists already"):
            export(tmp_path / name)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["precious"]
    (tmp_path / "empty").mkdir()
    export(tmp_path / "empty")
    assert load_exported(tmp_path / "empty")[0] == SPEC


def test_a_failed_export_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(self: Path, *args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full_disk)
    with pytest.raises(SystemRefusedError, match="No space left on device"):
        export(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.unit import test_export
from node.models import export
export._make_durable = lambda folder: os.kill(os.getpid(), signal.SIGTERM)
test_export.export(Path(sys.argv[1]))
"""


def test_what_a_killed_export_leaves_is_cleared_by_the_next(tmp_path: Path) -> None:
    here = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", KILLED, str(tmp_path / "model")]
    killed = subprocess.run(command, env={**os.environ, "PYTHONPATH": here}, check=False)
    assert killed.returncode == -signal.SIGTERM
    (left,) = tmp_path.iterdir()
    assert (left / "model.safetensors").stat().st_size
    export(tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def load_exported(folder: Path) -> tuple[DecoderModel, Vector]:
    """A decoder as it was written: what it is, and its weights."""
    model = DecoderModel.model_validate(read_json(folder / "atoll.json")["model"])
    spec = run_of(model)
    parameters = np.empty(spec.num_parameters, np.float32)
    read_weights(folder, spec, parameters)
    return model, parameters


def test_weights_that_are_damaged_or_another_models_are_refused(tmp_path: Path) -> None:
    export(tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]
    save_file(tensors, weights)
    with pytest.raises(
        BadDataError, match=r"model.norm.weight .* is \[15\], and the run's is \[16\]"
    ):
        load_exported(tmp_path / "model")
    weights.write_bytes(b"not safetensors")
    with pytest.raises(BadDataError, match="is damaged or cut off"):
        load_exported(tmp_path / "model")


def test_transformers_loads_an_export_unchanged(tmp_path: Path) -> None:
    import transformers  # takes seconds

    export(tmp_path / "model")
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model")
    state = model.state_dict()
    for place in layout_of(run_of(SPEC)).places:
        ours = WEIGHTS[place.offset : place.offset + place.num_elements].reshape(place.shape)
        assert np.array_equal(state[place.name].numpy(), ours)


@pytest.mark.parametrize(
    ("said", "asked", "written"),
    [
        ({"torch_dtype": "bfloat16"}, None, "bf16"),
        ({"dtype": "float16"}, None, "fp16"),
        ({"dtype": "bfloat16"}, "fp32", "fp32"),
        ({}, None, "fp32"),
        ({}, "bf16", "bf16"),
    ],
)
def test_weights_have_the_type_of_the_model_that_the_run_began_with_or_the_one_asked_for(
    said: dict[str, str], asked: DType | None, written: DType, tmp_path: Path
) -> None:
    import transformers  # takes seconds

    spec = run_of(SPEC).model_copy(
        update={"description": Description(config={"model_type": "llama", **said})}
    )
    out = tmp_path / "out"
    frozen = WEIGHTS.copy()
    frozen.setflags(write=False)  # as a snapshot gives them
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export_model(spec=spec, parameters=frozen, origin=ORIGIN, out=out, dtype=asked)
    kinds = {tensor.kind for tensor in tensors_in(out / "model.safetensors").values()}
    assert kinds == {{"fp32": "F32", "bf16": "BF16", "fp16": "F16"}[written]}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
    expected = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[written]
    assert loaded.dtype == expected
    rounded = torch.from_numpy(WEIGHTS).to(expected).to(torch.float32).numpy()
    assert np.array_equal(load_exported(out)[1], rounded), "to nearest"
    assert json.loads((out / "atoll.json").read_text())["dtype"] == written
    assert f", {str(expected).removeprefix('torch.')} |" in (out / "README.md").read_text()


def test_values_that_a_type_cannot_hold_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    large = WEIGHTS.copy()
    large[7] = 7e4
    with pytest.raises(
        UsageError, match=r"embed_tokens\.weight has values up to 7e\+04, and float16"
    ):
        export_model(
            spec=run_of(SPEC), parameters=large, origin=ORIGIN, out=tmp_path / "out", dtype="fp16"
        )
    assert not list(tmp_path.iterdir())


def test_the_tokenizer_and_how_to_generate_go_along(tmp_path: Path) -> None:
    files = {}
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        files[name] = tmp_path / f"own-{name}"
        files[name].write_text(json.dumps({"name": name}))
    description = Description(generation_config={"top_p": 0.9})
    out = tmp_path / "out"
    export_model(
        spec=run_of(SPEC).model_copy(update={"description": description}),
        parameters=WEIGHTS,
        origin=ORIGIN,
        out=out,
        tokenizer=files,
    )
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert json.loads((out / name).read_text()) == {"name": name}
    # What the run began with comes before what lay beside the tokenizer.
    assert json.loads((out / "generation_config.json").read_text()) == {"top_p": 0.9}
    assert "AutoTokenizer" in (out / "README.md").read_text()


def test_weights_are_shared_out_to_files_of_a_size_and_an_index(tmp_path: Path) -> None:
    out = tmp_path / "model"
    export(out, shard_bytes=4096)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(out.glob("*.safetensors"))
    assert index["metadata"]["total_size"] == WEIGHTS.nbytes
    assert [file.name for file in files] == sorted(set(index["weight_map"].values()))
    for file in files:
        tensors = load_file(file)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 4096 or len(tensors) == 1
    assert np.array_equal(load_exported(out)[1], WEIGHTS)


def commit_of(number: int, tokens: dict[str, int]) -> Commit:
    contributors = tuple(
        Contributor(node_id=NodeId(n), samples=t, tokens=t) for n, t in tokens.items()
    )
    digest = Digest(bytes(32))

    def outcome(index: int, digest: Digest | None) -> SliceOutcome:
        return SliceOutcome(
            index=index,
            start=1000 * index,
            num_elements=1000,
            digest=digest,
            contributors=contributors,
            holder_ids=tuple(NodeId(n) for n in tokens),
        )

    slices = (outcome(0, digest), outcome(1, digest), outcome(2, None))
    return Commit(round=number, fragment=0, base_digest=digest, slices=slices)


def test_the_card_says_who_trained_how_much(tmp_path: Path) -> None:
    spec = run_of(SPEC)
    commits = [commit_of(3, {"a": 100, "b": 50}), commit_of(4, {"b": 70})]
    counted = contributions_of(commits, spec)
    assert counted.tokens_of == {"b": 120, "a": 100}  # once a round, however many slices
    sent_in_round_3 = (
        2 * 2 * 516
    )  # two slices, each sent once up and once down, of 4 bits and scales
    assert counted.most_bytes == pytest.approx(sent_in_round_3, rel=0.05)
    origin = replace(ORIGIN, contributions=counted)
    export_model(spec=spec, parameters=WEIGHTS, origin=origin, out=tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| tokens by node, rounds 3 to 4 | `b` 120, `a` 100 |" in card
    assert "| tokens trained, rounds 3 to 4 | 220 |" in card
    about = json.loads((tmp_path / "out" / "atoll.json").read_text())
    assert about["tokens_by_node"] == {"b": 120, "a": 100}
    assert card.startswith("---\nlibrary_name: transformers\n")


def test_a_transformers_model_that_a_function_builds_loads_there_from_its_export(
    tmp_path: Path,
) -> None:
    undescribed = RunSpec(
        model=FunctionModel(source="function", function="tests.run_functions:llama", context=16),
        data=DataSection(source="text", paths=("*.txt",), held_out=0.2),
    )
    spec = undescribed.model_copy(update={"description": describe(undescribed, None)})
    parameters = first_vector(spec)
    out = tmp_path / "model"
    assert export_model(spec=spec, parameters=parameters, origin=ORIGIN, out=out) == ""
    config = json.loads((out / "config.json").read_text())
    assert (config["architectures"], config["hidden_size"]) == (["LlamaForCausalLM"], 16)
    card = (out / "README.md").read_text()
    assert 'transformers.LlamaForCausalLM.from_pretrained(".")' in card

    import transformers  # takes seconds

    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert model.config.rope_parameters["rope_theta"] == 5e5
    places = {place.name: place for place in layout_of(spec).places}
    for name, values in model.named_parameters():
        place = places.pop(name)
        own = parameters[place.offset : place.offset + place.num_elements]
        assert np.array_equal(values.detach().flatten().numpy(), own), name
    assert not places
