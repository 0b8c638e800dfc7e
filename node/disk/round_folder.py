"""Records of rounds in a folder: whole or not there, as many as are kept, and what they may take of a disk.

Snapshots, results and checkpoints of the inner optimizer are such records: a file or a folder with the
round in its name. What is still being made has a hidden name. One process at a time may write to a folder.
"""

import fcntl
import os
import re
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

from protocol.errors import SystemRefusedError
from protocol.files.durable import (
    make_closed_folder,
    refusing,
    remove_durably,
    sync_folder,
    write_atomically,
)

_DAMAGED = ".damaged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Which records stay beside the newest: the latest `keep` of those of every so many rounds.

    While there are fewer of these the oldest record of all stays too: a run goes back to its first rounds.
    """

    keep: int = 0
    every: int = 1  # rounds

    def is_kept(self, round: int) -> bool:
        """Whether a record of this round is one of those, while it is late enough."""
        return self.keep > 0 and round % self.every == 0

    def kept_of(self, rounds: Collection[int]) -> frozenset[int]:
        """Those of the rounds that stay."""
        kept = sorted(filter(self.is_kept, rounds))
        if len(kept) < self.keep and rounds:
            return frozenset({*kept, min(rounds)})
        return frozenset(kept[-self.keep :])


class RoundFolder:
    """The records of one kind. Its methods read or change the disk: heavy."""

    def __init__(
        self,
        path: Path,
        *,
        suffix: str,
        kept: int | None = None,
        retention: Retention = Retention(),
        digits: int = 8,
    ) -> None:
        """`kept` are there at most, with the one that is being made; None: `forget_before` decides.

        Those that `retention` names are there beside them.
        """
        self.path = path
        self._suffix = suffix
        self._kept = kept
        self._retention = retention
        self._digits = digits
        self._name = re.compile(rf"round-(\d+){re.escape(suffix)}")

    def path_of(self, round: int) -> Path:
        """Where the record of a round is, or would be."""
        return self.path / f"round-{round:0{self._digits}}{self._suffix}"

    def building(self, round: int) -> Path:
        """Where a record is made before it gets its name."""
        return self.path / f".{self.path_of(round).name}.new"

    def rounds(self) -> list[int]:
        """Of which rounds there are whole records, the newest first."""
        if not self.path.is_dir():
            return []
        matches = (self._name.fullmatch(path.name) for path in self.path.iterdir())
        return sorted((int(match[1]) for match in matches if match), reverse=True)

    def held_bytes(self) -> int:
        """What all of it takes, with what is unfinished or damaged."""
        paths = [*map(self.path_of, self.rounds()), *self._unfinished(), *self._damaged()]
        return sum(map(_size_of, paths))

    def write(self, round: int, *data: bytes | memoryview) -> None:
        """Makes a file of a round, and drops what it makes needless.

        Raises SystemRefusedError when the disk is full and CannotCreateError when the folder cannot be
        written to; nothing else has changed then.
        """
        make_closed_folder(self.path)
        self.sweep()
        write_atomically(self.path_of(round), *data)
        self.drop_after(round)

    def is_served(self, round: int) -> bool:
        """Whether all that would make room for a record of this round is being read."""
        paths = [*self._unfinished(), *self._damaged(), *map(self.path_of, self._leaving(round))]
        return bool(paths) and all(map(_is_read, paths))

    def make_room(self, round: int) -> Path | None:
        """Drops what must go before a record of this round is made, so that there are not too many.

        Returns a file to write over, which takes neither new pages nor new blocks; None where there is
        none that nobody reads. At least one whole record stays, if there was one. Raises as `write`.
        """
        make_closed_folder(self.path)
        leaving = [*self._damaged(), *map(self.path_of, self._leaving(round))]
        spares = self._unfinished()
        for path in leaving:
            if spares or path.is_dir():
                _remove(path)
            elif spare := _set_aside(path):
                spares.append(spare)
        for path in spares[1:]:
            _remove(path)
        if spares and spares[0].is_dir():
            _remove(spares.pop(0))
        return spares[0] if spares else None

    def finish(self, round: int) -> Path:
        """Gives what was built its name, durably, and drops what it makes needless. Raises as `write`."""
        path = self.path_of(round)
        with refusing(path):
            if path.is_dir():  # trained again after a death: the older one of that name makes room
                shutil.rmtree(path)
            self.building(round).replace(path)
            sync_folder(self.path)
        self.drop_after(round)
        return path

    def drop_after(self, round: int) -> None:
        """Drops records of later rounds: they are of a history that was left."""
        for number in self.rounds():
            if number > round:
                _remove(self.path_of(number))

    def forget_before(self, round: int) -> None:
        """Drops the records of earlier rounds."""
        for number in self.rounds():
            if number < round:
                _remove(self.path_of(number))

    def set_apart(self, round: int) -> Path:
        """Takes a damaged record out of the way, until the next one needs its room; returns where it is."""
        path = self.path_of(round)
        apart = path.with_name(path.name + _DAMAGED)
        _remove(apart)
        with refusing(path):
            path.replace(apart)
        return apart

    def clear(self) -> None:
        """Drops all of it."""
        self.drop_after(-1)
        for path in (*self._unfinished(), *self._damaged()):
            _remove(path)

    def sweep(self) -> None:
        """Removes what a killed process was making. Nobody may be making anything."""
        for path in self._unfinished():
            _remove(path)

    def _leaving(self, round: int) -> list[int]:
        if self._kept is None:
            return []
        return leaving(self.rounds(), round, kept=self._kept, retention=self._retention)

    def _unfinished(self) -> list[Path]:
        return sorted(self.path.glob(f".round-*{self._suffix}*" if self._suffix else ".round-*"))

    def _damaged(self) -> list[Path]:
        return sorted(self.path.glob(f"round-*{self._suffix}{_DAMAGED}"))


def leaving(
    rounds: Collection[int],
    new: int,
    *,
    kept: int,
    retention: Retention = Retention(),
) -> list[int]:
    """Which records go before one of round `new` is made, so that with it there are `kept`.

    The newest of its own history stay, and beside those what is retained of it. Later rounds are of a
    history that was left: they stay only where nothing else is whole until the new one is.
    """
    others = sorted((r for r in rounds if r != new), key=lambda r: (r > new, -r))
    is_made_anew = new in rounds  # it is whole until the new one takes its name
    retained = retention.kept_of([r for r in (*others, new) if r <= new])
    return [r for r in others[max(0, kept - 1 - is_made_anew) :] if r not in retained]


@contextmanager
def kept_for_reading(path: Path) -> Iterator[None]:
    """Nobody writes over the file as long as this is entered; it may be removed meanwhile.

    Open it within. Raises FileNotFoundError when it is gone by then, and OSError.
    """
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FileNotFoundError(f"{path} is just being set aside") from error
        except OSError:  # a file system without locks, where `_set_aside` has none either
            pass
        if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
            raise FileNotFoundError(f"{path} has just been replaced")
        yield


def _is_read(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # it is gone, or nobody can lock it
        pass
    return False


def _set_aside(path: Path) -> Path | None:
    """Renames a file that can be written over; removes one that is read, or has another name too."""
    spare = path.with_name(f".{path.name.removesuffix(_DAMAGED)}.spare")
    with suppress(OSError), path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file.fileno()).st_nlink == 1:
            path.replace(spare)
            sync_folder(path.parent)
            return spare
    remove_durably(path)
    return None


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        remove_durably(path)


def _size_of(path: Path) -> int:
    """What it takes of the disk: of a first snapshot most is zeros that are not written."""
    with suppress(FileNotFoundError):  # another thread prunes
        files = [file.stat() for file in ((path,) if path.is_file() else path.rglob("*"))]
        return sum(
            min(file.st_size, 512 * file.st_blocks) for file in files if S_ISREG(file.st_mode)
        )
    return 0


# What a node's records may take of its owner's disk, and how fast they are written: one budget for all.
#
# An SSD wears out by what is written, so snapshots and checkpoints come as seldom as the rate wants. While
# one is written the disk is everybody's: node.disk.snapshots leaves half of its time to others.


BYTES_PER_SECOND = 40e6
"""1,200 TB a year, two thirds of it snapshots: what a consumer's SSD endures."""

LONGEST_SECONDS = 3600.0
"""However large a record is, it is not older than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What records of one kind take at most."""

    what: str  # "snapshots"
    path: Path
    num_bytes: int
    held_bytes: int  # of these, there already


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """A setting of the owner's with which the records take less."""

    what: str  # "keep_snapshots = 0"
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskBudget:
    """The owner's limits, for all records together."""

    most_bytes: int | None = None  # None: what the disk has
    bytes_per_second: float = BYTES_PER_SECOND  # on average

    def seconds_between(self, num_bytes: int) -> float:
        """After how long as many bytes may be written again."""
        return min(num_bytes / self.bytes_per_second, LONGEST_SECONDS)

    def has_beside(self, path: Path, num_bytes: int) -> bool:
        """Whether so much may be written for a while beside what the node keeps."""
        disk = os.statvfs(_nearest(path))
        return self.most_bytes is None and num_bytes <= disk.f_bavail * disk.f_frsize

    def require(self, needs: Sequence[Need], *, savings: Sequence[Saving] = ()) -> None:
        """Raises SystemRefusedError unless there is room for all that the node will ever keep.

        Of the `savings` it names those that would make room.
        """
        in_all = sum(need.num_bytes for need in needs)
        if self.most_bytes is not None and in_all > self.most_bytes:
            raise SystemRefusedError(
                f"this run needs {_listed(needs)}, and max_disk allows {self.most_bytes:,}",
                next_step=f"raise max_disk in node.toml to {_rounded_up(in_all)} or more"
                + _or_set(savings, in_all - self.most_bytes),
            )
        places = [_nearest(need.path) for need in needs]
        for device in {place.stat().st_dev for place in places}:
            here = [
                n for n, place in zip(needs, places, strict=True) if place.stat().st_dev == device
            ]
            disk = os.statvfs(_nearest(here[0].path))
            free = disk.f_bavail * disk.f_frsize
            held = sum(min(need.held_bytes, need.num_bytes) for need in here)
            short_of = sum(need.num_bytes for need in here) - held - free
            if short_of > 0:
                raise SystemRefusedError(
                    f"this run needs {_listed(here)} in {here[0].path.parent}: {held:,} of it is "
                    f"there and {free:,} are free",
                    next_step="free some space on that disk, or move the node's folder to another"
                    + _or_set(savings, short_of),
                )


def _rounded_up(num_bytes: int) -> str:
    """As node.toml takes it."""
    unit, name = (10**9, "GB") if num_bytes > 10**9 else (10**6, "MB")
    return f"{-(-num_bytes // unit)}{name}"


def _or_set(savings: Sequence[Saving], short_of: int) -> str:
    """Settings of which each makes room, or all together; nothing where they do not."""
    if enough := [saving.what for saving in savings if saving.num_bytes >= short_of]:
        return "".join(f", or set {what} in node.toml" for what in enough)
    if sum(saving.num_bytes for saving in savings) >= short_of:
        return f", or set {' and '.join(saving.what for saving in savings)} in node.toml"
    return ""


def _listed(needs: Sequence[Need]) -> str:
    kinds = " and ".join(f"{need.num_bytes:,} for {need.what}" for need in needs)
    return f"{sum(need.num_bytes for need in needs):,} bytes of disk ({kinds})"


def _nearest(path: Path) -> Path:
    """What there is of a path already: the disk on which it will be."""
    return path if path.exists() else _nearest(path.absolute().parent)
