"""Kernels: inner loops of codecs and of the outer arithmetic, compiled by numba for the processor.

numpy makes a pass over memory for each operation; a kernel makes one for all of them, several times
faster, and without Python's lock, so that threads help. Compiled code stays as exact as numpy's:
LLVM reorders or fuses floating point operations only where it is told that it may, and nothing here
tells it (no `fastmath`). So each `+`, `-`, `*` and `/` of two float32 is one operation that IEEE 754
rounds correctly, on every processor, however many values it takes at once. What could differ is kept
out: no `sqrt`-like functions of libraries, and casts of floats to integers only within range.

Traps in kernels: an index out of bounds is not noticed, so it must be impossible for any body.
`float32 / 2` is float64, for literal integers are int64, and so is `int32 & int32`.

Compiled code is kept in the user's cache folder, or where NUMBA_CACHE_DIR says: one folder for each version
of the sources. A node that starts removes those of other versions that nobody has used for a week. A shorter
time would make two checkouts that are used by turns compile at each start. A process that runs for longer
than that holds its folder by a lock, which the kernel drops when the process ends, however it ends. Where
nothing can be written, each process compiles for itself.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar, cast

import blake3
import numba
import numpy as np
import numpy.typing as npt
import platformdirs

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


Function = TypeVar("Function", bound=Callable[..., object])
Scalar = TypeVar("Scalar", bound=np.generic)

ALL_RIGHT = -1
"""What kernels return that would return where something is wrong."""

TO_WHOLE = np.float32(1.5 * 2**23)
"""Added and subtracted again, it rounds what is below 2**22 to the nearest integer, ties to even:
`rint` as two additions, which processors do for many values at once."""


def _cache_folder() -> Path:
    """A folder for the sources as they are now.

    numba notices a change in a kernel's own file, but not in those of the kernels that it calls.
    """
    sources = sorted(Path(__file__).parent.glob("*.py"))
    stamp = blake3.blake3(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    return platformdirs.user_cache_path("atoll") / f"{PREFIX}{stamp}"


_FOLDER = None if "NUMBA_CACHE_DIR" in os.environ else _cache_folder()

if _FOLDER is not None:
    numba.config.CACHE_DIR = str(_FOLDER)  # type: ignore[attr-defined]  # made at import
    hold(_FOLDER)  # until the process ends


def remove_unused_kernels() -> None:
    """Removes what other versions compiled and nobody uses any more."""
    if _FOLDER is not None:
        remove_unused(_FOLDER)


def has_cache() -> bool:
    """Whether what is compiled here is kept for other processes."""
    stats = bits_of.stats  # type: ignore[attr-defined]  # of numba's dispatcher
    return stats.cache_path is not None


@contextmanager
def compiling_alone(*, on_wait: Callable[[], None]) -> Iterator[None]:
    """Lets one process compile at a time, so that the next ones find in the cache what it has compiled.

    Calls `on_wait` when there is one to be waited for.
    """
    with locked(Path(numba.config.CACHE_DIR), on_wait=on_wait):  # type: ignore[attr-defined]
        yield


def kernel(function: Function) -> Function:
    """Compiles a function at its first call, or takes it from the cache."""
    try:
        return _compiled(function, cache=True)
    except RuntimeError:  # there is no folder for a cache
        return _compiled(function, cache=False)


def _compiled(function: Function, *, cache: bool) -> Function:
    decorate = numba.njit(cache=cache, nogil=True, error_model="numpy", fastmath=False)
    return cast("Function", decorate(function))


def read_only(array: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    """A view that cannot be written: kernels are compiled for this kind of input alone."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


@kernel
def bits_of(number: np.float32) -> np.uint32:
    """A float32's pattern."""
    return np.float32(number).view(np.uint32)


@kernel
def float_of(bits: np.uint32) -> np.float32:
    """What a pattern means."""
    return np.uint32(bits).view(np.float32)
