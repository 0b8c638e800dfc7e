"""Models as they lie on disk: folders as transformers writes them, and the weights that a run begins with.

Read without transformers or torch, tensor by tensor from a mapping into the canonical vector, so that it
takes no more memory than one block. Which files a folder has is node.models.folders' business, how
config.json and [model] say the same that of node.models.families, and the folder's tokenizer that of
node.island.data.tokenizing; node.models.export writes such folders.

A run may begin with given weights: those of a transformers folder, or of one file in the safetensors
format that was written when the run was made, with the trained tensors, fp32, by their canonical names.
Some node is started with them (`--weights`); the others fetch the state from that node as joiners do, and
all compare its digest with the run's.
"""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from node.models.families import decoder_of, refuse_quantised
from node.models.folders import (
    CONFIG,
    COPY_AGAIN,
    GENERATION_CONFIG,
    INDEX,
    LFS_POINTER,
    has_weights,
    not_there,
    pointer_of_lfs,
    read_json,
    require_model,
    weight_files,
)
from node.outer_state import Vector, outer_digest
from protocol.errors import BadDataError, ConfigError, NoInputError
from protocol.run.models import FIRST_WEIGHTS, DecoderModel, Layout, layout_of
from protocol.run.run_spec import RunSpec
from protocol.wire.rounds import Digest

MOMENTUM = "outer_momentum/"
"""Before the names of tensors in a file with first weights: of the outer optimizer's momentum."""

_NO_HEADER = (AttributeError, KeyError, TypeError, ValueError, IndexError)
"""What is raised where a header has other values than those of the format."""

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
    entries, start = _entries_of(path)
    try:
        return {name: _stored(path, name, entries[name], start) for name in entries}
    except _NO_HEADER as error:
        raise _damaged(path, "its header is not one of safetensors") from error


def _entries_of(path: Path) -> tuple[Mapping[str, Any], int]:
    """What the header says of each tensor, and where values begin; raises as `tensors_in`."""
    try:
        with path.open("rb") as file:
            num_bytes = path.stat().st_size
            start, header = _header_of(file.read(_LENGTH.size), file, num_bytes, path)
    except FileNotFoundError as error:
        raise not_there(path) from error
    except OSError as error:
        raise NoInputError(
            f"{path} cannot be read: {error.strerror}", next_step="make it a file that you may read"
        ) from error
    try:
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = start + max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
    except _NO_HEADER as error:
        raise _damaged(path, "its header is not one of safetensors") from error
    if end != num_bytes:
        raise _damaged(path, f"it has {num_bytes:,} bytes, and its header speaks of {end:,}")
    return entries, start


def _header_of(
    prefix: bytes, file: Any, num_bytes: int, path: Path
) -> tuple[int, Mapping[str, Any]]:
    """Where the values begin, and what is said of them."""
    if len(prefix) < _LENGTH.size:
        raise _damaged(path, f"it has {num_bytes} bytes")
    if LFS_POINTER.startswith(prefix):
        raise pointer_of_lfs(path)
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
    return BadDataError(f"{path} is damaged or cut off: {why}", next_step=COPY_AGAIN)


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
                next_step=COPY_AGAIN,
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
    found: dict[str, StoredTensor] = {}
    for file, names in weight_files(folder).items():
        tensors = tensors_in(folder / file)
        for name in tensors if names is None else names:
            if name not in tensors:
                raise BadDataError(
                    f"{folder / file} has no tensor {name}, and {INDEX} says that it has",
                    next_step=COPY_AGAIN,
                )
            found[name] = tensors[name]
    return found


def look_at_model(folder: Path) -> None:
    """Raises NoInputError or BadDataError for what is no folder of a whole model; reads no value.

    So for files of weights that are missing, damaged, cut off, or of another format. It may have none at all.
    """
    require_model(folder)
    refuse_quantised(read_json(folder / CONFIG), origin=str(folder / CONFIG))
    if has_weights(folder):
        for file in weight_files(folder):
            _entries_of(folder / file)


def _is_known_not_to_matter(name: str, spec: RunSpec) -> bool:
    """A head that is the embedding once more, and RoPE's tables in files of old versions."""
    is_tied = isinstance(spec.model, DecoderModel) and spec.model.tie_embeddings
    return (name == "lm_head.weight" and is_tied) or name.endswith("rotary_emb.inv_freq")


def refuse_what_is_no_number(values: Vector, layout: Layout, *, origin: Path | None) -> None:
    """Raises BadDataError for first weights that are not finite: every loss would be so, too."""
    for place in layout.places:
        own = values[place.offset : place.offset + place.num_elements]
        if (count := len(own) - np.count_nonzero(np.isfinite(own))) > 0:
            raise no_number(place.name, int(count), origin)


def no_number(name: str, count: int, origin: Path | None) -> BadDataError:
    """What to say of so many values of a tensor."""
    return BadDataError(
        f"{name} in {origin or 'what the function gives'} has {count:,} values that are no finite numbers",
        next_step="begin with an earlier checkpoint, from before its training failed; values that fp16 does "
        "not hold want bf16 or fp32",
    )


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
        try:
            check_tensors(tensors, spec, origin=first.origin)
        except BadDataError as error:
            if isinstance(spec.model, DecoderModel) or first.origin != path:
                raise
            raise BadDataError(
                error.what,
                next_step=f"name the {FIRST_WEIGHTS} of the folder that 'atoll init' made: in memory "
                "transformers may call tensors otherwise than on disk",
            ) from error
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
