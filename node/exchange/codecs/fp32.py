"""The codec "fp32/1": values as they are. For comparison, and where bandwidth is plenty."""

from dataclasses import dataclass

import numpy as np

from node.exchange.codecs.codec import CodecError
from node.outer_state import Vector

TILE_ELEMENTS = 1 << 18
"""Elements looked at in one go: 1 MiB of fp32 stays in a core's cache."""


def check_values(values: Vector) -> None:
    """Raises CodecError unless these are fp32 values in one dimension, at least one of them."""
    if values.dtype != np.float32 or values.ndim != 1:
        raise CodecError(
            f"a slice is one row of float32, not {values.dtype} of shape {values.shape}"
        )
    check_num_elements(values.size)


def check_num_elements(num_elements: int) -> None:
    """Raises CodecError for sizes that no slice has."""
    if num_elements < 1:
        raise CodecError(f"a slice has at least one element, not {num_elements}")


def check_body(body: bytes | memoryview, *, codec: str, expected_bytes: int) -> None:
    """Raises CodecError unless the body has its one right size. Call it before allocating."""
    num_bytes = memoryview(body).nbytes
    if num_bytes != expected_bytes:
        raise CodecError(
            f"a body of {num_bytes} bytes cannot be {codec}, which has {expected_bytes} here"
        )


def refuse_not_finite(tile: Vector, *, start: int) -> None:
    """Raises CodecError with the index of the first value of `tile` that is not finite.

    `start` is the tile's place in the slice.
    """
    is_finite = np.isfinite(tile)
    if not is_finite.all():
        first = int(np.argmin(is_finite))
        raise CodecError(
            f"value {start + first} of the slice is {tile[first]}, which no codec carries"
        )


@dataclass(frozen=True, slots=True)
class Fp32:
    """Body: the values, little-endian, four bytes each. Exact, also for the sign of zero."""

    name: str = "fp32/1"

    def encoded_bytes(self, num_elements: int) -> int:
        """Four bytes for each element."""
        check_num_elements(num_elements)
        return 4 * num_elements

    def encode(self, values: Vector) -> bytes:
        """Body for finite values [n]; raises CodecError for others."""
        check_values(values)
        for start in range(0, values.size, TILE_ELEMENTS):
            refuse_not_finite(values[start : start + TILE_ELEMENTS], start=start)
        return values.astype("<f4", copy=False).tobytes()

    def decode(self, body: bytes | memoryview, num_elements: int) -> Vector:
        """Values [num_elements] in memory of their own; raises CodecError for any other body."""
        check_body(body, codec=self.name, expected_bytes=self.encoded_bytes(num_elements))
        values = np.frombuffer(body, dtype="<f4").astype(np.float32)  # always copies
        for start in range(0, num_elements, TILE_ELEMENTS):
            refuse_not_finite(values[start : start + TILE_ELEMENTS], start=start)
        return values
