"""The codecs whose codes are floats: "fp32/1", "bf16/1", "fp8/1" and "fp4/1".

fp32 is values as they are, for comparison and where bandwidth is plenty. bf16 is their upper halves, rounded
to nearest, ties to even; its body has two bytes for each value, little-endian. What would round to infinity
becomes the largest number of its sign. Subnormal numbers and the sign of zero stay: nothing in these two
computes with floats.

fp8 and fp4 are small floats times a scale for each block of 256 values. Blocks, scales and body are as in
blockwise.py.

fp8 (E4M3 of Micikevicius et al. 2022, "FP8 Formats for Deep Learning"): sign, four bits of
exponent, three of mantissa; the largest is 448, to the nearest with ties to even. The patterns of
NaN and of minus zero are forbidden. Blocks whose peak is below 2**-108 are zero, for the smallest
code times the smallest scale must be a normal number.

fp4 (E3M0, as in Douillard et al. 2025, "Streaming DiLoCo with overlapping communication", section
2.3): zero and plus or minus a power of two from 2**-6 to 1 times the block's peak; to the nearest,
ties away from zero. Code c means sign(c) * 2**(|c| - 7), and lies in four bits as int4's does.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from node.exchange.codecs.blockwise import (
    FORBIDDEN,
    NOT_ZERO,
    Blocks,
    Blockwise,
    divisor_of,
    has_codes,
    pack_nibbles,
    unpack_nibbles,
)
from node.exchange.codecs.codec import (
    ONE_THREAD,
    Bytes,
    CodecError,
    DecodesByTile,
    FixedSize,
    Reader,
    Tiles,
    check_body,
    check_num_elements,
    check_values,
    refuse_not_finite,
)
from node.exchange.codecs.compiled import ALL_RIGHT, bits_of, float_of, kernel, read_only
from node.outer_state import Vector
from protocol.wire.rounds import BLOCK


@dataclass(frozen=True)
class Fp32(DecodesByTile, FixedSize):
    """Body: the values, little-endian, four bytes each. Exact, also for the sign of zero."""

    name = "fp32/1"
    tiles: Tiles = ONE_THREAD

    def encoded_bytes(self, num_elements: int) -> int:
        """Four bytes for each element."""
        check_num_elements(num_elements)
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
        check_num_elements(num_elements)
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


_MAGNITUDE = np.uint32(0x7FFF_FFFF)
_FP8_SUBNORMAL = np.float32(2.0**14)
"""Added to a small magnitude, it rounds it to multiples of 2**-9, which are then its lowest bits."""
_FP8_SUBNORMAL_BITS = _FP8_SUBNORMAL.view(np.uint32)
_FP8_SMALLEST_NORMAL = np.float32(2.0**-6)
_FP8_STEP = np.float32(2.0**-9)


@kernel
def _encode_fp8(blocks: Blocks, scales: Vector, packed: Bytes) -> None:
    for b in range(blocks.shape[0]):
        row, codes, divisor = blocks[b], packed[b], divisor_of(scales[b])
        for i in range(BLOCK):
            bits = bits_of(row[i] / divisor)
            magnitude = np.uint32(bits & _MAGNITUDE)
            # Half of the last place less one: ties go to even. From fp32's bias to ours.
            rounded = np.uint32(magnitude + (magnitude >> 20 & 1) + 0x7FFFF)
            normal = np.uint32((rounded >> 20) - (120 << 3))
            quotient = float_of(magnitude)
            small = np.uint32(bits_of(quotient + _FP8_SUBNORMAL) - _FP8_SUBNORMAL_BITS)
            code = small if quotient < _FP8_SMALLEST_NORMAL else normal
            sign = np.uint32(bits >> 24 & 0x80) if code else np.uint32(0)
            codes[i] = np.uint8(code | sign)


@kernel
def _decode_fp8(packed: Bytes, scales: Vector, blocks: Blocks) -> int:
    for b in range(blocks.shape[0]):
        codes, scale, row = packed[b], scales[b], blocks[b]
        num_wrong = np.int32(0)
        for i in range(BLOCK):
            is_nan = codes[i] & 0x7F == 0x7F
            num_wrong += np.int32(is_nan | (codes[i] == 0x80))
        if num_wrong:
            return FORBIDDEN
        if has_codes(scale, codes, 0):
            return NOT_ZERO
        for i in range(BLOCK):
            magnitude = np.int32(codes[i] & 0x7F)
            normal = float_of(np.uint32((magnitude << 20) + (120 << 23)))
            small = np.float32(magnitude) * _FP8_STEP
            quotient = small if magnitude < 8 else normal
            sign = np.uint32(codes[i] & 0x80) << 24
            row[i] = float_of(np.uint32(bits_of(quotient) | sign)) * scale
    return ALL_RIGHT


@dataclass(frozen=True)
class Fp8(Blockwise):
    """One byte for each value and four for each block: 8.125 bits per value."""

    name = "fp8/1"
    top = np.float32(448)
    smallest_peak = np.float32(2.0**-108)
    codes_in_byte = 1
    zero_byte = 0
    forbidden = "minus zero and NaN are no codes"
    encode_blocks = staticmethod(_encode_fp8)
    decode_blocks = staticmethod(_decode_fp8)


_HALF_OF_FP4_SMALLEST = np.float32(2.0**-7).view(np.uint32)


@kernel
def _encode_fp4(blocks: Blocks, scales: Vector, packed: Bytes) -> None:
    codes = np.empty(BLOCK, dtype=np.int8)
    for b in range(blocks.shape[0]):
        row, divisor = blocks[b], divisor_of(scales[b])
        for i in range(BLOCK):
            bits = bits_of(row[i] / divisor)
            magnitude = np.uint32(bits & _MAGNITUDE)
            # From half of the smallest code on, nothing is zero; above, the exponent rounds at 1.5.
            least = np.int32(magnitude >= _HALF_OF_FP4_SMALLEST)
            rounded = np.int32((magnitude + (1 << 22) >> 23) - 120)
            code = max(rounded, least)
            codes[i] = np.int8(-code if bits >> 31 else code)
        pack_nibbles(codes, packed[b])


@kernel
def _decode_fp4(packed: Bytes, scales: Vector, blocks: Blocks) -> int:
    codes = np.empty(BLOCK, dtype=np.int8)
    for b in range(blocks.shape[0]):
        scale, row = scales[b], blocks[b]
        if not unpack_nibbles(packed[b], codes):
            return FORBIDDEN
        if has_codes(scale, packed[b], 0x88):
            return NOT_ZERO
        for i in range(BLOCK):
            code = np.int32(codes[i])
            power = np.uint32((abs(code) + 120) << 23)  # 2**(|code| - 7)
            sign = np.uint32(code) & 0x8000_0000
            bits = np.uint32(power | sign) if code else np.uint32(0)
            row[i] = float_of(bits) * scale
    return ALL_RIGHT


@dataclass(frozen=True)
class Fp4(Blockwise):
    """Half a byte for each value and four bytes for each block: 4.125 bits per value."""

    name = "fp4/1"
    top = np.float32(1)
    codes_in_byte = 2
    zero_byte = 0x88
    forbidden = "-8 is no code"
    encode_blocks = staticmethod(_encode_fp4)
    decode_blocks = staticmethod(_decode_fp4)
