"""Backups one after the other in one place: how they are named, which go, what comes back, what is told.

A copy has its time in its name, so the newest is the last by name. An older one goes only once a newer
one is whole and was read back.
"""

import fcntl
import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import FrameType
from typing import Protocol

import structlog
from pydantic import TypeAdapter, ValidationError

from coordinator.backup import Backup, back_up, require_started
from coordinator.config import Home
from coordinator.remote_backup import RemoteCopies, Restored, back_up_to, is_remote
from coordinator.settings import CONFIG_FILE
from protocol.errors import AtollError, BadDataError, NoInputError, SystemRefusedError, UsageError
from protocol.files.durable import (
    as_typed,
    expanded,
    make_folder,
    refusing,
    remove_folder,
    write_atomically,
)
from protocol.service.beside import heed_stdin
from protocol.service.notify import stop_signals
from protocol.v1 import status_pb2 as pb

_log = structlog.get_logger()

DEFAULT_KEEP = 24

FIRST_PAUSE_SECONDS = 5.0
LONGEST_PAUSE_SECONDS = 300.0
"""Between tries after failures, each twice as long; never longer than from one copy to the next."""

_NAME = re.compile(r"(?P<run>[a-z0-9-]+)-(?P<swarm>[0-9a-f]{8})-(?P<at>[0-9]{8}T[0-9]{6}Z)")
_TIME = "%Y%m%dT%H%M%SZ"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class CopyName:
    """What a copy is called: its run, the beginning of the swarm's id, and when it was made."""

    run: str
    swarm: str
    at: datetime

    def __str__(self) -> str:
        return f"{self.run}-{self.swarm}-{self.at.strftime(_TIME)}"

    @classmethod
    def read(cls, text: str) -> "CopyName | None":
        """None of what is no copy of ours."""
        match = _NAME.fullmatch(text)
        if match is None:
            return None
        try:
            at = datetime.strptime(match["at"], _TIME).replace(tzinfo=UTC)
        except ValueError:  # the 99th of a month
            return None
        return cls(run=match["run"], swarm=match["swarm"], at=at)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The copies of one swarm in one place. Decides, and touches nothing."""

    run: str
    swarm: str
    keep: int
    every_seconds: float

    @classmethod
    def of(cls, directory: Path, *, keep: int, every_seconds: float) -> "Series":
        """Of a coordinator's folder. Raises NoInputError for one that was never started, ConfigError."""
        home = Home.load(directory)
        require_started(directory)
        return cls(
            run=home.run.run.name,
            swarm=home.issuer.swarm_id[:8],
            keep=keep,
            every_seconds=every_seconds,
        )

    def _ours(self, names: Mapping[str, bool]) -> list[CopyName]:
        read = (CopyName.read(name) for name in names)
        return sorted(one for one in read if one and (one.run, one.swarm) == (self.run, self.swarm))

    def _newest(self, found: Mapping[str, bool]) -> CopyName | None:
        return max((one for one in self._ours(found) if found[str(one)]), default=None)

    def next_name(self, found: Mapping[str, bool], now: datetime) -> str:
        """The next copy's, later than all that are there: a clock may have been set back."""
        at = now.replace(microsecond=0)
        if ours := self._ours(found):
            at = max(at, ours[-1].at + timedelta(seconds=1))
        return str(CopyName(run=self.run, swarm=self.swarm, at=at))

    def due_in_seconds(
        self, found: Mapping[str, bool], now: datetime, *, waited_seconds: float
    ) -> float:
        """When the next copy is to be made, by whoever has waited for it for `waited_seconds`.

        Not at once where a young one is there: what starts again and again would push out all older ones.
        """
        if (newest := self._newest(found)) is None:
            return 0.0
        age = (now - newest.at).total_seconds()
        if age < 0:  # the clock was set back, by how much is not known
            age = waited_seconds
        return max(self.every_seconds - age, 0.0)

    def to_remove(self, found: Mapping[str, bool], *, made: str) -> list[str]:
        """What goes once `made` is whole: all but the newest ones, and older copies that broke off."""
        latest = CopyName.read(made)
        assert latest is not None
        older = [one for one in self._ours(found) if one < latest]
        whole = [one for one in older if found[str(one)]]
        kept = set(whole[max(0, len(whole) - (self.keep - 1)) :]) if self.keep > 1 else set()
        return [str(one) for one in older if one not in kept]

    def pause_seconds(self, num_failures: int) -> float:
        """Until the next try after so many failures one after the other."""
        doubled = FIRST_PAUSE_SECONDS * 2.0 ** min(num_failures - 1, 16)
        return min(doubled, LONGEST_PAUSE_SECONDS, self.every_seconds)


class Copies(Protocol):
    """The place where copies lie. Its methods raise AtollError."""

    def found(self) -> dict[str, bool]:
        """What is there by name, and whether it is whole."""

    def add(self, directory: Path, name: str) -> Backup:
        """Copies a coordinator's folder, and reads the copy back."""

    @property
    def is_one(self) -> bool:
        """Whether a copy itself lies there, and no row of them."""

    def restore(self, name: str, directory: Path) -> Restored:
        """Makes the folder of a copy, or with no name of the one that lies there. All of it or nothing."""

    def remove(self, name: str) -> None:
        """Nobody takes what is left for a whole copy, whenever it breaks off."""

    def place(self, name: str) -> str:
        """As people type it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderCopies:
    """Copies in a folder of this machine."""

    folder: Path

    def found(self) -> dict[str, bool]:
        """See Copies. A folder takes its name when it is whole."""
        with refusing(self.folder):
            if not self.folder.is_dir():
                return {}
            return {
                path.name: (path / CONFIG_FILE).is_file()
                for path in self.folder.iterdir()
                if path.is_dir()
            }

    def add(self, directory: Path, name: str) -> Backup:
        """See Copies. `back_up` reads all rows of the copy."""
        make_folder(self.folder, mode=0o700)
        return back_up(directory, self.folder / name)

    @property
    def is_one(self) -> bool:
        """See Copies."""
        return (self.folder / CONFIG_FILE).is_file()

    def restore(self, name: str, directory: Path) -> Restored:
        """See Copies."""
        source = self.folder / name if name else self.folder
        made = back_up(source, directory)
        return Restored(
            run_name=made.run_name, committed_round=made.committed_round, place=str(source)
        )

    def remove(self, name: str) -> None:
        """See Copies."""
        with refusing(self.folder / name):
            remove_folder(self.folder / name)

    def place(self, name: str) -> str:
        """See Copies."""
        return str(self.folder / name)


def copies_at(target: str) -> Copies:
    """Raises what RemoteCopies.at raises."""
    return RemoteCopies.at(target) if is_remote(target) else FolderCopies(folder=expanded(target))


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A copy was made."""

    place: str
    backup: Backup
    next_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """No copy was made, or an older one could not be removed."""

    error: AtollError
    next_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """A start that makes no copy yet: the newest is young."""

    next_seconds: float
    every_seconds: float


def once(directory: Path, target: str) -> Made:
    """One copy, at that very folder or address. Raises what `back_up` and `back_up_to` raise."""
    made = back_up_to(directory, target) if is_remote(target) else back_up(directory, Path(target))
    return Made(place=target, backup=made)


def in_a_line(told: Made | Failed) -> str:
    """As JSON, for programs."""
    if isinstance(told, Made):
        content = {"copied": told.place} | asdict(told.backup)
    else:
        content = {"failed": told.error.what, "next_step": told.error.next_step}
    return json.dumps(content | {"next_seconds": told.next_seconds})


def back_up_for_good(
    directory: Path,
    copies: Copies,
    series: Series,
    *,
    say: Callable[[Made | Failed | Waits], None],
    wait: Callable[[float], bool],
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> None:
    """Makes a copy each time that one is due; a failure is said, and tried again.

    `wait` waits so many seconds, and returns whether that was all.
    """
    num_failures, waited_seconds = 0, 0.0
    is_first, is_over = True, False
    while not is_over:
        try:
            pause = series.due_in_seconds(copies.found(), now(), waited_seconds=waited_seconds)
            if pause > 0 and is_first:
                say(Waits(next_seconds=pause, every_seconds=series.every_seconds))
            elif pause == 0:
                name = series.next_name(copies.found(), now())
                made = copies.add(directory, name)
                pause, waited_seconds = series.every_seconds, 0.0
                say(Made(place=copies.place(name), backup=made, next_seconds=pause))
                for old in series.to_remove(copies.found(), made=name):
                    copies.remove(old)
            num_failures = 0
        except (AtollError, OSError) as error:
            num_failures += 1
            pause = series.pause_seconds(num_failures)
            say(Failed(error=_told(error), next_seconds=pause))
        is_first, is_over = False, wait(pause)
        waited_seconds += pause


def _told(error: AtollError | OSError) -> AtollError:
    if isinstance(error, AtollError):
        return error
    return SystemRefusedError(str(error), next_step="check that disk")


class _Stop(BaseException):
    """A signal came."""


@contextmanager
def until_signals(*, ends_with_stdin: bool) -> Iterator[Callable[[float], bool]]:
    """Within it, signals that mean stop end what is going on, and what it began is cleared up.

    With `ends_with_stdin` so does the end of standard input.

    Gives a `wait` for `back_up_for_good`.
    """
    stopped = threading.Event()

    def stop(_number: int, _frame: FrameType | None) -> None:
        if not stopped.is_set():
            stopped.set()
            raise _Stop

    before = {number: signal.signal(number, stop) for number in stop_signals()}
    if ends_with_stdin:
        heed_stdin()
    with suppress(_Stop):
        yield stopped.wait
    for number, handler in before.items():
        signal.signal(number, handler)


def restore(source: str, directory: Path) -> Restored:
    """Makes the folder of the newest whole copy at an address or in a folder, or of that very copy.

    Raises NoInputError where there is none, BadDataError where it was changed, CannotCreateError where the
    folder is not free, UsageError where copies of several swarms lie there.
    """
    copies = copies_at(source)
    if copies.is_one:
        return copies.restore("", directory)
    named = {name: CopyName.read(name) for name, is_whole in copies.found().items() if is_whole}
    whole = sorted((one for one in named.values() if one is not None), key=lambda one: one.at)
    if not whole:
        raise NoInputError(
            f"no whole backup lies at {source}",
            next_step="give the folder or address that 'atoll coordinator backup' was given",
        )
    newest_of = {(one.run, one.swarm): one for one in whole}
    if len(newest_of) > 1:
        raise UsageError(
            f"copies of {len(newest_of)} swarms lie at {source}: "
            f"{', '.join(str(one) for one in newest_of.values())}",
            next_step=f"name one: atoll coordinator restore {as_typed(copies.place(str(whole[-1])))} "
            f"{as_typed(directory)}",
        )
    try:
        return copies.restore(str(whole[-1]), directory)
    except BadDataError as error:
        if len(whole) == 1:
            raise
        older = copies.place(str(whole[-2]))
        raise BadDataError(
            error.what,
            next_step=f"restore the one before: atoll coordinator restore {as_typed(older)} "
            f"{as_typed(directory)}",
        ) from error


# What became of the copies of a coordinator's folder, in backups.json within it.
#
# Whoever makes copies notes it there: the process beside the coordinator, a command of its own, a timer's. So
# `atoll status`, the page and the metrics tell of all of them, also after a restart. For people alone: which
# copies there are is decided by what lies at their place.


RECORD_FILE = "backups.json"

ABANDONED_AFTER_SECONDS = 600.0
"""Overdue for so long, or for the time between two copies, nobody can be making any."""


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
