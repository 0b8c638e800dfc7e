"""Which contributions count in a slice's result, and how much of each: by their norms and their tokens.

Pure, on numbers: norms come from mean.py, and whoever reduces applies what is decided here (reduction.py).

A mean without bounds is its longest contribution's: one sender in eight with a thousandfold gradient
replaces the model. So each norm is measured against the median of all by their votes, which the plan gives
them for their confirmed work (coordinator.swarm.penalties), in what it may honestly be:

    measure = norm / (by work * by lateness)

Norms are of a round's work and not of a token's. Where the inner optimizer drifts, a pseudo-gradient grows
with its steps, and where noise rules, with their root; so a norm per token would make the slowest nodes
the longest, and cut them. Who trained more than the median may be longer in proportion, up to MOST_BY_WORK.
Who missed rounds owes them on top (node.exchange.error_feedback), and may be longer by as many.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

from blake3 import blake3

from protocol.wire.rounds import WHOLE, Commit, Contributor, NodeId

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
"""Two rounds may be owed beside the one that is due (node.exchange.error_feedback.MOST_OWED)."""

CONTRADICTS_BELOW = 0.25
"""Two contributions contradict each other from so much of the usual cosine on, with the sign turned."""

MOST_COMPARED_WITH = 16
"""Others whom a contribution is compared with."""

NOT_HERE = -1
"""The place of all together who have not contributed: they agree with everybody."""

CHANCE = 3.0
"""Standard errors below zero that a cosine is by chance: it says nothing against anybody."""

LARGEST_RMS = 100.0
"""No pseudo-gradient of a run has a root mean square above so many times that of its parameters, or 1
where theirs is smaller. It follows from the state alone: all nodes see it alike, from the first round on."""

SMALLEST = 1e-11
"""Of LARGEST_RMS: nothing shorter is a measure for others. It is what rounding leaves of no training."""

MOST_OF_MEAN_WEIGHT = 2.0
"""Nobody weighs more than so many times what contributions weigh on average, whatever tokens it claims."""

COUNTED_ROUNDS = 3
"""So many rounds in a row the tokens of a participant count in means that its work does not get into."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How much of a contribution counts, in 65,536ths, and why not all of it."""

    factor: int = WHOLE
    why: str = ""
    is_undecodable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Cosine:
    """Of two contributions, and its standard error: how far chance moves it where nothing is in common.

    The elements of a pseudo-gradient are no independent draws: rows are learnt together, and a few make up
    most of it. One over the root of the elements would be far too small an error.
    """

    value: float
    error: float

    @property
    def against(self) -> float:
        """The value with its sign turned, where it is more than chance; at most 0 elsewhere."""
        return 0.0 if 0 > self.value >= -CHANCE * self.error else -self.value


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
    votes: Sequence[int] = (),
    largest: float = math.inf,
) -> list[Verdict]:
    """What becomes of contributions with these norms; `votes` say whose are usual, without them all alike.

    `own` is the place of the reducer's own contribution, `largest` the norm above which nothing counts.
    With fewer than three that hold anything, it is measured by `own`; a reducer without one screens by
    `largest` alone, and the coordinator's bound of results is what is left. Zeros are no measure, nor what
    rounding makes of them: in a slice of rarely used rows most nodes have nothing to say.
    """
    measures = [norm / may for norm, may in zip(norms, allowed, strict=True)]
    least = 0.0 if math.isinf(largest) else SMALLEST * largest
    usual = None if own is None or measures[own] <= least else measures[own]
    some = [
        (m, v) for m, v in zip(measures, votes or [1] * len(measures), strict=True) if m > least
    ]
    if len(some) >= FEWEST_FOR_A_MEDIAN:
        usual = _middle(*zip(*some, strict=True))  # the lower one of two: liars are long
    return [
        _verdict(norm, measure, usual, largest)
        for norm, measure in zip(norms, measures, strict=True)
    ]


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


def votes_about(
    votes: Sequence[int], *, not_here: int = 0, seed: bytes = b""
) -> list[Mapping[int, int]]:
    """Whose word counts how much about each contribution, by place: its own too, and that of NOT_HERE.

    All that count anything, or of many MOST_COMPARED_WITH, which the seed draws by what they count: those
    that a stride through all votes hits, in a random order. `not_here` are votes of who has not contributed.
    """
    if not sum(votes) + not_here:
        votes = [1] * len(votes)
    counting = {place: vote for place, vote in enumerate((*votes, not_here)) if vote}
    counting = {place if place < len(votes) else NOT_HERE: v for place, v in counting.items()}
    if len(votes) - 1 <= MOST_COMPARED_WITH:
        return [counting] * len(votes)

    def drawn(of: str) -> int:  # numpy's draws may change with its version
        return int.from_bytes(blake3(seed + of.encode()).digest(8), "little")

    order = sorted(counting, key=lambda place: drawn(f"order {place}"))
    ends = list(accumulate(counting[place] for place in order))
    whole = ends[-1]
    found: list[Mapping[int, int]] = []
    for place in range(len(votes)):
        first = drawn(f"first {place}") % whole
        hits = [
            (first + k * whole // MOST_COMPARED_WITH) % whole for k in range(MOST_COMPARED_WITH)
        ]
        found.append(Counter(order[bisect_right(ends, hit)] for hit in hits))
    return found


def contradicted(
    cosines: Mapping[tuple[int, int], Cosine],
    about: Sequence[Mapping[int, int]],
    votes: Sequence[int],
) -> dict[int, Verdict]:
    """Those of three or more contributions, by their places, that most of the votes point against.

    `cosines` are of pairs of places in order, `about` what `votes_about` says of `votes`. Each agrees with
    itself, and so does with all who has not contributed. So while the honest have more than half of the votes
    and agree, or are as good as at right angles, none of them is contradicted, however many others there are;
    and whoever pulls against all of them is, whatever its length. To point against is more than chance gives,
    and than a quarter of how much the larger half agrees. Where that half contradicts itself, nobody says who
    is right. Nor does one alone, whatever its votes: it takes another one that does not point against it.
    """
    if len(about) < FEWEST_FOR_A_MEDIAN:
        return {}

    def is_vouched(place: int) -> bool:
        """Whether its own votes and those of absent ones are more than half of all about it."""
        said = about[place]
        return 2 * (said.get(place, 0) + said.get(NOT_HERE, 0)) > sum(said.values())

    def agreeing(place: int) -> float:
        """The cosine that more than half of the votes say at least; 0 where its own and absent ones do."""
        if is_vouched(place):
            return 0.0
        said = about[place]
        whole = sum(said.values())
        so_far = said.get(place, 0) + said.get(NOT_HERE, 0)
        others = sorted(
            (cosines[min(place, other), max(place, other)].against, vote)
            for other, vote in said.items()
            if other not in (place, NOT_HERE)
        )
        ends = accumulate((vote for _, vote in others), initial=so_far)
        return next(
            -against
            for (against, _), end in zip(others, islice(ends, 1, None), strict=True)
            if 2 * end > whole
        )

    def witnessed(place: int) -> float:
        """The cosine with whom it agrees most."""
        return max((-each.against for pair, each in cosines.items() if place in pair), default=0.0)

    middle = [agreeing(place) for place in range(len(about))]
    if min(middle) >= 0:
        return {}
    seen = [witnessed(place) if is_vouched(place) else each for place, each in enumerate(middle)]
    usual = -_middle([-each for each in seen], votes)  # the upper one of two
    if usual < 0:
        return {}
    return {
        place: Verdict(
            factor=0,
            why=f"most of the others point against it: cosine {each:.3f}, where {usual:.3f} is usual",
        )
        for place, each in enumerate(middle)
        if each < -CONTRADICTS_BELOW * usual
    }


def _middle(values: Sequence[float], votes: Sequence[int]) -> float:
    """The least value that half of the votes are not above; all count alike where nobody has a vote."""
    ordered = sorted(zip(values, votes if sum(votes) else [1] * len(values), strict=True))
    ends = list(accumulate(vote for _, vote in ordered))
    return next(value for (value, _), end in zip(ordered, ends, strict=True) if 2 * end >= ends[-1])


# What a contribution weighs, before its norm is looked at


def bounded_weights(tokens: Sequence[int], holders: Sequence[int], *, most: float) -> list[int]:
    """Weights by tokens, so that nobody's data make up more than `most` of a mean.

    `holders` says whose data each contribution is of. Who has more than that part is brought down to it,
    and its nodes share what is left by their tokens. Where so few hold data that all would be brought
    down, all holders weigh the same. Whole numbers, rounded down, and at least 1.
    """
    sums: dict[int, int] = {}
    for holder, count in zip(holders, tokens, strict=True):
        sums[holder] = sums.get(holder, 0) + count
    bounded: set[int] = set()
    allowed = 0.0
    while True:
        rest = sum(count for holder, count in sums.items() if holder not in bounded)
        part = 1 - most * len(bounded)
        if rest == 0 or part <= 0:  # all are above it, whatever it is measured by
            bounded, allowed = set(sums), float(min(sums.values()))
            break
        allowed = most * rest / part
        above = {holder for holder in sums.keys() - bounded if sums[holder] > most * rest / part}
        if not above:
            break
        bounded |= above
    return [
        max(1, int(count * allowed / sums[holder])) if holder in bounded else count
        for holder, count in zip(holders, tokens, strict=True)
    ]


def tokens_of_late(samples: int, *, contributors: Sequence[Contributor], context: int) -> int:
    """What samples will weigh that come too late: as many tokens of each count as of those that are here.

    How many of its own will count only the node knows that trains them. Where all do, all are told.
    """
    here = sum(each.samples for each in contributors) * context
    return samples * context * sum(each.tokens for each in contributors) // here


def missed_in_a_row(
    before: Mapping[NodeId, int], commit: Commit, own_slices: Collection[int] = ()
) -> dict[NodeId, int]:
    """In how many rounds up to this one the work of each participant got into no result.

    Of a reducer's own slices, where it had any: somebody may get through to all others. Rounds that
    a node has no part in change nothing, and neither do void slices.
    """
    results = [each for each in commit.slices if each.digest is not None]
    results = [each for each in results if each.index in own_slices] or results
    if not results:
        return dict(before)
    here = {c.node_id for outcome in results for c in outcome.contributors}
    counted = {a.node_id: before.get(a.node_id, 0) + 1 for a in commit.assignments}
    return {**before, **counted, **dict.fromkeys(here, 0)}
