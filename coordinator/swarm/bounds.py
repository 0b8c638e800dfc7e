"""How far a slice's result moves the model: no further than the run's results did lately. Pure.

A reducer may lie. What its result decodes to has the norm that its signed header declares: whoever holds it
has checked that. So the coordinator can bound what a result does to the model without seeing a weight, and
since the factor stands in the signed commit, all nodes apply the same, and so does who replays it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median_high, median_low

from coordinator.swarm.state import Rules, SeenNorm, SeenNorms
from protocol.run.schedule import StepsTaken
from protocol.wire.messages import Trained
from protocol.wire.rounds import WHOLE, Commit, NodeId, Plan, SliceOutcome

KEPT_COMMITS = 5
"""Of each fragment so many results are remembered: a lie has to be told in most of them to be the usual."""

MOST_TIMES_USUAL = 4.0
"""A result longer than so many times the median of these is cut to it, of two the lower. Fewer nodes and late
work make honest ones longer, by less than that.

More inner steps at higher rates lead further, as in a warm-up: the bound grows as their stride does
(protocol.run.schedule). What makes all results of a round longer is no lie either: it grows as the median of
several reducers' has. One reducer alone says nothing of others, in however many slices."""

MOST_TIMES_OTHERS = 32.0
"""In a fragment's first round a result is compared with its round's others, by the root of their elements:
rarely used rows and matrices differ by ten."""


def stride_of(rules: Rules, plan: Plan, trained: Mapping[NodeId, Trained]) -> float:
    """How far the inner steps lead that a round's results are of: see Schedule.stride.

    By the part of the steps asked for that most of those have taken who have said it; of two the larger,
    for one may lie. Of several fragments each gathers the steps of as many rounds.
    """
    asked = {a.node_id: a.inner_steps for a in plan.assignments if a.trains}
    parts = [told.inner_steps / asked[n] for n, told in trained.items() if n in asked]
    taken = StepsTaken(
        round=plan.round,
        token_clock=plan.token_clock,
        round_tokens=plan.round_tokens,
        asked=tuple(asked.values()),
        part=min(1.0, median_high(parts)) if parts else 1.0,
    )
    num_rounds = min(plan.round, max(1, len(rules.layout.fragment_elements)))
    return rules.schedule.stride(taken, num_rounds=num_rounds)


def norms_after(seen: Sequence[SeenNorms], commit: Commit, stride: float) -> tuple[SeenNorms, ...]:
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
    now = SeenNorms(round=commit.round, fragment=commit.fragment, slices=slices, stride=stride)
    return (*kept, now)


def norms_of(commits: Iterable[tuple[Commit, float]]) -> tuple[SeenNorms, ...]:
    """The same after all of these, oldest first, with their strides."""
    seen: tuple[SeenNorms, ...] = ()
    for commit, stride in commits:
        seen = norms_after(seen, commit, stride)
    return seen


def bounded(
    seen: Sequence[SeenNorms], commit: Commit, stride: float, reducers: Sequence[NodeId]
) -> Commit:
    """The commit with a factor for each result: 1 where it is no longer than results are.

    `reducers` are those of its slices, and `stride` is of the inner steps that led to it.
    """
    before = [each for each in seen if each.fragment == commit.fragment]
    usual = [_usual(outcome, before, stride) for outcome in commit.slices]
    grown: dict[NodeId, list[float]] = {}
    sizes: dict[NodeId, list[float]] = {}
    for outcome, norm, reducer in zip(commit.slices, usual, reducers, strict=True):
        if outcome.digest is not None and outcome.norm > 0:
            sizes.setdefault(reducer, []).append(outcome.norm / math.sqrt(outcome.num_elements))
            if norm:
                grown.setdefault(reducer, []).append(outcome.norm / norm)
    growth = max(1.0, _of_most(grown)) if len(grown) > 1 else 1.0
    others = _of_most(sizes) if sum(map(len, sizes.values())) > 1 else None
    return replace(
        commit,
        slices=tuple(
            replace(outcome, factor=_factor(outcome, norm and norm * growth, others))
            for outcome, norm in zip(commit.slices, usual, strict=True)
        ),
    )


def _of_most(told: Mapping[NodeId, Sequence[float]]) -> float:
    """The median of reducers, of whom each counts once; of two the lower, for one may lie."""
    return median_low([median_low(each) for each in told.values()])


def _usual(outcome: SliceOutcome, before: Sequence[SeenNorms], stride: float) -> float | None:
    """The lower median of what was applied to a slice's elements lately; None: nothing was.

    Each as long as it would be by now, where steps lead further. Where they lead less far, late work is there
    from before, and no bound falls.
    """
    known = [
        norm * (max(1.0, stride / each.stride) if each.stride > 0 else 1.0)
        for each in before
        if (norm := _norm_there(each, outcome)) is not None and norm > 0
    ]
    return median_low(known) if known else None


def _factor(outcome: SliceOutcome, usual: float | None, others: float | None) -> int:
    if outcome.digest is None or outcome.norm == 0:
        return WHOLE
    if usual is not None:
        most = MOST_TIMES_USUAL * usual
    elif others is not None:
        most = MOST_TIMES_OTHERS * others * math.sqrt(outcome.num_elements)
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
