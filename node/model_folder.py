"""A folder as transformers writes them: config.json, generation_config.json and weights.

Read without transformers or torch, the weights tensor by tensor into the canonical vector. How
config.json and [model] say the same is node.families' business, the folder's tokenizer that of
node.island.data.tokenizing; node.export writes such folders.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from node.families import decoder_of
from node.outer_state import Vector
from node.tensor_file import StoredTensor, tensors_in
from protocol.errors import BadDataError, NoInputError
from protocol.layout import layout_of
from protocol.models import DecoderModel
from protocol.run_spec import RunSpec

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_COPY_AGAIN = "copy the whole folder of the model again"


def read_config(folder: Path, context: int | None = None) -> DecoderModel:
    """[model] for the folder's model; `context` for samples shorter than the longest it allows.

    Raises NoInputError for a folder without config.json, and BadDataError with key and value for what
    the decoder cannot be.
    """
    path = folder / CONFIG
    return decoder_of(read_json(path), origin=str(path), context=context)


def read_settings(folder: Path) -> dict[str, dict[str, Any]]:
    """config.json and generation_config.json, where there is one, as a run's description keeps them.

    But for where somebody's machine had the model: every node of the run sees its description.
    """
    config = read_json(folder / CONFIG)
    settings = {"config": {key: config[key] for key in config if not key.endswith("name_or_path")}}
    if (folder / GENERATION_CONFIG).exists():
        settings["generation_config"] = read_json(folder / GENERATION_CONFIG)
    return settings


def read_weights(folder: Path, spec: RunSpec, out: Vector) -> None:
    """Fills `out` with the folder's weights in the run's canonical order.

    All names and shapes are compared before the first value is written. Raises NoInputError for a folder
    without weights, BadDataError for a file that is damaged or cut off, and for other tensors than the run's.
    """
    read_tensors(stored_tensors(folder), spec, out, origin=folder)


def read_tensors(
    stored: Mapping[str, StoredTensor], spec: RunSpec, out: Vector, *, origin: Path
) -> None:
    """As `read_weights`, of tensors from anywhere."""
    places = layout_of(spec).places
    for place in places:
        tensor = stored.get(place.name)
        if tensor is None:
            raise BadDataError(
                f"{origin} has no tensor {place.name}, which the run's model has",
                next_step=_COPY_AGAIN,
            )
        if tensor.shape != place.shape:
            raise BadDataError(
                f"{place.name} in {tensor.path} is {list(tensor.shape)}, and the run's is "
                f"{list(place.shape)}",
                next_step="name the folder that the run was made from",
            )
    for name in sorted(stored.keys() - {place.name for place in places}):
        if not _is_known_not_to_matter(name, spec):
            raise BadDataError(
                f"{stored[name].path} has a tensor {name}, which the run's model does not have",
                next_step="name the folder that the run was made from",
            )
    for place in places:
        stored[place.name].read(out[place.offset : place.offset + place.num_elements])


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of the folder by name, from one file or from several with an index."""
    if (folder / WEIGHTS).exists() or not (folder / INDEX).exists():
        _refuse_without_weights(folder)
        return tensors_in(folder / WEIGHTS)
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadDataError(f"{folder / INDEX} has no weight_map", next_step=_COPY_AGAIN)
    files = {}
    for file in sorted(set(map(str, weight_map.values()))):
        if Path(file).name != file:
            raise BadDataError(
                f"{folder / INDEX} names {file!r}, which is no file of that folder",
                next_step=_COPY_AGAIN,
            )
        files[file] = tensors_in(folder / file)
    for name, file in weight_map.items():
        if name not in files[file]:
            raise BadDataError(
                f"{folder / file} has no tensor {name}, and {INDEX} says that it has",
                next_step=_COPY_AGAIN,
            )
    return {name: files[file][name] for name, file in weight_map.items()}


def _refuse_without_weights(folder: Path) -> None:
    if (folder / WEIGHTS).exists():
        return
    pickled = [name for name in _PICKLED if (folder / name).exists()]
    if pickled:
        raise BadDataError(
            f"{folder} has its weights as {pickled[0]} only, and pickles are not read: they may run code",
            next_step="save the model with safetensors, as transformers' save_pretrained does",
        )
    raise NoInputError(
        f"{folder} has no weights: neither {WEIGHTS} nor {INDEX} is there", next_step=_COPY_AGAIN
    )


def _is_known_not_to_matter(name: str, spec: RunSpec) -> bool:
    """A head that is the embedding once more, and RoPE's tables in files of old versions."""
    is_tied = isinstance(spec.model, DecoderModel) and spec.model.tie_embeddings
    return (name == "lm_head.weight" and is_tied) or name.endswith("rotary_emb.inv_freq")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises NoInputError or BadDataError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise NoInputError(
            f"{path} is not there",
            next_step="name a folder as transformers' save_pretrained writes it",
        ) from error
    except OSError as error:
        raise NoInputError(
            f"{path} cannot be read: {error.strerror}", next_step="make it a file that you may read"
        ) from error
    except ValueError as error:
        raise BadDataError(f"{path} is not JSON: {error}", next_step=_COPY_AGAIN) from error
    if not isinstance(value, Mapping):
        raise BadDataError(f"{path} is no table of keys and values", next_step=_COPY_AGAIN)
    return dict(value)
