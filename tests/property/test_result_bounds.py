"""A lying reducer: no result moves the model by much more than results did lately."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coordinator.swarm.slices import (
    KEPT_COMMITS,
    MOST_TIMES_OTHERS,
    MOST_TIMES_USUAL,
    bounded,
    norms_after,
    norms_of,
)
from protocol.wire.rounds import BLOCK, WHOLE, Commit, Digest, SliceOutcome

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


@given(norms=st.lists(st.floats(0.6, 2.0), min_size=1, max_size=20))
def test_results_of_an_honest_run_are_never_cut(norms: list[float]) -> None:
    seen = norms_of([])
    for number, norm in enumerate(norms, start=1):
        commit = bounded(seen, commit_of(number, norm, 3 * norm))
        assert [outcome.factor for outcome in commit.slices] == [WHOLE, WHOLE]
        seen = norms_after(seen, commit)


def test_a_warm_up_from_zero_is_hardly_held_back() -> None:
    seen = norms_of([])
    for number in range(1, 30):
        commit = bounded(seen, commit_of(number, float(2 * number - 1)))
        assert commit.slices[0].factor >= (0.79 * WHOLE if number == 3 else WHOLE)
        seen = norms_after(seen, commit)


def test_what_makes_all_results_longer_is_no_lie_and_one_that_grows_alone_is() -> None:
    seen = norms_of([])
    for number in range(1, 30):
        all_grow = float(10 ** min(number, 5))
        commit = bounded(seen, commit_of(number, all_grow, 2 * all_grow, 1e9, 3 * all_grow))
        factors = [outcome.factor for outcome in commit.slices]
        assert [factors[place] for place in (0, 1, 3)] == [WHOLE] * 3
        if 1 < number <= 5:
            assert applied(commit)[2] < 1e9
        seen = norms_after(seen, commit)


@given(
    before=st.lists(st.floats(0.1, 10), min_size=1, max_size=12),
    lies=st.lists(st.floats(1, 1e30), min_size=1, max_size=2),
)
def test_a_lie_is_worth_a_few_times_the_usual_at_most(
    before: list[float], lies: list[float]
) -> None:
    seen = norms_of(commit_of(n, norm, 1.0) for n, norm in enumerate(before, start=1))
    latest = before[-KEPT_COMMITS:]
    for number, lie in enumerate(lies, start=len(before) + 1):
        commit = bounded(seen, commit_of(number, lie, 1.0))
        kept = sorted(norm for norm in latest if norm > 0)  # what was cut to nothing is no measure
        usual = kept[(len(kept) - 1) // 2] if kept else MOST_TIMES_OTHERS / MOST_TIMES_USUAL
        assert applied(commit)[0] <= MOST_TIMES_USUAL * usual * (1 + 1e-9)
        assert commit.slices[1].factor == WHOLE, "the others pay for nothing"
        latest = [*latest, applied(commit)[0]][-KEPT_COMMITS:]
        seen = norms_after(seen, commit)


def test_in_a_first_round_a_result_is_compared_with_the_others() -> None:
    commit = bounded((), commit_of(1, 1e30, 1.0, 2.0))
    assert applied(commit)[0] <= MOST_TIMES_OTHERS * 2.0
    assert [outcome.factor for outcome in commit.slices[1:]] == [WHOLE, WHOLE]
    alone = bounded((), commit_of(1, 1e30))  # nodes see for themselves that it is no training
    assert alone.slices[0].factor == WHOLE


@given(norms=st.lists(st.tuples(st.floats(0, 9), st.integers(0, 2)), max_size=30))
def test_what_is_remembered_follows_from_the_latest_commits(norms: list[tuple[float, int]]) -> None:
    commits = [commit_of(n, norm, fragment=f) for n, (norm, f) in enumerate(norms, start=1)]
    seen = norms_of(commits)
    for fragment in range(3):
        same = [c.round for c in commits if c.fragment == fragment and c.slices[0].norm > 0]
        kept = [each.round for each in seen if each.fragment == fragment]
        assert kept == same[-KEPT_COMMITS:]


def test_a_round_that_is_decided_anew_takes_the_place_of_what_it_was() -> None:
    seen = norms_of([commit_of(1, 1.0), commit_of(2, 50.0), commit_of(2, 2.0)])
    assert [each.slices[0].norm for each in seen] == [1.0, 2.0]


def test_slices_that_are_cut_elsewhere_are_compared_by_the_elements_that_they_share() -> None:
    seen = norms_of([commit_of(1, 3.0, 4.0)])
    whole = commit_of(2, 5.0, cut=4)  # both of them: 3² + 4² = 5²
    assert bounded(seen, whole).slices[0].factor == WHOLE
    lie = bounded(seen, commit_of(2, 500.0, cut=4))
    np.testing.assert_allclose(applied(lie), [MOST_TIMES_USUAL * 5], rtol=1e-3)
