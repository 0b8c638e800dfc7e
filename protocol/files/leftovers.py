"""What a process has outside its own folder, held so that what a killed one leaves can be told and removed.

A lock on the file or folder itself says that its owner lives: the kernel drops it when the process
ends, however it ends. So what nobody locks is left over, whatever process id its owner had. Names
begin with `PREFIX`; nothing else is ever looked at.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from protocol.errors import SystemRefusedError

PREFIX = "atoll-held-"


class Held:
    """The mark of a living owner on a file or folder, until `release` or the end of the process."""

    def __init__(self, path: Path) -> None:
        """Raises FileNotFoundError when another start has taken the path for left over, and removed it."""
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with suppress(OSError):  # without locks nobody removes it either
                fcntl.flock(self._descriptor, fcntl.LOCK_SH)  # waits for who is just removing it
            if not os.path.samestat(os.fstat(self._descriptor), path.stat()):
                raise FileNotFoundError(path)
        except OSError:
            os.close(self._descriptor)
            raise

    @property
    def descriptor(self) -> int:
        """Its own, until `release`: it leads there also when the name is gone."""
        return self._descriptor

    def release(self) -> None:
        """Lets go, before or after the path is removed; safe to call more than once."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


LONGEST_SOCKET_BYTES = 107
"""Of a Unix socket's name (unix(7): 108 with the zero behind it)."""

_OWN_BYTES = 43
"""What names of sockets have behind the temporary directory: ours, and multiprocessing's."""


def temporary_directory(*, has_sockets: bool = False) -> Path:
    """Where temporary files lie; raises SystemRefusedError without one, or where sockets do not fit in."""
    try:
        path = tempfile.gettempdir()
    except OSError as error:
        raise SystemRefusedError(
            "there is no folder for temporary files that can be written to, neither TMPDIR nor /tmp nor "
            "/var/tmp",
            next_step="free some space on their disks, or set TMPDIR to a folder on another",
        ) from error
    length, most = len(os.fsencode(path)), LONGEST_SOCKET_BYTES - _OWN_BYTES
    if has_sockets and length > most:
        raise SystemRefusedError(
            f"the folder for temporary files, {path}, has a name of {length} bytes, and sockets fit into "
            f"one of at most {most}",
            next_step="set TMPDIR to a folder with a shorter name: TMPDIR=/tmp",
        )
    return Path(path)


class TemporaryFolder:
    """A new folder in the temporary directory that only we can read; `remove` it in the end.

    Raises SystemRefusedError when there is no room for it, or none for the name of a socket in it.
    """

    def __init__(self, purpose: str, *, has_sockets: bool = False) -> None:
        temporary_directory(has_sockets=has_sockets)
        try:
            while True:
                self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{purpose}-"))  # mode 0700
                with suppress(FileNotFoundError):
                    self._held = Held(self.path)
                    break
        except OSError as error:
            raise SystemRefusedError(
                f"no folder for temporary files can be made: {error}",
                next_step="free some space there, or set TMPDIR to a folder on another disk",
            ) from error

    def remove(self) -> None:
        """Removes it with all that is in it; safe to call more than once."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._held.release()


def remove_leftovers(*places: Path) -> list[Path]:
    """Removes what killed processes of this user have left in these folders; returns what it was.

    What a living process holds stays, and so does what is another user's.
    """
    return remove_left(path for place in places for path in sorted(place.glob(f"{PREFIX}*")))


def remove_left(paths: Iterable[Path]) -> list[Path]:
    """Removes those files and folders of this user that nobody holds; returns which."""
    removed = []
    for path in paths:
        with suppress(OSError):  # removed beside us, or not ours to open
            if path.lstat().st_uid == os.getuid() and _is_removed(path):
                removed.append(path)
    return removed


def _is_removed(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    except BlockingIOError:
        return False  # its owner lives
    finally:
        os.close(descriptor)
    return True
