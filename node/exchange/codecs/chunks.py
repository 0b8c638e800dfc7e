"""Chunks of 4096 values, the last of a slice shorter: what coarse codecs take statistics over.

A scale for 256 values would cost them as much as a tenth of their body; for 4096 it is nothing.

The sum of a chunk is taken in the order in which numpy adds, for the same bytes from every encoder: eight
sums over each piece of up to 128 values, and pieces in pairs. So there are many additions at once, and
small rounding errors. A compiler may not change the order of additions by itself.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from node.exchange.codecs.codec import CodecError
from node.exchange.codecs.compiled import bits_of, kernel
from node.outer_state import Vector

Floats = npt.NDArray[np.float32 | np.float64]

_PIECE = 128
_PIECES = 32


@kernel
def _sum_of_piece(values: Floats) -> Any:
    """Of up to 128 values."""
    n = values.size
    total = values[0] - values[0]
    if n >= 8:
        eight = values[:8].copy()
        for start in range(8, n - n % 8, 8):
            for i in range(8):
                eight[i] += values[start + i]
        total = (eight[0] + eight[1]) + (eight[2] + eight[3])
        total += (eight[4] + eight[5]) + (eight[6] + eight[7])
    for i in range(n - n % 8, n):
        total += values[i]
    return total


@kernel
def _sum_of_whole(values: Floats) -> Any:
    """Of 4096 values: with fixed sizes the compiler adds eight at once."""
    pieces = values.reshape(_PIECES, 16, 8)
    sums = np.empty(_PIECES, dtype=values.dtype)
    for p in range(_PIECES):
        piece = pieces[p]
        a, b, c, d = piece[0, 0], piece[0, 1], piece[0, 2], piece[0, 3]
        e, f, g, h = piece[0, 4], piece[0, 5], piece[0, 6], piece[0, 7]
        for i in range(1, 16):
            a += piece[i, 0]
            b += piece[i, 1]
            c += piece[i, 2]
            d += piece[i, 3]
            e += piece[i, 4]
            f += piece[i, 5]
            g += piece[i, 6]
            h += piece[i, 7]
        sums[p] = ((a + b) + (c + d)) + ((e + f) + (g + h))
    num_sums = _PIECES
    while num_sums > 1:
        num_sums //= 2
        for p in range(num_sums):
            sums[p] = sums[2 * p] + sums[2 * p + 1]
    return sums[0]


@kernel
def sum_of(values: Floats) -> Any:
    """The sum of values [n], rounded to their own type at each addition."""
    n = values.size
    if n == _PIECES * _PIECE:
        return _sum_of_whole(values)
    if n <= _PIECE:
        return _sum_of_piece(values)
    half = n // 2 - n // 2 % 8
    return sum_of(values[:half]) + sum_of(values[half:])


CHUNK = 4096

SMALLEST = np.float32(2.0**-118)
"""What lies below becomes zero, so that no processor's handling of subnormal numbers shows."""

LARGEST = np.finfo(np.float32).max
INFINITY = np.float32(np.inf)


def num_chunks(num_elements: int) -> int:
    """Chunks of a slice; the last may be short."""
    return -(-num_elements // CHUNK)


@kernel
def mean_magnitude(chunk: Vector, scratch: Vector) -> np.float32:
    """The mean of magnitudes; infinity or NaN only if a value is. Overwrites scratch [4096]."""
    magnitudes = scratch[: chunk.size]
    for i in range(chunk.size):
        magnitudes[i] = abs(chunk[i])
    mean = sum_of(magnitudes) / np.float32(chunk.size)
    if bits_of(mean) >= 0x7F80_0000:  # the sum may have overflowed
        total = 0.0
        for i in range(chunk.size):
            total += np.float64(magnitudes[i])
        mean = np.float32(total / chunk.size)
    return np.float32(mean)


def check_scales(scales: Vector, *, codec: str, smallest: np.float32, largest: np.float32) -> None:
    """Raises CodecError unless each is 0, or one of those from `smallest` to `largest`."""
    bounds: npt.NDArray[np.uint32] = np.array([smallest, largest], dtype=np.float32).view(np.uint32)
    bits = scales.view(np.uint32)  # ordered like the numbers, if they are not negative
    is_right = (bits == 0) | ((bits >= bounds[0]) & (bits <= bounds[1]))
    if not is_right.all():
        chunk = int(np.argmin(is_right))
        raise CodecError(f"scale {scales[chunk]} of chunk {chunk} is none that {codec} has")
