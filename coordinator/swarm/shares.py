"""How much of a fragment each reducer has, by what links carry: the slowest is to be done soonest. Pure.

A contribution to the whole fragment and its result are about as large; take that size as 1. A node among n
that reduces the share x then sends 1 - x as contributions to others' slices, and x as the result of its own
slice to each of the n - 1 others; and it receives as much:

    load = (1 - x) + (n - 1) x = 1 + (n - 2) x     up, and the same down

So from three nodes on, who reduces more carries more. Within a time T, a link of U and D bytes per
second has room for the x at which the slower direction takes T. The best T is the smallest at which
these rooms together hold the whole fragment; it is found by bisection, for all rooms grow with T. A
node whose link is busy until T with its own part alone has no room, and reduces nothing; the others
then share in proportion to their rooms. With one or two nodes it does not matter who reduces.

A helper contributes nothing, and nobody is sent less because of it: with m contributions its share x is

    load = max((n - 1) x up, 1 + (m - 1) x down)

The run owner vouches for it, so no cap holds for it: one helper may reduce everything.
"""

import math
from collections.abc import Sequence
from statistics import median, median_low

from protocol.wire.vitals import LinkRates

EQUAL_FROM = 2 / 3
"""A link of so much of the fastest counts as equal to it: noise must not make plans uneven
(docs/decisions.md)."""

LEAST_OF_EQUAL = 0.1
"""A share smaller than this part of an equal one is none: a slice costs round trips too."""

MOST_OF_EQUAL = 2.0
"""No share is larger than so many equal ones: a reducer holds all contributions to its slice in
memory, decoded, and what it says of its link is its own word."""

MOST_OF_ALL = 1 / 2
"""Of a fragment, that one reducer has where there are others."""

MOST_OF_USUAL = 4.0
"""No link counts as faster than so many times the median of all that are known."""

_NUM_BISECTIONS = 60


def reducer_shares(
    links: Sequence[LinkRates], may_reduce: Sequence[bool], is_helper: Sequence[bool] = ()
) -> tuple[float, ...]:
    """The share of the fragment that each participant reduces; they sum to 1.

    A rate that is not known is taken for the median of those that are, of its kind. Somebody must be
    allowed to reduce. Without `is_helper` there is no helper; else somebody trains.
    """
    num_reducers = sum(may_reduce)
    if not num_reducers:
        raise ValueError("somebody must reduce")
    is_helper = is_helper or [False] * len(links)
    slower = _slower_rates(links, is_helper)
    is_alike = not any(is_helper) and min(slower) == max(slower)
    if len(links) < 3 or is_alike:
        return tuple(may / num_reducers for may in may_reduce)
    cap = max(1 / num_reducers, min(MOST_OF_ALL, MOST_OF_EQUAL / num_reducers))
    most = [1.0 if helps else cap for helps in is_helper]
    num_others = len(links) - 1
    num_contributions = len(links) - sum(is_helper)

    def room(seconds: float, rate: float, helps: bool) -> float:
        if not helps:
            return (seconds * rate - 1) / (num_others - 1)
        down = (seconds * rate - 1) / (num_contributions - 1) if num_contributions > 1 else 1.0
        return min(seconds * rate / num_others, down)

    def rooms(seconds: float) -> list[float]:
        return [
            may * min(limit, max(0.0, room(seconds, rate, helps)))
            for rate, may, limit, helps in zip(slower, may_reduce, most, is_helper, strict=True)
        ]

    low = high = 1 / min(slower)  # nobody's own part is through sooner
    while sum(rooms(high)) < 1:
        high *= 2
    for _ in range(_NUM_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(rooms(middle)) >= 1 else (middle, high)
    return _without_crumbs(rooms(high), least=LEAST_OF_EQUAL / num_reducers, most=most)


def _slower_rates(links: Sequence[LinkRates], is_helper: Sequence[bool]) -> list[float]:
    """The slower direction of each link as it counts. What is near and what is usual is so among nodes.

    While no rate is known all are 1, for only ratios matter. A helper receives as much as its share lets
    come, so little is seen of the downlink of whoever has a small one. It counts as its uplink does.
    """
    ups = _known([link.up_bytes_per_second for link in links], is_helper)
    downs = _known([link.down_bytes_per_second for link in links], is_helper)
    slower = [
        up if helps and up < math.inf else min(up, down)
        for up, down, helps in zip(ups, downs, is_helper, strict=True)
    ]
    if min(slower) == math.inf:
        return [1.0] * len(links)
    usual = median_low(
        [rate for rate, helps in zip(slower, is_helper, strict=True) if not helps] or slower
    )
    return [
        rate if helps else min(rate, MOST_OF_USUAL * usual)
        for rate, helps in zip(slower, is_helper, strict=True)
    ]


def _without_crumbs(room: list[float], *, least: float, most: list[float]) -> tuple[float, ...]:
    """The shares without those that are too small; what these had goes to others up to the most."""
    whole = sum(room)
    shares = [share if share / whole >= least else 0.0 for share in room]
    equal = 1 / sum(share > 0 for share in shares)
    most = [max(limit, equal) for limit in most]
    full: set[int] = set()
    while True:
        left = 1 - sum(most[place] for place in full)
        others = sum(share for place, share in enumerate(shares) if place not in full)
        scaled = [
            most[place] if place in full else share * left / others if others else share
            for place, share in enumerate(shares)
        ]
        over = {place for place, share in enumerate(scaled) if share > most[place]} - full
        if not over:
            return tuple(scaled)
        full |= over


def _known(rates: Sequence[float | None], is_helper: Sequence[bool]) -> list[float]:
    """All rates: unknown ones are the median, and near ones the fastest, of their kind; inf: none known.

    Where nothing is known of a kind, the median is of all.
    """
    kinds = list(zip(rates, is_helper, strict=True))
    known = [rate for rate in rates if rate is not None]
    usual = {}
    for kind in (False, True):
        alike = [rate for rate, helps in kinds if helps == kind and rate is not None] or known
        usual[kind] = median(alike) if alike else math.inf
    filled = [usual[helps] if rate is None else rate for rate, helps in kinds]
    fastest = {
        kind: max((r for r, k in zip(filled, is_helper, strict=True) if k == kind), default=0.0)
        for kind in (False, True)
    }
    return [
        fastest[kind] if rate >= EQUAL_FROM * fastest[kind] else rate
        for rate, kind in zip(filled, is_helper, strict=True)
    ]


def shares_in_words(shares: Sequence[float], may_reduce: Sequence[bool]) -> str:
    """What the plan's reason adds when slices are uneven; empty when they are not."""
    asked = [share for share, may in zip(shares, may_reduce, strict=True) if may]
    none = sum(share == 0 for share in asked)
    some = [share for share in asked if share > 0]
    words = []
    if none:
        words.append(
            "1 slow link reduces nothing" if none == 1 else f"{none} slow links reduce nothing"
        )
    if max(some) > 1.01 * min(some):
        words.append(
            f"slices by bandwidth, {100 * min(some):.0f} to {100 * max(some):.0f} % of the fragment"
        )
    return "; " + ", ".join(words) if words else ""
