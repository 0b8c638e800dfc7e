"""Files of tokens that a node does not have: fetched a piece at a time, checked, and kept for a while.

Pieces come from the run file's path, a URL: by HTTP ranges, or by fsspec from wherever it reads. They are
kept in a folder under their digests, within a limit; what was not used for longest goes first. All ranks
of a host share the folder. What comes from peers the daemon puts there (node.island.data.supply).
"""

import contextlib
import fcntl
import os
import re
import shutil
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections import OrderedDict
from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import structlog

from node.installed import needs_package
from node.island.data.manifest import FileEntry, piece_digests
from node.island.ranks.faults import LostPieceError, OriginAwayError
from protocol.errors import AtollError, BadDataError, UnavailableError
from protocol.files.durable import make_folder, write_atomically

log = structlog.get_logger()

Bytes = npt.NDArray[np.uint8]

_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)

NUM_TRIES = 5
FIRST_PAUSE_SECONDS = 1.0
SILENT_SECONDS = 15.0
"""How long a server may say nothing."""

TRYING_SECONDS = 30.0
STORAGE_SECONDS = 50.0
"""No try begins later than the former, and of fsspec's, which try again by themselves, none takes longer than
the latter. So ranks do not count as hung, even where one has waited for another's tries before its own."""

NUM_FETCHERS = 2
MAPPED_PIECES = 64
"""Pieces that a rank keeps mapped; those that were removed meanwhile still take their room."""

MOST_MANIFEST_BYTES = 1 << 30


class Origin(Protocol):
    """Where files of a run can be had, a part of them at a time."""

    name: str

    def fetch(self, file: str, start: int, stop: int) -> bytes:
        """Bytes of a file, fewer where it ends before. Raises OSError or AtollError."""


class HttpOrigin:
    """A folder that a web server serves, with ranges."""

    def __init__(self, url: str) -> None:
        self.name = url.rstrip("/")

    def fetch(self, file: str, start: int, stop: int) -> bytes:
        """See Origin."""
        url = f"{self.name}/{file}"
        request = urllib.request.Request(url, headers={"Range": f"bytes={start}-{stop - 1}"})
        with urllib.request.urlopen(request, timeout=SILENT_SECONDS) as answer:
            found: bytes = answer.read(stop - start + 1)
            if answer.status != 206 and (start > 0 or len(found) > stop - start):
                raise BadDataError(
                    f"{url} is served whole where a part is asked for",
                    next_step="serve it by a server that knows ranges, or copy the folder",
                )
            packed = answer.headers.get("Content-Encoding", "identity")
            if packed.lower() != "identity":  # nothing but the file itself was asked for
                raise BadDataError(
                    f"{url} is served with Content-Encoding {packed}, so its bytes are not the file's",
                    next_step="serve it as it lies on the disk, or copy the folder",
                )
            kind = answer.headers.get_content_type()
            if kind == "text/html" and _PAGE.match(found):
                raise ConnectionError(f"a web page comes instead, from {answer.url}")
            # A read of so many bytes keeps quiet of a connection that ends before.
            missing = answer.length or _num_announced(answer.headers) - len(found)
            if missing > 0 and len(found) <= stop - start:
                raise ConnectionError(f"the connection ends {missing:,} bytes too early")
        return found[: stop - start]


_PAGE = re.compile(rb"\s*<(!doctype\s+html|html)\b", re.IGNORECASE)
"""How a login or an error begins that is served as if it were the file."""


def _num_announced(headers: Message) -> int:
    """Bytes of the range that an answer says it has; 0 where it says nothing of one."""
    found = re.match(r"bytes (\d+)-(\d+)/", headers.get("Content-Range", ""))
    return 0 if found is None else int(found.group(2)) - int(found.group(1)) + 1


class FsspecOrigin:
    """A folder that fsspec reads: s3://, gs://, hf:// and others, each with its own package."""

    def __init__(self, url: str) -> None:
        self.name = url.rstrip("/")
        fsspec = needs_package("fsspec", what=f"{url} is read by fsspec")
        try:
            self._files: Any
            self._files, self._root = fsspec.core.url_to_fs(self.name)
        except (ImportError, ValueError) as error:
            raise UnavailableError(
                f"{url} cannot be read: {error}", next_step="install what it names"
            ) from error

    def fetch(self, file: str, start: int, stop: int) -> bytes:
        """See Origin."""
        path = f"{self._root}/{file}"
        if not self._files.async_impl:
            content: bytes = self._files.cat_file(path, start=start, end=stop)
            return content
        asyn = import_module("fsspec.asyn")
        try:
            content = asyn.sync(
                self._files.loop,
                self._files._cat_file,  # what cat_file calls, without a limit
                path,
                start=start,
                end=stop,
                timeout=STORAGE_SECONDS,
            )
        except TimeoutError as error:  # fsspec's own says nothing
            raise TimeoutError(f"it took longer than {STORAGE_SECONDS:g} s") from error
        return content


def is_url(path: str) -> bool:
    """Whether a path of a run file is fetched from."""
    return _URL.match(path) is not None


def origin_of(url: str) -> Origin:
    """What fetches from a URL."""
    is_web = url.lower().startswith(("http://", "https://"))
    return HttpOrigin(url) if is_web else FsspecOrigin(url)


def fetched(origin: Origin, file: str, start: int, stop: int) -> bytes:
    """Bytes of a file, tried several times.

    Raises UnavailableError where that is in vain, and OriginAwayError where it may not be in a while.
    """
    pause = FIRST_PAUSE_SECONDS
    began_at = time.monotonic()
    for number in range(NUM_TRIES):
        try:
            return origin.fetch(file, start, stop)
        except AtollError:
            raise
        except Exception as error:  # fsspec's file systems raise what their packages do
            is_final, is_late = _is_final(error), time.monotonic() - began_at > TRYING_SECONDS
            if is_final or is_late or number == NUM_TRIES - 1:
                raise (UnavailableError if is_final else OriginAwayError)(
                    f"{origin.name}/{file} cannot be fetched: {str(error) or type(error).__name__}",
                    next_step=f"{_to_look_at(error)}, or copy the data and name the folder with "
                    "data = in node.toml",
                ) from error
        time.sleep(pause)
        pause *= 2
    raise AssertionError("the last try returns or raises")


def _is_final(error: Exception) -> bool:
    """Whether the same is to be had from another try."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code in (401, 403, 404, 410, 416)
    return isinstance(error, FileNotFoundError | PermissionError) or _is_of_a_certificate(error)


def _is_of_a_certificate(error: Exception) -> bool:
    """Whether this machine does not believe that the server is who it says; fsspec's packages wrap it."""
    reason = getattr(error, "reason", error.__cause__)
    return isinstance(reason, ssl.SSLCertVerificationError)


def _to_look_at(error: Exception) -> str:
    if _is_of_a_certificate(error):
        return "set SSL_CERT_FILE (for s3:// AWS_CA_BUNDLE) to the file of the authority that it is signed by"
    if isinstance(error, PermissionError):
        return "give this node's user credentials for it, such as AWS_PROFILE"
    return "look whether it is served"


class PieceCache:
    """Pieces of files in a folder, which is made when it is needed, by their digests, within a limit.

    On a disk that has less room it stays smaller: `leave_bytes` are for what cannot be had again.
    """

    def __init__(self, folder: Path, *, limit_bytes: int, leave_bytes: int = 0) -> None:
        self.folder = folder
        self._limit_bytes = limit_bytes
        self._leave_bytes = leave_bytes
        self._has_told = False  # that the disk is too small for the limit

    def path_of(self, digest: str) -> Path:
        """Where a piece is, if it is there."""
        return self.folder / f"{digest}.piece"

    def put(self, digest: str, piece: bytes, *, spare: Container[str] = ()) -> None:
        """Keeps a piece, and before removes those that were not used for longest, but for the spared."""
        make_folder(self.folder)
        kept = [one for one in self._kept() if one[2].stem != digest]
        kept_bytes = sum(size for _, size, _ in kept)
        room_bytes = self._room_bytes(kept_bytes)
        if len(piece) + kept_bytes > room_bytes < self._limit_bytes and not self._has_told:
            self._has_told = True
            log.warning(
                "the disk has no room for all of data_cache: fetched tokens take less, and come again",
                folder=str(self.folder),
                left_bytes=self._leave_bytes,
                next_step="make room on it, or let data_cache in node.toml be smaller",
            )
        to_free = len(piece) + kept_bytes - room_bytes
        for _, size, path in sorted(kept):
            if to_free <= 0:
                break
            if path.stem not in spare:
                path.unlink(missing_ok=True)
                to_free -= size
        write_atomically(self.path_of(digest), piece)

    def room_bytes(self) -> int:
        """What all pieces together may take now."""
        try:
            return self._room_bytes(sum(size for _, size, _ in self._kept()))
        except FileNotFoundError:  # there is no folder yet
            return self._limit_bytes

    def _room_bytes(self, kept_bytes: int) -> int:
        """Half of what is left beside others, or more: a node that waits for each piece trains nothing."""
        there = shutil.disk_usage(self.folder).free + kept_bytes
        return min(self._limit_bytes, max(there - self._leave_bytes, there // 2))

    def _kept(self) -> list[tuple[int, int, Path]]:
        """When each piece was used last, its size, and where it is."""
        kept = []
        for entry in os.scandir(self.folder):
            with contextlib.suppress(FileNotFoundError):
                if entry.name.endswith(".piece"):
                    status = entry.stat()
                    kept.append((status.st_mtime_ns, status.st_size, Path(entry.path)))
        return kept

    def digests(self) -> set[str]:
        """Those of all pieces that are there."""
        try:
            entries = list(os.scandir(self.folder))
        except FileNotFoundError:
            return set()
        return {e.name.removesuffix(".piece") for e in entries if e.name.endswith(".piece")}

    def checked(self, digest: str) -> bytes | None:
        """A piece; None where it is not there, or was damaged, so that it is removed."""
        try:
            piece = self.path_of(digest).read_bytes()
        except OSError:
            return None
        if piece_digests([piece]) == (digest,):
            return piece
        self.path_of(digest).unlink(missing_ok=True)  # the disk has changed it
        return None

    def touch(self, digest: str) -> None:
        """Says that a piece is used."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(self.path_of(digest))

    @contextlib.contextmanager
    def sole(self, digest: str) -> Iterator[None]:
        """Keeps other ranks from fetching the same piece meanwhile."""
        make_folder(self.folder)
        path = self.folder / f"{digest}.lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            path.unlink(missing_ok=True)  # whoever waits for it looks for the piece first
            os.close(descriptor)


class FetchedFiles:
    """Files that come from origins through a cache; implements shard_files.Files."""

    def __init__(
        self,
        origins: Sequence[Origin],
        files: Mapping[str, FileEntry],
        piece_bytes: int,
        cache: PieceCache,
    ) -> None:
        self._origins = origins
        self._files = files
        self._piece_bytes = piece_bytes
        self._cache = cache
        self._mapped: OrderedDict[str, Bytes] = OrderedDict()
        self._damaged: set[str] = set()  # digests of pieces that were found so, and removed
        self._lock = threading.Lock()  # of what is mapped
        self._fetchers: ThreadPoolExecutor | None = None
        self._expected = 0  # counts expectations: a new one ends the one before

    def read(self, name: str, start: int, stop: int) -> Bytes:
        """See Files. Raises what `fetched` raises of the origins, LostPieceError where there is none."""
        size = self._piece_bytes
        parts = [
            self._piece(name, number)[max(0, start - number * size) : stop - number * size]
            for number in range(start // size, -(-stop // size))
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def expect(self, wanted: Sequence[tuple[str, int]]) -> None:
        """Fetches pieces (file, number) in this order beside the training; replaces what was expected."""
        if self._fetchers is None:
            self._fetchers = ThreadPoolExecutor(NUM_FETCHERS, thread_name_prefix="fetch-data")
        self._expected += 1
        for name, number in wanted:
            self._fetchers.submit(self._fetch_expected, self._expected, name, number)

    def _fetch_expected(self, expectation: int, name: str, number: int) -> None:
        if expectation == self._expected:
            with contextlib.suppress(AtollError):  # who reads it meets the error, and tells it
                self._have(name, number)

    def _piece(self, name: str, number: int) -> Bytes:
        digest = self._files[name].pieces[number]
        start = number * self._piece_bytes
        num_bytes = min(self._piece_bytes, self._files[name].bytes - start)
        with self._lock:
            if (mapped := self._mapped.get(digest)) is not None:
                self._mapped.move_to_end(digest)
                return mapped
        while True:
            self._have(name, number)
            with contextlib.suppress(FileNotFoundError):  # another rank needed the room
                path = self._cache.path_of(digest)
                if path.stat().st_size == num_bytes:  # nothing can be mapped of none
                    mapped = np.memmap(path, np.uint8, mode="r")
                    if piece_digests([mapped.data]) == (digest,):
                        break
                log.warning(
                    "a piece of fetched tokens is damaged: it is removed, and fetched anew",
                    of=name,
                    piece=number,
                    path=str(path),
                    next_step="look at that disk with 'dmesg' if it goes on",
                )
                self._damaged.add(digest)
                path.unlink()  # the disk has changed it
        with self._lock:
            self._mapped[digest] = mapped
            if len(self._mapped) > MAPPED_PIECES:
                self._mapped.popitem(last=False)
        self._cache.touch(digest)
        return mapped

    def _have(self, name: str, number: int) -> None:
        """Fetches a piece that is not in the cache; raises AtollError."""
        digest = self._files[name].pieces[number]
        if self._cache.path_of(digest).exists():
            return
        start = number * self._piece_bytes
        stop = min(start + self._piece_bytes, self._files[name].bytes)
        with self._cache.sole(digest):
            if self._cache.path_of(digest).exists():
                return
            refused: AtollError | None = None
            for origin in self._origins:
                try:
                    piece = fetched(origin, name, start, stop)
                except AtollError as error:
                    if refused is None or isinstance(error, OriginAwayError):
                        refused = error
                    continue
                if piece_digests([piece]) == (digest,):
                    self._cache.put(digest, piece)
                    return
                refused = BadDataError(
                    f"{origin.name}/{name} is damaged: piece {number}, from byte {start:,} on, has "
                    "another digest than the manifest says",
                    next_step="have its owner put that file there again; 'atoll data check DIR' reads all",
                )
            raise refused or self._gone(name, number)

    def _gone(self, name: str, number: int) -> LostPieceError:
        piece, folder = f"piece {number} of {name} came from peers", self._cache.folder
        digest = self._files[name].pieces[number]
        if digest in self._damaged:
            return LostPieceError(
                f"{piece}, and was damaged in {folder}, so it is removed",
                next_step="look at that disk with 'dmesg', and start the node again",
                piece=digest,
            )
        return LostPieceError(
            f"{piece} and is not in {folder} any more",
            next_step="let 'data_cache' in node.toml be larger",
            piece=digest,
        )
