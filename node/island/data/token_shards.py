"""Samples from a folder of token shards, which stay on the disk: a rank maps what it reads.

A sample is a window of context + 1 tokens of one shard. Windows begin every `context` tokens, so
each token is predicted once; or, where the rows were packed, they are the rows. No window reaches
from one shard into the next: a shard can be fetched alone.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from node.island.data.dataset import Batch, Dataset, Tokens
from node.island.data.manifest import (
    OFFSET_BYTES,
    TOKENIZER_FILE,
    FileEntry,
    Manifest,
    ShardEntry,
    Split,
    check_pieces,
    check_sizes,
    damaged,
    piece_digests,
    read_manifest,
)
from node.island.data.samples import Indices
from protocol.errors import BadDataError, ConfigError, NoInputError
from protocol.files import expanded
from protocol.models import DecoderModel
from protocol.rounds import CorpusSummary
from protocol.run_spec import RunSpec

Bytes = npt.NDArray[np.uint8]


class Files(Protocol):
    """The files of a manifest, wherever they lie."""

    def read(self, name: str, start: int, stop: int) -> Bytes:
        """Bytes of a file, checked. Raises BadDataError where they are damaged."""


class MappedFiles:
    """Files of a folder; a piece is checked when something of it is first read."""

    def __init__(self, folder: Path, files: Mapping[str, FileEntry], piece_bytes: int) -> None:
        self._folder = folder
        self._files = files
        self._piece_bytes = piece_bytes
        self._mapped: dict[str, Bytes] = {}
        self._checked: set[tuple[str, int]] = set()

    def read(self, name: str, start: int, stop: int) -> Bytes:
        """See Files."""
        if (mapped := self._mapped.get(name)) is None:
            mapped = np.memmap(self._folder / name, np.uint8, mode="r")
            self._mapped[name] = mapped
        for number in range(start // self._piece_bytes, -(-stop // self._piece_bytes)):
            if (name, number) not in self._checked:
                first = number * self._piece_bytes
                piece = mapped[first : first + self._piece_bytes]
                if piece_digests([piece.data]) != (self._files[name].pieces[number],):
                    raise damaged(self._folder / name, number, self._piece_bytes)
                self._checked.add((name, number))
        return mapped[start:stop]


class _SplitShards:
    """The shards of one split, and which samples are in which."""

    def __init__(self, shards: tuple[ShardEntry, ...], context: int, row: int | None) -> None:
        self.shards = shards
        self.stride = row or context
        self.num_counted = sum(shard.num_counted for shard in shards)
        self.num_tokens = sum(shard.num_tokens for shard in shards)
        each = [
            shard.num_tokens // row if row else max(0, shard.num_tokens - 1) // context
            for shard in shards
        ]
        self.first_samples = np.cumsum([0, *each])

    @property
    def num_samples(self) -> int:
        return int(self.first_samples[-1])

    def place_of(self, index: int) -> tuple[ShardEntry, int]:
        """A sample's shard, and the token of that shard which it begins with."""
        if not 0 <= index < self.num_samples:
            raise IndexError(f"there are {self.num_samples} samples and no number {index}")
        shard = int(np.searchsorted(self.first_samples, index, side="right")) - 1
        return self.shards[shard], (index - int(self.first_samples[shard])) * self.stride


class TokenShards:
    """A dataset of token shards; implements Dataset."""

    def __init__(
        self, manifest: Manifest, files: Files, *, context: int, has_documents: bool = False
    ) -> None:
        """`has_documents` adds the document of each token to batches."""
        self._manifest = manifest
        self._files = files
        self._context = context
        self._has_documents = has_documents
        self._dtype = np.dtype(f"<u{manifest.token_bytes}")
        self._splits: dict[Split, _SplitShards] = {
            "training": _SplitShards(manifest.training, context, manifest.row),
            "held_out": _SplitShards(manifest.held_out, context, manifest.row),
        }

    @property
    def num_samples(self) -> int:
        """See Dataset."""
        return self._splits["training"].num_samples

    @property
    def num_held_out_samples(self) -> int:
        """See Dataset."""
        return self._splits["held_out"].num_samples

    def summary(self) -> CorpusSummary:
        """See Dataset."""
        return CorpusSummary(
            digest=self._manifest.digest(),
            num_samples=self.num_samples,
            num_bytes=self._manifest.text_bytes("training") or 0,
            num_held_out_tokens=self._manifest.num_tokens("held_out"),
            num_held_out_bytes=self._manifest.text_bytes("held_out") or 0,
        )

    def batch(self, split: Split, indices: Indices) -> Batch:
        """See Dataset."""
        length = self._context + 1
        tokens = np.empty((len(indices), length), np.int64)
        for row, index in enumerate(indices.tolist()):
            shard, start = self._splits[split].place_of(index)
            tokens[row] = self._tokens(shard, start, start + length)
        if tokens.size and int(tokens.max()) >= self._manifest.vocab_size:
            raise BadDataError(
                f"the tokens have a number {int(tokens.max())}, and by their manifest end at "
                f"{self._manifest.vocab_size - 1}",
                next_step="prepare them again with the vocabulary size that they have",
            )
        return Batch(
            tokens=tokens,
            counted=self._counted(split, indices),
            documents=self._documents(split, indices) if self._has_documents else None,
        )

    def num_counted(self, split: Split, indices: Indices) -> int:
        """See Dataset."""
        counted = self._counted(split, indices)
        return len(indices) * self._context if counted is None else max(1, int(counted.sum()))

    def _tokens(self, shard: ShardEntry, start: int, stop: int) -> Tokens:
        size = self._manifest.token_bytes
        first = shard.first
        found = self._files.read(shard.tokens, (first + start) * size, (first + stop) * size)
        return found.view(self._dtype).astype(np.int64)

    def _counted(self, split: Split, indices: Indices) -> npt.NDArray[np.bool_] | None:
        """Which targets are predicted [B, T]; None where the split has no masks."""
        places = [self._splits[split].place_of(index) for index in indices.tolist()]
        if all(shard.mask is None for shard, _ in places):
            return None
        counted = np.ones((len(indices), self._context), np.bool_)
        for row, (shard, start) in enumerate(places):
            if shard.mask is not None:
                first = shard.first + start + 1  # a target is the token after the input
                last = first + self._context
                packed = self._files.read(shard.mask, first // 8, -(-last // 8))
                bits = np.unpackbits(packed, bitorder="little")[first % 8 :]
                counted[row] = bits[: self._context]
        return counted

    def _documents(self, split: Split, indices: Indices) -> npt.NDArray[np.int32]:
        """Which document of its row each token belongs to [B, T + 1], from 0."""
        length = self._context + 1
        documents = np.zeros((len(indices), length), np.int32)
        for row, index in enumerate(indices.tolist()):
            shard, start = self._splits[split].place_of(index)
            if shard.offsets is None:
                raise ConfigError(
                    f"{shard.tokens} comes without the places where its documents begin",
                    next_step="prepare the tokens again, or leave attention across documents as it is",
                )
            raw = self._files.read(shard.offsets, 0, (shard.num_documents + 1) * OFFSET_BYTES)
            offsets = raw.view("<u8")
            own = np.arange(start, start + length, dtype=np.uint64)
            found = np.searchsorted(offsets, own, side="right")
            documents[row] = found - found[0]
        return documents


def open_tokens(spec: RunSpec, folder: Path, path: str) -> TokenShards:
    """Maps the tokens of a run; a relative path starts at `folder`. Reads none of them.

    Raises NoInputError, BadDataError or ConfigError where they are not the run's.
    """
    place = folder / expanded(path)
    manifest = read_manifest(
        place,
        when_missing="copy the run's tokens there, or say where they are with data = in node.toml",
    )
    check_is_runs(manifest, spec, place)
    check_sizes(place, manifest.files)
    if manifest.tokenizer == TOKENIZER_FILE:
        check_tokenizer(place, manifest)
    files = MappedFiles(place, manifest.files, manifest.piece_bytes)
    shards = TokenShards(manifest, files, context=spec.model.context)
    check_enough(shards, context=spec.model.context, batch=spec.inner.batch)
    return shards


def vocabulary_of(spec: RunSpec) -> int | None:
    """Tokens that the run's model has; None where nobody says."""
    if isinstance(spec.model, DecoderModel):
        return spec.model.vocab_size
    config = {} if spec.description is None else spec.description.config
    stated = config.get("vocab_size")
    return stated if isinstance(stated, int) else None


def check_is_runs(manifest: Manifest, spec: RunSpec, place: Path) -> None:
    """Raises BadDataError for other tokens than the run's, ConfigError where its model cannot take them."""
    digest = manifest.digest().hex()
    if not spec.data.private and digest != spec.data.digest:
        raise BadDataError(
            f"{place} holds other tokens than the run's: their digest is {digest[:12]}…, and "
            f"[data] digest says {str(spec.data.digest)[:12]}…",
            next_step="copy the run's tokens there, or name their folder with data = in node.toml",
        )
    vocabulary = vocabulary_of(spec)
    if vocabulary is not None and manifest.vocab_size > vocabulary:
        raise ConfigError(
            f"the tokens have a vocabulary of {manifest.vocab_size}, and [model] vocab_size is {vocabulary}",
            next_step=f"set [model] vocab_size = {manifest.vocab_size} or more",
        )
    context = spec.model.context
    if manifest.row is not None and manifest.row != context + 1:
        raise ConfigError(
            f"the tokens are packed for a context of {manifest.row - 1}, and [model] context is {context}",
            next_step=f"set [model] context = {manifest.row - 1}, or prepare the tokens with "
            f"--pack {context}",
        )


def check_tokenizer(place: Path, manifest: Manifest) -> None:
    """Raises BadDataError where the tokenizer beside the tokens is not theirs."""
    try:
        check_pieces(place / TOKENIZER_FILE, manifest.files[TOKENIZER_FILE], manifest.piece_bytes)
    except BadDataError as error:
        raise BadDataError(
            f"{place / TOKENIZER_FILE} is not the tokenizer that made these tokens",
            next_step="copy that file again from where the tokens were made",
        ) from error


def check_enough(shards: Dataset, *, context: int, batch: int) -> None:
    """Raises NoInputError for less than a batch."""
    if shards.num_samples < batch or shards.num_held_out_samples < 1:
        raise NoInputError(
            f"the tokens make {shards.num_samples:,} samples of {context + 1} to train on and "
            f"{shards.num_held_out_samples:,} held out, but one batch takes {batch} and evaluation "
            "at least 1",
            next_step="prepare more text, hold out more of it, or lower [model] context or [inner] batch",
        )
