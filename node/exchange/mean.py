"""What a reducer makes of one slice's contributions: the merges, and the norms that they are screened by.

Which contributions are in it, and with which factor, is decided in screening.py; here is arithmetic alone.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from node.exchange.codecs.codec import (
    ONE_THREAD,
    TILE_ELEMENTS,
    Codec,
    CodecError,
    Opened,
    Tiles,
    kernel,
    read_only,
)
from node.exchange.screening import LARGEST_RMS, NOT_HERE, Cosine
from node.outer_state import Vector
from protocol.wire.rounds import BLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A contribution as it came: it is decoded tile by tile, and never a whole vector in memory."""

    codec: Codec
    body: bytes = field(repr=False)
    size: int  # elements


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """How merges go through contributions: by units of so many elements, on these threads."""

    tiles: Tiles = ONE_THREAD
    unit: int = TILE_ELEMENTS


ONE_PASS = Passes()

COMPARED = 1 << 26
"""Products of two elements for all comparisons of a slice together: what they cost has an end."""

LOOKED_AT = 1 << 22
"""Of so many elements and up to twice as many of a slice is found how far its result agrees."""

Watch = Callable[[int, int, Vector], None]
"""Sees each tile of each contribution: `watch(index, first element, values)`."""


class UndecodableError(CodecError):
    """One of the contributions to a mean does not decode."""

    def __init__(self, index: int, why: str) -> None:
        super().__init__(why)
        self.index = index  # among the contributions


@kernel
def _add_weighted(values: Vector, coefficient: np.float32, sums: Vector) -> None:
    for i in range(sums.size):
        sums[i] += coefficient * values[i]


def shares(
    weights: Sequence[int], *, late: int = 0, factors: Sequence[float] | None = None
) -> list[float]:
    """What each contribution is multiplied by in a mean; raises ValueError without any weight.

    With t the weight of one contribution, f its factor, and T the weight of all, those that come too
    late included: t / T, times f.

    Work that comes too late is not lost: its node owes it, and it is in a later mean. If it did not
    count in T here, the others would count for it now, and it would come on top of that later: with
    half of all contributions late the model would move twice as far as its gradients say.
    """
    total = sum(weights)
    if total < 1:
        raise ValueError(f"a mean needs weight, not {total} tokens in total")
    whole = [weight / (total + late) for weight in weights]
    if factors is None:
        return whole
    return [share * factor for share, factor in zip(whole, factors, strict=True)]


def weighted_sum(
    contributions: Sequence[Vector | Encoded],
    coefficients: Sequence[float],
    *,
    passes: Passes = ONE_PASS,
    watch: Watch = lambda index, first, tile: None,
) -> Vector:
    """The sum [n] of fp32(coefficient) * values [n], in the order given.

    Each product and each sum is one fp32 operation. So equal contributions in an equal order, which the
    caller fixes (by node id), give equal bits. Goes through them side by side, tile by tile, so that the
    sum stays in a core's cache. Raises UndecodableError, and ValueError for unequal lengths.
    """
    num_elements = _size_of(contributions)
    rounded = [np.float32(coefficient) for coefficient in coefficients]
    readers = [_tile_reader(index, values) for index, values in enumerate(contributions)]
    sums = np.empty(num_elements, dtype=np.float32)

    def add_tiles(first: int, past: int, scratch: Vector) -> None:
        into = sums[first:past]
        for index, coefficient in enumerate(rounded):
            tile = readers[index](first, past, scratch)
            if index == 0:
                np.multiply(tile, coefficient, out=into)
            else:
                _add_weighted(read_only(tile), coefficient, into)
            watch(index, first, tile)

    with np.errstate(over="ignore", invalid="ignore"):  # screening has yet to see what is in it
        passes.tiles.each_tile(num_elements, add_tiles, unit=passes.unit)
    return sums


def stretched_to(norm: float, mean: Vector, *, most: float, passes: Passes = ONE_PASS) -> Vector:
    """A mean [n] made as long as its contributions are on average, which is `norm`; in place.

    Contributions that point in different directions cancel each other in the mean, the more so the
    more nodes there are; the outer learning rate then has to rise with them. Here

        result = mean * min(norm over |mean|, most)

    The bound, the root of the number of contributions, is what those without anything in common come to;
    without it, nodes that contradict each other would be amplified without limit. Norms are of the whole
    slice. So the bits depend on the contributions alone.
    """
    own = norm_of(mean, passes=passes)
    if own == 0:
        return mean
    return np.multiply(mean, np.float32(min(norm / own, most)), out=mean)


def norm_of(values: Vector, *, passes: Passes = ONE_PASS) -> float:
    """The Euclidean norm of a vector [n], as `BlockSums` has it."""
    squares = BlockSums(values.size)
    passes.tiles.each_run(
        values.size, lambda first, past: squares.take(first, values[first:past]), unit=TILE_ELEMENTS
    )
    return squares.norm()


def cosines_among(
    contributions: Sequence[Encoded],
    about: Sequence[Collection[int]],
    *,
    seed: bytes,
    passes: Passes = ONE_PASS,
) -> dict[tuple[int, int], Cosine]:
    """How far each contribution points the same way as those others, by the places of both in order.

    Of a large slice the seed draws the tiles that are looked at, by COMPARED. Raises UndecodableError.
    """
    size = _size_of(contributions)

    def drawn(tile: int) -> bytes:  # numpy's draws may change with its version
        return blake3(seed + f"tile {tile}".encode()).digest()

    pairs = {
        (min(one, other), max(one, other))
        for one, others in enumerate(about)
        for other in others
        if other not in (one, NOT_HERE)
    }
    num_tiles: int = -(-size // passes.unit)
    num_looked_at = min(num_tiles, max(1, COMPARED // (passes.unit * max(1, len(pairs)))))
    tiles: Sequence[int] = range(num_tiles)
    if num_looked_at < num_tiles:
        tiles = sorted(nsmallest(num_looked_at, tiles, key=drawn))
    readers = [_tile_reader(index, values) for index, values in enumerate(contributions)]
    products = {pair: BlockSums(size) for pair in sorted(pairs)}
    squares = [BlockSums(size) for _ in contributions]

    def compare(from_tile: int, to_tile: int) -> None:
        for first in (tile * passes.unit for tile in tiles[from_tile:to_tile]):
            past = min(first + passes.unit, size)
            values = [
                read(first, past, np.empty(past - first, dtype=np.float32)) for read in readers
            ]
            for own, each in zip(squares, values, strict=True):
                own.take(first, each)
            for (one, other), sums in products.items():
                sums.take(first, values[one], values[other])

    passes.tiles.each_run(len(tiles), compare, unit=1)
    norms = [own.norm() for own in squares]
    looked_at = sum(min(passes.unit, size - tile * passes.unit) for tile in tiles)
    return {
        (one, other): sums.cosine(norms[one] * norms[other], looked_at)
        for (one, other), sums in products.items()
    }


def agreement(result: Opened, contribution: Encoded, *, drawn: int) -> float | None:
    """How far a result r leads where one contribution c to it does: <c, r> / |r|².

    Of all contributions to a mean, weighed as they are in it, this comes to 1, whatever they are: so
    many of them tell together of a result that is not their mean, and none need see another's. With what
    a reducer's error adds it is less, and alike in all slices. None of contributions that are zero; 0 of
    results that are.

    Of a large slice it looks at every k-th part, from one on that `drawn` chooses, a number that the reducer
    cannot know. The contribution is decoded once more, by tiles: kept decoded it would take a vector.
    """
    unit = max(result.unit, contribution.codec.unit)
    every = max(1, result.size // LOOKED_AT)
    first = drawn % every
    read = contribution.codec.reader(contribution.body, contribution.size)
    products, squares, own = (BlockSums(result.size) for _ in range(3))

    def compare(start: int, past: int, scratch: Vector) -> None:
        if (start // unit) % every != first:
            return
        ours, values = np.empty(past - start, dtype=np.float32), scratch[: past - start]
        read(start, past, ours)
        result.read(start, past, values)
        products.take(start, ours, values)
        squares.take(start, values)
        own.take(start, ours)

    result.tiles.each_tile(result.size, compare, unit=unit)
    if not own.total():
        return None
    return products.total() / squares.total() if squares.total() else 0.0


def largest_norm(
    num_elements: int, *, asked_for: float, norm_of_parameters: Callable[[], float]
) -> float:
    """The norm that no pseudo-gradient of a slice of so many elements has, for one of `asked_for`.

    LARGEST_RMS says which that is. The norm of the slice's parameters is asked for only where it depends
    on that.
    """
    least = LARGEST_RMS * math.sqrt(num_elements)
    return least if asked_for <= least else max(least, LARGEST_RMS * norm_of_parameters())


class BlockSums:
    """Of a vector's blocks, sums of its squares or of products with another; the same bits everywhere.

    Sums of 256 products in float64, where each product is exact, in a fixed order, and their sum rounded
    once: on every machine, for any number of threads.
    """

    def __init__(self, num_elements: int) -> None:
        self._sums = np.zeros(-(-num_elements // BLOCK), dtype=np.float64)

    def take(self, start: int, values: Vector, others: Vector | None = None) -> None:
        """Of a part that begins with a block, in any order; without `others`, its squares."""
        first = start // BLOCK
        into = self._sums[first : first + -(-values.size // BLOCK)]
        values = read_only(values)
        sum_products(values, values if others is None else read_only(others), into)

    def total(self) -> float:
        """Of all parts."""
        return math.fsum(self._sums.tolist())

    def norm(self) -> float:
        """The root of the total: where squares were summed, the Euclidean norm."""
        return math.sqrt(self.total())

    def cosine(self, norms: float, num_elements: int) -> Cosine:
        """Where products of so many elements were summed: by both norms multiplied; 0 where one is zero.

        Its error is that of a sum over clusters (Liang and Zeger 1986, "Longitudinal data analysis using
        generalized linear models"): blocks are taken for independent, whatever goes on inside them. It is
        never less than one over the root of the elements, which is that of independent elements.
        """
        if norms == 0:
            return Cosine(value=0.0, error=0.0)
        num_blocks = -(-num_elements // BLOCK)
        total = self.total()
        squares = math.fsum((self._sums * self._sums).tolist())
        spread = math.sqrt(max(0.0, squares - total * total / num_blocks))
        return Cosine(value=total / norms, error=max(spread / norms, 1 / math.sqrt(num_elements)))


@kernel
def sum_products(values: Vector, others: Vector, sums: npt.NDArray[np.float64]) -> None:
    """Writes the sum of each block's products [blocks]: one half is added to the other until one is left."""
    products = np.empty(BLOCK, dtype=np.float64)
    for b in range(sums.size):
        block = values[b * BLOCK : (b + 1) * BLOCK]
        other = others[b * BLOCK : (b + 1) * BLOCK]
        for i in range(block.size):
            products[i] = np.float64(block[i]) * np.float64(other[i])  # exact
        products[block.size :] = 0
        half = BLOCK
        while half > 1:
            half //= 2
            for i in range(half):
                products[i] += products[i + half]
        sums[b] = products[0]


def _size_of(contributions: Sequence[Vector | Encoded]) -> int:
    """The elements of each; raises ValueError where they differ."""
    sizes = {values.size for values in contributions}
    if len(sizes) != 1:
        raise ValueError(f"one merge of contributions with {sorted(sizes)} elements")
    return sizes.pop()


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
