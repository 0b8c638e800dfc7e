"""The codec "fp32/1": values as they are. For comparison, and where bandwidth is plenty."""

from dataclasses import dataclass

from node.exchange.codecs.codec import (
    DecodesByTile,
    FixedSize,
    Reader,
    check_body,
    check_num_elements,
    check_values,
    refuse_not_finite,
)
from node.exchange.codecs.tiles import ONE_THREAD, Tiles
from node.outer_state import Vector


@dataclass(frozen=True)
class Fp32(DecodesByTile, FixedSize):
    """Body: the values, little-endian, four bytes each. Exact, also for the sign of zero."""

    name = "fp32/1"
    tiles: Tiles = ONE_THREAD

    def encoded_bytes(self, num_elements: int) -> int:
        """Four bytes for each element."""
        check_num_elements(num_elements)
        return 4 * num_elements

    def encode(self, values: Vector) -> bytes:
        """Body for finite values [n]; raises CodecError for others."""
        check_values(values)

        def check(first: int, past: int) -> None:
            refuse_not_finite(values[first:past], start=first)

        self.tiles.each_run(values.size, check)
        return values.astype("<f4", copy=False).tobytes()

    def reader(self, body: bytes | memoryview, num_elements: int) -> Reader:
        """Raises CodecError for values that are not finite."""
        sent = check_body(body, codec=self, num_elements=num_elements).view("<f4")

        def read(first: int, past: int, values: Vector) -> None:
            values[:] = sent[first:past]
            refuse_not_finite(values, start=first)

        return read
