"""Choosing the k largest magnitudes of each chunk, and their places in bytes.

Choosing is exact, and the same on every machine. torch.topk and numpy's partition look at every value
several times. Here one pass takes the maxima of 512 groups of 8 values; a bound that at least k of them
reach is reached by at least k values, and by few more. A bisection over so few maxima is quick, and so is
another over those values, for the exact bound. All by their bits: magnitudes are ordered like these, and
integers are compared faster.

Of the places the gaps between them are sent, with a Huffman code. For 64 of 4096 that takes about 7.5 bits
a place in slices of a million values and more, where log2 of the number of choices is 7.4, and hardly more
than 8 in small ones, for which the code's table is too large. The places themselves would have 12 bits. A
gap is the number of values between two chosen ones; a section's first counts from its beginning. Gaps are
bytes: 255 stands for 255 values without a chosen one, and the gap goes on.
"""

import numpy as np
import numpy.typing as npt

from node.exchange.codecs.chunks import CHUNK
from node.exchange.codecs.codec import Bytes, CodecError
from node.exchange.codecs.compiled import ALL_RIGHT, kernel, read_only
from node.exchange.codecs.deflate import deflated, inflated, most_stream_bytes
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
