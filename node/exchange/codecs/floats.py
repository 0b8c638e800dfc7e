"""Values as they are, and their upper halves: "fp32/1" and "bf16/1".

fp32 is for comparison and where bandwidth is plenty. bf16 is rounded to nearest, ties to even; its body has
two bytes for each value, little-endian. What would round to infinity becomes the largest number of its sign.
Subnormal numbers and the sign of zero stay: nothing here computes with floats.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from node.exchange.codecs.codec import (
    ONE_THREAD,
    CodecError,
    DecodesByTile,
    FixedSize,
    Reader,
    Tiles,
    check_body,
    check_values,
    refuse_not_finite,
)
from node.exchange.codecs.compiled import bits_of, float_of, kernel, read_only
from node.outer_state import Vector


@dataclass(frozen=True)
class Fp32(DecodesByTile, FixedSize):
    """Body: the values, little-endian, four bytes each. Exact, also for the sign of zero."""

    name = "fp32/1"
    tiles: Tiles = ONE_THREAD

    def encoded_bytes(self, num_elements: int) -> int:
        """Four bytes for each element."""
        return 4 * num_elements

    def encode(self, values: Vector) -> bytes:
        """Body for finite values [n]; raises CodecError for others."""
        check_values(values)

        def check(first: int, past: int) -> None:
            refuse_not_finite(values[first:past], start=first)

        self.tiles.each_run(values.size, check)
        return values.astype("<f4", copy=False).tobytes()

    def reader(self, body: bytes | memoryview, num_elements: int) -> Reader:
        """Raises CodecError for values that are not finite."""
        sent = check_body(body, codec=self, num_elements=num_elements).view("<f4")

        def read(first: int, past: int, values: Vector) -> None:
            values[:] = sent[first:past]
            refuse_not_finite(values, start=first)

        return read


Halves = npt.NDArray[np.uint16]


@kernel
def to_bf16(value: np.float32) -> np.uint16:
    """The pattern of a finite value."""
    bits = bits_of(value)
    # Half of the last place less one: ties go to even.
    rounded = np.uint32(np.uint32(bits + (bits >> 16 & 1) + 0x7FFF) >> 16)
    is_too_large = (
        rounded & 0x7FFF == 0x7F80
    )  # infinity's pattern is one above the largest number's
    return np.uint16(rounded - np.uint32(is_too_large))


@kernel
def from_bf16(half: np.uint16) -> np.float32:
    """What a pattern means."""
    return float_of(np.uint32(half) << 16)


@kernel
def round_to_bf16(values: Vector) -> None:
    """Rounds finite values [n], in place, to what bf16 holds."""
    for i in range(values.size):
        values[i] = from_bf16(to_bf16(values[i]))


@kernel
def _encode_bf16(values: Vector, halves: Halves) -> bool:
    """Writes patterns; returns whether all values are finite."""
    num_wrong = np.uint32(0)
    for i in range(values.size):
        num_wrong += np.uint32(bits_of(values[i]) & 0x7F80_0000 == 0x7F80_0000)
        halves[i] = to_bf16(values[i])
    return bool(num_wrong == 0)


@kernel
def _decode_bf16(halves: Halves, values: Vector) -> bool:
    """Writes values; returns whether all are finite."""
    num_wrong = np.uint32(0)
    for i in range(values.size):
        num_wrong += np.uint32(halves[i] & 0x7F80 == 0x7F80)
        values[i] = from_bf16(halves[i])
    return bool(num_wrong == 0)


@dataclass(frozen=True)
class Bf16(DecodesByTile, FixedSize):
    """Two bytes for each value: 16 bits."""

    name = "bf16/1"
    tiles: Tiles = ONE_THREAD

    def encoded_bytes(self, num_elements: int) -> int:
        """Two bytes for each element."""
        return 2 * num_elements

    def encode(self, values: Vector) -> bytes:
        """Body for finite values [n]; raises CodecError with the index of one that is not."""
        check_values(values)
        values = read_only(values)
        halves: Halves = np.empty(values.size, dtype="<u2")

        def encode_run(first: int, past: int) -> None:
            if not _encode_bf16(values[first:past], halves[first:past]):
                refuse_not_finite(values[first:past], start=first)

        self.tiles.each_run(values.size, encode_run)
        return halves.tobytes()

    def reader(self, body: bytes | memoryview, num_elements: int) -> Reader:
        """Raises CodecError for what is not finite."""
        raw = check_body(body, codec=self, num_elements=num_elements)
        halves = read_only(np.require(raw.view("<u2"), requirements="A"))

        def read(first: int, past: int, values: Vector) -> None:
            if not _decode_bf16(halves[first:past], values):
                raise CodecError("infinity and NaN are no codes of bf16/1")

        return read
