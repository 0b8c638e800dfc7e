"""A node that holds another state than the swarm: its own commits first, then the state of the others."""

import asyncio
from dataclasses import replace

import numpy as np

from node.disk.snapshots import Owed
from protocol.wire.rounds import Digest
from tests.unit.exchange_scene import A, B, C, after_rounds, committed_round, in_virtual_time


@in_virtual_time
async def test_a_refetch_replaces_a_wrong_state_and_drops_what_was_owed_on_it() -> None:
    scene = await after_rounds(1, A, B, C)
    wrong = scene.nodes[C].outer
    snapshot = replace(wrong.snapshot(), round=1)
    owed = Owed(residual=snapshot.parameters + 1)
    wrong.restore(replace(snapshot, parameters=snapshot.parameters + 7), owed)
    right = scene.nodes[A].outer.digest
    assert await scene.nodes[C].exchange.refetch(1, right)
    assert scene.nodes[C].outer.digest == right
    assert not scene.nodes[C].residual.any()
    await scene.stop()


@in_virtual_time
async def test_a_late_request_to_refetch_costs_a_right_state_nothing() -> None:
    scene = await after_rounds(2, A, B)
    first = scene.commits[0].outer_digest
    assert first is not None
    plan = await scene.open_round(3, A, B)
    await scene.nodes[A].contribute(5.0)
    assert await scene.nodes[A].exchange.refetch(1, first)  # it holds round 2 by now
    await scene.nodes[B].contribute(5.0)
    await asyncio.sleep(1)
    await scene.nodes[A].exchange.apply(scene.close_round(plan, void=(0,)))
    void, taken = plan.slices
    owed = scene.nodes[A].residual[void.start : void.start + void.num_elements]
    np.testing.assert_array_equal(owed, 5.0)  # the round was not dropped
    assert not scene.nodes[A].residual[taken.start : taken.start + taken.num_elements].any()
    await scene.stop()


@in_virtual_time
async def test_a_refetch_that_nobody_can_serve_lets_other_work_go_on() -> None:
    scene = await after_rounds(1, A, B)
    before, right = scene.nodes[A].outer.digest, scene.commits[0]
    mistaken = Digest(b"x" * 32)
    scene.commits[0] = replace(right, outer_digest=mistaken)
    assert not await scene.nodes[A].exchange.refetch(1, mistaken)
    assert scene.nodes[A].outer.digest == before
    assert not scene.nodes[A].exchange.waiting_for()
    scene.commits[0] = right  # the nodes have agreed anew, so the request is void
    assert await scene.nodes[A].exchange.refetch(1, mistaken)
    assert scene.nodes[A].outer.digest == before
    await committed_round(scene, 2, A, B)
    await scene.stop()


@in_virtual_time
async def test_a_node_brings_its_own_commits_before_it_gives_its_state_up() -> None:
    """The coordinator lists another commit than ours; once it has been given ours, it lists that."""
    scene = await after_rounds(2, A, B)
    ours = list(scene.commits)
    void = replace(
        ours[1],
        slices=tuple(
            replace(s, digest=None, contributors=(), holder_ids=()) for s in ours[1].slices
        ),
        outer_digest=ours[1].base_digest,
    )
    later = replace(void, round=3, base_digest=ours[1].base_digest)
    scene.commits = [ours[0], void, later]
    honest = scene.take_back

    async def take_back(after_round: int) -> bool:
        scene.commits = list(ours)
        return await honest(after_round)

    catch_up = scene.nodes[A].exchange._catch_up
    catch_up._bring_back = take_back
    before = scene.nodes[A].outer.position
    await scene.nodes[A].exchange.catch_up(3)
    assert scene.brought_after == [1]
    assert scene.nodes[A].outer.position == before
    await scene.stop()


@in_virtual_time
async def test_a_node_that_is_to_fetch_another_state_brings_its_own_commits_first() -> None:
    scene = await after_rounds(2, A, B)
    ours = list(scene.commits)
    scene.commits = ours[:1]  # the coordinator goes on from an older copy
    honest = scene.take_back

    async def take_back(after_round: int) -> bool:
        scene.commits = list(ours)
        return await honest(after_round)

    scene.nodes[A].exchange._catch_up._bring_back = take_back
    before = scene.nodes[A].outer.position
    assert ours[0].outer_digest is not None
    assert await scene.nodes[A].exchange.refetch(1, ours[0].outer_digest)
    assert scene.brought_after == [1]
    assert scene.nodes[A].outer.position == before
    await scene.stop()
