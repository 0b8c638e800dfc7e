"""The files of a shard: tokens, offsets of documents, and a bit for each token that is learned.

They are written and read here and nowhere else. Where they lie, and who checks them, is for Files.
"""

import os
from array import array
from pathlib import Path
from typing import IO, Literal, Protocol

import blake3
import numpy as np
import numpy.typing as npt

from node.island.data.manifest import OFFSET_BYTES, PIECE_BYTES, FileEntry, ShardEntry
from node.island.data.tokenizing import Encoded
from protocol.files.durable import refusing

Bytes = npt.NDArray[np.uint8]
Bits = npt.NDArray[np.bool_]
Offsets = npt.NDArray[np.int64]

_OFFSET = np.dtype(f"<i{OFFSET_BYTES}")
"""A manifest counts below 2**62, so the sign is never needed."""

_WRITTEN_BYTES = 256 << 10
"""Of bits that are all set, at a time."""


def token_bytes_of(vocab_size: int) -> Literal[1, 2, 4]:
    """The least size of a token that holds every number of a vocabulary."""
    return 1 if vocab_size <= 1 << 8 else 2 if vocab_size <= 1 << 16 else 4


class DigestedFile:
    """A new file whose pieces are digested as they are written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hasher = blake3.blake3()
        self._in_piece = 0
        self._pieces: list[str] = []
        self._num_bytes = 0
        with refusing(path):
            self._file: IO[bytes] = path.open("wb")

    def write(self, data: bytes | memoryview) -> None:
        """Adds to the file; raises SystemRefusedError when the disk is full."""
        left = memoryview(data).cast("B")
        self._num_bytes += len(left)
        with refusing(self._path):
            self._file.write(left)
        while len(left):
            own = left[: PIECE_BYTES - self._in_piece]
            self._hasher.update(own)
            self._in_piece += len(own)
            left = left[len(own) :]
            if self._in_piece == PIECE_BYTES:
                self._end_piece()

    def close(self) -> FileEntry:
        """Makes the file durable."""
        if self._in_piece:
            self._end_piece()
        with refusing(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file.close()
        return FileEntry(bytes=self._num_bytes, pieces=tuple(self._pieces))

    def _end_piece(self) -> None:
        self._pieces.append(self._hasher.hexdigest())
        self._hasher, self._in_piece = blake3.blake3(), 0


class _Bits:
    """A bit for each token, written once one of them is not set."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: DigestedFile | None = None
        self._rest: npt.NDArray[np.bool_] = np.empty(0, np.bool_)
        self._num_before = 0  # tokens of which all bits are set

    def add(self, counted: npt.NDArray[np.bool_] | None, num_tokens: int) -> None:
        if self._file is None:
            if counted is None or counted.all():
                self._num_before += num_tokens
                return
            self._file = DigestedFile(self._path)
            whole, more = divmod(self._num_before, 8)
            for start in range(0, whole, _WRITTEN_BYTES):
                self._file.write(b"\xff" * min(_WRITTEN_BYTES, whole - start))
            self._rest = np.ones(more, np.bool_)
        own = np.ones(num_tokens, np.bool_) if counted is None else counted
        bits = np.concatenate((self._rest, own))
        whole = len(bits) // 8 * 8
        self._file.write(np.packbits(bits[:whole], bitorder="little").tobytes())
        self._rest = bits[whole:]

    def close(self) -> FileEntry | None:
        if self._file is None:
            return None
        self._file.write(np.packbits(self._rest, bitorder="little").tobytes())
        return self._file.close()


def as_offsets(offsets: Offsets) -> bytes:
    """What a file of offsets holds."""
    return offsets.astype(_OFFSET).tobytes()


class ShardWriter:
    """Writes documents one after the other; its files are NAME.tokens, NAME.offsets and NAME.mask."""

    def __init__(self, folder: Path, name: str, *, token_bytes: int) -> None:
        self._name = name
        self._dtype = np.dtype(f"<u{token_bytes}")
        self._tokens = DigestedFile(folder / f"{name}.tokens")
        self._bits = _Bits(folder / f"{name}.mask")
        self._folder = folder
        self._offsets = array("Q", [0])
        self.num_tokens = 0
        self._num_counted = 0
        self._text_bytes = 0

    def add(self, encoded: Encoded) -> None:
        """One document."""
        num_tokens = len(encoded.tokens)
        counted = encoded.counted
        self._tokens.write(encoded.tokens.astype(self._dtype).tobytes())
        self._bits.add(counted, num_tokens)
        self.num_tokens += num_tokens
        self._num_counted += encoded.num_counted
        self._text_bytes += encoded.text_bytes
        self._offsets.append(self.num_tokens)

    def add_text_bytes(self, num_bytes: int) -> None:
        """Of documents that were added without theirs."""
        self._text_bytes += num_bytes

    def close(self) -> tuple[ShardEntry, dict[str, FileEntry]]:
        """The shard and its files, which are durable now."""
        offsets = DigestedFile(self._folder / f"{self._name}.offsets")
        offsets.write(as_offsets(np.array(self._offsets, np.int64)))
        files = {
            f"{self._name}.tokens": self._tokens.close(),
            f"{self._name}.offsets": offsets.close(),
        }
        mask = self._bits.close()
        if mask is not None:
            files[f"{self._name}.mask"] = mask
        return ShardEntry(
            tokens=f"{self._name}.tokens",
            num_tokens=self.num_tokens,
            num_counted=self._num_counted,
            offsets=f"{self._name}.offsets",
            mask=None if mask is None else f"{self._name}.mask",
            num_documents=len(self._offsets) - 1,
            text_bytes=self._text_bytes,
        ), files


class Files(Protocol):
    """The files of a manifest, wherever they lie."""

    def read(self, name: str, start: int, stop: int) -> Bytes:
        """Bytes of a file, checked. Raises BadDataError where they are damaged."""


class WrittenFiles:
    """Files of a folder that this program has just written, and nobody has to check; implements Files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mapped: dict[str, Bytes] = {}

    def read(self, name: str, start: int, stop: int) -> Bytes:
        """See Files."""
        if (mapped := self._mapped.get(name)) is None:
            mapped = self._mapped[name] = np.memmap(self._folder / name, np.uint8, mode="r")
        return mapped[start:stop]


class ShardReader:
    """Reads shards out of their files. Raises what Files raises."""

    def __init__(self, files: Files, *, token_bytes: int) -> None:
        self._files = files
        self._dtype = np.dtype(f"<u{token_bytes}")

    def tokens(self, shard: ShardEntry, start: int, stop: int) -> npt.NDArray[np.unsignedinteger]:
        """Tokens of a shard, counted from its first."""
        size = self._dtype.itemsize
        first, last = (shard.first + start) * size, (shard.first + stop) * size
        return self._files.read(shard.tokens, first, last).view(self._dtype)

    def counted(self, shard: ShardEntry, start: int, stop: int) -> Bits | None:
        """Which of these tokens are learned; None where the shard has no mask: all of them."""
        if shard.mask is None:
            return None
        first, last = shard.first + start, shard.first + stop
        packed = self._files.read(shard.mask, first // 8, -(-last // 8))
        bits = np.unpackbits(packed, bitorder="little")[first % 8 :]
        return bits[: stop - start].astype(np.bool_)

    def offsets(self, shard: ShardEntry) -> Offsets | None:
        """Where documents begin, and the end [documents + 1]; None where nobody has said."""
        if shard.offsets is None:
            return None
        raw = self._files.read(shard.offsets, 0, offsets_bytes(shard.num_documents))
        return raw.view(_OFFSET)  # not copied: a shard may have millions, and each sample asks


def offsets_bytes(num_documents: int) -> int:
    """The size of a file of offsets."""
    return (num_documents + 1) * OFFSET_BYTES
