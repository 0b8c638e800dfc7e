"""Writes a committed model as a folder that transformers loads, with its card.

The folder is complete or absent (protocol.files.durable). The card is the business of node.models.card,
and what config.json says of a model that of node.models.families.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from node.island.data.manifest import TOKENIZER_FILE
from node.island.data.tokenizing import (
    TOKENIZER_SETTINGS,
    kept_of_tokenizer,
    settings_of_tokenizer,
    tokenizer_files,
)
from node.models.card import AUTO_TOKENIZER, CARD, TORCH_NAMES, DType, Form, Origin, card_of
from node.models.families import config_of, why_none
from node.models.folders import CONFIG, GENERATION_CONFIG, INDEX, WEIGHTS, read_json
from node.outer_state import Vector
from protocol.errors import AtollError, CannotCreateError, UsageError
from protocol.files.durable import is_taken, refusal_to_write, whole_folder
from protocol.run.models import (
    DecoderModel,
    Description,
    FunctionModel,
    Layout,
    TensorPlace,
    TransformersModel,
    layout_of,
)
from protocol.run.run_spec import RunSpec

if TYPE_CHECKING:
    from torch import Tensor


ABOUT = "atoll.json"

SHARD_BYTES = 5_000_000_000
"""Most that one file of weights holds, unless one tensor is larger: what model hubs take well."""

_VALUE_BYTES: Mapping[DType, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
_OWN_TYPE = "atoll-decoder"  # transformers does not know it, and says so by this name


def export_model(
    *,
    spec: RunSpec,
    parameters: Vector,
    origin: Origin,
    out: Path,
    tokenizer: Mapping[str, Path] | None = None,
    end_of_text: int | None = None,
    base: Path | None = None,
    base_name: str = "",
    dtype: DType | None = None,
    shard_bytes: int = SHARD_BYTES,
    code: Path | None = None,
) -> str:
    """Writes weights, config.json, the tokenizer, atoll.json and a model card.

    `tokenizer` are its files by the names that they get; a tokenizer.json alone gets the settings with which
    transformers reads it as it is, and `end_of_text` as what ends a text. Models with source =
    "transformers" are written by transformers itself; adapters alone, as peft loads them, or added to the
    model in `base`, which people know by `base_name`. With `code`, the folder of the run's functions, frozen
    values and running statistics are made by those, and written with the weights. Without a `dtype` it is
    what `usual_dtype` says.

    Returns why transformers does not load the result; empty where it does. Raises CannotCreateError when
    `out` exists and is not an empty folder, or cannot be written, SystemRefusedError when the disk is full,
    and UsageError for values that `dtype` cannot hold.
    """
    dtype = dtype or usual_dtype(spec, is_merged=base is not None)
    layout = layout_of(spec)
    if len(parameters) != layout.num_elements:
        raise ValueError(f"{len(parameters)} values do not fill a layout of {layout.num_elements}")
    num_files = 1
    try:
        if is_taken(out):
            raise CannotCreateError(f"{out} exists already", next_step="name a new folder")
        with whole_folder(out) as beside:
            if isinstance(spec.model, TransformersModel):
                # What it calls weights in memory and on disk may differ, and only it knows how.
                from node.island.models.describing import export_state

                own = TORCH_NAMES[dtype]
                export_state(spec, parameters, beside, base=base, base_name=base_name, dtype=own)
            else:
                num_files = _write_weights(
                    beside,
                    layout,
                    parameters,
                    dtype,
                    shard_bytes,
                    _beside_the_trained(spec, parameters, code),
                )
            form = Form(
                dtype=dtype,
                is_merged=base is not None,
                base_name=base_name,
                has_all=code is not None,
                num_files=num_files,
            )
            problem = _write_settings(
                beside, spec, origin, tokenizer or {}, form, end_of_text=end_of_text
            )
            _make_durable(beside)
            beside.chmod(0o755)
    except SafetensorError as error:
        raise _cannot_write(out, error) from error
    return problem


def usual_dtype(spec: RunSpec, *, is_merged: bool = False) -> DType:
    """That of the folder that the run began with, as those who load it expect; of all else fp32.

    Adapters are kept in fp32, as peft keeps them, and merged into a model they have its type.
    """
    if spec.description is None or (spec.adapters is not None and not is_merged):
        return "fp32"
    config = spec.description.config
    said = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    return next((dtype for dtype, name in TORCH_NAMES.items() if name == said), "fp32")


def _write_settings(
    folder: Path,
    spec: RunSpec,
    origin: Origin,
    tokenizer: Mapping[str, Path],
    form: Form,
    *,
    end_of_text: int | None,
) -> str:
    """All but the weights; returns why transformers does not load it."""
    described = spec.description or Description()
    problem = ""
    if TOKENIZER_FILE in tokenizer:
        for name, content in kept_of_tokenizer(tokenizer).items():
            (folder / name).write_bytes(content)
        settings = settings_of_tokenizer(folder)
        if "tokenizer_class" not in settings:
            settings |= _class_of_tokenizer(folder / TOKENIZER_FILE, settings, end_of_text)
            _write_json(folder / TOKENIZER_SETTINGS, settings)
    if not isinstance(spec.model, TransformersModel):  # it has written its own
        config, problem = _config_of(spec, described, has_all=form.has_all)
        if not problem:
            config["torch_dtype"] = TORCH_NAMES[form.dtype]
            if config.get("eos_token_id") is None and end_of_text is not None:
                config["eos_token_id"] = end_of_text
        _write_json(folder / CONFIG, config)
    if described.generation_config:
        _write_json(folder / GENERATION_CONFIG, described.generation_config)
    model = spec.model.model_dump(mode="json", exclude_none=True)
    about = {**origin.facts(), "dtype": form.dtype, "model": model}
    if spec.adapters is not None:
        about["lora"] = spec.adapters.model_dump(mode="json") | {"is_merged": form.is_merged}
    _write_json(folder / ABOUT, about)
    tokenizer_by = _reader_of_tokenizer(folder) if tokenizer else ""
    card = card_of(spec, origin, form, tokenizer_by=tokenizer_by, problem=problem)
    (folder / CARD).write_text(card, encoding="utf-8")
    return problem


def _class_of_tokenizer(
    path: Path, settings: Mapping[str, Any], end_of_text: int | None
) -> dict[str, Any]:
    """What transformers has to be told of a tokenizer.json to read it as it is, and what ends a text.

    Without a class it takes that of the model's family, which splits text in that family's way: it would
    give a model other tokens than it was trained on, and some beyond its vocabulary.
    """
    # Transformers 4 and 5 know it by this name.
    found: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    told = read_json(path)
    vocabulary = told.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, list):  # of pieces with their scores
        vocabulary = {piece: number for number, (piece, _) in enumerate(vocabulary)}
    added = {one["content"]: one["id"] for one in told.get("added_tokens", ())}
    ends = [token for token, number in (vocabulary | added).items() if number == end_of_text]
    if ends and "eos_token" not in settings:
        found["eos_token"] = ends[-1]
    return found


def tokenizer_apart(folder: Path, to: Path) -> Path | None:
    """A new folder with an export's tokenizer alone, where AutoTokenizer misreads it beside the model.

    Without the model's family there it takes the class that the settings name. None where it does anyway.
    """
    if not (folder / TOKENIZER_FILE).is_file() or _reader_of_tokenizer(folder) == AUTO_TOKENIZER:
        return None
    to.mkdir()
    for name, path in tokenizer_files(folder).items():
        shutil.copyfile(path, to / name)
    _write_json(to / CONFIG, {})  # which has to be there
    return to


def _reader_of_tokenizer(folder: Path) -> str:
    """The class of transformers that gives the tokens of tokenizer.json.

    AutoTokenizer of transformers 5 takes Qwen2Tokenizer for every qwen2, whatever the settings name. Beside
    adapters alone there is no config.json, and it goes by the settings.
    """
    config = folder / CONFIG
    family = read_json(config).get("model_type") if config.is_file() else None
    named = str(settings_of_tokenizer(folder).get("tokenizer_class", ""))
    is_forced = family == "qwen2" and not named.startswith("Qwen2")
    return "PreTrainedTokenizerFast" if is_forced else AUTO_TOKENIZER


def _beside_the_trained(
    spec: RunSpec, parameters: Vector, code: Path | None
) -> Mapping[str, "Tensor"]:
    if code is None:
        return {}
    described = spec.description or Description()
    is_function = isinstance(spec.model, FunctionModel)
    if not (is_function and (described.num_running_statistics or described.num_frozen)):
        raise UsageError(
            "--code is for models of functions with running statistics, as batch norm's, or frozen values, "
            f"and {spec.run.name!r} has none",
            next_step="leave --code out",
        )
    from node.island.models.function import beside_the_trained

    return beside_the_trained(spec, parameters, code)


def _config_of(
    spec: RunSpec, described: Description, *, has_all: bool
) -> tuple[dict[str, Any], str]:
    """config.json, and why transformers does not know what it says."""
    if not isinstance(spec.model, DecoderModel):
        problem = "" if described.config else "the run's own function builds the model"
        missing = [
            *(["its running statistics"] if described.num_running_statistics else []),
            *(["what is not trained"] if described.num_frozen else []),
        ]
        if missing and not has_all:
            problem += f"{', and ' if problem else ''}the file is without {' and '.join(missing)}: "
            # Of data that a loop has brought nothing is here that they could be computed of.
            needs_loop = described.num_running_statistics and spec.data.source != "function"
            problem += (
                f"{CARD} has lines that compute them, and the model that a loop holds after its block has "
                "them"
                if needs_loop
                else f"--code FOLDER adds all by the run's functions, and {CARD} has lines that do"
            )
        return described.config or {"model_type": "atoll-function"}, problem
    config = config_of(spec.model, described.config)
    if config is not None:
        return config, ""
    sizes = spec.model.model_dump(mode="json", exclude_none=True)
    return {"model_type": _OWN_TYPE, **sizes}, why_none(spec.model)


def _write_weights(
    folder: Path,
    layout: Layout,
    parameters: Vector,
    dtype: DType,
    shard_bytes: int,
    rest: Mapping[str, "Tensor"],
) -> int:
    """Returns the number of files; `rest` goes into the last one, as it is."""
    from safetensors.torch import save_file

    from node.island.models.describing import narrowed, only_read

    value_bytes = _VALUE_BYTES[dtype]
    shards = list(_shards_of(layout, value_bytes, shard_bytes))
    weight_map: dict[str, str] = {}
    for number, places in enumerate(shards, 1):
        name = WEIGHTS
        if len(shards) > 1:
            name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {
            place.name: narrowed(
                place.name,
                only_read(parameters[place.offset : place.offset + place.num_elements]),
                TORCH_NAMES[dtype],
            ).reshape(place.shape)
            for place in places
        }
        if number == len(shards):
            tensors |= rest
        # "format" is what transformers asks for before it reads a file.
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    if len(shards) > 1:
        num_bytes = sum(tensor.nbytes for tensor in rest.values())
        total = {"total_size": value_bytes * layout.num_elements + num_bytes}
        _write_json(folder / INDEX, {"metadata": total, "weight_map": weight_map})
    return len(shards)


def _shards_of(layout: Layout, value_bytes: int, shard_bytes: int) -> Iterator[list[TensorPlace]]:
    """Tensors that go into a file together, in the order of the model."""
    shard: list[TensorPlace] = []
    num_bytes = 0
    for place in layout.places:
        more = value_bytes * place.num_elements
        if shard and num_bytes + more > shard_bytes:
            yield shard
            shard, num_bytes = [], 0
        shard.append(place)
        num_bytes += more
    yield shard


def _make_durable(folder: Path) -> None:
    for path in folder.iterdir():
        path.chmod(0o644)
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _cannot_write(out: Path, error: SafetensorError) -> AtollError:
    """What the library says, which is written in Rust and tells the system's number in its text alone."""
    told = re.search(r"\(os error (\d+)\)", str(error))
    if told is None:
        return CannotCreateError(
            f"{out} cannot be written: {error}", next_step="name a folder that you can write"
        )
    number = int(told[1])
    return refusal_to_write(out, OSError(number, os.strerror(number)))
