"""How much of a link an exchange gets, by its bytes and by the hosts' congestion control. Pure.

TCP feels its way: after a pause it begins slowly, and so a small exchange gets less of a link than a
large one; cubic, Linux's default, gets less than bbr. What was measured is all there is to go by
(docs/results/exchange.jsonl and exchange-cubic.jsonl: two nodes, 100 Mbit/s, 50 ms): between two sizes
the share lies on a line over the logarithm of bytes, beyond them it stays what it was at the nearest.
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
        "cubic": MappingProxyType({4e6: 0.48, 16e6: 0.57}),
        "bbr": MappingProxyType({4e6: 0.75, 16e6: 0.87, 64e6: 0.84}),
    }
)
"""By bytes that a node sends, and receives: what of its link's rate it got, round trips apart. What its
cores did meanwhile is in it, and counted once more: a little too careful rather than too bold."""

WHOLE = 1.0
"""Of rates that nodes have measured: they are of exchanges, so what those lose is lost already."""


def share_of(congestion_control: CongestionControl | None, num_bytes: float) -> float:
    """The part of its link that an exchange gets; None: its rate is what exchanges achieved."""
    if congestion_control is None:
        return WHOLE
    shares = MEASURED_SHARES[congestion_control]
    for (fewer, share), (more, next_share) in pairwise(shares.items()):
        if num_bytes <= more:
            along = math.log(max(num_bytes, fewer) / fewer) / math.log(more / fewer)
            return share + along * (next_share - share)
    return shares[max(shares)]


def share_in_words(congestion_control: CongestionControl | None, num_bytes: float) -> str:
    """For the reason of a choice: what is counted on, and where that is from."""
    if congestion_control is None:
        return "counts on all of the link: its rate is what exchanges achieved"
    share = share_of(congestion_control, num_bytes)
    least, most = min(MEASURED_SHARES[congestion_control]), max(MEASURED_SHARES[congestion_control])
    nearest = min(max(num_bytes, least), most)
    size = f"{num_bytes / 1e6:.3g} MB with {congestion_control}"
    if nearest != num_bytes:
        size += f", as {nearest / 1e6:.0f} MB got"
    return f"counts on {share:.2f} of the link: {size}"
