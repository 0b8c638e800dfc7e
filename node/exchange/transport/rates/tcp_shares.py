"""How fast each TCP connection may send, so that together they do not overrun the uplink.

TCP finds the rate of each connection for itself. A swarm's connections all begin at once: fifteen with
windows of ten packets that double have overflowed the queue before a slow uplink before one of them
could notice, and the round waits for what was lost. So once many packets were lost, all of them together
are kept to what the uplink was seen to carry, and a little more; with each busy time in which few
are lost, a little more still.

It is dealt out by max-min fairness (Bertsekas and Gallager, "Data Networks", 1992, section 6.5.2): a
connection that cannot use an equal share leaves the rest of it to the others.

Pure: it is told the time, in seconds of any clock that only rises.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

LEAST_GAIN = 1.25
"""So many times as fast as the uplink was seen to carry at best all may send together after losses. What was
seen is a tenth to a fifth less than it carries, since parts count until they are answered."""

CREEP = 1.05
"""By so much this grows with each busy time with few losses in which it held something back: links change."""

MOST_GAIN = 16.0
"""It grows no further: then nothing is held back that TCP lets go."""

MANY_LOST, MANY = 0.01, 10
"""Of the packets of a busy time, and packets: radio and other people's bursts lose a few. What overruns a
queue loses some in a hundred."""

PAUSE_SECONDS = 0.25
"""When nothing was sent for so long a busy time is over."""

_GROWTH = 2.0
"""A connection that its window holds back may go so many times as fast: windows at most double."""

_FEW_BYTES = 4096  # on their way, and none waits: nothing is being sent


class TcpCount(NamedTuple):
    """What the kernel says of one connection now."""

    num_sent: int  # packets, since it began
    num_resent: int
    under_way_bytes: int
    waiting_bytes: int  # for the window, or for their pace
    window_bytes: int  # TCP's congestion window
    round_trip_seconds: float  # lately, with what it waits in queues

    @property
    def is_busy(self) -> bool:
        """Whether something is being sent over it."""
        return self.waiting_bytes > 0 or self.under_way_bytes > _FEW_BYTES

    @property
    def is_held_back(self) -> bool:
        """Whether its pace is what keeps it from sending more: its window has room."""
        return self.waiting_bytes > 0 and self.under_way_bytes < self.window_bytes - _FEW_BYTES

    @property
    def usable_bytes_per_second(self) -> float:
        """What it could use, if that were its share."""
        if self.is_held_back:
            return math.inf
        return _GROWTH * self.window_bytes / max(self.round_trip_seconds, 1e-6)


class TcpShares:
    """Of the uplink of one node."""

    def __init__(self) -> None:
        self.bytes_per_second: float | None = None
        """What all may send together; None: as much as TCP lets them."""
        self._gain: float | None = None  # None: never were many lost
        self._before: Mapping[str, TcpCount] = {}
        self._busy_at = -math.inf  # last
        self._num_sent = self._num_lost = 0  # in this busy time
        self._has_held_back = False

    def deal(
        self, counts: Mapping[str, TcpCount], *, seen: float | None, now: float
    ) -> dict[str, float]:
        """Bytes per second for each connection, by its name; infinity for no limit.

        `seen` is what the uplink was seen to carry at best, bytes per second; None: not known.
        """
        busy = {name: count for name, count in counts.items() if count.is_busy}
        if busy:
            if now > self._busy_at + PAUSE_SECONDS:
                self._end_busy_time()
            self._busy_at = now
        self._note_losses(counts)
        if self._gain is None or seen is None:
            return dict.fromkeys(counts, math.inf)
        self._has_held_back |= any(count.is_held_back for count in busy.values())
        self.bytes_per_second = allowed = self._gain * seen
        # Who has nothing to send may begin at any time, and is given its share at the next look.
        return dict.fromkeys(counts, allowed) | _dealt(
            allowed, {name: count.usable_bytes_per_second for name, count in busy.items()}
        )

    @property
    def _has_lost(self) -> bool:
        return self._num_lost >= max(MANY, MANY_LOST * self._num_sent)

    def _end_busy_time(self) -> None:
        if self._gain is not None and self._has_held_back and not self._has_lost:
            self._gain = min(MOST_GAIN, CREEP * self._gain)
        self._num_sent = self._num_lost = 0
        self._has_held_back = False

    def _note_losses(self, counts: Mapping[str, TcpCount]) -> None:
        for name, count in counts.items():
            before = self._before.get(name, count)
            self._num_sent += count.num_sent - before.num_sent
            self._num_lost += count.num_resent - before.num_resent
        self._before = counts
        if self._has_lost:
            self._gain = LEAST_GAIN


def _dealt(rate: float, usable: Mapping[str, float]) -> dict[str, float]:
    """To each what it can use, or an equal share of what the others leave; what nobody can use, to all."""
    dealt: dict[str, float] = {}
    left = rate
    for number, (name, most) in enumerate(sorted(usable.items(), key=lambda item: item[1])):
        dealt[name] = min(most, left / (len(usable) - number))
        left -= dealt[name]
    return {name: share + left / len(dealt) for name, share in dealt.items()}
