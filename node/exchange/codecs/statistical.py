"""The codec "int2/1": four bins by mean and spread for each chunk of 4096, and the mean of each bin.

Statistical quantisation (as in Jaghouar et al. 2024, "INTELLECT-1 Technical Report", section 2.2,
whose bins are uniform between the mean and six standard deviations, and whose decode table holds
the means of the bins; with two bits in Thérien et al. 2025, "MuLoCo"). Four bins cannot be uniform:
with the mean m and the mean distance d from it, they meet at m - 1.25 d, m and m + 1.25 d. For a normal
distribution that is one standard deviation, where the best quantiser's are (Max 1960, "Quantizing for
Minimum Distortion": 0.98). It needs error feedback.

Body: four fp32 for each chunk, little-endian, the lowest bin's mean first, then two bits for each
value as in packed_codes.py: the bin. Means rise, are 0 or at least 2**-118 in magnitude, and never -0.
"""

from dataclasses import dataclass

import numpy as np

from node.exchange.codecs.chunks import CHUNK, INFINITY, LARGEST, SMALLEST, num_chunks, sum_of
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
from node.exchange.codecs.compiled import ALL_RIGHT, kernel, read_only
from node.exchange.codecs.packed_codes import pack_two_bits, two_bit_bytes, unpack_two_bits
from node.exchange.codecs.tiles import ONE_THREAD, Tiles
from node.outer_state import Vector

_FAR = np.float32(1.25)


@kernel
def _count(codes: Bytes, wanted: int) -> int:
    num_found = np.int32(0)
    for i in range(codes.size):
        num_found += np.int32(codes[i] == np.uint8(wanted))
    return int(num_found)


@kernel
def _binned(chunk: Vector, rows: Vector, table: Vector, codes: Bytes) -> None:
    """Writes the decode table [4] and the bins [n] of a chunk [n], in its own precision.

    0 is far below the mean, 1 below, 2 above, 3 far above. Overwrites rows [4, 4096].
    """
    n = chunk.size
    magnitudes, offsets, far_magnitudes, far_offsets = rows[0], rows[1], rows[2], rows[3]
    num, two = rows.dtype.type(n), rows.dtype.type(2)
    zero, one = rows.dtype.type(0), rows.dtype.type(1)
    mean = sum_of(chunk) / num
    for i in range(n):
        offset = chunk[i] - mean
        offsets[i] = offset
        magnitudes[i] = abs(offset)
    bound = sum_of(magnitudes[:n]) / num * _FAR
    for i in range(n):
        is_far = magnitudes[i] >= bound
        far = one if is_far else zero
        far_magnitudes[i] = magnitudes[i] * far
        far_offsets[i] = offsets[i] * far
    for i in range(n):
        is_far, is_above = np.uint8(magnitudes[i] >= bound), np.uint8(offsets[i] >= zero)
        codes[i] = np.uint8(is_above << 1 | is_above ^ is_far ^ 1)
    # With the sums over all and over the far ones, of offsets and of their magnitudes, those of the
    # four bins follow: what is above adds to both alike.
    sums = np.empty(4, dtype=rows.dtype)
    for row in range(4):
        sums[row] = sum_of(rows[row, :n])
    above, below = (sums[0] + sums[1]) / two, (sums[1] - sums[0]) / two
    far_above, far_below = (sums[2] + sums[3]) / two, (sums[3] - sums[2]) / two
    sums[0], sums[1], sums[2], sums[3] = far_below, below - far_below, above - far_above, far_above
    for code in range(4):
        # An empty bin has the chunk's mean, which any below an occupied one would push up.
        table[code] = np.float32(mean + sums[code] / max(_count(codes[:n], code), 1))
    if _count(codes[:n], 0) == 0:
        table[0] = table[1]


@kernel
def _encode(values: Vector, rows: Vector, tables: Vector, packed: Bytes) -> int:
    """Writes chunks; returns the first whose table is not finite, or ALL_RIGHT.

    Computes in the precision of values. Overwrites rows [4, 4096].
    """
    codes = np.empty(CHUNK, dtype=np.uint8)
    for c in range(tables.shape[0]):
        chunk, table = values[c * CHUNK : (c + 1) * CHUNK], tables[c]
        _binned(chunk, rows, table, codes)
        for code in range(4):
            if not abs(table[code]) < INFINITY:
                return c
        for code in range(4):
            if abs(table[code]) < SMALLEST:
                table[code] = np.float32(0)
            if code and table[code] < table[code - 1]:  # rounding may swap what is nearly equal
                table[code] = table[code - 1]
        codes[chunk.size :] = 0
        pack_two_bits(codes, packed[c * CHUNK // 4 : (c + 1) * CHUNK // 4])
    return ALL_RIGHT


def _encode_all(values: Vector, tables: Vector, packed: Bytes, start: int) -> None:
    """Writes chunks, which begin at `start` of the slice; refuses values that are not finite."""
    rows, first = np.empty((4, CHUNK), dtype=np.float32), 0
    while first < len(tables):
        place = first * CHUNK
        wrong = _encode(values[place:], rows, tables[first:], packed[place // 4 :])
        if wrong == ALL_RIGHT:
            return
        first += wrong
        chunk = values[first * CHUNK : (first + 1) * CHUNK]
        refuse_not_finite(chunk, start=start + first * CHUNK)
        _encode(  # in float64, where no sum overflows
            read_only(chunk.astype(np.float64)),
            np.empty((4, CHUNK), dtype=np.float64),
            tables[first : first + 1],
            packed[first * CHUNK // 4 : (first + 1) * CHUNK // 4],
        )
        first += 1


@kernel
def _decode(packed: Bytes, tables: Vector, values: Vector) -> None:
    codes = np.empty(CHUNK, dtype=np.uint8)
    for c in range(tables.shape[0]):
        chunk, table = values[c * CHUNK : (c + 1) * CHUNK], tables[c]
        unpack_two_bits(packed[c * CHUNK // 4 : (c + 1) * CHUNK // 4], codes)
        far_below, below, above, far_above = table[0], table[1], table[2], table[3]
        for i in range(chunk.size):
            lower = below if codes[i] & 1 else far_below
            upper = far_above if codes[i] & 1 else above
            chunk[i] = upper if codes[i] & 2 else lower


@dataclass(frozen=True)
class Int2(DecodesByTile, FixedSize):
    """Two bits for each value and sixteen bytes for each chunk: 2.031 bits per value."""

    name = "int2/1"
    tiles: Tiles = ONE_THREAD

    def encoded_bytes(self, num_elements: int) -> int:
        """Exact size of the body."""
        check_num_elements(num_elements)
        return 16 * num_chunks(num_elements) + two_bit_bytes(num_elements)

    def encode(self, values: Vector) -> bytes:
        """Body for finite values [n]; raises CodecError with the index of one that is not."""
        check_values(values)
        values = read_only(values)
        body: Bytes = np.empty(self.encoded_bytes(values.size), dtype=np.uint8)
        tables = body[: 16 * num_chunks(values.size)].view("<f4").reshape(-1, 4)
        packed = body[16 * len(tables) :]

        def encode_run(first: int, past: int) -> None:
            _encode_all(
                values[first:past],
                tables[first // CHUNK : num_chunks(past)],
                packed[first // 4 : two_bit_bytes(past)],
                first,
            )

        self.tiles.each_run(values.size, encode_run)
        return body.tobytes()

    def reader(self, body: bytes | memoryview, num_elements: int) -> Reader:
        """Raises CodecError for a body with two meanings or none."""
        raw = check_body(body, codec=self, num_elements=num_elements)
        tables = raw[: 16 * num_chunks(num_elements)].view("<f4").astype(np.float32).reshape(-1, 4)
        _check_tables(tables)
        packed = raw[16 * len(tables) :]
        if num_elements % 4 and packed[-1] >> 2 * (num_elements % 4):
            raise CodecError("the padding of int2/1 is not 0")

        def read(first: int, past: int, values: Vector) -> None:
            codes = packed[first // 4 : two_bit_bytes(past)]
            _decode(codes, tables[first // CHUNK : num_chunks(past)], values)

        return read


def _check_tables(tables: Vector) -> None:
    magnitudes = np.abs(tables)
    is_right = (magnitudes >= SMALLEST) & (magnitudes <= LARGEST) | (tables.view(np.uint32) == 0)
    if not is_right.all() or (np.diff(tables, axis=1) < 0).any():
        raise CodecError("a table of int2/1 does not rise, or holds what no encoder writes")
