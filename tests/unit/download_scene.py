"""A joiner and some donors in one process and in virtual time; the donors misbehave as told."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.simulation.memory_transport import MemoryNetwork, MemoryTransport
from node import outer_state
from node.disk.snapshots import Snapshot
from node.exchange.fetching import Donors, Silences
from node.exchange.peers import (
    Admission,
    Waits,
    Want,
    WantChunk,
    WantChunkMap,
    WantManifest,
    do_nothing,
)
from node.exchange.state import chunks
from node.exchange.state.chunks import Arriving, Manifest
from node.exchange.state.donor import Donor
from node.exchange.state.download import Download
from node.heavy import in_place
from protocol.wire.payload import Payload, PayloadHeader, WireCounts
from protocol.wire.rounds import Digest, NodeId, PeerAddress, RosterEntry
from protocol.wire.vitals import LinkState

RUN, LAYOUT = Digest(bytes(range(32))), Digest(bytes(range(32, 64)))
NUM_ELEMENTS = 1000
CHUNK_BYTES = 400
NUM_CHUNKS = 2 * 4 * NUM_ELEMENTS // CHUNK_BYTES
JOINER = NodeId("joiner")
ADDRESS = PeerAddress(public_key=bytes(32), multiaddrs=())

Supply = Callable[[Want], Awaitable[Payload | None]]

ROUNDS_BEHIND = 8
"""So far behind its newest state a donor's copy is offered."""


def cut_small(patch: pytest.MonkeyPatch, chunk_bytes: int = CHUNK_BYTES) -> None:
    """Chunks are pieces of the outer digest, so these are as small."""
    patch.setattr(chunks, "CHUNK_BYTES", chunk_bytes)
    patch.setattr(outer_state, "PIECE_ELEMENTS", chunk_bytes // 4)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_small(monkeypatch)


def state_at(round: int, *, seed: int | None = None, num_elements: int = NUM_ELEMENTS) -> Snapshot:
    rng = np.random.default_rng(round if seed is None else seed)
    vectors = rng.standard_normal((2, num_elements)).astype(np.float32)
    return Snapshot(
        round=round,
        run_digest=RUN,
        layout_digest=LAYOUT,
        parameters=vectors[0],
        momentum=vectors[1],
    )


def manifest_of(state: Snapshot) -> Manifest:
    return Manifest.of(
        state.read,
        round=state.round,
        num_elements=len(state.parameters),
        run_digest=RUN,
        layout_digest=LAYOUT,
    )


def changed(payload: Payload, body: bytes, **changes: object) -> Payload:
    """A payload with another body, sealed as if it were right."""
    header = payload.header
    names = "kind run_digest round fragment slice_index start num_elements codec tokens sender_id"
    fields = {name: getattr(header, name) for name in names.split()} | changes
    return Payload.seal(**fields, body=body)


class DonorNode:
    """Serves the newest of its states. `misbehave` may stand between it and who asks."""

    def __init__(
        self,
        network: MemoryNetwork,
        node_id: NodeId,
        *states: Snapshot,
        num_elements: int = 0,
        arriving: Callable[[], Arriving | None] = lambda: None,
    ) -> None:
        self.node_id = node_id
        self.states = list(states)
        self.given: Counter[int] = Counter()  # chunk -> times
        self.asked: list[Want] = []
        self.misbehave: Callable[[Want, Supply], Awaitable[Payload | None]] | None = None
        self.transport = MemoryTransport(network=network, node_id=node_id, counts=WireCounts())
        self.donor = Donor(
            node_id=node_id,
            run_digest=RUN,
            layout_digest=LAYOUT,
            num_elements=num_elements or NUM_ELEMENTS,
            oldest_round=lambda: max((s.round for s in self.states), default=0) - ROUNDS_BEHIND,
            open_state=self._open,
            arriving=arriving,
            heavy=in_place,
        )

    async def _open(self, want: WantManifest) -> Snapshot | None:
        wanted = [state for state in self.states if want.includes(state.round)]
        return max(wanted, key=lambda state: state.round, default=None)

    async def honestly(self, want: Want) -> Payload | None:
        match want:
            case WantManifest():
                return await self.donor.manifest(want)
            case WantChunk():
                payload = await self.donor.chunk(want)
                self.given[want.index] += payload is not None
                return payload
            case WantChunkMap():
                return await self.donor.chunk_map(want)
            case _:
                return None

    # TransferHandler

    async def supply(self, sender: NodeId, want: Want) -> Payload | None:
        self.asked.append(want)
        if self.misbehave is not None:
            return await self.misbehave(want, self.honestly)
        return await self.honestly(want)

    def admit(self, sender: NodeId, header: PayloadHeader) -> Admission:
        raise AssertionError("nobody pushes here")

    # Ways to misbehave

    def damage_chunk(self, index: int) -> None:
        """Sends other bytes for one chunk."""

        async def supply(want: Want, honestly: Supply) -> Payload | None:
            payload = await honestly(want)
            if payload is not None and isinstance(want, WantChunk) and want.index == index:
                return Payload(header=payload.header, body=bytes(len(payload.body)))
            return payload

        self.misbehave = supply

    def lie(self, *, seed: int = 99) -> None:
        """Serves another state under the swarm's digest: manifest and chunks fit together."""
        truth = self.states[-1]
        false = replace(state_at(truth.round, seed=seed))
        manifest = replace(manifest_of(false), outer_digest=truth.outer_digest())
        source = DonorNode(MemoryNetwork(), self.node_id, false)

        async def supply(want: Want, honestly: Supply) -> Payload | None:
            payload = await source.honestly(want)
            if payload is not None and isinstance(want, WantManifest):
                return changed(payload, manifest.to_body())
            self.given[getattr(want, "index", -1)] += 1
            return payload

        self.misbehave = supply

    def after(self, num_chunks: int, do: Callable[[], None]) -> None:
        """Does something once so many chunks have been asked for."""
        asked = 0

        async def supply(want: Want, honestly: Supply) -> Payload | None:
            nonlocal asked
            if isinstance(want, WantChunk):
                asked += 1
                if asked == num_chunks:
                    do()
            return await honestly(want)

        self.misbehave = supply


class DownloadScene:
    """Donors by name, and one joiner that may be started again."""

    def __init__(self, folder: Path | None = None) -> None:
        self.network = MemoryNetwork()
        self.donors: dict[NodeId, DonorNode] = {}
        self.settled: dict[int, Digest] = {}
        self.said: list[str] = []
        self.most_at_once = 0
        self.most_from_one = 0
        self._folder = folder
        self._under_way: Counter[NodeId] = Counter()

    async def add(self, name: str, *states: Snapshot) -> DonorNode:
        donor = DonorNode(self.network, NodeId(name), *states)
        self.donors[donor.node_id] = donor
        await donor.transport.start(donor)
        for state in states:
            self.settled.setdefault(state.round, state.outer_digest())
        donor.transport.set_roster(
            (RosterEntry(node_id=JOINER, node_name="joiner", address=ADDRESS),)
        )
        return donor

    async def joiner(self) -> Download:
        """Starts the joiner, or starts it again with what is on its disk."""
        self.counts = WireCounts()
        self.transport = MemoryTransport(network=self.network, node_id=JOINER, counts=self.counts)
        await self.transport.start(next(iter(self.donors.values())))
        self.transport.set_roster(
            tuple(
                RosterEntry(node_id=donor, node_name=donor, address=ADDRESS)
                for donor in self.donors
            )
        )
        return Download(
            run_digest=RUN,
            layout_digest=LAYOUT,
            num_elements=NUM_ELEMENTS,
            heavy=in_place,
            donors=Donors(
                node_id=JOINER,
                transport=_Watched(self),
                peers=lambda: tuple(self.donors),
                silences=Silences(self.transport.round_trip_seconds, Waits()),
            ),
            folder=self._folder,
            say=self.said.append,
        )

    async def is_the_swarms(self, round: int, digest: Digest) -> bool:
        return self.settled.get(round) == digest

    async def fetch(self, download: Download, oldest_round: int = 1) -> Snapshot | None:
        return await download.fetch(oldest_round, self.is_the_swarms)

    async def fetch_in_the_end(self, download: Download, oldest_round: int = 1) -> Snapshot:
        while True:
            state = await self.fetch(download, oldest_round)
            if state is not None:
                return state
            await asyncio.sleep(20)

    def chunks_given(self) -> Counter[int]:
        return sum((donor.given for donor in self.donors.values()), Counter())


class _Watched:
    """The joiner's transport, which notes how many chunks are under way."""

    def __init__(self, scene: DownloadScene) -> None:
        self._scene = scene

    async def fetch(
        self,
        peer: NodeId,
        want: Want,
        *,
        max_body_bytes: int,
        timeout_seconds: float,
        heard: Callable[[], None] = do_nothing,
    ) -> Payload:
        scene, under_way = self._scene, self._scene._under_way
        counted = isinstance(want, WantChunk)
        under_way[peer] += counted
        scene.most_at_once = max(scene.most_at_once, under_way.total())
        scene.most_from_one = max(scene.most_from_one, under_way[peer])
        try:
            return await scene.transport.fetch(
                peer,
                want,
                max_body_bytes=max_body_bytes,
                timeout_seconds=timeout_seconds,
                heard=heard,
            )
        finally:
            under_way[peer] -= counted

    def seen(self) -> LinkState:
        return self._scene.transport.seen()

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"a download only fetches, it does not use {name}")


def assert_is(found: Snapshot | None, expected: Snapshot) -> None:
    assert found is not None
    assert found.round == expected.round
    assert found.parameters.tobytes() == expected.parameters.tobytes()
    assert found.momentum.tobytes() == expected.momentum.tobytes()
