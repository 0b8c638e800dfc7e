"""When ranks hang: a decision on silences, and the timer that asks for it.

A rank that is stopped, or waits for ever in a collective or a driver, neither dies nor answers. How
long work may take is not known beforehand, so what was seen so far is the measure.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOOK_SECONDS = 1.0
MOST_COUNTED_SECONDS = 3.0
"""Of the time between two looks. If more has passed, this process has not run either: the machine
slept, or a container was frozen, and the ranks could not have said anything."""

FIRST_TIME_FACTOR = 10.0
"""Times the patience for what was never done before: the first step compiles, loads and connects."""

SLOWEST_FACTOR = 10.0
"""Times the longest silence that ended well, of the same kind of work."""


class Silence:
    """How long nothing has been heard of ranks that work, and whether that is too long. Pure."""

    def __init__(self, *, patience_seconds: float) -> None:
        self.patience_seconds = patience_seconds
        self._longest: dict[str, float] = {}  # kind of work -> silence that ended well
        self._kind: str | None = None
        self._seconds = 0.0
        self._at = 0.0

    def begin(self, kind: str, now: float) -> None:
        """The ranks were told to do something."""
        self._kind, self._seconds, self._at = kind, 0.0, now

    def heard(self, now: float) -> None:
        """Any of them gave a sign of life."""
        if self._kind is None:
            return
        self._pass(now)
        self._longest[self._kind] = max(self._seconds, self._longest.get(self._kind, 0.0))
        self._seconds = 0.0

    def end(self) -> None:
        """They have nothing to do, or it no longer matters."""
        self._kind = None

    def verdict(self, now: float) -> str | None:
        """Why the ranks hang, for people; None while they may still be at work."""
        if self._kind is None:
            return None
        self._pass(now)
        longest = self._longest.get(self._kind)
        if longest is None:
            limit = FIRST_TIME_FACTOR * self.patience_seconds
            reason = "the first time"
        else:
            limit = max(self.patience_seconds, SLOWEST_FACTOR * longest)
            reason = f"{longest:.1f} s was the longest until now"
        if self._seconds <= limit:
            return None
        return (
            f"gave no sign of life for {self._seconds:.0f} s in {self._kind} "
            f"({limit:.0f} s are given: {reason})"
        )

    def _pass(self, now: float) -> None:
        self._seconds += min(now - self._at, MOST_COUNTED_SECONDS)
        self._at = now


class HangWatch:
    """Looks every second while ranks work. With no patience at all it does not look."""

    def __init__(self, *, patience_seconds: float, on_hang: Callable[[str], None]) -> None:
        self.silence = Silence(patience_seconds=patience_seconds)
        self._on_hang = on_hang
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def over(self, kind: str) -> Iterator[None]:
        """Watches while the ranks carry out one order."""
        loop = asyncio.get_running_loop()
        self.silence.begin(kind, loop.time())
        if self.silence.patience_seconds > 0:
            self._timer = loop.call_later(LOOK_SECONDS, self._look)
        try:
            yield
        finally:
            self.silence.end()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def heard(self) -> None:
        """A rank said something."""
        self.silence.heard(asyncio.get_running_loop().time())

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        why = self.silence.verdict(loop.time())
        if why is not None:
            self._timer = None
            self._on_hang(why)
        else:
            self._timer = loop.call_later(LOOK_SECONDS, self._look)
