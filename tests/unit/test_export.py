"""An exported model is whole or absent, and reads back to the bit."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from node.export import export_model, load_exported
from node.island.first_weights import initial_parameters
from protocol.errors import BadDataError, CannotCreateError, NoInputError
from protocol.layout import layout_of
from protocol.models import DecoderModel
from tests.tiny_runs import run_of

SPEC = DecoderModel(hidden_size=16, num_layers=2, num_heads=4, ffn_size=24, context=16)
WEIGHTS = initial_parameters(run_of(SPEC, seed=1))


def export(out: Path, spec: DecoderModel = SPEC) -> None:
    export_model(
        spec=spec,
        layout=layout_of(run_of(spec)),
        parameters=initial_parameters(run_of(spec, seed=1)),
        out=out,
        metadata={"run": "my-run", "round": "40", "digest": "9f3c"},
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
    assert json.loads((out / "atoll.json").read_text())["round"] == "40"
    assert "Tokens are bytes" in (out / "README.md").read_text()
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
    with pytest.raises(CannotCreateError, match="No space left on device"):
        export(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_export_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoInputError, match=r"config\.json is missing"):
        load_exported(tmp_path)
    export(tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]
    save_file(tensors, weights)
    with pytest.raises(BadDataError, match=r"model.norm.weight .* is float32 \(15,\)"):
        load_exported(tmp_path / "model")
    weights.write_bytes(b"not safetensors")
    with pytest.raises(BadDataError, match="cannot be read"):
        load_exported(tmp_path / "model")


def test_transformers_loads_an_export_unchanged(tmp_path: Path) -> None:
    import transformers  # takes seconds

    export(tmp_path / "model")
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model")
    state = model.state_dict()
    for place in layout_of(run_of(SPEC)).places:
        ours = WEIGHTS[place.offset : place.offset + place.num_elements].reshape(place.shape)
        assert np.array_equal(state[place.name].numpy(), ours)
