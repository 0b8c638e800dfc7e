"""The codecs "topk64/1" and "topk256/1": the 64 or 256 largest of each 4096 values, two bits each.

Top-k in chunks with statistical two-bit values (Sarfi et al. 2025, "Communication Efficient LLM
Pre-training with SparseLoCo", section 3). It needs error feedback, with decay, and many rounds. A
chunk is a piece of the canonical vector, not a tile of a matrix: docs/decisions.md says why.

A short chunk at the end has as many in proportion, rounded up. Of the chosen values, those are big
whose magnitude is at least the chosen ones' mean; small and big have their mean magnitude each, in bf16,
and 0 below 2**-118. A value that is not chosen becomes 0.

Choosing is exact, and the same on every machine. torch.topk and numpy's partition look at every value
several times. Here one pass takes the maxima of 512 groups of 8 values; a bound that at least k of them
reach is reached by at least k values, and by few more. A bisection over so few maxima is quick, and so is
another over those values, for the exact bound. All by their bits: magnitudes are ordered like these, and
integers are compared faster.

The gaps between the places are sent, with a Huffman code. For 64 of 4096 that takes about 7.5 bits a place in
slices of a million values and more, where log2 of the number of choices is 7.4, and hardly more than 8 in
small ones, for which the code's table is too large. The places themselves would have 12 bits. A gap is the
number of values between two chosen ones; a section's first counts from its beginning. Gaps are bytes: 255
stands for 255 values without a chosen one, and the gap goes on.

Body: for each chunk the small and the big magnitude (two bf16, little-endian); two bits for each
chosen value as dense.py packs them, 1 for minus and 2 for big; for each section of 1,048,576 values the
bytes of its places, 32 bits little-endian; then the places. Small is not above big; both are 0 or normal
numbers.
"""

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from node.exchange.codecs.chunkwise import CHUNK, SMALLEST, Floats, num_chunks, sum_of
from node.exchange.codecs.codec import (
    ALL_RIGHT,
    Bytes,
    Codec,
    CodecError,
    Reader,
    check_body,
    check_num_elements,
    check_values,
    kernel,
    read_only,
    refuse_not_finite,
)
from node.exchange.codecs.deflate import deflated, inflated, most_stream_bytes
from node.exchange.codecs.dense import (
    Halves,
    from_bf16,
    pack_two_bits,
    to_bf16,
    two_bit_bytes,
    unpack_two_bits,
)
from node.outer_state import Vector

Places = npt.NDArray[np.int32]
Magnitudes = npt.NDArray[np.int32]
"""Patterns of magnitudes."""

_GROUPS = 512
_MAGNITUDE = np.int32(0x7FFF_FFFF)
_INFINITY = np.int32(0x7F80_0000)


def num_chosen(num_elements: int, k: int) -> int:
    """Values chosen of so many: k of each chunk, and of a short one in proportion, rounded up."""
    return num_elements // CHUNK * k + -(-(num_elements % CHUNK) * k // CHUNK)


@kernel
def _num_reaching(magnitudes: Magnitudes, bound: np.int32) -> int:
    count = np.int32(0)
    for i in range(magnitudes.size):
        count += np.int32(magnitudes[i] >= bound)
    return int(count)


@kernel
def _bound_of(magnitudes: Magnitudes, least: int, most: int) -> int:
    """A bound that at least `least` of them reach and at most `most`, if there is one.

    If equal ones stand in the way: the largest bound that at least `least` reach.
    """
    low, high = 0, 1 << 31  # at least `least` reach the first; fewer the second
    while high - low > 1:
        middle = (low + high) // 2
        count = _num_reaching(magnitudes, np.int32(middle))
        if count < least:
            high = middle
        else:
            low = middle
            if count <= most:
                break
    return low


@kernel
def _largest_of_chunk(
    chunk: Vector, k: int, places: Places, magnitudes: Magnitudes, reaches: Bytes
) -> bool:
    """Writes the places [k] of the largest, rising; returns whether all values are finite.

    Overwrites magnitudes [3, 4096] and reaches [4096].
    """
    n = chunk.size
    of_chunk = magnitudes[0, :n]
    candidates, of_candidates = magnitudes[1], magnitudes[2]
    bits = chunk.view(np.int32)
    for i in range(n):
        of_chunk[i] = np.int32(bits[i] & _MAGNITUDE)
    bound = 0
    if n == CHUNK:
        eighths = magnitudes[0].reshape(8, _GROUPS)
        for g in range(_GROUPS):
            candidates[g] = eighths[0, g]
        for e in range(1, 8):
            for g in range(_GROUPS):
                candidates[g] = max(candidates[g], eighths[e, g])
        bound = _bound_of(candidates[:_GROUPS], k, k + k // 8)
    for i in range(n):
        reaches[i] = np.uint8(of_chunk[i] >= bound)
    reaches[n : n + -n % 8] = 0
    eights = reaches.view(np.uint64)
    count = 0
    for eight in range(-(-n // 8)):
        if eights[eight] != 0:
            for i in range(8 * eight, 8 * eight + 8):
                # Written in any case, and written over if it does not count: no branch to guess.
                candidates[count] = i
                of_candidates[count] = magnitudes[0, i]
                count += reaches[i]
    if _num_reaching(of_candidates[:count], _INFINITY):
        return False  # what is not finite is among the largest
    exact = _bound_of(of_candidates[:count], k, k)
    num_equal = k  # of those that only just reach the bound, so many are chosen
    for i in range(count):
        num_equal -= int(of_candidates[i] > exact)
    chosen = 0
    for i in range(count):
        if of_candidates[i] > exact or (of_candidates[i] == exact and num_equal > 0):
            num_equal -= int(of_candidates[i] == exact)
            places[chosen] = candidates[i]
            chosen += 1
    return True


@kernel
def places_of_largest(values: Vector, k: int, places: Places) -> int:
    """Writes the places of each chunk's k largest, rising; of equal ones the first.

    Of a short chunk, as many as `places` has left. Returns the beginning of a chunk that is not
    finite, or ALL_RIGHT.
    """
    magnitudes = np.empty((3, CHUNK), dtype=np.int32)
    reaches = np.empty(CHUNK, dtype=np.uint8)
    for c in range(-(-values.size // CHUNK)):
        of_chunk = places[c * k : (c + 1) * k]
        chunk = values[c * CHUNK : (c + 1) * CHUNK]
        if not _largest_of_chunk(chunk, of_chunk.size, of_chunk, magnitudes, reaches):
            return c * CHUNK
        for i in range(of_chunk.size):
            of_chunk[i] += c * CHUNK
    return ALL_RIGHT


SECTION = 1 << 20
"""Values whose places are one stream: 4 MiB of fp32."""

_SKIP = 255


def _most_gap_bytes(num_places: int, num_elements: int) -> int:
    return num_places + num_elements // _SKIP


def most_bytes_of_places(num_places: int, num_elements: int) -> int:
    """No stream of so many places in a section of so many values is larger."""
    return most_stream_bytes(_most_gap_bytes(num_places, num_elements))


@kernel
def _write_gaps(places: Places, gaps: Bytes) -> int:
    """Writes the gaps before rising places; returns how many bytes they take."""
    size = 0
    next_place = 0
    for i in range(places.size):
        gap = places[i] - next_place
        next_place = places[i] + 1
        while gap >= _SKIP:
            gaps[size] = _SKIP
            size += 1
            gap -= _SKIP
        gaps[size] = gap
        size += 1
    return size


@kernel
def _read_gaps(gaps: Bytes, k: int, num_elements: int, places: Places) -> bool:
    """Writes places; returns whether they are as many as asked for, and k of each chunk."""
    found = 0
    place = 0
    for i in range(gaps.size):
        place += gaps[i]
        if gaps[i] != _SKIP:
            if found == places.size or place >= num_elements or place // CHUNK != found // k:
                return False
            places[found] = place
            found += 1
            place += 1
    return found == places.size and gaps.size > 0 and gaps[-1] != _SKIP


def encode_places(places: Places, num_elements: int) -> bytes:
    """Rising places within a section of so many values."""
    gaps: Bytes = np.empty(_most_gap_bytes(places.size, num_elements), dtype=np.uint8)
    return deflated(gaps[: _write_gaps(places, gaps)])


def decode_places(
    stream: Bytes, *, num_places: int, k: int, num_elements: int, codec: str
) -> Places:
    """Rising places [num_places] in a section of so many values, of which each chunk has its k.

    Raises CodecError for others.
    """
    gaps = inflated(stream, most_bytes=_most_gap_bytes(num_places, num_elements), codec=codec)
    places: Places = np.empty(num_places, dtype=np.int32)
    if not _read_gaps(read_only(gaps), k, num_elements, places):
        raise CodecError(f"the places of {codec} are not {k} of each {CHUNK}")
    return places


@kernel
def _mean_bf16(sizes: Floats, num: int) -> np.uint16:
    """The sum divided, 0 below the smallest."""
    mean = np.float32(sum_of(sizes) / max(num, 1))
    return to_bf16(np.float32(0) if mean < SMALLEST else mean)


@kernel
def _describe(values: Vector, places: Places, k: int, magnitudes: Halves, codes: Bytes) -> None:
    """Writes the small and the big magnitude of each chunk [chunks, 2], and its codes.

    In float64 no sum overflows, and none of subnormal numbers is lost.
    """
    for c in range(magnitudes.shape[0]):
        of_chunk = places[c * k : (c + 1) * k]
        n = of_chunk.size
        sizes = np.empty(n, dtype=np.float64)
        for i in range(n):
            sizes[i] = abs(values[of_chunk[i]])
        mean = sum_of(sizes) / n
        small, big = np.empty(n, dtype=np.float64), np.empty(n, dtype=np.float64)
        num_big = 0
        for i in range(n):
            is_big = sizes[i] >= mean
            big[i] = sizes[i] if is_big else 0.0
            small[i] = 0.0 if is_big else sizes[i]
            num_big += int(is_big)
            codes[c * k + i] = np.uint8(is_big) << 1 | np.uint8(values[of_chunk[i]] < 0)
        magnitudes[c, 0] = _mean_bf16(small, n - num_big)
        magnitudes[c, 1] = _mean_bf16(big, num_big)


@kernel
def _place(
    places: Places, codes: Bytes, magnitudes: Halves, first_chunk: int, values: Vector
) -> None:
    """Writes the values at places within a section, which begins with chunk `first_chunk`."""
    for i in range(places.size):
        size = from_bf16(magnitudes[first_chunk + places[i] // CHUNK, codes[i] >> 1])
        values[places[i]] = -size if codes[i] & 1 else size


class TopK(Codec):
    """The k largest of each chunk; the subclasses say how many."""

    name: ClassVar[str]
    unit = SECTION
    k: ClassVar[int]

    def most_bytes(self, num_elements: int) -> int:
        """The size of a body whose streams only store their gaps."""
        whole_sections, rest = divmod(num_elements, SECTION)
        return (
            self._head_bytes(num_elements)
            + whole_sections * most_bytes_of_places(num_chosen(SECTION, self.k), SECTION)
            + most_bytes_of_places(num_chosen(rest, self.k), rest)
        )

    def _head_bytes(self, num_elements: int) -> int:
        check_num_elements(num_elements)
        codes = two_bit_bytes(num_chosen(num_elements, self.k))
        return 4 * num_chunks(num_elements) + codes + 4 * -(-num_elements // SECTION)

    def admits(self, body_bytes: int, num_elements: int) -> bool:
        """Whether there is room for the head, and no more than can be."""
        return self._head_bytes(num_elements) < body_bytes <= self.most_bytes(num_elements)

    def encode(self, values: Vector) -> bytes:
        """Body for finite values [n]; raises CodecError with the index of one that is not."""
        check_values(values)
        values = read_only(values)
        magnitudes: Halves = np.empty((num_chunks(values.size), 2), dtype="<u2")
        chosen = num_chosen(values.size, self.k)
        codes: Bytes = np.zeros(4 * two_bit_bytes(chosen), dtype=np.uint8)

        def encode_run(first: int, past: int) -> list[bytes]:
            streams = []
            for start in range(first, past, SECTION):
                section = values[start : min(start + SECTION, past)]
                places: Places = np.empty(num_chosen(section.size, self.k), dtype=np.int32)
                wrong = places_of_largest(section, self.k, places)
                if wrong != ALL_RIGHT:
                    refuse_not_finite(section[wrong:], start=start + wrong)
                chunk = start // CHUNK
                of_section = magnitudes[chunk : chunk + num_chunks(section.size)]
                _describe(section, places, self.k, of_section, codes[chunk * self.k :])
                streams.append(encode_places(places, section.size))
            return streams

        runs = self.tiles.each_run(values.size, encode_run, unit=SECTION)
        streams = [stream for run in runs for stream in run]
        sizes = np.array([len(stream) for stream in streams], dtype="<u4")
        packed: Bytes = np.empty(two_bit_bytes(chosen), dtype=np.uint8)
        pack_two_bits(codes, packed)
        return b"".join([magnitudes.tobytes(), packed.tobytes(), sizes.tobytes(), *streams])

    def reader(self, body: bytes | memoryview, num_elements: int) -> Reader:
        """Raises CodecError for what is no body, before it is allocated for."""
        raw = check_body(body, codec=self, num_elements=num_elements)
        head, chunks = self._head_bytes(num_elements), num_chunks(num_elements)
        halves = raw[: 4 * chunks].view("<u2")
        is_normal = (halves >= 0x80) & (halves < 0x7F80)  # neither subnormal nor too large
        if not (is_normal | (halves == 0)).all() or (halves[0::2] > halves[1::2]).any():
            raise CodecError(f"a table of {self.name} holds what no encoder writes")
        magnitudes = read_only(halves.astype(np.uint16).reshape(-1, 2))
        chosen = num_chosen(num_elements, self.k)
        sizes_at = 4 * chunks + two_bit_bytes(chosen)
        if chosen % 4 and raw[sizes_at - 1] >> 2 * (chosen % 4):
            raise CodecError(f"the padding of {self.name} is not 0")
        codes: Bytes = np.empty(4 * two_bit_bytes(chosen), dtype=np.uint8)
        unpack_two_bits(raw[4 * chunks : sizes_at], codes)
        ends = np.cumsum(raw[sizes_at:head].view("<u4"), dtype=np.int64) + head
        if ends[-1] != raw.size:
            raise CodecError(f"the places of {self.name} do not fill the body")

        def read(first: int, past: int, values: Vector) -> None:
            values[:] = 0
            for start in range(first, past, SECTION):
                section = values[start - first : min(start + SECTION, past) - first]
                index = start // SECTION
                of_section = codes[start // CHUNK * self.k :][: num_chosen(section.size, self.k)]
                places = decode_places(
                    raw[ends[index - 1] if index else head : ends[index]],
                    num_places=of_section.size,
                    k=self.k,
                    num_elements=section.size,
                    codec=self.name,
                )
                _place(places, of_section, magnitudes, start // CHUNK, section)

        return read


class TopK64(TopK):
    """One in 64: 0.15 bits per value in large slices, 0.2 at most."""

    name = "topk64/1"
    k = 64


class TopK256(TopK):
    """One in 16: 0.45 bits per value in large slices, 0.68 at most."""

    name = "topk256/1"
    k = 256
