"""Results that are on their way to a node when the commit comes: it waits for some, and fetches others."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from node.exchange import peers
from node.exchange.peers import TransferRefusedError, Waits
from node.exchange.round.transition import GRACE_ROUND_TRIPS
from protocol.wire.messages import ParticipantsDeparted, ResultOffered
from protocol.wire.payload import RESULT, Payload
from protocol.wire.rounds import BLOCK, Commit, NodeId, Plan
from tests.unit.exchange_scene import (
    COMMIT_SECONDS,
    NUM_ELEMENTS,
    A,
    B,
    C,
    Node,
    Scene,
    in_virtual_time,
    plan_for,
)

WAITS = Waits()

SLICE_BYTES = 4 * BLOCK  # as fp32
HEADER_BYTES = 200  # at most
PATIENCE_SECONDS = WAITS.for_fetch_of(4 * NUM_ELEMENTS)


async def committed(
    scene: Scene, begin_after: Mapping[NodeId, float], plan: Plan | None = None
) -> Commit:
    """A round of A, B and C, of which A lacks some results when it is committed.

    `begin_after`: how long after they were made those reducers begin to push their results to A.
    """
    for node_id, seconds in begin_after.items():
        _hold_back(scene.nodes[node_id], seconds)
    if plan is None:
        plan = await scene.open_round(1, A, B, C)
    else:
        for node in scene.nodes.values():
            await node.exchange.open_round(plan)
    for node in scene.nodes.values():
        await node.contribute(1.0)
    await asyncio.sleep(2)
    return scene.close_round(plan)


def _hold_back(node: Node, seconds: float) -> None:
    push = node.transport.push

    async def pushed(peer: NodeId, payload: Payload, **named: Any) -> bytes:
        if peer == A and payload.header.kind == RESULT:
            await asyncio.sleep(seconds)
        return await push(peer, payload, **named)

    node.transport.push = pushed  # type: ignore[method-assign]


async def seconds_to_apply(node: Node, commit: Commit) -> float:
    began_at = asyncio.get_running_loop().time()
    await node.exchange.apply(commit)
    assert node.outer.round == commit.round
    return asyncio.get_running_loop().time() - began_at


def num_received(node: Node) -> float:
    """How many results have come to a node over its link."""
    _, num_bytes = node.transport._counts.totals()["result"]
    count = num_bytes // SLICE_BYTES
    assert num_bytes <= count * (SLICE_BYTES + HEADER_BYTES)
    return count


@in_virtual_time
async def test_a_result_that_arrives_for_minutes_is_waited_for_and_comes_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "SLOWEST_BYTES_PER_SECOND", 10)  # of slices of a kilobyte
    scene = await Scene.of(A, B, C)
    commit = await committed(scene, {C: 2.5})
    scene.network.slow_down(C, SLICE_BYTES / 200)
    assert 200 < await seconds_to_apply(scene.nodes[A], commit) < 250
    assert num_received(scene.nodes[A]) == 2
    await scene.stop()


@in_virtual_time
async def test_a_push_goes_on_after_the_time_by_which_the_round_had_to_be_committed() -> None:
    scene = await Scene.of(A, B, C)
    commit = await committed(scene, {C: 2.5})
    for holder in (B, C):
        scene.network.slow_down(holder, SLICE_BYTES / (COMMIT_SECONDS + 10))
    seconds = await seconds_to_apply(scene.nodes[A], commit)
    assert COMMIT_SECONDS < seconds < COMMIT_SECONDS + 20  # not begun anew
    assert num_received(scene.nodes[A]) == 2
    await scene.stop()


@in_virtual_time
async def test_what_nobody_pushes_is_fetched_while_another_result_arrives() -> None:
    scene = await Scene.of(A, B, C)
    commit = await committed(scene, {B: 1e6, C: 2.5})
    scene.network.slow_down(C, SLICE_BYTES / 40)
    node = scene.nodes[A]
    applying = asyncio.create_task(seconds_to_apply(node, commit))
    await asyncio.sleep(WAITS.grace_seconds + 1)
    assert [node.exchange._held.get(1, index) is not None for index in range(3)] == [1, 1, 0]
    assert not applying.done()
    assert 40 < await applying < 50
    assert num_received(node) == 2
    await scene.stop()


@pytest.mark.parametrize("latency_seconds", [0.001, 0.5])
@in_virtual_time
async def test_a_push_has_some_round_trips_to_begin(latency_seconds: float) -> None:
    scene = await Scene.of(A, B, C)
    scene.network.latency_seconds = latency_seconds
    grace_seconds = WAITS.grace_seconds + GRACE_ROUND_TRIPS * latency_seconds
    commit = await committed(scene, {C: 2 + 0.9 * grace_seconds - latency_seconds})
    assert await seconds_to_apply(scene.nodes[A], commit) >= 0.8 * grace_seconds
    assert num_received(scene.nodes[A]) == 2
    await scene.stop()


@in_virtual_time
async def test_a_push_that_does_not_begin_is_not_waited_for() -> None:
    scene = await Scene.of(A, B, C)
    commit = await committed(scene, {C: 1e6})
    assert await seconds_to_apply(scene.nodes[A], commit) == pytest.approx(
        WAITS.grace_seconds, abs=0.1
    )
    await scene.stop()


@pytest.mark.parametrize("why", ["gone", "out of reach"])
@in_virtual_time
async def test_nothing_is_awaited_of_a_reducer_that_cannot_push(why: str) -> None:
    scene = await Scene.of(A, B, C)
    commit = await committed(scene, {C: 1e6})
    if why == "gone":
        scene.nodes[A].exchange.tell(ParticipantsDeparted(round=1, node_ids=(C,)))
    else:
        scene.network.cut(A, C)
    assert await seconds_to_apply(scene.nodes[A], commit) < 0.1
    await scene.stop()


@in_virtual_time
async def test_what_does_come_of_a_reducer_that_is_gone_is_waited_for() -> None:
    """The coordinator may have lost a node that its peers have not."""
    scene = await Scene.of(A, B, C)
    commit = await committed(scene, {C: 1e6})
    node, payload = scene.nodes[A], scene.nodes[C].exchange._held.get(1, 2)
    assert payload is not None
    admission = node.exchange.admit(C, payload.header)
    node.exchange.tell(ParticipantsDeparted(round=1, node_ids=(C,)))
    applying = asyncio.create_task(seconds_to_apply(node, commit))
    await asyncio.sleep(10)
    assert node.exchange.waiting_for() == "the result of slice 2 of round 1"
    await admission.take(payload)
    admission.end()
    assert await applying == pytest.approx(10, abs=0.1)
    assert num_received(node) == 1  # B's
    await scene.stop()


@in_virtual_time
async def test_a_push_that_breaks_off_is_not_waited_for_again() -> None:
    scene = await Scene.of(A, B, C)
    commit = await committed(scene, {C: 1e6})
    node = scene.nodes[A]
    header = scene.nodes[C].exchange._held.get(1, 2).header  # type: ignore[union-attr]
    admission = node.exchange.admit(C, header)
    applying = asyncio.create_task(seconds_to_apply(node, commit))
    await asyncio.sleep(10)
    assert not applying.done()
    admission.end()
    assert await applying == pytest.approx(10, abs=0.1)
    await scene.stop()


@in_virtual_time
async def test_a_reducers_second_result_comes_after_its_first() -> None:
    """What goes to one peer goes in order, so the second may begin minutes after the commit."""
    scene = await Scene.of(A, B, C)
    plan = plan_for(A, B, C, base_digest=scene.nodes[A].outer.digest)
    both_of_c = tuple(replace(part, reducer_id=C) for part in plan.slices[1:])
    plan = replace(plan, slices=(plan.slices[0], *both_of_c))
    commit = await committed(scene, {C: 1e6}, plan)
    node = scene.nodes[A]
    applying = asyncio.create_task(seconds_to_apply(node, commit))
    for index in (1, 2):
        payload = scene.nodes[C].exchange._held.get(1, index)
        assert payload is not None
        admission = node.exchange.admit(C, payload.header)
        await asyncio.sleep(20)
        await admission.take(payload)
        admission.end()
        await asyncio.sleep(WAITS.grace_seconds / 2)
    assert await applying == pytest.approx(40 + WAITS.grace_seconds / 2, abs=0.1)
    assert num_received(node) == 0  # over its link: it was handed both here
    await scene.stop()


@in_virtual_time
async def test_a_push_that_trickles_without_end_is_not_the_only_hope() -> None:
    scene = await Scene.of(A, B, C)
    commit = await committed(scene, {C: 1e6})
    header = scene.nodes[C].exchange._held.get(1, 2).header  # type: ignore[union-attr]
    scene.nodes[A].exchange.admit(C, header)  # and never ends
    seconds = await seconds_to_apply(scene.nodes[A], commit)
    assert seconds == pytest.approx(PATIENCE_SECONDS, abs=0.1)
    await scene.stop()


@in_virtual_time
async def test_what_is_being_fetched_is_not_taken_from_its_reducer_as_well() -> None:
    scene = await Scene.of(A, B, C)
    commit = await committed(scene, {C: 1e6})
    for donor in (B, C):
        scene.network.slow_down(donor, SLICE_BYTES / 20)
    applying = asyncio.create_task(seconds_to_apply(scene.nodes[A], commit))
    await asyncio.sleep(WAITS.grace_seconds + 1)
    header = scene.nodes[C].exchange._held.get(1, 2).header  # type: ignore[union-attr]
    with pytest.raises(TransferRefusedError, match="is being fetched already"):
        scene.nodes[A].exchange.admit(C, header)
    await applying
    assert num_received(scene.nodes[A]) == 2
    await scene.stop()


@in_virtual_time
async def test_what_no_holder_delivers_now_is_left_to_the_catch_up_with_its_patience() -> None:
    scene = await Scene.of(A, B, C)
    commit = await committed(scene, {C: 1e6})
    scene.network.cut(A, B)
    scene.network.cut(A, C)
    applying = asyncio.create_task(seconds_to_apply(scene.nodes[A], commit))
    await asyncio.sleep(300)
    assert not applying.done()
    scene.network.mend(A, B)
    await applying
    await scene.stop()


@in_virtual_time
async def test_a_round_that_is_over_wants_nothing_that_is_still_on_its_way() -> None:
    scene = await Scene.of(A, B, C)
    await committed(scene, {C: 1e6})
    header = scene.nodes[C].exchange._held.get(1, 2).header  # type: ignore[union-attr]
    admission = scene.nodes[A].exchange.admit(C, header)
    assert admission.is_wanted()
    await scene.nodes[A].exchange._close_round()
    assert not admission.is_wanted()
    await scene.stop()


@in_virtual_time
async def test_an_offered_result_is_not_fetched_while_its_reducer_does_get_through() -> None:
    """The coordinator may have lost a node that its peers have not."""
    scene = await Scene.of(A, B, C)
    await committed(scene, {C: 1e6})
    payload = scene.nodes[C].exchange._held.get(1, 2)
    assert payload is not None
    admission = scene.nodes[A].exchange.admit(C, payload.header)
    offered = ResultOffered(round=1, slice_index=2, digest=payload.digest, holder_ids=(B, C))
    scene.nodes[A].exchange.tell(offered)
    await asyncio.sleep(10)
    await admission.take(payload)
    admission.end()
    await asyncio.sleep(1)
    assert num_received(scene.nodes[A]) == 1  # B's
    await scene.stop()
