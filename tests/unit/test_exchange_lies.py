"""What a node tells the coordinator of peers that give different members different things."""

from dataclasses import replace

import numpy as np
import pytest

from node.exchange.peers import TransferRefusedError
from protocol.wire.findings import EquivocationSeen
from protocol.wire.messages import Reduced
from protocol.wire.payload import Payload, PayloadHeader
from protocol.wire.rounds import BLOCK
from tests.unit.exchange_scene import A, B, C, Scene, contribution_of, in_virtual_time, result_of

ONES = np.ones(BLOCK, dtype="<f4").tobytes()
TWOS = (2 * np.ones(BLOCK, dtype="<f4")).tobytes()


@in_virtual_time
async def test_a_reducer_that_is_given_two_contributions_tells_of_it_once() -> None:
    scene = await Scene.of(A, B, C)
    await scene.open_round(1, A, B, C)
    honest, lie = contribution_of(ONES, sender_id=B), contribution_of(TWOS, sender_id=B)
    await scene.nodes[A].receive(B, honest)
    for _ in range(2):
        with pytest.raises(TransferRefusedError, match="another contribution of b already"):
            await scene.nodes[A].receive(B, lie)
    (told,) = scene.nodes[A].reported(EquivocationSeen, 1)
    shown = {PayloadHeader.decode(encoded) for encoded in (told.one, told.other)}
    assert shown == {honest.header, lie.header}
    await scene.stop()


@in_virtual_time
async def test_who_holds_another_result_than_the_committed_one_tells_of_both() -> None:
    scene = await Scene.of(A, B, C)
    plan = await scene.open_round(1, A, B, C)
    shown = result_of(np.ones(BLOCK, dtype=np.float32), sender_id=C, index=2)
    kept = result_of(2 * np.ones(BLOCK, dtype=np.float32), sender_id=C, index=2)
    await scene.nodes[A].receive(C, shown)
    await scene.nodes[B].receive(C, kept)
    for node in scene.nodes.values():
        if node.node_id != C:  # which reduces nothing honestly
            await node.contribute(1.0)
    reports = scene.nodes[C].reports
    reports.append(
        (1, Reduced(slice_index=2, digest=kept.digest, contributors=(), contributions=()))
    )
    commit = scene.close_round(plan)
    outcomes = [
        replace(o, digest=kept.digest, holder_ids=(B,)) if o.index == 2 else replace(o, digest=None)
        for o in commit.slices
    ]
    await scene.nodes[A].exchange.apply(replace(commit, slices=tuple(outcomes)))
    (told,) = scene.nodes[A].reported(EquivocationSeen, 1)
    assert {told.one, told.other} == {shown.header.encode(), kept.header.encode()}
    await scene.stop()


@in_virtual_time
async def test_what_another_process_of_a_member_has_signed_or_for_another_plan_is_refused() -> None:
    scene = await Scene.of(A, B, C)
    await scene.open_round(1, A, B, C)
    honest = contribution_of(ONES, sender_id=B)
    with pytest.raises(TransferRefusedError, match="another process of b"):
        await scene.nodes[A].receive(B, _with(honest, process_id=5))
    with pytest.raises(TransferRefusedError, match="another plan of the round"):
        await scene.nodes[A].receive(B, _with(honest, plan_opened_at=5.0))
    await scene.nodes[A].receive(B, honest)
    assert not scene.nodes[A].reported(EquivocationSeen, 1)
    await scene.stop()


def _with(payload: Payload, **changes: object) -> Payload:
    header = replace(payload.header, **changes)  # type: ignore[arg-type]
    return Payload(header=header, body=payload.body)
