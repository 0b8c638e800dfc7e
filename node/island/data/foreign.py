"""Tokens that other software wrote, read as they are: links to its files, with a manifest beside them.

Megatron's .bin with .idx, datatrove's .ds with .ds.index (and .ds.loss), and flat .bin files of 2 or 4
bytes a token, also with the header of llm.c. Each file is read once, for its digests and its largest
token. Documents are where the index says; without one a file is one document. The end of each file is
held out, from the beginning of a document on, for what is not copied cannot be sorted by hash.
"""

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from node.island.data.manifest import (
    MANIFEST_FILE,
    PIECE_BYTES,
    FileEntry,
    Manifest,
    ShardEntry,
    Split,
    State,
    entry_of_file,
    piece_digests,
    pieces_of_file,
)
from node.island.data.shard_files import Offsets, as_offsets
from node.island.data.tokenizing import FileTokenizer, kept_of_tokenizer, tokenizer_files
from protocol.errors import BadDataError, CannotCreateError, UsageError
from protocol.files.durable import is_taken, refusing, whole_folder

TOKEN_SUFFIXES = (".bin", ".ds")

_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_SIZES = {1: 1, 3: 2, 4: 4, 8: 2}
"""Bytes of a token by the number that stands for its type; signed ones hold no negative tokens."""

_LLM_C_MAGIC = 20240520
_LLM_C_HEADER_BYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFile:
    """A file of tokens as somebody else wrote it."""

    path: Path
    token_bytes: int
    first: int  # token with which the tokens begin, behind a header
    num_tokens: int
    # Where documents begin, counted from `first`, and the end; None: one document.
    offsets: Offsets | None
    loss: Path | None = None  # a byte for each token, 0 where nothing is to be learned


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """What a person asked for."""

    files: tuple[Path, ...]
    out: Path
    held_out: float
    held_out_files: tuple[Path, ...] = ()
    tokenizer: Path | None = None
    end_of_document: str | None = None
    vocab_size: int | None = None
    token_bytes: int | None = None
    jobs: int = 1


def adopt(wanted: Adopted, *, on_state: Callable[[State], None]) -> Manifest:
    """Makes a folder of links and a manifest; raises AtollError, and then it is not there."""
    if is_taken(wanted.out):
        raise CannotCreateError(
            f"{wanted.out} is there already",
            next_step="choose another folder with --out, or remove it",
        )
    files = [token_file(path, wanted.token_bytes) for path in wanted.files]
    held_out_files = [token_file(path, wanted.token_bytes) for path in wanted.held_out_files]
    everything = [*files, *held_out_files]
    token_bytes = _size_of_all(everything)
    tokenizer = None
    copied: dict[str, bytes] = {}
    if wanted.tokenizer is not None:
        copied = kept_of_tokenizer(tokenizer_files(wanted.tokenizer))
        folder = wanted.tokenizer if wanted.tokenizer.is_dir() else wanted.tokenizer.parent
        tokenizer = FileTokenizer(folder, end_of_document=wanted.end_of_document)
    vocab_size = wanted.vocab_size or (None if tokenizer is None else tokenizer.vocab_size)
    if vocab_size is None:
        raise UsageError(
            f"{wanted.files[0]} does not say how large its vocabulary is",
            next_step="add --tokenizer FILE, or --vocab-size N",
        )
    with whole_folder(wanted.out) as building, refusing(wanted.out):
        building.chmod(0o755)
        entries: dict[str, FileEntry] = {}
        for name, content in copied.items():
            (building / name).write_bytes(content)
            entries[name] = entry_of_file(building / name)
        shards: dict[Split, list[ShardEntry]] = {"training": [], "held_out": []}
        digested = _digested(everything, vocab_size, wanted.jobs, on_state)
        for number, (file, entry) in enumerate(zip(everything, digested, strict=True)):
            name = f"{number:05}"
            entries[f"{name}.tokens"] = entry
            share = 1.0 if number >= len(files) else 0.0 if held_out_files else wanted.held_out
            for split, shard in _linked(file, building, name, held_out=share):
                shards[split].append(shard)
                for beside in filter(None, (shard.mask, shard.offsets)):
                    if beside not in entries:  # both splits have one mask
                        entries[beside] = entry_of_file(building / beside)
        manifest = Manifest(
            token_bytes=token_bytes,
            vocab_size=vocab_size,
            tokenizer="unknown" if tokenizer is None else "tokenizer.json",
            end_of_document=None if tokenizer is None else tokenizer.end_of_document,
            files=entries,
            training=tuple(shards["training"]),
            held_out=tuple(shards["held_out"]),
        )
        (building / MANIFEST_FILE).write_bytes(manifest.as_written())
    return manifest


def _size_of_all(files: Sequence[TokenFile]) -> Literal[1, 2, 4]:
    """Bytes of a token; raises BadDataError where they are not the same in all files."""
    sizes = {file.token_bytes for file in files}
    if len(sizes) != 1:
        raise BadDataError(
            f"the files have tokens of {' and of '.join(map(str, sorted(sizes)))} bytes",
            next_step="prepare those of each size apart",
        )
    size = sizes.pop()
    return 1 if size == 1 else 2 if size == 2 else 4


def _linked(
    file: TokenFile, folder: Path, name: str, *, held_out: float
) -> Iterator[tuple[Split, ShardEntry]]:
    """Links to a file, and writes its mask and its offsets beside; gives a shard for each of its splits."""
    (folder / f"{name}.tokens").symlink_to(file.path.resolve())
    mask = None
    if file.loss is not None:
        mask = f"{name}.mask"
        _write_mask(file.loss, folder / mask)
    for split, start, stop in _splits(file, held_out):
        offsets = f"{name}.offsets" if split == "training" else f"{name}.held-out.offsets"
        documents = _documents_within(file, start, stop)
        (folder / offsets).write_bytes(as_offsets(documents))
        yield (
            split,
            ShardEntry(
                tokens=f"{name}.tokens",
                first=file.first + start,
                num_tokens=stop - start,
                num_counted=_num_counted(file, start, stop),
                offsets=offsets,
                mask=mask,
                num_documents=len(documents) - 1,
            ),
        )


def token_file(path: Path, token_bytes: int | None) -> TokenFile:
    """What a file holds, by its name, its header and what lies beside it. Raises BadDataError, UsageError."""
    size = path.stat().st_size
    index = path.with_suffix(".idx")
    if path.suffix == ".bin" and index.is_file():
        return _megatron(path, index, size)
    if path.suffix == ".ds":
        return _datatrove(path, Path(f"{path}.index"), size)
    with path.open("rb") as file:
        head = file.read(12)
    if len(head) == 12 and struct.unpack("<i", head[:4])[0] == _LLM_C_MAGIC:
        _, version, num_tokens = struct.unpack("<iii", head)
        return _with_header(path, size, version, num_tokens)
    if token_bytes is None:
        raise UsageError(
            f"{path} does not say how many bytes a token of it has",
            next_step="add --token-bytes 2, or 4; for Megatron's files its .idx has to lie beside it",
        )
    if size % token_bytes or not size:
        raise BadDataError(
            f"{path} has {size} bytes, which are not whole tokens of {token_bytes}",
            next_step="name the size that they have with --token-bytes, or copy the file again",
        )
    return TokenFile(
        path=path, token_bytes=token_bytes, first=0, num_tokens=size // token_bytes, offsets=None
    )


def _megatron(path: Path, index: Path, size: int) -> TokenFile:
    """Megatron-LM's indexed_dataset: lengths and places of sequences, and the first of each document."""
    raw = index.read_bytes()
    if raw[:9] != _MEGATRON_MAGIC or len(raw) < 34:
        raise _wrong(index, "it does not begin as Megatron's do")
    version, kind, num_sequences, num_documents = struct.unpack("<QBQQ", raw[9:34])
    if version != 1 or kind not in _MEGATRON_SIZES:
        raise _wrong(index, f"version {version} with numbers of type {kind} is not known")
    needed = 34 + 12 * num_sequences + 8 * num_documents
    if len(raw) < needed:
        raise _wrong(index, f"it has {len(raw)} bytes and says that it has {needed}")
    token_bytes = _MEGATRON_SIZES[kind]
    lengths = np.frombuffer(raw, "<i4", num_sequences, 34)
    places = np.frombuffer(raw, "<i8", num_sequences, 34 + 4 * num_sequences)
    firsts = np.frombuffer(raw, "<i8", num_documents, 34 + 12 * num_sequences)
    starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    if int(starts[-1]) * token_bytes != size:
        raise _wrong(index, f"{path.name} has {size} bytes and by it {starts[-1] * token_bytes}")
    is_ordered = num_documents > 0 and firsts[0] == 0 and firsts[-1] == num_sequences
    if not (
        is_ordered and (np.diff(firsts) >= 0).all() and (places == starts[:-1] * token_bytes).all()
    ):
        raise _wrong(index, "its sequences do not lie one after the other")
    return TokenFile(
        path=path,
        token_bytes=token_bytes,
        first=0,
        num_tokens=int(starts[-1]),
        offsets=np.unique(starts[firsts]),
    )


def _datatrove(path: Path, index: Path, size: int) -> TokenFile:
    """Datatrove's DocumentTokenizer: the end of each document in an index, a byte a token in .loss."""
    if not index.is_file():
        raise _wrong(index, "it is not there, and has the ends of the documents")
    ends = np.fromfile(index, "<u8").astype(np.int64)
    if not len(ends) or (np.diff(ends) < 0).any() or not ends[-1] or size % int(ends[-1]):
        raise _wrong(index, f"it does not fit {path.name} of {size} bytes")
    token_bytes = size // int(ends[-1])
    if token_bytes not in (2, 4):
        raise _wrong(index, f"by it a token of {path.name} has {token_bytes} bytes")
    loss = Path(f"{path}.loss")
    if loss.is_file() and loss.stat().st_size != ends[-1]:
        raise _wrong(loss, f"it has {loss.stat().st_size} bytes for {ends[-1]} tokens")
    return TokenFile(
        path=path,
        token_bytes=token_bytes,
        first=0,
        num_tokens=int(ends[-1]),
        offsets=np.unique(np.concatenate(([0], ends))),
        loss=loss if loss.is_file() else None,
    )


def _with_header(path: Path, size: int, version: int, num_tokens: int) -> TokenFile:
    """llm.c's: 256 numbers of 4 bytes, of which the third says how many tokens follow."""
    token_bytes = {1: 2, 7: 4}.get(version)
    if token_bytes is None or size != _LLM_C_HEADER_BYTES + num_tokens * token_bytes:
        raise _wrong(path, f"its header says version {version} and {num_tokens} tokens")
    return TokenFile(
        path=path,
        token_bytes=token_bytes,
        first=_LLM_C_HEADER_BYTES // token_bytes,
        num_tokens=num_tokens,
        offsets=None,
    )


def _wrong(path: Path, why: str) -> BadDataError:
    return BadDataError(f"{path} cannot be used: {why}", next_step="write or copy it again")


def _splits(file: TokenFile, held_out: float) -> Iterable[tuple[Split, int, int]]:
    """Tokens for training, and those at the end that are held out, from a document's beginning on."""
    cut = round(file.num_tokens * (1 - held_out))
    if file.offsets is not None and 0 < cut < file.num_tokens:
        cut = int(file.offsets[np.searchsorted(file.offsets, cut, side="right") - 1])
    if cut > 0:
        yield "training", 0, cut
    if cut < file.num_tokens:
        yield "held_out", cut, file.num_tokens


def _documents_within(file: TokenFile, start: int, stop: int) -> Offsets:
    if file.offsets is None:
        return np.array([0, stop - start], np.int64)
    within = file.offsets[(file.offsets >= start) & (file.offsets <= stop)]
    return within - start


def _write_mask(loss: Path, path: Path) -> None:
    """A bit for each of its bytes."""
    with path.open("wb") as file:
        for piece in pieces_of_file(loss):
            bits = np.frombuffer(piece, np.uint8) != 0
            file.write(np.packbits(bits, bitorder="little").tobytes())


def _num_counted(file: TokenFile, start: int, stop: int) -> int:
    if file.loss is None:
        return stop - start
    return int(np.count_nonzero(np.memmap(file.loss, np.uint8, mode="r")[start:stop]))


def _digested(
    files: Sequence[TokenFile],
    vocab_size: int,
    jobs: int,
    on_state: Callable[[State], None],
) -> list[FileEntry]:
    """Reads all of the files, several at a time: digesting leaves the interpreter to others."""
    total = sum(file.path.stat().st_size for file in files)
    done = 0

    def read(file: TokenFile) -> FileEntry:
        nonlocal done
        digests: list[str] = []
        skipped = file.first * file.token_bytes
        for piece in pieces_of_file(file.path):
            digests += piece_digests([piece])
            tokens = np.frombuffer(piece, f"<u{file.token_bytes}")[skipped // file.token_bytes :]
            skipped = max(0, skipped - len(piece))
            if len(tokens) and int(tokens.max()) >= vocab_size:
                raise BadDataError(
                    f"{file.path} has the token {int(tokens.max())}, and a vocabulary of {vocab_size} ends "
                    f"at {vocab_size - 1}",
                    next_step="name the vocabulary size, the tokenizer or the bytes a token that it has",
                )
            done += len(piece)
            on_state(State(done_bytes=done, total_bytes=total, resumed_bytes=0))
        return FileEntry(bytes=os.path.getsize(file.path), pieces=tuple(digests))  # noqa: PTH202

    assert PIECE_BYTES % 8 == 0  # no token reaches from one piece into the next, nor bits of a mask
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(read, files))
