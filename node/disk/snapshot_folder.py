"""The snapshots in a node's folder: which are kept, which one a start goes on from, and what is read of them.

What is in a file, and how it is written, is node.disk.snapshots'. What is read is mapped: it takes no
memory of the process, and nobody writes over it meanwhile.
"""

import json
import mmap
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import blake3
import numpy as np
import structlog

from node.disk.round_folder import Retention, RoundFolder, kept_for_reading
from node.disk.snapshots import (
    FILE_FORMAT,
    PIECE_OF_ERROR,
    Owed,
    Snapshot,
    SnapshotWriting,
    piece_digests,
    seal,
    state_bytes,
)
from node.outer_state import PIECE_ELEMENTS, Vector, digest_of_pieces
from protocol.errors import BadDataError, ConfigError, NoInputError
from protocol.wire.rounds import Digest

log = structlog.get_logger()

T = TypeVar("T")

KEPT_FILES = 2
"""A damaged newest file costs a round, not the outer state. The older one makes room for the next."""


class SnapshotError(ValueError):
    """A file that is no snapshot, or cannot be read."""


class DamagedError(SnapshotError):
    """A file that cannot be what was written."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parameters:
    """The part of an outer state that is the model. Read-only."""

    round: int
    outer_digest: Digest
    values: Vector = field(repr=False)  # [n], canonical order


class SnapshotFolder:
    """The snapshots of one node on disk: the newest, and what is retained. One process at a time may save."""

    def __init__(self, path: Path, *, retention: Retention = Retention()) -> None:  # noqa: B008 - frozen
        self.folder = RoundFolder(path, suffix=".safetensors", kept=KEPT_FILES, retention=retention)

    def save(self, snapshot: Snapshot, owed: Owed | None) -> Path:
        """Writes a snapshot at once: see `begin`. Nothing may change the vectors meanwhile."""
        return self.begin(snapshot, owed).write()

    def begin(
        self, snapshot: Snapshot, owed: Owed | None, *, order: Iterable[slice] = ()
    ) -> "SnapshotWriting":
        """Begins to write a snapshot, over the older of two; the newest stays. Call its `write`.

        The vectors may change from now on if SnapshotWriting.keep hears of it first. `order` are the
        spans that will change first. Raises SystemRefusedError when the disk is full and
        CannotCreateError when the folder cannot be written to; the newest file is then still there.
        """
        return SnapshotWriting(self.folder, snapshot, owed, order=order)

    def load_newest(
        self, run_digest: Digest, layout_digest: Digest
    ) -> tuple[Snapshot, Owed | None] | None:
        """The newest undamaged snapshot and what was owed, or None when there is no file.

        A damaged file is set apart, logged, and the one before it taken. Raises ConfigError for one of
        another run or layout, and BadDataError when all files are damaged: then they stay.
        """
        return self._first_undamaged(
            lambda path: _load(path, run_digest, layout_digest), sets_apart=True
        )

    def load_parameters(
        self, run_digest: Digest, layout_digest: Digest, *, round: int | None = None
    ) -> "Parameters | None":
        """Of the newest undamaged snapshot, or that of a round, the parameters, in so much memory.

        The momentum is read in pieces, for the digest; what is owed is not read. Damaged files stay where
        they are, for a node may be running. Else as `load_newest`; raises NoInputError for a round whose
        snapshot is not there.
        """

        def load(path: Path) -> Parameters:
            return _parameters_of(path, run_digest, layout_digest)

        if round is None:
            return self._first_undamaged(load)
        try:
            return load(self.folder.path_of(round))
        except SnapshotError as error:
            there = self.rounds()
            if round in there:
                raise BadDataError(
                    f"the snapshot of round {round} cannot be read: {error}",
                    next_step=f"take another round: {_listed(there)}",
                ) from error
            raise NoInputError(
                f"there is no snapshot of round {round} in {self.folder.path}",
                next_step=f"take a round that is there: {_listed(there)}; keep_snapshots in node.toml "
                "says how many are kept"
                if there
                else "wait for the node's first round",
            ) from error

    def _first_undamaged(self, load: Callable[[Path], T], *, sets_apart: bool = False) -> T | None:
        damaged: list[int] = []
        rounds = self.folder.rounds()
        for round in rounds:
            path = self.folder.path_of(round)
            try:
                loaded = load(path)
            except SnapshotError as error:
                log.warning(
                    "snapshot damaged or unreadable, taking the one before it",
                    path=str(path),
                    why=str(error),
                )
                if isinstance(error, DamagedError):
                    damaged.append(round)
                continue
            if sets_apart:  # or the next snapshot would be written over the one that is whole
                for number in damaged:
                    self.folder.set_apart(number)
            return loaded
        if rounds:
            raise BadDataError(
                f"every snapshot in {self.folder.path} is damaged or unreadable",
                next_step="move them away; the node then fetches the outer state, and owes nothing",
            )
        return None

    def rounds(self) -> list[int]:
        """Of which rounds there are files, the newest first."""
        return self.folder.rounds()

    def load(self, round: int, digest: Digest) -> tuple[Snapshot, Owed | None] | None:
        """The state of this round if it is there, undamaged, and has this outer digest."""
        try:
            snapshot, owed = _read(self.folder.path_of(round))
        except SnapshotError:
            return None
        return (snapshot, owed) if snapshot.outer_digest() == digest else None

    def open(self, round: int) -> "OpenSnapshot":
        """Opens the file of a round; raises SnapshotError when it is gone or none."""
        return OpenSnapshot(self.folder.path_of(round))


class OpenSnapshot:
    """A snapshot's file, open: it stays readable when the folder has gone on without it.

    Only its form is checked: whoever reads all of it compares its digest with `outer_digest`.
    """

    def __init__(self, path: Path) -> None:
        file = _Mapped(path)
        try:
            metadata = dict(file.metadata)
            self.round = int(metadata["round"])
            self.run_digest = Digest(bytes.fromhex(metadata["run_digest"]))
            self.layout_digest = Digest(bytes.fromhex(metadata["layout_digest"]))
            self._outer_digest = Digest(bytes.fromhex(metadata["outer_digest"]))
            self._parameters = file.tensors["parameters"]
            self._momentum = file.tensors["momentum"]
            self.num_elements = self._parameters.size
            if self._momentum.size != self.num_elements:
                raise DamagedError(f"its momentum has {self._momentum.size} elements")
            del metadata["seal"]
            if metadata.pop("head_seal", None) not in (None, seal(metadata, {})):
                raise DamagedError("its metadata do not match their seal")
        except (KeyError, ValueError) as error:
            raise DamagedError(str(error)) from error

    def outer_digest(self) -> Digest:
        """What it was when the file was written."""
        return self._outer_digest

    def read(self, start: int, stop: int) -> bytes:
        """See Snapshot.read."""
        return state_bytes(self._parameters, self._momentum, self.num_elements, start, stop)


class _Mapped:
    """What stands in a file, in no memory of the process: nobody writes over it while this is used."""

    def __init__(self, path: Path) -> None:
        """Raises SnapshotError for a file that cannot be read, DamagedError for one that is none."""
        kept = ExitStack()
        try:
            kept.enter_context(kept_for_reading(path))
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise SnapshotError(str(error)) from error
        except ValueError as error:
            raise DamagedError(str(error)) from error
        weakref.finalize(mapped, kept.close)  # with the last of its tensors
        try:
            values = 8 + int.from_bytes(mapped[:8], "little")
            table: dict[str, Any] = json.loads(mapped[8:values])
            self.metadata: dict[str, str] = table.pop("__metadata__")
            self.tensors: dict[str, Vector] = {}
            at = 0
            for name, found in sorted(table.items(), key=lambda item: item[1]["data_offsets"]):
                (size,), (begin, end) = found["shape"], found["data_offsets"]
                if (found["dtype"], begin, end) != ("F32", at, at + 4 * size):
                    raise DamagedError(f"its {name} is {found}")
                vector = np.frombuffer(mapped, dtype="<f4", count=size, offset=values + begin)
                self.tensors[name] = vector.astype(np.float32, copy=False)
                at = end
            if values + at != len(mapped):
                raise DamagedError(f"it has {len(mapped)} bytes, not {values + at}")
            if self.metadata["format"] != FILE_FORMAT:
                raise SnapshotError(
                    f"its format is {self.metadata['format']!r}, not {FILE_FORMAT!r}"
                )
        except SnapshotError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedError(f"it is no snapshot: {error!r}") from error


def _listed(rounds: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(rounds)))


def _load(path: Path, run_digest: Digest, layout_digest: Digest) -> tuple[Snapshot, Owed | None]:
    snapshot, owed = _read(path)
    _check_belongs(path, "run", snapshot.run_digest, run_digest)
    _check_belongs(path, "layout", snapshot.layout_digest, layout_digest)
    return snapshot, owed


def _parameters_of(path: Path, run_digest: Digest, layout_digest: Digest) -> Parameters:
    """Of an undamaged file; raises SnapshotError otherwise, whatever is wrong with what is owed."""
    file = OpenSnapshot(path)
    if path.stem != f"round-{file.round:08}":
        raise SnapshotError(f"it says that it is of round {file.round}")
    values = np.empty(file.num_elements, dtype=np.float32)
    pieces: list[bytes] = []
    for start in range(0, 8 * values.size, 4 * PIECE_ELEMENTS):
        piece = file.read(start, min(start + 4 * PIECE_ELEMENTS, 8 * values.size))
        pieces.append(blake3.blake3(piece).digest())
        part = values[start // 4 : start // 4 + PIECE_ELEMENTS]  # none of the momentum's
        part[:] = np.frombuffer(piece, dtype="<f4", count=part.size)
    if digest_of_pieces(pieces) != file.outer_digest():
        raise SnapshotError("its values do not match its outer digest")
    _check_belongs(path, "run", file.run_digest, run_digest)
    _check_belongs(path, "layout", file.layout_digest, layout_digest)
    values.flags.writeable = False
    return Parameters(round=file.round, outer_digest=file.outer_digest(), values=values)


def _read(path: Path) -> tuple[Snapshot, Owed | None]:
    """A whole, undamaged file, as it lies on the disk; raises SnapshotError otherwise."""
    file = _Mapped(path)
    metadata, tensors = dict(file.metadata), file.tensors
    try:
        owed = Owed.of(tensors) if "residual" in tensors else None
        num_elements = tensors["parameters"].size
        for name, vector in tensors.items():
            if vector.size != num_elements and not name.startswith(PIECE_OF_ERROR):
                raise DamagedError(f"its {name} has {vector.size} elements")
        # Other nodes cannot tell a wrong residual from a right one: nothing else would find it.
        sealed = {name: tensors[name] for name in tensors if name not in ("parameters", "momentum")}
        if metadata.pop("seal") != seal(metadata, piece_digests(sealed)):
            raise DamagedError("what it says is owed, or its metadata, do not match its seal")
        snapshot = Snapshot(
            round=int(metadata["round"]),
            run_digest=Digest(bytes.fromhex(metadata["run_digest"])),
            layout_digest=Digest(bytes.fromhex(metadata["layout_digest"])),
            parameters=tensors["parameters"],
            momentum=tensors["momentum"],
        )
        if snapshot.outer_digest().hex() != metadata["outer_digest"]:
            raise DamagedError("its values do not match its outer digest")
    except (KeyError, ValueError) as error:
        if isinstance(error, SnapshotError):
            raise
        raise DamagedError(f"it has no {error}") from error
    return snapshot, owed


def _check_belongs(path: Path, what: str, found: Digest, expected: Digest) -> None:
    if found != expected:
        raise ConfigError(
            f"{path} belongs to {what} {found.hex()[:12]}, not to {expected.hex()[:12]}",
            next_step="choose another folder with --dir, or move that one away",
        )
