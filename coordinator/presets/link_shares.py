"""How long a link takes for an exchange's bytes, by TCP's slow start and what a full link gets. Pure.

Of a link that is full, bodies get a share. Before that cubic, Linux's default, has to feel its way: after a
pause it begins with ten packets (RFC 6928) and sends twice as much in each round trip (RFC 5681), until the
link is full. That costs as many round trips however many bytes follow, and the more of them the faster and
the longer the link is. bbr goes on at the rate that it has seen, and cubic does where hosts keep its windows
over pauses (net.ipv4.tcp_slow_start_after_idle = 0).

The share was measured (benchmarks/exchange/shares.py): two nodes, 100 and 10 Mbit/s, 50 ms. Slow start is
arithmetic; kept windows saved as much of it as it says, to a round trip, at 100 Mbit/s and 50 ms.
"""

import math
from dataclasses import dataclass
from typing import Literal

CongestionControl = Literal["cubic", "bbr"]

CUBIC: CongestionControl = "cubic"
"""What counts where nobody says: Linux's default, and of the two the one that gets less."""

MEASURED_SHARE = 0.86
"""The median, of cubic and bbr alike: they differ by less than exchanges over one of them do. Headers are in
it, and what cores did meanwhile, which is counted once more: a little too careful rather than too bold."""

WHOLE = 1.0
"""Of rates that nodes have measured: they are of exchanges, so what those lose is lost already."""

FIRST_WINDOW_BYTES = 10 * 1448
"""Ten packets on Ethernet. A node sends to several peers, each over a connection that begins so; all their
bytes are counted as if they went over one."""

NO_DISTANCE = math.inf
"""Round trips that bytes take where one takes no time."""

LEAST_TOLD = 0.05
"""Round trips that slow start costs; below that nothing is said of it."""

_FASTEST = 2.0**32
"""So many times the slowest link that might do is as fast as any."""

_HALVINGS = 64
"""After so many, what is left between two rates is nothing to a float."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The slower direction of a node's link, and how TCP uses it."""

    bits_per_second: float
    round_trip_seconds: float
    congestion_control: CongestionControl | None  # None: the rate is what exchanges achieved
    keeps_windows: bool = False  # over pauses

    @property
    def full_share(self) -> float:
        """What bodies get of its rate once it is full."""
        return WHOLE if self.congestion_control is None else MEASURED_SHARE

    @property
    def begins_slowly(self) -> bool:
        """Whether an exchange, which comes after a pause, has to find out what the link carries."""
        return self.congestion_control == CUBIC and not self.keeps_windows

    def round_trips_of(self, num_bytes: float) -> float:
        """How many pass while it carries these bytes at its whole rate."""
        if not self.round_trip_seconds:
            return NO_DISTANCE
        return num_bytes * 8 / self.bits_per_second / self.round_trip_seconds

    def round_trips_lost(self, num_bytes: float) -> float:
        """To slow start, in which the link is not full."""
        return self._lost_at(self.bits_per_second, num_bytes)

    def seconds_of(self, num_bytes: float) -> float:
        """What these bytes take, slow start included."""
        return self._seconds_at(self.bits_per_second, num_bytes)

    def share_of(self, num_bytes: float) -> float:
        """The part of its whole rate that they get on average."""
        return num_bytes * 8 / self.bits_per_second / self.seconds_of(num_bytes)

    def enough_bits_per_second(self, num_bytes: float, seconds: float) -> float | None:
        """The rate at which these bytes take these seconds; None: slow start alone takes longer.

        A faster link never takes longer, so there is one answer. Without slow start it is plain; with it,
        halving finds it.
        """
        least = num_bytes * 8 / seconds / self.full_share
        if not self.begins_slowly:
            return least
        most = least * _FASTEST
        if self._seconds_at(most, num_bytes) > seconds:
            return None
        for _ in range(_HALVINGS):
            middle = math.sqrt(least * most)
            if self._seconds_at(middle, num_bytes) > seconds:
                least = middle
            else:
                most = middle
        return most

    def _seconds_at(self, bits_per_second: float, num_bytes: float) -> float:
        lost = self._lost_at(bits_per_second, num_bytes) * self.round_trip_seconds
        return num_bytes * 8 / (self.full_share * bits_per_second) + lost

    def _lost_at(self, bits_per_second: float, num_bytes: float) -> float:
        if not self.begins_slowly:
            return 0.0
        full_bytes = bits_per_second / 8 * self.round_trip_seconds
        return round_trips_lost(num_bytes / FIRST_WINDOW_BYTES, full_bytes / FIRST_WINDOW_BYTES)


def round_trips_lost(windows: float, windows_a_round_trip: float) -> float:
    """To slow start, by so many first windows' bytes over a link that carries so many in a round trip.

    As a fluid: 2^t - 1 windows have been sent after t round trips, ever faster until the link is full.
    """
    if windows_a_round_trip <= math.log(2):
        return 0.0
    until_full = windows_a_round_trip / math.log(2)  # 2^t when the link is
    ended = min(until_full, 1 + windows)
    return math.log2(ended) - (ended - 1) / windows_a_round_trip


def share_in_words(link: Link, num_bytes: float) -> str:
    """For the reason of a choice: what is counted on, and where that is from."""
    if link.congestion_control is None:
        return "counts on all of the link: its rate is what exchanges achieved"
    counted = f"counts on {link.share_of(num_bytes):.2f} of the link"
    size = f"{_three_digits(num_bytes / 1e6)} MB"
    round_trips = link.round_trips_of(num_bytes)
    if round_trips == NO_DISTANCE:
        return f"{counted}: {size} over no distance, with {link.congestion_control}"
    words = f"{counted}: {size} are {_three_digits(round_trips)} round trips of it, with "
    words += link.congestion_control
    if (lost := link.round_trips_lost(num_bytes)) >= LEAST_TOLD:
        words += f", plus {lost:.1f} of slow start"
    return words


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
