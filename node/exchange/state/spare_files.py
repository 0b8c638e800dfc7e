"""Old files leave their place on the disk to new ones, unless somebody still reads them.

A node writes its whole outer state again and again. A new file must be given memory and blocks, and an old
one gives them back; to write over an old one takes neither.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from protocol.files.durable import remove_durably, sync_folder


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
        except OSError:  # a file system without locks, where `set_aside` has none either
            pass
        if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
            raise FileNotFoundError(f"{path} has just been replaced")
        yield


def set_aside(path: Path, spare: Path) -> None:
    """Renames a file that can be written over, or removes one that is read or has another name too.

    Raises SystemRefusedError or CannotCreateError when neither can be done.
    """
    with suppress(OSError), path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file.fileno()).st_nlink == 1:
            path.replace(spare)
            sync_folder(path.parent)
            return
    remove_durably(path)
