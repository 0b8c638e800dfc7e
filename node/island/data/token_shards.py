"""Samples from a folder of token shards, which stay on the disk: a rank maps what it reads.

A sample is a window of context + 1 tokens of one shard. Windows begin every `context` tokens, so
each token is predicted once; or, where the rows were packed, they are the rows. No window reaches
from one shard into the next: a shard can be fetched alone.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import structlog

from node.island.data.dataset import Batch, Indices
from node.island.data.fetching import FetchedFiles
from node.island.data.manifest import (
    FileEntry,
    Manifest,
    ShardEntry,
    Split,
    check_sizes,
    damaged,
    piece_digests,
)
from node.island.data.shard_files import Bytes, Files, ShardReader, offsets_bytes
from node.island.ranks.faults import LostPieceError
from protocol.errors import AtollError, BadDataError, ConfigError
from protocol.wire.rounds import CorpusSummary, Digest

log = structlog.get_logger()


class MappedFiles:
    """Files of a folder; a piece is checked when something of it is first read.

    One that is damaged is fetched, where something gives it.
    """

    def __init__(
        self,
        folder: Path,
        files: Mapping[str, FileEntry],
        piece_bytes: int,
        far: FetchedFiles | None = None,
    ) -> None:
        self._folder = folder
        self._files = files
        self._piece_bytes = piece_bytes
        self._far = far
        self._mapped: dict[str, Bytes] = {}
        self._checked: set[tuple[str, int]] = set()
        self._damaged: set[tuple[str, int]] = set()  # of those that were checked

    def read(self, name: str, start: int, stop: int) -> Bytes:
        """See Files. Raises LostPieceError where peers are to give what is damaged."""
        if (mapped := self._mapped.get(name)) is None:
            check_sizes(self._folder, {name: self._files[name]})  # behind its end a read is SIGBUS
            mapped = np.memmap(self._folder / name, np.uint8, mode="r")
            self._mapped[name] = mapped
        size = self._piece_bytes
        numbers = range(start // size, -(-stop // size))
        for number in numbers:
            if (name, number) not in self._checked:
                piece = mapped[number * size : (number + 1) * size]
                if piece_digests([piece.data]) != (self._files[name].pieces[number],):
                    if self._far is None:
                        raise damaged(self._folder / name, number, size)
                    log.warning(
                        "a piece of a folder of tokens is damaged: it is fetched instead",
                        file=str(self._folder / name),
                        piece=number,
                        next_step="copy that file again; 'atoll data check DIR' reads all of them",
                    )
                    self._damaged.add((name, number))
                self._checked.add((name, number))
        if self._damaged.isdisjoint((name, number) for number in numbers):
            return mapped[start:stop]
        ends = [(n, max(start, n * size), min(stop, (n + 1) * size)) for n in numbers]
        return np.concatenate(
            [
                self._instead(name, n, first, end)
                if (name, n) in self._damaged
                else mapped[first:end]
                for n, first, end in ends
            ]
        )

    def _instead(self, name: str, number: int, start: int, stop: int) -> Bytes:
        """What a damaged piece ought to be; where it cannot be had, the damage is the error."""
        assert self._far is not None
        damage = damaged(self._folder / name, number, self._piece_bytes)
        try:
            return self._far.read(name, start, stop)
        except LostPieceError as lost:
            raise LostPieceError(
                damage.what, next_step=damage.next_step, piece=lost.piece
            ) from damage
        except AtollError as error:
            raise damage from error


class FoundFiles:
    """Files of which this node has some in folders, and fetches the others; implements Files."""

    def __init__(self, here: Mapping[str, Files], far: FetchedFiles | None) -> None:
        self._here = here
        self._far = far

    def read(self, name: str, start: int, stop: int) -> Bytes:
        """See Files."""
        if (mapped := self._here.get(name)) is not None:
            return mapped.read(name, start, stop)
        assert self._far is not None, "what is not here can be fetched"
        return self._far.read(name, start, stop)

    def expect(self, pieces: list[tuple[str, int]]) -> None:
        """Has those that are far fetched in this order, beside the training."""
        if self._far is not None:
            self._far.expect([piece for piece in pieces if piece[0] not in self._here])


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

    def by_source(self, indices: Indices) -> dict[str, Indices]:
        """Samples by the sources of their shards, which come in the order of the shards."""
        shards = np.searchsorted(self.first_samples, indices, side="right") - 1
        sources = np.array([shard.source for shard in self.shards], np.object_)[shards]
        named = dict.fromkeys(shard.source for shard in self.shards)
        return {each: own for each in named if len(own := indices[sources == each])}

    def place_of(self, index: int) -> tuple[ShardEntry, int]:
        """A sample's shard, and the token of that shard which it begins with."""
        if not 0 <= index < self.num_samples:
            raise IndexError(f"there are {self.num_samples} samples and no number {index}")
        shard = int(np.searchsorted(self.first_samples, index, side="right")) - 1
        return self.shards[shard], (index - int(self.first_samples[shard])) * self.stride


class TokenShards:
    """A dataset of token shards; implements Dataset."""

    def __init__(
        self,
        manifest: Manifest,
        files: Files,
        *,
        context: int,
        has_documents: bool = False,
        digest: Digest | None = None,
    ) -> None:
        """`has_documents` adds the document of each token to batches.

        `digest` is the manifest's, if it is known: of a terabyte of tokens it takes half a second.
        """
        self._digest = digest or manifest.digest()
        self._manifest = manifest
        self._files = files
        self._context = context
        self._has_documents = has_documents
        self._reader = ShardReader(files, token_bytes=manifest.token_bytes)
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
            digest=self._digest,
            num_samples=self.num_samples,
            num_bytes=self._manifest.text_bytes("training") or 0,
            num_held_out_tokens=self._manifest.num_tokens("held_out"),
            num_held_out_bytes=self._manifest.text_bytes("held_out") or 0,
        )

    @property
    def num_together(self) -> int:
        """See Dataset: samples in a piece of a file."""
        stride = self._splits["training"].stride * self._manifest.token_bytes
        return max(1, self._manifest.piece_bytes // stride)

    def pieces_of(self, split: Split, indices: Indices) -> dict[tuple[str, int], None]:
        """All pieces (file, number) that a batch of these samples reads, in the order of their use."""
        size, width = self._manifest.piece_bytes, self._manifest.token_bytes
        pieces: dict[tuple[str, int], None] = {}

        def add(file: str, start: int, stop: int) -> None:
            for number in range(start // size, -(-stop // size)):
                pieces[file, number] = None

        for index in indices.tolist():
            shard, start = self._splits[split].place_of(index)
            first = shard.first + start
            last = first + self._context + 1
            add(shard.tokens, first * width, last * width)
            if shard.mask is not None:
                add(shard.mask, (first + 1) // 8, -(-last // 8))
            if self._has_documents and shard.offsets is not None:
                add(shard.offsets, 0, offsets_bytes(shard.num_documents))
        return pieces

    def expect(self, split: Split, indices: Indices) -> None:
        """See Dataset."""
        if isinstance(self._files, FoundFiles):
            size, most = self._manifest.piece_bytes, self._context + 1
            pieces: dict[tuple[str, int], None] = {}  # in the order of their first use
            for index in indices.tolist():
                shard, start = self._splits[split].place_of(index)
                first = shard.first + start
                for token in (first, first + most - 1):
                    pieces[shard.tokens, token * self._manifest.token_bytes // size] = None
            self._files.expect(list(pieces))

    def batch(self, split: Split, indices: Indices) -> Batch:
        """See Dataset."""
        length = self._context + 1
        tokens = np.empty((len(indices), length), np.int64)
        for row, index in enumerate(indices.tolist()):
            shard, start = self._splits[split].place_of(index)
            tokens[row] = self._reader.tokens(shard, start, start + length)
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

    def held_out_by_source(self, indices: Indices) -> dict[str, Indices]:
        """See Dataset."""
        return self._splits["held_out"].by_source(indices)

    def num_counted(self, split: Split, indices: Indices) -> int:
        """See Dataset."""
        counted = self._counted(split, indices)
        return len(indices) * self._context if counted is None else int(counted.sum())

    def _counted(self, split: Split, indices: Indices) -> npt.NDArray[np.bool_] | None:
        """Which targets are predicted [B, T]; None where the split has no masks."""
        places = [self._splits[split].place_of(index) for index in indices.tolist()]
        if all(shard.mask is None for shard, _ in places):
            return None
        counted = np.ones((len(indices), self._context), np.bool_)
        for row, (shard, start) in enumerate(places):
            first = start + 1  # a target is the token after the input
            bits = self._reader.counted(shard, first, first + self._context)
            if bits is not None:
                counted[row] = bits
        return counted

    def _documents(self, split: Split, indices: Indices) -> npt.NDArray[np.int32]:
        """Which document of its row each token belongs to [B, T + 1], from 0."""
        length = self._context + 1
        documents = np.zeros((len(indices), length), np.int32)
        for row, index in enumerate(indices.tolist()):
            shard, start = self._splits[split].place_of(index)
            offsets = self._reader.offsets(shard)
            if offsets is None:
                raise ConfigError(
                    f"{shard.tokens} comes without the places where its documents begin",
                    next_step="prepare the tokens again, or leave attention across documents as it is",
                )
            own = np.arange(start, start + length)
            found = np.searchsorted(offsets, own, side="right")
            documents[row] = found - found[0]
        return documents


MOST_LOOKED_AT = 1 << 24
"""Tokens of a shard that are looked at for what all of them are like."""


def learned_of_held_out(folder: Path, manifest: Manifest) -> npt.NDArray[np.int64]:
    """How often each token is learned in the held-out split of a folder, by the token's number.

    Of shards that are not in the folder nothing is counted, and of long ones only how they begin.
    """
    files = MappedFiles(folder, manifest.files, manifest.piece_bytes)
    reader = ShardReader(files, token_bytes=manifest.token_bytes)
    found = np.zeros(manifest.vocab_size, np.int64)
    for shard in manifest.held_out:
        if not all((folder / name).is_file() for name in (shard.tokens, shard.mask) if name):
            continue
        num_tokens = min(shard.num_tokens, MOST_LOOKED_AT)
        tokens = reader.tokens(shard, 0, num_tokens)
        if (counted := reader.counted(shard, 0, num_tokens)) is not None:
            tokens = tokens[counted]
        found += np.bincount(tokens, minlength=len(found))[: len(found)]
    return found
