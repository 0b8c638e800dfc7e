"""Codecs with statistics of each chunk of 4096 values: "sign/1" and "int2/1".

Chunks, and sums over them, are for entropy.py and top_k.py too.
The last chunk of a slice may be short. A scale for 256 values would cost coarse codecs as much as a tenth of
their body; for 4096 it is nothing. Both codecs need error feedback.

The sum of a chunk is taken in the order in which numpy adds, for the same bytes from every encoder: eight
sums over each piece of up to 128 values, and pieces in pairs. So there are many additions at once, and
small rounding errors. A compiler may not change the order of additions by itself.

sign: the sign of each value, and the mean magnitude of the chunk: scaled sign compression (Karimireddy et
al. 2019, "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", section 3). Body: a scale for
each chunk, fp32 little-endian, then a bit for each value, eight in a byte, the first in the lowest: 1 says
minus the scale, 0 plus the scale. A scale is the mean magnitude, or 0 below 2**-118; the bits of a chunk with
scale 0 are 0, and so is the padding.

int2: four bins by mean and spread, and the mean of each bin. Statistical quantisation (as in Jaghouar et al.
2024, "INTELLECT-1 Technical Report", section 2.2, whose bins are uniform between the mean and six standard
deviations, and whose decode table holds the means of the bins; with two bits in Thérien et al. 2025,
"MuLoCo"). Four bins cannot be uniform: with the mean m and the mean distance d from it, they meet at
m - 1.25 d, m and m + 1.25 d. For a normal distribution that is one standard deviation, where the best
quantiser's are (Max 1960, "Quantizing for Minimum Distortion": 0.98). Body: four fp32 for each chunk,
little-endian, the lowest bin's mean first, then two bits for each value as dense.py packs them: the bin.
Means rise, are 0 or at least 2**-118 in magnitude, and never -0.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from node.exchange.codecs.codec import (
    ALL_RIGHT,
    Bytes,
    CodecError,
    FixedSize,
    Reader,
    bits_of,
    check_values,
    float_of,
    kernel,
    read_only,
    refuse_not_finite,
)
from node.exchange.codecs.dense import pack_two_bits, two_bit_bytes, unpack_two_bits
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


_GATHER = np.uint64(0x0102_0408_1020_4080)


@kernel
def _encode_signs(values: Vector, scales: Vector, packed: Bytes) -> int:
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
def _decode_signs(packed: Bytes, scales: Vector, values: Vector) -> bool:
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


class Sign(FixedSize):
    """A bit for each value and four bytes for each chunk: 1.008 bits per value."""

    name = "sign/1"
    bits, block, head_bytes = 1, CHUNK, 4

    def encode(self, values: Vector) -> bytes:
        """Body for finite values [n]; raises CodecError with the index of one that is not."""
        check_values(values)
        values = read_only(values)
        body: Bytes = np.empty(self.encoded_bytes(values.size), dtype=np.uint8)
        scales = body[: 4 * num_chunks(values.size)].view("<f4")
        packed = body[4 * scales.size :]

        def encode_run(first: int, past: int) -> None:
            wrong = _encode_signs(
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
        scales, packed = self.split(body, num_elements)
        check_scales(scales, codec=self.name, smallest=SMALLEST, largest=LARGEST)
        if num_elements % 8 and packed[-1] >> (num_elements % 8):
            raise CodecError("the padding of sign/1 is not 0")

        def read(first: int, past: int, values: Vector) -> None:
            bits = packed[first // 8 : (past + 7) // 8]
            if not _decode_signs(bits, scales[first // CHUNK : num_chunks(past)], values):
                raise CodecError("a sign/1 chunk with scale 0 holds bits that are not 0")

        return read


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
def _encode_bins(values: Vector, rows: Vector, tables: Vector, packed: Bytes) -> int:
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


def _encode_all_bins(values: Vector, tables: Vector, packed: Bytes, start: int) -> None:
    """Writes chunks, which begin at `start` of the slice; refuses values that are not finite."""
    rows, first = np.empty((4, CHUNK), dtype=np.float32), 0
    while first < len(tables):
        place = first * CHUNK
        wrong = _encode_bins(values[place:], rows, tables[first:], packed[place // 4 :])
        if wrong == ALL_RIGHT:
            return
        first += wrong
        chunk = values[first * CHUNK : (first + 1) * CHUNK]
        refuse_not_finite(chunk, start=start + first * CHUNK)
        _encode_bins(  # in float64, where no sum overflows
            read_only(chunk.astype(np.float64)),
            np.empty((4, CHUNK), dtype=np.float64),
            tables[first : first + 1],
            packed[first * CHUNK // 4 : (first + 1) * CHUNK // 4],
        )
        first += 1


@kernel
def _decode_bins(packed: Bytes, tables: Vector, values: Vector) -> None:
    codes = np.empty(CHUNK, dtype=np.uint8)
    for c in range(tables.shape[0]):
        chunk, table = values[c * CHUNK : (c + 1) * CHUNK], tables[c]
        unpack_two_bits(packed[c * CHUNK // 4 : (c + 1) * CHUNK // 4], codes)
        far_below, below, above, far_above = table[0], table[1], table[2], table[3]
        for i in range(chunk.size):
            lower = below if codes[i] & 1 else far_below
            upper = far_above if codes[i] & 1 else above
            chunk[i] = upper if codes[i] & 2 else lower


class Int2(FixedSize):
    """Two bits for each value and sixteen bytes for each chunk: 2.031 bits per value."""

    name = "int2/1"
    bits, block, head_bytes = 2, CHUNK, 16

    def encode(self, values: Vector) -> bytes:
        """Body for finite values [n]; raises CodecError with the index of one that is not."""
        check_values(values)
        values = read_only(values)
        body: Bytes = np.empty(self.encoded_bytes(values.size), dtype=np.uint8)
        tables = body[: 16 * num_chunks(values.size)].view("<f4").reshape(-1, 4)
        packed = body[16 * len(tables) :]

        def encode_run(first: int, past: int) -> None:
            _encode_all_bins(
                values[first:past],
                tables[first // CHUNK : num_chunks(past)],
                packed[first // 4 : two_bit_bytes(past)],
                first,
            )

        self.tiles.each_run(values.size, encode_run)
        return body.tobytes()

    def reader(self, body: bytes | memoryview, num_elements: int) -> Reader:
        """Raises CodecError for a body with two meanings or none."""
        heads, packed = self.split(body, num_elements)
        tables = heads.reshape(-1, 4)
        _check_tables(tables)
        if num_elements % 4 and packed[-1] >> 2 * (num_elements % 4):
            raise CodecError("the padding of int2/1 is not 0")

        def read(first: int, past: int, values: Vector) -> None:
            codes = packed[first // 4 : two_bit_bytes(past)]
            _decode_bins(codes, tables[first // CHUNK : num_chunks(past)], values)

        return read


def _check_tables(tables: Vector) -> None:
    magnitudes = np.abs(tables)
    is_right = (magnitudes >= SMALLEST) & (magnitudes <= LARGEST) | (tables.view(np.uint32) == 0)
    if not is_right.all() or (np.diff(tables, axis=1) < 0).any():
        raise CodecError("a table of int2/1 does not rise, or holds what no encoder writes")
