"""How much of a slice's result nodes apply: no more than the run's results were lately. Pure.

A reducer may lie. What its result decodes to has the norm that its signed header declares: whoever holds
it has checked that. So the coordinator can bound what a result does to the model without seeing a weight,
and since the factor stands in the signed commit, all nodes apply the same, and so does who replays it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from protocol.wire.rounds import WHOLE, Commit, SliceOutcome

KEPT_COMMITS = 5
"""Of each fragment so many results are remembered: a lie has to be told in most of them to be the usual."""

MOST_TIMES_USUAL = 4.0
"""A result longer than so many times the median of these is cut to it, of two the lower. Fewer nodes and late
work make honest ones longer, by less than that. What makes all results of a round longer, as a warm-up does,
is no lie: the bound grows as the median of them has."""

MOST_TIMES_OTHERS = 32.0
"""In a fragment's first round a result is compared with its round's others, by the root of their elements:
rarely used rows and matrices differ by ten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenNorm:
    """What was applied to a stretch of a fragment."""

    start: int
    num_elements: int
    norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenNorms:
    """What one commit applied."""

    round: int
    fragment: int
    slices: tuple[SeenNorm, ...]


def norms_after(seen: Sequence[SeenNorms], commit: Commit) -> tuple[SeenNorms, ...]:
    """What is remembered once this commit is the newest."""
    before = [each for each in seen if each.round < commit.round]
    slices = tuple(
        SeenNorm(
            start=outcome.start,
            num_elements=outcome.num_elements,
            norm=outcome.norm * outcome.factor / WHOLE,
        )
        for outcome in commit.slices
        if outcome.digest is not None and outcome.norm > 0
    )
    if not slices:
        return tuple(before)
    same = [each for each in before if each.fragment == commit.fragment]
    dropped = set(map(id, same[: max(0, len(same) + 1 - KEPT_COMMITS)]))
    kept = [each for each in before if id(each) not in dropped]
    return (*kept, SeenNorms(round=commit.round, fragment=commit.fragment, slices=slices))


def norms_of(commits: Iterable[Commit]) -> tuple[SeenNorms, ...]:
    """The same after all of these, oldest first."""
    seen: tuple[SeenNorms, ...] = ()
    for commit in commits:
        seen = norms_after(seen, commit)
    return seen


def bounded(seen: Sequence[SeenNorms], commit: Commit) -> Commit:
    """The commit with a factor for each result: 1 where it is no longer than results are."""
    before = [each for each in seen if each.fragment == commit.fragment]
    usual = [_usual(outcome, before) for outcome in commit.slices]
    grown = sorted(
        outcome.norm / norm
        for outcome, norm in zip(commit.slices, usual, strict=True)
        if norm and outcome.digest is not None and outcome.norm > 0
    )
    # One result alone says nothing of the others; of two the lower, for one may be a lie.
    growth = max(1.0, grown[(len(grown) - 1) // 2]) if len(grown) > 1 else 1.0
    others = sorted(
        outcome.norm / math.sqrt(outcome.num_elements)
        for outcome in commit.slices
        if outcome.digest is not None and outcome.norm > 0
    )
    return replace(
        commit,
        slices=tuple(
            replace(outcome, factor=_factor(outcome, norm and norm * growth, others))
            for outcome, norm in zip(commit.slices, usual, strict=True)
        ),
    )


def _usual(outcome: SliceOutcome, before: Sequence[SeenNorms]) -> float | None:
    """The lower median of what was applied to a slice's elements lately; None: nothing was."""
    known = sorted(
        norm for each in before if (norm := _norm_there(each, outcome)) is not None and norm > 0
    )
    return known[(len(known) - 1) // 2] if known else None


def _factor(outcome: SliceOutcome, usual: float | None, others: Sequence[float]) -> int:
    if outcome.digest is None or outcome.norm == 0:
        return WHOLE
    if usual is not None:
        most = MOST_TIMES_USUAL * usual
    elif len(others) > 1:
        middle = others[(len(others) - 1) // 2] * math.sqrt(outcome.num_elements)
        most = MOST_TIMES_OTHERS * middle
    else:
        return WHOLE
    return WHOLE if outcome.norm <= most else int(most / outcome.norm * WHOLE)


def _norm_there(seen: SeenNorms, outcome: SliceOutcome) -> float | None:
    """What a commit applied to the elements of a slice; None where it applied nothing to most of them.

    Slices are mostly cut as before. Where they are not, a stretch's squares are taken as even in it.
    """
    first, past = outcome.start, outcome.start + outcome.num_elements
    squares, covered = 0.0, 0
    for each in seen.slices:
        shared = min(past, each.start + each.num_elements) - max(first, each.start)
        if shared > 0:
            squares += each.norm**2 * shared / each.num_elements
            covered += shared
    if 2 * covered < outcome.num_elements:
        return None
    return math.sqrt(squares * outcome.num_elements / covered)
