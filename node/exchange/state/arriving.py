"""The outer state that is on its way here: the chunks that have come, on disk or in memory.

On disk are the manifest and a file as large as the state, into which each chunk is written once it
is checked. Which chunks have come is not written down: after a restart all of it is checked against
the manifest again, so whatever a crash left half written is simply missing.
"""

import contextlib
import os
from pathlib import Path
from typing import Protocol

import blake3
import numpy as np
import numpy.typing as npt

from node.disk.snapshots import Snapshot
from node.exchange.state.manifest import Manifest, ManifestError
from protocol.files.durable import make_folder, refusing, remove_durably, write_atomically
from protocol.rounds import Digest

MANIFEST_FILE = "arriving.manifest"
STATE_FILE = "arriving.state"


class _Place(Protocol):
    """Where the state's bytes lie."""

    def write(self, start: int, data: bytes) -> None: ...

    def read(self, start: int, stop: int) -> bytes: ...

    def whole(self) -> npt.NDArray[np.uint8]: ...


class Arriving:
    """One state, chunk by chunk. Its methods read or write a chunk or all of it: heavy."""

    def __init__(self, manifest: Manifest, place: _Place) -> None:
        self.manifest = manifest
        self.missing = set(range(len(manifest.chunk_digests)))
        self._place = place

    def put(self, index: int, chunk: bytes) -> None:
        """Keeps a chunk whose digest is the manifest's."""
        self._place.write(self.manifest.span(index)[0], chunk)
        self.missing.discard(index)

    def check(self) -> None:
        """Finds out anew what is missing, from what is really there."""
        self.missing = {
            index
            for index, digest in enumerate(self.manifest.chunk_digests)
            if blake3.blake3(self._place.read(*self.manifest.span(index))).digest() != digest
        }

    def snapshot(self) -> Snapshot | None:
        """The state as a value, in place; None when it is not what the manifest promises."""
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


class Arrivals:
    """Keeps one arriving state at a time, in a folder of the node's, or in memory without one."""

    def __init__(self, folder: Path | None, *, run_digest: Digest, layout_digest: Digest) -> None:
        self.current: Arriving | None = None
        self._folder = folder
        self._run_digest = run_digest
        self._layout_digest = layout_digest

    def resume(self) -> None:
        """Goes on with what an earlier process left in the folder, or removes it."""
        if self.current is not None or self._folder is None:
            return
        if not (self._folder / MANIFEST_FILE).exists():
            self.discard()
            return
        with refusing(self._folder):
            body = (self._folder / MANIFEST_FILE).read_bytes()
        with contextlib.suppress(ManifestError, FileNotFoundError):
            manifest = Manifest.from_body(body)
            path = self._folder / STATE_FILE
            if (
                manifest.run_digest == self._run_digest
                and manifest.layout_digest == self._layout_digest
                and path.stat().st_size == manifest.state_bytes
            ):
                arriving = Arriving(manifest, _OnDisk(path))
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
        make_folder(self._folder)
        place = _OnDisk(self._folder / STATE_FILE)
        place.allocate(manifest.state_bytes)
        # Last, and removed first: a manifest always has its state's file.
        write_atomically(self._folder / MANIFEST_FILE, manifest.to_body())
        self.current = Arriving(manifest, place)
        return self.current

    def discard(self) -> None:
        """Forgets what has come: it is taken over, or nobody serves it any more, or it was a lie."""
        self.current = None
        if self._folder is not None:
            remove_durably(self._folder / MANIFEST_FILE)
            remove_durably(self._folder / STATE_FILE)
            for unfinished in self._folder.glob(f".{MANIFEST_FILE}.*"):  # of a killed process
                remove_durably(unfinished)


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

    def allocate(self, num_bytes: int) -> None:
        with refusing(self._path):
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                os.posix_fallocate(descriptor, 0, num_bytes)
            finally:
                os.close(descriptor)

    def write(self, start: int, data: bytes) -> None:
        with refusing(self._path), self._path.open("r+b") as file:
            file.seek(start)
            file.write(data)

    def read(self, start: int, stop: int) -> bytes:
        with refusing(self._path), self._path.open("rb") as file:
            file.seek(start)
            return file.read(stop - start)

    def whole(self) -> npt.NDArray[np.uint8]:
        return np.memmap(self._path, dtype=np.uint8, mode="r")
