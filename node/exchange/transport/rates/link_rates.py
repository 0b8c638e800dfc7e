"""What this node's link carries, up and down, learnt from the transfers that it makes anyway.

Pure: it is told the time, in seconds of any clock that only rises. Several transfers at once share a
link, so what counts is what all of them move together while at least one is under way.
"""

from collections import defaultdict, deque
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import NamedTuple

LEAST_BYTES = 4 << 20
LEAST_SECONDS = 0.5
"""A busy time with less than both says more of round trips than of the link."""

WINDOW = 9
"""Busy times that count: what the link carries is the median of their rates."""

LEAST_MEASUREMENTS = 5
"""Before a rate is told. Single ones differ much among equal links, and would make slices uneven
(docs/decisions.md)."""

_MOST_MOVES = 512  # of one busy time; neighbours are joined when there are more


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """Bytes of bodies per second; None: not measured yet."""

    up_bytes_per_second: float | None = None
    down_bytes_per_second: float | None = None


UNMEASURED = LinkRates()


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

    def __init__(self) -> None:
        self.num_active = 0
        """Transfers under way."""
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
            now - self._began < LEAST_SECONDS or num_bytes < LEAST_BYTES // 16
        ):
            return
        self._rates.append(_fastest_half(_carried(self._moves)))


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
