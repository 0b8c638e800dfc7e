"""What a codec is: fp32 values to bytes of a size known beforehand, and back.

The bytes of a version never change: tests/unit/golden keeps examples. A new idea is a new name or
a new version, beside the old one.
"""

from typing import Protocol

from node.outer_state import Vector


class CodecError(ValueError):
    """Values or bytes that this codec refuses: not finite, of the wrong size, out of range."""


class Codec(Protocol):
    """Encodes one slice. Stateless; safe to use from several threads."""

    @property
    def name(self) -> str:
        """Name and version as on the wire, for example "int4/1"."""

    def encoded_bytes(self, num_elements: int) -> int:
        """Exact size of the body for that many elements."""

    def encode(self, values: Vector) -> bytes:
        """Body for finite fp32 values [n]. Raises CodecError when a value is not finite."""

    def decode(self, body: bytes | memoryview, num_elements: int) -> Vector:
        """Values [num_elements], bit-equal on every machine for equal bodies.

        Raises CodecError unless the body is as long as it must be and all values are finite.
        """
