"""Snapshots: the outer state of one round as a value, and as a file that is written while nodes go on.

File: safetensors with the tensors `parameters`, `momentum` and, where a node owes something, `residual`
and `reducer_error.` with the first element of each span that it is of: what is owed never leaves the
node. The metadata hold the rest: the outer digest covers both vectors of the outer state, the seal covers
what is owed and all other metadata, and the head's seal these metadata alone, for who does not read what
is owed. The seal covers what is owed by the digests of its pieces, which are written in any order; of
formats 1 and 2, by its bytes. Which files are kept and read is node.disk.snapshot_folder's; how states travel
between nodes, node.exchange.state.chunks'.
"""

import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import blake3
import numpy as np

from node.disk.round_folder import RoundFolder
from node.outer_state import PIECE_ELEMENTS, Vector, outer_digest
from protocol.errors import AtollError
from protocol.files.durable import refusal_to_write
from protocol.wire.rounds import Digest

FILE_FORMAT = "atoll snapshot 3"
SYNC_BYTES = 64 << 20
"""No more is written before the disk has it: else the system has all of a snapshot in its memory, and
whoever writes next waits for that."""

_ELEMENT_BYTES = 16  # parameters, momentum, residual, reducer_error
PIECE_OF_ERROR = "reducer_error."
_FILE_HEADER_BYTES = 4096  # at most, with room; spans of the error that others keep leave more


def snapshot_bytes(num_elements: int) -> int:
    """The size of a file, or a little more."""
    return _ELEMENT_BYTES * num_elements + _FILE_HEADER_BYTES


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Owed:
    """What a node still owes at a snapshot's round. It never leaves the node."""

    residual: Vector = field(repr=False)  # [n], canonical order
    reducer_error: Mapping[int, Vector] | None = field(default=None, repr=False)
    """Where the run keeps it, of spans that this node reduces: by their first element."""

    def tensors(self) -> dict[str, Vector]:
        """What is owed, by the names in the file."""
        kept = self.reducer_error or {}
        pieces = {f"{PIECE_OF_ERROR}{start}": values for start, values in kept.items()}
        return {"residual": self.residual, **pieces}

    @classmethod
    def of(cls, tensors: Mapping[str, Vector]) -> "Owed":
        """What is owed, by a file's tensors, with copies of the reducer's error; raises ValueError."""
        pieces = {
            int(name.removeprefix(PIECE_OF_ERROR)): _kept_copy(values)
            for name, values in tensors.items()
            if name.startswith(PIECE_OF_ERROR)
        }
        return cls(residual=tensors["residual"], reducer_error=pieces or None)


def _kept_copy(values: Vector) -> Vector:
    """Outlives the file that it is read from, and never changes."""
    copy = values.copy()
    copy.flags.writeable = False
    return copy


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
        return state_bytes(self.parameters, self.momentum, self.parameters.size, start, stop)


class SnapshotWriting:
    """A snapshot on its way to the disk, while its vectors go on changing.

    What is written is the state at the moment this was made: whoever is about to change elements that
    are not on their way yet has them written first (`keep`), in place of a copy in memory. So a change
    waits for what it touches, and for no more. The file has a hidden name and no head until all of it is
    there: whatever is cut off is no snapshot.
    """

    def __init__(
        self,
        folder: RoundFolder,
        snapshot: Snapshot,
        owed: Owed | None,
        *,
        order: Iterable[slice] = (),
    ) -> None:
        self.round = snapshot.round
        self._folder = folder
        self._order = (*order, slice(0, snapshot.parameters.size))
        sealed = {} if owed is None else owed.tensors()
        self._tensors = {
            "parameters": snapshot.parameters,
            "momentum": snapshot.momentum,
            **sealed,
        }
        self._metadata = {
            "format": FILE_FORMAT,
            "round": str(snapshot.round),
            "run_digest": snapshot.run_digest.hex(),
            "layout_digest": snapshot.layout_digest.hex(),
            "outer_digest": snapshot.outer_digest().hex(),
        }
        self._metadata["head_seal"] = seal(self._metadata, {})
        self._digests: dict[str, list[bytes]] = {
            name: [b""] * _num_pieces(vector) for name, vector in sealed.items()
        }
        unsealed = _file_header(self._tensors, self._metadata | {"seal": "0" * 64})
        self._begin_of: dict[str, int] = {}
        at = len(unsealed)
        for name, vector in self._tensors.items():
            self._begin_of[name] = at
            at += vector.nbytes
        self._left = {
            (name, piece)
            for name, vector in self._tensors.items()
            for piece in range(_num_pieces(vector))
        }
        self._in_hand: set[tuple[str, int]] = set()
        self._changed = threading.Condition()  # of these two, and of what follows
        self._failure: OSError | AtollError | None = None
        self._unsynced, self._synced_at = 0, time.perf_counter()  # bytes; when they were none
        self._is_awaited = threading.Event()
        self._writing = threading.Lock()
        self._path: Path | None = None  # once it is whole
        spare = folder.make_room(snapshot.round)
        path = folder.building(snapshot.round)
        try:
            if spare is not None:
                spare.replace(path)
            self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644), "wb", 0)
            self._reads_as_zeros = os.fstat(self._file.fileno()).st_size == 0
            os.pwrite(self._file.fileno(), bytes(8), 0)  # what is written over is no snapshot
            self._file.truncate(at)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise refusal_to_write(folder.path_of(self.round), error) from error

    def keep(self, span: slice) -> None:
        """Has elements of the canonical vector written, if they are not yet: they are about to change.

        Raises nothing: where the disk refuses, `write` says so.
        """
        with suppress(OSError):
            for _ in self._write_span(span):
                pass

    def write(self, *, is_patient: bool = False) -> Path:
        """Writes what is left and returns once all of it is durable; safe to repeat, in any thread.

        Who is patient leaves half of the disk's time to others. Raises as SnapshotFolder.begin, and
        then it is over.
        """
        if not is_patient:
            self.hurry()
        with self._writing:
            if self._path is None:
                building = self._folder.building(self.round)
                try:
                    self._write_rest()
                    self._path = self._folder.finish(self.round)
                except (OSError, AtollError) as error:
                    self.give_up(error)
                    with suppress(OSError):
                        building.unlink()
                    if isinstance(error, OSError):
                        raise refusal_to_write(self._folder.path_of(self.round), error) from error
                    raise
                finally:
                    with self._changed:  # a file that is closed may be another one at once
                        self._changed.wait_for(lambda: not self._in_hand)
                        self._file.close()
                    self._tensors = {}  # shared memory can be given back
            return self._path

    def hurry(self) -> None:
        """Somebody waits: from now on the disk is not shared with others."""
        self._is_awaited.set()

    def _write_rest(self) -> None:
        for span in self._order:
            for num_written in self._write_span(span):
                self._pace(num_written)
        for piece in sorted(self._left):  # of tensors that are no whole vectors
            self._pace(self._write_piece(piece))
        if self._failure is not None:  # in another thread
            raise self._failure
        self._metadata["seal"] = seal(self._metadata, self._digests)
        os.pwrite(self._file.fileno(), _file_header(self._tensors, self._metadata), 0)
        os.fsync(self._file.fileno())

    def _write_span(self, span: slice) -> Iterator[int]:
        """Piece by piece; how many bytes each took."""
        tensors = self._tensors
        if not tensors:
            return  # it is over
        num_elements = tensors["parameters"].size
        live = [name for name, vector in tensors.items() if vector.size == num_elements]
        for place in range(span.start // PIECE_ELEMENTS, -(-span.stop // PIECE_ELEMENTS)):
            for name in live:  # others are never changed in place
                yield self._write_piece((name, place))

    def _write_piece(self, piece: tuple[str, int]) -> int:
        """Writes a piece, unless somebody has; waits for whoever does. Raises OSError."""
        with self._changed:
            self._changed.wait_for(lambda: piece not in self._in_hand)
            if piece not in self._left:
                return 0
            self._left.remove(piece)
            self._in_hand.add(piece)
        name, place = piece
        start = place * PIECE_ELEMENTS
        values = self._tensors[name][start : start + PIECE_ELEMENTS]
        part, num_bytes = little_endian(values), 0
        try:
            if name in self._digests:
                part = memoryview(bytes(part))  # what is digested is what is written
                self._digests[name][place] = blake3.blake3(part).digest()
            if self._reads_as_zeros and not np.frombuffer(part, np.uint32).any():
                return 0  # half of a first state is momentum, and as much again is owed
            at = self._begin_of[name] + 4 * start
            while part:
                num_written = os.pwrite(self._file.fileno(), part, at)
                part, at, num_bytes = part[num_written:], at + num_written, num_bytes + num_written
        except OSError as error:
            self.give_up(error)
            raise
        finally:
            with self._changed:
                self._in_hand.discard(piece)
                self._changed.notify_all()
        return num_bytes

    def _pace(self, num_bytes: int) -> None:
        """Has the disk take what was written, now and then, and gives others as much time as that took."""
        self._unsynced += num_bytes
        if self._unsynced >= SYNC_BYTES and not self._is_awaited.is_set():
            os.fdatasync(self._file.fileno())
            self._is_awaited.wait(time.perf_counter() - self._synced_at)
            self._unsynced, self._synced_at = 0, time.perf_counter()

    def give_up(self, error: OSError | AtollError) -> None:
        """Ends it: `write` raises this, and leaves nothing behind."""
        with self._changed:
            self._failure = error
            self._left.clear()


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


def state_bytes(
    parameters: Vector, momentum: Vector, num_elements: int, start: int, stop: int
) -> bytes:
    """A part of what the outer digest covers; the vectors may be slices of a file."""
    first, last = start // 4, stop // 4
    parts: list[Vector] = []
    if first < num_elements:  # a file's slice refuses to begin at its end
        parts.append(parameters[first : min(last, num_elements)])
    if last > num_elements:
        parts.append(momentum[max(first - num_elements, 0) : last - num_elements])
    return b"".join(map(little_endian, parts))


def little_endian(vector: Vector) -> memoryview:
    """Its bytes as they stand in files and digests."""
    return np.ascontiguousarray(vector, dtype="<f4").data.cast("B")


def _num_pieces(vector: Vector) -> int:
    return -(-vector.size // PIECE_ELEMENTS)


def seal(metadata: Mapping[str, str], digests: Mapping[str, Sequence[bytes]]) -> str:
    """Of the metadata, and of what is owed by the digests of its pieces."""
    hasher = blake3.blake3()
    for key in sorted(metadata):
        hasher.update(f"{key}={metadata[key]}\n".encode())
    for name in sorted(digests):
        hasher.update(f"{name}:".encode() + b"".join(digests[name]))
    return hasher.hexdigest()


def piece_digests(tensors: Mapping[str, Vector]) -> dict[str, list[bytes]]:
    """Of tensors that do not change, what `seal` goes by."""
    return {
        name: [
            blake3.blake3(little_endian(vector[start : start + PIECE_ELEMENTS])).digest()
            for start in range(0, vector.size, PIECE_ELEMENTS)
        ]
        for name, vector in tensors.items()
    }
