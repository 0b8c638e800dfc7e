"""What a transport's streams move: bytes for the wire ledger, and how fast the link moves them."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from node.exchange.transport.rates.link_rates import LinkMeter, LinkRates
from node.exchange.transport.wire_cost import CONNECTION_BYTES, wire_bytes
from protocol.wire_count import WireCounts, WireKind


class Tally:
    """Shared by all streams of a transport."""

    def __init__(
        self,
        counts: WireCounts,
        *,
        now: Callable[[], float] = time.monotonic,
        while_moving: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`while_moving` is entered for as long as a body is on its way."""
        self._counts = counts
        self._while_moving = while_moving
        self._now = now
        self._up, self._down = LinkMeter(), LinkMeter()

    @property
    def rates(self) -> LinkRates:
        """What the link carries, as far as transfers have shown it."""
        return LinkRates(
            up_bytes_per_second=self._up.bytes_per_second,
            down_bytes_per_second=self._down.bytes_per_second,
        )

    @property
    def most_sent_bytes_per_second(self) -> float | None:
        """What the uplink was seen to carry at best; None: not known yet."""
        return self._up.most_bytes_per_second

    @contextmanager
    def sending(self) -> Iterator[None]:
        """While a body is on its way out."""
        with self._busy(self._up):
            yield

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """While a body is on its way in."""
        with self._busy(self._down):
            yield

    def now(self) -> float:
        """By the clock of what moves, in seconds."""
        return self._now()

    def moved(self, *, sent_bytes: int = 0, received_bytes: int = 0, since: float) -> None:
        """So much of bodies has reached its receiver; `since` is when it was begun."""
        now = self._now()
        if sent_bytes:
            self._up.moved(sent_bytes, since=since, now=now)
        if received_bytes:
            self._down.moved(received_bytes, since=since, now=now)

    def count(
        self, kind: WireKind, sent_bytes: int, received_bytes: int, *, num_streams: int = 0
    ) -> None:
        """Adds what streams of a kind sent and received, and how many of them have ended."""
        sent, received = wire_bytes(sent_bytes, received_bytes, num_streams=num_streams)
        self._counts.sent(kind, sent)
        self._counts.received(kind, received)

    def count_connection(self) -> None:
        """Adds a connection that was made."""
        self._counts.sent("control", CONNECTION_BYTES)
        self._counts.received("control", CONNECTION_BYTES)

    @contextmanager
    def _busy(self, meter: LinkMeter) -> Iterator[None]:
        meter.begin(self._now())
        try:
            with self._while_moving():
                yield
        finally:
            meter.end(self._now())
