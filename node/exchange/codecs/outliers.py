"""Values far beyond the others of their chunk: steps that they do not spoil, and how they travel.

Embeddings, norms and heads have a few values of tens or hundreds of standard deviations. A step so
large that codes reach them rounds all others of the chunk to zero; codes that stop short of them leave
a residual that never ends, and a bias where there is none. So the step is of the others, and an outlier
travels by itself, in bf16: as LLM.int8() has it (Dettmers et al. 2022, section 3.2). docs/decisions.md
has the comparison. What a body looks like, entropy.py says.
"""

import numpy as np

from node.exchange.codecs.blockwise import peak_of
from node.exchange.codecs.chunks import CHUNK, INFINITY, SMALLEST, mean_magnitude
from node.exchange.codecs.codec import CodecError
from node.exchange.codecs.compiled import kernel
from node.exchange.codecs.packed_codes import Codes
from node.exchange.codecs.plain_floats import Halves, from_bf16, to_bf16
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
