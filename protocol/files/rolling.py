"""A file of lines that stays small: when it is full it becomes the old one, and a new one begins."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

OLD = ".old"
"""What the name of the file before ends with."""


class RollingFile:
    """Takes lines. Together with the file before it holds at most about twice `most_bytes`.

    One process writes. Its methods raise OSError when the disk refuses.
    """

    def __init__(self, path: Path, *, most_bytes: int) -> None:
        self.path = path
        self._most_bytes = most_bytes
        self._is_whole = False  # known to end with a whole line

    def append(self, lines: Iterable[str]) -> None:
        """Writes lines, each with its end, by one call of the system: who reads sees whole ones."""
        data = "".join(f"{line}\n" for line in lines).encode(errors="backslashreplace")
        if not self._is_whole and _is_torn(self.path):
            data = b"\n" + data
        self._is_whole = False  # until all of this is written
        if self.path.exists() and self.path.stat().st_size + len(data) > self._most_bytes:
            self.path.replace(old_of(self.path))
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            while data:  # a full disk takes a part, and refuses the next
                data = data[os.write(descriptor, data) :]
        finally:
            os.close(descriptor)
        self._is_whole = True


def _is_torn(path: Path) -> bool:
    """Whether its last line was cut when the machine stopped: the next must not go on with it."""
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def old_of(path: Path) -> Path:
    """The file before."""
    return path.with_name(path.name + OLD)


def lines_of(path: Path) -> Iterator[str]:
    """What a rolling file and the one before hold, oldest first; nothing where neither is there.

    A line that was cut when the machine stopped comes as it is.
    """
    for each in (old_of(path), path):
        try:
            text = each.read_text(errors="replace")
        except FileNotFoundError:
            continue
        yield from text.splitlines()
