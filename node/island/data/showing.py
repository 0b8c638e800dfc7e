"""What a folder of tokens holds, for a person: how long its documents are, and some of them as text.

A model reads all of a document, and learns what the masks leave; both are told apart.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from node.island.data.dataset import held_out_choice
from node.island.data.manifest import TOKENIZER_FILE, Manifest, ShardEntry, Split
from node.island.data.shard_files import ShardReader
from node.island.data.token_shards import MappedFiles
from node.island.data.tokenizing import open_tokenizer
from protocol.errors import UsageError

Lengths = npt.NDArray[np.int64]

TextOf = Callable[[Sequence[int]], str]

SHOWN_ALONE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Neighbouring tokens of a document that are all learned, or all read only."""

    text: str
    num_tokens: int
    is_learned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A document, or where rows are packed the piece of one that lies in a row."""

    number: int
    file: str
    source: str  # its name, of what is held out; empty for none
    stretches: tuple[Stretch, ...]
    num_padding: int  # tokens behind it that fill up its row

    @property
    def num_tokens(self) -> int:
        """Of the document, without padding."""
        return sum(each.num_tokens for each in self.stretches)

    @property
    def num_learned(self) -> int:
        """Tokens that a model is to predict."""
        return sum(each.num_tokens for each in self.stretches if each.is_learned)


class TokenFolder:
    """A folder of tokens that is read by document. Raises NoInputError or BadDataError for damaged files."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._manifest = manifest
        files = MappedFiles(folder, manifest.files, manifest.piece_bytes)
        self._reader = ShardReader(files, token_bytes=manifest.token_bytes)
        self._text_of = _text_of(folder, manifest)

    def lengths(self, split: Split) -> Lengths:
        """Tokens of each document of a split."""
        own = [np.diff(self._offsets(shard)) for shard in self._manifest.shards(split)]
        return np.concatenate([np.empty(0, np.int64), *own])

    def document(self, split: Split, number: int) -> Shown:
        """A document by its number. Raises UsageError for one that is not there."""
        first = 0
        for shard in self._manifest.shards(split):
            offsets = self._offsets(shard)
            if number < first + len(offsets) - 1:
                start, stop = offsets[number - first : number - first + 2].tolist()
                return self._shown(shard, start, stop, number)
            first += len(offsets) - 1
        raise UsageError(
            f"there is no document {number}: they are numbered from 0 to {first - 1}",
            next_step="name one of these with --document",
        )

    def _offsets(self, shard: ShardEntry) -> Lengths:
        found = self._reader.offsets(shard)
        return np.array([0, shard.num_tokens], np.int64) if found is None else found

    def _shown(self, shard: ShardEntry, start: int, stop: int, number: int) -> Shown:
        tokens = self._reader.tokens(shard, start, stop).astype(np.int64)
        learned = self._reader.counted(shard, start, stop)
        if learned is None:
            learned = np.ones(len(tokens), np.bool_)
        num_padding = self._num_padding(tokens, learned)
        kept = len(tokens) - num_padding
        return Shown(
            number=number,
            file=shard.tokens,
            source=shard.source,
            stretches=tuple(_stretches(tokens[:kept].tolist(), learned[:kept], self._text_of)),
            num_padding=num_padding,
        )

    def _num_padding(self, tokens: npt.NDArray[np.int64], learned: npt.NDArray[np.bool_]) -> int:
        """How many of the last tokens fill up a row: ends of documents behind the document's own."""
        if self._manifest.row is None or self._manifest.end_of_document is None:
            return 0
        fills = (tokens == self._manifest.end_of_document) & ~learned
        others = np.flatnonzero(~fills)
        last = int(others[-1]) if len(others) else -1
        ends_there = last >= 0 and tokens[last] == self._manifest.end_of_document
        return max(0, len(tokens) - 1 - last - (not ends_there))


def _stretches(
    tokens: list[int], learned: npt.NDArray[np.bool_], text_of: TextOf
) -> "list[Stretch]":
    """A document from change to change of what is learned.

    A tokenizer may write a token otherwise where a text begins, so a stretch is what it adds to all before.
    """
    changes = (np.flatnonzero(np.diff(learned)) + 1).tolist()
    found: list[Stretch] = []
    before = ""
    for start, stop in itertools.pairwise([0, *changes, len(tokens)]):
        whole = text_of(tokens[:stop])
        text = (
            whole.removeprefix(before) if whole.startswith(before) else text_of(tokens[start:stop])
        )
        found.append(Stretch(text=text, num_tokens=stop - start, is_learned=bool(learned[start])))
        before = whole
    return found


def _text_of(folder: Path, manifest: Manifest) -> TextOf:
    """How tokens become text: bytes, a tokenizer, or the numbers where nobody knows."""
    if manifest.tokenizer == "bytes":
        return lambda tokens: bytes(tokens).replace(b"\0", "␀".encode()).decode(errors="replace")
    if manifest.tokenizer == "unknown":
        return lambda tokens: "".join(f"{token} " for token in tokens)
    tokenizer = open_tokenizer(folder / TOKENIZER_FILE)
    return lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=False))


def some_of(num_documents: int) -> list[int]:
    """Which documents are shown where none is named: a few, evenly spread."""
    return [int(number) for number in held_out_choice(SHOWN_ALONE, num_documents)]


def lengths_in_words(lengths: Lengths) -> str:
    """How long documents are, by which a context is chosen."""
    half, most = np.quantile(lengths, (0.5, 0.99), method="higher").tolist()
    return f"half have up to {half:,} tokens, 99 in 100 up to {most:,}, and the longest {max(lengths):,}"
