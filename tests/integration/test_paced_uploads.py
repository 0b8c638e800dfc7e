"""Two libp2p transports, one of which may not upload faster than its owner said."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from benchmarks.wire.paced_uploads import PACED_SHARE, UPLINK_MBIT
from node.exchange.peers import Limits
from node.exchange.transport.libp2p import Libp2pTransport
from protocol.trust.identity import Identity
from protocol.wire.payload import WireCounts
from protocol.wire.vitals import NO_UPLOAD, UploadPace
from tests.integration.transport_peers import Peer, introduce, make_payload, want

ROOT = Path(__file__).parent.parent.parent

MEGABIT = 1e6 / 8
SECONDS = 60.0

StartPeer = Callable[[float | None, Limits], Awaitable[Peer]]


@pytest.fixture
async def start_peer() -> AsyncIterator[StartPeer]:
    transports = []

    async def start(rate: float | None, limits: Limits) -> Peer:
        identity, counts = Identity.generate(), WireCounts()
        transport = Libp2pTransport(
            identity=identity, counts=counts, limits=limits, max_upload_bytes_per_second=rate
        )
        transports.append(transport)
        peer = Peer(identity.node_id, identity.public_key, transport, counts)
        await transport.start(peer.desk)
        return peer

    yield start
    for transport in transports:
        await transport.stop()


async def test_what_is_pushed_and_what_is_fetched_share_one_limit(start_peer: StartPeer) -> None:
    one = await start_peer(8 * MEGABIT, Limits())
    other = await start_peer(None, Limits())
    await introduce(one, other)
    one.desk.held = make_payload(body=bytes(1_000_000))
    began = time.monotonic()
    _, fetched = await asyncio.gather(
        one.transport.push(
            other.node_id, make_payload(body=bytes(1_000_000)), timeout_seconds=SECONDS
        ),
        other.transport.fetch(
            one.node_id,
            want(one.desk.held),
            max_body_bytes=1_000_000,
            timeout_seconds=SECONDS,
        ),
    )
    assert time.monotonic() - began > 1.8  # 2 MB at 8 Mbit/s
    assert fetched == one.desk.held
    assert len(other.desk.received) == 1


async def test_an_upload_says_that_its_owner_limits_it_while_it_lasts(
    start_peer: StartPeer,
) -> None:
    one = await start_peer(8 * MEGABIT, Limits())
    other = await start_peer(None, Limits())
    await introduce(one, other)
    assert one.transport.seen().upload_pace == NO_UPLOAD
    pushing = asyncio.create_task(
        one.transport.push(
            other.node_id, make_payload(body=bytes(1_000_000)), timeout_seconds=SECONDS
        )
    )
    limit = UploadPace(held_by="limit", bytes_per_second=8 * MEGABIT)
    async with asyncio.timeout(SECONDS):
        while one.transport.seen().upload_pace != limit:
            assert not pushing.done()
            await asyncio.sleep(0.01)
        await pushing
        while one.transport.seen().upload_pace != NO_UPLOAD:  # noqa: ASYNC110 (it tells nobody)
            await asyncio.sleep(0.01)


async def test_slow_uploads_in_both_ways_never_look_like_a_trickle_to_the_receiver(
    start_peer: StartPeer,
) -> None:
    """All at once, each would take 5.6 s; a receiver gives 4.8 s, and one of silence."""
    impatient = Limits(idle_seconds=1.0, floor_bytes_per_second=20_000)
    one = await start_peer(80_000, impatient)
    other = await start_peer(None, impatient)
    await introduce(one, other)
    one.desk.held = make_payload(body=bytes(56_000))
    bodies = [bytes([number]) * 56_000 for number in range(4)]
    pushes = [
        one.transport.push(other.node_id, make_payload(body=body), timeout_seconds=SECONDS)
        for body in bodies
    ]
    fetches = [
        other.transport.fetch(
            one.node_id, want(one.desk.held), max_body_bytes=56_000, timeout_seconds=SECONDS
        )
        for _ in range(4)
    ]
    await asyncio.gather(*pushes, *fetches)
    assert sorted(payload.body for _, payload in other.desk.received) == bodies


@pytest.mark.usefixtures("may_make_network_labs")
def test_beside_a_paced_upload_every_heartbeat_gets_through_a_slow_uplink() -> None:
    command = [sys.executable, "-m", "benchmarks.wire.paced_uploads", "--bytes", "3000000"]
    ran = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200
    )
    assert ran.returncode == 0, ran.stdout  # a heartbeat that is not answered is an error there
    *_, paced = json.loads(ran.stdout.splitlines()[-1])["rows"]
    assert paced["uplink_mbit"] < 1.05 * PACED_SHARE * UPLINK_MBIT
    assert paced["heartbeats"] > 10
    assert paced["worst_ms"] < 3000  # from one heartbeat to the next with the default lease
