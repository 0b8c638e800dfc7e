"""The codecs "int8/1" and "int4/1": small integers times a scale for each block of 256 values.

Absmax quantisation by block (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization",
section 2.1, with linear instead of dynamic codes). With `top` the largest code, 127 or 7:

    peak  = largest magnitude in the block
    scale = 0                          when peak < 2**-118
          = min(peak / top, LARGEST)   otherwise, as one fp32 division
    code  = value / scale, to the nearest integer, ties to even; 0 when scale is 0
    value = code * scale, as one fp32 multiplication

Nothing here depends on how a machine treats subnormal numbers: a scale is at least 2**-125, so
products are normal numbers or zero, and a subnormal value is less than half a scale, whether or
not the processor flushes it. LARGEST is the largest fp32 number whose product with `top` is
finite; for int8 it is one step below the rounded quotient, so that a peak near the end of fp32's
range does not come back as infinity. An error is at most half a scale; a block under 2**-118
becomes zero and stays, like every error, with error feedback.

Body: the scales of all blocks, fp32 little-endian, then all codes. The last block may be short.
int8: one two's-complement byte each; -128 is forbidden. int4: code + 8 in four bits, the first of
two in the low ones; 0 is forbidden, except as the padding of an odd end, where it is demanded. A
block with scale 0 has codes 0. So decoding is defined for every body or refuses it.
"""

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from node.exchange.codecs.codec import CodecError
from node.exchange.codecs.fp32 import (
    TILE_ELEMENTS,
    check_body,
    check_num_elements,
    check_values,
    refuse_not_finite,
)
from node.outer_state import Vector
from protocol.rounds import BLOCK

Bytes = npt.NDArray[np.uint8]
Codes = npt.NDArray[np.int8]

SMALLEST_PEAK = np.float32(2.0**-118)


def _largest_scale(top: np.float32) -> np.float32:
    """The largest fp32 number whose fp32 product with `top` is finite."""
    scale = np.finfo(np.float32).max / top
    with np.errstate(over="ignore"):
        while not np.isfinite(scale * top):
            scale = np.nextafter(scale, np.float32(0))
    return np.float32(scale)


def _num_blocks(num_elements: int) -> int:
    return -(-num_elements // BLOCK)


class _Blockwise(ABC):
    """Scales, tiles and checks; the subclasses say how codes lie in bytes.

    Works in tiles of TILE_ELEMENTS with buffers made once per call: whole-slice temporaries would
    be several times slower, being written to memory and read back.
    """

    name: str
    _top: np.float32

    def __init__(self) -> None:
        self._largest_scale = _largest_scale(self._top)
        # Non-negative fp32 numbers are ordered like their bits read as integers.
        bounds = np.array([SMALLEST_PEAK / self._top, self._largest_scale], dtype=np.float32).view(
            np.uint32
        )
        self._lowest_bits, self._highest_bits = bounds

    @abstractmethod
    def _code_bytes(self, num_elements: int) -> int:
        """Bytes that the codes take."""

    @abstractmethod
    def _pack(self, codes: Codes, packed: Bytes) -> None:
        """Writes codes [n] as bytes [_code_bytes(n)]."""

    @abstractmethod
    def _unpack(self, packed: Bytes, codes: Codes) -> None:
        """Reads codes [n] from bytes [_code_bytes(n)]; raises CodecError for a forbidden one."""

    def encoded_bytes(self, num_elements: int) -> int:
        """Exact size of the body."""
        check_num_elements(num_elements)
        return 4 * _num_blocks(num_elements) + self._code_bytes(num_elements)

    def encode(self, values: Vector) -> bytes:
        """Body for finite fp32 values [n]; raises CodecError with the index of one that is not."""
        check_values(values)
        num_blocks = _num_blocks(values.size)
        body: Bytes = np.empty(self.encoded_bytes(values.size), dtype=np.uint8)
        scales = body[: 4 * num_blocks].view("<f4")  # [blocks]
        packed = body[4 * num_blocks :]
        tile_elements = min(TILE_ELEMENTS, BLOCK * num_blocks)
        scratch = np.empty(tile_elements, dtype=np.float32)
        codes = np.empty(tile_elements, dtype=np.int8)
        for start in range(0, values.size, TILE_ELEMENTS):
            tile = values[start : start + TILE_ELEMENTS]
            blocks = _in_blocks(tile)  # [b, 256]
            quotients = scratch[: blocks.size].reshape(blocks.shape)
            np.abs(blocks, out=quotients)
            peaks = quotients.max(axis=1)  # [b]; NaN and infinity come through
            if not np.isfinite(peaks).all():
                refuse_not_finite(tile, start=start)
            tile_scales = np.minimum(peaks / self._top, self._largest_scale)
            tile_scales[peaks < SMALLEST_PEAK] = 0
            first_block = start // BLOCK
            scales[first_block : first_block + len(blocks)] = tile_scales
            # Dividing by infinity gives the zero codes of a zero block without a branch.
            tile_scales[tile_scales == 0] = np.inf
            np.divide(blocks, tile_scales[:, None], out=quotients)
            # Within [-top, top] without clamping: a scale is at most two roundings too small.
            np.rint(quotients, out=quotients)
            np.copyto(codes[: blocks.size].reshape(blocks.shape), quotients, casting="unsafe")
            end = start + tile.size
            self._pack(codes[: tile.size], packed[self._code_bytes(start) : self._code_bytes(end)])
        return body.tobytes()

    def decode(self, body: bytes | memoryview, num_elements: int) -> Vector:
        """Values [num_elements]; raises CodecError for a body with two meanings or none."""
        check_body(body, codec=self.name, expected_bytes=self.encoded_bytes(num_elements))
        num_blocks = _num_blocks(num_elements)
        raw = np.frombuffer(body, dtype=np.uint8)
        packed = raw[4 * num_blocks :]
        scales = raw[: 4 * num_blocks].view("<f4").astype(np.float32)  # [blocks]
        self._check_scales(scales)
        values = np.empty((num_blocks, BLOCK), dtype=np.float32)
        codes = np.empty(min(TILE_ELEMENTS, values.size), dtype=np.int8)
        for start in range(0, num_elements, TILE_ELEMENTS):
            end = min(start + TILE_ELEMENTS, num_elements)
            self._unpack(
                packed[self._code_bytes(start) : self._code_bytes(end)], codes[: end - start]
            )
            first_block, past_block = start // BLOCK, _num_blocks(end)
            padded = BLOCK * (past_block - first_block)
            codes[end - start : padded] = 0
            code_blocks = codes[:padded].reshape(-1, BLOCK)
            tile_scales = scales[first_block:past_block]
            if code_blocks[tile_scales == 0].any():
                raise CodecError(f"an {self.name} block with scale 0 holds codes that are not 0")
            tile = values[first_block:past_block]
            np.copyto(tile, code_blocks)
            np.multiply(tile, tile_scales[:, None], out=tile)
        return values.reshape(-1)[:num_elements]

    def _check_scales(self, scales: Vector) -> None:
        bits = scales.view(np.uint32)
        is_right = (bits == 0) | ((bits >= self._lowest_bits) & (bits <= self._highest_bits))
        if not is_right.all():
            block = int(np.argmin(is_right))
            raise CodecError(f"scale {scales[block]} of block {block} is none that {self.name} has")


def _in_blocks(tile: Vector) -> Vector:
    """The tile as [blocks, 256]; a short last block is filled with zeros, which leave its peak."""
    if tile.size % BLOCK == 0:
        return tile.reshape(-1, BLOCK)
    blocks = np.zeros((_num_blocks(tile.size), BLOCK), dtype=np.float32)
    blocks.reshape(-1)[: tile.size] = tile
    return blocks


class Int8(_Blockwise):
    """One byte for each value and four for each block: 8.125 bits per value."""

    name = "int8/1"
    _top = np.float32(127)

    def _code_bytes(self, num_elements: int) -> int:
        return num_elements

    def _pack(self, codes: Codes, packed: Bytes) -> None:
        packed[:] = codes.view(np.uint8)

    def _unpack(self, packed: Bytes, codes: Codes) -> None:
        codes[:] = packed.view(np.int8)
        if codes.min() == -128:
            raise CodecError("-128 is no code of int8/1")


class Int4(_Blockwise):
    """Half a byte for each value and four bytes for each block: 4.125 bits per value."""

    name = "int4/1"
    _top = np.float32(7)

    def _code_bytes(self, num_elements: int) -> int:
        return (num_elements + 1) // 2

    def _pack(self, codes: Codes, packed: Bytes) -> None:
        nibbles = np.zeros(2 * packed.size, dtype=np.uint8)
        np.add(codes.view(np.uint8), np.uint8(8), out=nibbles[: codes.size])  # modulo 256: 1..15
        pairs = nibbles.view("<u2")  # the first code in the low byte
        packed[:] = pairs | (pairs >> 4)  # keeps the low byte of each: two nibbles

    def _unpack(self, packed: Bytes, codes: Codes) -> None:
        pairs = packed.astype("<u2")
        pairs |= pairs << 4
        pairs &= 0x0F0F
        nibbles = pairs.view(np.uint8)
        if nibbles[codes.size :].any():
            raise CodecError("the padding of int4/1 is not 0")
        if nibbles[: codes.size].min() == 0:
            raise CodecError("-8 is no code of int4/1")
        np.subtract(nibbles[: codes.size], np.uint8(8), out=codes.view(np.uint8))  # modulo 256
