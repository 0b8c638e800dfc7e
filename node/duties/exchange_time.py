"""How long a node's exchange was at work while its ranks were not. Pure: it is told the time by a clock.

At work: a body travels from or to a peer, or something is encoded, decoded, reduced or applied. What
overlaps with the ranks' own work costs no time and is not counted; nor is waiting for others.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from node.heavy import Heavy

Result = TypeVar("Result")

Clock = Callable[[], float]


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
