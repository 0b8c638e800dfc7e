"""The coordinator's time: seconds for which this process ran, so that nobody pays for its sleep.

One that was stopped (a suspended laptop, a paused virtual machine, SIGSTOP) could hear nobody meanwhile. If
that time counted, every lease would be over when it wakes. Likewise where a relay carries it that is away.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Protocol

TICK_SECONDS = 1.0
"""The clock is looked at this often, whether or not anything is due: gaps are measured by it."""

LONGEST_GAP_SECONDS = 3.0
"""Between two looks at the clock; what is longer was a sleep, and counts as one tick."""

SHORTEST_SLEEP_SECONDS = 0.01
"""Bounds the clock's rate, should a tick at a deadline leave that deadline standing."""


class Clock(Protocol):
    """The coordinator's time, in seconds."""

    def now(self) -> float:
        """The time now; never goes back."""
        ...

    def take_slept(self) -> float:
        """Seconds that did not count since this was last asked."""
        ...

    async def wait_until(self, time: float | None, changed: asyncio.Event) -> None:
        """Returns at that time or earlier, and as soon as `changed` is set."""
        ...


def seconds_since_boot() -> float:
    """A clock that goes on while the machine is suspended, where there is one."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # Linux only
    return time.clock_gettime(clock)


class LoopClock:
    """Goes on from `starts_at` with `source`, and stands still while nobody could look at it.

    `source` is the event loop's time unless given; on a virtual-time loop as well. Gaps are seen
    as long as somebody waits in `wait_until`, as `Driver.run_clock` always does. Nor does time count while
    `hears_nobody`.
    """

    def __init__(
        self,
        *,
        starts_at: float,
        source: Callable[[], float] | None = None,
        hears_nobody: Callable[[], bool] = lambda: False,
    ) -> None:
        self._hears_nobody = hears_nobody
        self._source = source or asyncio.get_running_loop().time
        self._looked_at = self._source()
        self._offset = starts_at - self._looked_at
        self._slept = 0.0
        self._unheard = 0.0  # slept as well, and told once somebody may be heard again

    def now(self) -> float:
        """The time now."""
        looked_at = self._source()
        gap = looked_at - self._looked_at
        counted = gap if gap <= LONGEST_GAP_SECONDS else TICK_SECONDS
        if self._hears_nobody():
            self._unheard += gap
            self._offset -= gap
        else:
            self._slept += gap - counted + self._unheard
            self._offset -= gap - counted
            self._unheard = 0.0
        self._looked_at = looked_at
        return self._offset + looked_at

    def take_slept(self) -> float:
        """Seconds that did not count since this was last asked."""
        self.now()
        slept, self._slept = self._slept, 0.0
        return slept

    async def wait_until(self, time: float | None, changed: asyncio.Event) -> None:
        """Returns at that time or after a tick, and as soon as `changed` is set."""
        left = TICK_SECONDS if time is None else min(time - self.now(), TICK_SECONDS)
        # Not wait_for: in Python 3.11 it forgets a cancellation that comes with the change itself,
        # and a coordinator told to stop while its nodes leave would wait for its clock for ever.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(left, SHORTEST_SLEEP_SECONDS)):
                await changed.wait()
        self.now()
