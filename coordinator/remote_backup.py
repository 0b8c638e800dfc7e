"""Backups of a coordinator's folder on object storage, and back: s3:// and what else fsspec reaches.

A copy is made beside the coordinator's own files, as for a folder, and its files are sent. Their list, with
sizes and digests, goes last: what has no list is no backup, and what comes back is compared.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
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
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}


def is_remote(target: str) -> bool:
    """Whether it is an address and no folder's path."""
    return "://" in target


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
            raise SystemRefusedError(
                f"{url} is reached by the package fsspec, which is not installed",
                next_step="pip install 'atoll[remote]'",
            ) from error
        kind = url.partition("://")[0]
        try:
            with _told(url):
                # Listings of before would hide what is there now.
                storage, path = url_to_fs(url, use_listings_cache=False)
        except ImportError as error:
            raise SystemRefusedError(
                f"{kind}:// needs a package that is not installed: {error}",
                next_step=f"pip install {_PACKAGES.get(kind, 'the package that it names')}",
            ) from error
        except ValueError as error:
            raise BadDataError(f"{url}: {error}", next_step="write s3://BUCKET/NAME") from error
        return cls(url=url.rstrip("/"), storage=storage, path=path.rstrip("/"))

    def send(self, name: str, body: bytes) -> None:
        with _told(self.url):
            self.storage.pipe_file(f"{self.path}/{name}", body)

    def get(self, name: str) -> bytes:
        """Raises FileNotFoundError, UnavailableError."""
        with _told(self.url):
            body: bytes = self.storage.cat_file(f"{self.path}/{name}")
        return body

    def names(self) -> list[str]:
        with _told(self.url):
            try:
                return list(self.storage.find(self.path))
            except FileNotFoundError:
                return []


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
    """Sends a copy of a coordinator's folder, which is running or not.

    Raises CannotCreateError where something lies at the address, and what `back_up` raises.
    """
    place = _Place.at(url)
    if place.names():
        raise CannotCreateError(
            f"{url} is not empty", next_step="choose another name for the backup, such as its date"
        )
    with _copy_of(directory) as (made, copy):
        files = {}
        for path in sorted(copy.iterdir()):
            body = path.read_bytes()
            files[path.name] = {"bytes": len(body), "blake3": blake3(body).hexdigest()}
            place.send(path.name, body)
        told = {"format": FORMAT, "run": made.run_name, "round": made.committed_round}
        place.send(LIST_NAME, json.dumps(told | {"files": files}, indent=1).encode())
    return made


@contextlib.contextmanager
def _copy_of(directory: Path) -> Iterator[tuple[Backup, Path]]:
    """A copy within the coordinator's own folder, where its keys are no less safe; removed afterwards.

    And those of commands that were killed.
    """
    for left in directory.glob(f"{_UPLOAD_PREFIX}*"):
        if not Path("/proc", left.name.removeprefix(_UPLOAD_PREFIX)).exists():
            shutil.rmtree(left)
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


def restore(url: str, directory: Path) -> Restored:
    """Makes the folder that was sent, which a coordinator can be started from. All of it or nothing.

    Raises NoInputError where no whole backup lies at the address, BadDataError where it was changed,
    CannotCreateError where the folder is not free.
    """
    place = _Place.at(url)
    directory = directory.absolute()
    if is_taken(directory):
        raise CannotCreateError(
            f"{directory} exists and is not empty", next_step="choose another folder"
        )
    try:
        listing = place.get(LIST_NAME)
    except FileNotFoundError as error:
        raise NoInputError(
            f"no whole backup lies at {url}: {LIST_NAME} is not there",
            next_step="give the address that 'atoll coordinator backup' was given",
        ) from error
    told, files = _read(listing, url)
    with whole_folder(directory) as building:
        for name, (size, digest) in files.items():
            try:
                body = place.get(name)
            except FileNotFoundError as error:
                raise BadDataError(
                    f"{url} lacks {name}, which its {LIST_NAME} lists",
                    next_step="restore an older backup",
                ) from error
            if len(body) != size or blake3(body).hexdigest() != digest:
                raise BadDataError(
                    f"{url}: {name} is not what was sent", next_step="restore an older backup"
                )
            write_atomically(building / name, body, mode=_PRIVATE)
        Home.load(building)
    return told


def _read(listing: bytes, url: str) -> tuple[Restored, dict[str, tuple[int, str]]]:
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
        return Restored(run_name=str(told["run"]), committed_round=int(told["round"])), files
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadDataError(
            f"{url}/{LIST_NAME} is no list of a backup: {error}",
            next_step="restore an older backup",
        ) from error
