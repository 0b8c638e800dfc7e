"""Snapshots: the outer state of one round as a value, and as a file. How they travel: manifest.py.

File: safetensors with the tensors `parameters`, `momentum` and, where a node owes something,
`residual` and `reducer_error`, which never leave the node. The metadata hold the rest: the outer
digest covers both vectors of the outer state, the seal covers what is owed and all other metadata, and
the head's seal these metadata alone, for who does not read what is owed. Format 1 had no `reducer_error`;
it is still read, and so are files without the head's seal.
"""

import json
import re
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import blake3
import numpy as np
import structlog
from safetensors import SafetensorError, safe_open

from node.exchange.state.spare_files import kept_for_reading, set_aside
from node.outer_state import PIECE_ELEMENTS, Vector, digest_of_pieces, outer_digest
from protocol.errors import BadDataError, ConfigError
from protocol.files.durable import make_folder, remove_durably, write_atomically
from protocol.rounds import Digest

log = structlog.get_logger()

T = TypeVar("T")

FILE_FORMAT = "atoll snapshot 3"
_FORMATS_READ = ("atoll snapshot 1", "atoll snapshot 2", FILE_FORMAT)
_FILE_NAME = re.compile(r"round-(\d+)\.safetensors")

KEPT_FILES = 2
"""A damaged newest file costs a round, not the outer state."""

_ELEMENT_BYTES = 16  # parameters, momentum, residual, reducer_error
_PIECE_OF_ERROR = "reducer_error."
_FILE_HEADER_BYTES = 4096  # at most, with room to spare


def snapshot_bytes(num_elements: int) -> int:
    """The size of a file, or a little more."""
    return _ELEMENT_BYTES * num_elements + _FILE_HEADER_BYTES


class SnapshotError(ValueError):
    """A file that is no snapshot, or a damaged one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Owed:
    """What a node still owes at a snapshot's round. It never leaves the node."""

    residual: Vector = field(repr=False)  # [n], canonical order
    reducer_error: Mapping[int, Vector] | None = field(default=None, repr=False)
    """Where the run keeps it, of spans that this node reduces: by their first element."""

    def tensors(self) -> dict[str, Vector]:
        """What is owed, by the names in the file."""
        kept = self.reducer_error or {}
        pieces = {f"{_PIECE_OF_ERROR}{start}": values for start, values in kept.items()}
        return {"residual": self.residual, **pieces}

    @classmethod
    def of(cls, tensors: Mapping[str, Vector]) -> "Owed":
        """What is owed, by a file's tensors; raises KeyError or ValueError where they are not so."""
        pieces = {
            int(name.removeprefix(_PIECE_OF_ERROR)): values
            for name, values in tensors.items()
            if name.startswith(_PIECE_OF_ERROR)
        }
        if (
            whole := tensors.get("reducer_error")
        ) is not None:  # as format 2 had it: of all elements
            parts = (
                (at, whole[at : at + PIECE_ELEMENTS]) for at in range(0, whole.size, PIECE_ELEMENTS)
            )
            pieces |= {at: part.copy() for at, part in parts if part.any()}
        return cls(residual=tensors["residual"], reducer_error=pieces or None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """The outer state after `round`'s commit. One that was read is read-only: copy its vectors."""

    round: int
    run_digest: Digest
    layout_digest: Digest
    parameters: Vector = field(repr=False)  # [n], canonical order
    momentum: Vector = field(repr=False)  # [n]
    known_digest: Digest | None = None  # where it need not be computed

    def outer_digest(self) -> Digest:
        """What all nodes at this round must share. Heavy unless it is known: reads both vectors."""
        return self.known_digest or outer_digest(self.parameters, self.momentum)

    def read(self, start: int, stop: int) -> bytes:
        """A part of the state's bytes: the parameters', then the momentum's. Whole elements only."""
        return _state_bytes(self.parameters, self.momentum, self.parameters.size, start, stop)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parameters:
    """The part of an outer state that is the model. Read-only."""

    round: int
    outer_digest: Digest
    values: Vector = field(repr=False)  # [n], canonical order


class SnapshotFolder:
    """The newest snapshots of one node on disk. One process at a time may save to a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def held_bytes(self) -> int:
        """What its files take, with what is left of earlier ones."""
        return sum(path.stat().st_size for path in (*self._files(), *self._unfinished()))

    def save(self, snapshot: Snapshot, owed: Owed | None) -> Path:
        """Writes a snapshot, with what the node owes, over the oldest; two others stay.

        Returns once it is durable: nothing may change the vectors until then, for they are not
        copied. Raises SystemRefusedError when the disk is full and CannotCreateError when the folder
        cannot be written to; older files are then still there.
        """
        make_folder(self.path)
        spare = self._spare()
        tensors = {"parameters": snapshot.parameters, "momentum": snapshot.momentum}
        metadata = {
            "format": FILE_FORMAT,
            "round": str(snapshot.round),
            "run_digest": snapshot.run_digest.hex(),
            "layout_digest": snapshot.layout_digest.hex(),
            "outer_digest": snapshot.outer_digest().hex(),
        }
        if owed is not None:
            tensors |= owed.tensors()
        metadata["head_seal"] = _seal(metadata, None)
        metadata["seal"] = _seal(metadata, owed)
        path = self._file_of(snapshot.round)
        values = map(_little_endian, tensors.values())
        write_atomically(path, _file_header(tensors, metadata), *values, over=spare)
        # Later rounds are of a history that was left, by a return to an earlier one.
        files = self._files()
        own = files.index(path)
        for i, other in enumerate((*files[:own], *files[own + KEPT_FILES :])):
            if i == 0:
                set_aside(other, other.with_name(f".{other.name}.spare"))
            else:
                remove_durably(other)
        return path

    def load_newest(
        self, run_digest: Digest, layout_digest: Digest
    ) -> tuple[Snapshot, Owed | None] | None:
        """The newest undamaged snapshot and what was owed, or None when there is no file.

        A damaged file is left where it is, logged, and the one before it taken. Raises ConfigError
        for one of another run or layout, and BadDataError when all files are damaged.
        """
        return self._first_undamaged(lambda path: _load(path, run_digest, layout_digest))

    def load_newest_parameters(
        self, run_digest: Digest, layout_digest: Digest
    ) -> "Parameters | None":
        """Of the newest undamaged snapshot the parameters, in so much memory and no more.

        The momentum is read in pieces, for the digest; what is owed is not read. Else as `load_newest`.
        """
        return self._first_undamaged(lambda path: _parameters_of(path, run_digest, layout_digest))

    def _first_undamaged(self, load: Callable[[Path], T]) -> T | None:
        files = self._files()
        for path in files:
            try:
                return load(path)
            except SnapshotError as error:
                log.warning(
                    "snapshot damaged or unreadable, taking the one before it",
                    path=str(path),
                    why=str(error),
                )
        if files:
            raise BadDataError(
                f"every snapshot in {self.path} is damaged or unreadable",
                next_step="move them away; the node then fetches the outer state, and owes nothing",
            )
        return None

    def rounds(self) -> list[int]:
        """Of which rounds there are files, the newest first."""
        return [_round_of(path) for path in self._files()]

    def load(self, round: int, digest: Digest) -> tuple[Snapshot, Owed | None] | None:
        """The state of this round if it is there, undamaged, and has this outer digest."""
        try:
            snapshot, owed = _read(self._file_of(round))
        except SnapshotError:
            return None
        return (snapshot, owed) if snapshot.outer_digest() == digest else None

    def open(self, round: int) -> "OpenSnapshot":
        """Opens the file of a round; raises SnapshotError when it is gone or none."""
        return OpenSnapshot(self._file_of(round))

    def _file_of(self, round: int) -> Path:
        return self.path / f"round-{round:08}.safetensors"

    def _files(self) -> list[Path]:
        """Whole files, the newest round first."""
        if not self.path.is_dir():
            return []
        paths = [path for path in self.path.iterdir() if _FILE_NAME.fullmatch(path.name)]
        return sorted(paths, key=_round_of, reverse=True)

    def _spare(self) -> Path | None:
        """A file to write over: one that was set aside, or what a killed process left of a write.

        All are as large as whole ones, so others are removed.
        """
        unfinished = self._unfinished()
        for path in unfinished[1:]:
            remove_durably(path)
        return unfinished[0] if unfinished else None

    def _unfinished(self) -> list[Path]:
        return list(self.path.glob(".round-*.safetensors.*"))


class OpenSnapshot:
    """A snapshot's file, open: it stays readable when the folder has gone on without it.

    Only its form is checked: whoever reads all of it compares its digest with `outer_digest`.
    """

    def __init__(self, path: Path) -> None:
        kept = ExitStack()
        weakref.finalize(self, kept.close)
        try:
            kept.enter_context(kept_for_reading(path))
            file: Any = safe_open(path, framework="numpy")
            metadata: dict[str, str] = file.metadata() or {}
            _check_format(metadata)
            self.round = int(metadata["round"])
            self.run_digest = Digest(bytes.fromhex(metadata["run_digest"]))
            self.layout_digest = Digest(bytes.fromhex(metadata["layout_digest"]))
            self._outer_digest = Digest(bytes.fromhex(metadata["outer_digest"]))
            self._parameters = file.get_slice("parameters")
            self._momentum = file.get_slice("momentum")
            (num_elements,) = self._parameters.get_shape()
            self.num_elements = int(num_elements)
            for name, part in (("parameters", self._parameters), ("momentum", self._momentum)):
                if part.get_dtype() != "F32" or part.get_shape() != [self.num_elements]:
                    raise SnapshotError(
                        f"its {name} is {part.get_dtype()} of shape {part.get_shape()}"
                    )
            del metadata["seal"]
            if metadata.pop("head_seal", None) not in (None, _seal(metadata, None)):
                raise SnapshotError("its metadata do not match their seal")
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise SnapshotError(str(error)) from error

    def outer_digest(self) -> Digest:
        """What it was when the file was written."""
        return self._outer_digest

    def read(self, start: int, stop: int) -> bytes:
        """See Snapshot.read."""
        return _state_bytes(self._parameters, self._momentum, self.num_elements, start, stop)


def _file_header(tensors: Mapping[str, Vector], metadata: Mapping[str, str]) -> bytes:
    """What stands before the values in a safetensors file (huggingface/safetensors, "Format").

    The library makes whole files, which takes copies of all values twice over.
    """
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    begin = 0
    for name, vector in tensors.items():
        end = begin + vector.nbytes
        table[name] = {"dtype": "F32", "shape": [vector.size], "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)  # values are aligned
    return len(text).to_bytes(8, "little") + text


def _state_bytes(
    parameters: Vector, momentum: Vector, num_elements: int, start: int, stop: int
) -> bytes:
    """A part of what the outer digest covers; the vectors may be slices of a file."""
    first, last = start // 4, stop // 4
    parts: list[Vector] = []
    if first < num_elements:  # a file's slice refuses to begin at its end
        parts.append(parameters[first : min(last, num_elements)])
    if last > num_elements:
        parts.append(momentum[max(first - num_elements, 0) : last - num_elements])
    return b"".join(map(_little_endian, parts))


def _round_of(path: Path) -> int:
    match = _FILE_NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


def _load(path: Path, run_digest: Digest, layout_digest: Digest) -> tuple[Snapshot, Owed | None]:
    snapshot, owed = _read(path)
    _check_belongs(path, "run", snapshot.run_digest, run_digest)
    _check_belongs(path, "layout", snapshot.layout_digest, layout_digest)
    return snapshot, owed


def _parameters_of(path: Path, run_digest: Digest, layout_digest: Digest) -> Parameters:
    """Of an undamaged file; raises SnapshotError otherwise, whatever is wrong with what is owed."""
    file = OpenSnapshot(path)
    if file.round != _round_of(path):
        raise SnapshotError(f"it says that it is of round {file.round}")
    values = np.empty(file.num_elements, dtype=np.float32)
    pieces: list[bytes] = []
    for start in range(0, 8 * values.size, 4 * PIECE_ELEMENTS):
        try:
            piece = file.read(start, min(start + 4 * PIECE_ELEMENTS, 8 * values.size))
        except (SafetensorError, OSError) as error:
            raise SnapshotError(str(error)) from error
        pieces.append(blake3.blake3(piece).digest())
        part = values[start // 4 : start // 4 + PIECE_ELEMENTS]  # none of the momentum's
        part[:] = np.frombuffer(piece, dtype="<f4", count=part.size)
    if digest_of_pieces(pieces) != file.outer_digest():
        raise SnapshotError("its values do not match its outer digest")
    _check_belongs(path, "run", file.run_digest, run_digest)
    _check_belongs(path, "layout", file.layout_digest, layout_digest)
    values.flags.writeable = False
    return Parameters(round=file.round, outer_digest=file.outer_digest(), values=values)


def _check_format(metadata: Mapping[str, str]) -> None:
    if metadata["format"] not in _FORMATS_READ:
        raise SnapshotError(f"its format is {metadata['format']!r}, not {FILE_FORMAT!r}")


def _read(path: Path) -> tuple[Snapshot, Owed | None]:
    """A whole, undamaged file; raises SnapshotError otherwise."""
    try:
        with kept_for_reading(path), safe_open(path, framework="numpy") as file:
            metadata: dict[str, str] = file.metadata() or {}
            tensors: dict[str, Vector] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError) as error:
        raise SnapshotError(str(error)) from error
    owed = None
    if "residual" in tensors:
        owed = Owed.of(tensors)
    try:
        _check_format(metadata)
        num_elements = tensors["parameters"].size
        for name, vector in tensors.items():
            is_piece = name.startswith(_PIECE_OF_ERROR)
            if vector.dtype != np.float32 or (
                vector.shape != (num_elements,) and (vector.ndim != 1 or not is_piece)
            ):
                raise SnapshotError(f"its {name} is {vector.dtype} of shape {vector.shape}")
        # Other nodes cannot tell a wrong residual from a right one: nothing else would find it.
        if metadata.pop("seal") != _seal(metadata, owed):
            raise SnapshotError("what it says is owed, or its metadata, do not match its seal")
        snapshot = Snapshot(
            round=int(metadata["round"]),
            run_digest=Digest(bytes.fromhex(metadata["run_digest"])),
            layout_digest=Digest(bytes.fromhex(metadata["layout_digest"])),
            parameters=tensors["parameters"],
            momentum=tensors["momentum"],
        )
        if snapshot.outer_digest().hex() != metadata["outer_digest"]:
            raise SnapshotError("its values do not match its outer digest")
    except KeyError as error:
        raise SnapshotError(f"it has no {error}") from error
    for vector in tensors.values():
        vector.flags.writeable = False
    return snapshot, owed


def _check_belongs(path: Path, what: str, found: Digest, expected: Digest) -> None:
    if found != expected:
        raise ConfigError(
            f"{path} belongs to {what} {found.hex()[:12]}, not to {expected.hex()[:12]}",
            next_step="choose another folder with --dir, or move that one away",
        )


def _little_endian(vector: Vector) -> memoryview:
    return np.ascontiguousarray(vector, dtype="<f4").data.cast("B")


def _seal(metadata: dict[str, str], owed: Owed | None) -> str:
    hasher = blake3.blake3()
    for key in sorted(metadata):
        hasher.update(f"{key}={metadata[key]}\n".encode())
    if owed is not None:
        for vector in owed.tensors().values():
            hasher.update(_little_endian(vector))
    return hasher.hexdigest()
