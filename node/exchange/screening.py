"""Which contributions count in a slice's result, and how much of each: decided by their norms, before a mean.

Pure, on numbers: norms come from mean.py, and whoever reduces applies what is decided here (reduction.py).

A mean without bounds is its longest contribution's: one sender in eight with a thousandfold gradient
replaces the model. So each norm is measured against the median of all, in what it may honestly be:

    measure = norm / (by work * by lateness)

Norms are of a round's work and not of a token's. Where the inner optimizer drifts, a pseudo-gradient grows
with its steps, and where noise rules, with their root; so a norm per token would make the slowest nodes
the longest, and cut them. Who trained more than the median may be longer in proportion, up to MOST_BY_WORK.
Who missed rounds owes them on top (node.exchange.residual), and may be longer by as many.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.wire.rounds import WHOLE

CLIPPED_ABOVE = 2.0
"""Of the median measure: a longer contribution is cut to it. Two of eight that pull backwards with all they
may leave a third of the step; in `benchmarks.attacks` no honest one of eight is that long."""

LEFT_OUT_ABOVE = 6.0
"""Of the median measure: what is longer is no training of this run, and nothing of it counts."""

FEWEST_FOR_A_MEDIAN = 3
"""With fewer the median says nothing: then the reducer measures by its own contribution."""

MOST_BY_WORK = 4.0
"""A node that trained many times what the median did may be so many times longer."""

MOST_BY_LATENESS = 3.0
"""Two rounds may be owed beside the one that is due (node.exchange.residual.MOST_OWED)."""

LARGEST_RMS = 100.0
"""No pseudo-gradient of a run has a root mean square above so many times that of its parameters, or 1
where theirs is smaller. It follows from the state alone: all nodes see it alike, from the first round on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How much of a contribution counts, in 65,536ths, and why not all of it."""

    factor: int = WHOLE
    why: str = ""


def allowances(tokens: Sequence[int], rounds_missed: Sequence[int]) -> list[float]:
    """How many times longer than the usual each contribution may honestly be."""
    usual = max(1, sorted(tokens)[(len(tokens) - 1) // 2])
    return [
        min(MOST_BY_WORK, max(1.0, own / usual)) * min(MOST_BY_LATENESS, 1.0 + missed)
        for own, missed in zip(tokens, rounds_missed, strict=True)
    ]


def screened(
    norms: Sequence[float],
    allowed: Sequence[float],
    *,
    own: int | None,
    largest: float = math.inf,
) -> list[Verdict]:
    """What becomes of contributions with these norms.

    `own` is the place of the reducer's own contribution, `largest` the norm above which nothing counts.
    With fewer than three that hold anything, it is measured by `own`; a reducer without one screens by
    `largest` alone, and the coordinator's bound of results is what is left. Zeros are no measure: in a
    slice of rarely used rows most nodes have nothing to say.
    """
    measures = [norm / may for norm, may in zip(norms, allowed, strict=True)]
    usual = _usual(
        [each for each in measures if each > 0], own=None if own is None else measures[own]
    )
    return [
        _verdict(norm, measure, usual, largest)
        for norm, measure in zip(norms, measures, strict=True)
    ]


def _usual(measures: Sequence[float], *, own: float | None) -> float | None:
    if len(measures) >= FEWEST_FOR_A_MEDIAN:
        return sorted(measures)[(len(measures) - 1) // 2]  # the lower of two: liars are long
    return own or None


def _verdict(norm: float, measure: float, usual: float | None, largest: float) -> Verdict:
    if norm > largest:
        why = f"its norm {norm:.3g} is above {largest:.3g}, which no training comes to"
        return Verdict(factor=0, why=why)
    if usual is None or measure <= CLIPPED_ABOVE * usual:
        return Verdict()
    times = f"its norm {norm:.3g} is {measure / usual:.1f} times what is usual for its work"
    if measure > LEFT_OUT_ABOVE * usual:
        return Verdict(factor=0, why=f"{times}, above {LEFT_OUT_ABOVE:g}")
    return Verdict(factor=quantised(CLIPPED_ABOVE * usual / measure), why=times)


def quantised(factor: float) -> int:
    """A factor from 0 to 1 in 65,536ths, rounded down: what it bounds stays within the bound."""
    return int(min(1.0, max(0.0, factor)) * WHOLE)


def num_trimmed(num_contributions: int) -> int:
    """How many values a trimmed mean drops at each end: a quarter, and of three one."""
    return 1 if num_contributions == FEWEST_FOR_A_MEDIAN else num_contributions // 4


def centred_factors(
    norms: Sequence[float], along: Sequence[float], centre_norm: float
) -> list[float]:
    """How far each contribution may lead away from the centre v: min(1, radius / |x - v|).

    Karimireddy et al. 2021, "Learning from History for Byzantine Robust Optimization", algorithm 2, with
    one iteration from the outer momentum's mean, and the median distance as the radius. `along` are the
    products x * v.
    """
    distances = [
        math.sqrt(max(0.0, norm * norm - 2 * product + centre_norm * centre_norm))
        for norm, product in zip(norms, along, strict=True)
    ]
    radius = sorted(distances)[(len(distances) - 1) // 2]
    return [1.0 if each <= radius else radius / each for each in distances]


def trust_factors(
    norms: Sequence[float], along: Sequence[float], centre_norm: float
) -> list[float]:
    """How much each contribution counts by its agreement with where the model has been going.

    That is the cosine with the outer momentum: none against it, all from the median of the others on.
    (Cao et al. 2021, "FLTrust", with the momentum as the trusted direction.) While there is no momentum
    all count.
    """
    if centre_norm == 0:
        return [1.0] * len(norms)
    cosines = [
        product / (norm * centre_norm) if norm > 0 else 0.0
        for norm, product in zip(norms, along, strict=True)
    ]
    agreeing = sorted(cosine for cosine in cosines if cosine > 0)
    if not agreeing:  # the model turns round, or most lie: nothing here says which
        return [1.0] * len(norms)
    usual = agreeing[(len(agreeing) - 1) // 2]
    return [min(1.0, max(0.0, cosine) / usual) for cosine in cosines]
