"""A file in the safetensors format, read tensor by tensor from a mapping: no more memory than one block.

Values of bf16, fp16 and fp32 come out as fp32 without torch, which numpy alone has no bf16 for. What is
declared is compared with the file before a value is read: a file that was cut off is refused at once.
"""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from node.outer_state import Vector
from protocol.errors import BadDataError, NoInputError

_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000  # as the format has it
_STORED: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
_ELEMENTS_AT_ONCE = 1 << 20
_BITS_BELOW_BF16 = 16

_COPY_AGAIN = "copy the whole folder of the model again"


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
    """What a file holds, by name. Raises NoInputError or BadDataError."""
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
