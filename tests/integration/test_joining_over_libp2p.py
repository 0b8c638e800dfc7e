"""A state fetched over libp2p, from donors' files into a file, with threads and real chunks."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from node.disk.snapshot_folder import OpenSnapshot, SnapshotFolder
from node.disk.snapshots import Owed, Snapshot
from node.exchange.fetching import Donors, Silences
from node.exchange.peers import Waits, Want, WantChunk, WantChunkMap, WantManifest
from node.exchange.state.chunks import CHUNK_BYTES, Manifest
from node.exchange.state.donor import Donor
from node.exchange.state.download import Download
from node.exchange.transport.libp2p import Libp2pTransport
from node.heavy import in_thread
from protocol.trust.identity import Identity
from protocol.wire.payload import Payload, WireCounts
from protocol.wire.rounds import Digest, NodeId
from tests.integration.transport_peers import Desk, Peer, introduce

RUN, LAYOUT = Digest(bytes(32)), Digest(bytes(31) + b"l")
NUM_ELEMENTS = 4_000_000
NUM_CHUNKS = Manifest.num_chunks(NUM_ELEMENTS)
ROUND = 5


class DonorDesk(Desk):
    """Serves a snapshot folder; counts chunks, and sees one go by."""

    def serve(self, node_id: NodeId, folder: SnapshotFolder) -> None:
        async def open_state(want: WantManifest) -> OpenSnapshot | None:
            return await in_thread(lambda: folder.open(ROUND)) if self.is_whole else None

        self.download: Download | None = None
        self.is_whole = True
        self.given: Counter[int] = Counter()
        self.has_given = asyncio.Event()
        self.donor = Donor(
            node_id=node_id,
            run_digest=RUN,
            layout_digest=LAYOUT,
            num_elements=NUM_ELEMENTS,
            oldest_round=lambda: ROUND,
            open_state=open_state,
            arriving=lambda: None if self.download is None else self.download.arriving,
            heavy=in_thread,
        )

    async def supply(self, sender: NodeId, want: Want) -> Payload | None:
        if isinstance(want, WantManifest):
            return await self.donor.manifest(want)
        if isinstance(want, WantChunkMap):
            return await self.donor.chunk_map(want)
        assert isinstance(want, WantChunk)
        payload = await self.donor.chunk(want)
        if payload is not None:
            self.given[want.index] += 1
            self.has_given.set()
        return payload

    @property
    def num_given(self) -> int:
        return self.given.total()


class Scene:
    """Donors and a joiner."""

    def __init__(self, state: Snapshot, folder: Path) -> None:
        self.state = state
        self.peers: list[Peer] = []
        self.transports: list[Libp2pTransport] = []
        self.desks: list[DonorDesk] = []
        self._folder = folder

    async def start(self, num_donors: int) -> None:
        source = SnapshotFolder(self._folder / "donor")
        source.save(self.state, Owed(residual=self.state.momentum))
        for _ in range(num_donors + 1):
            identity, counts, desk = Identity.generate(), WireCounts(), DonorDesk()
            transport = Libp2pTransport(identity=identity, counts=counts)
            desk.serve(identity.node_id, source)
            peer = Peer(identity.node_id, identity.public_key, transport, counts, desk)
            await transport.start(desk)
            self.peers.append(peer)
            self.transports.append(transport)
            self.desks.append(desk)
        await introduce(*self.peers)

    def download(self, place: int = 0) -> Download:
        others = tuple(peer.node_id for n, peer in enumerate(self.peers) if n != place)
        download = self.desks[place].download = Download(
            run_digest=RUN,
            layout_digest=LAYOUT,
            num_elements=NUM_ELEMENTS,
            heavy=in_thread,
            donors=Donors(
                node_id=self.peers[place].node_id,
                transport=self.transports[place],
                peers=lambda: others,
                silences=Silences(self.transports[place].round_trip_seconds, Waits()),
            ),
            folder=self._folder / f"joiner-{place}",
            say=lambda text: None,
        )
        self.desks[place].is_whole = False
        return download

    async def is_the_swarms(self, round: int, digest: Digest) -> bool:
        return (round, digest) == (ROUND, self.state.outer_digest())

    def kill(self, place: int) -> None:
        os.kill(self.transports[place]._running.daemon.pid, signal.SIGKILL)

    async def stop(self) -> None:
        for desk in self.desks:
            desk.donor.drop()
        for transport in self.transports:
            await transport.stop()


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    rng = np.random.default_rng(1)
    vectors = rng.standard_normal((2, NUM_ELEMENTS), dtype=np.float32)
    state = Snapshot(
        round=ROUND,
        run_digest=RUN,
        layout_digest=LAYOUT,
        parameters=vectors[0],
        momentum=vectors[1],
    )
    scene = Scene(state, tmp_path)
    yield scene
    await scene.stop()


def is_the_state(scene: Scene, found: Snapshot | None) -> bool:
    return found is not None and found.outer_digest() == scene.state.outer_digest()


async def test_a_state_comes_from_all_donors(scene: Scene) -> None:
    await scene.start(3)
    found = await scene.download().fetch(1, scene.is_the_swarms)
    assert is_the_state(scene, found)
    shares = [desk.num_given for desk in scene.desks[1:]]
    assert sum(shares) == NUM_CHUNKS
    assert min(shares) > 0
    sent, received = scene.peers[0].counts.totals()["snapshot"]
    assert 8 * NUM_ELEMENTS < received < 1.06 * 8 * NUM_ELEMENTS
    assert sent < 0.02 * received


async def test_a_donor_killed_in_the_middle_and_then_the_joiner_cost_no_correctness(
    scene: Scene,
) -> None:
    await scene.start(2)
    fetching = asyncio.create_task(scene.download().fetch(1, scene.is_the_swarms))
    await scene.desks[1].has_given.wait()
    scene.kill(1)
    async with asyncio.timeout(60):
        while scene.desks[2].num_given < NUM_CHUNKS // 2:  # noqa: ASYNC110 (over real sockets)
            await asyncio.sleep(0.005)
    fetching.cancel()
    await asyncio.gather(fetching, return_exceptions=True)
    before = scene.peers[0].counts.totals()["snapshot"][1]
    found = await scene.download().fetch(1, scene.is_the_swarms)  # as after a restart
    assert is_the_state(scene, found)
    again = scene.peers[0].counts.totals()["snapshot"][1] - before
    assert again < 8 * NUM_ELEMENTS - 2 * CHUNK_BYTES


async def test_all_joiners_end_though_the_holder_leaves_after_it_gave_each_chunk_once(
    scene: Scene,
) -> None:
    """Joiners 0, 1 and 2, and the holder, whose process is killed."""
    await scene.start(3)
    holder, joiners = scene.desks[3], range(3)
    downloads = [scene.download(place) for place in joiners]

    async def joined(place: int) -> Snapshot:
        while True:
            found = await downloads[place].fetch(1, scene.is_the_swarms)
            if found is not None:
                return found
            await asyncio.sleep(0.2)

    def has_all(places: range) -> bool:
        arriving = [downloads[place].arriving for place in places]
        lacking = [set(range(NUM_CHUNKS)) if a is None else a.missing.copy() for a in arriving]
        return not set.intersection(*lacking)

    joining = [asyncio.create_task(joined(place)) for place in joiners]
    async with asyncio.timeout(120):
        while not has_all(joiners):  # noqa: ASYNC110 (between them, over real sockets)
            await asyncio.sleep(0.005)
        scene.kill(3)
        assert all(is_the_state(scene, found) for found in await asyncio.gather(*joining))
    assert set(holder.given) == set(range(NUM_CHUNKS))
    assert all(desk.num_given > 0 for desk in scene.desks[:3]), "each gave others what it had"
