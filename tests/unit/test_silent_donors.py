"""Donors that take a request and send nothing: what they cost a round, an offer and a joiner."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from node.exchange.peers import Waits, Want, WantChunk, WantResult
from protocol.wire.messages import Held, ResultOffered
from protocol.wire.payload import Payload
from protocol.wire.rounds import BLOCK, Commit, NodeId
from tests.unit.download_scene import (
    NUM_CHUNKS,
    DonorNode,
    DownloadScene,
    Supply,
    assert_is,
    small_chunks,
    state_at,
)
from tests.unit.exchange_scene import A, B, C, Node, Scene, in_virtual_time, result_of

WAITS = Waits()

__all__ = ["small_chunks"]

D = NodeId("d")
RESULT_BYTES = 4 * BLOCK  # as fp32
NUM_SLICES = 3


def now() -> float:
    return asyncio.get_running_loop().time()


async def never() -> None:
    await asyncio.Event().wait()


class Swarm:
    """B, C and D hold the results of each round, and A has none of them."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.silent: set[NodeId] = set()
        self.asked: Counter[NodeId] = Counter()

    @classmethod
    async def begin(cls) -> "Swarm":
        swarm = cls(await Scene.of(A, B, C, D))
        for node_id in (B, C, D):
            swarm._watch(swarm.scene.nodes[node_id])
        return swarm

    def _watch(self, node: Node) -> None:
        honest = node.exchange.supply

        async def supply(sender: NodeId, want: Want) -> Payload | None:
            assert isinstance(want, WantResult)
            self.asked[node.node_id] += 1
            if node.node_id in self.silent:
                await never()
            return await honest(sender, want)

        node.exchange.supply = supply  # type: ignore[method-assign]

    async def commit(self, number: int) -> Commit:
        plan = await self.scene.open_round(number, B, C, D)
        for node_id in (B, C, D):
            await self.scene.nodes[node_id].contribute(float(number))
        await asyncio.sleep(1)
        commit = self.scene.close_round(plan)
        for node_id in (B, C, D):
            await self.scene.nodes[node_id].exchange.apply(commit)
        self.scene.settle(B)
        return commit

    async def seconds_of_round(self, number: int) -> float:
        """How long A takes to get and apply a round's results."""
        commit = await self.commit(number)
        self.asked.clear()
        began_at = now()
        await self.scene.nodes[A].exchange.apply(commit)
        assert self.scene.nodes[A].outer.digest == self.scene.nodes[B].outer.digest
        return now() - began_at

    @property
    def num_received(self) -> float:
        counts: Any = self.scene.nodes[A].transport._counts
        _, num_bytes = counts.totals()["result"]
        assert num_bytes < (NUM_SLICES + 1) * RESULT_BYTES
        return num_bytes // RESULT_BYTES


@in_virtual_time
async def test_one_silent_holder_of_three_costs_a_second_and_the_next_round_nothing() -> None:
    swarm = await Swarm.begin()
    swarm.silent = {B}
    assert await swarm.seconds_of_round(1) == pytest.approx(WAITS.silent_seconds, abs=0.1)
    assert swarm.asked[B] == 1
    assert swarm.num_received == NUM_SLICES  # none came twice
    for number in (2, 3):
        assert await swarm.seconds_of_round(number) < 0.1
        assert swarm.asked[B] == 0
    await asyncio.sleep(WAITS.asked_last_seconds)
    swarm.silent = set()
    assert await swarm.seconds_of_round(4) < 0.1
    assert swarm.asked[B] == 1  # it has had its time
    await swarm.scene.stop()


@in_virtual_time
async def test_two_silent_holders_of_three_cost_two_seconds_at_most() -> None:
    swarm = await Swarm.begin()
    swarm.silent = {B, C}
    assert await swarm.seconds_of_round(1) <= 2 * WAITS.silent_seconds + 0.1
    assert swarm.num_received == NUM_SLICES
    assert await swarm.seconds_of_round(2) < 0.1
    await swarm.scene.stop()


@in_virtual_time
async def test_a_holder_that_sends_slowly_is_not_silent_and_nothing_is_asked_twice() -> None:
    swarm = await Swarm.begin()
    commit = await swarm.commit(1)
    for node_id in (B, C, D):
        swarm.scene.network.slow_down(node_id, RESULT_BYTES / (0.8 * WAITS.overdue_seconds))
    await swarm.scene.nodes[A].exchange.apply(commit)
    assert swarm.asked.total() == NUM_SLICES
    for node_id in (B, C, D):
        swarm.scene.network.slow_down(node_id, 1e9)
    await swarm.seconds_of_round(2)
    assert swarm.asked[B] > 0  # nor is it asked last afterwards
    await swarm.scene.stop()


@in_virtual_time
async def test_an_offered_result_does_not_wait_for_its_silent_holder() -> None:
    swarm = await Swarm.begin()
    await swarm.scene.open_round(1, A, B, C)
    result = result_of(1.0 * swarm.scene.nodes[A].parameters[:BLOCK], sender_id=B, index=1)
    await swarm.scene.nodes[C].receive(B, result)
    swarm.silent = {B}
    exchange = swarm.scene.nodes[A].exchange
    exchange.tell(ResultOffered(round=1, slice_index=1, digest=result.digest, holder_ids=(B, C)))
    await asyncio.sleep(WAITS.silent_seconds + 0.1)
    held = [Held(slice_index=1, digest=result.digest)]
    assert swarm.scene.nodes[A].reported(Held, 1) == held
    swarm.silent = set()
    await asyncio.sleep(30)
    assert swarm.scene.nodes[A].reported(Held, 1) == held  # once
    await swarm.scene.stop()


def fall_silent(donor: DonorNode, *, for_seconds: float | None = None) -> None:
    """The donor gives its manifest, and no chunk; or only after a while."""

    async def supply(want: Want, honestly: Supply) -> Payload | None:
        if isinstance(want, WantChunk):
            if for_seconds is None:
                await never()
            else:
                await asyncio.sleep(for_seconds)
        return await honestly(want)

    donor.misbehave = supply


@in_virtual_time
@pytest.mark.usefixtures("small_chunks")
async def test_a_silent_donor_of_chunks_costs_a_joiner_a_second() -> None:
    scene = DownloadScene()
    for name in "abc":
        await scene.add(name, state_at(7))
    fall_silent(scene.donors[A])
    assert_is(await scene.fetch(await scene.joiner()), state_at(7))
    assert now() < WAITS.silent_seconds + 0.5
    assert scene.chunks_given() == Counter(range(NUM_CHUNKS))


@in_virtual_time
@pytest.mark.usefixtures("small_chunks")
async def test_the_only_donor_may_be_silent_for_longer_than_a_second() -> None:
    scene = DownloadScene()
    await scene.add("a", state_at(7))
    fall_silent(scene.donors[A], for_seconds=5.0)
    assert_is(await scene.fetch(await scene.joiner()), state_at(7))
    assert scene.chunks_given() == Counter(range(NUM_CHUNKS))
