"""What the coordinator's disk has left, said before it refuses a write, which would end the coordinator."""

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

import structlog

from coordinator.database import DATABASE_NAME
from protocol.terminal.console import bytes_in_words
from protocol.v1 import status_pb2 as pb

LOOK_SECONDS = 20.0

LEAST_BYTES = 256 << 20

DATABASES = 2
"""So many times the database has to have room: it grows, and copies for object storage are made beside it."""

AGAIN = 1.25
"""As many times that is enough again, so that the log does not tell of each file that comes and goes."""

_log = structlog.get_logger()


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


class DiskRoom:
    """The latest look, and what the log says of it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._room: Room | None = None
        self._is_low = False

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

    def add_to(self, run: pb.RunStatus) -> None:
        """Tells the run owner."""
        if self._room is not None:
            run.disk_free_bytes = self._room.free_bytes
            run.is_disk_low = self._is_low
