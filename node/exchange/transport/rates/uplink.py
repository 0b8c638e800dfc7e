"""How fast bodies may go so that no queue grows before the uplink, learnt from the answers to them.

What is sent faster than the uplink carries waits in the router's queue, with all that other people
on the same line send, and a queue that is full loses packets, for which most TCPs give up a third of their
rate. Both show in the answers before they hurt: all of them take longer. So the rate is that of the answers,
and a little more from time to time.

This is BBR's model of a path, the highest rate and the shortest way seen lately (Cardwell et al. 2016,
"BBR: Congestion-Based Congestion Control"), with a limit on the delay as in LEDBAT (RFC 6817), above
the TCP that libp2p has. A standing queue is told from a passing one as in CoDel (RFC 8289): by the least
delay of an interval.

Pure: it is told the time, in seconds of any clock that only rises.
"""

import math
from collections import deque
from collections.abc import Callable, Hashable
from statistics import median_low
from typing import NamedTuple

BURST_SECONDS = 0.05
"""What may leave at once, in seconds of the rate: so long a heartbeat may wait behind a chunk."""

EPOCH_SECONDS = 0.2
"""So often it is looked at how answers come."""

LEAST_ANSWERS = 6
"""In an epoch, or it lasts longer: fewer say nothing of a rate."""

QUEUE_SECONDS = 0.06
"""What the quickest answer of an epoch may take longer than the quickest of all lately. Less finds a queue
where data only waits for data that goes the other way; LEDBAT++ allows as much."""

LASTING_SECONDS = 3.0
"""So long nothing is paced here where the kernel paces: most exchanges are over then."""

MEMORY = 50
"""Epochs that are lately. A way that has become longer is taken for a queue until then."""

RATES = 8
"""Epochs, of whose rates the second highest is what the uplink carries: one may be wrong, and after a pause
TCP feels its way for longer than the first."""

_DRAIN = 0.85  # of what the uplink carries: so a queue gets shorter
_PROBE = 1.06  # … and so it is seen when the uplink carries more, or a queue begins


class _Way(NamedTuple):
    """What takes equally long to be answered, but for queues."""

    peer: Hashable
    is_whole: bool


class _Epoch:
    """What was answered since some answer."""

    def __init__(self, began_at: float, *, is_early: bool = False) -> None:
        self.began_at = began_at
        self.is_early = is_early  # TCP feels its way, and nothing is learnt but delays
        self.num_bytes = 0
        self.num_answers = 0
        self.least_seconds: dict[_Way, float] = {}
        self.is_held_back = False
        self.is_known = True

    def note(self, way: _Way, num_bytes: int, seconds: float) -> None:
        """One answer."""
        self.num_bytes += num_bytes
        self.num_answers += 1
        self.least_seconds[way] = min(seconds, self.least_seconds.get(way, seconds))

    @property
    def peers(self) -> set[Hashable]:
        """Who answered."""
        return {way.peer for way in self.least_seconds}


class Uplink:
    """What is under way to all peers, and how fast more may follow.

    Where the kernel paces TCP (`is_paced_below`), TCP itself finds the rate without losses, and better: only
    transfers that last are paced here, for the sake of who waits in the queue that TCP leaves.
    """

    def __init__(self, is_paced_below: Callable[[], bool] = lambda: False) -> None:
        self.bytes_per_second: float | None = None
        """Of bodies; None: as fast as they can, for no queue was seen yet."""
        self._is_paced_below = is_paced_below
        self._busy_since = 0.0
        self._lately: deque[_Epoch] = deque(maxlen=MEMORY)
        self._rates: deque[float] = deque(maxlen=RATES)
        self._epoch: _Epoch | None = None
        self._round_trips: dict[Hashable, float] = {}
        self._num_under_way = 0
        self._last_ended_at = 0.0

    def goes_round_in(self, peer: Hashable, seconds: float) -> None:
        """A few bytes to a peer and back take so long."""
        self._round_trips[peer] = seconds

    def begin(
        self, peer: Hashable, num_bytes: int, *, now: float, is_whole: bool = False
    ) -> "UnderWay":
        """A part of a body goes out, or a whole one, and will be answered.

        While nothing was under way the link was idle, which says nothing of it. For a moment it may be:
        at a low rate a part is answered before the next one is out.
        """
        if not self._num_under_way and now - self._last_ended_at > EPOCH_SECONDS:
            self._epoch = None
            self._busy_since = now
            if self._is_paced_below():
                self.bytes_per_second = None
        self._num_under_way += 1
        return UnderWay(self, _Way(peer, is_whole), num_bytes)

    def held_back(self) -> None:
        """Bytes had to wait for the rate: without it more would have gone out."""
        if self._epoch is not None:
            self._epoch.is_held_back = True

    def unanswered(self) -> None:
        """Bytes go out that nobody answers: they take a share of the link that cannot be seen."""
        if self._epoch is not None:
            self._epoch.is_known = False

    def answered(self, way: _Way, num_bytes: int, *, seconds: float, now: float) -> None:
        """What was under way was answered, so many seconds after its last byte went out."""
        epoch = self._epoch
        if epoch is None:
            self._epoch = _Epoch(now, is_early=True)
            return
        epoch.note(way, num_bytes, seconds)
        if now - epoch.began_at >= EPOCH_SECONDS and epoch.num_answers >= LEAST_ANSWERS:
            if epoch.is_known:
                self._learn(epoch, epoch.num_bytes / (now - epoch.began_at))
            is_early = self._is_paced_below() and now - self._busy_since < LASTING_SECONDS
            self._epoch = _Epoch(now, is_early=is_early)

    def ended(self, now: float) -> None:
        """One less is under way."""
        self._num_under_way -= 1
        self._last_ended_at = now

    def _learn(self, epoch: _Epoch, rate: float) -> None:
        self._lately.append(epoch)
        has_queue = self._queue_seconds(epoch) > QUEUE_SECONDS
        if epoch.is_early or not (has_queue or epoch.is_held_back):
            return  # there was less to send than the link carries, or it was sent more slowly
        self._rates.append(rate)
        if has_queue or self.bytes_per_second is not None:
            carried = sorted(self._rates)[-2:][0]
            self.bytes_per_second = (_DRAIN if has_queue else _PROBE) * carried

    def _queue_seconds(self, epoch: _Epoch) -> float:
        """How long what is sent waits before our link.

        A queue before one peer's link delays that peer's answers, and one before ours delays everybody's.
        The last peer that there is still something for is mostly the slowest one: it says nothing of us.
        """
        peers = set[Hashable]().union(*(other.peers for other in self._lately))
        if len(epoch.peers) == 1 < len(peers):
            return 0.0
        return median_low(
            seconds - self._shortest_seconds(way) for way, seconds in epoch.least_seconds.items()
        )

    def _shortest_seconds(self, way: _Way) -> float:
        """What an answer takes without a queue: the least lately.

        At first the queue may have been there before the first answer: then what a burst adds to a round
        trip counts, if that is less, though some peers are never as quick.
        """
        lately = [e.least_seconds[way] for e in self._lately if way in e.least_seconds]
        if len(lately) > MEMORY // 2:
            return min(lately)
        return min(*lately, self._round_trips.get(way.peer, math.inf) + BURST_SECONDS)


class UnderWay:
    """A part of a body, or a whole one, that goes out and will be answered."""

    def __init__(self, uplink: Uplink, way: _Way, num_bytes: int) -> None:
        self._uplink = uplink
        self._way, self._num_bytes = way, num_bytes
        self._out_at: float | None = None
        self._has_ended = False

    def is_out(self, now: float) -> None:
        """Its last byte was handed on."""
        self._out_at = now

    def answered(self, now: float) -> None:
        """It is there. An answer before all went out says nothing of the way."""
        if self._out_at is not None and not self._has_ended:
            seconds = now - self._out_at
            self._uplink.answered(self._way, self._num_bytes, seconds=seconds, now=now)
        self.lost(now)

    def lost(self, now: float) -> None:
        """Nothing more is to be heard of it; does nothing once it was answered."""
        if not self._has_ended:
            self._has_ended = True
            self._uplink.ended(now)
