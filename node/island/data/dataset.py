"""What a rank asks for: samples by number, whatever they are made of, and which one a place in the order is.

Where samples lie together by the thousand, in pieces of files that are fetched, the order takes them
together: a stretch of places draws from WINDOW of such groups, chosen over all of the data, until they
are used up. So what a node leases in a round needs a few pieces, not all.

The order is endless: every `num_samples` places are one epoch, each epoch in an order of its own.
Nodes with the same data have the same order, so places leased to one node are samples that no
other trains in that epoch. Each place is computed by itself: nothing is kept that grows with the
number of samples.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import blake3
import numpy as np
import numpy.typing as npt

from node.island.data.manifest import Split
from protocol.wire.rounds import CorpusSummary

Tree = Any
"""A tensor, or a tuple, list or dictionary of trees: what torch collates of a function's samples."""

Tokens = npt.NDArray[np.int64]


Indices = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Samples as a model takes them."""

    tokens: Tokens  # [B, T + 1]; all but the last are the input
    counted: npt.NDArray[np.bool_] | None = (
        None  # [B, T]: what is to be predicted; None: everything
    )
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

    def summary(self) -> CorpusSummary:
        """What the coordinator is told."""

    def batch(self, split: Split, indices: Indices) -> Batch | Tree:
        """Samples of a split by number: tokens, or what a function gives. Raises BadDataError."""

    def expect(self, split: Split, indices: Indices) -> None:
        """Says which samples come next, so that what is far can be on its way."""

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
