"""All that a transport's streams send and receive: what it is counted as, and when more of it may leave.

A node's heartbeats share its uplink with its transfers. What is sent faster than the uplink carries
waits in the router's queue, and the heartbeats wait behind it; a queue that is full loses packets,
and most of TCPs halve their rate for that. So the limit must be kept here, before the bytes reach
any queue. There is one question, `may_send`, and one estimate of the uplink (`uplink`); where the kernel
paces TCP, it deals that estimate out to connections once packets are lost (`tcp`), below this door.

p2pd does not tell how much it sent. To the bytes that we hand over come encryption (Noise), streams
(yamux), TCP and IP (52 bytes in each packet of 1500), and the acknowledgements of the other way.
Measured by benchmarks/wire/transport.py (2 nodes, MTU 1500, IP headers included, no link layer);
body, then bytes on the wire for a push and for a fetch, both ways together:

    20 KB    22.2 KB  22.1 KB       2 MB   2.084 MB  2.088 MB
    200 KB   210 KB   212 KB       20 MB   20.93 MB  20.99 MB

The estimate is within 1.5 % of these. With loopback's own MTU of 64 KiB, where headers vanish, it
is at most 6 % too high. Not counted: keepalives, a few bytes in a minute.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from typing import NamedTuple, Protocol

from node.exchange.peers import Limits
from node.exchange.transport.rates.uplink import (
    LEAD_OF_RECEIVERS_BYTES,
    Evenness,
    LinkMeter,
    Uplink,
)
from protocol.wire.payload import WireCounts, WireKind
from protocol.wire.vitals import FREE, NO_UPLOAD, LinkRates, UploadPace

HEADER_SHARE = 0.0375
"""TCP, IP, yamux and Noise headers, for each byte in the same direction."""

ACKNOWLEDGEMENT_SHARE = 0.008
"""Bare acknowledgements, for each byte in the other direction; half as many as TCP's worst case."""

STREAM_BYTES = 550
"""Opening and closing a stream and its small messages' packets, in each direction."""

CONNECTION_BYTES = 2050
"""TCP, Noise and identify handshakes of a new connection, in each direction."""

CHUNK_BYTES = 256 * 1024
"""Bodies are read this much at a time, and written too, or less where that takes long."""

_MARGIN = 2.0  # bodies get this many times the rate at which receivers cut a trickle off

_REASON_SECONDS = 1.0
"""So long what held an upload back is told: chunks wait many times a second."""


def wire_bytes(bytes_sent: int, bytes_received: int, *, num_streams: int = 1) -> tuple[int, int]:
    """Estimate of the bytes that left and that reached the network interface for one transfer."""
    return (
        _one_way(bytes_sent, other_way=bytes_received) + num_streams * STREAM_BYTES,
        _one_way(bytes_received, other_way=bytes_sent) + num_streams * STREAM_BYTES,
    )


def _one_way(num_bytes: int, *, other_way: int) -> int:
    shares = HEADER_SHARE * num_bytes + ACKNOWLEDGEMENT_SHARE * other_way
    return num_bytes + round(shares)


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


class KernelPacing(Protocol):
    """What the door must know of the kernel's part (rates.tcp)."""

    @property
    def why_not(self) -> str:
        """What keeps the kernel from pacing; empty while it does."""

    @property
    def shared_bytes_per_second(self) -> float | None:
        """What all connections may send together after losses; None: it holds none of them back now."""


class MaySend(NamedTuple):
    """The door's answer."""

    seconds: float
    """From now on, until so much may leave; 0: at once."""
    why: UploadPace
    """What decides how fast bodies leave, whether they wait now or not."""


class Traffic:
    """Shared by all streams of a transport; each chunk of a body waits for its turn here.

    Streams take turns, chunk by chunk, so those that upload at the same time get equal shares.
    Small messages and acknowledgements do not wait, since transfers would stall, but bodies make
    room for them. Bytes that are allowed are bytes on the wire.
    """

    def __init__(
        self,
        counts: WireCounts,
        *,
        limits: Limits,
        allowed_bytes_per_second: float | None = None,
        while_moving: Callable[[], AbstractContextManager[None]] = nullcontext,
        clock: Callable[[], float] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`while_moving` is entered for as long as a body is on its way; the clock is the running loop's."""
        self.clock = clock or asyncio.get_running_loop().time
        self.allowed_bytes_per_second = allowed_bytes_per_second
        self.kernel: KernelPacing | None = None  # until there are connections
        self.uplink = Uplink(limits, is_paced_below=lambda: self.is_paced_by_kernel)
        self.evenness = Evenness(LEAD_OF_RECEIVERS_BYTES)
        """Of those that get results."""
        self.on_progress: list[Callable[[], None]] = []
        self._down = LinkMeter(limits)
        self._counts = counts
        self._while_moving = while_moving
        self._burst_seconds = limits.burst_seconds
        self._sleep = sleep
        self._turn = asyncio.Lock()  # first come, first served
        self._rate: float | None = None  # on the wire, that the bucket fills at
        self._bucket: TokenBucket | None = None
        self._held_back = (-math.inf, FREE)  # when bytes had to wait last, and why
        self._places: asyncio.Semaphore | None = None
        if allowed_bytes_per_second is not None:
            num_places = allowed_bytes_per_second / (_MARGIN * limits.floor_bytes_per_second)
            self._places = asyncio.Semaphore(max(1, int(num_places)))
        self._follow()

    # When more may leave.

    @property
    def is_paced_by_kernel(self) -> bool:
        """Whether TCP's packets are spread over the round trip below us."""
        return self.kernel is not None and not self.kernel.why_not

    def may_send(self, num_bytes: int, now: float) -> MaySend:
        """When so many bytes of a body, at most `chunk_bytes`, may leave, and what decides that.

        The rate is what the node's owner allows, and no more than the uplink carries without a queue. While
        nothing of it is known, as at the beginning of each busy time where the kernel paces, nothing waits.
        """
        why = self._follow()
        if self._bucket is None:
            return MaySend(0.0, why)
        return MaySend(self._bucket.seconds_until((1 + HEADER_SHARE) * num_bytes, now), why)

    def _follow(self) -> UploadPace:
        """Goes by what is allowed and what the uplink carries now; returns which of them is less."""
        rate, carries = self.allowed_bytes_per_second, self.uplink.carries
        why = FREE if rate is None else UploadPace(held_by="limit", bytes_per_second=rate)
        if carries is not None and (rate is None or (1 + HEADER_SHARE) * carries < rate):
            rate, why = (
                (1 + HEADER_SHARE) * carries,
                UploadPace(held_by="link", bytes_per_second=carries),
            )
        if rate != self._rate:
            self._rate = rate
            self._refill(rate, self.clock())
        return why

    def _refill(self, rate: float | None, now: float) -> None:
        if rate is None:
            self._bucket = None
            return
        depth_bytes = self._burst_seconds * rate
        if self._bucket is None:
            self._bucket = TokenBucket(bytes_per_second=rate, depth_bytes=depth_bytes, now=now)
        else:
            self._bucket.change(bytes_per_second=rate, depth_bytes=depth_bytes, now=now)

    @property
    def chunk_bytes(self) -> int:
        """No more than this may be asked for at once, in bytes of a body."""
        if self._rate is None:
            return CHUNK_BYTES
        return max(1, min(CHUNK_BYTES, int(self._burst_seconds * self._rate / (1 + HEADER_SHARE))))

    async def leave(self, num_bytes: int) -> None:
        """Waits until so many bytes of a body, at most `chunk_bytes`, may leave, and takes them."""
        self._follow()
        if self._bucket is None:
            return
        async with self._turn:
            seconds, why = self.may_send(num_bytes, self.clock())
            if seconds > 0:
                self.uplink.held_back()
                self._held_back = self.clock() + seconds, why
                await self._sleep(seconds)
            # Nothing is awaited from here on: who is cancelled has taken nothing.
            self._take((1 + HEADER_SHARE) * num_bytes)

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

    def pace(self, num_waiting: int) -> UploadPace:
        """What keeps uploads from going faster now.

        `num_waiting` are the peers that all which may go is out to, and that have not answered.
        """
        held_at, why = self._held_back
        if self.clock() - held_at <= _REASON_SECONDS:
            return why
        if not self.uplink.meter.num_active:
            return NO_UPLOAD
        shared = self.kernel.shared_bytes_per_second if self.kernel is not None else None
        if shared is not None:
            return UploadPace(held_by="losses", bytes_per_second=shared)
        return UploadPace(held_by="answers", num_peers=num_waiting) if num_waiting else FREE

    # What leaves without asking, and makes bodies wait.

    def sent_message(self, num_bytes: int) -> None:
        """Notes a small message that is sent."""
        self._take((1 + HEADER_SHARE) * num_bytes)

    def received(self, num_bytes: int) -> None:
        """Notes what came, for the acknowledgements that it costs."""
        self._take(ACKNOWLEDGEMENT_SHARE * num_bytes)

    def opened_stream(self) -> None:
        """Notes a stream that is opened."""
        self._take(STREAM_BYTES)

    def made_connection(self) -> None:
        """Notes, and counts, a connection that is made."""
        self._take(CONNECTION_BYTES)
        self._counts.sent("control", CONNECTION_BYTES)
        self._counts.received("control", CONNECTION_BYTES)

    def _take(self, num_wire_bytes: float) -> None:
        if self._bucket is not None:
            self._bucket.take(num_wire_bytes, self.clock())

    # What links carry, and what is counted.

    @property
    def rates(self) -> LinkRates:
        """What the link carries, as far as transfers have shown it."""
        return LinkRates(
            up_bytes_per_second=self.uplink.meter.bytes_per_second,
            down_bytes_per_second=self._down.bytes_per_second,
        )

    def tell_progress(self) -> None:
        """A peer has got on: others may have waited for it."""
        for go_on in self.on_progress:
            go_on()

    def sending(self) -> AbstractContextManager[None]:
        """While a body is on its way out."""
        return self._busy(self.uplink.meter)

    def receiving(self) -> AbstractContextManager[None]:
        """While a body is on its way in."""
        return self._busy(self._down)

    @contextmanager
    def _busy(self, meter: LinkMeter) -> Iterator[None]:
        meter.begin(self.clock())
        try:
            with self._while_moving():
                yield
        finally:
            meter.end(self.clock())

    def moved(self, *, sent_bytes: int = 0, received_bytes: int = 0, since: float) -> None:
        """So much of bodies has reached its receiver; `since` is when it was begun."""
        now = self.clock()
        if sent_bytes:
            self.uplink.meter.moved(sent_bytes, since=since, now=now)
        if received_bytes:
            self._down.moved(received_bytes, since=since, now=now)

    def count(
        self, kind: WireKind, sent_bytes: int, received_bytes: int, *, num_streams: int = 0
    ) -> None:
        """Adds what streams of a kind sent and received, and how many of them have ended."""
        sent, received = wire_bytes(sent_bytes, received_bytes, num_streams=num_streams)
        self._counts.sent(kind, sent)
        self._counts.received(kind, received)
