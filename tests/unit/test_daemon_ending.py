"""How a node ends: with its run, by its owner, or by a fault; and what it leaves behind."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from structlog.testing import capture_logs

from node.disk.history import History
from node.disk.snapshot_folder import SnapshotFolder
from node.disk.snapshots import SnapshotWriting
from node.duties.work import FINISH_SECONDS
from node.exchange.state.on_disk import StateOnDisk
from node.heavy import in_thread
from node.stopping import NotSavedError
from protocol.errors import IncompleteError, SystemRefusedError
from protocol.wire.messages import (
    Applied,
    Reduced,
    RosterTold,
    RoundCommitted,
    RoundOpened,
    RulingsTold,
    RunFinished,
    Trained,
)
from protocol.wire.rounds import Commit, Digest, PeerAddress, RosterEntry, Slice, SliceOutcome
from tests.unit.daemon_scene import Life
from tests.unit.exchange_scene import A, B, in_virtual_time, plan_for
from tests.unit.rulings_scene import amendment


@in_virtual_time
async def test_a_node_that_is_behind_at_the_end_does_not_wait_for_ever() -> None:
    """The others leave when the run is finished, and with them everyone who has its final state."""
    async with Life() as life:
        life.link.commits = (
            Commit(
                round=1,
                fragment=0,
                base_digest=Digest(bytes(32)),
                slices=(),
                outer_digest=Digest(bytes(32)),
            ),
        )
        address = PeerAddress(public_key=bytes(32), multiaddrs=())
        member = RosterEntry(node_id=B, node_name="b", address=address)
        life.link.say(
            RosterTold(members=(member,)),
            RunFinished(round=1, outer_digest=Digest(bytes(32)), reason="done"),
        )
        assert life.running is not None
        with pytest.raises(IncompleteError, match=r"over \(done\).* holds round 0 of 1") as refusal:
            await asyncio.wait_for(life.running, FINISH_SECONDS + 10)
        assert refusal.value.exit_code == 74


@in_virtual_time
async def test_a_commit_that_nobody_supplies_does_not_keep_a_node_from_the_end() -> None:
    async with Life() as life:
        plan = await life.opened(1, seconds=60)
        commit = life.commit(plan)
        lost = replace(commit, slices=(replace(commit.slices[0], digest=Digest(b"x" * 32)),))
        life.link.commits = (lost,)
        life.link.say(RoundCommitted(commit=lost))
        await asyncio.sleep(600)
        assert life.daemon._duties.activity == "applying"
        life.link.say(RunFinished(round=1, outer_digest=Digest(bytes(32)), reason="done"))
        assert life.running is not None
        with pytest.raises(IncompleteError, match=r"over \(done\).* holds round 0 of 1") as refusal:
            await asyncio.wait_for(life.running, FINISH_SECONDS + 10)
        assert refusal.value.exit_code == 74


@in_virtual_time
async def test_a_node_that_is_behind_at_an_end_goes_on_when_the_run_is_extended() -> None:
    """It waited for the final state, which nobody may have any more once others have gone on from it."""
    async with Life() as life:
        life.link.say(RunFinished(round=1, outer_digest=Digest(bytes(32)), reason="done"))
        await asyncio.sleep(FINISH_SECONDS / 2)
        ruling = amendment(2, run__rounds=1000)
        life.link.say(RulingsTold(rulings=(ruling,), signatures=(b"",)))
        await asyncio.sleep(2 * FINISH_SECONDS)
        assert life.running is not None and not life.running.done()
        plan = replace(life.plan(1), num_rulings=1)
        life.link.say(RoundOpened(plan=plan))
        await asyncio.sleep(60)
        assert "train" in life.island.calls


@in_virtual_time
async def test_a_finished_run_is_left_once_and_with_everything_reported() -> None:
    life = Life()
    async with life:
        plan = await life.opened(1, seconds=60)
        life.link.say(
            RoundCommitted(commit=life.commit(plan, is_void=True)),
            RunFinished(round=1, outer_digest=life.outer.digest, reason="done"),
        )
        assert life.running is not None
        assert await life.running == "done"
    assert [number for number, _ in life.link.reported(Applied)] == [1]
    assert life.link.goodbyes == ["the run is finished"]
    assert life.island.ended == "the run is finished: done"
    await asyncio.sleep(60)
    assert life.link.num_attached == 1  # it does not come back as a ghost


@in_virtual_time
async def test_a_node_with_another_final_state_than_the_swarms_says_so_and_does_not_end_well() -> (
    None
):
    async with Life() as life:
        life.link.say(RunFinished(round=0, outer_digest=Digest(bytes(32)), reason="done"))
        assert life.running is not None
        with pytest.raises(IncompleteError, match="another state of round 0 than the swarm"):
            await asyncio.wait_for(life.running, FINISH_SECONDS + 10)


@in_virtual_time
async def test_a_run_that_the_coordinator_does_not_list_is_not_taken_for_held() -> None:
    """A coordinator that went back lists fewer rounds than it said the run had."""
    async with Life() as life:
        life.link.say(RunFinished(round=5, outer_digest=life.outer.digest, reason="done"))
        assert life.running is not None
        with pytest.raises(IncompleteError, match="holds round 0 of 5"):
            await asyncio.wait_for(life.running, FINISH_SECONDS + 10)


@pytest.mark.parametrize("seconds", [0.5, 3.0, 6.0, 7.5, 30.0])
def test_a_node_stopped_at_any_time_leaves_nothing_running(seconds: float) -> None:
    """While it starts, while it waits, while it trains, while it contributes, while it reduces."""

    @in_virtual_time
    async def stop() -> None:
        life = Life()
        running = asyncio.create_task(life.daemon.run())
        await asyncio.sleep(0)
        plan = plan_for(A, B, base_digest=life.outer.digest)
        life.link.say(RoundOpened(plan=plan))
        await asyncio.sleep(seconds)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert not life.island.is_running
        assert not life.transport._network._running
        assert life.link.num_attached <= 1
        assert life.link.goodbyes == ["stopped by its owner"] * life.link.num_attached

    stop()


@in_virtual_time
async def test_a_node_stopped_while_it_starts_lets_its_transport_end_what_it_began() -> None:
    ended = []

    async def start(handler: object) -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            await asyncio.sleep(1)  # as p2pd takes to end
            ended.append("p2pd")

    life = Life()
    life.transport.start = start  # type: ignore[method-assign]
    life.island.start = lambda: asyncio.sleep(1e6)  # which is cancelled at once
    running = asyncio.create_task(life.daemon.run())
    await asyncio.sleep(2)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert ended == ["p2pd"]


@in_virtual_time
async def test_an_island_that_does_not_start_takes_the_transport_down_with_it() -> None:
    life = Life()
    life.island.fault = SystemRefusedError("no such device")
    start = life.transport.start

    async def start_slowly(handler: Any) -> None:
        await asyncio.sleep(5)
        await start(handler)

    life.transport.start = start_slowly  # type: ignore[method-assign]
    with pytest.raises(SystemRefusedError, match="no such device"):
        await life.daemon.run()
    assert not life.transport._network._running
    assert asyncio.all_tasks() == {asyncio.current_task()}


@in_virtual_time
async def test_a_node_that_fails_says_goodbye_so_that_nobody_waits_for_its_lease() -> None:
    async with Life() as life:

        async def fail(fragment: int) -> None:
            raise SystemRefusedError("the rank died")

        life.island.publish = fail
        life.link.say(RoundOpened(plan=life.plan(1)))
        assert life.running is not None
        with pytest.raises(SystemRefusedError, match="the rank died"):
            await asyncio.wait_for(life.running, 60)
        assert len(life.link.goodbyes) == 1


async def test_heavy_work_in_a_thread_has_ended_when_its_cancellation_has() -> None:
    """Shared memory is freed next: a thread that still writes to it would crash the process."""
    begun, may_end, is_done = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        may_end.wait()
        is_done.set()

    task = asyncio.create_task(in_thread(work))
    await asyncio.to_thread(begun.wait)
    for _ in range(3):  # an impatient owner
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert is_done.is_set()


class FullDisk(SnapshotFolder):
    def begin(self, *_: Any, **__: Any) -> SnapshotWriting:
        raise SystemRefusedError("cannot write it: No space left on device")


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_node_that_cannot_save_says_so_at_once_and_ends_with_the_round_or_alone_before_it(
    tmp_path: Path, is_alone: bool
) -> None:
    """Alone it would leave two rounds that nobody holds, and only one can be taken back."""

    @in_virtual_time
    async def run() -> None:
        disk = StateOnDisk(tmp_path, history=History(None))
        disk.snapshots = FullDisk(tmp_path)
        async with Life(disk=disk) as life:
            assert life.running is not None
            plan = await life.opened(1, seconds=60)
            with capture_logs() as told:
                life.link.say(RoundCommitted(commit=life.commit(plan)))
                await asyncio.sleep(10)
            assert "not saved" in [line["event"] for line in told]
            assert not life.running.done()
            others = () if is_alone else (B,)
            plan = plan_for(A, *others, round=2, base_digest=life.outer.digest)
            life.link.say(RoundOpened(plan=plan))
            await asyncio.sleep(60)
            trained = [number for number, _ in life.link.reported(Trained)]
            assert trained == ([1] if is_alone else [1, 2])
            if not is_alone:
                assert not life.running.done()
                ((_, reduced),) = [each for each in life.link.reported(Reduced) if each[0] == 2]
                void = [outcome_of(each, None) for each in plan.slices]
                void[reduced.slice_index] = outcome_of(plan.slices[reduced.slice_index], reduced)
                commit = Commit(
                    round=2, fragment=0, base_digest=plan.base_digest, slices=tuple(void)
                )
                life.link.say(RoundCommitted(commit=commit))
                await asyncio.sleep(60)
            assert [number for number, _ in life.link.reported(Applied)] == [1]
            assert life.running.done()
            with pytest.raises(SystemRefusedError, match="No space left"):
                await life.running
            assert life.link.goodbyes == ["stopped by an error, which its log tells"]
            assert "No space left" in life.island.ended, "a loop here is told what the log tells"

    run()


@pytest.mark.parametrize("is_round_in_flight", [True, False])
def test_a_node_that_leaves_in_order_and_cannot_save_what_it_holds_does_not_end_well(
    tmp_path: Path, is_round_in_flight: bool
) -> None:
    @in_virtual_time
    async def run() -> None:
        disk = StateOnDisk(tmp_path, history=History(None))
        async with Life(disk=disk) as life:
            assert life.running is not None
            plan = await life.opened(1, seconds=60)
            if is_round_in_flight:
                assert life.daemon.drain(30)
            disk.snapshots = FullDisk(tmp_path)
            life.link.say(RoundCommitted(commit=life.commit(plan)))
            why = "stopped by its owner, after the commit of round 1"
            if not is_round_in_flight:
                await asyncio.sleep(10)
                life.running.cancel()
                why = "stopped by its owner"
            with pytest.raises(NotSavedError) as refused:
                await asyncio.wait_for(life.running, 30)
            assert life.link.goodbyes == [why]
            assert str(refused.value).startswith(f"{why}, and what it held last is not saved: ")

    run()


@in_virtual_time
async def test_a_disk_that_refused_before_a_node_was_stopped_is_its_end_all_the_same() -> None:
    with TemporaryDirectory() as folder:
        disk = StateOnDisk(Path(folder), history=History(None))
        disk.snapshots = FullDisk(Path(folder))
        async with Life(disk=disk) as life:
            assert life.running is not None
            plan = await life.opened(1, seconds=60)
            life.link.say(RoundCommitted(commit=life.commit(plan)))
            await asyncio.sleep(10)
            plan = plan_for(A, B, round=2, base_digest=life.outer.digest)
            life.link.say(RoundOpened(plan=plan))
            await asyncio.sleep(5)
            assert life.daemon.drain(30)
            await asyncio.sleep(5)
            void = tuple(outcome_of(part, None) for part in plan.slices)
            commit = Commit(round=2, fragment=0, base_digest=plan.base_digest, slices=void)
            life.link.say(RoundCommitted(commit=commit))
            with pytest.raises(NotSavedError, match="No space left"):
                await asyncio.wait_for(life.running, 60)


def outcome_of(part: Slice, reduced: Reduced | None) -> SliceOutcome:
    return SliceOutcome(
        index=part.index,
        start=part.start,
        num_elements=part.num_elements,
        digest=None if reduced is None else reduced.digest,
        contributors=() if reduced is None else reduced.contributors,
        contributions=() if reduced is None else reduced.contributions,
        holder_ids=() if reduced is None else (A,),
    )
