"""What a lying reducer sees of contributions, in the attacks' benchmark and in tests with real processes."""

from collections.abc import Callable
from typing import Any

import numpy as np

from node.exchange.codecs.codec import Codec
from node.outer_state import Vector


class Misreading:
    """A codec that reads everything so many times as large: with the other sign, unless told otherwise."""

    def __init__(self, codec: Codec, times: float = -1.0) -> None:
        self._codec = codec
        self._times = np.float32(times)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codec, name)

    def reader(self, body: bytes, num_elements: int) -> Callable[[int, int, Vector], None]:
        """See Codec.reader."""
        read = self._codec.reader(body, num_elements)

        def misread(first: int, past: int, out: Vector) -> None:
            read(first, past, out)
            np.multiply(out, self._times, out=out)

        return misread
