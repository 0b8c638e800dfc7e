"""What a commit's factors do at a node: to the state, and to what it owes."""

from dataclasses import replace

import numpy as np
import pytest
from structlog.testing import capture_logs

from node.exchange.codecs.codec import CodecError
from node.exchange.outer import Outer
from node.exchange.screening import LARGEST_RMS
from protocol.v1 import round_pb2
from protocol.wire import convert
from protocol.wire.payload import Payload
from protocol.wire.rounds import BLOCK, WHOLE, Commit, Contributor
from tests.unit.exchange_scene import A, B, commit_of, outer_of, plan_for, result_of

ONES = np.ones(BLOCK, dtype=np.float32)


def committed(outer: Outer, result: Payload, **of_slice: object) -> Commit:
    commit = commit_of(outer, result)
    return replace(commit, slices=(replace(commit.slices[0], **of_slice),))  # type: ignore[arg-type]


def contributing(outer: Outer) -> Commit:
    """A has contributed 3 to slice 0, which commits; what of it counts is for the test to say."""
    outer.owing._published[:] = outer._parameters - np.float32(3)
    plan = plan_for(A, B)
    outer.owing.accumulate(round=1, fragment=0, base_digest=plan.base_digest)
    part = replace(plan.slices[0], num_elements=BLOCK)
    outer.owing.contribution_to(part, samples=1, tokens=1)
    assert outer.owing.pending is not None
    sent = outer.owing.pending.sent[0]
    return committed(
        outer,
        result_of(ONES, sender_id=B),
        contributors=(Contributor(node_id=A, samples=1, tokens=1),),
        contributions=(sent.contribution,),
    )


def test_nodes_apply_as_much_of_a_result_as_the_commit_says() -> None:
    outer, result = outer_of(A), result_of(ONES, sender_id=B)
    outer.apply(committed(outer, result, factor=WHOLE // 4), {0: result})
    np.testing.assert_array_equal(outer.snapshot().parameters[:BLOCK], -0.25)


def test_a_result_that_no_training_comes_to_changes_nothing_at_any_node() -> None:
    outers = [outer_of(A), outer_of(B)]
    huge = result_of(np.float32(1e30) * ONES, sender_id=B)
    for outer in outers:
        with capture_logs() as logs:
            outer.apply(committed(outer, huge), {0: huge})
        assert [each["log_level"] for each in logs] == ["error"]
        assert not outer.snapshot().parameters.any()
        assert outer.round == 1
    assert outers[0].digest == outers[1].digest
    bearable = result_of(np.float32(LARGEST_RMS) * ONES, sender_id=B)
    outer = outer_of(A)
    outer.apply(committed(outer, bearable), {0: bearable})
    assert outer.snapshot().parameters[0] == -LARGEST_RMS


def test_a_result_that_is_longer_than_its_header_says_is_held_by_nobody() -> None:
    result = result_of(np.float32(50) * ONES, sender_id=B)
    lie = Payload(header=replace(result.header, norm=1.0), body=result.body)
    outer = outer_of(A)
    with pytest.raises(CodecError, match="its norm is 800"):
        outer.check_result(lie)
    outer.check_result(result)


@pytest.mark.parametrize("factor", [WHOLE // 2, 0])
def test_what_is_cut_off_a_contribution_is_let_go_and_said(factor: int) -> None:
    outer = outer_of(A)
    commit = contributing(outer)
    cut = replace(commit, slices=(replace(commit.slices[0], factors=(factor,)),))
    with capture_logs() as logs:
        outer.apply(cut, {0: result_of(ONES, sender_id=B)})
    assert not outer.owed().residual[:BLOCK].any(), "it is not owed again"
    assert outer.owing.let_go_rounds == pytest.approx((1 - factor / WHOLE) / 3)  # of three slices
    assert any("has not taken all of it" in each["event"] for each in logs)


def test_what_is_taken_whole_lets_nothing_go() -> None:
    outer = outer_of(A)
    outer.apply(contributing(outer), {0: result_of(ONES, sender_id=B)})
    assert outer.owing.let_go_rounds == 0


def test_factors_travel_and_are_whole_where_nothing_is_said() -> None:
    outer, result = outer_of(A), result_of(ONES, sender_id=B)
    for changes in (
        {},
        {"factors": (WHOLE - 1,), "norm": 1 / 3, "factor": 17},
        {"factors": (0,), "factor": 0},
    ):
        commit = committed(outer, result, contributions=(bytes(16),), **changes)
        wire = convert.commit_to_wire(commit).SerializeToString()
        assert convert.commit_from_wire(round_pb2.Commit.FromString(wire)) == commit
    assert commit.slices[0].factor_of(B) == 0 and not commit.slices[0].taken
