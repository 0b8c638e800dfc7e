"""One shard, written by one process: documents in, a file of tokens and its neighbours out.

Memory stays flat: documents are encoded a few at a time, and go to the disk.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated

import blake3
import numpy as np
import numpy.typing as npt
from pydantic import Field

from node.island.data.documents import Part, documents_of
from node.island.data.manifest import (
    Count,
    FileEntry,
    HashBound,
    ShardEntry,
)
from node.island.data.packing import pack
from node.island.data.records import Document
from node.island.data.shard_files import ShardWriter, token_bytes_of
from node.island.data.tokenizing import (
    ByteTokenizer,
    Encoded,
    FileTokenizer,
    Tokenizer,
    has_parts,
)
from protocol.run.models import Section

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
    held_out_hashes: Path | None = None
    """Of documents that files of their own hold out; see hashes_of."""

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
    held_out: dict[str, ShardEntry]  # by the pattern of its source
    held_out_below: HashBound  # documents whose hash is less were held out
    end_held_out: bool  # instead: the end of its only document
    files: dict[str, FileEntry]
    num_documents: int  # each once, however often it is repeated
    num_empty: int  # of them: those without text, which are left out
    num_held_out_too: int  # of them: those that files of their own hold out as well; likewise
    num_answering: int  # of them: conversations, and answers to prompts
    in_several: InSeveral  # of them, too
    named: Named  # likewise
    num_unknown: int  # tokens of all documents that stand for text without a token
    num_encoded: int  # tokens of all documents, each once
    not_utf8: tuple[str, ...]
    """Of documents that are taken as bytes, places of those that are no text."""

    num_cut: int  # pieces in training that begin within a document longer than a row
    tokens_of: dict[str, int]  # to be learned in training, for each source
    least_hash: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")] | None  # of its documents


@dataclass(slots=True, kw_only=True)
class _Counts:
    """What a receipt tells of the documents that were read, while they are."""

    tokens_of: dict[str, int]
    num_documents: int = 0
    num_empty: int = 0
    num_held_out_too: int = 0
    num_answering: int = 0
    in_several: InSeveral = field(default_factory=InSeveral)
    named: Named = field(default_factory=Named)
    num_unknown: int = 0
    num_encoded: int = 0
    not_utf8: tuple[str, ...] = ()

    def count(self, document: Document, encoded: list[Encoded], tokenizer: Tokenizer) -> None:
        """A document that is read for the first time, and what it became."""
        self.num_answering += has_parts(document)
        self.num_encoded += sum(len(one.tokens) for one in encoded)
        self.num_unknown += sum(_num_of(tokenizer.unknown, one) for one in encoded)
        if isinstance(tokenizer, ByteTokenizer) and not _is_utf8(document.text):
            self.not_utf8 += (document.where,)
        if (name := tokenizer.named_in(document)) is not None:
            self.named = self.named.plus(Named.of(document, name))
        if len(encoded) > 1:
            self.in_several = self.in_several.plus(InSeveral.of(encoded))


def write_shard(
    job: ShardJob, encoding: Encoding, folder: Path, tell: Callable[[int], None]
) -> Receipt:
    """Writes a shard; `tell` hears of input that was read, in bytes. Raises AtollError."""
    tokenizer = encoding.opened()
    token_bytes = token_bytes_of(tokenizer.vocab_size)
    name = f"{job.number:05}"
    training = ShardWriter(folder, name, token_bytes=token_bytes)
    held_out: dict[str, ShardWriter] = {}
    for number, source in enumerate(dict.fromkeys(part.source for part in job.parts)):
        own_name = f"{name}.{number:02}.held-out"
        held_out[source] = ShardWriter(folder, own_name, token_bytes=token_bytes)
    counts = _Counts(tokens_of=dict.fromkeys((part.source for part in job.parts), 0))
    least_hash = HASHES
    held_out_hashes = np.empty(0, HASH_TYPE)
    if encoding.held_out_hashes is not None and not job.is_held_out:
        held_out_hashes = np.fromfile(encoding.held_out_hashes, HASH_TYPE)
    for gathered in _gathered(job.parts, encoding.field, tell):
        firsts = [document for part, document in gathered if not part.repetition]
        counts.num_documents += len(firsts)
        counts.num_empty += sum(not document.text for document in firsts)
        taken = [(part, each) for part, each in gathered if each.text and _is_taken(each, part)]
        kept = [own for own in taken if not _is_among(hash_of(own[1]), held_out_hashes)]
        counts.num_held_out_too += sum(not part.repetition for part, _ in taken)
        counts.num_held_out_too -= sum(not part.repetition for part, _ in kept)
        all_encoded = tokenizer.encode([document for _, document in kept])
        for (part, document), encoded in zip(kept, all_encoded, strict=True):
            value = hash_of(document)
            least_hash = min(least_hash, value)
            if not part.repetition:
                counts.count(document, encoded, tokenizer)
            is_held_out = job.is_held_out or value < encoding.held_out_below
            to_train, kept_back = ([], encoded) if is_held_out else (encoded, [])
            if encoding.end_held_out is not None:
                beginning, end = _cut(encoded[-1], encoding.end_held_out)
                to_train, kept_back = [*encoded[:-1], beginning], [end]
            for one in to_train:
                counts.tokens_of[part.source] += one.num_counted
                training.add(one)
            if not part.repetition:  # what is measured is measured once
                for one in kept_back:
                    held_out[part.source].add(one)
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
    measured: dict[str, ShardEntry] = {}
    for source, writer in held_out.items():
        own, own_files = _unless_empty(folder, *writer.close())
        trained_files |= own_files
        if own is not None:
            measured[source] = own
    return Receipt(
        training=trained,
        held_out=measured,
        held_out_below=f"{encoding.held_out_below:016x}",
        end_held_out=encoding.end_held_out is not None,
        files=trained_files,
        num_cut=num_cut,
        least_hash=None if least_hash == HASHES else f"{least_hash:016x}",
        **{each.name: getattr(counts, each.name) for each in fields(counts)},
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
