"""What became of the copies of a coordinator's folder, in backups.json within it.

Whoever makes copies notes it there: the process beside the coordinator, a command of its own, a timer's. So
`atoll status`, the page and the metrics tell of all of them, also after a restart. For people alone: which
copies there are is decided by what lies at their place.
"""

import fcntl
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import structlog
from pydantic import TypeAdapter, ValidationError

from coordinator.backups import Failed, Made, Waits
from protocol.files.durable import refusing, write_atomically
from protocol.v1 import status_pb2 as pb

RECORD_FILE = "backups.json"

ABANDONED_AFTER_SECONDS = 600.0
"""Overdue for so long, or for the time between two copies, nobody can be making any."""

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Of copies to one place. Times are the wall clock's, in seconds."""

    made_at: float | None = None  # of the newest whole copy
    place: str = ""
    committed_round: int = 0
    num_bytes: int = 0
    num_failures: int = 0  # since then, in a row
    failing_since: float | None = None
    why: str = ""
    next_step: str = ""
    next_at: float | None = None  # None: none is meant to follow
    every_seconds: float = 0.0


Records = Mapping[str, Record]
"""By target; copies that were made once have none."""

_READER = TypeAdapter(dict[str, Record])


def noted(records: Records, target: str, told: Made | Failed | Waits, now: float) -> Records:
    """The records after a try. Those of places that nobody copies to any more go with the next whole copy."""
    was = records.get(target, Record())
    next_at = None if told.next_seconds is None else now + told.next_seconds
    match told:
        case Made(place=place, backup=made):
            became = Record(
                made_at=now,
                place=without_password(place),
                committed_round=made.committed_round,
                num_bytes=made.num_bytes,
                next_at=next_at,
                every_seconds=told.next_seconds or 0.0,
            )
            records = {name: one for name, one in records.items() if one.next_at is not None}
        case Waits():
            became = replace(was, next_at=next_at, every_seconds=told.every_seconds)
        case Failed(error=error):
            became = replace(
                was,
                num_failures=was.num_failures + 1,
                failing_since=now if was.failing_since is None else was.failing_since,
                why=error.what,
                next_step=error.next_step,
                next_at=next_at,
            )
    return {**records, target: became}


def ended(records: Records, target: str) -> Records:
    """The records once whoever copied to a place was told to stop."""
    if (was := records.get(target)) is None:
        return records
    return {**records, target: replace(was, next_at=None)}


def told(records: Records, now: float) -> list[pb.BackupStatus]:
    """The records for people, the newest copy first."""
    by_age = sorted(records.items(), key=lambda one: -(one[1].made_at or 0.0))
    return [_to_wire(target, record, now) for target, record in by_age]


def has_any(records: Records, *, configured: str) -> bool:
    """Whether somebody has made a copy or is about to; `configured` is the coordinator's own target."""
    return bool(configured) or any(
        one.made_at is not None or one.next_at is not None for one in records.values()
    )


def add_to(run: pb.RunStatus, records: Records, *, configured: str, now: float) -> None:
    """Tells the run owner of copies, or that there are none; a finished run needs none."""
    run.backups.extend(told(records, now))
    is_finished = run.phase == pb.RUN_PHASE_FINISHED
    run.is_without_backup = not (is_finished or has_any(records, configured=configured))


def _to_wire(target: str, record: Record, now: float) -> pb.BackupStatus:
    def since(at: float | None) -> float:
        return 0.0 if at is None else max(0.0, now - at)

    next_seconds = None if record.next_at is None else record.next_at - now
    patience = max(ABANDONED_AFTER_SECONDS, record.every_seconds)
    return pb.BackupStatus(
        target=target,
        made_seconds=None if record.made_at is None else since(record.made_at),
        place=record.place,
        committed_round=record.committed_round,
        num_bytes=record.num_bytes,
        num_failures=record.num_failures,
        failing_seconds=since(record.failing_since),
        why=record.why,
        next_step=record.next_step,
        next_seconds=next_seconds,
        is_abandoned=next_seconds is not None and next_seconds < -patience,
    )


class BackupRecords:
    """The file of one coordinator's folder."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / RECORD_FILE
        self._seen: tuple[int, int] | None = None  # of the file that was read last
        self._read: Records = {}

    def note(self, target: str, told: Made | Failed | Waits, *, now: float) -> None:
        """Notes a try. Raises SystemRefusedError, CannotCreateError where the folder refuses."""
        self._change(lambda records: noted(records, target, told, now))

    def end(self, target: str) -> None:
        """Notes that no further copy is meant to follow. Raises as `note`."""
        self._change(lambda records: ended(records, target))

    def latest(self) -> Records:
        """What is noted; nothing where the file is damaged, which the log says once."""
        try:
            found = self._path.stat()
        except OSError:
            return {}
        seen = (found.st_ino, found.st_mtime_ns)
        if seen != self._seen:
            self._seen, self._read = seen, self._load()
        return self._read

    def _load(self) -> Records:
        try:
            return _READER.validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValidationError) as error:
            _log.warning(
                "what became of backups cannot be read",
                file=str(self._path),
                why=str(error).partition("\n")[0],
                next_step="the next backup writes it anew",
            )
            return {}

    def _change(self, change: Callable[[Records], Records]) -> None:
        with refusing(self._directory):
            folder = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)  # two commands may copy to two places
            records = dict(change(self._load()))
            write_atomically(self._path, _READER.dump_json(records, indent=1), mode=0o600)
        finally:
            os.close(folder)


def without_password(target: str) -> str:
    """A target as others may read it."""
    return re.sub(r"(?<=://)[^/@]*@", "", target)
