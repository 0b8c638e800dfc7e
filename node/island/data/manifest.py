"""The manifest of a folder of tokens: what its shards hold, and the digests that prove it.

A shard is a flat array of little-endian token ids (`00000.tokens`), the places where its documents
begin (`00000.offsets`, uint64) and, where not every token is to be learned, a bit for each
(`00000.mask`). Digests are of pieces of a file, so that who reads a little checks a little. The
manifest's own digest stands in the run file, and with it everything in the folder is fixed.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import blake3
from pydantic import Field, ValidationError, model_validator

from protocol.errors import BadDataError, NoInputError
from protocol.run.models import Section
from protocol.wire.rounds import Digest

MANIFEST_FILE = "manifest.json"
TOKENIZER_FILE = "tokenizer.json"
HELD_OUT_HASHES_FILE = "held-out.hashes"
"""Hashes of documents that are held out whatever they are, sorted; only where there are such."""

PIECE_BYTES = 16 << 20
OFFSET_BYTES = 8

Count = Annotated[int, Field(ge=0, lt=2**62)]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
SourceName = Annotated[str, Field(max_length=100, pattern=r"^[^\x00-\x1f\x7f]*$")]
HashBound = Annotated[str, Field(pattern=r"^[0-9a-f]{16,17}$")]
HexDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Split = Literal["training", "held_out"]


class FileEntry(Section):
    """A file of the folder: its length, and the BLAKE3 digest of each piece of it."""

    bytes: Count
    pieces: Annotated[tuple[HexDigest, ...], Field(strict=False)]

    @property
    def digest(self) -> str:
        """Of the whole file: that of its only piece, or of its pieces' digests."""
        if len(self.pieces) == 1:
            return self.pieces[0]
        return blake3.blake3("".join(self.pieces).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece of a file."""

    file: str
    number: int  # within the file
    digest: str
    start: int  # byte of the file
    bytes: int
    place: int  # among all pieces of a manifest: files in the order of their names


class ShardEntry(Section):
    """Tokens that lie one after the other in one file, whole documents."""

    tokens: FileName
    first: Count = 0  # token of that file
    num_tokens: Count
    num_counted: Count  # of the tokens: those that a model is to predict
    offsets: FileName | None = None
    mask: FileName | None = None
    num_documents: Count
    text_bytes: Count | None = None  # of the counted tokens; None: nobody knows
    source: SourceName = ""  # of what is held out; "" for what no source was named for


class Manifest(Section):
    """A folder of tokens."""

    format: Literal["atoll-tokens-1"] = "atoll-tokens-1"
    token_bytes: Literal[1, 2, 4]
    vocab_size: Annotated[int, Field(gt=0, lt=2**31)]
    tokenizer: Literal["bytes", "tokenizer.json", "unknown"]
    end_of_document: Count | None = None
    row: Annotated[int, Field(gt=1, lt=2**31)] | None = None  # tokens, where rows are packed
    has_answers: bool = False  # conversations, or prompts, of which answers alone are learned
    held_out_below: HashBound | None = None
    """Documents whose hash is less are held out; None where nobody knows. See HELD_OUT_HASHES_FILE."""

    piece_bytes: Annotated[int, Field(gt=0, lt=2**40)] = PIECE_BYTES
    files: dict[FileName, FileEntry]
    training: Annotated[tuple[ShardEntry, ...], Field(strict=False)]
    held_out: Annotated[tuple[ShardEntry, ...], Field(strict=False)]

    @model_validator(mode="after")
    def _files_are_as_long_as_their_shards(self) -> Self:
        for name, entry in self.files.items():
            if len(entry.pieces) != -(-entry.bytes // self.piece_bytes):
                raise ValueError(f"{name} has {len(entry.pieces)} digests for {entry.bytes} bytes")
        for shard in (*self.training, *self.held_out):
            end = shard.first + shard.num_tokens
            for file, least_bytes in (
                (shard.tokens, end * self.token_bytes),
                (shard.offsets, (shard.num_documents + 1) * OFFSET_BYTES),
                (shard.mask, -(-end // 8)),
            ):
                if file is None:
                    continue
                if file not in self.files or self.files[file].bytes < least_bytes:
                    raise ValueError(f"{file} is shorter than a shard of it")
            if self.row is not None and shard.num_tokens % self.row:
                raise ValueError(f"{shard.tokens} is not whole rows of {self.row} tokens")
        return self

    def shards(self, split: Split) -> tuple[ShardEntry, ...]:
        """The shards of a split, in order."""
        return self.training if split == "training" else self.held_out

    @property
    def tokenizer_digest(self) -> str | None:
        """Of tokenizer.json; None where no such file made the tokens."""
        if self.tokenizer != TOKENIZER_FILE or TOKENIZER_FILE not in self.files:
            return None
        return self.files[TOKENIZER_FILE].digest

    def num_tokens(self, split: Split) -> int:
        """Tokens of a split that a model is to predict."""
        return sum(shard.num_counted for shard in self.shards(split))

    def text_bytes(self, split: Split) -> int | None:
        """Bytes of text of a split; None where nobody knows."""
        sizes = [shard.text_bytes for shard in self.shards(split)]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def canonical_json(self) -> str:
        """Sorted keys, no spaces: what the digest is taken of."""
        return json.dumps(self._told(), sort_keys=True, separators=(",", ":"))

    def digest(self) -> Digest:
        """What a run file names these tokens by."""
        return Digest(blake3.blake3(self.canonical_json().encode()).digest())

    def pieces(self) -> tuple[Piece, ...]:
        """All pieces, in the order of their places."""
        found: list[Piece] = []
        for name, entry in sorted(self.files.items()):
            for number, digest in enumerate(entry.pieces):
                start = number * self.piece_bytes
                size = min(self.piece_bytes, entry.bytes - start)
                found.append(Piece(name, number, digest, start, size, len(found)))
        return tuple(found)

    def as_written(self) -> bytes:
        """The manifest file. Its layout is for people: the digest is not of these bytes."""
        return (json.dumps(self._told(), indent=1) + "\n").encode()

    def _told(self) -> dict[str, Any]:
        told = self.model_dump(mode="json")
        # Older manifests lack these, and keep their digests.
        if not self.has_answers:
            del told["has_answers"]
        if self.held_out_below is None:
            del told["held_out_below"]
        for shard in (*told["training"], *told["held_out"]):
            if not shard["source"]:
                del shard["source"]
        return told


def read_manifest(
    folder: Path, *, when_missing: str = "make one with 'atoll data prepare INPUT --out DIR'"
) -> Manifest:
    """The manifest of a folder; raises NoInputError without one, BadDataError for a damaged one.

    `when_missing` is what to do then.
    """
    path = folder / MANIFEST_FILE
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NoInputError(
            f"{folder} holds no tokens: there is no {MANIFEST_FILE}",
            next_step=when_missing,
        ) from error
    except OSError as error:
        raise NoInputError(
            f"{path} cannot be read: {error.strerror}", next_step="make it a file that you may read"
        ) from error
    return manifest_of(text, origin=str(path))


def manifest_of(text: bytes, *, origin: str) -> Manifest:
    """The manifest in what `as_written` gave; raises BadDataError."""
    try:
        return Manifest.model_validate(json.loads(text))
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(str(part) for part in problem["loc"])
        what = f"{place}: {problem['msg']}" if place else str(problem["msg"])
    except ValueError as error:
        what = f"not JSON: {error}"
    raise BadDataError(
        f"{origin} is no manifest of tokens: {what}",
        next_step="copy the whole folder again, or make it anew with 'atoll data prepare'",
    )


def check_sizes(folder: Path, files: Mapping[str, FileEntry]) -> None:
    """Raises NoInputError for a file that is missing, BadDataError for one of another length."""
    for name, entry in files.items():
        path = folder / name
        try:
            size = path.stat().st_size
        except OSError as error:
            raise is_missing(path) from error
        if size != entry.bytes:
            raise BadDataError(
                f"{path} has {size:,} bytes, and {entry.bytes:,} by its manifest",
                next_step="copy that file again",
            )


def is_missing(path: Path) -> NoInputError:
    """The error for a file of tokens that is not there, or whose place has a link to nothing."""
    if path.is_symlink():  # to tokens of other software
        return NoInputError(
            f"{path} is a link to {path.readlink()}, which is not there",
            next_step="put that file back, or prepare it again where it is now; cp -rL copies a folder with "
            "all that it links to",
        )
    return NoInputError(
        f"{path} is not there, and belongs to these tokens", next_step="copy the whole folder again"
    )


def piece_digests(pieces: Iterable[bytes | memoryview]) -> tuple[str, ...]:
    """Digests of pieces, as a manifest has them."""
    return tuple(blake3.blake3(piece).hexdigest() for piece in pieces)


def pieces_of_file(path: Path, piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
    """A file, a piece at a time."""
    with path.open("rb") as file:
        while piece := file.read(piece_bytes):
            yield piece


def entry_of_file(path: Path) -> FileEntry:
    """What a manifest says of a file that is complete."""
    return FileEntry(bytes=path.stat().st_size, pieces=piece_digests(pieces_of_file(path)))


def check_pieces(path: Path, entry: FileEntry, piece_bytes: int = PIECE_BYTES) -> None:
    """Reads a whole file; raises BadDataError where it is not what the manifest says."""
    for number, piece in enumerate(pieces_of_file(path, piece_bytes)):
        if number >= len(entry.pieces) or piece_digests([piece]) != (entry.pieces[number],):
            raise damaged(path, number, piece_bytes)


def damaged(path: Path, number: int, piece_bytes: int) -> BadDataError:
    """The error for a piece that is not what the manifest says."""
    return BadDataError(
        f"{path} is damaged: piece {number}, from byte {number * piece_bytes:,} on, has another "
        "digest than its manifest says",
        next_step="copy that file again; 'atoll data check DIR' reads all of them",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """How far it is."""

    done_bytes: int
    total_bytes: int
    resumed_bytes: int  # of the done ones: by another process before this one


def check_folder(folder: Path, *, on_state: Callable[[State], None]) -> Manifest:
    """Raises NoInputError or BadDataError for the first file that is not what its manifest says."""
    manifest = read_manifest(folder)
    check_sizes(folder, manifest.files)
    total = sum(entry.bytes for entry in manifest.files.values())
    done = 0
    for name, entry in manifest.files.items():
        pieces = pieces_of_file(folder / name, manifest.piece_bytes)
        for number, (piece, digest) in enumerate(zip(pieces, entry.pieces, strict=True)):
            if piece_digests([piece]) != (digest,):
                raise damaged(folder / name, number, manifest.piece_bytes)
            done += len(piece)
            on_state(State(done_bytes=done, total_bytes=total, resumed_bytes=0))
    return manifest
