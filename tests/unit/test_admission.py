"""What a peer may bring to a slice that this node reduces, by the header alone."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from node.exchange.codecs.codec import Codec
from node.exchange.codecs.registry import codec_named
from node.exchange.reduction import Reduction
from node.exchange.round.state import (
    Links,
    PayloadCame,
    Reduce,
    RoundState,
    Rules,
    TimePassed,
    opened,
    refusal,
)
from node.exchange.round.transition import FULL_LEAST_SECONDS, late_for, step, waiting_for
from protocol.wire.messages import ParticipantsDeparted, SliceTakenOver
from protocol.wire.payload import MANIFEST, Payload, PayloadHeader
from protocol.wire.rounds import BLOCK, NodeId
from tests.unit.exchange_scene import RUN, TOKENS, A, B, C, contribution_of, plan_for, result_of

PLAN = plan_for(A, B, C)
FP32 = codec_named("fp32")


def round_at_a(uplink: Codec = FP32) -> RoundState:
    rules = Rules(node_id=A, run_digest=RUN, context=1, uplink=uplink, downlink=uplink)
    return opened(PLAN, rules, patience_seconds=60.0, now=0.0)


def contribution(sender: NodeId, value: float) -> Payload:
    return contribution_of(np.full(BLOCK, value, dtype="<f4").tobytes(), sender_id=sender)


def body_of(payload: Payload) -> PayloadCame:
    return PayloadCame(sender=payload.header.sender_id, payload=payload, admitted_in=0)


def came(state: RoundState, *payloads: Payload) -> RoundState:
    for payload in payloads:
        transition = step(state, body_of(payload), 1.0)
        assert not transition.refusal
        state = transition.state
    return state


def reduced(state: RoundState, at: float) -> tuple[RoundState, Sequence[Reduction]]:
    transition = step(state, TimePassed(links=Links()), at)
    means = [a.reduction for a in transition.actions if isinstance(a, Reduce)]
    return transition.state, means


def why_refused(state: RoundState, sender: NodeId, header: PayloadHeader) -> str:
    return refusal(state.rules, state, sender, header)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"start": 1}, "slice 0 of round 1 holds elements 0+256, not 1+256"),
        ({"num_elements": BLOCK - 1}, "slice 0 of round 1 holds elements 0+256, not 0+255"),
        (
            {"codec": "int8/1"},
            "a contribution of slice 0 of round 1 comes in fp32/1, not int8/1",
        ),
        ({"body_bytes": 4 * BLOCK + 1}, "slice 0 of round 1 has no body of 1025 bytes"),
        (
            {"samples": TOKENS + 1, "tokens": TOKENS},
            "9 samples for slice 0 of round 1, where 8 were assigned",
        ),
        ({"tokens": 0}, "0 tokens in 8 samples for slice 0 of round 1, which have 8"),
        ({"tokens": TOKENS + 1}, "9 tokens in 8 samples for slice 0 of round 1, which have 8"),
        (
            {"samples": 1, "tokens": 2},
            "2 tokens in 1 samples for slice 0 of round 1, which have 1",
        ),
        ({"slice_index": 1}, "this node does not reduce slice 1 of round 1"),
        ({"fragment": 1}, "this node does not reduce slice 0 of round 1"),
        ({"round": 2}, "round 2 is not open at this node"),
        ({"kind": MANIFEST}, "a manifest is fetched, never pushed"),
    ],
)
def test_a_header_that_does_not_fit_is_refused_with_what_it_should_be(
    change: dict[str, Any], why: str
) -> None:
    header = contribution(B, 1).header
    assert why_refused(round_at_a(), B, header) == ""
    assert why_refused(round_at_a(), B, replace(header, **change)) == why


def test_of_a_codec_whose_size_varies_what_is_no_larger_than_possible_is_admitted() -> None:
    codec = codec_named("ec2")
    state = round_at_a(codec)
    body = codec.encode(np.sin(np.arange(BLOCK, dtype=np.float32)))
    header = replace(contribution(B, 1).header, codec=codec.name, body_bytes=len(body))
    assert not why_refused(state, B, header)
    assert not why_refused(state, B, replace(header, body_bytes=codec.most_bytes(BLOCK)))
    for wrong in (codec.most_bytes(BLOCK) + 1, 0, 8):
        assert "no body" in why_refused(state, B, replace(header, body_bytes=wrong))


def test_a_stranger_to_the_round_is_refused() -> None:
    stranger = NodeId("stranger")
    why = why_refused(round_at_a(), stranger, contribution(stranger, 1).header)
    assert why == "stranger takes no part in round 1"


def test_nobody_contributes_in_anothers_name() -> None:
    why = why_refused(round_at_a(), B, contribution(C, 1).header)
    assert why == "b offers a contribution in the name of c"


def test_a_node_cannot_change_its_contribution_and_may_repeat_it() -> None:
    state = came(round_at_a(), contribution(B, 1), contribution(B, 1))
    other = contribution(B, 2)
    why = "slice 0 of round 1 has another contribution of b already"
    assert why_refused(state, B, other.header) == why
    # Two that were admitted at the same time:
    late = step(state, body_of(other), 1.0)
    assert late.refusal == why
    _, (mean,) = reduced(late.state, PLAN.contribute_seconds)
    assert mean.contributions == {B: contribution(B, 1)}


def test_what_was_admitted_is_refused_when_the_slice_was_taken_over_meanwhile() -> None:
    state = came(round_at_a(), contribution(A, 1))
    news = SliceTakenOver(round=1, slice_index=0, reducer_id=C, attempt=1, contribute_seconds=10.0)
    state = step(state, news, 2.0).state
    late = step(state, body_of(contribution(B, 1)), 3.0)
    assert late.refusal == "this node does not reduce slice 0 of round 1"
    assert not late.state.slices[0].contributions  # nothing is kept


def test_a_mean_waits_for_nobody_who_is_gone_and_for_others_at_least_ten_seconds_more() -> None:
    assert waiting_for(round_at_a()) == "contributions of 3 nodes"
    waiting = came(round_at_a(), contribution(A, 1), contribution(B, 1))
    assert waiting_for(waiting) == "one contribution"
    assert late_for(waiting, waiting.slices[0]) == {C}
    gone = step(waiting, ParticipantsDeparted(round=1, node_ids=(C,)), 2.0)
    (mean,) = gone.actions
    assert isinstance(mean, Reduce)
    assert set(mean.reduction.contributions) == {A, B} and not mean.reduction.late
    assert waiting_for(gone.state) == ""

    at = min(1.0 + FULL_LEAST_SECONDS, PLAN.contribute_seconds)
    just_before, nothing = reduced(waiting, at - 0.001)
    assert not nothing
    state, (reduction,) = reduced(just_before, at)
    assert set(reduction.contributions) == {A, B} and reduction.late == {C}
    late = contribution(C, 1)
    assert why_refused(state, C, late.header) == "slice 0 of round 1 is already reduced"
    assert not why_refused(state, B, contribution(B, 1).header)  # said again, it is thanked for


def test_who_departs_after_contributing_still_counts() -> None:
    state = came(round_at_a(), contribution(B, 1))
    state = step(state, ParticipantsDeparted(round=1, node_ids=(B,)), 2.0).state
    _, (mean,) = reduced(state, PLAN.contribute_seconds)
    assert set(mean.contributions) == {B}


def test_a_result_of_before_its_slice_went_away_and_came_back_is_refused() -> None:
    """Its reducer makes another one, which the old one would stand in the way of."""
    state = round_at_a()
    old = result_of(np.ones(BLOCK, dtype=np.float32), sender_id=B, index=1)
    assert not why_refused(state, B, old.header)
    for attempt, reducer in ((1, C), (2, B)):
        news = SliceTakenOver(
            round=1, slice_index=1, reducer_id=reducer, attempt=attempt, contribute_seconds=10.0
        )
        state = step(state, news, 2.0).state
    late = step(state, body_of(old), 3.0)
    assert late.refusal == "slice 1 of round 1 has been taken over meanwhile"
    assert not why_refused(
        state, B, old.header
    )  # B, which may not have heard of it, offers it anew
