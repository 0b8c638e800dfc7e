"""Weights of a transformers folder come into the canonical vector whole, or not at all, in one sentence."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from node.models.reading import read_config, read_settings, read_weights
from node.outer_state import Vector
from protocol.errors import AtollError, BadDataError, NoInputError
from protocol.run.models import layout_of
from protocol.run.run_spec import ExchangeSection, RunSpec
from tests.unit.test_families import SIZES, write

CONFIG = {"model_type": "llama", **SIZES}


def tensors_of(spec: RunSpec, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        tensor.name: torch.randn(tensor.shape, generator=draw).to(dtype) for tensor in spec.tensors
    }


def spec_in(folder: Path, *, is_tied: bool = False, fragments: int = 1) -> RunSpec:
    write(folder, CONFIG | {"tie_word_embeddings": is_tied})
    return RunSpec(model=read_config(folder), exchange=ExchangeSection(fragments=fragments))


def weights_in(folder: Path, spec: RunSpec) -> Vector:
    out = np.full(spec.num_parameters, np.nan, np.float32)
    read_weights(folder, spec, out)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fragments", [1, 3])
def test_weights_of_every_precision_lie_where_the_layout_has_them(
    dtype: torch.dtype, fragments: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.models.reading._ELEMENTS_AT_ONCE", 100)  # blocks of uneven size
    spec = spec_in(tmp_path, fragments=fragments)
    tensors = tensors_of(spec, dtype)
    save_file(tensors, tmp_path / "model.safetensors")
    weights = weights_in(tmp_path, spec)
    for place in layout_of(spec).places:
        part = weights[place.offset : place.offset + place.num_elements].reshape(place.shape)
        assert np.array_equal(part, tensors[place.name].float().numpy())


def test_weights_in_several_files_are_found_by_their_index(tmp_path: Path) -> None:
    spec = spec_in(tmp_path)
    tensors = tensors_of(spec)
    save_file(tensors, tmp_path / "model.safetensors")
    whole = weights_in(tmp_path, spec)
    (tmp_path / "model.safetensors").unlink()
    in_shards(tmp_path, tensors)
    assert np.array_equal(weights_in(tmp_path, spec), whole)


def test_a_head_that_is_the_embedding_once_more_is_left_out(tmp_path: Path) -> None:
    spec = spec_in(tmp_path, is_tied=True)
    tensors = tensors_of(spec)
    again = {
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3),
    }
    save_file(tensors | again, tmp_path / "model.safetensors")
    assert np.isfinite(weights_in(tmp_path, spec)).all()


def cut_off(folder: Path) -> None:
    path = folder / "model-2.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def cut_in_its_header(folder: Path) -> None:
    path = folder / "model-2.safetensors"
    path.write_bytes(path.read_bytes()[:40])


def cut_to_nothing(folder: Path) -> None:
    (folder / "model-2.safetensors").write_bytes(b"")


def with_a_header_of_another_format(folder: Path) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 12]}}).encode()
    content = struct.pack("<Q", len(header)) + header + bytes(12)
    (folder / "model-2.safetensors").write_bytes(content)


def with_a_truncated_index(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    path.write_text(path.read_text()[:-40])


def with_an_index_that_leads_elsewhere(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../x"}}')


def with_an_index_of_what_is_not_there(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.bias"] = "model-1.safetensors"
    path.write_text(json.dumps(index))


def without_a_shard(folder: Path) -> None:
    (folder / "model-2.safetensors").unlink()


def without_weights(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()


def with_pickles_only(folder: Path) -> None:
    without_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(b"x")


def without_a_tensor(folder: Path) -> None:
    change(folder, {"model.layers.1.mlp.up_proj.weight": None})


def with_another_shape(folder: Path) -> None:
    change(folder, {"model.norm.weight": torch.ones(23)})


def with_one_more(folder: Path) -> None:
    change(folder, {"model.layers.3.mlp.up_proj.weight": torch.ones(40, 24)})


def quantised(folder: Path) -> None:
    change(folder, {"model.norm.weight": torch.ones(24, dtype=torch.int8)})


@pytest.mark.parametrize(
    ("harm", "error", "problem"),
    [
        (
            cut_off,
            BadDataError,
            r"model-2\.safetensors is damaged or cut off: it has [\d,]+ bytes, and",
        ),
        (
            cut_in_its_header,
            BadDataError,
            r"model-2\.safetensors is damaged or cut off: its header",
        ),
        (cut_to_nothing, BadDataError, "is damaged or cut off: it has 0 bytes"),
        (with_a_header_of_another_format, BadDataError, "its header is not one of safetensors"),
        (with_a_truncated_index, BadDataError, r"index\.json is not JSON"),
        (with_an_index_that_leads_elsewhere, BadDataError, r"names '\.\./x', which is no file"),
        (with_an_index_of_what_is_not_there, BadDataError, r"has no tensor model\.norm\.bias, and"),
        (without_a_shard, NoInputError, r"model-2\.safetensors is not there"),
        (without_weights, NoInputError, r"has no weights: neither model\.safetensors nor"),
        (with_pickles_only, BadDataError, r"as pytorch_model\.bin only, and pickles are not read"),
        (without_a_tensor, BadDataError, r"has no tensor model\.layers\.1\.mlp\.up_proj\.weight"),
        (
            with_another_shape,
            BadDataError,
            r"norm\.weight in .* is \[23\], and the run's is \[24\]",
        ),
        (
            with_one_more,
            BadDataError,
            r"has a tensor model\.layers\.3\.mlp\.up_proj\.weight, which",
        ),
        (
            quantised,
            BadDataError,
            r"model\.norm\.weight in .* is I8, and weights are read from F32",
        ),
    ],
)
def test_a_folder_that_is_not_right_is_refused_before_a_value_is_written(
    harm: Any, error: type[AtollError], problem: str, tmp_path: Path
) -> None:
    spec = spec_in(tmp_path)
    in_shards(tmp_path, tensors_of(spec))
    harm(tmp_path)
    out = np.full(spec.num_parameters, np.nan, np.float32)
    with pytest.raises(error, match=problem) as refused:
        read_weights(tmp_path, spec, out)
    assert refused.value.next_step
    assert np.isnan(out).all()


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoInputError, match=r"config\.json is not there"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(BadDataError, match="is no table of keys and values"):
        read_config(tmp_path)


def test_settings_are_what_the_folder_says(tmp_path: Path) -> None:
    write(tmp_path, CONFIG | {"_name_or_path": "/home/somebody/model"})
    assert read_settings(tmp_path) == {"config": CONFIG}  # and not where somebody has it
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert read_settings(tmp_path)["generation_config"] == {"eos_token_id": 7}


def in_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    weight_map = {name: f"model-{1 + i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        own = {name: tensors[name] for name in tensors if weight_map[name] == file}
        save_file(own, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def change(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Rewrites the folder's weights with some tensors others, more, or (None) fewer."""
    write(folder, CONFIG)
    tensors: dict[str, Any] = tensors_of(RunSpec(model=read_config(folder))) | changes
    in_shards(folder, {name: tensor for name, tensor in tensors.items() if tensor is not None})
