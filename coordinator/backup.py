"""A copy of a coordinator's folder, taken while the coordinator runs or not.

The database is read by a connection of our own, in one transaction: what was answered when it
begins is in the copy, and the coordinator does not wait for it.
"""

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from coordinator.authority_key import is_encrypted, refuse_damaged
from coordinator.config import AUTHORITY_KEY_FILE, HOME_FILES, SOME_HOME_FILES, Home
from coordinator.database import DATABASE_NAME, refuse_lost
from coordinator.rules import rules_in_force
from coordinator.store import Store
from protocol.errors import AtollError, CannotCreateError, NoInputError, SystemRefusedError
from protocol.files.durable import (
    LOCK_NAME,
    as_typed,
    clear_unfinished,
    is_taken,
    unfinished_in,
    whole_folder,
    write_atomically,
)
from protocol.run.run_files import DESCRIPTION_FILE
from protocol.trust.credentials import LINK_FILE

_NOTE_PREFIX = ".backup-"

_WAIT_SECONDS = 30.0
"""For a coordinator that just starts or ends, which has the database for itself meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    """What a copy holds."""

    run_name: str
    committed_round: int
    total_rounds: int
    num_bytes: int
    authority_key: str  # how the copy holds it, in words


def back_up(directory: Path, target: Path) -> Backup:
    """Copies a coordinator's folder to `target`, which a coordinator can be started from.

    All of it or nothing. Raises NoInputError when there is nothing to copy, CannotCreateError when
    `target` is not free, SystemRefusedError when the disk refuses, and BadDataError for damaged files:
    copies of those would take the places of whole ones.
    """
    home = Home.load(directory)
    require_started(directory)
    refuse_damaged(directory / AUTHORITY_KEY_FILE, home.authority_pem)
    target = target.absolute()
    if is_taken(target):
        raise CannotCreateError(
            f"{target} exists and is not empty", next_step="choose another folder for the backup"
        )
    clear_unfinished_backups(directory)
    with _noted(directory, target), whole_folder(target) as building:
        _copy_database(directory / DATABASE_NAME, building / DATABASE_NAME)
        committed_round, total_rounds = _rounds_in(building, home)
        # The keys come last, when all that takes long is done.
        for name in (LINK_FILE, DESCRIPTION_FILE, *SOME_HOME_FILES, *HOME_FILES):
            if name in HOME_FILES or (directory / name).is_file():
                _copy(directory / name, building / name)
        Home.load(building)
        num_bytes = sum(path.stat().st_size for path in building.iterdir())
    return Backup(
        run_name=home.run.run.name,
        committed_round=committed_round,
        total_rounds=total_rounds,
        num_bytes=num_bytes,
        authority_key=_how_kept(target / AUTHORITY_KEY_FILE),
    )


def require_started(directory: Path) -> None:
    """Raises NoInputError where there is no database to copy, and BadDataError where it is lost."""
    refuse_lost(directory / DATABASE_NAME)
    if not (directory / DATABASE_NAME).is_file():
        raise NoInputError(
            f"the coordinator of {directory} was never started: it has no {DATABASE_NAME} yet",
            next_step=f"start it with 'atoll coordinator start {as_typed(directory)}'",
        )


def _how_kept(path: Path) -> str:
    if not path.is_file():
        return "without the authority's key, which lies elsewhere"
    if is_encrypted(path.read_bytes()):
        return "with the authority's key, which a passphrase opens"
    return "with the authority's key, which is not encrypted"


@contextmanager
def _noted(directory: Path, target: Path) -> Iterator[None]:
    """Notes in the coordinator's folder where a copy is being made, for as long as it is.

    A full disk there is no reason against a copy elsewhere: then it goes without a note.
    """
    try:
        descriptor, name = tempfile.mkstemp(dir=directory, prefix=_NOTE_PREFIX)
    except OSError:
        yield
        return
    try:
        with os.fdopen(descriptor, "wb") as note, suppress(OSError):
            note.write(os.fsencode(target.parent))
            note.flush()
        yield
    finally:
        with suppress(OSError):
            Path(name).unlink()


def clear_unfinished_backups(directory: Path) -> None:
    """Removes what backups of this folder that were killed have left: copies of the keys among it."""
    for note in sorted(directory.glob(f"{_NOTE_PREFIX}*")):
        with suppress(OSError):
            try:
                parent = Path(os.fsdecode(note.read_bytes()))
                if parent.is_absolute():
                    clear_unfinished(parent)
                is_clear = not parent.is_absolute() or not unfinished_in(parent)
            except ValueError:  # a power cut has left zeros, which are no path
                is_clear = True
            if is_clear:
                note.unlink()


def _copy(source: Path, copy: Path) -> None:
    write_atomically(copy, source.read_bytes(), mode=source.stat().st_mode & 0o777)


def _copy_database(path: Path, copy: Path) -> None:
    try:
        os.close(os.open(copy, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        with (
            closing(_opened(path)) as source,
            closing(sqlite3.connect(copy)) as target,
        ):
            source.backup(target)  # all pages in one step, so in one transaction
    except (sqlite3.Error, OSError) as error:
        raise SystemRefusedError(
            f"{path} cannot be copied: {error}",
            next_step=f"make room on the disk of {copy.parent.parent}, or check the permissions",
        ) from error
    shutil.copymode(path, copy)


def _opened(path: Path) -> sqlite3.Connection:
    """For reading. Not read-only: after a coordinator was killed SQLite has to recover the log first.

    On a disk that is mounted read-only, as snapshots of disks are, it cannot even look for one.
    """
    if not os.statvfs(path.parent).f_flag & os.ST_RDONLY:
        return sqlite3.connect(path, timeout=_WAIT_SECONDS)
    log = path.with_name(f"{path.name}-wal")
    if log.exists() and log.stat().st_size:
        raise SystemRefusedError(
            f"{log} holds commits that {path.name} lacks, and its disk is read-only",
            next_step=f"copy all of {path.parent} to another disk, and type the same for that folder",
        )
    return sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True)


def _rounds_in(building: Path, home: Home) -> tuple[int, int]:
    """The committed round of a copy, all of whose rows are what was written, and the run's last one."""
    try:
        store = Store.open(building)
        try:
            store.check()
            rules = rules_in_force(home.run, (signed.ruling for signed in store.rulings()))
            state = store.load(rules, home.run.digest())
            return state.committed_round, state.rules.total_rounds
        finally:
            store.close()
            (building / LOCK_NAME).unlink()
    except AtollError as error:
        raise type(error)(
            f"the copy is of no use, and is removed: {error.what}", next_step=error.next_step
        ) from error
