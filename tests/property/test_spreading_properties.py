"""Whoever joins, lies, leaves or is cut off: who stays ends with the same bits, and no uplink carries all."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lab.simulation.virtual_time import run_in_virtual_time
from node.exchange.peers import Want, WantChunk, WantChunkMap
from protocol.terminal.console import bytes_in_words
from protocol.wire.payload import Payload
from protocol.wire.rounds import Way
from tests.unit.download_scene import Supply, assert_is, changed
from tests.unit.spreading_scene import (
    ALONE_SECONDS,
    CHUNK_BYTES,
    NUM_CHUNKS,
    Joiner,
    SpreadingScene,
    cut_to_scale,
)

FAULTS = (None, "lie", "hoard", "leave", "cut")


@pytest.fixture(autouse=True, scope="module")
def to_scale() -> object:
    with pytest.MonkeyPatch.context() as patch:
        cut_to_scale(patch)
        yield


def lie(joiner: Joiner) -> None:
    """It says that it has all, and gives other bytes for each chunk, sealed as if they were right."""

    async def supply(want: Want, honestly: Supply) -> Payload | None:
        payload = await honestly(want)
        if isinstance(want, WantChunkMap) and payload is not None:
            return changed(payload, b"\xff" * len(payload.body))
        if isinstance(want, WantChunk) and payload is not None:
            return changed(payload, payload.body[::-1])
        return payload

    joiner.misbehave = supply


def hoard(joiner: Joiner) -> None:
    """It says that it has nothing yet, or all but one, and gives nothing."""

    async def supply(want: Want, honestly: Supply) -> Payload | None:
        payload = await honestly(want)
        if isinstance(want, WantChunkMap) and payload is not None:
            return changed(payload, b"\xff" * (len(payload.body) - 1) + b"\x07")
        return None if isinstance(want, WantChunk) else payload

    joiner.misbehave = supply


async def spread(scene: SpreadingScene, faults: list[tuple[str | None, float]]) -> list[Joiner]:
    """Lets all joiners join; returns those without a fault, that have the state."""
    leaving: list[asyncio.Task[None]] = []
    joining: dict[Joiner, asyncio.Task[object]] = {}

    async def ends(joiner: Joiner, fault: str, after_seconds: float) -> None:
        await asyncio.sleep(after_seconds)
        if fault == "leave":
            scene.leave(joiner)
            joining[joiner].cancel()
        else:
            for other in scene.joiners:
                if other is not joiner:
                    scene.network.cut(joiner.node_id, other.node_id)

    for joiner, (fault, seconds) in zip(scene.joiners, faults, strict=True):
        joining[joiner] = asyncio.create_task(joiner.join(after_seconds=seconds / 4))
        match fault:
            case "lie":
                lie(joiner)
            case "hoard":
                hoard(joiner)
            case "leave" | "cut":
                leaving.append(asyncio.create_task(ends(joiner, fault, seconds)))
    stay = [
        joiner for joiner, (fault, _) in zip(scene.joiners, faults, strict=True) if fault != "leave"
    ]
    async with asyncio.timeout(30 * ALONE_SECONDS):
        await asyncio.gather(*(joining[joiner] for joiner in stay), *leaving)
    await asyncio.gather(*joining.values(), return_exceptions=True)
    return stay


faulty = st.tuples(st.sampled_from(FAULTS), st.floats(0.0, ALONE_SECONDS))


@given(faults=st.lists(faulty, min_size=1, max_size=5))
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_all_who_stay_end_with_the_same_bits(faults: list[tuple[str | None, float]]) -> None:
    async def run() -> None:
        scene = SpreadingScene(len(faults))
        await scene.start()
        for joiner in await spread(scene, faults):
            assert_is(joiner.states[-1], scene.state)
        await scene.stop()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_in_virtual_time(run())


@pytest.mark.parametrize(("num_joiners", "apart_seconds"), [(2, 0.0), (6, 0.0), (6, 10.0)])
def test_the_holder_gives_less_than_twice_the_state_however_many_join(
    num_joiners: int, apart_seconds: float
) -> None:
    async def run() -> None:
        scene = SpreadingScene(num_joiners)
        await scene.start()
        await spread(scene, [(None, 4 * n * apart_seconds) for n in range(num_joiners)])
        assert 1.0 <= scene.given(scene.holder) < 2.0
        came = sum(scene.given(node) for node in scene.nodes.values())
        assert came < 1.1 * num_joiners, "few chunks come twice"
        began_at = apart_seconds * (num_joiners - 1)
        assert all(j.ended_at is not None for j in scene.joiners)
        assert max(j.ended_at or 0.0 for j in scene.joiners) - began_at < 2.0 * ALONE_SECONDS
        await scene.stop()

    run_in_virtual_time(run())


def test_liars_leavers_and_cut_peers_do_not_make_the_holder_give_it_to_everybody() -> None:
    async def run() -> None:
        scene = SpreadingScene(7)
        await scene.start()
        faults: list[tuple[str | None, float]] = [(None, 0.0)] * 4
        await spread(scene, [*faults, ("lie", 0.0), ("leave", 20.0), ("cut", 30.0)])
        assert scene.given(scene.holder) < 2.7
        await scene.stop()

    run_in_virtual_time(run())


def test_nothing_goes_between_joiners_that_the_holder_carries() -> None:
    """Each chunk would take its uplink as well."""

    async def run() -> None:
        scene = SpreadingScene(2)
        await scene.start()
        one, other = sorted(joiner.node_id for joiner in scene.joiners)
        scene.network.cut(one, other)
        for node in scene.nodes.values():
            node.transport.set_ways((Way(one=one, other=other, through=(scene.holder.node_id,)),))
        await spread(scene, [(None, 0.0)] * 2)
        assert [scene.given(joiner) for joiner in scene.joiners] == [0.0, 0.0]
        assert scene.given(scene.holder) == 2.0
        await scene.stop()

    run_in_virtual_time(run())


def test_all_end_when_the_holder_leaves_after_it_has_given_each_chunk_once() -> None:
    async def run() -> None:
        scene = SpreadingScene(4)
        await scene.start()

        async def leave() -> None:
            while set.intersection(*map(missing, scene.joiners)):  # noqa: ASYNC110 (virtual time)
                await asyncio.sleep(0.1)
            scene.leave(scene.holder)

        leaving = asyncio.create_task(leave())
        await spread(scene, [(None, 0.0)] * 4)
        await leaving
        assert scene.given(scene.holder) < 1.5
        for joiner in scene.joiners:
            assert_is(joiner.states[-1], scene.state)
        await scene.stop()

    run_in_virtual_time(run())


def test_what_has_begun_to_come_goes_on_between_joiners_that_all_start_again(
    tmp_path: Path,
) -> None:
    """The holder is gone, and between them they have each chunk."""

    async def run() -> None:
        scene = SpreadingScene(3, tmp_path)
        await scene.start()
        joining = [asyncio.create_task(joiner.join()) for joiner in scene.joiners]
        while set.intersection(*map(missing, scene.joiners)):  # noqa: ASYNC110 (virtual time)
            await asyncio.sleep(0.1)
        scene.leave(scene.holder)
        lacked = [len(missing(joiner)) for joiner in scene.joiners]
        assert all(0 < num < NUM_CHUNKS for num in lacked)
        for task in joining:
            task.cancel()
        await asyncio.gather(*joining, return_exceptions=True)
        for joiner in scene.joiners:
            joiner.download = joiner.started()
            joiner.said.clear()
        async with asyncio.timeout(5 * ALONE_SECONDS):
            states = await asyncio.gather(*(joiner.join() for joiner in scene.joiners))
        for state in states:
            assert_is(state, scene.state)
        for joiner, num in zip(scene.joiners, lacked, strict=True):
            words = bytes_in_words(num * CHUNK_BYTES)
            assert any(said.startswith(f"{words} of {words} of the state") for said in joiner.said)
        await scene.stop()

    run_in_virtual_time(run())


def missing(joiner: Joiner) -> set[int]:
    if joiner.states:
        return set()
    return set(range(NUM_CHUNKS)) if joiner.arriving is None else joiner.arriving.missing
