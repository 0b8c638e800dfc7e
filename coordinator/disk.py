"""The disk of the coordinator's folder: what it has left, and how long it takes for a write.

Both are said before somebody has to find out: the first write that a disk refuses ends the coordinator, and
all nodes wait for each that is slow.
"""

import asyncio
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from coordinator.database import DATABASE_NAME
from protocol.terminal.console import bytes_in_words
from protocol.v1 import status_pb2 as pb

_log = structlog.get_logger()

SLOW_SECONDS, SLOW_TOLD_AGAIN_SECONDS = 2.0, 600.0
"""A write that takes so long is told, and not again for a while: each of a round's reports waits for one."""

LOOK_SECONDS = 20.0

LEAST_BYTES = 256 << 20

DATABASES = 2
"""So many times the database has to have room: it grows, and copies for object storage are made beside it."""

AGAIN = 1.25
"""As many times that is enough again, so that the log does not tell of each file that comes and goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What is free, and what should be."""

    free_bytes: int
    wanted_bytes: int

    @classmethod
    def of(cls, directory: Path) -> "Room":
        """Looks at a coordinator's folder. Raises OSError."""
        disk = os.statvfs(directory)
        database = sum(map(_bytes_of, directory.glob(f"{DATABASE_NAME}*")))
        return cls(
            free_bytes=disk.f_bavail * disk.f_frsize,
            wanted_bytes=max(LEAST_BYTES, DATABASES * database),
        )

    def is_low(self, *, was_low: bool) -> bool:
        """Whether somebody should make room."""
        return self.free_bytes < self.wanted_bytes * (AGAIN if was_low else 1.0)


def _bytes_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # its log of writes comes and goes
        return 0


class Disk:
    """The latest look, and writes of the last ten minutes; what the log says of both."""

    def __init__(self, directory: Path, *, now: Callable[[], float]) -> None:
        """`now` is a clock that stands still while this process is stopped: no disk is at fault for that."""
        self._directory = directory
        self._now = now
        self._room: Room | None = None
        self._is_low = False
        self._slow_told_at = float("-inf")
        self._writes: deque[tuple[float, float]] = deque()  # when, and seconds: ever shorter ones

    async def watch(self) -> None:
        """Looks until it is cancelled. In a thread: a disk may take its time over any question."""
        while True:
            await asyncio.to_thread(self.look)
            await asyncio.sleep(LOOK_SECONDS)

    def look(self) -> None:
        """Looks now. What cannot be seen is not told."""
        try:
            room = Room.of(self._directory)
        except OSError:  # the next write to the database tells why
            self._room = None
            return
        is_low = room.is_low(was_low=self._is_low)
        if is_low and not self._is_low:
            _log.warning(
                "the disk is nearly full",
                folder=str(self._directory),
                left=bytes_in_words(room.free_bytes),
                wanted=bytes_in_words(room.wanted_bytes),
                next_step="make room on it: the coordinator ends at the first write that it refuses",
            )
        self._room, self._is_low = room, is_low

    def note_write(self, seconds: float) -> None:
        """A change is durable after so long. All nodes wait for each write, and none of them sees why."""
        now = self._now()
        while self._writes and self._writes[-1][1] <= seconds:
            self._writes.pop()
        self._writes.append((now, seconds))
        if seconds >= SLOW_SECONDS and now >= self._slow_told_at + SLOW_TOLD_AGAIN_SECONDS:
            self._slow_told_at = now
            _log.warning(
                "the disk is slow, and rounds wait for it",
                folder=str(self._directory),
                a_write_took_seconds=round(seconds, 1),
                next_step="move the coordinator's folder to a faster disk of this machine, or end what else "
                "keeps that disk busy",
            )

    @property
    def slowest_write_seconds(self) -> float | None:
        """Of the last ten minutes; None where there was none."""
        since = self._now() - SLOW_TOLD_AGAIN_SECONDS
        return next((seconds for at, seconds in self._writes if at >= since), None)

    def add_to(self, run: pb.RunStatus) -> None:
        """Tells the run owner."""
        if self._room is not None:
            run.disk_free_bytes = self._room.free_bytes
            run.is_disk_low = self._is_low
        if (seconds := self.slowest_write_seconds) is not None:
            run.disk_write_seconds = seconds
            run.is_disk_slow = seconds >= SLOW_SECONDS
