"""Backups of a coordinator's folder on object storage, and back: s3:// and what else fsspec reaches.

A copy is made beside the coordinator's own files, as for a folder, and its files are sent. Their list, with
sizes and digests, goes last: what has no list is no backup, and what comes back is compared. So it is read
back once after it was sent.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from blake3 import blake3

from coordinator.backup import Backup, back_up
from coordinator.config import Home
from protocol.errors import (
    BadDataError,
    CannotCreateError,
    NoInputError,
    SystemRefusedError,
    UnavailableError,
)
from protocol.files.durable import is_taken, whole_folder, write_atomically

LIST_NAME = "backup.json"
FORMAT = 1

_UPLOAD_PREFIX = ".upload-"
_PRIVATE = 0o600
_PATIENCE_SECONDS = 120.0
_LEAST_BYTES_PER_SECOND = 50_000.0
"""How long a storage may take for a call: for its answer, and for what it carries. Packages of fsspec try
again by themselves, some for longer than from one copy to the next, and meanwhile nobody would be told."""

_ONE_PIECE_BYTES = 5 << 30
"""Most that S3 takes in one piece; s3fs sends twice its `chunksize` so, 100 MB unless told otherwise."""

_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}


def is_remote(target: str) -> bool:
    """Whether it is an address and no folder's path."""
    return "://" in target


def require_target(target: str) -> None:
    """Raises for an address that cannot be reached from here as Place.at does, and loads no storage."""
    if not is_remote(target):
        return
    if find_spec("fsspec") is None:
        raise _without_fsspec(target)
    kind = target.partition("://")[0]
    known = import_module("fsspec.registry").known_implementations
    if kind not in known:
        raise BadDataError(
            f"{target}: fsspec knows no storage {kind}://", next_step="write s3://BUCKET/NAME"
        )
    package = known[kind]["class"].partition(".")[0]
    if find_spec(package) is None:
        raise _without_package(kind, f"there is no {package}")


def _without_fsspec(url: str) -> SystemRefusedError:
    return SystemRefusedError(
        f"{url} is reached by the package fsspec, which is not installed",
        next_step="pip install 'atoll[remote]'",
    )


def _without_package(kind: str, why: object) -> SystemRefusedError:
    return SystemRefusedError(
        f"{kind}:// needs a package that is not installed: {why}",
        next_step=f"pip install {_PACKAGES.get(kind, 'the package that it names')}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A folder, so to say, of a storage."""

    url: str
    storage: Any  # of fsspec
    path: str

    @classmethod
    def at(cls, url: str) -> "_Place":
        """Raises SystemRefusedError where a package is missing, BadDataError for no such kind of address."""
        try:
            url_to_fs = import_module("fsspec.core").url_to_fs
        except ImportError as error:
            raise _without_fsspec(url) from error
        kind = url.partition("://")[0]
        try:
            with _told(url):
                # Listings of before would hide what is there now.
                options = {"auto_mkdir": True} if kind in ("file", "local") else {}
                storage, path = url_to_fs(url, use_listings_cache=False, **options)
        except ImportError as error:
            raise _without_package(kind, error) from error
        except ValueError as error:
            raise BadDataError(f"{url}: {error}", next_step="write s3://BUCKET/NAME") from error
        return cls(url=url.rstrip("/"), storage=storage, path=path.rstrip("/"))

    def send(self, name: str, body: bytes) -> None:
        try:
            with _told(self.url):
                self._call(
                    "pipe_file", f"{self.path}/{name}", body, num_bytes=len(body), **self._whole
                )
        except FileNotFoundError as error:
            raise UnavailableError(
                f"{self.url} cannot be used: {error}", next_step="make the bucket, and try again"
            ) from error

    def get(self, name: str, num_bytes: int = 0) -> bytes:
        """A file of about so many bytes. Raises FileNotFoundError, UnavailableError."""
        with _told(self.url):
            body: bytes = self._call("cat_file", f"{self.path}/{name}", num_bytes=num_bytes)
        return body

    def names(self) -> list[str]:
        """Of all files below it, from it on."""
        with _told(self.url):
            try:
                found = list(self._call("find", self.path))
            except FileNotFoundError:
                return []
        return [name.removeprefix(self.path).lstrip("/") for name in found]

    def remove(self, name: str) -> None:
        with _told(self.url), contextlib.suppress(FileNotFoundError):
            self._call("rm_file", f"{self.path}/{name}")

    @property
    def _whole(self) -> Mapping[str, int]:
        """How a file goes in one piece: of parts whose upload breaks off S3 keeps each, unseen and paid."""
        kind = self.url.partition("://")[0]
        return {"chunksize": _ONE_PIECE_BYTES // 2} if kind in ("s3", "s3a") else {}

    def _call(self, method: str, *arguments: Any, num_bytes: int = 0, **options: Any) -> Any:
        """Calls the storage. Raises TimeoutError where it takes too long, and what storages raise."""
        if not self.storage.async_impl:
            return getattr(self.storage, method)(*arguments, **options)
        seconds = _PATIENCE_SECONDS + num_bytes / _LEAST_BYTES_PER_SECOND
        call = getattr(self.storage, f"_{method}")  # what the method calls, without a limit
        try:
            return import_module("fsspec.asyn").sync(
                self.storage.loop, call, *arguments, timeout=seconds, **options
            )
        except TimeoutError as error:  # fsspec's own says nothing
            raise TimeoutError(f"it has not answered within {seconds:.0f} s") from error

    def below(self, name: str) -> "_Place":
        """A folder in it; itself where there is no name."""
        if not name:
            return self
        return replace(self, url=f"{self.url}/{name}", path=f"{self.path}/{name}")

    def listing(self) -> "_Listing":
        """Of the backup that lies here. Raises NoInputError where none is whole, BadDataError."""
        try:
            listing = self.get(LIST_NAME)
        except FileNotFoundError as error:
            raise NoInputError(
                f"no whole backup lies at {self.url}: {LIST_NAME} is not there",
                next_step="give the address that 'atoll coordinator backup' was given",
            ) from error
        return _read(listing, self.url)

    def bodies(self, listing: "_Listing") -> Iterator[tuple[str, bytes]]:
        """The files of a backup as they lie here. Raises BadDataError for one that is not what was sent."""
        for name, (size, digest) in listing.files.items():
            try:
                body = self.get(name, size)
            except FileNotFoundError as error:
                raise BadDataError(
                    f"{self.url} lacks {name}, which its {LIST_NAME} lists",
                    next_step="restore an older backup",
                ) from error
            if len(body) != size or blake3(body).hexdigest() != digest:
                raise BadDataError(
                    f"{self.url}: {name} is not what was sent", next_step="restore an older backup"
                )
            yield name, body


@contextlib.contextmanager
def _told(url: str) -> Iterator[None]:
    """Storages raise what they like: their own kinds, botocore's, OSError."""
    try:
        yield
    except (FileNotFoundError, ImportError, ValueError):
        raise
    except Exception as error:
        raise UnavailableError(
            f"{url} cannot be used: {error or type(error).__name__}",
            next_step="check the bucket, its region and your credentials, as AWS_PROFILE, AWS_ENDPOINT_URL",
        ) from error


def back_up_to(directory: Path, url: str) -> Backup:
    """Sends a copy of a coordinator's folder, which is running or not, and reads it back.

    Raises CannotCreateError where something lies at the address, and what `back_up` raises.
    """
    return _send(directory, _Place.at(url))


def _send(directory: Path, place: _Place) -> Backup:
    clear_unsent(directory)
    if place.names():
        raise CannotCreateError(
            f"{place.url} is not empty",
            next_step="choose another name for the backup, such as its date",
        )
    with _copy_of(directory) as (made, copy):
        files = {}
        for path in sorted(copy.iterdir()):
            body = path.read_bytes()
            files[path.name] = {"bytes": len(body), "blake3": blake3(body).hexdigest()}
            place.send(path.name, body)
        told = {"format": FORMAT, "run": made.run_name, "round": made.committed_round}
        place.send(LIST_NAME, json.dumps(told | {"files": files}, indent=1).encode())
    for _ in place.bodies(place.listing()):
        pass  # each is compared
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteCopies:
    """Copies below one address (coordinator.backups.Copies)."""

    _place: _Place

    @classmethod
    def at(cls, url: str) -> "RemoteCopies":
        """Raises SystemRefusedError where a package is missing, BadDataError for no such kind of address."""
        return cls(_place=_Place.at(url))

    def found(self) -> dict[str, bool]:
        """What lies there, each with whether its list does."""
        files = [name.split("/") for name in self._place.names()]
        whole = {parts[0] for parts in files if parts[1:] == [LIST_NAME]}
        return {parts[0]: parts[0] in whole for parts in files if len(parts) > 1}

    def add(self, directory: Path, name: str) -> Backup:
        """Sends a copy, and reads it back."""
        return _send(directory, self._place.below(name))

    @property
    def is_one(self) -> bool:
        """Whether a copy itself lies there."""
        return LIST_NAME in self._place.names()

    def restore(self, name: str, directory: Path) -> "Restored":
        """Makes the folder of a copy, or of the one that lies there."""
        return _restored(self._place.below(name), directory)

    def remove(self, name: str) -> None:
        """The list goes first: without it there is no copy."""
        copy = self._place.below(name)
        for file in (LIST_NAME, *copy.names()):
            copy.remove(file)

    def place(self, name: str) -> str:
        """Its address."""
        return self._place.below(name).url


def clear_unsent(directory: Path) -> None:
    """Removes copies of commands that were killed while they sent them: the keys are among them."""
    for left in directory.glob(f"{_UPLOAD_PREFIX}*"):
        if not Path("/proc", left.name.removeprefix(_UPLOAD_PREFIX)).exists():
            shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def _copy_of(directory: Path) -> Iterator[tuple[Backup, Path]]:
    """A copy within the coordinator's own folder, where its keys are no less safe; removed afterwards."""
    copy = directory / f"{_UPLOAD_PREFIX}{os.getpid()}"
    try:
        yield back_up(directory, copy), copy
    finally:
        shutil.rmtree(copy, ignore_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What came back."""

    run_name: str
    committed_round: int
    place: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listing:
    """What a backup's list says."""

    run_name: str
    committed_round: int
    files: dict[str, tuple[int, str]]  # bytes and digest


def _restored(place: _Place, directory: Path) -> Restored:
    """Makes the folder that was sent, which a coordinator can be started from. All of it or nothing.

    Raises NoInputError where no whole backup lies at the address, BadDataError where it was changed,
    CannotCreateError where the folder is not free.
    """
    directory = directory.absolute()
    if is_taken(directory):
        raise CannotCreateError(
            f"{directory} exists and is not empty", next_step="choose another folder"
        )
    listing = place.listing()
    with whole_folder(directory) as building:
        for name, body in place.bodies(listing):
            write_atomically(building / name, body, mode=_PRIVATE)
        Home.load(building)
    return Restored(
        run_name=listing.run_name, committed_round=listing.committed_round, place=place.url
    )


def _read(listing: bytes, url: str) -> _Listing:
    """Raises BadDataError."""
    try:
        told = json.loads(listing)
        if told["format"] != FORMAT:
            raise ValueError(f"format {told['format']}, and this Atoll reads {FORMAT}")
        files = {
            str(name): (int(each["bytes"]), str(each["blake3"]))
            for name, each in told["files"].items()
        }
        if any(name in ("", ".", "..") or Path(name).name != name for name in files):
            raise ValueError("names that lead elsewhere")
        return _Listing(run_name=str(told["run"]), committed_round=int(told["round"]), files=files)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadDataError(
            f"{url}/{LIST_NAME} is no list of a backup: {error}",
            next_step="restore an older backup",
        ) from error
