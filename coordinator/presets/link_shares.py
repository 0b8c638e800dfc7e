"""How much of a link an exchange gets, by its round trips and by the hosts' congestion control. Pure.

TCP feels its way, a little further at each round trip: after a pause it begins slowly, and after a loss
it climbs back. So what counts is how many round trips the bytes of an exchange take at the link's whole
rate: few over a fast link that is long, many over a slow one. cubic, Linux's default, gets less than
bbr. What was measured is all there is to go by (docs/results/exchange.jsonl and exchange-cubic.jsonl:
two nodes, 100 and 10 Mbit/s, 50 ms): between two points the share lies on a line over the logarithm of
round trips, beyond them it stays what it was at the nearest.
"""

import math
from collections.abc import Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Literal

CongestionControl = Literal["cubic", "bbr"]

CUBIC: CongestionControl = "cubic"
"""What counts where nobody says: Linux's default, and of the two the one that gets less."""

MEASURED_SHARES: Mapping[CongestionControl, Mapping[float, float]] = MappingProxyType(
    {
        "cubic": MappingProxyType({6.4: 0.55, 25.6: 0.67, 64: 0.69, 102.4: 0.64, 256: 0.85}),
        "bbr": MappingProxyType({6.4: 0.98, 25.6: 0.97, 64: 0.85, 102.4: 0.84}),
    }
)
"""By round trips that a node's bytes take at the link's whole rate: what of that rate they got, the round
trips of offers and verdicts apart. What its cores did meanwhile is in it, and counted once more: a little
too careful rather than too bold. With cubic 64 and 256 are of 10 Mbit/s, the others of 100, where cubic gets
less of a link however many bytes there are. 64 and 256, and bbr's 102.4, are of code before uploads were
paced."""

WHOLE = 1.0
"""Of rates that nodes have measured: they are of exchanges, so what those lose is lost already."""

NO_DISTANCE = math.inf
"""Round trips that bytes take where one takes no time."""

_HALVINGS = 64
"""After so many, what is left between two points is nothing to a float."""


def round_trips_of(num_bytes: float, *, bits_per_second: float, round_trip_seconds: float) -> float:
    """How many round trips pass while a link carries these bytes at its whole rate."""
    if not round_trip_seconds:
        return NO_DISTANCE
    return num_bytes * 8 / bits_per_second / round_trip_seconds


def share_of(congestion_control: CongestionControl | None, round_trips: float) -> float:
    """The part of its link that an exchange gets; None: its rate is what exchanges achieved."""
    if congestion_control is None:
        return WHOLE
    # Where cubic got a hundredth more than bbr, in other runs, that is noise: the lower counts.
    return min(_measured(kind, round_trips) for kind in {congestion_control, "bbr"})


def _measured(congestion_control: CongestionControl, round_trips: float) -> float:
    shares = MEASURED_SHARES[congestion_control]
    for (fewer, share), (more, next_share) in pairwise(shares.items()):
        if round_trips <= more:
            along = math.log(max(round_trips, fewer) / fewer) / math.log(more / fewer)
            return share + along * (next_share - share)
    return shares[max(shares)]


def enough_bits_per_second(
    congestion_control: CongestionControl | None,
    num_bytes: float,
    *,
    seconds: float,
    round_trip_seconds: float,
) -> float:
    """The slowest link that carries these bytes in these seconds, with the share it gets at that rate.

    A slower link loses a smaller part, but always takes longer: round trips over share rise with
    round trips. So there is one answer, and halving finds it.
    """
    at_whole_rate = num_bytes * 8 / seconds
    available = seconds / round_trip_seconds if round_trip_seconds else NO_DISTANCE
    points = [trips for shares in MEASURED_SHARES.values() for trips in shares]
    least, most = min(points), max(points)
    share_of_few, share_of_many = (share_of(congestion_control, end) for end in (least, most))
    if available * share_of_few <= least:
        return at_whole_rate / share_of_few
    if available * share_of_many >= most:
        return at_whole_rate / share_of_many
    for _ in range(_HALVINGS):
        middle = math.sqrt(least * most)
        if middle <= available * share_of(congestion_control, middle):
            least = middle
        else:
            most = middle
    return at_whole_rate / share_of(congestion_control, least)


def share_in_words(
    congestion_control: CongestionControl | None, num_bytes: float, round_trips: float
) -> str:
    """For the reason of a choice: what is counted on, and where that is from."""
    if congestion_control is None:
        return "counts on all of the link: its rate is what exchanges achieved"
    counted = f"counts on {share_of(congestion_control, round_trips):.2f} of the link"
    size = f"{_three_digits(num_bytes / 1e6)} MB"
    if round_trips == NO_DISTANCE:
        return f"{counted}: {size} over no distance, with {congestion_control}"
    words = f"{counted}: {size} are {_three_digits(round_trips)} round trips of it, with "
    words += congestion_control
    points = MEASURED_SHARES[congestion_control]
    if round_trips > max(points):
        words += f"; measured up to {max(points):.0f}"
    elif round_trips < min(points):
        words += f"; measured from {min(points)}"
    return words


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
