"""Where the time of a node's round went, and how long its exchange was at work. Pure.

An exchange is at work while a body travels from or to a peer, or something is encoded, decoded, reduced or
applied. What overlaps with the ranks' own work costs no time and is not counted; nor is waiting for others.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from node.heavy import Heavy
from node.island.island import InnerReport
from protocol.wire.payload import WireCounts
from protocol.wire.vitals import Utilisation


@dataclass(frozen=True, slots=True, kw_only=True)
class Meters:
    """What is measured of a node: the transport and heavy work tell these."""

    counts: WireCounts
    exchange_time: "ExchangeTime" = field(default_factory=lambda: ExchangeTime(_loop_time))


class RoundTimes:
    """Adds up one round after the other."""

    def __init__(self) -> None:
        self._began_at: float | None = None
        self._computed_at_begin = 0.0
        self._exchanged_at_begin = 0.0
        self._report: InnerReport | None = None
        self._adopt_seconds = 0.0

    def begin(self, now: float, *, exchange_seconds: float) -> None:
        """The node is in a plan; the time runs from here unless it does already."""
        if self._began_at is None:
            self._began_at, self._exchanged_at_begin = now, exchange_seconds

    def trained(self, report: InnerReport) -> None:
        """It has trained and published."""
        self._report = report

    def adopted(self, seconds: float) -> None:
        """Its ranks have adopted the new parameters, which took so long."""
        self._adopt_seconds += seconds

    def end(
        self, round: int, now: float, *, compute_seconds: float, exchange_seconds: float
    ) -> Utilisation | None:
        """The round is over for this node and the next begins; None when it did not train.

        `compute_seconds` are those of all inner steps since the node started: with overlap a part of
        a round is trained before the round before has ended. `exchange_seconds` likewise.
        """
        began_at, report, adopt_seconds = self._began_at, self._report, self._adopt_seconds
        computed, self._computed_at_begin = (
            compute_seconds - self._computed_at_begin,
            compute_seconds,
        )
        exchanged, self._exchanged_at_begin = (
            exchange_seconds - self._exchanged_at_begin,
            exchange_seconds,
        )
        self._began_at, self._report, self._adopt_seconds = now, None, 0.0
        if report is None or report.tokens < 1 or began_at is None or report.round != round:
            return None
        flops_per_second = report.flops / report.seconds if report.seconds > 0 else 0.0
        peak = report.peak_flops_per_second
        seconds = max(now - began_at, 1e-9)
        parts = (computed, report.publish_seconds, adopt_seconds, exchanged)
        inner_steps, publish, adopt, exchange = (part / seconds for part in parts)
        communication = _communication_of(report, inner_steps)
        return Utilisation(
            round=round,
            tokens_per_second=report.tokens / report.seconds if report.seconds > 0 else 0.0,
            flops_per_second=flops_per_second,
            # Above 1 the peak was measured while something else had the device: it says nothing.
            mfu=flops_per_second / peak if peak and flops_per_second <= peak else None,
            peak_flops_per_second=peak,
            is_peak_measured=report.is_peak_measured,
            compute_share=inner_steps - (communication or 0.0),
            local_communication_share=communication,
            publish_share=publish,
            adopt_share=adopt,
            exchange_share=exchange,
            waiting_share=max(0.0, 1 - inner_steps - publish - adopt - exchange),
            peak_memory_bytes=report.peak_memory_bytes,
        )


def _communication_of(report: InnerReport, inner_steps: float) -> float | None:
    """Part of the share of inner steps that waited for the island's own ranks; as in the report."""
    if report.communication_seconds is None:
        return None
    if report.seconds <= 0:
        return 0.0
    return inner_steps * min(1.0, report.communication_seconds / report.seconds)


Result = TypeVar("Result")

Clock = Callable[[], float]


def _loop_time() -> float:
    return asyncio.get_running_loop().time()


class ExchangeTime:
    """One for a node; the transport, heavy work and the island tell it what they do."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._num_exchanging = 0
        self._num_ranks_orders = 0
        self._seconds = 0.0
        self._told_at = 0.0

    @property
    def seconds(self) -> float:
        """Since the start."""
        self._count_up_to_now()
        return self._seconds

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """While something of the exchange is at work; several may be."""
        self._count_up_to_now()
        self._num_exchanging += 1
        try:
            yield
        finally:
            self._count_up_to_now()
            self._num_exchanging -= 1

    @contextmanager
    def ranks_at_work(self) -> Iterator[None]:
        """While the ranks train, publish or adopt."""
        self._count_up_to_now()
        self._num_ranks_orders += 1
        try:
            yield
        finally:
            self._count_up_to_now()
            self._num_ranks_orders -= 1

    def over(self, heavy: Heavy) -> Heavy:
        """Heavy work as before, and counted."""

        async def counted(work: Callable[[], Result]) -> Result:
            with self.exchanging():
                return await heavy(work)

        return counted

    def _count_up_to_now(self) -> None:
        now = self._clock()
        if self._num_exchanging and not self._num_ranks_orders:
            self._seconds += now - self._told_at
        self._told_at = now
