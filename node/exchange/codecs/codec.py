"""What a codec is: fp32 values to bytes and back, tile by tile, with kernels that numba compiles.

A codec works on runs of tiles, one run for each thread. Tiles do not depend on each other, so the bytes are
the same for any number of threads. In some codecs each tile has a stream of its own.

The bytes of a version never change: tests/unit/golden keeps examples. A new idea is a new name or
a new version, beside the old one.

Kernels are the inner loops of codecs and of the outer arithmetic, compiled for the processor. numpy makes a
pass over memory for each operation; a kernel makes one for all of them, several times
faster, and without Python's lock, so that threads help. Compiled code stays as exact as numpy's:
LLVM reorders or fuses floating point operations only where it is told that it may, and nothing here
tells it (no `fastmath`). So each `+`, `-`, `*` and `/` of two float32 is one operation that IEEE 754
rounds correctly, on every processor, however many values it takes at once. What could differ is kept
out: no `sqrt`-like functions of libraries, and casts of floats to integers only within range.

Traps in kernels: an index out of bounds is not noticed, so it must be impossible for any body; under
NUMBA_BOUNDSCHECK=1, with a cache folder of its own, it is an IndexError.
`float32 / 2` is float64, for literal integers are int64, and so is `int32 & int32`.

Compiled code is kept in the user's cache folder, or where NUMBA_CACHE_DIR says: one folder for each version
of the sources. A node that starts removes those of other versions that nobody has used for a week. A shorter
time would make two checkouts that are used by turns compile at each start. A process that runs for longer
than that holds its folder by a lock, which the kernel drops when the process ends, however it ends. Where
nothing can be written, each process compiles for itself.
"""

import fcntl
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import ClassVar, TypeVar, cast

import blake3
import numba
import numpy as np
import numpy.typing as npt

from node.outer_state import Vector
from protocol.files.durable import user_cache
from protocol.files.leftovers import Held, remove_left

UNUSED_SECONDS = 7 * 86400.0

PREFIX = "kernels-"


def hold(folder: Path) -> Held | None:
    """Makes the folder, notes that it is used, and holds it; None where there can be no folder."""
    with suppress(OSError):
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            os.utime(folder)
            with suppress(FileNotFoundError):
                return Held(folder)
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


def remove_unused(own: Path) -> None:
    """Removes the folders beside `own` that nobody holds, or has begun to use for a week.

    A week before `own`, which is held, was: so only the disk's times are compared.
    """
    for folder in own.parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # who starts beside us removes it too
            if own.stat().st_mtime - folder.stat().st_mtime > UNUSED_SECONDS:
                remove_left([folder])


Function = TypeVar("Function", bound=Callable[..., object])
Scalar = TypeVar("Scalar", bound=np.generic)

ALL_RIGHT = -1
"""What kernels return that would return where something is wrong."""

TO_WHOLE = np.float32(1.5 * 2**23)
"""Added and subtracted again, it rounds what is below 2**22 to the nearest integer, ties to even:
`rint` as two additions, which processors do for many values at once."""


def _cache_folder() -> Path | None:
    """A folder for the sources as they are now; None where there can be none.

    numba notices a change in a kernel's own file, but not in those of the kernels that it calls.
    """
    sources = sorted(Path(__file__).parent.glob("*.py"))
    stamp = blake3.blake3(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    folder = user_cache()
    return None if folder is None else folder / f"{PREFIX}{stamp}"


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


Result = TypeVar("Result")

TILE_ELEMENTS = 1 << 16
"""256 KiB of fp32: whole blocks and chunks. The bodies of entropy.py depend on it."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Works on runs of tiles, on so many threads.

    One thread by default: on a node without GPUs every core is a training rank's. Kernels run
    without Python's lock, so threads help where cores are idle.
    """

    num_threads: int = 1

    def each_run(
        self, num_elements: int, work: Callable[[int, int], Result], *, unit: int = TILE_ELEMENTS
    ) -> list[Result]:
        """Calls `work(start, end)` for runs of whole units that cover all elements, in order.

        The first of its errors, by place, is raised.
        """
        num_units = -(-num_elements // unit)
        num_runs = 1 if hasattr(_POOLED, "is_one") else min(self.num_threads, num_units)
        bounds = [num_units * run // num_runs * unit for run in range(num_runs)]
        runs = list(zip(bounds, [*bounds[1:], num_elements], strict=True))
        if num_runs == 1:
            return [work(*runs[0])]
        futures = [_pool_of(self.num_threads).submit(work, *run) for run in runs]
        wait(futures)  # all of them: what follows an error may free what the others write to
        return [future.result() for future in futures]

    def each_tile(
        self,
        num_elements: int,
        work: Callable[[int, int, Vector], object],
        *,
        unit: int = TILE_ELEMENTS,
    ) -> None:
        """Calls `work(start, end, scratch)` for each unit; the scratch [unit] is its thread's alone."""

        def run(first: int, past: int) -> None:
            scratch = np.empty(min(unit, past - first), dtype=np.float32)
            for start in range(first, past, unit):
                work(start, min(start + unit, past), scratch)

        self.each_run(num_elements, run, unit=unit)


ONE_THREAD = Tiles()

_POOLED = threading.local()
"""What marks the threads of a pool. Work in one of them that asks for threads again gets its own: waiting for
others that all wait likewise would never end."""


@cache
def _pool_of(num_threads: int) -> ThreadPoolExecutor:
    """One for all slices that are worked on at once: together they use no more threads."""
    return ThreadPoolExecutor(
        num_threads,
        thread_name_prefix="tiles",
        initializer=lambda: setattr(_POOLED, "is_one", True),
    )


def threads_beside(*, num_ranks: int, num_cores: int, ranks_compute_on_cores: bool) -> int:
    """How many threads the exchange's arithmetic may use on a node with so many ranks and cores.

    A rank on a GPU keeps one core busy; those that are left are free. Ranks on CPUs use all cores, and
    train while the node encodes.
    """
    return 1 if ranks_compute_on_cores else max(1, num_cores - num_ranks)


Bytes = npt.NDArray[np.uint8]


class CodecError(ValueError):
    """Values or bytes that this codec refuses: not finite, of the wrong size, out of range."""


Reader = Callable[[int, int, Vector], None]
"""Writes the values from one place of a slice up to another into a vector of just that size.

The first place is a multiple of the codec's `unit`, and so is the other unless it is the slice's end.
Raises CodecError when the body is not as it must be there.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A body of which all is known to be right, with what is dear of decoding it done: reading cannot fail.

    What is checked when it comes and used later is decoded once so.
    """

    body: bytes = field(repr=False)
    size: int  # elements
    tiles: Tiles
    unit: int
    read: Reader

    def each_tile(self, use: Callable[[int, Vector], None]) -> None:
        """Calls `use(start, values)` with each tile; from several threads.

        The values last for the call: they lie in a core's cache, and no whole vector is made of them.
        """

        def work(first: int, past: int, scratch: Vector) -> None:
            values = scratch[: past - first]
            self.read(first, past, values)
            use(first, values)

        self.tiles.each_tile(self.size, work, unit=self.unit)


@dataclass(frozen=True)
class Codec(ABC):
    """Encodes one slice, to be read from any multiple of `unit` on. Safe to use from several threads."""

    tiles: Tiles = ONE_THREAD
    """How it goes through a slice."""

    name: ClassVar[str]
    """Name and version as on the wire, for example "int4/1"."""

    unit: ClassVar[int] = TILE_ELEMENTS
    """The elements of a tile that can be read by itself."""

    @abstractmethod
    def most_bytes(self, num_elements: int) -> int:
        """No body for that many elements is larger: what may be allocated for one."""

    @abstractmethod
    def admits(self, body_bytes: int, num_elements: int) -> bool:
        """Whether a body for that many elements may have this size; decoding decides on the rest."""

    @abstractmethod
    def encode(self, values: Vector) -> bytes:
        """Body for finite fp32 values [n]. Raises CodecError with the index of one that is not finite.

        Equal values give equal bytes on one machine, which is all that is asked of an encoder.
        """

    @abstractmethod
    def reader(self, body: bytes | memoryview, num_elements: int) -> Reader:
        """Reads parts of what `decode` returns. Raises CodecError when the body's head is wrong.

        It allocates nothing by `num_elements` before it has checked the body's size.
        """

    def decode(self, body: bytes | memoryview, num_elements: int) -> Vector:
        """Values [num_elements], bit-equal on every machine for equal bodies.

        Raises CodecError unless the body is as it must be and all values are finite.
        """
        read = self.reader(body, num_elements)
        values = np.empty(num_elements, dtype=np.float32)
        self.tiles.each_run(
            num_elements,
            lambda first, past: read(first, past, values[first:past]),
            unit=self.unit,
        )
        return values

    def opened(self, body: bytes, num_elements: int) -> Opened:
        """What `decode` returns, tile by tile. Raises CodecError where `decode` does, now and not later."""
        found = self._readable(body, num_elements, self.reader(body, num_elements))
        found.each_tile(lambda start, values: None)
        return found

    def encoded(self, values: Vector) -> Opened:
        """What `encode` returns, to be read as its receivers will: the encoder need not decode for it."""
        body = self.encode(values)
        return self._readable(body, values.size, self.reader(body, values.size))

    def _readable(self, body: bytes, num_elements: int, read: Reader) -> Opened:
        return Opened(body=body, size=num_elements, tiles=self.tiles, unit=self.unit, read=read)


class FixedSize(Codec):
    """A codec whose bodies have one size for each number of elements: heads of blocks, then values' bits."""

    bits: ClassVar[int]  # of a value; the last byte is padded
    block: ClassVar[int] = 1  # values that share a head; the last block may be short
    head_bytes: ClassVar[int] = 0  # of a block

    def encoded_bytes(self, num_elements: int) -> int:
        """Exact size of the body for a slice, which has at least one element."""
        return self._bytes_of_heads(num_elements) + (num_elements * self.bits + 7) // 8

    def _bytes_of_heads(self, num_elements: int) -> int:
        return -(-num_elements // self.block) * self.head_bytes

    def split(self, body: bytes | memoryview, num_elements: int) -> tuple[Vector, Bytes]:
        """The numbers in the heads of a body, in a row, and the bytes of its values; neither can be written.

        Raises CodecError when the body has another size.
        """
        raw = check_body(body, codec=self, num_elements=num_elements)
        heads, values = np.split(raw, [self._bytes_of_heads(num_elements)])
        return read_only(heads.view("<f4").astype(np.float32)), values

    def most_bytes(self, num_elements: int) -> int:
        """The one size."""
        check_num_elements(num_elements)
        return self.encoded_bytes(num_elements)

    def admits(self, body_bytes: int, num_elements: int) -> bool:
        """Whether this is the one size."""
        return body_bytes == self.most_bytes(num_elements)


def check_values(values: Vector) -> None:
    """Raises CodecError unless these are fp32 values in one dimension, at least one of them."""
    if values.dtype != np.float32 or values.ndim != 1:
        raise CodecError(
            f"a slice is one row of float32, not {values.dtype} of shape {values.shape}"
        )
    check_num_elements(values.size)


def check_num_elements(num_elements: int) -> None:
    """Raises CodecError for sizes that no slice has."""
    if num_elements < 1:
        raise CodecError(f"a slice has at least one element, not {num_elements}")


def check_body(body: bytes | memoryview, *, codec: Codec, num_elements: int) -> Bytes:
    """The body's bytes; raises CodecError when it has no size of this codec.

    Call it before allocating anything by `num_elements`.
    """
    raw = np.frombuffer(body, dtype=np.uint8) if len(body) else np.empty(0, dtype=np.uint8)
    if not codec.admits(raw.size, num_elements):
        raise CodecError(
            f"a body of {raw.size} bytes cannot be {codec.name}, which has "
            f"{'at most ' if not isinstance(codec, FixedSize) else ''}"
            f"{codec.most_bytes(num_elements)} here"
        )
    raw.flags.writeable = False  # like bytes, also when it lies in memory that is not
    return raw


@kernel
def first_not_finite(values: Vector) -> int:
    """The index of the first value that is infinity or NaN, or ALL_RIGHT."""
    bits = values.view(np.uint32)
    for start in range(0, bits.size, 1024):
        part = bits[start : start + 1024]
        largest = np.uint32(0)
        for i in range(part.size):
            largest = max(largest, np.uint32(part[i] & 0x7FFF_FFFF))
        if largest >= 0x7F80_0000:
            for i in range(part.size):
                if part[i] & 0x7FFF_FFFF >= 0x7F80_0000:
                    return start + i
    return ALL_RIGHT


def refuse_not_finite(values: Vector, *, start: int) -> None:
    """Raises CodecError with the index of the first of these values that is not finite.

    `start` is their place in the slice.
    """
    first = first_not_finite(read_only(values))
    if first != ALL_RIGHT:
        raise CodecError(
            f"value {start + first} of the slice is {values[first]}, which no codec carries"
        )
