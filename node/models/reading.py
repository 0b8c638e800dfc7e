"""Models as they lie on disk: folders as transformers writes them, and the weights that a run begins with.

Read without transformers or torch, tensor by tensor from a mapping into the canonical vector, so that it
takes no more memory than one block. How config.json and [model] say the same is node.models.families'
business, the folder's tokenizer that of node.island.data.tokenizing; node.models.export writes such folders.

A run may begin with given weights: those of a transformers folder, or of one file in the safetensors
format that was written when the run was made, with the trained tensors, fp32, by their canonical names.
Some node is started with them (`--weights`); the others fetch the state from that node as joiners do, and
all compare its digest with the run's.
"""

import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from node.models.families import decoder_of
from node.outer_state import Vector, outer_digest
from protocol.errors import BadDataError, ConfigError, NoInputError
from protocol.run.models import FIRST_WEIGHTS, DecoderModel, Layout, layout_of
from protocol.run.run_spec import RunSpec
from protocol.wire.rounds import Digest

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

MOMENTUM = "outer_momentum/"
"""Before the names of tensors in a file with first weights: of the outer optimizer's momentum."""

_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_COPY_AGAIN = "copy the whole folder of the model again"

_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000  # as the format has it
_STORED: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
_ELEMENTS_AT_ONCE = 1 << 20
_BITS_BELOW_BF16 = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where a tensor lies in its file."""

    path: Path
    name: str
    kind: str  # "F32", "F16" or "BF16"
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file

    @property
    def num_bytes(self) -> int:
        """In the file."""
        return math.prod(self.shape) * _STORED[self.kind].itemsize

    def read(self, out: Vector) -> None:
        """Fills `out`, one value for each of the tensor's, in the order of its rows."""
        stored = np.memmap(
            self.path, dtype=_STORED[self.kind], mode="r", offset=self.start, shape=(len(out),)
        )
        if self.kind != "BF16":
            out[:] = stored
            return
        # A bf16 is the upper half of an fp32.
        words = out.view(np.uint32)
        for start in range(0, len(out), _ELEMENTS_AT_ONCE):
            part = slice(start, start + _ELEMENTS_AT_ONCE)
            words[part] = stored[part]
            words[part] <<= _BITS_BELOW_BF16


def tensors_in(path: Path) -> dict[str, StoredTensor]:
    """What a file in the safetensors format holds, by name. Raises NoInputError or BadDataError.

    Values of bf16, fp16 and fp32 come out as fp32 without torch, which numpy alone has no bf16 for. What
    is declared is compared with the file before a value is read: one that was cut off is refused at once.
    """
    try:
        with path.open("rb") as file:
            num_bytes = path.stat().st_size
            start, header = _header_of(file.read(_LENGTH.size), file, num_bytes, path)
    except FileNotFoundError as error:
        raise NoInputError(f"{path} is not there", next_step=_COPY_AGAIN) from error
    except OSError as error:
        raise NoInputError(
            f"{path} cannot be read: {error.strerror}", next_step="make it a file that you may read"
        ) from error
    try:
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        tensors = {name: _stored(path, name, entries[name], start) for name in entries}
        end = start + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise _damaged(path, "its header is not one of safetensors") from error
    if end != num_bytes:
        raise _damaged(path, f"it has {num_bytes:,} bytes, and its header speaks of {end:,}")
    return tensors


def _header_of(
    prefix: bytes, file: Any, num_bytes: int, path: Path
) -> tuple[int, Mapping[str, Any]]:
    """Where the values begin, and what is said of them."""
    if len(prefix) < _LENGTH.size:
        raise _damaged(path, f"it has {num_bytes} bytes")
    (length,) = _LENGTH.unpack(prefix)
    if length > min(_MAX_HEADER_BYTES, num_bytes - _LENGTH.size):
        raise _damaged(path, f"its header would have {length:,} bytes of {num_bytes:,}")
    try:
        header = json.loads(file.read(length))
    except ValueError as error:
        raise _damaged(path, "its header is not JSON") from error
    return _LENGTH.size + length, header


def _stored(path: Path, name: str, entry: Mapping[str, Any], start: int) -> StoredTensor:
    kind = entry["dtype"]
    if kind not in _STORED:
        raise BadDataError(
            f"{name} in {path} is {kind}, and weights are read from {', '.join(_STORED)}",
            next_step="save the model unquantised, in float32 or bfloat16",
        )
    first, last = entry["data_offsets"]
    tensor = StoredTensor(
        path=path,
        name=name,
        kind=kind,
        shape=tuple(int(size) for size in entry["shape"]),
        start=start + first,
    )
    if first < 0 or last - first != tensor.num_bytes:
        raise ValueError(name)
    return tensor


def _damaged(path: Path, why: str) -> BadDataError:
    return BadDataError(f"{path} is damaged or cut off: {why}", next_step=_COPY_AGAIN)


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


def ends_in(*settings: Mapping[str, Any]) -> frozenset[int]:
    """The tokens after which a model writes no more, by the first of its settings that names any."""
    for each in settings:
        ends = each.get("eos_token_id")
        if ends is not None:
            return frozenset(ends if isinstance(ends, list) else [ends])
    return frozenset()


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
    check_tensors(stored, spec, origin=origin)
    for place in layout_of(spec).places:
        stored[place.name].read(out[place.offset : place.offset + place.num_elements])


def check_tensors(stored: Mapping[str, StoredTensor], spec: RunSpec, *, origin: Path) -> None:
    """Raises BadDataError unless they have the names and shapes of the run's."""
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


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of the folder by name, from one file or from several with an index."""
    if (folder / WEIGHTS).exists() or not (folder / INDEX).exists():
        if not has_weights(folder):
            raise NoInputError(
                f"{folder} has no weights: neither {WEIGHTS} nor {INDEX} is there",
                next_step=f"{_COPY_AGAIN}; to begin with random weights, add --by transformers",
            )
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


def has_weights(folder: Path) -> bool:
    """Whether a folder has weights beside its config. Raises BadDataError where only pickles hold them."""
    if any(folder.glob("*.safetensors")):
        return True
    pickled = [name for name in _PICKLED if (folder / name).exists()]
    if pickled:
        raise BadDataError(
            f"{folder} has its weights as {pickled[0]} only, and pickles are not read: they may run code",
            next_step="save the model with safetensors, as transformers' save_pretrained does",
        )
    return False


def _is_known_not_to_matter(name: str, spec: RunSpec) -> bool:
    """A head that is the embedding once more, and RoPE's tables in files of old versions."""
    is_tied = isinstance(spec.model, DecoderModel) and spec.model.tie_embeddings
    return (name == "lm_head.weight" and is_tied) or name.endswith("rotary_emb.inv_freq")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises NoInputError or BadDataError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        next_step = "name a folder as transformers' save_pretrained writes it"
        if not path.parent.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", str(path.parent)):
            name = path.parent.name  # perhaps a model's name on the hub: nothing is fetched unasked
            next_step += (
                f"; 'hf download {path.parent} --local-dir {name}' fetches one, then --from {name}"
            )
        raise NoInputError(f"{path} is not there", next_step=next_step) from error
    except OSError as error:
        raise NoInputError(
            f"{path} cannot be read: {error.strerror}", next_step="make it a file that you may read"
        ) from error
    except ValueError as error:
        raise BadDataError(f"{path} is not JSON: {error}", next_step=_COPY_AGAIN) from error
    if not isinstance(value, Mapping):
        raise BadDataError(f"{path} is no table of keys and values", next_step=_COPY_AGAIN)
    return dict(value)


def digest_of_first(parameters: Vector, momentum: Vector | None = None) -> Digest:
    """The digest of the outer state that begins with these weights; with None its momentum is zero."""
    return outer_digest(parameters, np.zeros_like(parameters) if momentum is None else momentum)


def write_first(
    path: Path, layout: Layout, parameters: Vector, momentum: Vector | None = None
) -> None:
    """Writes the file; vectors are in canonical order. Raises OSError or SafetensorError."""
    tensors = {
        prefix + place.name: vector[place.offset : place.offset + place.num_elements].reshape(
            place.shape
        )
        for prefix, vector in (("", parameters), (MOMENTUM, momentum))
        if vector is not None
        for place in layout.places
    }
    save_file(tensors, path, metadata={"format": "pt"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _First:
    """Where the first weights lie, and the momentum that comes with them, if any."""

    digest: Digest  # of the state that they should be
    origin: Path
    weights: Mapping[str, StoredTensor]
    momentum: Mapping[str, StoredTensor]


def look_at_first(path: Path, spec: RunSpec) -> None:
    """What `read_first` would refuse, as far as that is seen without reading a value. Raises AtollError."""
    _first_of(path, spec)


def _first_of(path: Path, spec: RunSpec) -> _First:
    if spec.first_digest is None:
        raise ConfigError(
            f"run {spec.run.name!r} draws its first weights from its seed: --weights {path} has no effect",
            next_step="leave --weights out",
        )
    if (path / CONFIG).is_file():
        first = _First(
            digest=spec.first_digest, origin=path, weights=stored_tensors(path), momentum={}
        )
    else:
        file = path / FIRST_WEIGHTS if path.is_dir() else path
        if not file.is_file():
            raise NoInputError(
                f"{file} is not there",
                next_step="name the transformers folder that the run was made from, or the "
                f"{FIRST_WEIGHTS} of the folder that 'atoll init' made; or leave --weights out and fetch "
                "them from a node that has them",
            )
        stored = tensors_in(file)
        kept = {
            name.removeprefix(MOMENTUM): stored.pop(name)
            for name in list(stored)
            if name.startswith(MOMENTUM)
        }
        first = _First(digest=spec.first_digest, origin=file, weights=stored, momentum=kept)
    for tensors in filter(None, (first.weights, first.momentum)):
        check_tensors(tensors, spec, origin=first.origin)
    return first


def read_first(path: Path, spec: RunSpec, out: Vector) -> Vector | None:
    """Fills `out` with the run's first weights, from the file or the transformers folder.

    Returns the outer optimizer's momentum where the run begins with one, else None.

    Tensor by tensor, so that it takes no memory of its own. Raises NoInputError where there are none,
    BadDataError for tensors that the run does not have so, and ConfigError for other weights than
    the run begins with.
    """
    first = _first_of(path, spec)
    read_tensors(first.weights, spec, out, origin=first.origin)
    momentum: Vector | None = None
    if first.momentum:
        momentum = np.empty_like(out)
        read_tensors(first.momentum, spec, momentum, origin=first.origin)
    digest = digest_of_first(out, momentum)
    if digest != first.digest:
        raise ConfigError(
            f"{path} holds the weights {digest.hex()[:12]}, and run {spec.run.name!r} begins with "
            f"{first.digest.hex()[:12]}",
            next_step="name what the run was made from, or leave --weights out and fetch them from a node "
            "that has them",
        )
    return momentum
