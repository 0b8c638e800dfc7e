"""The mean of contributions: what a reducer does to one slice."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from node.exchange.codecs.codec import ONE_THREAD, TILE_ELEMENTS, Codec, CodecError, Tiles
from node.exchange.codecs.compiled import kernel, read_only
from node.outer_state import Vector
from protocol.rounds import BLOCK
from protocol.run_spec import Merge


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A contribution as it came: it is decoded tile by tile, and never a whole vector in memory."""

    codec: Codec
    body: bytes = field(repr=False)
    size: int  # elements


Contribution = tuple[int, Vector | Encoded]
"""Tokens, and values [n]."""


class UndecodableError(CodecError):
    """One of the contributions to a mean does not decode."""

    def __init__(self, index: int, why: str) -> None:
        super().__init__(why)
        self.index = index  # among the contributions


@kernel
def _add_weighted(values: Vector, coefficient: np.float32, sums: Vector) -> None:
    for i in range(sums.size):
        sums[i] += coefficient * values[i]


class MeanAccumulator:
    """Adds contributions one by one; of a tile, so that the sum stays in a core's cache.

    With t the tokens of one contribution and T of all, those that come too late included:

        mean = sum of fp32(t / T) * x, in the order of the calls

    Work that comes too late is not lost: its node owes it, and it is in a later mean. If it did not
    count in T here, the others would count for it now, and it would come on top of that later: with
    half of all contributions late the model would move twice as far as its gradients say.

    t / T is divided in float64 and rounded to fp32; each product and each sum is one fp32
    operation. So equal contributions in an equal order, which the caller fixes (by node id), give
    equal bits. With none late the coefficients sum to 1 but for their rounding, 2**-24 at most for
    each.
    """

    def __init__(
        self,
        *,
        num_elements: int,
        total_tokens: int,
        late_tokens: int = 0,
        into: Vector | None = None,  # where the mean shall be
    ) -> None:
        if total_tokens < 1:
            raise ValueError(f"a mean needs weight, not {total_tokens} tokens in total")
        self._total_tokens = total_tokens  # of all that will be added
        self._weighed_tokens = total_tokens + late_tokens
        self._added_tokens = 0
        self._sum = np.empty(num_elements, dtype=np.float32) if into is None else into
        self._is_empty = True

    def add(self, tokens: int, values: Vector) -> None:
        """Adds a contribution: decoded values [num_elements] and a weight, which may be zero."""
        if values.shape != self._sum.shape:
            raise ValueError(
                f"a contribution of shape {values.shape} to a mean of {self._sum.size} elements"
            )
        if not 0 <= tokens <= self._total_tokens - self._added_tokens:
            raise ValueError(
                f"{tokens} tokens more, after {self._added_tokens} of {self._total_tokens}"
            )
        self._added_tokens += tokens
        coefficient = np.float32(tokens / self._weighed_tokens)
        if self._is_empty:
            np.multiply(values, coefficient, out=self._sum)
            self._is_empty = False
        else:
            _add_weighted(read_only(values), coefficient, self._sum)

    def finish(self) -> Vector:
        """The mean [num_elements]; raises ValueError while contributions are missing."""
        if self._is_empty or self._added_tokens != self._total_tokens:
            raise ValueError(
                f"only {self._added_tokens} of {self._total_tokens} tokens have been added"
            )
        return self._sum


def weighted_mean(
    contributions: Sequence[Contribution],
    *,
    late_tokens: int = 0,
    tiles: Tiles = ONE_THREAD,
    unit: int = TILE_ELEMENTS,
    watch: Callable[[int, int, Vector], None] = lambda index, start, tile: None,
) -> Vector:
    """Mean [n] of (tokens, values [n]) in the order given; raises ValueError without any weight.

    Goes through them side by side, by tiles of `unit` elements; `watch(index, start, tile)` sees
    each tile of each contribution. Raises UndecodableError.
    """
    total_tokens = sum(tokens for tokens, _ in contributions)
    num_elements = contributions[0][1].size if contributions else 1  # which then has no weight
    readers = [_tile_reader(index, values) for index, (_, values) in enumerate(contributions)]
    mean = np.empty(num_elements, dtype=np.float32)

    def add_tiles(first: int, past: int, scratch: Vector) -> None:
        accumulator = MeanAccumulator(
            num_elements=past - first,
            total_tokens=total_tokens,
            late_tokens=late_tokens,
            into=mean[first:past],
        )
        for index, (tokens, _) in enumerate(contributions):
            tile = readers[index](first, past, scratch)
            accumulator.add(tokens, tile)
            watch(index, first, tile)
        accumulator.finish()

    tiles.each_tile(num_elements, add_tiles, unit=unit)
    return mean


def _tile_reader(index: int, values: Vector | Encoded) -> Callable[[int, int, Vector], Vector]:
    """Gives a part of a contribution, if need be in the scratch."""
    if not isinstance(values, Encoded):
        return lambda first, past, scratch: values[first:past]
    try:
        read = values.codec.reader(values.body, values.size)
    except CodecError as error:
        raise UndecodableError(index, str(error)) from error

    def tile(first: int, past: int, scratch: Vector) -> Vector:
        decoded = scratch[: past - first]
        try:
            read(first, past, decoded)
        except CodecError as error:
            raise UndecodableError(index, str(error)) from error
        return decoded

    return tile


def merged(
    contributions: Sequence[Contribution],
    merge: Merge,
    *,
    late_tokens: int = 0,
    tiles: Tiles = ONE_THREAD,
    unit: int = TILE_ELEMENTS,
) -> Vector:
    """Contributions [n] with their tokens as one vector [n], as the run file asks."""
    take: Callable[..., Vector]
    match merge:
        case "mean":
            take = weighted_mean
        case "norm-preserving":
            take = norm_preserving_mean
    return take(contributions, late_tokens=late_tokens, tiles=tiles, unit=unit)


def norm_preserving_mean(
    contributions: Sequence[Contribution],
    *,
    late_tokens: int = 0,
    tiles: Tiles = ONE_THREAD,
    unit: int = TILE_ELEMENTS,
) -> Vector:
    """The weighted mean [n], made as long as its contributions are on average.

    Contributions that point in different directions cancel each other in the mean, the more so the
    more nodes there are; the outer learning rate then has to rise with them. Here

        result = mean * min(sum of t / T * |x|, over |mean|, root of the number of contributions)

    The bound is what contributions without anything in common come to; without it, nodes that
    contradict each other would be amplified without limit. Norms are of the whole slice: sums of
    256 squares in float64, in a fixed order, and their sum rounded once. So the bits depend on the
    contributions alone.
    """
    squares = [Squares(values.size) for _, values in contributions]
    mean = weighted_mean(
        contributions,
        late_tokens=late_tokens,
        tiles=tiles,
        unit=unit,
        watch=lambda index, start, tile: squares[index].take(start, tile),
    )
    of_mean = Squares(mean.size)
    tiles.each_run(mean.size, lambda first, past: of_mean.take(first, mean[first:past]))
    mean_norm = of_mean.norm()
    if mean_norm == 0:
        return mean
    weighed_tokens = sum(tokens for tokens, _ in contributions) + late_tokens
    norm_of_mean = math.fsum(
        tokens / weighed_tokens * own.norm()
        for (tokens, _), own in zip(contributions, squares, strict=True)
    )
    stretch = min(norm_of_mean / mean_norm, math.sqrt(len(contributions)))
    return np.multiply(mean, np.float32(stretch), out=mean)


class Squares:
    """Of a vector's blocks; its Euclidean norm, to the same bits on every machine."""

    def __init__(self, num_elements: int) -> None:
        self._sums = np.zeros(-(-num_elements // BLOCK), dtype=np.float64)

    def take(self, start: int, values: Vector) -> None:
        """Of a part that begins with a block, in any order."""
        first = start // BLOCK
        sum_squares(read_only(values), self._sums[first : first + -(-values.size // BLOCK)])

    def norm(self) -> float:
        """Of all parts."""
        return math.sqrt(math.fsum(self._sums.tolist()))


@kernel
def sum_squares(values: Vector, sums: npt.NDArray[np.float64]) -> None:
    """Writes the sum of each block [blocks]: one half is added to the other until one is left."""
    squares = np.empty(BLOCK, dtype=np.float64)
    for b in range(sums.size):
        block = values[b * BLOCK : (b + 1) * BLOCK]
        for i in range(block.size):
            squares[i] = np.float64(block[i]) * np.float64(block[i])  # exact
        squares[block.size :] = 0
        half = BLOCK
        while half > 1:
            half //= 2
            for i in range(half):
                squares[i] += squares[i + half]
        sums[b] = squares[0]
