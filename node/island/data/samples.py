"""Which sample a place in the run's sample order means here.

The order is endless: every `num_samples` places are one epoch, each epoch in an order of its own.
Nodes with the same data have the same order, so places leased to one node are samples that no
other trains in that epoch. Each place is computed by itself: nothing is kept that grows with the
number of samples.
"""

import math

import blake3
import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

NUM_PASSES = 10
"""Passes of the Feistel network. Few samples make small halves, which take more than the customary 4."""


class SampleOrder:
    """A seeded permutation of the samples for each epoch."""

    def __init__(self, *, seed: int, num_samples: int) -> None:
        if num_samples < 1:
            raise ValueError("a sample order needs at least one sample")
        self._seed = seed
        self._num_samples = num_samples

    def indices(self, first: int, count: int) -> Indices:
        """Samples at the places first, …, first + count − 1: [count], each below num_samples."""
        parts: list[Indices] = [np.empty(0, np.int64)]
        place, end = first, first + count
        while place < end:
            epoch, start = divmod(place, self._num_samples)
            stop = min(self._num_samples, start + end - place)
            places = np.arange(start, stop, dtype=np.uint64)
            samples = permuted(places, self._num_samples, self._keys_of(epoch))
            parts.append(samples.astype(np.int64))
            place += stop - start
        return np.concatenate(parts)

    def _keys_of(self, epoch: int) -> Words:
        text = f"{self._seed}:samples:{epoch}".encode()
        return np.frombuffer(blake3.blake3(text).digest(length=8 * NUM_PASSES), "<u8")


def permuted(places: Words, num_samples: int, keys: Words) -> Words:
    """Where a keyed permutation of 0, …, num_samples − 1 takes these places.

    A Feistel network over pairs of digits to the base √num_samples, and again for what falls beyond
    the last sample (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains", section 5,
    cycle walking): it takes less than two turns on average from five samples on.
    """
    side = np.uint64(math.isqrt(num_samples - 1) + 1)
    found = _in_square(places, side, keys)
    while (beyond := np.flatnonzero(found >= num_samples)).size:
        found[beyond] = _in_square(found[beyond], side, keys)
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
