"""The codecs "topk64/1" and "topk256/1": the 64 or 256 largest of each 4096 values, two bits each.

Top-k in chunks with statistical two-bit values (Sarfi et al. 2025, "Communication Efficient LLM
Pre-training with SparseLoCo", section 3). It needs error feedback, with decay, and many rounds. A
chunk is a piece of the canonical vector, not a tile of a matrix: docs/decisions.md says why.

A short chunk at the end has as many in proportion, rounded up. Of the chosen values, those are big
whose magnitude is at least the chosen ones' mean; small and big have their mean magnitude each, in bf16,
and 0 below 2**-118. A value that is not chosen becomes 0.

Body: for each chunk the small and the big magnitude (two bf16, little-endian); two bits for each
chosen value as in packed_codes.py, 1 for minus and 2 for big; for each section of 1,048,576 values the
bytes of its places, 32 bits little-endian; then the places (places.py). Small is not above big; both
are 0 or normal numbers.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from node.exchange.codecs.chunks import CHUNK, SMALLEST, Floats, num_chunks, sum_of
from node.exchange.codecs.codec import (
    Bytes,
    CodecError,
    DecodesByTile,
    Reader,
    check_body,
    check_num_elements,
    check_values,
    refuse_not_finite,
)
from node.exchange.codecs.compiled import ALL_RIGHT, kernel, read_only
from node.exchange.codecs.packed_codes import pack_two_bits, two_bit_bytes, unpack_two_bits
from node.exchange.codecs.places import (
    SECTION,
    Places,
    decode_places,
    encode_places,
    most_bytes_of_places,
    num_chosen,
    places_of_largest,
)
from node.exchange.codecs.plain_floats import Halves, from_bf16, to_bf16
from node.exchange.codecs.tiles import ONE_THREAD, Tiles
from node.outer_state import Vector


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


@dataclass(frozen=True)
class TopK(DecodesByTile):
    """The k largest of each chunk; the subclasses say how many."""

    tiles: Tiles = ONE_THREAD

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


@dataclass(frozen=True)
class TopK64(TopK):
    """One in 64: 0.15 bits per value in large slices, 0.2 at most."""

    name = "topk64/1"
    k = 64


@dataclass(frozen=True)
class TopK256(TopK):
    """One in 16: 0.45 bits per value in large slices, 0.68 at most."""

    name = "topk256/1"
    k = 256
