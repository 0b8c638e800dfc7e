"""Chunks of 4096 values, the last of a slice shorter: what coarse codecs take statistics over.

A scale for 256 values would cost them as much as a tenth of their body; for 4096 it is nothing.
"""

import numpy as np
import numpy.typing as npt

from node.exchange.codecs.codec import CodecError
from node.exchange.codecs.compiled import bits_of, kernel
from node.exchange.codecs.sums import sum_of
from node.outer_state import Vector

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
