"""Which sample a place in the run's sample order means here, and batches of them.

The order is endless: every `num_samples` places are one epoch, each epoch in an order of its own.
Nodes with the same text have the same order, so places leased to one node are samples that no
other trains in that epoch.
"""

import blake3
import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


class SampleOrder:
    """A seeded permutation of the samples for each epoch; the last one is kept."""

    def __init__(self, *, seed: int, num_samples: int) -> None:
        if num_samples < 1:
            raise ValueError("a sample order needs at least one sample")
        self._seed = seed
        self._num_samples = num_samples
        self._epoch = -1
        self._permutation: npt.NDArray[np.intp] = np.empty(0, np.intp)

    def indices(self, first: int, count: int) -> Indices:
        """Samples at the places first, …, first + count − 1: [count], each below num_samples."""
        parts: list[npt.NDArray[np.intp]] = []
        place, end = first, first + count
        while place < end:
            epoch, start = divmod(place, self._num_samples)
            stop = min(self._num_samples, start + end - place)
            parts.append(self._permutation_of(epoch)[start:stop])
            place += stop - start
        return np.concatenate(parts).astype(np.int64)

    def _permutation_of(self, epoch: int) -> npt.NDArray[np.intp]:
        if epoch != self._epoch:
            key = blake3.blake3(f"{self._seed}:samples:{epoch}".encode()).digest(length=16)
            words = np.random.Philox(key=int.from_bytes(key, "little"))
            # Sorting raw words keeps the order independent of numpy's version, which
            # Generator.permutation does not promise.
            self._permutation = np.argsort(words.random_raw(self._num_samples), kind="stable")
            self._epoch = epoch
        return self._permutation
