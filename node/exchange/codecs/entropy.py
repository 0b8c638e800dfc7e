"""The codecs "ec3/2", "ec2/2" and "ec1/2": even steps, entropy-coded: about 3, 2 and 1 bits per value.

For a given mean square error a uniform quantiser followed by an entropy coder is a quarter of a bit
from what any code can reach (Gish and Pierce 1968, "Asymptotically Efficient Quantizing"); codes
of a fixed width waste what their frequencies differ in. A larger dead zone around zero gains nothing
on pseudo-gradients (docs/decisions.md). For each chunk of 4096,

    step  = min(coarseness * mean magnitude, peak), not above LARGEST; 0 when peak < 2**-118;
            where the peak is beyond `top` steps, those of the others
    code  = value / step, to the nearest integer, ties to even; 0 when step is 0
    value = sign(code) * (|code| - shift) * step: (|code| - shift) rounded to fp32, then one product

A step above the peak would send nothing of a chunk whose magnitudes are alike, in this round and in
all that follow. `shift` moves a value from its bin's middle to its mean, for within a bin the smaller
magnitudes are the more frequent.

Embeddings, norms and heads have a few outliers: values of tens or hundreds of standard deviations. A step so
large that codes reach them rounds all others of the chunk to zero; codes that stop short of them leave
a residual that never ends, and a bias where there is none. So the step is of the others, and an outlier,
which is beyond `top` steps, has the code -top - 1 as a mark and travels by itself, in bf16: as LLM.int8() has
it (Dettmers et al. 2022, section 3.2). docs/decisions.md has the comparison.

Body: the steps of all chunks, fp32 little-endian; for each tile of 65,536 values the bytes of its
part, 32 bits little-endian; then the parts: the tile's codes, deflated, and its outliers in their
order, bf16 little-endian. Codes are one byte each for ec3 (two's complement), and nibbles as int4's
for ec2 and ec1, where 0 is the mark.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

import numpy as np

from node.exchange.codecs.chunkwise import (
    CHUNK,
    INFINITY,
    SMALLEST,
    check_scales,
    mean_magnitude,
    num_chunks,
)
from node.exchange.codecs.codec import (
    ALL_RIGHT,
    TILE_ELEMENTS,
    Bytes,
    Codec,
    CodecError,
    Opened,
    Reader,
    check_body,
    check_num_elements,
    check_values,
    kernel,
    read_only,
    refuse_not_finite,
)
from node.exchange.codecs.deflate import deflated, inflated_head, most_stream_bytes
from node.exchange.codecs.dense import (
    Codes,
    Halves,
    divisor_of,
    from_bf16,
    largest_scale,
    nibble_bytes,
    pack_nibbles,
    peak_of,
    to_bf16,
    unpack_nibbles,
    whole_codes,
)
from node.exchange.codecs.top_k import num_chosen
from node.outer_state import Vector

MOST_OUTLIERS = 64
"""Of the 4096 values of a chunk; of a short one in proportion, rounded up."""

_ONE_IN = CHUNK // MOST_OUTLIERS
_LOOKS = 2
"""How often the mean is taken anew: an outlier can hide another, a few hundred times smaller."""

_BLOCK = 64


@kernel
def _reach(step: np.float32, top: np.float32, largest_step: np.float32) -> np.float32:
    """Up to where codes go: `top` steps, and with the largest step as far as numbers do.

    There the product may be rounded to less than the largest number, and no step would reach that.
    """
    return np.float32(top * step) if step < largest_step else INFINITY


@kernel
def _split(chunk: Vector, reach: np.float32, within: Vector) -> int:
    """Writes the chunk with 0 for what is beyond reach; returns how many that are."""
    num_outliers = np.int32(0)
    for i in range(chunk.size):
        is_outlier = abs(chunk[i]) > reach
        within[i] = np.float32(0) if is_outlier else chunk[i]
        num_outliers += np.int32(is_outlier)
    return int(num_outliers)


@kernel
def step_of(
    chunk: Vector,
    peak: np.float32,
    coarseness: np.float32,
    top: np.float32,
    largest_step: np.float32,
    rows: Vector,
) -> tuple[np.float32, int]:
    """The step of a finite chunk [n], and how many outliers it has, which are those beyond `top` steps.

    Without any there is one mean, and the step is of that. Otherwise the mean is taken anew without
    them, unless then they would be too many; where they are at once, the step doubles until they are
    not: three times at most, for no more than one in 64 are beyond 64 times the mean.
    If there are any left, rows[1, :n] is the chunk without them. Overwrites rows [2, 4096].
    """
    if peak < SMALLEST:
        return np.float32(0), 0
    scratch, within = rows[0], rows[1, : chunk.size]
    smallest_step = np.float32(SMALLEST / top)
    step = max(min(np.float32(mean_magnitude(chunk, scratch) * coarseness), peak), smallest_step)
    step = min(step, largest_step)
    if peak <= _reach(step, top, largest_step):
        return step, 0
    most = -(-chunk.size // _ONE_IN)
    num_outliers = _split(chunk, _reach(step, top, largest_step), within)
    if num_outliers <= most:
        for _ in range(_LOOKS):
            share = np.float32(chunk.size / (chunk.size - num_outliers))
            mean = np.float32(mean_magnitude(within, scratch) * share)
            narrower = max(min(np.float32(mean * coarseness), peak_of(within)), smallest_step)
            narrower = min(narrower, step)
            num_then = _split(chunk, _reach(narrower, top, largest_step), within)
            if num_then > most:
                _split(chunk, _reach(step, top, largest_step), within)
                break
            has_more = num_then > num_outliers
            step, num_outliers = narrower, num_then
            if not has_more:
                break
    while num_outliers > most:
        step = min(np.float32(step + step), largest_step)
        num_outliers = _split(chunk, _reach(step, top, largest_step), within)
    return step, num_outliers


@kernel
def take_outliers(
    chunk: Vector, within: Vector, mark: np.int8, codes: Codes, outliers: Halves
) -> int:
    """Writes the outliers of a chunk in bf16, and the mark over their codes; returns how many.

    `within` is the chunk with 0 in their places.
    """
    num_outliers = 0
    for start in range(0, chunk.size, _BLOCK):
        block, others = chunk[start : start + _BLOCK], within[start : start + _BLOCK]
        num_here = np.int32(0)
        for i in range(block.size):
            num_here += np.int32(block[i] != others[i])
        if num_here > 0:
            for i in range(block.size):
                if block[i] != others[i]:
                    codes[start + i] = mark
                    outliers[num_outliers] = to_bf16(block[i])
                    num_outliers += 1
    return num_outliers


@kernel
def _is_there(mark: np.int8, codes: Codes) -> bool:
    """Whether a code is the mark, which is below all others."""
    least = np.int8(0)
    for i in range(codes.size):
        least = min(least, codes[i])
    return bool(least == mark)


@kernel
def _put_back(codes: Codes, mark: np.int8, outliers: Halves, values: Vector) -> bool:
    """Writes outliers to their places; returns whether each place has one, and all are normal."""
    num_put = 0
    for first in range(0, codes.size, CHUNK):
        of_chunk = codes[first : first + CHUNK]
        if not _is_there(mark, of_chunk):
            continue
        for start in range(0, of_chunk.size, _BLOCK):
            block = of_chunk[start : start + _BLOCK]
            if not _is_there(mark, block):
                continue
            for i in range(block.size):
                if block[i] == mark:
                    if num_put == outliers.size:
                        return False
                    exponent = outliers[num_put] & 0x7F80
                    if exponent == 0 or exponent == 0x7F80:
                        return False
                    values[first + start + i] = from_bf16(outliers[num_put])
                    num_put += 1
    return num_put == outliers.size


def put_back(codes: Codes, mark: np.int8, rest: bytes, values: Vector, *, codec: str) -> None:
    """Writes outliers, as they follow a tile's stream, into values [n] where codes [n] are the mark.

    Raises CodecError unless there is one for each place, and each is a normal number.
    """
    if len(rest) % 2:
        raise CodecError(f"half an outlier follows a stream of {codec}")
    outliers = np.frombuffer(rest, dtype="<u2")
    if not _put_back(codes, mark, outliers, values):
        raise CodecError(
            f"the outliers of {codec} are not a normal number for each of their places"
        )


@kernel
def _quantise(
    values: Vector,
    steps: Vector,
    codes: Codes,
    outliers: Halves,
    coarseness: np.float32,
    top: np.float32,
    largest_step: np.float32,
    mark: np.int8,
) -> tuple[int, int]:
    """Writes steps, codes and outliers.

    Returns the place of a chunk that is not finite, or ALL_RIGHT; and how many outliers there are.
    """
    rows = np.empty((2, CHUNK), dtype=np.float32)
    num_outliers = 0
    for c in range(steps.size):
        chunk = values[c * CHUNK : (c + 1) * CHUNK]
        of_chunk = codes[c * CHUNK : (c + 1) * CHUNK]
        peak = peak_of(chunk)
        if not peak < INFINITY:
            return c * CHUNK, num_outliers
        step, num_here = step_of(chunk, peak, coarseness, top, largest_step, rows)
        steps[c] = step
        if num_here == 0:
            whole_codes(chunk, divisor_of(step), of_chunk)
        else:
            within = rows[1, : chunk.size]
            whole_codes(within, step, of_chunk)
            num_outliers += take_outliers(chunk, within, mark, of_chunk, outliers[num_outliers:])
    return ALL_RIGHT, num_outliers


@kernel
def _multiply(codes: Codes, steps: Vector, shift: np.float32, values: Vector) -> bool:
    """Writes what codes mean; returns whether chunks with step 0 have codes 0."""
    for c in range(steps.size):
        chunk, step = values[c * CHUNK : (c + 1) * CHUNK], steps[c]
        of_chunk = codes[c * CHUNK : (c + 1) * CHUNK]
        if step == 0 and of_chunk.any():
            return False
        for i in range(chunk.size):
            code = np.float32(of_chunk[i])
            towards_zero = -shift if code > 0 else shift
            shifted = code + towards_zero if code != 0 else np.float32(0)
            chunk[i] = shifted * step
    return True


_Plain = tuple[Bytes, bytes]
"""Of a tile: its codes as they are before they are deflated, and its outliers."""


class EntropyCoded(Codec):
    """Steps, tiles and streams; the subclasses say how codes lie in bytes before they are deflated."""

    name: ClassVar[str]
    top: ClassVar[np.float32]
    coarseness: ClassVar[np.float32]
    shift: ClassVar[np.float32]
    largest_step: ClassVar[np.float32]
    mark: ClassVar[np.int8]  # the code in an outlier's place

    def __init_subclass__(cls) -> None:
        """Derives the largest step and the mark, once the class says its top."""
        if hasattr(cls, "top"):
            cls.largest_step = largest_scale(cls.top)
            cls.mark = np.int8(-cls.top - 1)

    @abstractmethod
    def code_bytes(self, num_elements: int) -> int:
        """Bytes that codes take before they are deflated."""

    @abstractmethod
    def pack(self, codes: Codes) -> Bytes:
        """Codes [n] as bytes [code_bytes(n)]."""

    @abstractmethod
    def unpack(self, packed: Bytes, num_codes: int) -> Codes:
        """The codes [num_codes] of bytes; raises CodecError for wrong padding."""

    def most_bytes(self, num_elements: int) -> int:
        """The size of a body whose streams only store their codes, with all outliers there can be."""
        whole_tiles, rest = divmod(num_elements, TILE_ELEMENTS)
        return (
            self._head_bytes(num_elements)
            + whole_tiles * most_stream_bytes(self.code_bytes(TILE_ELEMENTS))
            + most_stream_bytes(self.code_bytes(rest))
            + 2 * num_chosen(num_elements, MOST_OUTLIERS)
        )

    def _head_bytes(self, num_elements: int) -> int:
        check_num_elements(num_elements)
        return 4 * num_chunks(num_elements) + 4 * -(-num_elements // TILE_ELEMENTS)

    def admits(self, body_bytes: int, num_elements: int) -> bool:
        """Whether there is room for the head, and no more than can be."""
        return self._head_bytes(num_elements) < body_bytes <= self.most_bytes(num_elements)

    def encode(self, values: Vector) -> bytes:
        """Body for finite values [n]; raises CodecError with the index of one that is not."""
        return self.encoded(values).body

    def encoded(self, values: Vector) -> Opened:
        """See Codec. What it keeps beside the body are the packed codes: nothing is inflated."""
        check_values(values)
        values = read_only(values)
        steps = np.empty(num_chunks(values.size), dtype="<f4")

        def encode_run(first: int, past: int) -> list[tuple[_Plain, bytes]]:
            return [
                self._encode_tile(values[start : min(start + TILE_ELEMENTS, past)], start, steps)
                for start in range(first, past, TILE_ELEMENTS)
            ]

        tiles = [tile for run in self.tiles.each_run(values.size, encode_run) for tile in run]
        parts = [part for _, part in tiles]
        sizes = np.array([len(part) for part in parts], dtype="<u4")
        body = b"".join([steps.tobytes(), sizes.tobytes(), *parts])
        plain = [plain for plain, _ in tiles]
        used = read_only(steps.astype(np.float32, copy=False))
        return self._readable(body, values.size, self._read_plain(plain.__getitem__, used))

    def _encode_tile(self, tile: Vector, start: int, steps: Vector) -> tuple[_Plain, bytes]:
        codes: Codes = np.empty(tile.size, dtype=np.int8)
        first = start // CHUNK
        of_tile = steps[first : first + num_chunks(tile.size)]
        outliers: Halves = np.empty(num_chosen(tile.size, MOST_OUTLIERS), dtype="<u2")
        wrong, num_outliers = _quantise(
            tile,
            of_tile,
            codes,
            outliers,
            self.coarseness,
            self.top,
            self.largest_step,
            self.mark,
        )
        if wrong != ALL_RIGHT:
            refuse_not_finite(tile[wrong:], start=start + wrong)
        packed, exact = self.pack(codes), outliers[:num_outliers].tobytes()
        return (packed, exact), deflated(packed) + exact

    def opened(self, body: bytes, num_elements: int) -> Opened:
        """See Codec. Streams are inflated for it, and never again: their codes are kept, packed."""
        part_of, steps = self._parts_of(body, num_elements)
        count = -(-num_elements // TILE_ELEMENTS)
        plain: list[_Plain] = [(np.empty(0, dtype=np.uint8), b"")] * count

        def inflated_once(index: int) -> _Plain:
            plain[index] = part_of(index)
            return plain[index]

        first = self._readable(body, num_elements, self._read_plain(inflated_once, steps))
        first.each_tile(lambda start, values: None)
        return self._readable(body, num_elements, self._read_plain(plain.__getitem__, steps))

    def reader(self, body: bytes | memoryview, num_elements: int) -> Reader:
        """Raises CodecError for what is no body, before it is allocated for."""
        return self._read_plain(*self._parts_of(body, num_elements))

    def _read_plain(self, part_of: Callable[[int], _Plain], steps: Vector) -> Reader:
        """Reads tiles of which `part_of` gives the packed codes and the outliers."""

        def read(first: int, past: int, values: Vector) -> None:
            for start in range(first, past, TILE_ELEMENTS):
                tile = values[start - first : min(start + TILE_ELEMENTS, past) - first]
                packed, outliers = part_of(start // TILE_ELEMENTS)
                codes = read_only(self.unpack(packed, tile.size))
                first_step = start // CHUNK
                of_tile = steps[first_step : first_step + num_chunks(tile.size)]
                if not _multiply(codes, of_tile, self.shift, tile):
                    raise CodecError(f"an {self.name} chunk with step 0 holds other codes than 0")
                put_back(codes, self.mark, outliers, tile, codec=self.name)

        return read

    def _parts_of(
        self, body: bytes | memoryview, num_elements: int
    ) -> tuple[Callable[[int], _Plain], Vector]:
        """What inflates a tile's part, and the steps; nothing is allocated for a wrong body.

        Raises CodecError.
        """
        raw = check_body(body, codec=self, num_elements=num_elements)
        head, of_steps = self._head_bytes(num_elements), 4 * num_chunks(num_elements)
        steps = read_only(raw[:of_steps].view("<f4").astype(np.float32))
        check_scales(
            steps, codec=self.name, smallest=SMALLEST / self.top, largest=self.largest_step
        )
        ends = np.cumsum(raw[of_steps:head].view("<u4"), dtype=np.int64) + head
        if ends[-1] != raw.size:
            raise CodecError(f"the parts of {self.name} do not fill the body")

        def part_of(index: int) -> _Plain:
            part = raw[ends[index - 1] if index else head : ends[index]]
            num_codes = min(num_elements - index * TILE_ELEMENTS, TILE_ELEMENTS)
            num_bytes = self.code_bytes(num_codes)
            packed, outliers = inflated_head(part, most_bytes=num_bytes, codec=self.name)
            if packed.size != num_bytes:
                raise CodecError(
                    f"a stream of {self.name} holds {packed.size} bytes, not {num_bytes}"
                )
            return packed, outliers

        return part_of, steps


class Ec3(EntropyCoded):
    """About 3.1 bits per value, with half the error of 2 bits and as much as int4's."""

    name = "ec3/2"
    top = np.float32(127)
    coarseness = np.float32(0.625)
    shift = np.float32(1 / 32)

    def code_bytes(self, num_elements: int) -> int:
        """One each."""
        return num_elements

    def pack(self, codes: Codes) -> Bytes:
        """See EntropyCoded."""
        return codes.view(np.uint8)

    def unpack(self, packed: Bytes, num_codes: int) -> Codes:
        """See EntropyCoded."""
        return packed.view(np.int8)


class _EntropyCodedNibbles(EntropyCoded):
    """Two codes share a byte, so that Huffman's whole bits cost half as much."""

    def code_bytes(self, num_elements: int) -> int:
        """Half a byte each."""
        return nibble_bytes(num_elements)

    def pack(self, codes: Codes) -> Bytes:
        """See EntropyCoded."""
        packed: Bytes = np.empty(nibble_bytes(codes.size), dtype=np.uint8)
        if codes.size % 2:
            codes = np.append(codes, np.int8(-8))  # whose nibble is 0
        pack_nibbles(codes, packed)
        return packed

    def unpack(self, packed: Bytes, num_codes: int) -> Codes:
        """See EntropyCoded."""
        if num_codes % 2 and packed[-1] >> 4:
            raise CodecError(f"the padding of {self.name} is not 0")
        codes: Codes = np.empty(2 * packed.size, dtype=np.int8)
        unpack_nibbles(read_only(packed), codes)
        return codes[:num_codes]


class Ec2(_EntropyCodedNibbles):
    """About 2.1 bits per value."""

    name = "ec2/2"
    top = np.float32(7)
    coarseness = np.float32(1.25)
    shift = np.float32(5 / 64)


class Ec1(_EntropyCodedNibbles):
    """About one bit per value; it needs error feedback."""

    name = "ec1/2"
    top = np.float32(7)
    coarseness = np.float32(3)
    shift = np.float32(19 / 64)
