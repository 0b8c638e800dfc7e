"""Liars among contributors: what they do to a slice's result is bounded, whatever the run's merge."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.exchange.codecs.registry import codec_named
from node.exchange.mean import norm_of, shares, weighted_sum
from node.exchange.reduction import Merging, Reduction, Sender, SliceResult
from node.exchange.screening import (
    CLIPPED_ABOVE,
    LARGEST_RMS,
    LEFT_OUT_ABOVE,
    MOST_BY_LATENESS,
    MOST_BY_WORK,
    allowances,
    screened,
)
from node.outer_state import Vector
from protocol.run.run_spec import Merge
from protocol.wire.rounds import BLOCK, WHOLE, NodeId, Slice
from tests.unit.exchange_scene import RUN, TOKENS, contribution_of, plan_for

FP32 = codec_named("fp32")
MERGES: tuple[Merge, ...] = ("mean", "agreeing", "norm-preserving")
LIES = ("flipped", "scaled", "huge", "infinite", "not a number", "noise")
seeds = st.integers(0, 2**32 - 1)


def honest(num: int, seed: int) -> list[Vector]:
    """Pseudo-gradients that agree in part, as those of one round do, and differ by half in length."""
    rng = np.random.default_rng(seed)
    shared = rng.standard_normal(BLOCK)
    lengths = rng.uniform(0.7, 1.3, num)
    apart = rng.standard_normal((num, BLOCK))
    return [(k * (shared + own)).astype(np.float32) for k, own in zip(lengths, apart, strict=True)]


def lie_of(lie: str, truth: Vector, rng: np.random.Generator) -> Vector:
    match lie:
        case "flipped":
            return -10 * truth
        case "scaled":
            return 100 * truth
        case "huge":
            return np.full(BLOCK, 1e30, dtype=np.float32)
        case "infinite":
            return np.full(BLOCK, np.inf, dtype=np.float32)
        case "not a number":
            return np.full(BLOCK, np.nan, dtype=np.float32)
    return (norm_of(truth) / 4 * rng.standard_normal(BLOCK)).astype(np.float32)


def reduced(
    values: Sequence[Vector],
    merge: Merge = "mean",
    *,
    own: int = 0,
    votes: Sequence[int] = (),
    **by: object,
) -> SliceResult:
    """What the node at place `own` makes of them; it need not be among the contributors."""
    ids = [NodeId(f"node-{place}") for place in range(len(values))]
    told = dict(zip(ids, votes, strict=bool(votes)))
    plan = plan_for(*ids, votes=tuple(told[node_id] for node_id in sorted(told)))
    reduction = Reduction(
        plan=plan,
        slice=Slice(index=0, start=0, num_elements=BLOCK, reducer_id=ids[0]),
        contributions={
            node_id: contribution_of(each.astype("<f4").tobytes(), sender_id=node_id)
            for node_id, each in zip(ids, values, strict=True)
        },
        uplink=FP32,
        context=1,
    )
    result = reduction.result(
        downlink=FP32,
        sender=Sender(run_digest=RUN, node_id=ids[own]),
        by=Merging(merge=merge, **by),  # type: ignore[arg-type]
    )
    assert result is not None
    return result


def decoded(result: SliceResult) -> Vector:
    return FP32.decode(result.payload.body, BLOCK)


@pytest.mark.parametrize("merge", MERGES)
@settings(deadline=None, max_examples=40)
@given(seed=seeds, lies=st.lists(st.sampled_from(LIES), min_size=1, max_size=2))
def test_two_liars_of_eight_move_a_slice_no_further_than_honest_ones_would(
    merge: Merge, seed: int, lies: list[str]
) -> None:
    rng = np.random.default_rng(seed)
    truth = honest(8, seed)
    places = rng.choice(8, size=len(lies), replace=False)
    told = list(truth)
    for place, lie in zip(places, lies, strict=True):
        told[place] = lie_of(lie, truth[place], rng)
    own = next(place for place in range(8) if place not in places)
    shared = np.mean([truth[p] for p in range(8) if p not in places], axis=0)
    found = decoded(reduced(told, merge, own=own))
    longest = max(norm_of(truth[p]) for p in range(8) if p not in places)
    assert norm_of(found) <= CLIPPED_ABOVE * longest * (1 + 1e-6)
    assert float(found @ shared) > 0, "the step still leads where the honest ones want to go"


@pytest.mark.parametrize("lie", LIES)
def test_what_is_no_training_is_left_out_and_named(lie: str) -> None:
    told = honest(8, 1)
    told[3] = lie_of(lie, told[3], np.random.default_rng(0))
    result = reduced(told)
    factors = result.made_of.factors
    assert factors[3] < WHOLE and all(f == WHOLE for place, f in enumerate(factors) if place != 3)
    assert len(result.made_of.contributors) == len(result.made_of.contributions) == 8
    if lie != "noise":
        assert factors[3] == 0
        rest = [each for place, each in enumerate(told) if place != 3]
        assert decoded(result).tobytes() == decoded(reduced(rest)).tobytes(), "as if it were away"


@pytest.mark.parametrize("merge", ["mean", "agreeing"])
@settings(deadline=None, max_examples=60)
@given(num=st.integers(1, 9), seed=seeds)
def test_screening_costs_honest_contributions_no_bit(merge: Merge, num: int, seed: int) -> None:
    values = honest(num, seed)
    result = reduced(values, merge)
    plain = weighted_sum(values, shares([TOKENS] * num))
    assert result.made_of.factors == ()
    assert decoded(result).tobytes() == plain.tobytes()


@settings(deadline=None, max_examples=60)
@given(
    num=st.integers(4, 9),
    seed=seeds,
    times=st.floats(1, 1e6),
    tokens=st.lists(st.integers(1, 1000), min_size=9, max_size=9),
    missed=st.lists(st.integers(0, 5), min_size=9, max_size=9),
)
def test_no_factor_lets_through_more_than_the_median_allows(
    num: int, seed: int, times: float, tokens: list[int], missed: list[int]
) -> None:
    norms = [float(n) for n in np.random.default_rng(seed).uniform(0.5, 2, num)]
    norms[0] *= times
    allowed = allowances(tokens[:num], missed[:num])
    usual = sorted(n / a for n, a in zip(norms, allowed, strict=True))[(num - 1) // 2]
    for norm, may, verdict in zip(norms, allowed, screened(norms, allowed, own=1), strict=True):
        assert norm * verdict.factor / WHOLE <= CLIPPED_ABOVE * usual * may
        assert (verdict.factor == 0) == (norm / may > LEFT_OUT_ABOVE * usual)
        assert bool(verdict.why) == (verdict.factor < WHOLE)


@settings(deadline=None, max_examples=60)
@given(
    seed=seeds,
    num=st.integers(5, 20),
    share_lying=st.floats(0, 0.4),
    part=st.floats(0.5, 1),
    length=st.floats(0.8, 1.9),
)
def test_who_pulls_against_what_the_others_share_counts_for_nothing_and_nobody_else(
    seed: int, num: int, share_lying: float, part: float, length: float
) -> None:
    """Liars hide it in noise, and are as long as no norm gives away; all of them pull the same way."""
    rng = np.random.default_rng([seed, 1])
    told = honest(num, seed)
    num_liars = max(1, int(share_lying * num))
    shared = np.mean(told[num_liars:], axis=0)
    usual = norm_of(np.median([norm_of(each) for each in told], keepdims=True).astype(np.float32))
    hidden = part**0.5 * shared / np.linalg.norm(shared)
    for place in range(num_liars):
        noise = rng.standard_normal(BLOCK)
        noise *= (1 - part) ** 0.5 / np.linalg.norm(noise)
        told[place] = (length * usual * (noise - hidden)).astype(np.float32)
    result = reduced(told, "agreeing", own=num_liars)
    by_node = dict(
        zip([c.node_id for c in result.made_of.contributors], result.made_of.factors, strict=True)
    )
    liars = {f"node-{place}" for place in range(num_liars)}
    assert {node_id for node_id, factor in by_node.items() if factor == 0} == liars
    rest = [each for place, each in enumerate(told) if place >= num_liars]
    assert norm_of(decoded(result) - np.mean(rest, axis=0)) < 1e-5 * norm_of(decoded(result)) or (
        any(0 < factor < WHOLE for factor in by_node.values())
    )


@settings(deadline=None, max_examples=30)
@given(seed=seeds, num_keys=st.integers(4, 25), times=st.sampled_from([-1.0, -0.1, 0.1]))
def test_many_keys_with_little_work_have_no_honest_contribution_left_out(
    seed: int, num_keys: int, times: float
) -> None:
    """Three honest contributions have two thirds of the votes. Keys pull backwards, or are short."""
    told = honest(3, seed)
    lie = np.mean(told, axis=0) * np.float32(times)
    votes = [WHOLE * 2 // 9] * 3
    votes += [(WHOLE - sum(votes)) // num_keys] * num_keys
    result = reduced([*told, *[lie] * num_keys], "agreeing", votes=votes)
    factors = result.made_of.factors or (WHOLE,) * len(votes)
    by_node = dict(zip([c.node_id for c in result.made_of.contributors], factors, strict=True))
    assert [by_node[NodeId(f"node-{place}")] for place in range(3)] == [WHOLE] * 3
    if times < 0:
        assert sum(by_node.values()) == 3 * WHOLE


def test_where_all_contradict_each_other_all_count_for_nobody_says_who_is_right() -> None:
    one, other = honest(2, 3)
    assert reduced([one, -one], "agreeing").made_of.factors == ()
    across = other - one * np.float32((other @ one) / (one @ one))
    across *= np.float32(norm_of(one) / norm_of(across))
    turns = np.radians([0, 120, 240])
    apart = [(np.cos(t) * one + np.sin(t) * across).astype(np.float32) for t in turns]
    assert reduced(apart, "agreeing", own=1).made_of.factors == ()


def test_of_two_the_reducer_measures_by_its_own() -> None:
    told = honest(2, 3)
    told[1] = 100 * told[1]
    assert reduced(told, own=0).made_of.factors == (WHOLE, 0)
    helper = screened([1.0, 100.0], [1.0, 1.0], own=None)
    assert [verdict.factor for verdict in helper] == [WHOLE, WHOLE], "it has nothing to measure by"


@given(own=st.sampled_from([0.0, 5e-15, 1e-9]), norm=st.floats(1e-3, 50.0))
def test_who_trained_nothing_but_for_rounding_measures_nobody(own: float, norm: float) -> None:
    largest = LARGEST_RMS * 100.0  # of ten thousand elements
    kept, _ = screened([norm, own], [1.0, 1.0], own=1, largest=largest)
    assert kept.factor == WHOLE
    *several, _ = screened([norm, norm, norm, own, own], [1.0] * 5, own=3, largest=largest)
    assert {each.factor for each in several[:3]} == {WHOLE}
    beyond, _ = screened([2 * largest, own], [1.0, 1.0], own=1, largest=largest)
    assert beyond.factor == 0, "the bound by the state stays"


def test_what_no_training_comes_to_is_left_out_whoever_is_alone_with_it() -> None:
    """Nobody to compare with, and still no node ends with a state that is not finite."""
    told = honest(2, 3)
    told[1] = np.full(BLOCK, 1e30, dtype=np.float32)
    parameters = np.full(BLOCK, 0.02, dtype=np.float32)
    result = reduced(told, own=1, norm_of_parameters=partial(norm_of, parameters))
    assert result.made_of.factors == (WHOLE, 0)
    large = np.full(BLOCK, 10.0, dtype=np.float32)
    told[1] = np.full(BLOCK, 5 * LARGEST_RMS, dtype=np.float32)
    assert reduced(
        told, own=1, norm_of_parameters=partial(norm_of, parameters)
    ).made_of.factors == (
        WHOLE,
        0,
    )
    assert reduced(told, own=1, norm_of_parameters=partial(norm_of, large)).made_of.factors == (), (
        "it follows the parameters"
    )


def test_nobody_weighs_more_than_twice_the_mean_whatever_it_claims() -> None:
    values = [np.full(BLOCK, v, dtype=np.float32) for v in (1, 1, 1, 2)]
    ids = [NodeId(f"node-{place}") for place in range(4)]
    reduction = Reduction(
        plan=plan_for(*ids),
        slice=Slice(index=0, start=0, num_elements=BLOCK, reducer_id=ids[0]),
        contributions={
            node_id: contribution_of(each.tobytes(), sender_id=node_id, tokens=tokens)
            for node_id, each, tokens in zip(ids, values, (10, 10, 10, 10**6), strict=True)
        },
        uplink=FP32,
        context=1,
    )
    sender = Sender(run_digest=RUN, node_id=ids[0])
    for is_screened, expected in ((True, 1.5), (False, (30 + 2e6) / (30 + 1e6))):
        by = Merging(is_screened=is_screened)
        result = reduction.result(downlink=FP32, sender=sender, by=by)
        assert result is not None
        assert decoded(result)[0] == pytest.approx(expected, rel=1e-6)


def test_who_trained_more_or_owes_missed_rounds_may_be_longer_by_as_much_within_bounds() -> None:
    assert allowances([10, 10, 30, 5], [0, 0, 0, 0]) == [1, 1, 3, 1]
    assert allowances([10, 10, 10**9], [0, 0, 0])[2] == MOST_BY_WORK
    assert allowances([10, 10, 10], [0, 1, 9]) == [1, 2, MOST_BY_LATENESS]
