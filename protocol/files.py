"""Files that are whole or not there at all, and the folders they lie in."""

import contextlib
import errno
import os
import tempfile
from pathlib import Path

from protocol.errors import AtollError, CannotCreateError, SystemRefusedError

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT}


def _refusal(path: Path, error: OSError) -> AtollError:
    """The sentence for a file that could not be written."""
    if error.errno in _DISK_FULL:
        return SystemRefusedError(
            f"cannot write {path}: {error.strerror}", next_step="free some space on that disk"
        )
    return CannotCreateError(
        f"cannot write {path}: {error.strerror or error}",
        next_step=f"make {path.parent} a folder that you may write to, or choose another",
    )


def make_folder(path: Path, *, mode: int = 0o755) -> None:
    """Makes a folder and those above it; one that exists is left as it is."""
    try:
        path.mkdir(mode=mode, parents=True, exist_ok=True)
    except OSError as error:
        raise _refusal(path, error) from error


def write_atomically(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Writes a file so that a crash leaves the old file or the new one, never a part.

    The folder must exist. The file has `mode` from its first byte on, or less. Raises
    SystemRefusedError when the disk is full and CannotCreateError when the file cannot be written;
    both leave what was there before.
    """
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise _refusal(path, error) from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)
        Path(name).replace(path)
        _sync_folder(path.parent)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):  # it is gone once it has taken its name
            Path(name).unlink()
        if isinstance(error, OSError):
            raise _refusal(path, error) from error
        raise


def _sync_folder(path: Path) -> None:
    """Makes renames and removals in a folder survive a power cut."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def remove_durably(path: Path) -> None:
    """Removes a file, if it is there, so that it stays removed after a power cut."""
    try:
        path.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        raise _refusal(path, error) from error
    _sync_folder(path.parent)
