"""One process at a time for a folder: a coordinator, a node, or a machine that joins."""

import fcntl
import os
from pathlib import Path
from typing import Self

from protocol.errors import SystemRefusedError
from protocol.files.durable import refusal_to_write

LOCK_NAME = "lock"


class FolderLock:
    """Holds a folder for this process until `release`, or until the process ends, however it ends.

    The programs that it starts do not inherit the lock, so one that outlives it holds nothing.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def take(cls, folder: Path, *, holder: str, next_step: str) -> Self:
        """Takes the folder; raises SystemRefusedError when another process holds it.

        `holder` is what people call whoever holds it: "coordinator", "node".
        """
        path = folder / LOCK_NAME
        while True:
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise SystemRefusedError(
                    f"{path} cannot be opened: {error.strerror}",
                    next_step="check the folder's permissions",
                ) from error
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
                os.close(descriptor)
                raise SystemRefusedError(
                    f"another {holder} (process {owner}) runs in {folder}", next_step=next_step
                ) from error
            except OSError as error:  # a share of a network, or a program's own file system
                os.close(descriptor)
                raise SystemRefusedError(
                    f"the disk of {path} locks no files ({error.strerror}), so a second {holder} there "
                    "would not be noticed",
                    next_step="let the folder be on a disk of this machine",
                ) from error
            if _is_same_file(path, descriptor):
                break
            os.close(descriptor)  # its holder removed the file before letting go
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            os.close(descriptor)
            raise refusal_to_write(path, error) from error
        return cls(path, descriptor)

    @staticmethod
    def holder_of(folder: Path) -> int | None:
        """The process that holds the folder; None when none does, or it is another user's.

        Asks the process too: the number in the file may be that of one which has ended.
        """
        path = folder / LOCK_NAME
        try:
            process_id = int(path.read_text())
            lock = path.stat()
            opened = tuple(Path(f"/proc/{process_id}/fd").iterdir())
        except (OSError, ValueError):
            return None
        return process_id if any(_is_that_file(link, lock) for link in opened) else None

    def release(self) -> None:
        """Lets another process have the folder; safe to call more than once."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _is_same_file(path: Path, descriptor: int) -> bool:
    return _is_that_file(path, os.fstat(descriptor))


def _is_that_file(path: Path, that: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), that)
    except FileNotFoundError:
        return False
