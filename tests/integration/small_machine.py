"""Disks that are really small: tmpfs in mount namespaces that only the test's processes see."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_HOLD = """
mount -t tmpfs -o size="$2" small "$1" && echo mounted && exec cat
"""


class SmallDisk:
    """A disk of few bytes. `path` leads to it from everywhere; in its namespace it is `mounted_at`."""

    def __init__(self, holder: "subprocess.Popen[str]", mounted_at: Path) -> None:
        self.mounted_at = mounted_at
        self._holder = holder

    @property
    def path(self) -> Path:
        return Path(f"/proc/{self._holder.pid}/root{self.mounted_at}")

    @property
    def through(self) -> tuple[str, ...]:
        """What starts a program in the namespace."""
        return ("nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt", "--")

    @property
    def free_bytes(self) -> int:
        disk = os.statvfs(self.path)
        return disk.f_bavail * disk.f_frsize

    def fill(self) -> Path:
        """Takes all the room that is left."""
        filler = self.path / "filler"
        with filler.open("ab", buffering=0) as file:
            while self.free_bytes:  # others give some back meanwhile
                with suppress(OSError):
                    file.write(bytes(4096))
        return filler


@contextmanager
def small_disk(at: Path, *, num_bytes: int) -> Iterator[SmallDisk]:
    """Mounts one over a folder; skips the test where that is not permitted."""
    command = ["unshare", "--mount", "sh", "-c", _HOLD, "sh", str(at), str(num_bytes)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as holder:
        try:
            assert holder.stdout is not None and holder.stderr is not None
            if holder.stdout.readline() != "mounted\n":
                pytest.skip(f"no small disk can be mounted: {holder.stderr.read().strip()}")
            yield SmallDisk(holder, at)
        finally:
            holder.kill()
