"""The weights that a run begins with: derived from its seed, bit-equal on every machine.

Every node makes them for itself, and the digest of the outer state at round 0 must agree. So only
integers and single, correctly rounded operations are used, and nothing whose bits change with the
version of a library: no logarithm, no `Generator.standard_normal`.
"""

import math
from concurrent.futures import ThreadPoolExecutor

import blake3
import numpy as np

from node.outer_state import Vector
from protocol.run.models import layout_of
from protocol.run.run_spec import RunSpec

STANDARD_DEVIATION = 0.02
_ELEMENTS_AT_ONCE = 1 << 18  # keeps the random words of a large tensor out of memory
_WORDS_A_COUNT = 4  # that Philox makes of one value of its counter


def initial_parameters(
    spec: RunSpec,
    *,
    num_threads: int = 1,
    out: Vector | None = None,
) -> Vector:
    """The state at round 0, in canonical order; in `out`, or in new memory. Heavy.

    Matrices and embeddings are near-normal with deviation 0.02; those that write into the residual
    stream are smaller by sqrt(2 · layers) (GPT-2, Radford et al., 2019, section 2.3); norms are
    one, biases zero.
    """
    layout = layout_of(spec)
    parameters = np.empty(layout.num_elements, np.float32) if out is None else out
    if parameters.shape != (layout.num_elements,):
        raise ValueError(f"{layout.num_elements} elements do not fit into {parameters.shape}")
    with ThreadPoolExecutor(num_threads) as pool:  # numpy lets go of Python's lock
        parts = []
        for place in layout.places:
            values = parameters[place.offset : place.offset + place.num_elements]
            if len(place.shape) == 1:
                values.fill(0.0 if place.name.endswith(".bias") else 1.0)
                continue
            deviation = STANDARD_DEVIATION
            if place.name.endswith(("o_proj.weight", "down_proj.weight")):
                deviation /= math.sqrt(2 * spec.num_layers)
            key = _key_of(spec.run.seed, place.name)
            parts += [
                pool.submit(_fill_near_normal, values, start, key, deviation)
                for start in range(0, len(values), _ELEMENTS_AT_ONCE)
            ]
        for part in parts:
            part.result()
    return parameters


def _key_of(seed: int, name: str) -> int:
    """A stream for each tensor: a further layer leaves the others as they are."""
    return int.from_bytes(blake3.blake3(f"{seed}:{name}".encode()).digest(length=16), "little")


def _fill_near_normal(values: Vector, start: int, key: int, deviation: float) -> None:
    """Fills the part of a tensor from `start` on with sums of twelve uniform 16-bit integers (Irwin–Hall).

    Scaled to the deviation: twelve uniforms of width 2^16 have a deviation of 2^16 together. The sum is
    exact, and the one multiplication and the one rounding to fp32 after it are the same on every machine.
    """
    words = np.random.Philox(key=key)
    words.advance(3 * start // _WORDS_A_COUNT)
    part = values[start : start + _ELEMENTS_AT_ONCE]
    uniforms = words.random_raw(3 * len(part)).view(np.uint16).reshape(len(part), 12)
    centred = uniforms.sum(axis=1, dtype=np.int64) - 6 * 0xFFFF
    part[:] = centred * (deviation / 2**16)
