"""Paced uploads: all transfers of a node together send no faster than its owner, and its link, allow.

A node's heartbeats share its uplink with its transfers. What is sent faster than the uplink carries
waits in the router's queue, and the heartbeats wait behind it; a queue that is full loses packets,
and most of TCPs halve their rate for that. So the limit must be kept here, before the bytes reach
any queue. Counted are bytes on the wire, as wire_cost estimates them.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from node.exchange.transport.rates.uplink import BURST_SECONDS, Uplink
from node.exchange.transport.wire_cost import (
    ACKNOWLEDGEMENT_SHARE,
    CONNECTION_BYTES,
    HEADER_SHARE,
    STREAM_BYTES,
)

CHUNK_BYTES = 256 * 1024
"""Bodies are read this much at a time, and written too, or less where that takes long."""

HEADROOM = 1.5
"""While a node has made no long transfer: uploads may go so many times as fast as the uplink was seen to
carry at best. That is below what it carries when others were slow, so there must be room to find more; and
what is beyond twice of it fills the queue in front of the link until packets are lost (docs/decisions.md)."""

_MARGIN = 2.0  # bodies get this many times the rate at which receivers cut a trickle off


class TokenBucket:
    """How much may leave now. Pure: it is told the time, in seconds of any clock that only rises.

    From any moment on, for `t` seconds, at most `bytes_per_second * t + depth_bytes` pass, beyond
    what was taken without asking: that makes a debt, which is paid before anything else passes.
    """

    def __init__(self, *, bytes_per_second: float, depth_bytes: float, now: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._depth_bytes = depth_bytes
        self._level_bytes = depth_bytes
        self._filled_at = now

    def change(self, *, bytes_per_second: float, depth_bytes: float, now: float) -> None:
        """Fills at another rate from now on, up to another depth."""
        self._fill(now)
        self._bytes_per_second, self._depth_bytes = bytes_per_second, depth_bytes

    def seconds_until(self, num_bytes: float, now: float) -> float:
        """How long from now until so many bytes may be taken; more than the depth never may."""
        self._fill(now)
        return max(0.0, (num_bytes - self._level_bytes) / self._bytes_per_second)

    def take(self, num_bytes: float, now: float) -> None:
        """Takes what leaves now, whether it is there or not."""
        self._fill(now)
        self._level_bytes -= num_bytes

    def _fill(self, now: float) -> None:
        gained = self._bytes_per_second * (now - self._filled_at)
        self._level_bytes = min(self._depth_bytes, self._level_bytes + gained)
        self._filled_at = now


class Pacer:
    """Shared by all streams of a transport; each chunk of a body waits for its turn here.

    Streams take turns, chunk by chunk, so those that upload at the same time get equal shares.
    Small messages and acknowledgements do not wait, since transfers would stall, but bodies make
    room for them. The rate is what the node's owner allows, and no more than the `uplink` carries
    without a queue; until that is known, no more than HEADROOM times what it was `seen` to carry, bodies'
    bytes per second. While nothing is known (None), as at the beginning of each busy time where the kernel
    paces, nothing waits for anything.
    `floor_bytes_per_second` is the mean rate below which receivers give a body up.
    """

    def __init__(
        self,
        allowed_bytes_per_second: float | None,
        *,
        floor_bytes_per_second: float,
        uplink: Uplink | None = None,
        seen: Callable[[], float | None] = lambda: None,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._allowed_bytes_per_second = allowed_bytes_per_second
        self._uplink = uplink or Uplink()
        self._seen = seen
        self._now = now
        self._sleep = sleep
        self._turn = asyncio.Lock()  # first come, first served
        self._rate: float | None = None  # on the wire, that the bucket fills at
        self._bucket: TokenBucket | None = None
        self._places: asyncio.Semaphore | None = None
        if allowed_bytes_per_second is not None:
            num_places = allowed_bytes_per_second / (_MARGIN * floor_bytes_per_second)
            self._places = asyncio.Semaphore(max(1, int(num_places)))
        self._follow()

    @property
    def chunk_bytes(self) -> int:
        """No more than this may be asked for at once, in bytes of a body."""
        if self._rate is None:
            return CHUNK_BYTES
        return max(1, min(CHUNK_BYTES, int(BURST_SECONDS * self._rate / (1 + HEADER_SHARE))))

    def _follow(self) -> None:
        """Goes by what is allowed and what the uplink carries now."""
        rate, usable = self._allowed_bytes_per_second, self._uplink.bytes_per_second
        if usable is None and (seen := self._seen()) is not None:
            usable = HEADROOM * seen
        if usable is not None:
            usable *= 1 + HEADER_SHARE
            rate = usable if rate is None else min(rate, usable)
        if rate == self._rate:
            return
        self._rate = rate
        if rate is None:
            self._bucket = None
            return
        depth_bytes, now = BURST_SECONDS * rate, self._now()
        if self._bucket is None:
            self._bucket = TokenBucket(bytes_per_second=rate, depth_bytes=depth_bytes, now=now)
        else:
            self._bucket.change(bytes_per_second=rate, depth_bytes=depth_bytes, now=now)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Waits for a place among the bodies that are uploaded, and holds it.

        There are so many that each gets a share of the rate which receivers do not take for a
        trickle. Take it before the receiver is told of the body: its patience begins there.
        """
        if self._places is None:
            yield
        else:
            async with self._places:
                yield

    async def body(self, num_bytes: int) -> None:
        """Waits until so many bytes of a body, at most `chunk_bytes`, may be sent."""
        self._follow()
        if (bucket := self._bucket) is None:
            return
        wire_bytes = (1 + HEADER_SHARE) * num_bytes
        async with self._turn:
            seconds = bucket.seconds_until(wire_bytes, self._now())
            if seconds > 0:
                self._uplink.held_back()
                await self._sleep(seconds)
            # Nothing is awaited from here on: who is cancelled has taken nothing.
            bucket.take(wire_bytes, self._now())

    def message(self, num_bytes: int) -> None:
        """Notes a small message that is sent."""
        self._take((1 + HEADER_SHARE) * num_bytes)

    def received(self, num_bytes: int) -> None:
        """Notes what came, for the acknowledgements that it costs."""
        self._take(ACKNOWLEDGEMENT_SHARE * num_bytes)

    def unanswered(self) -> None:
        """Notes that a body goes out whose receiver does not answer: see Uplink.unanswered."""
        self._uplink.unanswered()

    def stream(self) -> None:
        """Notes a stream that is opened."""
        self._take(STREAM_BYTES)

    def connection(self) -> None:
        """Notes a connection that is made."""
        self._take(CONNECTION_BYTES)

    def _take(self, wire_bytes: float) -> None:
        if self._bucket is not None:
            self._bucket.take(wire_bytes, self._now())
