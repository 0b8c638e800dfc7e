import math
from dataclasses import replace

import numpy as np
import pytest

from node.disk.snapshots import Owed
from node.exchange.codecs.codec import CodecError
from node.exchange.outer import Outer, UnequalBaseError
from node.exchange.outer_optimizer import OuterRules, RateScale
from node.exchange.owing import Pending
from node.exchange.reduction import Merging, Reduction
from node.outer_state import Vector
from protocol.wire.payload import Payload
from protocol.wire.rounds import BLOCK, Commit, ContributionDigest, Contributor, SliceOutcome
from tests.tiny_runs import tiny
from tests.unit.exchange_scene import (
    LAYOUT,
    NUM_ELEMENTS,
    TOKENS,
    A,
    B,
    C,
    outer_of,
    plan_for,
    result_of,
)

ONES = np.ones(BLOCK, dtype=np.float32)


def pending_of(outer: Outer, work: Vector) -> Pending:
    """What the node sent in the next round, encoded as it would be."""
    outer.owing._published[:] = outer._parameters - work
    pending = outer.owing.accumulate(round=outer.round + 1, fragment=0)
    for part in plan_for(A, B, C).slices:
        outer.owing.contribution_to(part, samples=TOKENS, tokens=TOKENS)
    return pending


def contribution_in(outer: Outer, index: int) -> ContributionDigest:
    """What a reducer says to have of the node that sent something in this round."""
    pending = outer.owing.pending
    return ContributionDigest(bytes(16)) if pending is None else pending.sent[index].contribution


def commit_on(outer: Outer, results: dict[int, Payload], *, taken_from: str = A) -> Commit:
    """A commit of these slices, which names one contributor; the others are void."""
    return Commit(
        round=outer.round + 1,
        fragment=0,
        base_digest=outer.digest,
        slices=tuple(
            SliceOutcome(
                index=index,
                start=index * BLOCK,
                num_elements=BLOCK,
                digest=results[index].digest if index in results else None,
                contributors=(
                    Contributor(node_id=A if taken_from == A else B, samples=1, tokens=1),
                )
                if index in results
                else (),
                contributions=(contribution_in(outer, index),) if index in results else (),
            )
            for index in range(3)
        ),
    )


OTHERS = np.sin(np.arange(BLOCK, dtype=np.float32))


def whole_state(outer: Outer) -> tuple[bytes, ...]:
    snapshot = outer.snapshot()
    vectors = (snapshot.parameters, snapshot.momentum, outer.owed().residual)
    return (*(vector.tobytes() for vector in vectors), bytes([outer.round]), outer.digest)


def normal(seed: int) -> Vector:
    return np.random.default_rng(seed).standard_normal(NUM_ELEMENTS, dtype=np.float32)


@pytest.mark.parametrize("what", ["round", "digest"])
def test_a_commit_on_another_base_changes_nothing(what: str) -> None:
    outer = outer_of(A)
    results = {0: result_of(ONES, sender_id=B)}
    commit = commit_on(outer, results)
    digest = commit.slices[0].digest
    assert digest is not None
    wrong = replace(commit, round=2) if what == "round" else replace(commit, base_digest=digest)
    pending_of(outer, normal(0))
    before = whole_state(outer)
    with pytest.raises(UnequalBaseError, match="applies to state"):
        outer.apply(wrong, results)
    assert whole_state(outer) == before


def test_a_result_that_does_not_decode_leaves_no_half_applied_commit() -> None:
    outer = outer_of(A)
    results = {
        0: result_of(ONES, sender_id=B),
        1: result_of(np.full(BLOCK, np.inf, dtype=np.float32), sender_id=B, index=1),
    }
    pending_of(outer, normal(0))
    before = whole_state(outer)
    with pytest.raises(CodecError, match="inf"):
        outer.apply(commit_on(outer, results), results)
    assert whole_state(outer) == before


def test_a_taken_slice_leaves_its_encoding_error_and_a_void_one_all_of_it() -> None:
    outer = outer_of(A, "int4")
    body = outer.downlink.encode(ONES)
    header = result_of(ONES, sender_id=B).header
    results = {0: Payload(header=header, body=body)}
    work = normal(0)
    pending = pending_of(outer, work)
    outer.apply(commit_on(outer, results), results)
    error = work[:BLOCK] - outer.uplink.decode(pending.encoded[0].body, BLOCK)
    assert error.any()
    np.testing.assert_array_equal(outer.owed().residual[:BLOCK], error)
    np.testing.assert_array_equal(outer.owed().residual[BLOCK:], work[BLOCK:])


def test_a_node_left_out_of_a_committed_slice_still_owes_it() -> None:
    outer, work = outer_of(A), normal(0)
    results = {0: result_of(ONES, sender_id=B)}
    pending_of(outer, work)
    outer.apply(commit_on(outer, results, taken_from=B), results)
    np.testing.assert_array_equal(outer.owed().residual, work)


def test_what_was_sent_before_a_restart_and_taken_is_not_owed_again() -> None:
    """The residual on disk is of the round before: the contribution that was taken held it."""
    outer = outer_of(A)
    outer.restore(outer.snapshot(), Owed(residual=normal(0)))
    results = {0: result_of(ONES, sender_id=B)}
    outer.apply(commit_on(outer, results), results)
    assert not outer.owed().residual[:BLOCK].any()
    np.testing.assert_array_equal(outer.owed().residual[BLOCK:], normal(0)[BLOCK:])


def test_a_void_round_moves_the_round_and_not_the_digest() -> None:
    outer, work = outer_of(A), normal(0)
    digest = outer.digest
    pending_of(outer, work)
    outer.apply(commit_on(outer, {}), {})
    assert (outer.round, outer.digest) == (1, digest)
    assert not outer.owed().residual.any(), "its samples are leased again"


def reduced_by(outer: Outer, pending: Pending, *, index: int) -> Payload:
    """The result of a slice that this node reduces, from its own contribution and another."""
    plan = plan_for(A, B, C, round=outer.round + 1)
    bodies = {A: pending.encoded[index].body, B: outer.uplink.encode(OTHERS)}
    contributions = {}
    for sender, body in bodies.items():
        header = result_of(ONES, sender_id=sender, index=index).header
        count = 1 if sender == A else 3
        header = replace(header, samples=count, tokens=count)
        contributions[sender] = Payload(header=header, body=body)
    reduction = Reduction(
        plan=plan,
        slice=plan.slices[index],
        contributions=contributions,
        uplink=outer.uplink,
        context=1,
    )
    result = outer.result_of(reduction, 0)
    assert result is not None
    outer.owing.note_result(result)
    return result.payload


def test_a_reducer_merges_by_the_rules_of_the_round_that_is_open() -> None:
    outer = outer_of(A)
    plain = reduced_by(
        outer, pending_of(outer, np.cos(np.arange(NUM_ELEMENTS, dtype=np.float32))), index=0
    )
    asked: list[int] = []

    own = outer.rules_in(1)

    def rules_in(round: int) -> OuterRules:
        asked.append(round)
        return replace(own, merging=Merging(merge="norm-preserving"))

    outer.go_by(rules_in)
    amended = reduced_by(
        outer, pending_of(outer, np.cos(np.arange(NUM_ELEMENTS, dtype=np.float32))), index=0
    )
    assert {*asked} == {outer.round + 1}
    assert amended.body != plain.body


def mean_with(outer: Outer, pending: Pending) -> Vector:
    """What `reduced_by` encodes of the first slice, but for what is carried."""
    contributions = (pending.encoded[0].body, outer.uplink.encode(OTHERS))
    own, others = (outer.uplink.decode(body, BLOCK) for body in contributions)
    return np.float32(0.25) * own + np.float32(0.75) * others


def committed(outer: Outer, results: dict[int, Payload]) -> Commit:
    """Both nodes of `reduced_by` are in it."""
    both = (
        Contributor(node_id=A, samples=1, tokens=1),
        Contributor(node_id=B, samples=3, tokens=3),
    )
    commit = commit_on(outer, results)
    return replace(
        commit,
        slices=tuple(
            replace(outcome, contributors=both if outcome.digest is not None else ())
            for outcome in commit.slices
        ),
    )


def test_what_this_nodes_results_round_away_is_in_its_next_ones() -> None:
    outer = outer_of(A, "int4", reducer_error="keep")
    sent = np.zeros(NUM_ELEMENTS)
    for seed in range(4):
        pending = pending_of(outer, normal(seed))
        sent[:BLOCK] += mean_with(outer, pending)
        results = {0: reduced_by(outer, pending, index=0)}
        outer.apply(committed(outer, results), results)
    kept = outer.owed().reducer_error
    assert kept is not None and kept.keys() == {0} and kept[0].any()
    applied = -outer.snapshot().parameters[:BLOCK]
    # The error is kept in bf16, for auditors are given it.
    np.testing.assert_allclose(applied + kept[0], sent[:BLOCK], atol=2e-3)


def test_a_void_slice_leaves_the_reducers_error_as_it_was() -> None:
    outer = outer_of(A, "int4", reducer_error="keep")
    pending = pending_of(outer, normal(0))
    results = {0: reduced_by(outer, pending, index=0)}
    outer.apply(committed(outer, results), results)
    before = outer.owed().reducer_error
    assert before is not None and before[0].any()
    pending = pending_of(outer, normal(1))
    reduced_by(outer, pending, index=0)
    outer.apply(committed(outer, {}), {})
    assert outer.owed().reducer_error == before  # the very same vectors


def test_an_own_error_counts_in_full_in_the_next_mean() -> None:
    """A quarter of the mean is this node's, so it owes four times what its result left out."""
    outer, dropped = (outer_of(A, "int4", reducer_error=rule) for rule in ("own", "drop"))
    for each in (outer, dropped):
        pending = pending_of(each, normal(0))
        results = {0: reduced_by(each, pending, index=0)}
        each.apply(committed(each, results), results)
    error = mean_with(outer, pending) - outer.downlink.decode(results[0].body, BLOCK)
    assert error.any()
    expected = dropped.owed().residual[:BLOCK] + 4 * error
    np.testing.assert_array_equal(outer.owed().residual[:BLOCK], expected)
    np.testing.assert_array_equal(outer.owed().residual[BLOCK:], normal(0)[BLOCK:])
    assert outer.owed().reducer_error is None


def test_a_restarted_reducer_adds_nothing_that_was_in_its_committed_result() -> None:
    outer = outer_of(A, "int4", reducer_error="keep")
    pending = pending_of(outer, normal(0))
    results = {0: reduced_by(outer, pending, index=0), 1: reduced_by(outer, pending, index=1)}
    outer.apply(committed(outer, results), results)
    saved = outer.snapshot(), outer.owed()
    pending = pending_of(outer, normal(1))
    results = {0: reduced_by(outer, pending, index=0)}
    restarted = outer_of(A, "int4", reducer_error="keep")
    restarted.restore(*saved)
    restarted.apply(committed(restarted, results), results)
    kept, before = restarted.owed().reducer_error, saved[1].reducer_error
    assert kept is not None and before is not None and kept.keys() == {BLOCK}
    np.testing.assert_array_equal(kept[BLOCK], before[BLOCK])


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_leap_past_its_own_result_counts_nothing_twice(is_restarted: bool) -> None:
    outer = outer_of(A, "int4", reducer_error="keep")
    pending = pending_of(outer, normal(0))
    results = {0: reduced_by(outer, pending, index=0), 1: reduced_by(outer, pending, index=1)}
    outer.apply(committed(outer, results), results)
    saved = outer.snapshot(), outer.owed()
    other = outer_of(B, "int4")
    other.restore(*saved)
    pending = pending_of(outer, normal(1))
    results = {0: reduced_by(outer, pending, index=0)}
    if not is_restarted:  # what another node has reduced is no concern of its own error
        results[1] = result_of(ONES, sender_id=B, index=1)
        body = other.downlink.encode(ONES)
        results[1] = Payload(header=results[1].header, body=body)
    commit = committed(outer, results)
    other.apply(commit, results)
    if is_restarted:
        outer = outer_of(A, "int4", reducer_error="keep")
        outer.restore(*saved)
    outer.leap(other.snapshot(), [commit])
    kept, before = outer.owed().reducer_error, saved[1].reducer_error
    assert kept is not None and before is not None
    assert (0 in kept) != is_restarted  # the new error, or none: never the old one again
    assert is_restarted or not np.array_equal(kept[0], before[0])
    np.testing.assert_array_equal(kept[BLOCK], before[BLOCK])


def test_the_rate_follows_the_contributors_of_each_slice() -> None:
    outer = outer_of(A)
    outer._rate_scale = RateScale(scaling="sqrt", full_round_samples=1)
    results = {index: result_of(ONES, sender_id=B, index=index) for index in (0, 1)}
    commit = commit_on(outer, results)
    more = (*commit.slices[1].contributors, Contributor(node_id=B, samples=3, tokens=3))
    commit = replace(
        commit,
        slices=(commit.slices[0], replace(commit.slices[1], contributors=more), commit.slices[2]),
    )
    outer.apply(commit, results)
    moved = outer.snapshot().parameters.reshape(3, BLOCK)
    np.testing.assert_array_equal(moved[:, 0], [-1, -2, 0])


def test_a_run_file_makes_its_replica() -> None:
    spec = tiny(
        outer={"optimizer": "sgd", "learning_rate": 0.5, "scaling": "sqrt"},
        exchange={"uplink": "int8", "downlink": "int4", "residual_decay": 0.5},
    )
    parameters = np.zeros(NUM_ELEMENTS, dtype=np.float32)
    outer = Outer.of_run(
        spec, layout=LAYOUT, parameters=parameters, published=parameters.copy(), node_id=A
    )
    assert (outer.uplink.name, outer.downlink.name) == ("int8/1", "int4/1")
    assert outer.owed().reducer_error is not None
    body = outer.downlink.encode(ONES)
    results = {0: Payload(header=result_of(ONES, sender_id=B).header, body=body)}
    full_round = spec.run.min_nodes * spec.inner.steps * spec.inner.batch
    pending = pending_of(outer, normal(0))
    owed = outer.owing.accumulated(0, NUM_ELEMENTS)
    commit = commit_on(outer, results)
    contributors = (Contributor(node_id=A, samples=4 * full_round, tokens=1),)
    first = replace(commit.slices[0], contributors=contributors)
    outer.apply(replace(commit, slices=(first, *commit.slices[1:])), results)
    np.testing.assert_array_equal(parameters[:BLOCK], -1)  # twice a half
    left = owed[:BLOCK] - outer.uplink.decode(pending.encoded[0].body, BLOCK)
    np.testing.assert_array_equal(outer.owed().residual[:BLOCK], left * np.float32(0.5))


def test_what_is_published_after_a_commit_is_owed_whatever_was_pending_before() -> None:
    outer, work = outer_of(A), normal(0)
    outer.owing.residual.most_owed = math.inf  # else nothing is owed of a void round
    pending_of(outer, work)
    outer.apply(commit_on(outer, {}), {})
    before = outer.owing.published_of(0)
    outer.owing._published[:] = outer._parameters - 2 * work
    outer.owing.add_published(0, before)
    np.testing.assert_array_equal(outer.owed().residual, work + 2 * work)


def test_what_is_published_in_mid_round_is_owed_on_top_of_what_was_sent() -> None:
    outer, work = outer_of(A), normal(0)
    pending_of(outer, work)
    before = outer.owing.published_of(0)
    outer.owing._published[:] = outer._parameters - 2 * work
    outer.owing.add_published(0, before)
    results = {0: result_of(ONES, sender_id=B)}
    outer.apply(commit_on(outer, results), results)
    np.testing.assert_array_equal(outer.owed().residual[:BLOCK], work[:BLOCK])
    np.testing.assert_array_equal(outer.owed().residual[BLOCK:], 2 * work[BLOCK:])


@pytest.mark.parametrize("how", ["its round breaks off", "the state is replaced"])
def test_what_is_not_pending_any_more_is_not_settled(how: str) -> None:
    outer = outer_of(A)
    pending_of(outer, normal(0))
    if how == "its round breaks off":
        outer.owing.forget_pending()
    else:
        outer.restore(outer.snapshot(), None)
    outer.apply(commit_on(outer, {}), {})
    assert not outer.owed().residual.any()
