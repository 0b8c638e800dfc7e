"""How fast a machine does an exchange's arithmetic, by a clock that the test winds."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from node.exchange.codecs.registry import NUM_VALUES, codec_named, exchange_bytes_per_second
from node.outer_state import Vector

if TYPE_CHECKING:
    from node.exchange.codecs.codec import Codec


class Noted:
    """A codec that notes what it is asked for."""

    def __init__(self, name: str, done: list[str]) -> None:
        self._codec, self._done = codec_named(name), done
        self.name, self.tiles = self._codec.name, self._codec.tiles

    def encode(self, values: Vector) -> bytes:
        self._done.append(f"encode {self.name}")
        return self._codec.encode(values)

    def decode(self, body: bytes, num_elements: int) -> Vector:
        self._done.append(f"decode {self.name}")
        return self._codec.decode(body, num_elements)


def ticks(*seconds: float) -> Iterator[float]:
    now = 0.0
    for each in seconds:
        yield now
        yield now + each
        now += 100.0


def test_the_quickest_of_three_times_counts_and_holds_what_both_codecs_do() -> None:
    done: list[str] = []
    up: Codec = Noted("int4", done)  # type: ignore[assignment]
    down: Codec = Noted("bf16", done)  # type: ignore[assignment]
    clock = ticks(2.0, 0.5, 1.0)
    speed = exchange_bytes_per_second(up, down, clock=lambda: next(clock))
    assert speed == pytest.approx(4 * NUM_VALUES / 0.5)
    each = ["encode int4/1", "decode int4/1", "decode bf16/1"]
    assert done == ["encode bf16/1", *3 * each]
