"""Where heavy work runs, how tasks are ended, and how long a node's exchange was at work.

Hashing, encoding and outer arithmetic must not delay heartbeats. The daemon runs them in a thread; tests and
simulations run them in place, so that their order is fixed.

An exchange is at work while a body travels from or to a peer, or something is encoded, decoded, reduced or
applied. What overlaps with the ranks' own work costs no time and is not counted; nor is waiting for others.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import structlog

from protocol.wire.payload import WireCounts

log = structlog.get_logger()

Result = TypeVar("Result")


class Heavy(Protocol):
    """Runs a function that may take long, without blocking the control loop."""

    async def __call__(self, work: Callable[[], Result]) -> Result:
        """Returns what `work` returns, or raises what it raises."""


async def in_thread(work: Callable[[], Result]) -> Result:
    """Runs `work` in a thread of the loop's pool; kernels, numpy, torch and BLAKE3 let go of the GIL.

    A thread cannot be stopped. So when it is cancelled it waits for the thread first: what follows
    may free the shared memory that `work` writes to.
    """
    thread = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        while not thread.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([thread])
        raise


async def in_place(work: Callable[[], Result]) -> Result:
    """Runs `work` here and now."""
    return work()


async def cancelled(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancels tasks and returns once they have ended, however they do.

    It catches no CancelledError, which could be that of whoever waits here.
    """
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def tell_unsaved(saving: asyncio.Future[None]) -> None:
    """Tells at once what ends the node later: the next save raises it, or the end of the round in flight."""
    if not saving.cancelled() and (error := saving.exception()) is not None:
        log.error("not saved", why=str(error))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Meters:
    """What is measured of a node: the transport and heavy work tell these."""

    counts: WireCounts
    exchange_time: ExchangeTime = field(default_factory=lambda: ExchangeTime(_loop_time))
