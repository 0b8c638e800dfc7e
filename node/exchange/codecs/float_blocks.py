"""The codecs "fp8/1" and "fp4/1": small floats times a scale for each block of 256 values.

Blocks, scales and body are as in blockwise.py; here is what the codes are.

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

from node.exchange.codecs.blockwise import (
    FORBIDDEN,
    NOT_ZERO,
    Blocks,
    Blockwise,
    divisor_of,
    has_codes,
)
from node.exchange.codecs.codec import Bytes
from node.exchange.codecs.compiled import ALL_RIGHT, bits_of, float_of, kernel
from node.exchange.codecs.packed_codes import pack_nibbles, unpack_nibbles
from node.outer_state import Vector
from protocol.rounds import BLOCK

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
