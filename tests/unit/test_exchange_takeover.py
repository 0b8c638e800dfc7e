"""A slice changes hands in mid-round: who had contributed does so again, and one result counts."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from node.exchange.peers import TransferRefusedError, Waits
from protocol.wire.messages import (
    Held,
    ParticipantsDeparted,
    ParticipantsIdle,
    Reduced,
    ResultOffered,
    SliceTakenOver,
)
from protocol.wire.rounds import BLOCK, Digest, NodeId, Plan
from tests.unit.exchange_scene import (
    COMMIT_SECONDS,
    CONTRIBUTE_SECONDS,
    TOKENS,
    A,
    B,
    C,
    Scene,
    in_virtual_time,
    result_of,
)

VALUES = np.ones(BLOCK, dtype=np.float32)


def hand_over(scene: Scene, *told: NodeId, index: int, to: NodeId, attempt: int = 1) -> None:
    news = SliceTakenOver(
        round=1, slice_index=index, reducer_id=to, attempt=attempt, contribute_seconds=10
    )
    for node_id in told:
        scene.nodes[node_id].exchange.tell(news)


def offer_of(index: int, digest: Digest) -> ResultOffered:
    return ResultOffered(round=1, slice_index=index, digest=digest, holder_ids=(B, C))


def with_reducer(plan: Plan, index: int, reducer: NodeId) -> Plan:
    slices = tuple(
        replace(part, reducer_id=reducer) if part.index == index else part for part in plan.slices
    )
    return replace(plan, slices=slices)


async def kill(scene: Scene, node_id: NodeId) -> None:
    await scene.nodes[node_id].exchange.stop()
    await scene.nodes[node_id].transport.stop()
    for other in set(scene.nodes) - {node_id}:
        scene.nodes[other].exchange.tell(ParticipantsDeparted(round=1, node_ids=(node_id,)))


@in_virtual_time
async def test_contributions_that_a_dead_reducer_had_are_sent_to_the_backup() -> None:
    scene = await Scene.of(A, B, C)
    plan = await scene.open_round(1, A, B, C)
    for node_id in (A, C):
        await scene.nodes[node_id].contribute(1.0)
    await asyncio.sleep(1)  # B, which reduces slice 1, has both by now
    await kill(scene, B)
    hand_over(scene, A, C, index=1, to=C)
    await asyncio.sleep(1)
    (reduced,) = (r for r in scene.nodes[C].reported(Reduced, 1) if r.slice_index == 1)
    assert [(c.node_id, c.tokens) for c in reduced.contributors] == [(A, TOKENS), (C, TOKENS)]
    assert (1, reduced.digest) in scene.nodes[A].held(1)
    commit = scene.close_round(with_reducer(plan, 1, C))
    assert all(outcome.digest is not None for outcome in commit.slices)
    for node_id in (A, C):
        await scene.nodes[node_id].exchange.apply(commit)
        np.testing.assert_array_equal(scene.nodes[node_id].parameters, -1.0)
        np.testing.assert_array_equal(scene.nodes[node_id].residual, 0.0)
    await scene.stop()


@in_virtual_time
async def test_a_takeover_before_the_contribution_or_the_plan_needs_no_second_sending() -> None:
    scene = await Scene.of(A, B, C)
    hand_over(scene, C, index=1, to=A)  # C hears of it before the plan
    await scene.open_round(1, A, B, C)
    hand_over(scene, A, B, index=1, to=A)
    for node in scene.nodes.values():
        await node.contribute(1.0)
    await asyncio.sleep(1)
    of_slice_1 = [r for r in scene.nodes[A].reported(Reduced, 1) if r.slice_index == 1]
    assert [len(r.contributors) for r in of_slice_1] == [3]
    assert not [r for r in scene.nodes[B].reported(Reduced, 1) if r.slice_index == 1]
    await scene.stop()


@in_virtual_time
async def test_an_old_takeover_that_comes_late_changes_nothing() -> None:
    scene = await Scene.of(A, B, C)
    await scene.open_round(1, A, B, C)
    hand_over(scene, A, B, C, index=1, to=C, attempt=2)
    hand_over(scene, A, B, C, index=1, to=A, attempt=1)
    for node in scene.nodes.values():
        await node.contribute(1.0)
    await asyncio.sleep(1)
    assert sorted([r.slice_index for r in scene.nodes[C].reported(Reduced, 1)]) == [1, 2]
    assert [r.slice_index for r in scene.nodes[A].reported(Reduced, 1)] == [0]
    await scene.stop()


@in_virtual_time
async def test_a_slice_that_comes_back_to_its_reducer_keeps_what_it_was_sent() -> None:
    scene = await Scene.of(A, B, C)
    await scene.open_round(1, A, B, C)
    await scene.nodes[A].contribute(1.0)
    await asyncio.sleep(1)
    hand_over(scene, A, B, C, index=1, to=B)  # as after a restart of its session
    for node_id in (B, C):
        await scene.nodes[node_id].contribute(1.0)
    await asyncio.sleep(1)
    (reduced,) = scene.nodes[B].reported(Reduced, 1)
    assert [c.node_id for c in reduced.contributors] == [A, B, C]
    await scene.stop()


@in_virtual_time
async def test_the_former_reducers_result_is_dropped_and_refused() -> None:
    scene = await Scene.of(A, B, C)
    await scene.open_round(1, A, B, C)
    node, old = scene.nodes[A], result_of(VALUES, sender_id=B, index=1)
    under_way = node.exchange.admit(B, old.header)
    await node.receive(B, old)
    hand_over(scene, A, index=1, to=C)
    with pytest.raises(TransferRefusedError, match="does not reduce"):
        node.exchange.admit(B, old.header)
    with pytest.raises(TransferRefusedError, match="b does not reduce slice 1"):
        await under_way.take(old)
    new = result_of(2 * VALUES, sender_id=C, index=1)
    await node.receive(C, new)
    assert scene.nodes[A].held(1)[-1] == (1, new.digest)
    await scene.stop()


@in_virtual_time
async def test_a_slice_that_is_taken_over_while_it_is_reduced_or_its_result_decoded_is_left_alone() -> (
    None
):
    scene = await Scene.of(A, B, C)
    for node in scene.nodes.values():
        node.exchange._here = replace(node.exchange._here, heavy=done_a_second_later)
    await scene.open_round(1, A, B, C)
    result = result_of(VALUES, sender_id=C, index=2)
    decoding = asyncio.create_task(scene.nodes[A].receive(C, result))
    scene.nodes[B].exchange.tell(ParticipantsIdle(round=1, node_ids=(A, B, C)))  # so B reduces now
    await asyncio.sleep(0.5)
    hand_over(scene, A, B, C, index=1, to=C)
    hand_over(scene, A, B, C, index=2, to=B)
    await asyncio.sleep(1)
    with pytest.raises(TransferRefusedError, match="c does not reduce slice 2"):
        await decoding
    assert not scene.nodes[A].reported(Held, 1)
    assert not [r for r in scene.nodes[B].reported(Reduced, 1) if r.slice_index == 1]
    await scene.stop()


@in_virtual_time
async def test_a_slice_that_comes_back_while_its_mean_is_taken_has_one_result() -> None:
    scene = await Scene.of(A, B, C)
    scene.nodes[B].exchange._here = replace(
        scene.nodes[B].exchange._here, heavy=done_a_second_later
    )
    await scene.open_round(1, A, B, C)
    for node_id in (A, C):
        await scene.nodes[node_id].contribute(1.0)
    scene.nodes[B].exchange.tell(ParticipantsIdle(round=1, node_ids=(B,)))
    await asyncio.sleep(0.5)  # B takes the mean
    hand_over(scene, A, B, C, index=1, to=B)
    await asyncio.sleep(5)
    (reduced,) = scene.nodes[B].reported(Reduced, 1)
    assert [c.node_id for c in reduced.contributors] == [A, C]
    await scene.stop()


@pytest.mark.parametrize("news", ["none", "departed", "taken over"])
@in_virtual_time
async def test_nothing_more_is_sent_to_a_reducer_that_is_gone_or_relieved(news: str) -> None:
    scene = await Scene.of(A, B, C)
    await scene.open_round(1, A, B, C)
    scene.network.cut(A, B)
    await scene.nodes[A].contribute(1.0)
    if news == "taken over":
        hand_over(scene, A, index=1, to=C)
    elif news == "departed":
        scene.nodes[A].exchange.tell(ParticipantsDeparted(round=1, node_ids=(B,)))
    scene.network.mend(A, B)
    await scene.nodes[B].contribute(1.0)
    await asyncio.sleep(CONTRIBUTE_SECONDS + 1)
    (reduced,) = scene.nodes[B].reported(Reduced, 1)
    assert [c.node_id for c in reduced.contributors] == ([A, B] if news == "none" else [B])
    await scene.stop()


async def done_a_second_later(work: Callable[[], Any]) -> Any:
    done = work()
    await asyncio.sleep(1)
    return done


@in_virtual_time
async def test_a_result_that_has_come_and_was_dropped_is_not_waited_for_as_if_it_were_coming() -> (
    None
):
    scene = await Scene.of(A, B, C)
    plan = await scene.open_round(1, A, B, C)
    scene.network.cut(A, C)
    await scene.nodes[A].receive(B, result_of(VALUES, sender_id=B, index=1))
    hand_over(scene, A, B, C, index=1, to=C)
    for node in scene.nodes.values():
        await node.contribute(1.0)
    await asyncio.sleep(CONTRIBUTE_SECONDS + 1)
    commit = scene.close_round(with_reducer(plan, 1, C))
    assert commit.slices[1].digest is not None  # which A lacks: C's push does not come through
    committed_at = asyncio.get_running_loop().time()
    await scene.nodes[A].exchange.apply(commit)
    assert asyncio.get_running_loop().time() - committed_at <= Waits().grace_seconds
    await scene.stop()


@in_virtual_time
async def test_an_offered_result_is_fetched_from_whoever_of_its_holders_delivers() -> None:
    scene = await Scene.of(A, B, C)
    await scene.open_round(1, A, B, C)
    result = result_of(VALUES, sender_id=B, index=1)
    await scene.nodes[C].receive(B, result)
    for offered in (result.digest, result.digest):  # said twice, fetched once
        scene.nodes[A].exchange.tell(offer_of(1, offered))
        await asyncio.sleep(1)
    assert scene.nodes[A].held(1) == [(1, result.digest)]
    scene.nodes[A].exchange.tell(offer_of(0, Digest(b"x" * 32)))
    await asyncio.sleep(COMMIT_SECONDS)
    assert len(scene.nodes[A].reported(Held, 1)) == 1  # nobody has that
    await scene.stop()


@in_virtual_time
async def test_who_has_nothing_to_contribute_is_not_waited_for_but_gets_the_results() -> None:
    scene = await Scene.of(A, B, C)
    await scene.open_round(1, A, B, C)
    for node_id in (A, B):
        scene.nodes[node_id].exchange.tell(ParticipantsIdle(round=1, node_ids=(C,)))
        await scene.nodes[node_id].contribute(1.0)
    await asyncio.sleep(1)
    assert {held.slice_index for held in scene.nodes[C].reported(Held, 1)} == {0, 1}
    await scene.stop()


@in_virtual_time
async def test_a_backup_that_had_departed_before_is_sent_the_contributions() -> None:
    scene = await Scene.of(A, B, C)
    plan = await scene.open_round(1, A, B, C)
    for node_id in (A, C):
        await scene.nodes[node_id].contribute(1.0)
    await kill(scene, B)
    back = await scene.add(B)  # a new process
    await back.exchange.open_round(plan)
    hand_over(scene, A, B, C, index=2, to=B)
    await back.contribute(1.0)
    await asyncio.sleep(5)
    of_slice_2 = [r for r in back.reported(Reduced, 1) if r.slice_index == 2]
    assert [c.node_id for r in of_slice_2 for c in r.contributors] == [A, B, C]
    await scene.stop()
