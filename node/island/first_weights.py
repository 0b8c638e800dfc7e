"""The weights that a run begins with: derived from its seed, bit-equal on every machine.

Every node makes them for itself, and the digest of the outer state at round 0 must agree. So only
integers and single, correctly rounded operations are used, and nothing whose bits change with the
version of a library: no logarithm, no `Generator.standard_normal`.
"""

import math

import blake3
import numpy as np

from node.island.layout import layout_of
from node.outer_state import Vector
from protocol.run_spec import ModelSection

STANDARD_DEVIATION = 0.02
_ELEMENTS_AT_ONCE = 1 << 18  # keeps the random words of a large tensor out of memory


def initial_parameters(spec: ModelSection, seed: int, num_fragments: int = 1) -> Vector:
    """The state at round 0, in canonical order.

    Matrices and embeddings are near-normal with deviation 0.02; those that write into the residual
    stream are smaller by sqrt(2 · layers) (GPT-2, Radford et al., 2019, section 2.3); norms are
    one.
    """
    layout = layout_of(spec, num_fragments)
    parameters = np.empty(layout.num_elements, np.float32)
    for place in layout.places:
        values = parameters[place.offset : place.offset + place.num_elements]
        if len(place.shape) == 1:
            values.fill(1.0)
            continue
        deviation = STANDARD_DEVIATION
        if place.name.endswith(("o_proj.weight", "down_proj.weight")):
            deviation /= math.sqrt(2 * spec.num_layers)
        _fill_near_normal(values, _key_of(seed, place.name), deviation)
    return parameters


def _key_of(seed: int, name: str) -> int:
    """A stream for each tensor: a further layer leaves the others as they are."""
    return int.from_bytes(blake3.blake3(f"{seed}:{name}".encode()).digest(length=16), "little")


def _fill_near_normal(values: Vector, key: int, deviation: float) -> None:
    """Fills with sums of twelve uniform 16-bit integers (Irwin–Hall), scaled to the deviation.

    Twelve uniforms of width 2^16 have a deviation of 2^16 together. The sum is exact, and the one
    multiplication and the one rounding to fp32 after it are the same on every machine.
    """
    words = np.random.Philox(key=key)
    for start in range(0, len(values), _ELEMENTS_AT_ONCE):
        part = values[start : start + _ELEMENTS_AT_ONCE]
        uniforms = words.random_raw(3 * len(part)).view(np.uint16).reshape(len(part), 12)
        centred = uniforms.sum(axis=1, dtype=np.int64) - 6 * 0xFFFF
        part[:] = centred * (deviation / 2**16)
