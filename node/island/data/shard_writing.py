"""One shard, written by one process: documents in, a file of tokens and its neighbours out.

Memory stays flat: documents are encoded a few at a time, and go to the disk. Rows are packed when all
documents of a shard are there, out of a mapped file: each row with a document's beginning at its own. By best
fit a document goes to the row in which it leaves the least room (Ding et al. 2024, "Fewer Truncations Improve
Language Modeling"). Only documents longer than a row are cut. What stays empty is padding, which is never
learned and counts as no token.
"""

import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Literal

import blake3
import numpy as np
import numpy.typing as npt
from pydantic import Field

from node.island.data.documents import Part, documents_of
from node.island.data.manifest import (
    OFFSET_BYTES,
    PIECE_BYTES,
    Count,
    FileEntry,
    ShardEntry,
)
from node.island.data.records import Document
from node.island.data.tokenizing import (
    ByteTokenizer,
    Encoded,
    FileTokenizer,
    Tokenizer,
    has_parts,
)
from protocol.files.durable import refusing
from protocol.run.models import Section

Lengths = npt.NDArray[np.int64]


def best_fit(lengths: Lengths, row: int) -> list[list[int]]:
    """Which pieces share a row, by number; each is at most a row long. The longest go first.

    The rows with each room that is left are kept together, and a bit for each room that some row
    has: the least that suffices is then a matter of two shifts.
    """
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(row + 1)]
    rooms = 0
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            chosen = with_room[room].pop()
            if not with_room[room]:
                rooms &= ~(1 << room)
        else:
            room, chosen = row, len(rows)
            rows.append([])
        rows[chosen].append(piece)
        left = room - length
        if left:
            with_room[left].append(chosen)
            rooms |= 1 << left
    return rows


def pack(
    folder: Path,
    shard: ShardEntry,
    name: str,
    *,
    row: int,
    token_bytes: int,
    padding: int,
) -> tuple[ShardEntry, dict[str, FileEntry]]:
    """Writes a shard again in rows of `row` tokens, in place of what it was.

    A row's first token is nobody's target, so it is not counted.
    """
    tokens = np.memmap(folder / shard.tokens, f"<u{token_bytes}", mode="r")
    assert shard.offsets is not None
    offsets = np.fromfile(folder / shard.offsets, f"<u{OFFSET_BYTES}").astype(np.int64)
    bits = None if shard.mask is None else np.memmap(folder / shard.mask, np.uint8, mode="r")
    starts, lengths = _pieces(offsets, row)
    bytes_a_token = (shard.text_bytes or 0) / max(1, shard.num_counted)
    writer = ShardWriter(folder, f"{name}.rows", token_bytes=token_bytes)
    for pieces in best_fit(lengths, row):
        for i, piece in enumerate(pieces):
            start, length = int(starts[piece]), int(lengths[piece])
            counted = np.ones(length, np.bool_) if bits is None else bits_of(bits, start, length)
            if i == 0:
                counted[0] = False
            own = tokens[start : start + length].astype(np.uint32)
            if i == len(pieces) - 1:
                missing = row - int(lengths[pieces].sum())
                own = np.append(own, np.full(missing, padding, np.uint32))
                counted = np.append(counted, np.zeros(missing, np.bool_))
            writer.add(Encoded(tokens=own, counted=counted, text_bytes=0))
    packed, files = writer.close()
    # Which bytes of text the uncounted first tokens stand for is not known to the byte.
    text_bytes = round(packed.num_counted * bytes_a_token)
    old = {shard.tokens, shard.offsets, *([shard.mask] if shard.mask else [])}
    for each in old:
        (folder / each).unlink()
    renamed = {each: each.replace(".rows.", ".") for each in files}
    for before, after in renamed.items():
        (folder / before).rename(folder / after)
    return packed.model_copy(
        update={
            "tokens": f"{name}.tokens",
            "offsets": f"{name}.offsets",
            "mask": f"{name}.mask" if packed.mask else None,
            "text_bytes": text_bytes,
        }
    ), {after: files[before] for before, after in renamed.items()}


def _pieces(offsets: Lengths, row: int) -> tuple[Lengths, Lengths]:
    """Beginnings and lengths of documents, cut where they are longer than a row."""
    sizes = np.diff(offsets)
    counts = -(-sizes // row)
    first_of_document = np.repeat(offsets[:-1], counts)
    ends = np.repeat(offsets[1:], counts)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = first_of_document + within * row
    return starts, np.minimum(starts + row, ends) - starts


ENCODED_BYTES = 256 << 10
"""Text that is encoded together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """How documents become tokens."""

    tokenizer: Path | None  # a folder with tokenizer.json; None: bytes
    end_of_document: str | None
    field: str
    held_out_below: int  # documents whose hash is less are held out
    end_held_out: float | None = None  # instead: of each document this share, at its end
    held_out_hashes: Path | None = (
        None  # of documents that files of their own hold out; see hashes_of
    )
    row: int | None  # tokens of a row, where rows are packed

    def opened(self, *, origin: Path | None = None) -> Tokenizer:
        """The tokenizer, a copy of `origin`; raises AtollError where it cannot be used."""
        if self.tokenizer is None:
            return ByteTokenizer()
        return FileTokenizer(self.tokenizer, end_of_document=self.end_of_document, origin=origin)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardJob:
    """What one process writes."""

    number: int
    parts: tuple[Part, ...]
    is_held_out: bool  # all of it

    @property
    def num_bytes(self) -> int:
        """Bytes that are read for it."""
        return sum(part.num_bytes for part in self.parts)


class InSeveral(Section):
    """Conversations that became several documents each: their template writes earlier answers otherwise."""

    num_conversations: Count = 0
    num_documents: Count = 0
    num_tokens: Count = 0  # of all these documents
    num_tokens_once: Count = 0  # of the last one of each conversation

    def plus(self, other: "InSeveral") -> "InSeveral":
        """Both together."""
        ours, theirs = self.model_dump(), other.model_dump()
        return InSeveral(**{key: ours[key] + theirs[key] for key in ours})

    @classmethod
    def of(cls, documents: list[Encoded]) -> "InSeveral":
        """What one conversation became."""
        sizes = [len(each.tokens) for each in documents]
        return cls(
            num_conversations=1,
            num_documents=len(sizes),
            num_tokens=sum(sizes),
            num_tokens_once=sizes[-1],
        )


class Named(Section):
    """Documents whose own words have the name of a special token, and where the first of them is."""

    num_texts: Count = 0  # there it is letters
    num_conversations: Count = 0  # there it is that token
    in_text: str = ""
    in_conversation: str = ""

    def plus(self, other: "Named") -> "Named":
        """Both together."""
        return Named(
            num_texts=self.num_texts + other.num_texts,
            num_conversations=self.num_conversations + other.num_conversations,
            in_text=self.in_text or other.in_text,
            in_conversation=self.in_conversation or other.in_conversation,
        )

    @classmethod
    def of(cls, document: Document, name: str) -> "Named":
        """One document."""
        example = f"{name!r} in {document.where}"
        if document.messages:
            return cls(num_conversations=1, in_conversation=example)
        return cls(num_texts=1, in_text=example)


class Receipt(Section):
    """What a finished job has written."""

    training: ShardEntry | None
    held_out: ShardEntry | None
    files: dict[str, FileEntry]
    num_documents: int  # each once, however often it is repeated
    num_empty: int  # of them: those without text, which are left out
    num_held_out_too: int  # of them: those that files of their own hold out as well; likewise
    num_answering: int  # of them: conversations, and answers to prompts
    in_several: InSeveral  # of them, too
    named: Named  # likewise
    num_unknown: int  # tokens of all documents that stand for text without a token
    num_encoded: int  # tokens of all documents, each once
    not_utf8: tuple[
        str, ...
    ]  # of documents that are taken as bytes: places of those that are no text
    num_cut: int  # pieces in training that begin within a document longer than a row
    tokens_of: dict[str, int]  # to be learned in training, for each source
    least_hash: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")] | None  # of its documents


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
            for start in range(0, whole, ENCODED_BYTES):
                self._file.write(b"\xff" * min(ENCODED_BYTES, whole - start))
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
        offsets.write(np.array(self._offsets, f"<u{OFFSET_BYTES}").tobytes())
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


def write_shard(
    job: ShardJob, encoding: Encoding, folder: Path, tell: Callable[[int], None]
) -> Receipt:
    """Writes a shard; `tell` hears of input that was read, in bytes. Raises AtollError."""
    tokenizer = encoding.opened()
    token_bytes = token_bytes_of(tokenizer.vocab_size)
    name = f"{job.number:05}"
    training = ShardWriter(folder, name, token_bytes=token_bytes)
    held_out = ShardWriter(folder, f"{name}.held-out", token_bytes=token_bytes)
    num_documents, num_empty, num_held_out_too, num_answering = 0, 0, 0, 0
    num_unknown, num_encoded = 0, 0
    not_utf8: list[str] = []
    least_hash, in_several, named = HASHES, InSeveral(), Named()
    held_out_hashes = np.empty(0, HASH_TYPE)
    if encoding.held_out_hashes is not None and not job.is_held_out:
        held_out_hashes = np.fromfile(encoding.held_out_hashes, HASH_TYPE)
    tokens_of = dict.fromkeys((part.source for part in job.parts), 0)
    for gathered in _gathered(job.parts, encoding.field, tell):
        num_documents += sum(not part.repetition for part, _ in gathered)
        num_empty += sum(not (part.repetition or document.text) for part, document in gathered)
        taken = [(part, each) for part, each in gathered if each.text and _is_taken(each, part)]
        kept = [own for own in taken if not _is_among(hash_of(own[1]), held_out_hashes)]
        num_held_out_too += sum(not part.repetition for part, _ in taken)
        num_held_out_too -= sum(not part.repetition for part, _ in kept)
        all_encoded = tokenizer.encode([document for _, document in kept])
        for (part, document), encoded in zip(kept, all_encoded, strict=True):
            value = hash_of(document)
            least_hash = min(least_hash, value)
            is_first = not part.repetition
            num_answering += has_parts(document) and is_first
            if is_first:
                if encoding.tokenizer is None and not _is_utf8(document.text):
                    not_utf8.append(document.where)
                num_encoded += sum(len(one.tokens) for one in encoded)
                num_unknown += sum(_num_of(tokenizer.unknown, one) for one in encoded)
                if (special := tokenizer.named_in(document)) is not None:
                    named = named.plus(Named.of(document, special))
            if len(encoded) > 1 and is_first:
                in_several = in_several.plus(InSeveral.of(encoded))
            is_held_out = job.is_held_out or value < encoding.held_out_below
            to_train, kept_back = ([], encoded) if is_held_out else (encoded, [])
            if encoding.end_held_out is not None:
                beginning, end = _cut(encoded[-1], encoding.end_held_out)
                to_train, kept_back = [*encoded[:-1], beginning], [end]
            for one in to_train:
                tokens_of[part.source] += one.num_counted
                training.add(one)
            if not part.repetition:  # what is measured is measured once
                for one in kept_back:
                    held_out.add(one)
    shard, files = training.close()
    num_cut = 0
    if shard.num_tokens and encoding.row:
        num_whole = shard.num_documents
        shard, files = pack(
            folder,
            shard,
            name,
            row=encoding.row,
            token_bytes=token_bytes,
            padding=tokenizer.end_of_document,
        )
        num_cut = shard.num_documents - num_whole
    trained, trained_files = _unless_empty(folder, shard, files)
    measured, measured_files = _unless_empty(folder, *held_out.close())
    return Receipt(
        training=trained,
        held_out=measured,
        files=trained_files | measured_files,
        num_documents=num_documents,
        num_empty=num_empty,
        num_held_out_too=num_held_out_too,
        num_answering=num_answering,
        in_several=in_several,
        named=named,
        num_unknown=num_unknown,
        num_encoded=num_encoded,
        not_utf8=tuple(not_utf8),
        num_cut=num_cut,
        tokens_of=tokens_of,
        least_hash=None if least_hash == HASHES else f"{least_hash:016x}",
    )


def _num_of(token: int | None, encoded: Encoded) -> int:
    return 0 if token is None else int(np.count_nonzero(encoded.tokens == token))


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _unless_empty(
    folder: Path, shard: ShardEntry, files: dict[str, FileEntry]
) -> tuple[ShardEntry | None, dict[str, FileEntry]]:
    """A shard and its files; one without tokens is none, and its files are removed."""
    if shard.num_tokens:
        return shard, files
    for each in files:
        (folder / each).unlink()
    return None, {}


HASHES = 2**64
"""Hashes of documents are less."""

HASH_TYPE = np.dtype("<u8")


def hash_of(document: Document) -> int:
    """By its content: wherever a document comes, and as often as it does, it is in one split."""
    return int.from_bytes(blake3.blake3(document.text).digest(length=8), "little")


def hashes_of(jobs: Iterable[ShardJob], field: str) -> npt.NDArray[np.uint64]:
    """Of the documents that some jobs read, sorted."""
    values = (
        hash_of(document)
        for job in jobs
        for part in job.parts
        for document in documents_of(part, field=field)
        if document.text
    )
    return np.unique(np.fromiter(values, HASH_TYPE))


def _is_among(value: int, hashes: npt.NDArray[np.uint64]) -> bool:
    at = int(np.searchsorted(hashes, np.uint64(value)))
    return at < len(hashes) and int(hashes[at]) == value


def _is_taken(document: Document, part: Part) -> bool:
    """By its content too, but by other bits, or of what is held out another share would be taken."""
    digest = blake3.blake3(document.text).digest(length=16)
    return int.from_bytes(digest[8:], "little") < part.share * HASHES


def _cut(encoded: Encoded, share: float) -> tuple[Encoded, Encoded]:
    """A document in two, of which the second has this share of its tokens."""
    at = len(encoded.tokens) - max(1, round(len(encoded.tokens) * share))
    counted = encoded.counted
    text_bytes = round(encoded.text_bytes * at / len(encoded.tokens))
    return (
        Encoded(
            tokens=encoded.tokens[:at],
            counted=None if counted is None else counted[:at],
            text_bytes=text_bytes,
        ),
        Encoded(
            tokens=encoded.tokens[at:],
            counted=None if counted is None else counted[at:],
            text_bytes=encoded.text_bytes - text_bytes,
        ),
    )


def bits_of(bits: npt.NDArray[np.uint8], start: int, length: int) -> npt.NDArray[np.bool_]:
    """Which of these tokens are counted, by a mask file."""
    first, last = start // 8, -(-(start + length) // 8)
    found = np.unpackbits(bits[first:last], bitorder="little")[start % 8 :][:length]
    return found.astype(np.bool_)


def _gathered(
    parts: tuple[Part, ...], field: str, tell: Callable[[int], None]
) -> Iterator[list[tuple[Part, Document]]]:
    """Documents with their parts, a quarter of a megabyte of text or so at a time."""
    gathered: list[tuple[Part, Document]] = []
    num_bytes = 0
    for part in parts:
        told = 0
        for document in documents_of(part, field=field):
            gathered.append((part, document))
            num_bytes += len(document.text)
            if num_bytes >= ENCODED_BYTES:
                yield gathered
                # A Parquet file has fewer bytes than its text.
                now = min(part.num_bytes, told + num_bytes)
                tell(now - told)
                told, num_bytes, gathered = now, 0, []
        tell(part.num_bytes - told)
    if gathered:
        yield gathered
