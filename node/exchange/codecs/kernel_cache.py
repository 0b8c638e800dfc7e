"""Folders of compiled kernels: one for each version of their sources, held by who uses it.

A node that starts removes those of other versions that nobody has used for a week. A shorter time
would make two checkouts that are used by turns compile at each start. A process that runs for longer
than that holds its folder by a lock, which the kernel drops when it ends, however it ends.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

UNUSED_SECONDS = 7 * 86400.0

PREFIX = "kernels-"


def hold(folder: Path) -> int | None:
    """Makes the folder, notes that it is used, and locks it; the descriptor is the lock.

    None where there can be no folder or no lock: who removes would not get the lock either.
    """
    with suppress(OSError):
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            os.utime(folder)
            held = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(held, fcntl.LOCK_SH)  # waits for who is just removing it
                if _is_still_there(folder, held):
                    return held
            except OSError:
                os.close(held)
                raise
            os.close(held)
    return None


@contextmanager
def locked(folder: Path, *, on_wait: Callable[[], None]) -> Iterator[None]:
    """Holds a lock that one process has at a time, unless the folder cannot be written to.

    It is a file of its own: those who hold the folder share their lock.
    """
    with ExitStack() as kept:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            lock = kept.enter_context((folder / ".compiling").open("w"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _is_still_there(folder: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), folder.stat())
    except FileNotFoundError:
        return False


def remove_unused(own: Path) -> None:
    """Removes the folders beside `own` that nobody holds, or has begun to use for a week.

    A week before `own`, which is held, was: so only the disk's times are compared.
    """
    for folder in own.parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # who starts beside us removes it too
            if own.stat().st_mtime - folder.stat().st_mtime > UNUSED_SECONDS:
                _remove(folder)


def _remove(folder: Path) -> None:
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
