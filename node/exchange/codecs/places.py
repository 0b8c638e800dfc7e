"""The places of chosen values in bytes: the gaps between them, with a Huffman code.

For 64 of 4096 that takes about 7.5 bits a place in slices of a million values and more, where log2 of
the number of choices is 7.4, and hardly more than 8 in small ones, for which the code's table is too
large. The places themselves would have 12 bits.

A gap is the number of values between two chosen ones; a section's first counts from its beginning.
Gaps are bytes: 255 stands for 255 values without a chosen one, and the gap goes on.
"""

import numpy as np

from node.exchange.codecs.chunks import CHUNK
from node.exchange.codecs.codec import Bytes, CodecError
from node.exchange.codecs.compiled import kernel, read_only
from node.exchange.codecs.deflate import deflated, inflated, most_stream_bytes
from node.exchange.codecs.largest import Places

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
