"""What is on a node's disk leads to the newest state, to the bit, whenever the power goes."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from structlog.testing import capture_logs

from node.disk.history import SentLog
from node.disk.round_folder import LONGEST_SECONDS, DiskBudget
from node.disk.snapshot_folder import SnapshotFolder
from node.disk.snapshots import Owed, SnapshotWriting
from node.exchange import giving
from node.exchange.peers import WantManifest, WantResult
from protocol.errors import SystemRefusedError
from protocol.wire.rounds import Commit, ContributionDigest, NodeId, RoundSpan
from tests.unit.exchange_scene import NUM_ELEMENTS, A, B, Scene, in_virtual_time

Result = TypeVar("Result")


@pytest.fixture
def slow_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot only where nothing else will do."""
    monkeypatch.setattr(DiskBudget, "seconds_between", lambda *_: LONGEST_SECONDS)


async def swarm_on(folder: Path) -> Scene:
    """Two nodes with disks, each with a snapshot of round 0."""
    scene = await Scene.of(A, B, codec="int4", folder=folder)
    for node in scene.nodes.values():
        await node.exchange.save()
    return scene


async def trained(
    scene: Scene,
    number: int,
    *,
    by: tuple[NodeId, ...] = (A, B),
    void: tuple[int, ...] = (),
    settles: bool = True,
) -> Commit:
    """A round; what it leaves is on the disks of both nodes."""
    plan = await scene.open_round(number, *by)
    for place, node_id in enumerate(by):
        work = np.sin(np.arange(NUM_ELEMENTS, dtype=np.float32) * number + place)
        await scene.nodes[node_id].contribute(work)
    await asyncio.sleep(1)
    commit = scene.close_round(plan, void=void)
    for node in scene.nodes.values():
        await node.exchange.apply(commit)
        await (node.saved() if settles else node.exchange.save())
    scene.settle(A)
    return commit


def files(folder: Path, node_id: NodeId = A) -> list[str]:
    return sorted(path.name for path in (folder / node_id).iterdir() if path.name[0] != ".")


@pytest.mark.usefixtures("slow_disks")
@in_virtual_time
async def test_a_killed_node_goes_on_from_a_snapshot_and_the_results_after_it(
    tmp_path: Path,
) -> None:
    scene = await swarm_on(tmp_path)
    for number in (1, 2, 3):
        await trained(scene, number)
    before = scene.nodes[A].outer.snapshot()
    assert files(tmp_path) == [
        "round-00000000.safetensors",
        *(f"round-0000000{number}.results" for number in (1, 2, 3)),
    ]
    again = (await scene.add(A)).outer
    assert again.position == (3, before.outer_digest())
    np.testing.assert_array_equal(again.snapshot().parameters, before.parameters)
    np.testing.assert_array_equal(again.snapshot().momentum, before.momentum)
    assert not again.owed().residual.any()  # all of it was in contributions that were taken
    await trained(scene, 4)
    assert scene.nodes[A].outer.digest == scene.nodes[B].outer.digest
    await scene.stop()


@pytest.mark.usefixtures("slow_disks")
@in_virtual_time
async def test_what_no_round_has_taken_since_the_snapshot_is_still_owed(tmp_path: Path) -> None:
    scene = await swarm_on(tmp_path)
    await trained(scene, 1)
    await scene.nodes[A].exchange.save(is_last=True)
    owed = scene.nodes[A].residual
    assert owed.any()
    await trained(scene, 2, by=(B,))
    again = await scene.add(A)
    assert again.outer.round == 2
    assert files(tmp_path)[-2:] == ["round-00000001.safetensors", "round-00000002.results"]
    np.testing.assert_array_equal(again.residual, owed)
    await scene.stop()


@pytest.mark.usefixtures("slow_disks")
@in_virtual_time
async def test_inner_steps_that_a_round_did_not_take_are_on_the_disk_at_once(
    tmp_path: Path,
) -> None:
    scene = await swarm_on(tmp_path)
    await trained(scene, 1)
    assert files(tmp_path)[-1] == "round-00000001.results"
    commit = await trained(scene, 2, void=(0,))
    is_void = [outcome.digest is None for outcome in commit.slices]
    assert any(is_void) and not all(is_void)
    owed = scene.nodes[A].residual
    again = await scene.add(A)
    assert files(tmp_path)[-1] == "round-00000002.safetensors"
    np.testing.assert_array_equal(again.residual, owed)
    await trained(scene, 3)  # that takes them: results will do again
    assert files(tmp_path)[-1] == "round-00000003.results"
    await scene.stop()


@pytest.mark.usefixtures("slow_disks")
@in_virtual_time
async def test_a_node_reaches_back_as_far_as_snapshots_and_results_lead_and_forgets_what_is_undone(
    tmp_path: Path,
) -> None:
    scene = await swarm_on(tmp_path)
    for number in (1, 2, 3, 4):
        await trained(scene, number)
    exchange = scene.nodes[A].exchange
    disk = exchange._disk
    assert disk is not None
    assert disk.reach_back(4) == (RoundSpan(first=0, last=4),)
    (tmp_path / A / "round-00000002.results").unlink()
    assert disk.reach_back(4) == (RoundSpan(first=0, last=1),)
    await exchange.forget_after(1)
    assert files(tmp_path) == ["round-00000000.safetensors", "round-00000001.results"]
    assert disk.reach_back(1) == (RoundSpan(first=0, last=1),)
    await scene.stop()


class Gate:
    """Where a snapshot is written: it waits for the gate to be opened."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def __call__(self, work: Callable[[], Result]) -> Result:
        await self.open.wait()
        return work()


@in_virtual_time
async def test_a_snapshot_of_an_undone_round_that_is_still_being_written_does_not_stay(
    tmp_path: Path,
) -> None:
    scene = await swarm_on(tmp_path)
    node = scene.nodes[A]
    assert node.disk is not None
    node.disk._aside = gate = Gate()
    await trained(scene, 1, settles=False)
    going_back = asyncio.create_task(node.exchange.forget_after(0))
    await asyncio.sleep(1)
    gate.open.set()
    await going_back
    await asyncio.sleep(1)
    assert node.disk.snapshots.rounds() == [0]
    await scene.stop()


@in_virtual_time
async def test_a_snapshot_of_a_later_round_than_the_node_holds_is_not_served(
    tmp_path: Path,
) -> None:
    scene = await swarm_on(tmp_path)
    node = scene.nodes[A]
    assert node.disk is not None
    first = node.outer.snapshot()
    for number in (1, 2):
        await trained(scene, number)
    node.disk.save_whole(node.outer)
    newest = WantManifest(oldest_round=0)
    payload = await node.exchange.supply(B, newest)
    assert payload is not None and payload.header.round == 2
    node.exchange._donor.drop()
    node.outer.restore(first, None)
    payload = await node.exchange.supply(B, newest)
    assert payload is not None and payload.header.round == 0
    await scene.stop()


@pytest.mark.parametrize("void", [(), (0,)], ids=["due", "late work"])
@in_virtual_time
async def test_rounds_go_on_while_a_snapshot_is_written_and_leave_no_trace_in_it(
    tmp_path: Path, void: tuple[int, ...]
) -> None:
    scene = await swarm_on(tmp_path)
    node = scene.nodes[A]
    assert node.disk is not None
    node.disk._aside = gate = Gate()
    await trained(scene, 1, void=void, settles=False)
    state, owed = node.outer.snapshot(), node.outer.owed()
    for number in (2, 3):
        await trained(scene, number, settles=False)
    assert not node.exchange._lock.locked()
    assert node.disk.snapshots.rounds() == [0]
    assert files(tmp_path)[-3:] == [f"round-0000000{number}.results" for number in (1, 2, 3)]
    gate.open.set()
    await node.disk.settled()
    kept = node.disk.snapshots.load(1, state.outer_digest())
    assert kept is not None and kept[1] is not None
    np.testing.assert_array_equal(kept[0].parameters, state.parameters)
    np.testing.assert_array_equal(kept[0].momentum, state.momentum)
    for name, values in owed.tensors().items():
        np.testing.assert_array_equal(kept[1].tensors()[name], values)
    digest = node.outer.digest
    assert (await scene.add(A)).outer.position == (3, digest)
    await scene.stop()


@in_virtual_time
async def test_a_snapshot_that_has_no_room_beside_one_that_a_joiner_reads_waits_for_it(
    tmp_path: Path,
) -> None:
    scene = await swarm_on(tmp_path)
    disk = scene.nodes[A].disk
    assert disk is not None
    disk._budget = DiskBudget(most_bytes=1)  # not a byte beside what is kept
    await trained(scene, 1)
    served = [disk.snapshots.open(0)]
    with capture_logs() as told:
        await trained(scene, 2)
    assert "a snapshot waits for a joiner to have read the older one" in [e["event"] for e in told]
    assert disk.snapshots.rounds() == [1, 0]
    digest = scene.nodes[A].outer.digest
    assert (await scene.add(A)).outer.position == (2, digest)  # results lead there
    served.clear()
    await trained(scene, 3)
    disk = scene.nodes[A].disk
    assert disk is not None and disk.snapshots.rounds() == [3, 1]
    await scene.stop()


@pytest.mark.usefixtures("slow_disks")
@in_virtual_time
async def test_no_more_results_stay_than_peers_ask_for_or_the_older_snapshot_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(giving, "KEPT_ROUNDS", 3)
    scene = await swarm_on(tmp_path)
    await trained(scene, 1)
    for _ in range(2):
        await trained(scene, scene.nodes[A].outer.round + 1)
        await scene.nodes[A].exchange.save(is_last=True)
    for number in (4, 5, 6):
        await trained(scene, number)
    assert [name for name in files(tmp_path) if name.endswith("results")] == [
        f"round-0000000{number}.results" for number in (3, 4, 5, 6)
    ]
    await scene.stop()


@in_virtual_time
async def test_a_joiner_gets_the_snapshot_that_is_being_written_and_not_another_one(
    tmp_path: Path,
) -> None:
    scene = await swarm_on(tmp_path)
    node = scene.nodes[A]
    assert node.disk is not None
    node.disk._aside = gate = Gate()
    await trained(scene, 1, settles=False)
    writing = node.disk._writing
    assert writing is not None and writing.round == 1
    await trained(scene, 2, settles=False)
    async with node.exchange._lock:  # it needs nothing of what changes
        manifest = await node.exchange.supply(B, WantManifest(oldest_round=1))
    assert manifest is not None and manifest.header.round == 1
    gate.open.set()
    await node.disk.settled()
    assert node.disk.snapshots.rounds() == [1, 0]
    await scene.stop()


@pytest.mark.usefixtures("slow_disks")
@in_virtual_time
async def test_a_snapshot_behind_that_fails_is_raised_by_the_next_save_and_tried_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = await swarm_on(tmp_path)
    node = scene.nodes[A]
    assert node.disk is not None

    def full(*_: object, **__: object) -> Path:
        raise SystemRefusedError("cannot write it: No space left on device")

    with monkeypatch.context() as patched, capture_logs() as told:
        patched.setattr(SnapshotWriting, "write", full)
        await trained(scene, 1, void=(0,), settles=False)
        await asyncio.sleep(1)
        with pytest.raises(SystemRefusedError, match="No space left"):
            await node.exchange.save()
    assert "not saved" in [line["event"] for line in told]
    owed = node.residual
    await node.exchange.save(is_last=True)
    assert files(tmp_path)[-1] == "round-00000001.safetensors"
    np.testing.assert_array_equal((await scene.add(A)).residual, owed)
    await scene.stop()


@in_virtual_time
async def test_results_are_on_the_disk_where_a_snapshot_alone_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = await swarm_on(tmp_path)
    node = scene.nodes[A]

    def full(*_: object, **__: object) -> SnapshotWriting:
        raise SystemRefusedError("cannot write it: No space left on device")

    plan = await scene.open_round(1, A)
    await node.contribute(np.ones(NUM_ELEMENTS, dtype=np.float32))
    await asyncio.sleep(1)
    await node.exchange.apply(scene.close_round(plan))
    with monkeypatch.context() as patched:
        patched.setattr(SnapshotFolder, "begin", full)
        with pytest.raises(SystemRefusedError, match="No space left"):
            await node.exchange.save()
    assert files(tmp_path) == ["round-00000000.safetensors", "round-00000001.results"]
    assert node.exchange.is_durable
    assert (await scene.add(A)).outer.position == node.outer.position
    await scene.stop()


@pytest.mark.usefixtures("slow_disks")
@in_virtual_time
async def test_the_last_save_of_a_process_is_a_snapshot(tmp_path: Path) -> None:
    scene = await swarm_on(tmp_path)
    await trained(scene, 1)
    owed = scene.nodes[A].residual
    for _ in range(2):
        await scene.nodes[A].exchange.save(is_last=True)
    assert files(tmp_path)[-1] == "round-00000001.safetensors"
    again = await scene.add(A)
    assert again.outer.round == 1
    np.testing.assert_array_equal(again.residual, owed)
    await again.exchange.save()  # what comes to be owed without a round, as before a catch-up
    before = again.outer.owing.published_of(0)
    again.outer.owing._published[:] -= 1
    again.outer.owing.add_published(0, before)
    await again.exchange.save(is_last=True)
    owed = again.residual
    np.testing.assert_array_equal((await scene.add(A)).residual, owed)
    await scene.stop()


@in_virtual_time
async def test_a_process_that_never_came_to_anything_writes_nothing(tmp_path: Path) -> None:
    scene = await Scene.of(A, folder=tmp_path)
    await scene.nodes[A].exchange.save(is_last=True)
    assert not (tmp_path / A).exists()
    await scene.stop()


@pytest.mark.usefixtures("slow_disks")
@pytest.mark.parametrize("damaged", ["round-00000002.results", "round-00000002.safetensors"])
@in_virtual_time
async def test_damage_costs_what_comes_after_it_and_no_more(tmp_path: Path, damaged: str) -> None:
    scene = await swarm_on(tmp_path)
    for number in (1, 2, 3):
        await trained(scene, number)
        if number == 2 and damaged.endswith("safetensors"):
            for node in scene.nodes.values():
                await node.exchange.save(is_last=True)
    digest = scene.nodes[A].outer.digest
    path = tmp_path / A / damaged
    content = bytearray(path.read_bytes())
    content[-10] ^= 1
    path.write_bytes(content)
    again = await scene.add(A)
    assert again.outer.round == (1 if damaged.endswith("results") else 3)
    await again.exchange.catch_up(3)  # peers have the rest
    assert again.outer.digest == digest
    await scene.stop()


@pytest.mark.usefixtures("slow_disks")
@in_virtual_time
async def test_a_state_that_results_do_not_lead_to_is_saved_whole(tmp_path: Path) -> None:
    scene = await swarm_on(tmp_path)
    await trained(scene, 1)
    node = scene.nodes[A]
    assert node.disk is not None
    kept = node.disk.snapshots.load_newest(
        node.outer.snapshot().run_digest, node.outer.layout_digest
    )
    assert kept is not None and kept[0].round == 0
    changed = node.outer.snapshot()
    changed.parameters[:] += 1
    node.outer.restore(replace(changed, round=2), None)
    await node.exchange.save()
    assert "round-00000002.safetensors" in files(tmp_path)
    node.outer.restore(*kept)  # history was taken back
    await node.exchange.save()
    assert "round-00000002.safetensors" not in files(tmp_path)
    assert (await scene.add(A)).outer.round == 1  # by the results, which are still of history
    await scene.stop()


@pytest.mark.usefixtures("slow_disks")
@in_virtual_time
async def test_peers_get_old_results_from_the_disk_and_new_states_by_a_snapshot(
    tmp_path: Path,
) -> None:
    scene = await swarm_on(tmp_path)
    commits = [await trained(scene, number) for number in (1, 2, 3, 4)]
    desk = scene.nodes[A].exchange
    outcome = commits[0].slices[0]
    assert outcome.digest is not None
    assert desk._held.find(1, 0, outcome.digest) is None
    payload = await desk.supply(B, WantResult(round=1, slice_index=0, digest=outcome.digest))
    assert payload is not None and payload.digest == outcome.digest
    assert files(tmp_path)[0] == "round-00000000.safetensors"
    assert await desk.supply(B, WantManifest(oldest_round=5)) is None
    manifest = await desk.supply(B, WantManifest(oldest_round=4))
    assert manifest is not None and manifest.header.round == 4
    assert "round-00000004.safetensors" in files(tmp_path)
    await scene.stop()


@pytest.mark.usefixtures("slow_disks")
@in_virtual_time
async def test_a_node_behind_replays_what_its_own_disk_still_has(tmp_path: Path) -> None:
    scene = await swarm_on(tmp_path)
    for number in (1, 2, 3):
        await trained(scene, number)
    node = scene.nodes[A]
    digest = node.outer.digest
    assert node.disk is not None
    kept = node.disk.snapshots.load_newest(
        node.outer.snapshot().run_digest, node.outer.layout_digest
    )
    assert kept is not None
    node.outer.restore(*kept)
    await scene.nodes[B].transport.stop()  # nobody else has them
    await node.exchange.catch_up(3)
    assert node.outer.digest == digest
    await scene.stop()


@in_virtual_time
async def test_where_rounds_take_long_each_has_a_snapshot(tmp_path: Path) -> None:
    scene = await swarm_on(tmp_path)
    for number in (1, 2, 3):
        await trained(scene, number)
    assert [name for name in files(tmp_path) if name.endswith("safetensors")] == [
        "round-00000002.safetensors",
        "round-00000003.safetensors",
    ]
    await scene.stop()


@pytest.mark.usefixtures("slow_disks")
@in_virtual_time
async def test_results_that_lead_from_another_state_than_the_disk_has_are_not_enough(
    tmp_path: Path,
) -> None:
    """The disk has a state of round 1 that was wrong, and the node has fetched the right one since."""
    scene = await swarm_on(tmp_path)
    await trained(scene, 1)
    node = scene.nodes[A]
    right, owed = node.outer.snapshot(), node.outer.owed()
    wrong = node.outer.snapshot()
    wrong.parameters[:] += 1
    node.outer.restore(wrong, None)
    await node.exchange.save()
    node.outer.restore(right, owed)
    await trained(scene, 2)
    digest = node.outer.digest
    assert digest == scene.nodes[B].outer.digest
    again = await scene.add(A)
    assert again.outer.position == (2, digest)
    await scene.stop()


@pytest.mark.usefixtures("slow_disks")
@in_virtual_time
async def test_results_since_the_older_snapshot_stay_for_when_the_newer_one_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(giving, "KEPT_ROUNDS", 1)  # peers ask for no more
    scene = await swarm_on(tmp_path)
    for number in range(1, 6):
        await trained(scene, number)
        if number in (2, 4):
            await scene.nodes[A].exchange.save(is_last=True)
    assert [name for name in files(tmp_path) if name.endswith("safetensors")] == [
        "round-00000002.safetensors",
        "round-00000004.safetensors",
    ]
    sent = SentLog(tmp_path / f"{A}-sent")
    assert [number for number in range(1, 6) if sent.knows(number)] == [3, 4, 5]
    digest = scene.nodes[A].outer.digest
    path = tmp_path / A / "round-00000004.safetensors"
    content = bytearray(path.read_bytes())
    content[-10] ^= 1
    path.write_bytes(content)
    assert (await scene.add(A)).outer.position == (5, digest)
    await scene.stop()


@pytest.mark.usefixtures("slow_disks")
@in_virtual_time
async def test_a_killed_node_drops_nothing_for_a_round_that_it_was_only_said_to_be_in(
    tmp_path: Path,
) -> None:
    scene = await swarm_on(tmp_path)
    await trained(scene, 1)
    owed = Owed(residual=np.full(NUM_ELEMENTS, 3, dtype=np.float32))
    scene.nodes[A].outer.restore(scene.nodes[A].outer.snapshot(), owed)
    scene.nodes[A].outer.owing.holds_work = True
    await scene.nodes[A].exchange.save(is_last=True)
    plan = await scene.open_round(2, A, B)
    work = np.ones(NUM_ELEMENTS, dtype=np.float32)
    await scene.nodes[A].contribute(work)
    await scene.nodes[B].contribute(work)
    await asyncio.sleep(1)
    commit = scene.close_round(plan)
    first, second = commit.slices
    lie = replace(first, contributions=tuple(ContributionDigest(bytes(16)) for _ in "ab"))
    scene.commits[-1] = replace(commit, slices=(lie, second))
    await scene.nodes[B].exchange.apply(scene.commits[-1])
    scene.settle(B)
    again = await scene.add(A)
    await again.exchange.catch_up(2)
    assert again.outer.digest == scene.nodes[B].outer.digest
    assert (again.residual[: first.num_elements] == 3).all()
    assert not again.residual[first.num_elements :].any()
    await scene.stop()
