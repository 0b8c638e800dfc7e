"""What a lying reducer sees of contributions, in the attacks' benchmark and in tests with real processes."""

from collections.abc import Callable
from typing import Any

import numpy as np

from node.exchange.codecs.codec import Codec
from node.outer_state import Vector


class Backwards:
    """A codec that reads everything with the other sign."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codec, name)

    def reader(self, body: bytes, num_elements: int) -> Callable[[int, int, Vector], None]:
        """See Codec.reader."""
        read = self._codec.reader(body, num_elements)

        def turned(first: int, past: int, out: Vector) -> None:
            read(first, past, out)
            np.negative(out, out=out)

        return turned
