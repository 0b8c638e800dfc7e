"""One node's round, fed with events by hand: A's, of three nodes of which each reduces a slice at first."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from node.exchange.codecs.registry import codec_named
from node.exchange.reduction import SliceResult
from node.exchange.round.state import (
    Awaited,
    ContributionEncoded,
    Event,
    Links,
    PayloadCame,
    Phase,
    RoundState,
    Rules,
    TimePassed,
    opened,
)
from node.exchange.round.transition import collects_until, step
from protocol.wire.messages import Reduced, SliceTakenOver
from protocol.wire.payload import Payload
from protocol.wire.rounds import BLOCK, NodeId, Plan
from tests.unit.exchange_scene import RUN, TOKENS, A, B, C, contribution_of, plan_for, result_of

NODES = (A, B, C)
FP32 = codec_named("fp32")
RULES = Rules(node_id=A, run_digest=RUN, context=1, uplink=FP32, downlink=FP32)
BODIES = [np.full(BLOCK, value, dtype="<f4") for value in (1, 2)]
"""Two for each sender: who sends both lies, or was restarted."""


def contributed(sender: NodeId, index: int, which: int) -> Payload:
    return contribution_of(BODIES[which].tobytes(), sender_id=sender, index=index)


def made_by(reducer: NodeId, index: int, which: int) -> Payload:
    return result_of(BODIES[which], sender_id=reducer, index=index)


def body_of(payload: Payload, attempt: int = 0) -> PayloadCame:
    return PayloadCame(sender=payload.header.sender_id, payload=payload, admitted_in=attempt)


def contribution(sender: NodeId, index: int = 0, *, attempt: int = 0) -> Event:
    """A sender's first body for a slice: A's own is encoded, and others' come."""
    payload = contributed(sender, index, 0)
    return ContributionEncoded(payload=payload) if sender == A else body_of(payload, attempt)


def taken_over(index: int, to: NodeId, *, attempt: int = 1, seconds: float = 9.0) -> SliceTakenOver:
    return SliceTakenOver(
        round=1, slice_index=index, reducer_id=to, attempt=attempt, contribute_seconds=seconds
    )


def reduced_to(payload: Payload) -> SliceResult:
    """A reducer's, with this payload and nothing else to tell."""
    return SliceResult(
        payload=payload,
        encoded=RULES.downlink.opened(payload.body, BLOCK),
        made_of=Reduced(slice_index=0, digest=None, contributors=(), contributions=()),
        weighed_tokens=TOKENS,
        error=None,
    )


def begun(
    plan: Plan | None = None, less: Mapping[NodeId, Awaited] = MappingProxyType({})
) -> RoundState:
    """A round from 0 s on, whose contributions end at 20 s; some may be waited for less."""
    plan = plan or plan_for(*NODES)
    return opened(plan, RULES, patience_seconds=50.0, now=0.0, less_awaited=less)


def after(state: RoundState, *events: tuple[float, Event]) -> RoundState:
    for at, event in events:
        state = step(state, event, at).state
    return state


def reduced_at(state: RoundState, *events: tuple[float, Event]) -> float:
    """When the mean of A's slice is begun, after these events."""
    at, state = max((at for at, _ in events), default=0.0), after(state, *events)
    while state.slices[0].phase is Phase.COLLECTING:
        at = collects_until(state, state.slices[0])
        state = step(state, TimePassed(links=Links()), at).state
    return at
