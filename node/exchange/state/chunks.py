"""An outer state as it travels, chunk by chunk: its manifest, and what has come of one.

The state's bytes are those that its outer digest covers: the global parameters, then the momentum,
as little-endian fp32. Its chunks are the pieces whose digests the outer digest is made of, so a manifest
proves by itself that its chunks make the state. All honest nodes at a round hold the same state, and
write the same manifest to the bit.

A manifest's body: the magic, the round, the number of elements n and the size of a chunk in bytes
(unsigned 64 bits each), the run digest, the layout digest and the outer digest (32 bytes each), then
the BLAKE3 of each chunk. Everything is little-endian.

Chunks of zeros are not fetched: a momentum that nothing has moved yet is half of a state.

A state that is on its way here lies in memory or on disk. There it is a file as large as the state, into
which each chunk is written once it is checked, and behind that the manifest with its length (unsigned,
64 bits, little-endian). Which chunks have come is not written down: after a restart all of it is checked
against the manifest again, so whatever a crash left half written is simply missing.

What has come is given on (donor.py). It is read from where it lies and digested once more: only bytes that
are the manifest's chunk leave this node, whatever its disk or its bookkeeping says.
"""

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import blake3
import numpy as np
import numpy.typing as npt

from node.disk.round_folder import RoundFolder
from node.disk.snapshots import Snapshot
from node.outer_state import PIECE_ELEMENTS, digest_of_pieces
from protocol.errors import AtollError
from protocol.files.durable import refusing, remove_durably
from protocol.wire.rounds import Digest
from protocol.wire.versions import MANIFEST_MAGIC as MAGIC

HEADER = struct.Struct("<8sQQQ32s32s32s")
DIGEST_BYTES = 32
ELEMENT_BYTES = 4
LENGTH_BYTES = 8  # of what says how long a manifest on the disk is

CHUNK_BYTES = ELEMENT_BYTES * PIECE_ELEMENTS
"""2 MiB, fixed in the protocol.

Large against the round trips that a stream costs, as far as a few of them under way can hide those,
and small against the state: a break costs no more than what is under way.
"""


class ManifestError(ValueError):
    """Bytes that are no manifest, or not one of this run's states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The chunks of the outer state after `round`'s commit. Equal states have equal manifests."""

    round: int
    num_elements: int
    run_digest: Digest
    layout_digest: Digest
    outer_digest: Digest
    chunk_digests: tuple[Digest, ...] = field(repr=False)

    @staticmethod
    def num_chunks(num_elements: int) -> int:
        """How many chunks a state of so many elements has."""
        return -(-2 * ELEMENT_BYTES * num_elements // CHUNK_BYTES)

    @classmethod
    def body_bytes(cls, num_elements: int) -> int:
        """Exact size of a body."""
        return HEADER.size + DIGEST_BYTES * cls.num_chunks(num_elements)

    @property
    def state_bytes(self) -> int:
        """Size of the state."""
        return 2 * ELEMENT_BYTES * self.num_elements

    def is_of(self, round: int, outer_digest: Digest) -> bool:
        """Whether it is of this state."""
        return (self.round, self.outer_digest) == (round, outer_digest)

    def has_chunk(self, index: int, digest: Digest) -> bool:
        """Whether the chunk at this place has this digest."""
        return digest in self.chunk_digests[index:][:1]

    def span(self, index: int) -> tuple[int, int]:
        """Where a chunk begins and ends in the state's bytes."""
        start = index * CHUNK_BYTES
        return start, min(start + CHUNK_BYTES, self.state_bytes)

    @classmethod
    def of(
        cls,
        read: Callable[[int, int], bytes],
        *,
        round: int,
        num_elements: int,
        run_digest: Digest,
        layout_digest: Digest,
    ) -> "Manifest":
        """Reads a whole state, a chunk at a time, and digests it: heavy."""
        state_bytes = 2 * ELEMENT_BYTES * num_elements
        chunk_digests = tuple(
            _digest_of(read(start, min(start + CHUNK_BYTES, state_bytes)))
            for start in range(0, state_bytes, CHUNK_BYTES)
        )
        return cls(
            round=round,
            num_elements=num_elements,
            run_digest=run_digest,
            layout_digest=layout_digest,
            outer_digest=digest_of_pieces(chunk_digests),
            chunk_digests=chunk_digests,
        )

    def to_body(self) -> bytes:
        """The manifest as a payload's body."""
        header = HEADER.pack(
            MAGIC,
            self.round,
            self.num_elements,
            CHUNK_BYTES,
            self.run_digest,
            self.layout_digest,
            self.outer_digest,
        )
        return b"".join((header, *self.chunk_digests))

    @classmethod
    def from_body(cls, body: bytes) -> "Manifest":
        """Reads a body; raises ManifestError when it is none.

        Whether the state is the swarm's is for the caller to find out.
        """
        if len(body) < HEADER.size:
            raise ManifestError(f"{len(body)} bytes are too few for a manifest")
        magic, round, num_elements, chunk_bytes, run, layout, outer = HEADER.unpack_from(body)
        if magic != MAGIC:
            raise ManifestError(f"a manifest begins with {MAGIC!r}, not {magic!r}")
        if chunk_bytes != CHUNK_BYTES:
            raise ManifestError(f"chunks have {CHUNK_BYTES} bytes, not {chunk_bytes}")
        if num_elements < 1 or len(body) != cls.body_bytes(num_elements):
            raise ManifestError(
                f"a manifest of {num_elements} elements has {cls.body_bytes(num_elements)} bytes, "
                f"not {len(body)}"
            )
        digests = body[HEADER.size :]
        chunk_digests = tuple(
            Digest(digests[start : start + DIGEST_BYTES])
            for start in range(0, len(digests), DIGEST_BYTES)
        )
        if digest_of_pieces(chunk_digests) != outer:
            raise ManifestError("its chunks make another state than the one whose digest it names")
        return cls(
            round=round,
            num_elements=num_elements,
            run_digest=Digest(run),
            layout_digest=Digest(layout),
            outer_digest=Digest(outer),
            chunk_digests=chunk_digests,
        )

    def chunks_with_values(self) -> set[int]:
        """The places of those that are not all zeros; none are of a node that waits for the first weights."""
        start, stop = self.span(len(self.chunk_digests) - 1)
        zeros = {_digest_of(bytes(size)) for size in (CHUNK_BYTES, stop - start)}
        return {place for place, each in enumerate(self.chunk_digests) if each not in zeros}


def _digest_of(chunk: bytes) -> Digest:
    return Digest(blake3.blake3(chunk).digest())


class _Place(Protocol):
    """Where the state's bytes lie; zeros at first."""

    def write(self, start: int, data: bytes) -> None: ...

    def read(self, start: int, stop: int) -> bytes: ...

    def whole(self) -> npt.NDArray[np.uint8]: ...


class Arriving:
    """One state, chunk by chunk. Its methods read or write a chunk or all of it: heavy."""

    def __init__(self, manifest: Manifest, place: _Place) -> None:
        self.manifest = manifest
        self.missing = manifest.chunks_with_values()
        self._place = place

    def put(self, index: int, chunk: bytes) -> None:
        """Keeps a chunk whose digest is the manifest's."""
        self._place.write(self.manifest.span(index)[0], chunk)
        self.missing.discard(index)

    def get(self, index: int) -> bytes | None:
        """A chunk that has come; None where it has not, or was damaged or let go since."""
        if index in self.missing:
            return None
        try:
            chunk = self._place.read(*self.manifest.span(index))
        except AtollError:
            return None  # another state, or none, has taken its place
        return chunk if _digest_of(chunk) == self.manifest.chunk_digests[index] else None

    def chunk_map(self) -> bytes:
        """What has come, as `map_of` writes it."""
        return map_of(len(self.manifest.chunk_digests), self.missing.copy())

    def check(self) -> None:
        """Finds out anew what is missing, from what is really there."""
        self.missing = {
            index
            for index, digest in enumerate(self.manifest.chunk_digests)
            if _digest_of(self._place.read(*self.manifest.span(index))) != digest
        }

    def snapshot(self) -> Snapshot | None:
        """The state as a value, in place; None when a chunk was damaged after it came."""
        vectors = self._place.whole().view("<f4").astype(np.float32, copy=False)
        vectors.flags.writeable = False
        manifest = self.manifest
        snapshot = Snapshot(
            round=manifest.round,
            run_digest=manifest.run_digest,
            layout_digest=manifest.layout_digest,
            parameters=vectors[: manifest.num_elements],
            momentum=vectors[manifest.num_elements :],
        )
        return snapshot if snapshot.outer_digest() == manifest.outer_digest else None


def map_of(num_chunks: int, missing: set[int]) -> bytes:
    """A bit for each chunk that is not missing: bit i % 8 of byte i / 8 is chunk i."""
    has = np.ones(num_chunks, dtype=np.bool_)
    has[list(missing)] = False
    return np.packbits(has, bitorder="little").tobytes()


def read_map(body: bytes, num_chunks: int) -> npt.NDArray[np.bool_]:
    """Whether each chunk is in a map; what the map does not reach is not."""
    whole = body.ljust(
        -(-num_chunks // 8), b"\0"
    )  # of too few bytes numpy's last bits are anything
    bits = np.unpackbits(np.frombuffer(whole, dtype=np.uint8), count=num_chunks, bitorder="little")
    return bits.astype(np.bool_)


class Arrivals:
    """Keeps one arriving state at a time, in a folder of the node's, or in memory without one."""

    def __init__(self, folder: Path | None, *, run_digest: Digest, layout_digest: Digest) -> None:
        self.current: Arriving | None = None
        self._folder = None if folder is None else RoundFolder(folder, suffix=".arriving", kept=1)
        self._run_digest = run_digest
        self._layout_digest = layout_digest

    def resume(self) -> None:
        """Goes on with what an earlier process left in the folder, or removes it."""
        if self.current is not None or self._folder is None:
            return
        for round in self._folder.rounds():
            place = _OnDisk(self._folder.path_of(round))
            manifest = place.manifest()
            if manifest is not None and (manifest.run_digest, manifest.layout_digest) == (
                self._run_digest,
                self._layout_digest,
            ):
                arriving = Arriving(manifest, place)
                arriving.check()
                self.current = arriving
                return
        self.discard()

    def begin(self, manifest: Manifest) -> Arriving:
        """Makes room for a state, in place of the one before; goes on when it is the same.

        Raises SystemRefusedError when the disk has no room for it.
        """
        if self.current is not None and self.current.manifest == manifest:
            return self.current
        self.discard()
        if self._folder is None:
            self.current = Arriving(manifest, _InMemory(manifest.state_bytes))
            return self.current
        self._folder.make_room(manifest.round)
        try:
            _OnDisk(self._folder.building(manifest.round)).allocate(manifest)
        except AtollError:
            self._folder.sweep()
            raise
        self.current = Arriving(manifest, _OnDisk(self._folder.finish(manifest.round)))
        return self.current

    def discard(self) -> None:
        """Forgets what has come: it is taken over, or nobody serves it any more, or it was a lie."""
        self.current = None
        if self._folder is not None:
            self._folder.clear()
            for path in self._folder.path.glob("arriving.*"):  # as versions before named it
                remove_durably(path)


class _InMemory:
    def __init__(self, num_bytes: int) -> None:
        self._bytes = np.zeros(num_bytes, dtype=np.uint8)

    def write(self, start: int, data: bytes) -> None:
        self._bytes[start : start + len(data)] = np.frombuffer(data, dtype=np.uint8)

    def read(self, start: int, stop: int) -> bytes:
        return self._bytes[start:stop].tobytes()

    def whole(self) -> npt.NDArray[np.uint8]:
        return self._bytes.view()


class _OnDisk:
    """Written with system calls, not through a mapping: there a full disk kills the process."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def allocate(self, manifest: Manifest) -> None:
        body = manifest.to_body()
        with refusing(self._path):
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                os.posix_fallocate(descriptor, 0, manifest.state_bytes)
                tail = body + len(body).to_bytes(LENGTH_BYTES, "little")
                os.pwrite(descriptor, tail, manifest.state_bytes)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def manifest(self) -> Manifest | None:
        """What stands behind the state; None where that is none, or not of what is there."""
        with refusing(self._path):
            size = self._path.stat().st_size
            length = int.from_bytes(self.read(max(0, size - LENGTH_BYTES), size), "little")
            begin = size - LENGTH_BYTES - length
            if begin < 0:
                return None
            try:
                manifest = Manifest.from_body(self.read(begin, size - LENGTH_BYTES))
            except ManifestError:
                return None
        return manifest if manifest.state_bytes == begin else None

    def write(self, start: int, data: bytes) -> None:
        with refusing(self._path), self._path.open("r+b") as file:
            file.seek(start)
            file.write(data)

    def read(self, start: int, stop: int) -> bytes:
        with refusing(self._path), self._path.open("rb") as file:
            file.seek(start)
            return file.read(stop - start)

    def whole(self) -> npt.NDArray[np.uint8]:
        manifest = self.manifest()
        assert manifest is not None, "it was written when this began"
        return np.memmap(self._path, dtype=np.uint8, mode="r", shape=(manifest.state_bytes,))
