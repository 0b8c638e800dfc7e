from dataclasses import replace

import numpy as np
import pytest

from node.exchange.codecs.codec import CodecError
from node.exchange.outer import Outer, Pending, UnequalBaseError
from node.outer_state import Vector
from protocol.payload import Payload
from protocol.rounds import BLOCK, Commit, Contributor, SliceOutcome
from tests.unit.exchange_scene import NUM_ELEMENTS, A, B, outer_of, result_of

ONES = np.ones(BLOCK, dtype=np.float32)


def pending_of(outer: Outer, work: Vector) -> Pending:
    """What the node sent in the next round, encoded as it would be."""
    outer._published[:] = outer._parameters - work
    pending = outer.accumulate(round=outer.round + 1, fragment=0)
    for index in range(3):
        part = pending.accumulated[index * BLOCK : (index + 1) * BLOCK]
        pending.bodies[index] = outer.uplink.encode(part)
    return pending


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
                contributors=(Contributor(node_id=A if taken_from == A else B, tokens=1),)
                if index in results
                else (),
            )
            for index in range(3)
        ),
    )


def whole_state(outer: Outer) -> tuple[bytes, ...]:
    snapshot = outer.snapshot()
    vectors = (snapshot.parameters, snapshot.momentum, outer.residual_copy())
    return (*(vector.tobytes() for vector in vectors), bytes([outer.round]), outer.digest)


def normal(seed: int) -> Vector:
    return np.random.default_rng(seed).standard_normal(NUM_ELEMENTS, dtype=np.float32)


@pytest.mark.parametrize("what", ["round", "digest"])
def test_a_commit_on_another_base_changes_nothing(what: str) -> None:
    outer = outer_of(A)
    results = {0: result_of(ONES, sender_id=B)}
    commit = commit_on(outer, results)
    wrong = (
        replace(commit, round=2)
        if what == "round"
        else replace(commit, base_digest=commit.slices[0].digest)
    )
    pending, before = pending_of(outer, normal(0)), whole_state(outer)
    with pytest.raises(UnequalBaseError, match="applies to state"):
        outer.apply(wrong, results, pending)
    assert whole_state(outer) == before


def test_a_result_that_does_not_decode_leaves_no_half_applied_commit() -> None:
    outer = outer_of(A)
    results = {
        0: result_of(ONES, sender_id=B),
        1: result_of(np.full(BLOCK, np.inf, dtype=np.float32), sender_id=B, index=1),
    }
    before = whole_state(outer)
    with pytest.raises(CodecError, match="inf"):
        outer.apply(commit_on(outer, results), results, pending_of(outer, normal(0)))
    assert whole_state(outer) == before


def test_a_taken_slice_leaves_its_encoding_error_and_a_void_one_all_of_it() -> None:
    outer = outer_of(A, "int4")
    body = outer.downlink.encode(ONES)
    header = result_of(ONES, sender_id=B).header
    results = {0: Payload(header=header, body=body)}
    work = normal(0)
    pending = pending_of(outer, work)
    outer.apply(commit_on(outer, results), results, pending)
    error = work[:BLOCK] - outer.uplink.decode(pending.bodies[0], BLOCK)
    assert error.any()
    np.testing.assert_array_equal(outer.residual_copy()[:BLOCK], error)
    np.testing.assert_array_equal(outer.residual_copy()[BLOCK:], work[BLOCK:])


def test_a_node_left_out_of_a_committed_slice_still_owes_it() -> None:
    outer, work = outer_of(A), normal(0)
    results = {0: result_of(ONES, sender_id=B)}
    outer.apply(commit_on(outer, results, taken_from=B), results, pending_of(outer, work))
    np.testing.assert_array_equal(outer.residual_copy(), work)


def test_what_was_sent_before_a_restart_and_taken_is_not_owed_again() -> None:
    """The residual on disk is of the round before: the contribution that was taken held it."""
    outer = outer_of(A)
    outer.restore(outer.snapshot(), normal(0))
    results = {0: result_of(ONES, sender_id=B)}
    outer.apply(commit_on(outer, results), results, pending=None)
    assert not outer.residual_copy()[:BLOCK].any()
    np.testing.assert_array_equal(outer.residual_copy()[BLOCK:], normal(0)[BLOCK:])


def test_a_void_round_moves_the_round_and_not_the_digest() -> None:
    outer, work = outer_of(A), normal(0)
    digest = outer.digest
    outer.apply(commit_on(outer, {}), {}, pending_of(outer, work))
    assert (outer.round, outer.digest) == (1, digest)
    np.testing.assert_array_equal(outer.residual_copy(), work)
