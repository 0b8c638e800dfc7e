"""One round between a few nodes: contribute, reduce, hold, and what peers may not do."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from node.disk.history import History
from node.disk.snapshot_folder import SnapshotFolder
from node.exchange.giving import KEPT_ROUNDS, HeldResults
from node.exchange.peers import (
    Admission,
    TransferRefusedError,
    WantChunk,
    WantInput,
    WantManifest,
    WantResult,
)
from node.exchange.state.chunks import Manifest
from node.exchange.state.on_disk import StateOnDisk
from protocol.wire.findings import EquivocationSeen, ResultRefused
from protocol.wire.messages import Held, ParticipantsDeparted, Reduced
from protocol.wire.payload import Payload, PayloadHeader
from protocol.wire.rounds import BLOCK, Digest, NodeId, cut_into_slices
from tests.unit.exchange_scene import (
    COMMIT_SECONDS,
    CONTRIBUTE_SECONDS,
    NUM_ELEMENTS,
    A,
    B,
    C,
    Node,
    Scene,
    contribution_of,
    in_virtual_time,
    plan_for,
    result_of,
)

VALUES = np.ones(BLOCK, dtype=np.float32)


def encoded_by(node: Node) -> list[int]:
    """The slices that a node has encoded, in their order."""
    pending = node.outer.owing.pending
    assert pending is not None
    return list(pending.encoded)


@pytest.mark.parametrize("codec", ["int4", "ec2", "topk64"])
@in_virtual_time
async def test_everyone_holds_the_same_results_and_applies_them_to_the_same_bits(
    codec: str,
) -> None:
    scene = await Scene.of(A, B, C, codec=codec)
    plan = await scene.open_round(1, A, B, C)
    for place, node in enumerate(scene.nodes.values()):
        await node.contribute(np.sin(np.arange(3 * BLOCK, dtype=np.float32) + place))
    await asyncio.sleep(1)
    for node in scene.nodes.values():
        assert len(node.reported(Held, 1)) == 3
    commit = scene.close_round(plan)
    for node in scene.nodes.values():
        await node.exchange.apply(commit)
    assert len({node.outer.digest for node in scene.nodes.values()}) == 1
    assert asyncio.get_running_loop().time() == 1  # what was pushed is not waited for again
    await scene.stop()


@pytest.mark.parametrize("heard", ["as it comes", "by the list"])
@in_virtual_time
async def test_auditors_get_what_a_result_was_made_of_however_its_reducer_heard_of_the_commit(
    heard: str,
) -> None:
    scene = await Scene.of(A, B, is_audited=True)
    plan = await scene.open_round(1, A, B)
    for node in scene.nodes.values():
        await node.contribute(1.0)
    await asyncio.sleep(1)
    commit, exchange = scene.close_round(plan), scene.nodes[A].exchange
    # With a restart of the coordinator behind it, a node that attaches last is told a number alone.
    await (exchange.apply(commit) if heard == "as it comes" else exchange.catch_up(1))
    assert scene.nodes[A].outer.round == 1
    outcome = next(s for s, p in zip(commit.slices, plan.slices, strict=True) if p.reducer_id == A)
    for contributor, digest in zip(outcome.contributors, outcome.contributions, strict=True):
        want = WantInput(
            round=1,
            slice_index=outcome.index,
            contributor_id=contributor.node_id,
            digest=digest,
        )
        assert await exchange.supply(B, want) is not None, contributor.node_id
    await scene.stop()


@in_virtual_time
async def test_ones_own_slice_is_encoded_last_and_not_all_begin_with_the_same_reducer() -> None:
    scene = await Scene.of(A, B, C)
    await scene.open_round(1, A, B, C)
    encoded = {}
    for node_id, node in scene.nodes.items():
        await node.contribute(1.0)
        encoded[node_id] = encoded_by(node)
    assert encoded == {A: [1, 2, 0], B: [2, 0, 1], C: [0, 1, 2]}
    await scene.stop()


@in_virtual_time
async def test_a_round_that_is_opened_anew_begins_with_nothing_pending() -> None:
    scene = await Scene.of(A, B, C)
    await scene.open_round(1, A, B, C)
    await scene.nodes[A].contribute(1.0)
    commit = scene.close_round(await scene.open_round(1, A, B, C))
    await scene.nodes[A].exchange.apply(commit)
    assert not scene.nodes[A].residual.any()
    await scene.stop()


@in_virtual_time
async def test_each_reducers_first_slice_goes_before_any_second_one() -> None:
    scene = await Scene.of(A, B)
    slices = cut_into_slices(NUM_ELEMENTS, (A, B), least_elements=BLOCK)
    assert [part.reducer_id for part in slices] == [A, B, B]
    for node_id, order in ((A, [1, 0, 2]), (B, [0, 1, 2])):
        node = scene.nodes[node_id]
        await node.exchange.open_round(plan_for(A, B, slices=slices))
        await node.contribute(1.0)
        assert encoded_by(node) == order
    await scene.stop()


@in_virtual_time
async def test_each_reducer_keeps_and_saves_what_its_own_results_rounded_away(
    tmp_path: Path,
) -> None:
    scene = await Scene.of(A, B, C, codec="int4")
    scene.nodes[B].exchange._disk = StateOnDisk(tmp_path, history=History(None))
    plan = await scene.open_round(1, A, B, C)
    for place, node in enumerate(scene.nodes.values()):
        await node.contribute(np.sin(np.arange(3 * BLOCK, dtype=np.float32) + place))
    await asyncio.sleep(1)
    commit = scene.close_round(plan)
    for place, node in enumerate(scene.nodes.values()):
        await node.exchange.apply(commit)
        kept = node.outer.owed().reducer_error
        assert kept is not None
        assert kept.keys() == {place * BLOCK} and kept[place * BLOCK].any()
    await scene.nodes[B].exchange.save()
    outer = scene.nodes[B].outer
    saved = SnapshotFolder(tmp_path).load(1, outer.digest)
    assert saved is not None and saved[1] is not None
    found, expected = saved[1].tensors(), outer.owed().tensors()
    assert found.keys() == expected.keys() == {"residual", f"reducer_error.{BLOCK}"}
    for name in found:
        np.testing.assert_array_equal(found[name], expected[name])
    with capture_logs() as logs:
        await scene.stop()
    left = [entry["elements"] for entry in logs if entry["event"] == "rounding error leaves"]
    assert left == [node.outer.owing.reducer_error.num_kept() for node in scene.nodes.values()]
    assert all(0 < elements <= BLOCK for elements in left)


@in_virtual_time
async def test_a_departure_heard_before_the_plan_is_not_waited_for() -> None:
    scene = await Scene.of(A, B, C)
    scene.nodes[A].exchange.tell(ParticipantsDeparted(round=1, node_ids=(C,)))
    await scene.open_round(1, A, B)  # C is gone: it opens nothing
    plan = await scene.open_round(1, A, B, C)
    for node_id in (A, B):
        await scene.nodes[node_id].contribute(1.0)
    await asyncio.sleep(1)
    (reduced,) = scene.nodes[A].reported(Reduced, 1)
    assert [c.node_id for c in reduced.contributors] == [A, B]
    assert not scene.nodes[B].reported(Reduced, 1)  # nobody told B
    assert plan.contribute_seconds == CONTRIBUTE_SECONDS
    await scene.stop()


@in_virtual_time
async def test_a_contribution_is_sent_again_until_its_reducer_has_opened_the_round() -> None:
    scene = await Scene.of(A, B)
    plan = await scene.open_round(1, A, B)
    await scene.nodes[B].exchange.stop()  # B has not heard of it yet
    await scene.nodes[A].contribute(1.0)
    await asyncio.sleep(5)
    await scene.nodes[B].exchange.open_round(plan)
    await scene.nodes[B].contribute(1.0)
    await asyncio.sleep(5)
    for node in scene.nodes.values():
        (reduced,) = node.reported(Reduced, 1)
        assert [c.node_id for c in reduced.contributors] == [A, B]
    await scene.stop()


@in_virtual_time
async def test_a_result_is_only_taken_from_its_reducer_and_as_the_plan_says() -> None:
    scene = await Scene.of(A, B, C)
    await scene.open_round(1, A, B, C)
    desk = scene.nodes[A].exchange
    right = result_of(VALUES, sender_id=B, index=1)

    def refused(why: str, sender: Any = B, **change: Any) -> None:
        with pytest.raises(TransferRefusedError, match=why):
            desk.admit(sender, replace(right.header, **change))

    desk.admit(B, right.header)
    refused("does not reduce", sender=C)
    refused("does not reduce", sender_id=C)
    refused("does not reduce", slice_index=0)
    refused("does not reduce", slice_index=7)
    refused("elements", start=0)
    refused("elements", num_elements=BLOCK - 1)
    refused("fp32/1", codec="int4/1")
    refused("no body", body_bytes=1 << 40)
    refused("not open", round=2)
    refused("run digest", run_digest=Digest(bytes(31) + b"x"))
    await scene.stop()


@in_virtual_time
async def test_a_contribution_is_only_taken_by_its_reducer_and_to_the_plans_fragment() -> None:
    scene = await Scene.of(A, B, C)
    await scene.open_round(1, A, B, C)
    desk = scene.nodes[A].exchange
    right = contribution_of(VALUES.tobytes(), sender_id=B, index=0).header
    desk.admit(B, right)
    for misplaced in (replace(right, fragment=1), replace(right, slice_index=1)):
        with pytest.raises(TransferRefusedError, match="does not reduce"):
            desk.admit(B, misplaced)
    await scene.stop()


@in_virtual_time
async def test_what_its_sender_has_not_signed_is_refused_before_its_body_is_read() -> None:
    scene = await Scene.of(A, B, C)
    await scene.open_round(1, A, B, C)
    exchange, unsigned = scene.nodes[A].exchange, result_of(VALUES, sender_id=B, index=1)
    exchange.admit(B, unsigned.header)  # this scene asks for no signatures
    exchange._donors = replace(exchange._donors, forgery=PayloadHeader.forgery)
    with pytest.raises(TransferRefusedError, match="is not signed"):
        exchange.admit(B, unsigned.header)
    await scene.stop()


@in_virtual_time
async def test_a_second_result_of_a_slice_is_refused_and_the_same_one_is_not() -> None:
    scene = await Scene.of(A, B, C)
    await scene.open_round(1, A, B, C)
    node, first = scene.nodes[A], result_of(VALUES, sender_id=B, index=1)
    await node.receive(B, first)
    await node.receive(B, first)
    with pytest.raises(TransferRefusedError, match="another result"):
        await node.receive(B, result_of(2 * VALUES, sender_id=B, index=1))
    assert scene.nodes[A].held(1) == [(1, first.digest)]
    await scene.stop()


@in_virtual_time
async def test_a_result_that_does_not_decode_is_not_held_and_the_coordinator_is_told_once() -> None:
    scene = await Scene.of(A, B, C)
    await scene.open_round(1, A, B, C)
    false = result_of(np.nan * VALUES, sender_id=B, index=1)
    for _ in range(2):
        with pytest.raises(TransferRefusedError, match="does not decode"):
            await scene.nodes[A].receive(B, false)
    ((_, told),) = scene.nodes[A].reports
    assert isinstance(told, ResultRefused)
    assert (told.slice_index, told.header) == (1, false.header.encode())
    await scene.stop()


@in_virtual_time
async def test_a_result_of_other_elements_or_codec_is_told_of_by_its_header_alone() -> None:
    scene = await Scene.of(A, B, C)
    await scene.open_round(1, A, B, C)
    node, right = scene.nodes[A], result_of(VALUES, sender_id=B, index=1)
    of_another = result_of(np.ones(2 * BLOCK, dtype=np.float32), sender_id=C, index=1)
    with pytest.raises(TransferRefusedError, match="c does not reduce slice 1"):
        await node.receive(C, of_another)
    assert not node.reports
    false = replace(right, header=replace(right.header, codec="int4/1"))
    for _ in range(2):
        with pytest.raises(TransferRefusedError, match="comes in fp32/1, not int4/1"):
            await node.receive(B, false)
    ((_, told),) = node.reports
    assert isinstance(told, ResultRefused) and told.digest == false.digest
    await node.receive(B, right)
    (_, equivocation), (_, held) = node.reports[1:]
    assert isinstance(equivocation, EquivocationSeen) and isinstance(held, Held)
    await scene.stop()


@in_virtual_time
async def test_what_was_admitted_is_refused_when_it_comes_after_the_round() -> None:
    scene = await Scene.of(A, B, C)
    await scene.open_round(1, A, B, C)
    node = scene.nodes[A]
    result = result_of(VALUES, sender_id=B, index=1)
    contribution = contribution_of(VALUES.astype("<f4").tobytes(), sender_id=B)
    under_way = [(node.exchange.admit(B, p.header), p) for p in (result, contribution)]
    await node.exchange.stop()
    for admission, payload in under_way:
        with pytest.raises(TransferRefusedError, match="round 1 is not open"):
            await admission.take(payload)
    assert not node.reports
    await scene.stop()


@in_virtual_time
async def test_a_push_that_breaks_off_after_the_commit_is_fetched_from_another_holder() -> None:
    """Waiting on for what will never come would cost this node the next round."""
    scene = await Scene.of(A, B, C)
    plan = await scene.open_round(1, A, B, C)
    scene.network.cut(A, C)
    for node in scene.nodes.values():
        await node.contribute(1.0)
    await asyncio.sleep(CONTRIBUTE_SECONDS + 1)  # C lacks A's slice, and A lacks C's
    commit = scene.close_round(plan)
    header = result_of(VALUES, sender_id=A).header
    admission = scene.nodes[C].exchange.admit(A, header)  # A's push has begun …
    applying = asyncio.create_task(scene.nodes[C].exchange.apply(commit))
    await asyncio.sleep(3)
    assert not applying.done()
    admission.end()  # … and breaks off
    await asyncio.sleep(1)
    assert applying.done()
    assert scene.nodes[C].outer.round == 1
    await scene.stop()


@in_virtual_time
async def test_a_broken_push_is_announced_to_its_receiver() -> None:
    scene = await Scene.of(A, B)
    await scene.open_round(1, A, B)
    told: list[NodeId] = []

    def admit(sender: NodeId, header: PayloadHeader) -> Admission:
        return Admission(take=_never, end=lambda: told.append(sender))

    scene.nodes[B].exchange.admit = admit  # type: ignore[method-assign]
    payload = Payload(header=result_of(VALUES, sender_id=A).header, body=bytes(4 * BLOCK))
    with pytest.raises(TransferRefusedError, match="damaged"):
        await scene.nodes[A].transport.push(B, payload, timeout_seconds=1)
    assert told == [A]
    await scene.stop()


async def _never(payload: Payload) -> bytes:
    raise AssertionError("it is damaged")


@pytest.mark.parametrize("after_seconds", [1, CONTRIBUTE_SECONDS + 1])
@in_virtual_time
async def test_stopping_leaves_no_task_behind(after_seconds: float) -> None:
    scene = await Scene.of(A, B, C)
    await scene.open_round(1, A, B, C)
    scene.network.cut(A, B)
    for node in scene.nodes.values():
        await node.contribute(1.0)
    await asyncio.sleep(after_seconds)  # contributions, then results are tried again
    assert len(asyncio.all_tasks()) > 1
    await scene.stop()
    assert asyncio.all_tasks() == {asyncio.current_task()}


@in_virtual_time
async def test_nobody_waits_for_a_snapshot_of_a_state_that_is_changing() -> None:
    scene = await Scene.of(A, B)
    desk = scene.nodes[A].exchange
    async with desk._lock:
        assert await desk.supply(B, WantManifest(oldest_round=0)) is None
    assert await desk.supply(B, WantManifest(oldest_round=1)) is None
    assert await desk.supply(B, WantManifest(oldest_round=0)) is not None
    async with desk._lock:  # what is served already is a copy
        assert await desk.supply(B, WantManifest(oldest_round=0)) is not None
    assert await desk.supply(B, WantResult(round=1, slice_index=0, digest=Digest(b""))) is None
    await scene.stop()


@in_virtual_time
async def test_a_node_with_a_folder_serves_its_files_and_locks_nothing(tmp_path: Path) -> None:
    scene = await Scene.of(A, B)
    desk = scene.nodes[A].exchange
    desk._disk = StateOnDisk(tmp_path, history=History(None))
    async with desk._lock:  # a round is being applied, and nothing is saved yet
        assert await desk.supply(B, WantManifest(oldest_round=0)) is None
    await desk.save()
    async with desk._lock:
        payload = await desk.supply(B, WantManifest(oldest_round=0, newest_round=0))
        assert payload is not None
        manifest = Manifest.from_body(payload.body)
        assert manifest.outer_digest == scene.nodes[A].outer.digest
        want = WantChunk(round=0, index=0, digest=manifest.chunk_digests[0])
        chunk = await desk.supply(B, want)
    assert chunk is not None
    assert chunk.body == scene.nodes[A].outer.snapshot().read(0, manifest.state_bytes)
    assert await desk.supply(B, WantManifest(oldest_round=1)) is None
    await scene.stop()


@in_virtual_time
async def test_a_damaged_file_is_not_served(tmp_path: Path) -> None:
    scene = await Scene.of(A, B)
    desk = scene.nodes[A].exchange
    desk._disk = StateOnDisk(tmp_path, history=History(None))
    await desk.save()
    _damage(tmp_path)
    assert await desk.supply(B, WantManifest(oldest_round=0)) is None
    await scene.stop()


def _damage(folder: Path) -> None:
    (path,) = folder.iterdir()
    content = bytearray(path.read_bytes())
    content[-2 * 4 * NUM_ELEMENTS - 1] ^= 1  # before what the node owes
    path.write_bytes(content)


def test_results_of_old_rounds_are_forgotten() -> None:
    held = HeldResults()
    for number in range(1, KEPT_ROUNDS + 3):
        held.hold(result_of(VALUES, sender_id=A, round=number))
    held.forget_old(KEPT_ROUNDS + 2)
    assert held.get(2, 0) is None
    assert held.get(3, 0) is not None


@in_virtual_time
async def test_after_three_rounds_the_tokens_of_who_never_gets_through_damp_no_mean() -> None:
    """Of three nodes with equal tokens: two thirds of the mean for three rounds, and then all of it."""
    scene = await Scene.of(A, B, C)
    for other in (A, B):
        scene.network.cut(C, other)
    moved = []
    for number in range(1, 6):
        plan = await scene.open_round(number, A, B, C)
        before = scene.nodes[A].parameters.copy()
        for node_id in (A, B, C):
            await scene.nodes[node_id].contribute(1.0)
        await asyncio.sleep(COMMIT_SECONDS)
        commit = scene.close_round(plan, void=[2])  # C's own slice: nobody else has its result
        scene.network.mend(C, A)
        for node_id in (A, B, C):
            await scene.nodes[node_id].exchange.apply(commit)
        scene.network.cut(C, A)
        scene.settle(A)
        moved.append(float((before - scene.nodes[A].parameters)[0]))
    assert moved == pytest.approx([2 / 3, 2 / 3, 2 / 3, 1, 1])
    assert len({node.outer.digest for node in scene.nodes.values()}) == 1
    assert scene.nodes[C].outer.owing.let_go_rounds > 0
    await scene.stop()


@in_virtual_time
async def test_what_ranks_hand_in_is_read_and_added_beside_the_control_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = await Scene.of(A)
    node = scene.nodes[A]
    owing, beside = node.outer.owing, [False]

    async def heavy(work: Any) -> Any:
        beside[0] = True
        try:
            return work()
        finally:
            beside[0] = False

    def noting(method: Any) -> Any:
        def called(*arguments: Any) -> Any:
            assert beside[0], f"{method.__name__} on the control loop"
            return method(*arguments)

        return called

    async def publish(fragment: int) -> bool:
        owing._published[:] = 5
        return True

    monkeypatch.setattr(node.exchange, "_heavy", heavy)
    for name in ("published_of", "add_published"):
        monkeypatch.setattr(owing, name, noting(getattr(owing, name)))
    await node.exchange.take_in(publish)
    assert (node.residual == -5).all()
    await scene.stop()


@in_virtual_time
async def test_results_of_another_plan_of_the_round_do_not_stand_in_the_way_of_the_new_ones() -> (
    None
):
    """A coordinator that started from a copy plans a round anew, without a node that never returns."""
    scene = await Scene.of(A, B, C)
    await scene.open_round(1, A, B, C)
    scene.network.cut(A, C)
    scene.network.cut(B, C)
    for node_id in (A, B):
        await scene.nodes[node_id].contribute(1.0)
    await asyncio.sleep(CONTRIBUTE_SECONDS + 1)  # results are made, and C is still sent them
    made = {n: scene.nodes[n].reported(Held, 1) for n in (A, B)}
    assert all(made.values())
    for node in scene.nodes.values():
        node.reports.clear()
    scene.network.mend(A, C)
    scene.network.mend(B, C)
    plan = await scene.open_round(1, A, B)
    for node_id in (A, B):
        await scene.nodes[node_id].contribute(2.0)
    await asyncio.sleep(1)
    commit = scene.close_round(plan)
    assert all(set(outcome.holder_ids) == {A, B} for outcome in commit.slices)
    for node_id in (A, B):
        await scene.nodes[node_id].exchange.apply(commit)
    assert scene.nodes[A].outer.digest == scene.nodes[B].outer.digest
    await scene.stop()
