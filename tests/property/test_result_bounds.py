"""A lying reducer: no result moves the model by much more than results did lately."""

from collections.abc import Iterable, Sequence
from statistics import median_low
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.swarm.bounds import (
    KEPT_COMMITS,
    MOST_TIMES_OTHERS,
    MOST_TIMES_USUAL,
    bounded,
    norms_after,
    norms_of,
)
from coordinator.swarm.state import SeenNorms
from protocol.run.run_spec import InnerSection, RunSection, RunSpec
from protocol.run.schedule import Position, Schedule, StepsTaken, share_of_peak
from protocol.wire.rounds import BLOCK, WHOLE, Commit, Digest, NodeId, SliceOutcome
from tests.property.effort import examples

RUN = Digest(bytes(32))


def commit_of(number: int, *norms: float, fragment: int = 0, cut: int = 2) -> Commit:
    """A round whose slices have these norms; 0 is void."""
    return Commit(
        round=number,
        fragment=fragment,
        base_digest=RUN,
        slices=tuple(
            SliceOutcome(
                index=index,
                start=index * cut * BLOCK,
                num_elements=cut * BLOCK,
                digest=RUN if norm else None,
                norm=norm,
            )
            for index, norm in enumerate(norms)
        ),
    )


def applied(commit: Commit) -> list[float]:
    return [outcome.norm * outcome.factor / WHOLE for outcome in commit.slices]


def bound(
    seen: Sequence[SeenNorms], commit: Commit, *, stride: float = 1.0, reducers: str = "abcdefgh"
) -> Commit:
    """With a reducer for each slice, by one letter."""
    names = [NodeId(name) for name in reducers[: len(commit.slices)]]
    return bounded(seen, commit, stride, names)


def seen_of(commits: Iterable[Commit]) -> tuple[SeenNorms, ...]:
    """Of rounds whose steps lead equally far."""
    return norms_of((commit, 1.0) for commit in commits)


def is_whole(commit: Commit) -> bool:
    return all(outcome.factor == WHOLE for outcome in commit.slices)


@given(norms=st.lists(st.floats(0.6, 2.0), min_size=1, max_size=20))
def test_results_of_an_honest_run_are_never_cut(norms: list[float]) -> None:
    seen = seen_of([])
    for number, norm in enumerate(norms, start=1):
        commit = bound(seen, commit_of(number, norm, 3 * norm))
        assert is_whole(commit)
        seen = norms_after(seen, commit, 1.0)


SHARES = st.floats(0, 1, allow_subnormal=False)


@st.composite
def runs(draw: st.DrawFn) -> RunSpec:
    """Any schedule, over any number of rounds, in rounds or in tokens; a token is an inner step."""
    rounds, steps = draw(st.integers(1, 30)), draw(st.sampled_from([1, 3, 20, 100]))
    tokens = rounds * steps
    shape = draw(st.sampled_from(get_args(InnerSection.model_fields["schedule"].annotation)))
    warm_up = draw(st.none() | st.integers(0, tokens))
    total = draw(st.none() | st.integers(1, 2 * tokens))
    decay = draw(SHARES.filter(bool)) if shape == "wsd" else None
    if decay is not None and warm_up is not None and total is not None:
        warm_up = min(warm_up, total - round(decay * total))
    inner = InnerSection(
        steps=steps,
        schedule=shape,
        warmup_tokens=warm_up,
        total_tokens=total,
        decay_fraction=decay,
        final_fraction=draw(SHARES),
        scaling=draw(st.sampled_from(["none", "linear", "sqrt"])),
    )
    return RunSpec(run=RunSection(rounds=rounds, min_nodes=1), inner=inner)


def taken_in(spec: RunSpec, number: int, done: float, num_nodes: int) -> StepsTaken:
    steps = spec.inner.steps
    return StepsTaken(
        round=number,
        token_clock=(number - 1) * steps,
        round_tokens=steps,
        asked=[steps] * num_nodes,
        part=max(1, round(done * steps)) / steps,
    )


def led(schedule: Schedule, taken: StepsTaken) -> float:
    """How far a node gets that goes as far as its rate in each inner step, all in one direction."""
    asked, way = taken.asked[0], 0.0
    inner = next(t for t in reversed(schedule.terms) if t.from_round <= taken.round).inner
    for step in range(round(taken.part * asked)):
        at = Position.at(
            inner,
            (step + 0.5) / asked,
            span=schedule.span_of(taken.round),
            token_clock=taken.token_clock,
            round_tokens=taken.round_tokens,
        )
        way += inner.learning_rate * share_of_peak(inner, at)
    return way * schedule.scale_of(len(taken.asked))


@examples(200)
@given(
    spec=runs(),
    rounds=st.lists(
        st.tuples(st.floats(0.7, 2), st.just(1.0) | SHARES, st.sampled_from([1, 2, 16])),
        min_size=2,
        max_size=12,
    ),
    amended=st.none() | st.tuples(st.integers(2, 12), st.floats(0.1, 10)),
)
def test_a_lone_reducer_is_never_cut_for_what_the_schedule_asks(
    spec: RunSpec,
    rounds: list[tuple[float, float, int]],
    amended: tuple[int, float] | None,
) -> None:
    schedule = Schedule.of(spec)
    if amended is not None:
        peak = spec.inner.learning_rate * amended[1]
        schedule = schedule.amended(amended[0], {"inner.learning_rate": peak, "run.rounds": 40})
    seen = seen_of([])
    for number, (noise, done, num_nodes) in enumerate(rounds, start=1):
        taken = taken_in(spec, number, done, num_nodes)
        stride, norm = schedule.stride(taken), noise * led(schedule, taken)
        commit = bound(seen, commit_of(number, norm), stride=stride)
        assert is_whole(commit)
        seen = norms_after(seen, commit, stride)


@examples(200)
@given(
    before=st.lists(st.tuples(st.floats(0.1, 10), st.floats(1e-3, 1)), min_size=1, max_size=8),
    stride=st.floats(1e-3, 1),
    lies=st.lists(st.floats(1e-2, 1e30), min_size=1, max_size=4),
)
def test_a_lone_liar_gets_a_few_times_the_usual_as_far_as_steps_lead_further(
    before: list[tuple[float, float]], stride: float, lies: list[float]
) -> None:
    seen = norms_of((commit_of(n, norm), s) for n, (norm, s) in enumerate(before, start=1))
    by_now = [norm * max(1.0, stride / s) for norm, s in before[-KEPT_COMMITS:]]
    commit = bound(seen, commit_of(99, *lies), stride=stride, reducers="a" * len(lies))
    assert applied(commit)[0] <= MOST_TIMES_USUAL * median_low(by_now) * (1 + 1e-9)


def test_a_round_that_begins_with_the_warm_up_and_is_cut_short_does_not_hold_back_those_after() -> (
    None
):
    spec = RunSpec(
        run=RunSection(rounds=40, min_nodes=1), inner=InnerSection(steps=4000, schedule="wsd")
    )
    schedule, seen = Schedule.of(spec), seen_of([])
    for number in range(1, 12):
        taken = taken_in(spec, number, 0.1 if number == 1 else 1.0, 2)
        commit = bound(seen, commit_of(number, led(schedule, taken)), stride=schedule.stride(taken))
        assert is_whole(commit)
        seen = norms_after(seen, commit, schedule.stride(taken))


def test_a_fragment_gathers_what_is_trained_until_its_turn() -> None:
    spec = RunSpec(
        run=RunSection(rounds=100, min_nodes=1), inner=InnerSection(steps=5, warmup_tokens=0)
    )
    schedule, flat = Schedule.of(spec), Schedule()
    first, later = taken_in(spec, 1, 1.0, 1), taken_in(spec, 40, 1.0, 1)
    assert schedule.stride(first, num_rounds=1) == pytest.approx(5, rel=1e-2)
    assert flat.stride(later, num_rounds=8) == 40
    alone = sum(schedule.stride(taken_in(spec, n, 1.0, 1)) for n in range(33, 41))
    assert schedule.stride(later, num_rounds=8) == pytest.approx(alone, rel=1e-2)


def test_what_makes_all_results_longer_is_no_lie_and_one_that_grows_alone_is() -> None:
    seen = seen_of([])
    for number in range(1, 30):
        all_grow = float(10 ** min(number, 5))
        commit = bound(seen, commit_of(number, all_grow, 2 * all_grow, 1e9, 3 * all_grow))
        factors = [outcome.factor for outcome in commit.slices]
        assert [factors[place] for place in (0, 1, 3)] == [WHOLE] * 3
        if 1 < number <= 5:
            assert applied(commit)[2] < 1e9
        seen = norms_after(seen, commit, 1.0)


@pytest.mark.parametrize("reducers", ["aaaaa", "aaaab", "aaabc"])
def test_several_slices_of_one_reducer_do_not_speak_for_each_other(reducers: str) -> None:
    seen = seen_of([commit_of(1, *[1.0] * 5)])
    lies = [1e3 if name == "a" else 1.0 for name in reducers]
    cut = applied(bound(seen, commit_of(2, *lies), reducers=reducers))
    bounds = [MOST_TIMES_USUAL if name == "a" else 1.0 for name in reducers]
    assert cut == pytest.approx(bounds, rel=1e-3)


def test_in_a_first_round_a_reducer_of_most_slices_is_compared_with_the_others() -> None:
    commit = bound((), commit_of(1, 1e30, 1e30, 1e30, 1.0, 2.0), reducers="aaabc")
    assert applied(commit)[0] <= MOST_TIMES_OTHERS * 2.0
    assert [outcome.factor for outcome in commit.slices[3:]] == [WHOLE, WHOLE]


@given(
    before=st.lists(st.floats(0.1, 10), min_size=1, max_size=12),
    lies=st.lists(st.floats(1, 1e30), min_size=1, max_size=2),
)
def test_a_lie_is_worth_a_few_times_the_usual_at_most(
    before: list[float], lies: list[float]
) -> None:
    seen = seen_of(commit_of(n, norm, 1.0) for n, norm in enumerate(before, start=1))
    latest = before[-KEPT_COMMITS:]
    for number, lie in enumerate(lies, start=len(before) + 1):
        commit = bound(seen, commit_of(number, lie, 1.0))
        kept = sorted(norm for norm in latest if norm > 0)  # what was cut to nothing is no measure
        usual = kept[(len(kept) - 1) // 2] if kept else MOST_TIMES_OTHERS / MOST_TIMES_USUAL
        assert applied(commit)[0] <= MOST_TIMES_USUAL * usual * (1 + 1e-9)
        assert commit.slices[1].factor == WHOLE, "the others pay for nothing"
        latest = [*latest, applied(commit)[0]][-KEPT_COMMITS:]
        seen = norms_after(seen, commit, 1.0)


def test_in_a_first_round_a_result_is_compared_with_the_others() -> None:
    commit = bound((), commit_of(1, 1e30, 1.0, 2.0))
    assert applied(commit)[0] <= MOST_TIMES_OTHERS * 2.0
    assert [outcome.factor for outcome in commit.slices[1:]] == [WHOLE, WHOLE]
    alone = bound((), commit_of(1, 1e30))  # nodes see for themselves that it is no training
    assert alone.slices[0].factor == WHOLE


@given(norms=st.lists(st.tuples(st.floats(0, 9), st.integers(0, 2)), max_size=30))
def test_what_is_remembered_follows_from_the_latest_commits(norms: list[tuple[float, int]]) -> None:
    commits = [commit_of(n, norm, fragment=f) for n, (norm, f) in enumerate(norms, start=1)]
    seen = seen_of(commits)
    for fragment in range(3):
        same = [c.round for c in commits if c.fragment == fragment and c.slices[0].norm > 0]
        kept = [each.round for each in seen if each.fragment == fragment]
        assert kept == same[-KEPT_COMMITS:]


def test_a_round_that_is_decided_anew_takes_the_place_of_what_it_was() -> None:
    seen = seen_of([commit_of(1, 1.0), commit_of(2, 50.0), commit_of(2, 2.0)])
    assert [each.slices[0].norm for each in seen] == [1.0, 2.0]


def test_slices_that_are_cut_elsewhere_are_compared_by_the_elements_that_they_share() -> None:
    seen = seen_of([commit_of(1, 3.0, 4.0)])
    whole = commit_of(2, 5.0, cut=4)  # both of them: 3² + 4² = 5²
    assert bound(seen, whole).slices[0].factor == WHOLE
    lie = bound(seen, commit_of(2, 500.0, cut=4))
    np.testing.assert_allclose(applied(lie), [MOST_TIMES_USUAL * 5], rtol=1e-3)
