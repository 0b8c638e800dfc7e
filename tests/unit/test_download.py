"""One state from several donors that lie, die, dawdle and move on, and over a restart of the joiner."""

import asyncio
import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from node.exchange import fetching
from node.exchange.peers import (
    TransferRefusedError,
    Waits,
    Want,
    WantChunk,
    WantChunkMap,
    WantManifest,
)
from node.exchange.state.donor import COPY_KEPT_SECONDS
from node.exchange.state.download import MOST_ASKED
from protocol.wire.payload import Payload
from tests.unit.download_scene import (
    CHUNK_BYTES,
    JOINER,
    NUM_CHUNKS,
    NUM_ELEMENTS,
    RUN,
    DonorNode,
    DownloadScene,
    Supply,
    assert_is,
    changed,
    manifest_of,
    small_chunks,
    state_at,
)
from tests.unit.exchange_scene import in_virtual_time

WAITS = Waits()

__all__ = ["small_chunks"]

pytestmark = pytest.mark.usefixtures("small_chunks")

SPEED = 10.0 * CHUNK_BYTES  # bytes a second


def now() -> float:
    return asyncio.get_running_loop().time()


async def scene_of(*names: str, folder: Path | None = None, speed: float = SPEED) -> DownloadScene:
    """Donors of round 7, all equally fast."""
    scene = DownloadScene(folder)
    for name in names:
        donor = await scene.add(name, state_at(7))
        scene.network.slow_down(donor.node_id, speed)
    return scene


def donors_of(scene: DownloadScene) -> list[DonorNode]:
    return list(scene.donors.values())


@in_virtual_time
async def test_all_donors_give_chunks_and_each_chunk_comes_once() -> None:
    scene = await scene_of("a", "b", "c", "d", "e")
    assert_is(await scene.fetch(await scene.joiner()), state_at(7))
    assert scene.chunks_given() == dict.fromkeys(range(NUM_CHUNKS), 1)
    shares = [donor.given.total() for donor in donors_of(scene)]
    assert shares == [5, 5, 5, 5, 0]  # four are enough; the fifth is not even asked
    (fifth,) = scene.donors["e"].asked  # type: ignore[index]
    assert isinstance(fifth, WantChunkMap), "it is asked only whether it fetches the state too"
    assert scene.said[0] == "8.0 kB of 8.0 kB of the state at round 7 from 4 nodes"
    assert scene.said[-1] == "4.8 kB of 8.0 kB of the state at round 7 from 4 nodes, about 0.2 s"


@in_virtual_time
async def test_no_more_is_under_way_than_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "MOST_AT_ONCE", 9)  # a state of 20 chunks is soon here
    monkeypatch.setattr(fetching, "MOST_FROM_ONE", 6)
    scene = await scene_of("a", "b", "c")
    await scene.fetch(await scene.joiner())
    assert scene.most_at_once == 9
    scene = await scene_of("a")
    await scene.fetch(await scene.joiner())
    assert scene.most_from_one == 6


@in_virtual_time
async def test_a_donor_that_is_busy_with_others_gives_what_it_can() -> None:
    scene = await scene_of("a")
    (donor,) = donors_of(scene)
    under_way = 0

    async def supply(want: Want, honestly: Supply) -> Payload | None:
        nonlocal under_way
        if under_way >= 3:
            raise TransferRefusedError("busy; go on with the transfers that you have")
        under_way += 1
        try:
            await asyncio.sleep(1)
            return await honestly(want)
        finally:
            under_way -= 1

    donor.misbehave = supply
    assert_is(await scene.fetch(await scene.joiner()), state_at(7))
    assert scene.chunks_given() == dict.fromkeys(range(NUM_CHUNKS), 1)
    assert scene.most_from_one > 3  # so it was refused …
    assert now() < WAITS.recruit_seconds  # … and did not give the donor up


@in_virtual_time
async def test_two_donors_halve_the_time_and_the_faster_gives_more() -> None:
    speed = CHUNK_BYTES / (WAITS.soon_seconds + 1)  # so that no donor gives more at a time

    async def seconds(*names: str, fast: str = "") -> float:
        scene = await scene_of(*names, speed=speed)
        if fast:
            scene.network.slow_down(scene.donors[fast].node_id, 4 * speed)  # type: ignore[index]
        began_at = now()
        await scene.fetch(await scene.joiner())
        if fast:
            given = {donor.node_id: donor.given.total() for donor in donors_of(scene)}
            assert given.pop(fast) > 3 * max(given.values())  # type: ignore[call-overload]
        return now() - began_at

    alone = await seconds("a")
    assert await seconds("a", "b") == pytest.approx(alone / 2, rel=0.2)
    assert await seconds("a", "b", fast="b") < alone / 3


@in_virtual_time
async def test_a_donor_that_dies_leaves_its_chunks_to_the_others() -> None:
    scene = await scene_of("a", "b")
    mortal = donors_of(scene)[0]
    mortal.after(3, lambda: scene.network.detach(mortal.transport))
    assert_is(await scene.fetch(await scene.joiner()), state_at(7))
    assert donors_of(scene)[1].given.total() >= NUM_CHUNKS - 3


@in_virtual_time
async def test_a_donor_that_stalls_does_not_hold_up_the_end() -> None:
    scene = await scene_of("a", "b")
    staller = donors_of(scene)[0]
    staller.after(3, lambda: scene.network.slow_down(staller.node_id, 0))
    assert_is(await scene.fetch(await scene.joiner()), state_at(7))
    assert now() < WAITS.overdue_seconds + 5  # far below what a chunk may take


@in_virtual_time
async def test_a_damaged_chunk_comes_from_another_and_its_donor_is_not_asked_again() -> None:
    scene = await scene_of("a", "b")
    donors_of(scene)[0].damage_chunk(2)
    assert_is(await scene.fetch(await scene.joiner()), state_at(7))
    liar, honest = donors_of(scene)
    assert honest.given[2] == 1
    asked = len(liar.asked)
    download = await scene.joiner()
    assert_is(await scene.fetch(download), state_at(7))
    assert len(liar.asked) > asked  # another process knows nothing of it …
    asked = len(liar.asked)
    await download.taken_over()
    assert_is(await scene.fetch(download), state_at(7))
    assert len(liar.asked) == asked  # … the same one does
    await asyncio.sleep(WAITS.distrust_seconds)
    await download.taken_over()
    assert_is(await scene.fetch(download), state_at(7))
    assert len(liar.asked) > asked  # for a while: its memory may have been at fault


@in_virtual_time
async def test_the_manifest_that_most_give_is_taken() -> None:
    scene = await scene_of("liar", "b", "c")
    donors_of(scene)[0].lie()
    assert_is(await scene.fetch(await scene.joiner()), state_at(7))
    assert not donors_of(scene)[0].given  # it cost nothing


@in_virtual_time
async def test_liars_in_the_majority_cost_nothing() -> None:
    scene = await scene_of("liar", "accomplice", "honest")
    for donor in donors_of(scene)[:2]:
        donor.lie()
    download = await scene.joiner()
    assert_is(await scene.fetch(download), state_at(7))
    assert donors_of(scene)[2].given == dict.fromkeys(range(NUM_CHUNKS), 1)
    assert not any(donor.given for donor in donors_of(scene)[:2])
    assert all(len(donor.asked) == 1 for donor in donors_of(scene)[:2])


@pytest.mark.parametrize("on_disk", [True, False])
@in_virtual_time
async def test_a_momentum_that_nothing_has_moved_is_not_fetched(
    tmp_path: Path, on_disk: bool
) -> None:
    scene = DownloadScene(tmp_path if on_disk else None)
    first = replace(state_at(0), momentum=np.zeros(NUM_ELEMENTS, np.float32))
    await scene.add("a", first)
    assert_is(await scene.fetch(await scene.joiner(), oldest_round=0), first)
    assert scene.chunks_given() == dict.fromkeys(range(NUM_CHUNKS // 2), 1)
    assert scene.said[0] == "4.0 kB of 4.0 kB of the state at round 0 from 1 node"


@in_virtual_time
async def test_a_state_of_zeros_takes_no_chunk() -> None:
    scene = DownloadScene()
    empty = np.zeros(NUM_ELEMENTS - 30, np.float32)  # a last chunk that is shorter
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.unit.download_scene.NUM_ELEMENTS", empty.size)
        await scene.add("a", replace(state_at(0), parameters=empty, momentum=empty))
        found = await scene.fetch(await scene.joiner(), oldest_round=0)
    assert found is not None
    assert not found.parameters.any()
    assert not scene.chunks_given()


@in_virtual_time
async def test_a_state_that_is_not_the_swarms_is_not_fetched_at_all() -> None:
    scene = await scene_of("a")
    others = [await scene.add(name, state_at(7, seed=3)) for name in ("b", "c")]
    others += [await scene.add(name, state_at(8)) for name in ("d", "e")]
    del scene.settled[8]  # a round that the coordinator does not know
    assert_is(await scene.fetch(await scene.joiner()), state_at(7))
    assert not any(donor.given for donor in others)  # although there are more of each


@pytest.mark.parametrize("is_empty", [False, True])
@in_virtual_time
async def test_of_a_node_that_waits_for_the_first_weights_as_well_nothing_is_said(
    is_empty: bool,
) -> None:
    scene = DownloadScene()
    zeros = np.zeros(NUM_ELEMENTS, np.float32)
    other = replace(state_at(0), momentum=zeros)
    await scene.add("a", replace(other, parameters=zeros) if is_empty else other)
    scene.settled[0] = state_at(7).outer_digest()
    with capture_logs() as logs:
        assert await scene.fetch(await scene.joiner(), oldest_round=0) is None
    assert (not is_empty) == any(each["event"] == "a state is not the swarm's" for each in logs)


@pytest.mark.parametrize("field", ["run_digest", "layout_digest", "round", "magic", "size"])
@in_virtual_time
async def test_a_manifest_of_something_else_is_refused(field: str) -> None:
    scene = await scene_of("b", "liar")
    manifest = manifest_of(state_at(7))
    bodies = {
        "run_digest": replace(manifest, run_digest=manifest.layout_digest).to_body(),
        "layout_digest": replace(manifest, layout_digest=RUN).to_body(),
        "round": replace(manifest, round=8).to_body(),
        "magic": b"x" + manifest.to_body()[1:],
        "size": manifest.to_body()[:-1],
    }

    async def supply(want: Want, honestly: Supply) -> Payload | None:
        payload = await honestly(want)
        is_manifest = payload is not None and isinstance(want, WantManifest)
        return changed(payload, bodies[field]) if is_manifest and payload else payload

    donors_of(scene)[1].misbehave = supply
    assert_is(await scene.fetch(await scene.joiner()), state_at(7))
    assert not donors_of(scene)[1].given


@in_virtual_time
async def test_who_gives_a_manifest_and_no_chunk_keeps_nobody_from_the_others() -> None:
    scene = await scene_of("a")
    teaser = await scene.add("b", state_at(8))  # which would be preferred, being newer

    async def supply(want: Want, honestly: Supply) -> Payload | None:
        return None if isinstance(want, WantChunk) else await honestly(want)

    teaser.misbehave = supply
    download = await scene.joiner()
    assert await scene.fetch(download) is None
    assert_is(await scene.fetch(download), state_at(7))


@in_virtual_time
async def test_donors_that_move_on_keep_serving_what_is_being_fetched() -> None:
    scene = await scene_of("a", "b", speed=CHUNK_BYTES / 10)
    fetching = asyncio.create_task(scene.fetch(await scene.joiner()))
    for number in range(8, 40):
        await asyncio.sleep(1)
        for donor in donors_of(scene):
            donor.states = [state_at(number - 1), state_at(number)]
    assert not fetching.done()
    assert_is(await fetching, state_at(7))
    assert scene.chunks_given() == dict.fromkeys(range(NUM_CHUNKS), 1)


@in_virtual_time
async def test_a_donor_that_serves_another_round_now_is_left_and_the_rest_goes_on() -> None:
    scene = await scene_of("a", "b")
    fickle = donors_of(scene)[0]

    def move_on() -> None:
        fickle.states = [state_at(8)]
        fickle.donor.drop()

    fickle.after(3, move_on)
    assert_is(await scene.fetch(await scene.joiner()), state_at(7))
    assert scene.chunks_given() == dict.fromkeys(range(NUM_CHUNKS), 1)


@in_virtual_time
async def test_who_comes_back_or_comes_later_is_recruited() -> None:
    scene = await scene_of("a", "b", speed=CHUNK_BYTES / 10)
    away = donors_of(scene)[0]
    scene.network.cut(JOINER, away.node_id)
    fetching = asyncio.create_task(scene.fetch(await scene.joiner()))
    await asyncio.sleep(1.5 * WAITS.recruit_seconds)
    scene.network.mend(JOINER, away.node_id)
    await asyncio.sleep(3 * WAITS.recruit_seconds)
    assert not fetching.done()
    assert away.given
    assert_is(await fetching, state_at(7))


@in_virtual_time
async def test_a_silent_peer_is_not_waited_for_when_others_give_the_manifest() -> None:
    scene = await scene_of("silent", "b")
    silent = asyncio.Event()

    async def supply(want: Want, honestly: Supply) -> Payload | None:
        await silent.wait()
        return None

    donors_of(scene)[0].misbehave = supply
    assert_is(await scene.fetch(await scene.joiner()), state_at(7))
    assert now() < WAITS.silent_seconds + NUM_CHUNKS * CHUNK_BYTES / SPEED + 1
    await donors_of(scene)[0].transport.stop()


@in_virtual_time
async def test_in_place_of_silent_peers_others_are_asked_after_a_second_each_and_not_all_of_them() -> (
    None
):
    names = [f"silent-{number:02}" for number in range(2 * MOST_ASKED)]
    scene = await scene_of(*names)
    silent = asyncio.Event()

    async def supply(want: Want, honestly: Supply) -> Payload | None:
        await silent.wait()
        return None

    for donor in donors_of(scene):
        donor.misbehave = supply
    fetching = asyncio.create_task(scene.fetch(await scene.joiner()))
    await asyncio.sleep(2.5 * WAITS.silent_seconds)
    assert sum(bool(donor.asked) for donor in donors_of(scene)) == 12  # four each second
    await asyncio.sleep(20 * WAITS.silent_seconds)
    assert sum(bool(donor.asked) for donor in donors_of(scene)) == MOST_ASKED
    fetching.cancel()
    silent.set()
    await asyncio.wait([fetching])


@in_virtual_time
async def test_who_was_silent_for_a_manifest_is_asked_last_and_is_waited_for_if_it_is_the_only_one() -> (
    None
):
    scene = await scene_of("a", "b")
    slow = donors_of(scene)[0]

    async def supply(want: Want, honestly: Supply) -> Payload | None:
        await asyncio.sleep(10)
        return await honestly(want)

    slow.misbehave = supply
    joiner = await scene.joiner()
    assert_is(await scene.fetch(joiner), state_at(7))
    began_at = now()
    assert joiner._trusted()[-1] == slow.node_id
    scene.network.cut(donors_of(scene)[1].node_id, JOINER)
    assert_is(await scene.fetch(joiner), state_at(7))
    assert now() > began_at + 10


@in_virtual_time
async def test_a_break_keeps_what_has_come() -> None:
    scene = await scene_of("a", "b")
    for donor in donors_of(scene):
        donor.after(4, lambda d=donor: scene.network.detach(d.transport))  # type: ignore[misc]
    download = await scene.joiner()
    assert await scene.fetch(download) is None
    before = scene.chunks_given().total()
    assert 0 < before < NUM_CHUNKS
    assert download._arrivals.current is not None
    num_missing = len(download._arrivals.current.missing)
    assert num_missing < NUM_CHUNKS
    for donor in donors_of(scene):
        donor.misbehave = None
        scene.network.attach(donor.transport)
    assert_is(await scene.fetch(download), state_at(7))
    assert scene.chunks_given().total() == before + num_missing
    # What was given to a link that then broke comes again, and nothing else.
    assert max(scene.chunks_given().values()) <= 3  # both broke with it
    assert scene.chunks_given().total() <= NUM_CHUNKS + 8


def files_in(folder: Path) -> list[Path]:
    return list(folder.iterdir())


async def interrupted(scene: DownloadScene, *, after_seconds: float) -> int:
    """Starts to fetch and is killed; returns how many bytes of chunks had come."""
    fetching = asyncio.create_task(scene.fetch(await scene.joiner()))
    await asyncio.sleep(after_seconds)
    fetching.cancel()
    await asyncio.gather(fetching, return_exceptions=True)
    await scene.transport.stop()
    return scene.counts.totals()["snapshot"][1]


@in_virtual_time
async def test_a_joiner_that_restarts_fetches_only_what_is_missing(tmp_path: Path) -> None:
    scene = await scene_of("a", "b", folder=tmp_path)
    first = await interrupted(scene, after_seconds=0.75)
    assert first > 5 * CHUNK_BYTES
    for donor in donors_of(scene):
        donor.states = [state_at(8), state_at(9)]  # still serves what it was fetched from
    download = await scene.joiner()
    found = await scene.fetch(download)
    assert_is(found, state_at(7))
    second = scene.counts.totals()["snapshot"][1]
    # Each time two manifests come as well; a chunk and a manifest have a header each.
    header = 200
    manifests = 2 * (len(manifest_of(state_at(7)).to_body()) + header)
    whole = NUM_CHUNKS * (CHUNK_BYTES + header)
    assert first + second < whole + 2 * manifests
    assert first + second > NUM_CHUNKS * CHUNK_BYTES
    assert second < whole - 5 * CHUNK_BYTES + manifests
    await download.taken_over()
    assert files_in(tmp_path) == []


@in_virtual_time
async def test_what_nobody_serves_any_more_is_given_up_for_a_newer_state(tmp_path: Path) -> None:
    scene = await scene_of("a", "b", folder=tmp_path)
    await interrupted(scene, after_seconds=0.75)
    for donor in donors_of(scene):
        donor.states = [state_at(12), state_at(13)]
    scene.settled[13] = state_at(13).outer_digest()
    await asyncio.sleep(2 * COPY_KEPT_SECONDS)
    download = await scene.joiner()
    found = await scene.fetch(download)
    assert_is(found, state_at(13))
    await download.taken_over()
    assert files_in(tmp_path) == []


@in_virtual_time
async def test_what_is_older_than_asked_for_is_not_gone_on_with(tmp_path: Path) -> None:
    scene = await scene_of("a", "b", folder=tmp_path)
    await interrupted(scene, after_seconds=0.75)
    for donor in donors_of(scene):
        donor.states.append(state_at(8))
    scene.settled[8] = state_at(8).outer_digest()
    assert_is(await scene.fetch(await scene.joiner(), oldest_round=8), state_at(8))


@in_virtual_time
async def test_what_has_come_waits_while_nobody_can_be_reached(tmp_path: Path) -> None:
    scene = await scene_of("a", "b", folder=tmp_path)
    await interrupted(scene, after_seconds=0.75)
    for donor in donors_of(scene):
        scene.network.cut(JOINER, donor.node_id)
    download = await scene.joiner()
    assert await scene.fetch(download) is None
    for donor in donors_of(scene):
        scene.network.mend(JOINER, donor.node_id)
        donor.given = Counter()
    assert_is(await scene.fetch(download), state_at(7))
    assert scene.chunks_given().total() < NUM_CHUNKS - 4


@in_virtual_time
async def test_damage_on_our_own_disk_is_mended_and_nobody_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = await scene_of("a", folder=tmp_path)
    download = await scene.joiner()
    times = itertools.count()

    def flip_once() -> None:
        (path,) = tmp_path.glob("*.arriving")
        content = bytearray(path.read_bytes())
        content[5 * CHUNK_BYTES] ^= 1
        path.write_bytes(content)

    async def supply(want: Want, honestly: Supply) -> Payload | None:
        if isinstance(want, WantChunk) and want.index == NUM_CHUNKS - 1 and next(times) == 0:
            flip_once()
        return await honestly(want)

    donors_of(scene)[0].misbehave = supply
    assert_is(await scene.fetch(download), state_at(7))
    assert scene.chunks_given()[5] == 2
    assert scene.chunks_given().total() == NUM_CHUNKS + 1
    assert NUM_ELEMENTS * 8 == NUM_CHUNKS * CHUNK_BYTES
