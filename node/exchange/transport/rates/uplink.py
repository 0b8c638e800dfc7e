"""What links carry: the one estimate of the uplink, who is ahead, and how much may be under way to a peer.

Pure: it is told the time, in seconds of any clock that only rises, and what moves.

The uplink (`Uplink`) is learnt from the transfers that are made anyway. A meter tells what the link was seen
to carry, up or down, once a transfer is over. While one is under way, the delay of its answers tells how
fast bodies may go so that no queue grows before the uplink.

What is sent faster than the uplink carries waits in the router's queue, with all that other people
on the same line send, and a queue that is full loses packets, for which most TCPs give up a third of their
rate. Both show in the answers before they hurt: all of them take longer. So the rate is that of the answers,
and a little more from time to time.

This is BBR's model of a path, the highest rate and the shortest way seen lately (Cardwell et al. 2016,
"BBR: Congestion-Based Congestion Control"), with a limit on the delay as in LEDBAT (RFC 6817), above
the TCP that libp2p has. A standing queue is told from a passing one as in CoDel (RFC 8289): by the least
delay of an interval.

Peers that share a link are to move as much (`Evenness`). A slice is reduced when the last of its
contributions is here, and a round is over when the last peer has the last result. TCP gives connections
through one narrow link shares that differ by a factor of two or three, for as long as a round takes. So
whoever is ahead waits a little, and the room goes to the others.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable
from itertools import pairwise
from statistics import median, median_low
from typing import NamedTuple

from node.exchange.peers import LEAST_PART_BYTES, PARTS_IN_WINDOW, WINDOW_BYTES, Limits

LEAST_BYTES = 4 << 20
"""A busy time with less, shorter than `Limits.measured_seconds`, says more of round trips than of a link."""

WINDOW = 9
"""Busy times that count: what the link carries is the median of their rates."""

LEAST_MEASUREMENTS = 5
"""Before a rate is told. Single ones differ much among equal links, and would make slices uneven
(docs/decisions.md)."""

HEADROOM = 1.5
"""While a node has made no long transfer: uploads may go so many times as fast as the uplink was seen to
carry at best. That is below what it carries when others were slow, so there must be room to find more; and
what is beyond twice of it fills the queue in front of the link until packets are lost (docs/decisions.md)."""

LEAST_ANSWERS = 6
"""In an epoch, or it lasts longer: fewer say nothing of a rate."""

MEMORY = 50
"""Epochs that are lately. A way that has become longer is taken for a queue until then."""

RATES = 8
"""Epochs, of whose rates the second highest is what the uplink carries: one may be wrong, and after a pause
TCP feels its way for longer than the first."""

_MOST_MOVES = 512  # of one busy time; neighbours are joined when there are more
_DRAIN = 0.85  # of what the uplink carries: so a queue gets shorter
_PROBE = 1.06  # … and so it is seen when the uplink carries more, or a queue begins


class _Move(NamedTuple):
    """Bytes that were on their way for some time: others may have been at the same time."""

    since: float
    until: float
    num_bytes: int


class LinkMeter:
    """One direction of the link.

    Bytes count evenly over the time that they were on their way: when each of them passed nobody knows,
    and those that wait for each other on a full link arrive, and are answered, all at once.

    A busy time counts by the fastest half of its bytes: its beginning, while TCP feels its way, and
    its end, while the slowest peer keeps one transfer open, say nothing of our link.
    """

    def __init__(self, limits: Limits) -> None:
        self.num_active = 0
        """Transfers under way."""
        self._least_seconds = limits.measured_seconds
        self._began = 0.0
        self._moves: list[_Move] = []
        self._rates: deque[float] = deque(maxlen=WINDOW)

    @property
    def bytes_per_second(self) -> float | None:
        """What the link carries; None: not known yet."""
        return median(self._rates) if len(self._rates) >= LEAST_MEASUREMENTS else None

    @property
    def most_bytes_per_second(self) -> float | None:
        """The most that it was seen to carry in two busy times, for one may be wrong; None: not known yet."""
        return sorted(self._rates)[-2] if len(self._rates) >= LEAST_MEASUREMENTS else None

    def begin(self, now: float) -> None:
        """A transfer begins."""
        if not self.num_active:
            self._began, self._moves = now, []
        self.num_active += 1

    def moved(self, num_bytes: int, *, since: float, now: float) -> None:
        """So many bytes of a transfer have arrived at their receiver, which were begun at `since`."""
        since = max(self._began, since)
        if not self.num_active or now <= since:
            return  # of a transfer that has just ended, or over no network
        self._moves.append(_Move(since, now, num_bytes))
        if len(self._moves) > _MOST_MOVES:
            self._moves = _joined(self._moves)

    def end(self, now: float) -> None:
        """A transfer has ended, well or not."""
        self.num_active -= 1
        if self.num_active:
            return
        num_bytes = sum(move.num_bytes for move in self._moves)
        if num_bytes < LEAST_BYTES and (
            now - self._began < self._least_seconds or num_bytes < LEAST_BYTES // 16
        ):
            return
        self._rates.append(_fastest_half(_carried(self._moves)))


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

    def __init__(
        self, limits: Limits, *, is_paced_below: Callable[[], bool] = lambda: False
    ) -> None:
        self.meter = LinkMeter(limits)
        self.bytes_per_second: float | None = None
        """Of bodies; None: as fast as they can, for no queue was seen yet."""
        self._limits = limits
        self._is_paced_below = is_paced_below
        self._busy_since = 0.0
        self._fastest: list[float] = []  # two epochs of this busy time, for one may be wrong
        self._lately: deque[_Epoch] = deque(maxlen=MEMORY)
        self._rates: deque[float] = deque(maxlen=RATES)
        self._epoch: _Epoch | None = None
        self._round_trips: dict[Hashable, float] = {}
        self._num_under_way = 0
        self._last_ended_at = 0.0

    @property
    def carries(self) -> float | None:
        """Bytes of bodies per second that may follow; None: nothing is known that would hold them back."""
        if self.bytes_per_second is not None or self._is_paced_below():
            return self.bytes_per_second
        best = self.meter.most_bytes_per_second
        return None if best is None else HEADROOM * best

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
        if not self._num_under_way and now - self._last_ended_at > self._limits.epoch_seconds:
            self._epoch = None
            self._busy_since = now
            self._fastest = []
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
        if (
            now - epoch.began_at >= self._limits.epoch_seconds
            and epoch.num_answers >= LEAST_ANSWERS
        ):
            if epoch.is_known:
                rate = epoch.num_bytes / (now - epoch.began_at)
                self._fastest = sorted([*self._fastest, rate])[-2:]
                self._learn(epoch, rate)
            is_early = (
                self._is_paced_below() and now - self._busy_since < self._limits.lasting_seconds
            )
            self._epoch = _Epoch(now, is_early=is_early)

    def ended(self, now: float) -> None:
        """One less is under way."""
        self._num_under_way -= 1
        self._last_ended_at = now

    def _learn(self, epoch: _Epoch, rate: float) -> None:
        self._lately.append(epoch)
        has_queue = self._queue_seconds(epoch) > self._limits.queue_seconds
        if epoch.is_early or not (has_queue or epoch.is_held_back):
            return  # there was less to send than the link carries, or it was sent more slowly
        self._rates.append(rate)
        if has_queue or self.bytes_per_second is not None:
            carried = sorted(self._rates)[-2:][0]
            self.bytes_per_second = (_DRAIN if has_queue else _PROBE) * carried
            self.bytes_per_second = max(self.bytes_per_second, self._least())

    def _least(self) -> float:
        """How far a queue is yielded to: it may be before a peer's link, to which others send too.

        A sender that yielded to that would get ever less of the peer's link, and ours has carried more. So it
        is before an only peer. Of many all may be full, or send so much themselves that their answers wait
        for it, as a helper's do. Where TCP finds the rate, that is not undone for what may be a peer's.
        """
        seen = self.meter.most_bytes_per_second or 0.0
        if self._is_paced_below():
            return _DRAIN * max(seen, min(self._fastest, default=0.0))
        return _DRAIN * seen if len(self._peers) == 1 else 0.0

    def _queue_seconds(self, epoch: _Epoch) -> float:
        """How long what is sent waits before our link.

        A queue before one peer's link delays that peer's answers, and one before ours delays everybody's.
        The last peer that there is still something for is mostly the slowest one: it says nothing of us.
        """
        if len(epoch.peers) == 1 < len(self._peers):
            return 0.0
        return median_low(
            seconds - self._shortest_seconds(way) for way, seconds in epoch.least_seconds.items()
        )

    @property
    def _peers(self) -> set[Hashable]:
        """Who answered lately."""
        return set[Hashable]().union(*(epoch.peers for epoch in self._lately))

    def _shortest_seconds(self, way: _Way) -> float:
        """What an answer takes without a queue: the least lately.

        At first the queue may have been there before the first answer: then what a burst adds to a round
        trip counts, if that is less, though some peers are never as quick.
        """
        lately = [e.least_seconds[way] for e in self._lately if way in e.least_seconds]
        if len(lately) > MEMORY // 2:
            return min(lately)
        return min(*lately, self._round_trips.get(way.peer, math.inf) + self._limits.burst_seconds)


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


def _joined(moves: list[_Move]) -> list[_Move]:
    """Half as many: each two that ended one after the other are one."""
    pairs = zip(moves[::2], moves[1::2], strict=False)
    joined = [
        _Move(min(a.since, b.since), max(a.until, b.until), a.num_bytes + b.num_bytes)
        for a, b in pairs
    ]
    return joined + moves[2 * len(joined) :]


def _carried(moves: list[_Move]) -> list[tuple[float, float]]:
    """When moves began and ended, and how many bytes had been carried by then."""
    changes: dict[float, float] = defaultdict(float)  # of bytes per second
    for since, until, num_bytes in moves:
        changes[since] += num_bytes / (until - since)
        changes[until] -= num_bytes / (until - since)
    times = sorted(changes)
    points, rate = [(times[0], 0.0)], 0.0
    for before, now in pairwise(times):
        rate += changes[before]
        points.append((now, points[-1][1] + rate * (now - before)))
    return points


def _fastest_half(points: list[tuple[float, float]]) -> float:
    """The highest rate between two points that at least half of all bytes lie between."""
    half = points[-1][1] / 2
    best, first = 0.0, 0
    for at, num_bytes in points:
        while num_bytes - points[first + 1][1] >= half:
            first += 1
        moved = num_bytes - points[first][1]
        if moved >= half and at > points[first][0]:
            best = max(best, moved / (at - points[first][0]))
    return best


LEAD_OF_SENDERS_BYTES = 2 * LEAST_PART_BYTES
"""For so much no sender is held up: bytes come in parts."""

LEAD_OF_RECEIVERS_BYTES = 8 * LEAST_PART_BYTES
"""For so much no receiver is: its answers wait in its own uplink behind what it sends."""

_SLOWEST = 1 / 4  # of the peers, one at least: the others do not wait for these


class Evenness:
    """How far each peer is in the newest round. All of them are to move as much in it."""

    def __init__(self, most_lead_bytes: int) -> None:
        self._most_lead_bytes = most_lead_bytes
        self._round = -1
        self._num_bytes: Counter[Hashable] = Counter()
        self._active: Counter[Hashable] = Counter()

    def begin(self, peer: Hashable, round: int) -> None:
        """A body of this round is on its way."""
        if round > self._round:
            self._round = round
            self._num_bytes.clear()
        self._active[peer] += 1

    def end(self, peer: Hashable) -> None:
        """A body is on its way no longer, whether it has arrived or not."""
        self._active[peer] -= 1
        if not self._active[peer]:
            del self._active[peer]

    def moved(self, peer: Hashable, round: int, num_bytes: int) -> None:
        """So much of a body of this round has arrived."""
        if round == self._round:
            self._num_bytes[peer] += num_bytes

    def is_ahead(self, peer: Hashable) -> bool:
        """Whether a peer is further than those that others wait for.

        Nobody waits for the slowest quarter, nor for the slowest one: it may never come.
        """
        others = sorted(self._num_bytes[each] for each in self._active)
        if len(others) < 2:
            return False
        behind = others[max(1, int(_SLOWEST * len(others)))]
        return self._num_bytes[peer] - behind > self._most_lead_bytes


# To one peer


FIRST_BYTES_PER_SECOND = 12.5e6
"""What a link is thought to carry before anything is known of it."""

BOTH_WAYS = 2.0
"""When a link is full in both directions, acknowledgements wait behind what goes the same way as they
do, and a round trip takes so many times longer than the offer's did."""

FIRST_WINDOW_BYTES = 2 * PARTS_IN_WINDOW * LEAST_PART_BYTES
"""Under way to a peer at first: more than TCP's own first windows are."""

ROUND_TRIPS_IN_WINDOW = 2
"""What was answered in so many round trips may be under way besides: TCP never waits for us."""

_GAIN = 1.1  # a stream more must have brought this for yet another one


class Window:
    """How many bytes may be under way to one peer.

    p2pd takes megabytes off us, whatever the link carries. All of it is lost with the connection,
    which p2pd gives up when nothing gets through for some seconds, and what is small waits behind it.
    The room grows as TCP's window does: each answered part lets two more go. It stays over a pause.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._memory_seconds = limits.window_seconds
        self._num_bytes = 0
        self._lately: deque[tuple[float, int]] = deque()  # when so much was answered
        self._lately_bytes = 0
        self._busy_seconds = 0.0  # until it was empty last
        self._busy_since = 0.0

    def goes_round_in(self, seconds: float) -> None:
        """A few bytes to the peer and back take so long."""
        self._memory_seconds = max(self._limits.window_seconds, ROUND_TRIPS_IN_WINDOW * seconds)

    def begin(self, num_bytes: int, *, now: float) -> None:
        """So much is sent."""
        if not self._num_bytes:
            self._busy_since = now
        self._num_bytes += num_bytes

    def end(self, num_bytes: int, *, now: float, is_answered: bool = False) -> None:
        """So much is not under way any more: it was answered, or lost with its stream."""
        time = self._time(now)
        self._num_bytes -= num_bytes
        if not self._num_bytes:
            self._busy_seconds = time
        if is_answered:
            self._lately.append((time, num_bytes))
            self._lately_bytes += num_bytes

    def has_room(self, now: float, *, share: float = 1.0) -> bool:
        """Whether one part more may go, where only such a share of the first window is taken."""
        time = self._time(now)
        while self._lately and self._lately[0][0] <= time - self._memory_seconds:
            self._lately_bytes -= self._lately.popleft()[1]
        return self._num_bytes < share * FIRST_WINDOW_BYTES + self._lately_bytes

    def _time(self, now: float) -> float:
        """It stands still while nothing is under way: nothing can be answered then."""
        return self._busy_seconds + (now - self._busy_since if self._num_bytes else 0.0)


def first_streams(
    *,
    round_trip_seconds: float,
    num_others: int,
    bytes_per_second: float | None = None,
    most: int,
) -> int:
    """How many streams a body begins with.

    So many that their windows fill the link, `bytes_per_second` or what links are thought to carry,
    of which as many other uploads as are under way take their share. One where the way is short.
    """
    rate = FIRST_BYTES_PER_SECOND if bytes_per_second is None else bytes_per_second
    needed = math.ceil(BOTH_WAYS * rate * round_trip_seconds / WINDOW_BYTES / (1 + num_others))
    return max(1, min(needed, most))


class Widening:
    """Whether one stream more pays, told from time to time how many bytes were acknowledged.

    Streams are added as long as each brings a tenth more than there was before it. A transfer that
    was slowed by others stops growing, and its share is its streams'.
    """

    def __init__(self, limits: Limits, *, now: float) -> None:
        self._look_seconds = limits.widen_seconds
        self._since = now
        self._bytes_then = 0
        self._best = 0.0  # bytes per second
        self._is_over = False

    def is_wider_better(self, acknowledged_bytes: int, now: float) -> bool:
        """Whether to open another stream now; never twice within `Limits.widen_seconds`."""
        if self._is_over or now < self._since + self._look_seconds:
            return False
        rate = (acknowledged_bytes - self._bytes_then) / (now - self._since)
        self._since, self._bytes_then = now, acknowledged_bytes
        if rate < _GAIN * self._best:
            self._is_over = True
            return False
        self._best = rate
        return True
