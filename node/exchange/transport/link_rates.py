"""What this node's link carries, up and down, learnt from the transfers that it makes anyway.

Pure: it is told the time, in seconds of any clock that only rises. Several transfers at once share a
link, so what counts is what all of them move together while at least one is under way.
"""

from collections import deque
from dataclasses import dataclass
from statistics import median

LEAST_BYTES = 4 << 20
LEAST_SECONDS = 2.0
"""A busy time with less than both says more of round trips than of the link."""

WINDOW = 9
"""Busy times that count: what the link carries is the median of their rates."""

LEAST_MEASUREMENTS = 3
"""Before a rate is told. Equal links differed by a third in single measurements, and slices by such rates
took twice as long as equal ones (docs/performance.md)."""

_MOST_MOVES = 512  # of one busy time; neighbours are joined when there are more


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """Bytes of bodies per second; None: not measured yet."""

    up_bytes_per_second: float | None = None
    down_bytes_per_second: float | None = None


UNMEASURED = LinkRates()


class LinkMeter:
    """One direction of the link.

    A busy time counts by the fastest half of its bytes: its beginning, while TCP feels its way, and
    its end, while the slowest peer keeps one transfer open, say nothing of our link.
    """

    def __init__(self) -> None:
        self.num_active = 0
        """Transfers under way."""
        self._began = 0.0
        self._moves: list[tuple[float, int]] = []  # when, and how many bytes
        self._rates: deque[float] = deque(maxlen=WINDOW)

    @property
    def bytes_per_second(self) -> float | None:
        """What the link carries; None: not known yet."""
        return median(self._rates) if len(self._rates) >= LEAST_MEASUREMENTS else None

    def begin(self, now: float) -> None:
        """A transfer begins."""
        if not self.num_active:
            self._began, self._moves = now, []
        self.num_active += 1

    def moved(self, num_bytes: int, now: float, *, since: float | None = None) -> None:
        """So many bytes of a transfer have arrived at their receiver.

        `since` is when they were sent, where that is known. They count halfway: news of them wait for
        each other on a full link, and come at once.
        """
        if not self.num_active:
            return  # of a transfer that has just ended
        at = now if since is None else max(self._began, (since + now) / 2)
        self._moves.append((at, num_bytes))
        if len(self._moves) > _MOST_MOVES:
            self._moves = _joined(sorted(self._moves))

    def end(self, now: float) -> None:
        """A transfer has ended, well or not."""
        self.num_active -= 1
        if self.num_active:
            return
        num_bytes = sum(count for _, count in self._moves)
        if num_bytes < LEAST_BYTES and (
            now - self._began < LEAST_SECONDS or num_bytes < LEAST_BYTES // 16
        ):
            return
        points = [(self._began, 0)]
        for at, count in sorted(self._moves):
            points.append((at, points[-1][1] + count))
        if rate := _fastest_half(points):  # else all in one instant: there is no network
            self._rates.append(rate)


def _joined(moves: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """Half as many, each at the later of two times."""
    pairs = zip(moves[::2], moves[1::2], strict=False)
    joined = [(later, count + more) for (_, count), (later, more) in pairs]
    return joined + moves[2 * len(joined) :]


def _fastest_half(points: list[tuple[float, int]]) -> float:
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
