"""Codecs that send every value: "fp32/1" and "bf16/1" as a float, "int8/1" and "int4/1" by blocks of 256.

fp32 is for comparison and where bandwidth is plenty. bf16 is rounded to nearest, ties to even; its body has
two bytes for each value, little-endian. What would round to infinity becomes the largest number of its sign.
Subnormal numbers and the sign of zero stay: nothing here computes with floats.

"int8/1" and "int4/1" have a scale for each block.

Absmax quantisation by block (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization",
section 2.1, with linear instead of dynamic codes). With `top` the largest code, 127 or 7:

    peak  = largest magnitude in the block
    scale = 0                          when peak < 2**-118
          = min(peak / top, LARGEST)   otherwise, as one fp32 division
    code  = value / scale, to the nearest integer, ties to even; 0 when scale is 0
    value = code * scale, as one fp32 multiplication

Nothing here depends on how a machine treats subnormal numbers: a scale is at least 2**-125 for
integers, so products are normal numbers or zero, and a subnormal value is less than half a scale,
whether or not the processor flushes it. LARGEST is the largest fp32 number whose product with `top`
is finite; for int8 it is one step below the rounded quotient, so that a peak near the end of fp32's
range does not come back as infinity. An error is at most half a scale; a block under 2**-118
becomes zero and stays, like every error, with error feedback.

Body: the scales of all blocks, fp32 little-endian, then all codes. The last block may be short.
int8: one two's-complement byte each; -128 is forbidden. int4: code + 8 in four bits, the first of
two in the low ones; 0 is forbidden, except as the padding of an odd end, where it is demanded. A
block with scale 0 has codes 0. So decoding is defined for every body or refuses it.

Here too: how codes lie in bytes. Half bytes (nibbles) hold signed codes from -7 to 7: code + 8, the first of
two in the low bits of a byte. The nibble 0 is no code. It is the padding of an odd end, and demanded there.
Two bits hold codes from 0 to 3, four in a byte, the first in the lowest bits; padding is 0.
"""

from abc import abstractmethod
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from node.exchange.codecs.codec import (
    ALL_RIGHT,
    TO_WHOLE,
    Bytes,
    CodecError,
    FixedSize,
    Reader,
    bits_of,
    check_body,
    check_values,
    float_of,
    kernel,
    read_only,
    refuse_not_finite,
)
from node.outer_state import Vector
from protocol.wire.rounds import BLOCK


class Fp32(FixedSize):
    """Body: the values, little-endian, four bytes each. Exact, also for the sign of zero."""

    name = "fp32/1"
    bits = 32

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
    is_too_large = rounded & 0x7FFF == 0x7F80  # infinity: one above the largest number's pattern
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


class Bf16(FixedSize):
    """Two bytes for each value: 16 bits."""

    name = "bf16/1"
    bits = 16

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


Codes = npt.NDArray[np.int8]


def nibble_bytes(num_codes: int) -> int:
    """Bytes that so many codes take."""
    return (num_codes + 1) // 2


@kernel
def pack_nibbles(codes: Codes, packed: Bytes) -> None:
    """Writes codes [2n] as bytes [n]."""
    pairs = codes.view(np.uint16)  # the first code in the low byte
    for i in range(packed.size):
        pair = np.uint16(pairs[i] & 0x0F0F ^ 0x0808)  # adds 8 without a carry
        packed[i] = np.uint8(pair | pair >> 4)


@kernel
def unpack_nibbles(packed: Bytes, codes: Codes) -> bool:
    """Writes the codes [2n] of bytes [n]; returns whether all of them are codes."""
    pairs = codes.view(np.uint16)
    num_wrong = np.uint16(0)
    for i in range(packed.size):
        byte = np.uint16(packed[i])
        num_wrong += np.uint16((byte & 15 == 0) | (byte < 16))
        pairs[i] = np.uint16(byte & 15 | byte >> 4 << 8)
    for i in range(codes.size):
        codes[i] -= np.int8(8)
    return bool(num_wrong == 0)


def two_bit_bytes(num_codes: int) -> int:
    """Bytes that so many codes take."""
    return (num_codes + 3) // 4


@kernel
def pack_two_bits(codes: Bytes, packed: Bytes) -> None:
    """Writes bytes [n] from codes [4n] or more."""
    fours = codes[: 4 * packed.size].view(np.uint32)  # the first code in the lowest byte
    for i in range(packed.size):
        pairs = np.uint32(fours[i] | fours[i] >> 6)  # the low byte: two codes; the third byte: two
        packed[i] = np.uint8(pairs | pairs >> 12)


@kernel
def unpack_two_bits(packed: Bytes, codes: Bytes) -> None:
    """Writes the codes of bytes [n] into the first 4n."""
    fours = codes[: 4 * packed.size].view(np.uint32)
    for i in range(packed.size):
        byte = np.uint32(packed[i])
        pairs = np.uint32(byte & 0x0F | (byte & 0xF0) << 12)
        fours[i] = np.uint32(pairs & 0x0003_0003 | (pairs & 0x000C_000C) << 6)


Blocks = npt.NDArray[np.float32]
"""Values [blocks, 256]."""

_INFINITY = np.float32(np.inf)
_MAGNITUDE = np.int32(0x7FFF_FFFF)
_SMALLEST_PEAK = np.float32(2.0**-118)
FORBIDDEN, NOT_ZERO = 1, 2
"""What a kernel found: a code that is none, or codes of a block with scale 0 that are not 0."""


def largest_scale(top: np.float32) -> np.float32:
    """The largest fp32 number whose fp32 product with `top` is finite."""
    scale = np.finfo(np.float32).max / top
    with np.errstate(over="ignore"):
        while not np.isfinite(scale * top):
            scale = np.nextafter(scale, np.float32(0))
    return np.float32(scale)


def num_blocks(num_elements: int) -> int:
    """Blocks of a slice; the last may be short."""
    return -(-num_elements // BLOCK)


@kernel
def peak_of(row: Vector) -> np.float32:
    """The largest magnitude; infinity and NaN are the largest of all.

    Magnitudes are ordered like their bits read as integers, which are compared faster.
    """
    bits = row.view(np.int32)
    peak = np.int32(0)
    for i in range(bits.size):
        peak = max(peak, np.int32(bits[i] & _MAGNITUDE))
    return float_of(np.uint32(peak))


@kernel
def scales_of(
    blocks: Blocks,
    scales: Vector,
    top: np.float32,
    largest_scale: np.float32,
) -> int:
    """Writes the scale of each block; returns the first block that is not finite, or ALL_RIGHT."""
    for b in range(blocks.shape[0]):
        peak = peak_of(blocks[b])
        if not peak < _INFINITY:
            return b
        scales[b] = min(peak / top, largest_scale) if peak >= _SMALLEST_PEAK else np.float32(0)
    return ALL_RIGHT


@kernel
def divisor_of(scale: np.float32) -> np.float32:
    """What values are divided by: infinity for a scale of 0, which gives codes 0."""
    return scale if scale > 0 else _INFINITY


@kernel
def whole_codes(row: Vector, divisor: np.float32, codes: Codes) -> None:
    """Writes value / divisor to the nearest integer, ties to even."""
    for i in range(row.size):
        codes[i] = np.int8(np.int32(((row[i] / divisor) + TO_WHOLE) - TO_WHOLE))


@kernel
def has_codes(scale: np.float32, packed: Bytes, zero: int) -> bool:
    """Whether a block with scale 0 has a byte that does not mean 0."""
    if scale > 0:
        return False
    num_others = 0
    for i in range(packed.size):
        num_others += int(packed[i] != zero)
    return num_others > 0


class Blockwise(FixedSize):
    """Scales, threads and checks; the subclasses say what codes are and how they lie in bytes."""

    block = BLOCK
    head_bytes = 4

    name: ClassVar[str]
    top: ClassVar[np.float32]  # the largest code's value
    codes_in_byte: ClassVar[int]
    zero_byte: ClassVar[int]  # of codes that are 0
    largest_scale: ClassVar[np.float32]
    allowed_scale_bits: ClassVar[tuple[np.uint32, np.uint32]]
    forbidden: ClassVar[str]  # what an error calls codes that are none

    def __init_subclass__(cls) -> None:
        """Derives the size of codes, and the scales that an encoder can write."""
        cls.bits = 8 // cls.codes_in_byte
        cls.largest_scale = largest_scale(cls.top)
        # Non-negative fp32 numbers are ordered like their bits read as integers.
        bounds = np.array([_SMALLEST_PEAK / cls.top, cls.largest_scale], dtype=np.float32)
        lowest, highest = bounds.view(np.uint32)
        cls.allowed_scale_bits = (lowest, highest)

    @staticmethod
    @abstractmethod
    def encode_blocks(blocks: Blocks, scales: Vector, packed: Bytes) -> None:
        """Writes finite values [blocks, 256] as codes [blocks, bytes], by their scales."""

    @staticmethod
    @abstractmethod
    def decode_blocks(packed: Bytes, scales: Vector, blocks: Blocks) -> int:
        """Writes what codes mean; returns ALL_RIGHT, FORBIDDEN or NOT_ZERO."""

    def code_bytes(self, num_elements: int) -> int:
        """Bytes that the codes take."""
        return -(-num_elements // self.codes_in_byte)

    def encode(self, values: Vector) -> bytes:
        """Body for finite fp32 values [n]; raises CodecError with the index of one that is not."""
        check_values(values)
        values = read_only(values)
        body: Bytes = np.empty(self.encoded_bytes(values.size), dtype=np.uint8)
        scales = body[: 4 * num_blocks(values.size)].view("<f4")  # [blocks]
        packed = body[scales.nbytes :]

        def encode_run(first: int, past: int) -> None:
            whole = past - past % BLOCK
            if whole > first:
                blocks = values[first:whole].reshape(-1, BLOCK)
                codes = packed[self.code_bytes(first) : self.code_bytes(whole)]
                self._encode_whole(blocks, scales[first // BLOCK : whole // BLOCK], codes, first)
            if past > whole:  # zeros at the end leave a short block's peak
                padded = np.zeros(BLOCK, dtype=np.float32)
                padded[: past - whole] = values[whole:past]
                codes = np.empty(self.code_bytes(BLOCK), dtype=np.uint8)
                self._encode_whole(read_only(padded).reshape(1, -1), scales[-1:], codes, whole)
                packed[self.code_bytes(whole) :] = codes[: self.code_bytes(past - whole)]
                if past % self.codes_in_byte:
                    packed[-1] &= 0x0F  # the padding

        self.tiles.each_run(values.size, encode_run)
        return body.tobytes()

    def _encode_whole(self, blocks: Blocks, scales: Vector, codes: Bytes, start: int) -> None:
        wrong = scales_of(blocks, scales, self.top, self.largest_scale)
        if wrong != ALL_RIGHT:
            refuse_not_finite(blocks[wrong], start=start + wrong * BLOCK)
        self.encode_blocks(blocks, scales, codes.reshape(len(blocks), -1))

    def reader(self, body: bytes | memoryview, num_elements: int) -> Reader:
        """Raises CodecError for a body with two meanings or none."""
        scales, packed = self.split(body, num_elements)  # [blocks]
        self._check_scales(scales)

        def read(first: int, past: int, values: Vector) -> None:
            whole = past - past % BLOCK
            if whole > first:
                codes = packed[self.code_bytes(first) : self.code_bytes(whole)]
                blocks = values[: whole - first].reshape(-1, BLOCK)
                self._decode_whole(codes, scales[first // BLOCK : whole // BLOCK], blocks)
            if past > whole:
                codes = np.full(self.code_bytes(BLOCK), self.zero_byte, dtype=np.uint8)
                codes[: self.code_bytes(past - whole)] = packed[self.code_bytes(whole) :]
                if past % self.codes_in_byte:
                    if packed[-1] >> 4:
                        raise CodecError(f"the padding of {self.name} is not 0")
                    codes[self.code_bytes(past - whole) - 1] |= self.zero_byte & 0xF0
                codes.flags.writeable = False
                padded = np.empty((1, BLOCK), dtype=np.float32)
                self._decode_whole(codes, scales[-1:], padded)
                values[whole - first :] = padded[0, : past - whole]

        return read

    def _decode_whole(self, codes: Bytes, scales: Vector, blocks: Blocks) -> None:
        match self.decode_blocks(codes.reshape(len(blocks), -1), scales, blocks):
            case 1:
                raise CodecError(f"{self.forbidden} of {self.name}")
            case 2:
                raise CodecError(f"an {self.name} block with scale 0 holds codes that are not 0")

    def _check_scales(self, scales: Vector) -> None:
        bits = scales.view(np.uint32)
        lowest, highest = self.allowed_scale_bits
        is_right = (bits == 0) | ((bits >= lowest) & (bits <= highest))
        if not is_right.all():
            block = int(np.argmin(is_right))
            raise CodecError(f"scale {scales[block]} of block {block} is none that {self.name} has")


@kernel
def _encode_int8(blocks: Blocks, scales: Vector, packed: Bytes) -> None:
    for b in range(blocks.shape[0]):
        whole_codes(blocks[b], divisor_of(scales[b]), packed[b].view(np.int8))


@kernel
def _decode_int8(packed: Bytes, scales: Vector, blocks: Blocks) -> int:
    for b in range(blocks.shape[0]):
        codes, scale, row = packed[b].view(np.int8), scales[b], blocks[b]
        least = np.int8(0)
        for i in range(BLOCK):
            least = min(least, codes[i])
        if least == -128:
            return FORBIDDEN
        if has_codes(scale, packed[b], 0):
            return NOT_ZERO
        for i in range(BLOCK):
            row[i] = np.float32(codes[i]) * scale
    return ALL_RIGHT


class Int8(Blockwise):
    """One byte for each value and four for each block: 8.125 bits per value."""

    name = "int8/1"
    top = np.float32(127)
    codes_in_byte = 1
    zero_byte = 0
    forbidden = "-128 is no code"
    encode_blocks = staticmethod(_encode_int8)
    decode_blocks = staticmethod(_decode_int8)


@kernel
def _encode_int4(blocks: Blocks, scales: Vector, packed: Bytes) -> None:
    codes = np.empty(BLOCK, dtype=np.int8)
    for b in range(blocks.shape[0]):
        whole_codes(blocks[b], divisor_of(scales[b]), codes)
        pack_nibbles(codes, packed[b])


@kernel
def _decode_int4(packed: Bytes, scales: Vector, blocks: Blocks) -> int:
    codes = np.empty(BLOCK, dtype=np.int8)
    for b in range(blocks.shape[0]):
        scale, row = scales[b], blocks[b]
        if not unpack_nibbles(packed[b], codes):
            return FORBIDDEN
        if has_codes(scale, packed[b], 0x88):
            return NOT_ZERO
        for i in range(BLOCK):
            row[i] = np.float32(codes[i]) * scale
    return ALL_RIGHT


class Int4(Blockwise):
    """Half a byte for each value and four bytes for each block: 4.125 bits per value."""

    name = "int4/1"
    top = np.float32(7)
    codes_in_byte = 2
    zero_byte = 0x88
    forbidden = "-8 is no code"
    encode_blocks = staticmethod(_encode_int4)
    decode_blocks = staticmethod(_decode_int4)
