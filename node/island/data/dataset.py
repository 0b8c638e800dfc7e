"""What a rank asks for: samples by number, and which one a place in the order is; bytes of text as samples.

Where samples lie together by the thousand, in pieces of files that are fetched, the order takes them
together: a stretch of places draws from WINDOW of such groups, chosen over all of the data, until they
are used up. So what a node leases in a round needs a few pieces, not all.

The order is endless: every `num_samples` places are one epoch, each epoch in an order of its own.
Nodes with the same data have the same order, so places leased to one node are samples that no
other trains in that epoch. Each place is computed by itself: nothing is kept that grows with the
number of samples.
"""

import glob
import math
import os
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import blake3
import numpy as np
import numpy.typing as npt

from node.island.data.manifest import Split
from node.island.data.places import before_wildcards
from protocol.errors import NoInputError
from protocol.files.durable import expanded
from protocol.run.run_spec import DataSection
from protocol.wire.rounds import CorpusSummary, Digest

Tree = Any
"""A tensor, or a tuple, list or dictionary of trees: what torch collates of a function's samples.

The first dimension of its tensors is the samples."""

Tokens = npt.NDArray[np.int64]


Indices = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Samples as a model takes them."""

    tokens: Tokens  # [B, T + 1]; all but the last are the input
    counted: npt.NDArray[np.bool_] | None = None  # [B, T]: to be predicted; None: everything
    documents: npt.NDArray[np.int32] | None = None  # [B, T + 1], counted from 0 in each row


class Dataset(Protocol):
    """Two splits of samples. A sample is the same on all nodes whose summary has the same digest."""

    @property
    def num_samples(self) -> int:
        """Samples of the training split."""

    @property
    def num_held_out_samples(self) -> int:
        """Samples of the held-out split, which no node trains on."""

    @property
    def num_together(self) -> int:
        """Neighbouring samples that are as near as one: orders take them together; 1 if all are near."""
        return 1

    def summary(self) -> CorpusSummary:
        """What the coordinator is told."""

    def batch(self, split: Split, indices: Indices) -> Batch | Tree:
        """Samples of a split by number: tokens, or what a function gives. Raises BadDataError."""

    def held_out_by_source(self, indices: Indices) -> Mapping[str, Indices]:
        """Held-out samples by the names of their sources; those of no named one are ""."""
        return {"": indices}

    def expect(self, split: Split, indices: Indices) -> None:
        """Says which samples come next, so that what is far can be on its way; nothing if all are near."""
        return

    def num_counted(self, split: Split, indices: Indices) -> int:
        """Tokens of these samples that are to be predicted; 0 where masks leave none."""


NUM_PASSES = 10
"""Passes of the Feistel network. Few samples make small halves, which take more than the customary 4."""


WINDOW = 64
"""Groups that neighbouring places draw from. Fewer would train on less of the data at a time."""


def held_out_choice(most: int, num_samples: int) -> Indices:
    """Which held-out samples an evaluation takes: at most so many, spread evenly, each time the same."""
    count = min(most, num_samples)
    return np.arange(count, dtype=np.int64) * num_samples // count


class SampleOrder:
    """A seeded permutation of the samples for each epoch."""

    def __init__(self, *, seed: int, num_samples: int, num_together: int = 1) -> None:
        """`num_together` neighbouring samples lie together; 1 where each is as near as any other."""
        if num_samples < 1:
            raise ValueError("a sample order needs at least one sample")
        self._seed = seed
        self._num_samples = num_samples
        self._num_windows = 1 if num_together == 1 else -(-num_samples // (WINDOW * num_together))
        self._group = -(-num_samples // (WINDOW * self._num_windows))

    @classmethod
    def of(cls, seed: int, dataset: Dataset) -> "SampleOrder":
        """The order in which a run with this seed trains on a dataset."""
        return cls(seed=seed, num_samples=dataset.num_samples, num_together=dataset.num_together)

    def indices(self, first: int, count: int) -> Indices:
        """Samples at the places first, …, first + count − 1: [count], each below num_samples."""
        parts: list[Indices] = [np.empty(0, np.int64)]
        place, end = first, first + count
        while place < end:
            epoch, start = divmod(place, self._num_samples)
            stop = min(self._num_samples, start + end - place)
            places = np.arange(start, stop, dtype=np.uint64)
            parts.append(self._samples_at(places, epoch).astype(np.int64))
            place += stop - start
        return np.concatenate(parts)

    def _samples_at(self, places: Words, epoch: int) -> Words:
        keys = self._keys_of(f"{self._seed}:samples:{epoch}")
        if self._num_windows == 1:
            return permuted(places, self._num_samples, keys)
        of_groups = self._keys_of(f"{self._seed}:groups:{epoch}")
        found = self._in_windows(places, keys, of_groups)
        while (beyond := np.flatnonzero(found >= self._num_samples)).size:
            found[beyond] = self._in_windows(found[beyond], keys, of_groups)
        return found

    def _in_windows(self, places: Words, keys: Words, of_groups: Words) -> Words:
        """A permutation of all windows' places, which are a few more than there are samples."""
        size = WINDOW * self._group
        window, place = np.divmod(places, np.uint64(size))
        within = permuted(place, size, keys[:, None] ^ _mixed(window + np.uint64(1)))
        group, sample = np.divmod(within, np.uint64(self._group))
        groups = permuted(window * np.uint64(WINDOW) + group, WINDOW * self._num_windows, of_groups)
        return groups * np.uint64(self._group) + sample

    @staticmethod
    def _keys_of(text: str) -> Words:
        return np.frombuffer(blake3.blake3(text.encode()).digest(length=8 * NUM_PASSES), "<u8")


def permuted(places: Words, num_samples: int, keys: Words) -> Words:
    """Where a keyed permutation of 0, …, num_samples − 1 takes these places.

    Keys are [passes] or, for places with a permutation each, [passes, places].

    A Feistel network over pairs of digits to the base √num_samples, and again for what falls beyond
    the last sample (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains", section 5,
    cycle walking): it takes less than two turns on average from five samples on.
    """
    side = np.uint64(math.isqrt(num_samples - 1) + 1)
    found = _in_square(places, side, keys)
    while (beyond := np.flatnonzero(found >= num_samples)).size:
        own = keys if keys.ndim == 1 else keys[:, beyond]
        found[beyond] = _in_square(found[beyond], side, own)
    return found


def _in_square(places: Words, side: np.uint64, keys: Words) -> Words:
    """A permutation of 0, …, side² − 1."""
    left, right = np.divmod(places, side)
    for key in keys:
        left, right = right, (left + _mixed(right ^ key) % side) % side
    return left * side + right


def _mixed(words: Words) -> Words:
    """Each bit of a word depends on each (Stafford's variant 13, which ends SplitMix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


# The text that a node trains on, as bytes in memory, and the part that it never trains on.
#
# A file belongs to the held-out split by the hash of its name, so every node that has the file puts
# it there, whatever else it has. Where whole files cannot be divided like that (one big file, say),
# blocks of files are held out instead, by the hash of name and place; then nodes agree on the split
# only when they have the same text. Either way the two splits are separate arrays: no sample reaches
# from one into the other.
#
# A sample is a window of context + 1 bytes; windows begin every `context` bytes, so each byte is
# predicted once. Pieces of text that were not neighbours are joined with a zero byte.


Text = npt.NDArray[np.uint8]

SMALL_CORPUS_BYTES = 2 << 20
BLOCK_BYTES = 64 << 10
BLOCK_BYTES_OF_SMALL_CORPUS = 4 << 10

_FOLDERS_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFile:
    """A file of the corpus; the name, not the path, is what nodes have in common."""

    name: str  # relative, with forward slashes
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """A part of one file, from `start` on."""

    name: str
    path: Path
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Corpus(Dataset):
    """Both splits in memory."""

    training: Text
    held_out: Text
    context: int
    digest: Digest  # of the names and bytes of the training split
    held_out_digest: Digest | None = None  # likewise

    @property
    def num_samples(self) -> int:
        """Samples of the training split."""
        return _num_windows(len(self.training), self.context)

    @property
    def num_held_out_samples(self) -> int:
        """Samples of the held-out split."""
        return _num_windows(len(self.held_out), self.context)

    def summary(self) -> CorpusSummary:
        """What the coordinator is told."""
        return CorpusSummary(
            digest=self.digest,
            num_samples=self.num_samples,
            num_bytes=len(self.training),
            num_held_out_tokens=len(self.held_out),
            num_held_out_bytes=len(self.held_out),
            held_out_digest=self.held_out_digest,
        )

    def batch(self, split: Split, indices: Indices) -> Batch:
        """See Dataset."""
        text = self.training if split == "training" else self.held_out
        return Batch(tokens=self.windows(text, indices))

    def num_counted(self, split: Split, indices: Indices) -> int:
        """See Dataset."""
        return len(indices) * self.context

    def windows(self, split: Text, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Samples of a split by number: tokens [len(indices), context + 1]."""
        places = indices[:, None] * self.context + np.arange(self.context + 1)
        windows: npt.NDArray[np.int64] = split[places].astype(np.int64)
        return windows


def read_corpus(data: DataSection, *, context: int, batch: int, folder: Path) -> Corpus:
    """Reads and splits the text; relative paths start at `folder`.

    Raises NoInputError when a path or glob matches nothing, a file cannot be read, or there are
    fewer samples than one batch.
    """
    files = _files_of(data, folder)
    texts = {file.path: _read(file.path) for file in files}
    sizes = {path: len(text) for path, text in texts.items()}
    training, held_out = _split(_whole(files, sizes), data.held_out)
    corpus = Corpus(
        training=_joined(training, texts),
        held_out=_joined(held_out, texts),
        context=context,
        digest=_digest_of(training, texts),
        held_out_digest=_digest_of(held_out, texts),
    )
    _check_enough(len(corpus.training), len(corpus.held_out), context=context, batch=batch)
    return corpus


def _files_of(data: DataSection, folder: Path) -> list[TextFile]:
    return stdlib_files() if data.source == "python-stdlib" else text_files(data.paths, folder)


def sizes_of_splits(files: Sequence[TextFile], held_out: float) -> tuple[int, int]:
    """Bytes that `read_corpus` would train on and hold out, by the sizes of the files: none is read."""
    sizes = {file.path: file.path.stat().st_size for file in files}
    training, kept_back = _split(_whole(files, sizes), held_out)
    return _num_joined(training), _num_joined(kept_back)


def look_at_text(data: DataSection, *, context: int, batch: int, folder: Path) -> None:
    """Raises NoInputError where `read_corpus` would for too little text, or for none; reads no file."""
    training, held_out = sizes_of_splits(_files_of(data, folder), data.held_out)
    _check_enough(training, held_out, context=context, batch=batch)


def _check_enough(training: int, held_out: int, *, context: int, batch: int) -> None:
    """Of splits of so many bytes. Raises NoInputError for less than a batch, or nothing held out."""
    samples, kept_back = _num_windows(training, context), _num_windows(held_out, context)
    if samples < batch or kept_back < 1:
        raise NoInputError(
            f"the text has {training:,} bytes to train on and {held_out:,} held out: {samples} and "
            f"{kept_back} samples of {context + 1} bytes, but one batch takes {batch} and evaluation "
            "at least 1",
            next_step="add text to [data] paths, or lower [model] context or [inner] batch",
        )


def stdlib_files() -> list[TextFile]:
    """The running Python's standard library in source form, without its tests: about 11 MB."""
    folder = Path(sysconfig.get_path("stdlib"))
    names: list[str] = []
    for parent, subfolders, files in os.walk(folder):
        subfolders[:] = set(subfolders) - _FOLDERS_LEFT_OUT  # not even looked into
        place = Path(parent).relative_to(folder)
        names += [(place / name).as_posix() for name in files if name.endswith(".py")]
    names.sort()
    if not names:
        raise NoInputError(
            f"this Python has no source of its standard library under {folder}",
            next_step='install it, or set [data] source = "text" and paths',
        )
    return [TextFile(name=name, path=folder / name) for name in names]


def text_files(patterns: Iterable[str], folder: Path) -> list[TextFile]:
    """Files that the patterns match, each once, sorted by name.

    A name is relative to the part of its pattern before the first wildcard, so it does not depend
    on where a contributor keeps the text.
    """
    found: dict[Path, TextFile] = {}
    for pattern in patterns:
        place = expanded(pattern)
        whole = folder / place
        if whole.is_file():  # also when its name looks like a glob
            matches, root = [whole], whole.parent
        else:
            matches = [Path(match) for match in _globbed(folder, place)]
            root = folder / before_wildcards(place)
        files = [path for path in matches if path.is_file()]
        if not files:
            what = "matches only folders" if matches else "matches no file"
            raise NoInputError(
                f"{pattern!r} of [data] paths {what} (looked for {whole})",
                next_step="start where the text lies, put it there, or name it: data in node.toml, or 'atoll "
                "node start --data PATH'; 'folder/**/*.txt' takes all below a folder",
            )
        for path in files:
            name = path.relative_to(root).as_posix()
            found.setdefault(path.resolve(), TextFile(name=name, path=path))
    return sorted(found.values(), key=lambda file: (file.name, file.path))


def _globbed(folder: Path, pattern: Path) -> Iterator[str]:
    # Not Path.glob, which takes no absolute patterns.
    whole = Path(glob.escape(str(folder))) / pattern
    return glob.iglob(str(whole), recursive=True)  # noqa: PTH207


_NO_TEXT = {
    ".jsonl": "a record a line",
    ".json": "records",
    ".csv": "a table",
    ".tsv": "a table",
    ".parquet": "a table",
    ".gz": "compressed",
    ".zst": "compressed",
    ".zip": "an archive",
    ".bin": "binary",
}
"""Files that hold something else than the text to be learned, by the ends of their names."""

_LOOKED_AT_BYTES = 1 << 16


def _read(path: Path) -> bytes:
    """The text of a file. Raises NoInputError where it cannot be read, or is none."""
    text = _bytes_of(path)
    refuse_other_than_text(path, text[:_LOOKED_AT_BYTES])
    return text


def refuse_other_than_text(path: Path, beginning: bytes = b"") -> None:
    """Raises NoInputError for a file that is no text, by its name or its first bytes."""
    what = _NO_TEXT.get(path.suffix.lower())
    if what is None and b"\0" in beginning:
        what = "binary: it has zero bytes"
    if what is not None:
        raise NoInputError(
            f"{path} is no text but {what}, and would be learned byte by byte as it stands",
            next_step="write its text into files that end in .txt, and name those in [data] paths or as data",
        )


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise NoInputError(
            f"{path} cannot be read: {error.strerror}",
            next_step="make it readable, or leave it out",
        ) from error


def _whole(files: Iterable[TextFile], sizes: Mapping[Path, int]) -> list[_Piece]:
    return [
        _Piece(name=file.name, path=file.path, start=0, num_bytes=sizes[file.path])
        for file in files
    ]


def _split(pieces: list[_Piece], held_out: float) -> tuple[list[_Piece], list[_Piece]]:
    """Training and held-out pieces: by file when that comes out near the share asked for."""
    num_bytes = sum(piece.num_bytes for piece in pieces)
    training, kept_back = _divided(pieces, held_out)
    share = sum(piece.num_bytes for piece in kept_back) / max(1, num_bytes)
    if held_out / 4 <= share <= min(4 * held_out, 0.6):
        return training, kept_back
    block_bytes = BLOCK_BYTES if num_bytes >= SMALL_CORPUS_BYTES else BLOCK_BYTES_OF_SMALL_CORPUS
    return _divided(list(_blocks(pieces, block_bytes)), held_out)


def _blocks(pieces: Iterable[_Piece], block_bytes: int) -> Iterator[_Piece]:
    for piece in pieces:
        for start in range(0, piece.num_bytes, block_bytes):
            num_bytes = min(block_bytes, piece.num_bytes - start)
            yield _Piece(name=piece.name, path=piece.path, start=start, num_bytes=num_bytes)


def _divided(pieces: list[_Piece], held_out: float) -> tuple[list[_Piece], list[_Piece]]:
    hashes = [_unit_hash(piece) for piece in pieces]
    if len(pieces) > 1:  # of a few pieces one is held out all the same, and one is not
        held_out = min(max(held_out, min(hashes) + 1e-12), max(hashes))
    training = [piece for piece, value in zip(pieces, hashes, strict=True) if value >= held_out]
    kept_back = [piece for piece, value in zip(pieces, hashes, strict=True) if value < held_out]
    return training, kept_back


def _unit_hash(piece: _Piece) -> float:
    """In [0, 1), from the name, and from the place when it is a later block of the file."""
    key = os.fsencode(piece.name) + (f"\0{piece.start}".encode() if piece.start else b"")
    return int.from_bytes(blake3.blake3(key).digest(length=8), "little") / 2**64


def _joins(pieces: list[_Piece]) -> Iterator[tuple[_Piece, bool]]:
    """The pieces in order, each with whether text was left out, or a file ended, before it."""
    for before, piece in zip([None, *pieces], pieces, strict=False):
        is_next = before is not None and before.name == piece.name
        is_gap = before is not None and not (
            is_next and before.start + before.num_bytes == piece.start
        )
        yield piece, is_gap


def _num_joined(pieces: list[_Piece]) -> int:
    """Bytes of the joined pieces."""
    return sum(piece.num_bytes + is_gap for piece, is_gap in _joins(pieces))


def _joined(pieces: list[_Piece], texts: Mapping[Path, bytes]) -> Text:
    """The pieces in order, with a zero byte wherever they were no neighbours."""
    parts: list[bytes] = []
    for piece, is_gap in _joins(pieces):
        parts += [b"\0"] * is_gap
        parts.append(_text_of(piece, texts))
    return np.frombuffer(b"".join(parts), np.uint8)


def _text_of(piece: _Piece, texts: Mapping[Path, bytes]) -> bytes:
    return texts[piece.path][piece.start : piece.start + piece.num_bytes]


def _digest_of(pieces: list[_Piece], texts: Mapping[Path, bytes]) -> Digest:
    hasher = blake3.blake3()
    for piece in pieces:
        text_digest = blake3.blake3(_text_of(piece, texts)).digest()
        hasher.update(os.fsencode(f"{piece.name}\0{piece.start}\0") + text_digest)
    return Digest(hasher.digest())


def _num_windows(num_bytes: int, context: int) -> int:
    return max(0, (num_bytes - 1) // context)
