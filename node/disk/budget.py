"""What a node's records may take of its owner's disk, and how fast they are written: one budget for all.

An SSD wears out by what is written, so snapshots and checkpoints come as seldom as the rate wants. While one
is written the disk is everybody's: node.disk.snapshots leaves half of its time to others.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import SystemRefusedError

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

    def require(self, needs: Sequence[Need], *, advice: str = "") -> None:
        """Raises SystemRefusedError unless there is room for all that the node will ever keep.

        `advice` is one more thing that a person can do about it.
        """
        in_all = sum(need.num_bytes for need in needs)
        if self.most_bytes is not None and in_all > self.most_bytes:
            raise SystemRefusedError(
                f"this run needs {_listed(needs)}, and max_disk allows {self.most_bytes:,}",
                next_step=f"raise max_disk in node.toml to {-(-in_all // 10**9)}GB or more{advice}",
            )
        places = [_nearest(need.path) for need in needs]
        for device in {place.stat().st_dev for place in places}:
            here = [
                n for n, place in zip(needs, places, strict=True) if place.stat().st_dev == device
            ]
            disk = os.statvfs(_nearest(here[0].path))
            free = disk.f_bavail * disk.f_frsize
            held = sum(min(need.held_bytes, need.num_bytes) for need in here)
            if sum(need.num_bytes for need in here) > held + free:
                raise SystemRefusedError(
                    f"this run needs {_listed(here)} in {here[0].path.parent}: {held:,} of it is "
                    f"there and {free:,} are free",
                    next_step="free some space on that disk, or move the node's folder to another"
                    + advice,
                )


def _listed(needs: Sequence[Need]) -> str:
    kinds = " and ".join(f"{need.num_bytes:,} for {need.what}" for need in needs)
    return f"{sum(need.num_bytes for need in needs):,} bytes of disk ({kinds})"


def _nearest(path: Path) -> Path:
    """What there is of a path already: the disk on which it will be."""
    return path if path.exists() else _nearest(path.absolute().parent)
