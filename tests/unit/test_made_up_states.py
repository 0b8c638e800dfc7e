"""A state that members agreed on and no training led to: nodes make theirs again before they believe it."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np

from node.disk.snapshots import Owed
from node.outer_state import outer_digest
from protocol.wire.rounds import Commit, Digest, NodeId
from tests.unit.exchange_scene import NUM_ELEMENTS, A, B, C, Scene, committed_round, in_virtual_time

ZEROS = np.zeros(NUM_ELEMENTS, dtype=np.float32)


async def two_rounds(folder: Path | None) -> Scene:
    """With a folder A has a snapshot of round 1, and the results of round 2."""
    scene = await Scene.of(A, B, C, folder=folder)
    for number in (1, 2):
        await committed_round(scene, number, A, B, C)
        if number == 1 and folder is not None:
            for is_last in (False, True):
                await scene.nodes[A].exchange.save(is_last=is_last)
    return scene


def made_up_by(scene: Scene, *liars: NodeId) -> Digest:
    """The liars hold another state of the newest round, and have the swarm agree on it."""
    for node_id in liars:
        outer = scene.nodes[node_id].outer
        snapshot = outer.snapshot()
        moved = replace(snapshot, parameters=snapshot.parameters + np.float32(7))
        outer.restore(moved, outer.owed())
    digest = scene.nodes[liars[0]].outer.digest
    if scene.commits:
        scene.commits[-1] = replace(scene.commits[-1], outer_digest=digest)
    return digest


@in_virtual_time
async def test_without_anything_to_replay_a_node_has_to_believe_the_swarm() -> None:
    scene = await two_rounds(None)
    made_up = made_up_by(scene, B, C)
    assert await scene.nodes[A].exchange.refetch(2, made_up)
    assert scene.nodes[A].outer.digest == made_up
    await scene.stop()


def test_a_node_that_can_replay_refuses_a_state_that_no_results_lead_to(tmp_path: Path) -> None:
    @in_virtual_time
    async def run() -> None:
        scene = await two_rounds(tmp_path)
        node = scene.nodes[A]
        node.outer.owing.residual.values[:] = 3  # owed since its snapshot
        before, owed = node.outer.digest, node.residual.copy()
        made_up = made_up_by(scene, B, C)
        for _ in range(2):  # asked again it answers the same, without making all of it again
            assert not await node.exchange.refetch(2, made_up)
            assert (node.outer.round, node.outer.digest) == (2, before)
        assert "made up" in node.exchange.refused
        assert node.exchange.waiting_for() == node.exchange.refused
        np.testing.assert_array_equal(node.residual, owed)
        await scene.stop()

    run()


def test_nor_does_it_leap_to_what_a_later_commit_is_made_on(tmp_path: Path) -> None:
    @in_virtual_time
    async def run() -> None:
        scene = await two_rounds(tmp_path)
        node = scene.nodes[A]
        before = node.outer.digest
        made_up = made_up_by(scene, B, C)
        later = Commit(round=3, fragment=0, base_digest=made_up, slices=(), outer_digest=made_up)
        scene.commits.append(later)
        for liar in (B, C):
            scene.nodes[liar].outer.apply(later, {})
        applying = asyncio.ensure_future(node.exchange.apply(later))
        await asyncio.sleep(60)
        assert not applying.done()
        assert (node.outer.round, node.outer.digest) == (2, before)
        assert "made up" in node.exchange.waiting_for()
        applying.cancel()
        await asyncio.gather(applying, return_exceptions=True)
        await scene.stop()

    run()


def test_a_node_whose_own_state_is_wrong_makes_it_again_and_asks_nobody(tmp_path: Path) -> None:
    @in_virtual_time
    async def run() -> None:
        scene = await two_rounds(tmp_path)
        node, right = scene.nodes[A], scene.nodes[B].outer.digest
        wrong = node.outer.snapshot()
        owed = Owed(residual=wrong.parameters + 1)
        node.outer.restore(replace(wrong, parameters=wrong.parameters + 7), owed)
        for peer in (B, C):
            scene.network.cut(A, peer)
        assert await node.exchange.refetch(2, right)
        assert node.outer.digest == right
        assert not node.residual.any(), "what was owed on the wrong state is none of this one's"
        assert not node.exchange.refused
        await scene.stop()

    run()


def test_where_a_result_is_missing_nothing_moves_and_all_stays_owed(tmp_path: Path) -> None:
    """The result of round 2 is here, that of round 3 nowhere."""

    @in_virtual_time
    async def run() -> None:
        scene = await two_rounds(tmp_path)
        await committed_round(scene, 3, A, B, C)
        node = scene.nodes[A]
        node.outer.owing.residual.values[:] = 3
        before, owed = node.outer.position, node.residual.copy()
        node.exchange._held.forget_from(3)
        for peer in (B, C):
            scene.network.cut(A, peer)
        assert not await node.exchange._catch_up._disbelieves(3, made_up_by(scene, B, C))
        assert node.outer.position == before
        np.testing.assert_array_equal(node.residual, owed)
        await scene.stop()

    run()


@in_virtual_time
async def test_first_weights_that_a_node_draws_itself_are_taken_from_nobody() -> None:
    scene = await Scene.of(A, B)
    node = scene.nodes[A]
    node.exchange._catch_up.own._first_state = lambda: ZEROS
    made_up = made_up_by(scene, B)
    assert not await node.exchange.refetch(0, made_up)
    assert node.outer.digest == outer_digest(ZEROS, ZEROS)
    assert "made up" in node.exchange.refused
    await scene.stop()
