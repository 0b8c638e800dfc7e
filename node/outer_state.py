"""The outer state in shared memory: where island and exchange meet.

One fp32 vector holds the whole model, tensor after tensor in canonical order: `parameters`, the global
parameters that ranks adopt and only exchange writes. Beside it in shared memory is `published`, which
ranks write and only exchange reads: the local parameters of the fragment that was published last, as
long as the largest fragment. The outer optimizer's momentum never leaves the daemon, so it is ordinary
memory.
"""

import errno
import mmap
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

import blake3
import numpy as np
import numpy.typing as npt
import structlog

from protocol.errors import SystemRefusedError
from protocol.files.leftovers import PREFIX, Held, remove_leftovers, temporary_directory
from protocol.run.models import Layout
from protocol.wire.rounds import Digest

log = structlog.get_logger()

Vector = npt.NDArray[np.float32]

SHARED_MEMORY = Path("/dev/shm")

PIECE_ELEMENTS = 1 << 19
"""2 MiB: what of the outer state is digested by itself. Fixed in the protocol."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedNames:
    """What a rank needs to find the shared vectors."""

    parameters: str
    published: str
    num_elements: int  # of the parameters
    published_elements: int  # of the largest fragment
    process_id: int  # who has made them
    descriptors: tuple[int, int]  # that it has of both

    @property
    def sizes(self) -> tuple[int, int]:
        """Elements of both vectors."""
        return self.num_elements, self.published_elements

    def open_parameters(self, flags: int) -> int:
        """A descriptor of the parameters' memory."""
        return self._open(self.parameters, self.descriptors[0], flags)

    def open_published(self, flags: int) -> int:
        """A descriptor of the memory of what is published."""
        return self._open(self.published, self.descriptors[1], flags)

    def _open(self, name: str, descriptor: int, flags: int) -> int:
        try:
            return os.open(SHARED_MEMORY / name, flags | os.O_CLOEXEC)
        except FileNotFoundError:
            # Systemd removes what a user has there when they log out (RemoveIPC in logind.conf(5)), and a
            # node that nohup or tmux keeps goes on.
            return os.open(f"/proc/{self.process_id}/fd/{descriptor}", flags | os.O_CLOEXEC)


class SharedVectors:
    """The two vectors of the outer state in shared memory. Create in the daemon, attach in ranks."""

    def __init__(
        self,
        *,
        names: SharedNames,
        blocks: tuple[shared_memory.SharedMemory | mmap.mmap, ...],
        held: tuple[Held, ...] = (),
    ) -> None:
        self.names = names
        self._blocks = blocks
        self._held = held  # by whom the blocks were made
        views: list[Vector] = [
            np.ndarray(
                size, dtype=np.float32, buffer=block if isinstance(block, mmap.mmap) else block.buf
            )
            for size, block in zip(names.sizes, blocks, strict=True)
        ]
        self.parameters: Vector = views[0]
        self.published: Vector = views[1]

    @classmethod
    def create(cls, num_elements: int, published_elements: int | None = None) -> "SharedVectors":
        """Allocates both vectors, zeroed; refuses when the machine has too little shared memory.

        `published_elements` is the size of the largest fragment; None: the model is one fragment.
        """
        sizes = (num_elements, published_elements or num_elements)
        blocks, held = _allocated([4 * size for size in sizes])
        names = SharedNames(
            parameters=blocks[0].name,
            published=blocks[1].name,
            num_elements=sizes[0],
            published_elements=sizes[1],
            process_id=os.getpid(),
            descriptors=(held[0].descriptor, held[1].descriptor),
        )
        return cls(names=names, blocks=blocks, held=held)

    @classmethod
    def attach(cls, names: SharedNames) -> "SharedVectors":
        """Opens the vectors that the daemon created."""
        openings = (names.open_parameters, names.open_published)
        blocks = []
        for size, opening in zip(names.sizes, openings, strict=True):
            descriptor = opening(os.O_RDWR)
            try:
                blocks.append(mmap.mmap(descriptor, 4 * size))
            finally:
                os.close(descriptor)
        return cls(names=names, blocks=tuple(blocks))

    def close(self) -> None:
        """Gives the memory back; the daemon's close also removes it from the system."""
        del self.parameters, self.published
        for block in self._blocks:
            block.close()
            if isinstance(block, shared_memory.SharedMemory):
                _unlink(block)
        for held in self._held:
            held.release()


def require_shared_memory(layout: Layout) -> None:
    """Raises SystemRefusedError where the machine has less than the outer state takes, whoever has it now."""
    there = os.statvfs(SHARED_MEMORY)
    needed, has = (
        4 * (layout.num_elements + layout.largest_fragment),
        there.f_blocks * there.f_frsize,
    )
    if needed > has:
        raise _too_little(needed, f"it has {has:,}")


def _too_little(needed: int, there: str) -> SystemRefusedError:
    return SystemRefusedError(
        f"the outer state needs {needed:,} bytes of {SHARED_MEMORY} and {there}",
        next_step="enlarge it (docker run --shm-size …) or choose a smaller model",
    )


def _allocated(
    sizes: Sequence[int],
) -> tuple[tuple[shared_memory.SharedMemory, ...], tuple[Held, ...]]:
    """New blocks of shared memory whose every page is there, marked as those of a living process.

    Python only sets a length, and a page that cannot be had when it is first touched ends the
    process by SIGBUS, whoever took the memory meanwhile.
    """
    free = os.statvfs(SHARED_MEMORY)
    free_bytes = free.f_bavail * free.f_frsize
    blocks: list[shared_memory.SharedMemory] = []
    held: list[Held] = []
    try:
        if sum(sizes) > free_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        for num_bytes in sizes:
            block, mark = _marked_block(num_bytes)
            blocks.append(block)
            held.append(mark)
            with (SHARED_MEMORY / block.name).open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError as error:
        for block in blocks:
            block.close()
            _unlink(block)
        if error.errno != errno.ENOSPC:
            raise SystemRefusedError(
                f"shared memory for the outer state cannot be had: {error.strerror}",
                next_step=f"make {SHARED_MEMORY} a tmpfs that you may write to",
            ) from error
        raise _too_little(sum(sizes), f"{free_bytes:,} are free") from error
    return tuple(blocks), tuple(held)


def _marked_block(num_bytes: int) -> tuple[shared_memory.SharedMemory, Held]:
    """A new block; anew where another start on this machine takes it for left over before it is marked."""
    while True:
        name = f"{PREFIX}{secrets.token_hex(8)}"
        block = shared_memory.SharedMemory(name=name, create=True, size=num_bytes)
        try:
            return block, Held(SHARED_MEMORY / block.name)
        except FileNotFoundError:
            block.close()
            _unlink(block)


def _unlink(block: shared_memory.SharedMemory) -> None:
    """Removes its name, which may be gone: a logout takes names away, and so does a start beside ours."""
    try:
        block.unlink()
    except FileNotFoundError:
        # Python's tracker would take it for forgotten: it knows it by the name that shm_open has.
        resource_tracker.unregister(f"/{block.name}", "shared_memory")


def tell_leftovers() -> None:
    """Removes the shared memory and temporary folders of processes that were killed, and logs it."""
    for path in remove_leftovers(temporary_directory(), SHARED_MEMORY):
        log.info("removed what a killed process has left", path=str(path))


EachRun = Callable[[int, Callable[[int, int], None]], object]
"""Calls the work with runs, from a first number up to another, that cover so many things."""


class OuterDigest:
    """The digest of an outer state, of which only what has changed is read again.

    The state's bytes are those of the global parameters, then of the momentum, as little-endian
    fp32. They are cut into pieces of 2 MiB, of which the last may be shorter. The digest is the
    BLAKE3 of the pieces' BLAKE3s, one after the other; of a single piece, it is that piece's.
    """

    def __init__(
        self, parameters: Vector, momentum: Vector, *, each_run: EachRun | None = None
    ) -> None:
        """`each_run` spreads pieces over threads; BLAKE3 of one piece gains nothing by several."""
        self._vectors = (parameters, momentum)
        self._num_elements = parameters.size
        self._each_run = each_run or (lambda count, work: work(0, count))
        self._pieces = [b""] * -(-2 * self._num_elements // PIECE_ELEMENTS)
        self.renew([slice(0, self._num_elements)])

    def renew(self, spans: Iterable[slice], *, has_momentum_changed: bool = True) -> None:
        """Reads these elements of both vectors again, or of the parameters alone; sets `value`."""
        stale: set[int] = set()
        for span in spans:
            for offset in (0, self._num_elements) if has_momentum_changed else (0,):
                first, past = offset + span.start, offset + span.stop
                stale.update(range(first // PIECE_ELEMENTS, -(-past // PIECE_ELEMENTS)))
        indices = sorted(stale)

        def read(first: int, past: int) -> None:
            for index in indices[first:past]:
                self._pieces[index] = self._piece(index)

        if indices:
            self._each_run(len(indices), read)
        self.value = digest_of_pieces(self._pieces)

    def _piece(self, index: int) -> bytes:
        hasher = blake3.blake3()
        first = index * PIECE_ELEMENTS
        for vector in self._vectors:
            part = vector[max(first, 0) : max(first + PIECE_ELEMENTS, 0)]
            hasher.update(part.astype("<f4", copy=False).data.cast("B"))
            first -= self._num_elements  # where the piece begins in the next vector
        return hasher.digest()


def digest_of_pieces(pieces: Sequence[bytes]) -> Digest:
    """The digest of an outer state, from those of its pieces (see OuterDigest)."""
    return Digest(pieces[0] if len(pieces) == 1 else blake3.blake3(b"".join(pieces)).digest())


def outer_digest(parameters: Vector, momentum: Vector) -> Digest:
    """Digest of a whole outer state."""
    return OuterDigest(parameters, momentum).value
