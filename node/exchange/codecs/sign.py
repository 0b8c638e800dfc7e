"""The codec "sign/1": the sign of each value, and the mean magnitude of each chunk of 4096.

Scaled sign compression (Karimireddy et al. 2019, "Error Feedback Fixes SignSGD and other Gradient
Compression Schemes", section 3); it needs error feedback.

Body: a scale for each chunk, fp32 little-endian, then a bit for each value, eight in a byte, the
first in the lowest: 1 says minus the scale, 0 plus the scale. A scale is the mean magnitude, or 0
below 2**-118; the bits of a chunk with scale 0 are 0, and so is the padding.
"""

from dataclasses import dataclass

import numpy as np

from node.exchange.codecs.chunks import (
    CHUNK,
    INFINITY,
    LARGEST,
    SMALLEST,
    check_scales,
    mean_magnitude,
    num_chunks,
)
from node.exchange.codecs.codec import (
    Bytes,
    CodecError,
    DecodesByTile,
    FixedSize,
    Reader,
    check_body,
    check_num_elements,
    check_values,
    refuse_not_finite,
)
from node.exchange.codecs.compiled import ALL_RIGHT, bits_of, float_of, kernel, read_only
from node.exchange.codecs.tiles import ONE_THREAD, Tiles
from node.outer_state import Vector

_GATHER = np.uint64(0x0102_0408_1020_4080)


@kernel
def _encode(values: Vector, scales: Vector, packed: Bytes) -> int:
    """Writes chunks; returns the first place of one that is not finite, or ALL_RIGHT."""
    scratch = np.empty(CHUNK, dtype=np.float32)
    bits = np.empty(CHUNK, dtype=np.uint8)
    for c in range(scales.size):
        chunk = values[c * CHUNK : (c + 1) * CHUNK]
        mean = mean_magnitude(chunk, scratch)
        if not mean < INFINITY:
            return c * CHUNK
        if mean < SMALLEST:
            mean = np.float32(0)
        scales[c] = mean
        for i in range(chunk.size):
            bits[i] = np.uint8((chunk[i] < 0) & (mean > 0))
        bits[chunk.size :] = 0
        eights = bits.view(np.uint64)
        bytes_of_chunk = packed[c * CHUNK // 8 : (c + 1) * CHUNK // 8]
        for i in range(bytes_of_chunk.size):
            # The product's highest byte has each of the eight bits at its place.
            bytes_of_chunk[i] = np.uint8(eights[i] * _GATHER >> np.uint64(56))
    return ALL_RIGHT


@kernel
def _decode(packed: Bytes, scales: Vector, values: Vector) -> bool:
    """Writes chunks; returns whether those with scale 0 have no bits."""
    whole = values.size // 8
    eights = values[: 8 * whole].view(np.uint32).reshape(whole, 8)
    for c in range(scales.size):
        scale = bits_of(scales[c])
        first, past = c * CHUNK // 8, (c + 1) * CHUNK // 8
        if scale == 0 and packed[first:past].any():
            return False
        for i in range(first, min(past, whole)):
            byte = np.uint32(packed[i])
            for place in range(8):
                eights[i, place] = scale | byte >> np.uint32(place) << np.uint32(31)
    for i in range(8 * whole, values.size):
        bit = np.uint32(packed[whole]) >> np.uint32(i % 8)
        values[i] = float_of(np.uint32(bits_of(scales[-1]) | bit << np.uint32(31)))
    return True


@dataclass(frozen=True)
class Sign(DecodesByTile, FixedSize):
    """A bit for each value and four bytes for each chunk: 1.008 bits per value."""

    name = "sign/1"
    tiles: Tiles = ONE_THREAD

    def encoded_bytes(self, num_elements: int) -> int:
        """Exact size of the body."""
        check_num_elements(num_elements)
        return 4 * num_chunks(num_elements) + (num_elements + 7) // 8

    def encode(self, values: Vector) -> bytes:
        """Body for finite values [n]; raises CodecError with the index of one that is not."""
        check_values(values)
        values = read_only(values)
        body: Bytes = np.empty(self.encoded_bytes(values.size), dtype=np.uint8)
        scales = body[: 4 * num_chunks(values.size)].view("<f4")
        packed = body[4 * scales.size :]

        def encode_run(first: int, past: int) -> None:
            wrong = _encode(
                values[first:past],
                scales[first // CHUNK : num_chunks(past)],
                packed[first // 8 : (past + 7) // 8],
            )
            if wrong != ALL_RIGHT:
                refuse_not_finite(values[first + wrong : past], start=first + wrong)

        self.tiles.each_run(values.size, encode_run)
        return body.tobytes()

    def reader(self, body: bytes | memoryview, num_elements: int) -> Reader:
        """Raises CodecError for a body with two meanings or none."""
        raw = check_body(body, codec=self, num_elements=num_elements)
        scales = read_only(raw[: 4 * num_chunks(num_elements)].view("<f4").astype(np.float32))
        check_scales(scales, codec=self.name, smallest=SMALLEST, largest=LARGEST)
        packed = raw[4 * scales.size :]
        if num_elements % 8 and packed[-1] >> (num_elements % 8):
            raise CodecError("the padding of sign/1 is not 0")

        def read(first: int, past: int, values: Vector) -> None:
            bits = packed[first // 8 : (past + 7) // 8]
            if not _decode(bits, scales[first // CHUNK : num_chunks(past)], values):
                raise CodecError("a sign/1 chunk with scale 0 holds bits that are not 0")

        return read
