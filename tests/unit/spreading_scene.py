"""Joiners that fetch one state at the same time, from a holder and from each other, in virtual time."""

import asyncio
from pathlib import Path

import pytest

from lab.simulation.memory_transport import QueuedNetwork
from node.disk.snapshots import Snapshot
from node.exchange.fetching import Donors, Silences
from node.exchange.peers import Waits
from node.exchange.state.chunks import Arriving
from node.exchange.state.download import Download
from node.heavy import in_place
from protocol.wire.rounds import Digest, NodeId, RosterEntry
from tests.unit.download_scene import ADDRESS, LAYOUT, RUN, DonorNode, cut_small, state_at

ROUND = 7
CHUNK_BYTES = 8000
"""Large against a header, as real ones are."""
NUM_CHUNKS = 60
NUM_ELEMENTS = NUM_CHUNKS * CHUNK_BYTES // 8

CHUNK_SECONDS = 0.8
"""A chunk takes as long as 2 MiB over 20 Mbit/s."""
ALONE_SECONDS = CHUNK_SECONDS * NUM_CHUNKS
"""The state over an uplink that does nothing else."""


def cut_to_scale(patch: pytest.MonkeyPatch) -> None:
    cut_small(patch, CHUNK_BYTES)


class Joiner(DonorNode):
    """Fetches the state, gives what it has of it, and all of it once it has taken it over."""

    def __init__(self, scene: "SpreadingScene", name: str, folder: Path | None = None) -> None:
        super().__init__(
            scene.network,
            NodeId(name),
            num_elements=NUM_ELEMENTS,
            arriving=lambda: self.arriving,
        )
        self._scene = scene
        self.said: list[str] = []
        self.ended_at: float | None = None
        self._folder = folder
        self.download = self.started()

    def started(self) -> Download:
        """As after a start of the process, with what is in its folder."""
        scene = self._scene
        return Download(
            run_digest=RUN,
            layout_digest=LAYOUT,
            num_elements=NUM_ELEMENTS,
            heavy=in_place,
            donors=Donors(
                node_id=self.node_id,
                transport=self.transport,
                peers=lambda: tuple(peer for peer in scene.nodes if peer != self.node_id),
                silences=Silences(self.transport.round_trip_seconds, Waits()),
            ),
            folder=self._folder,
            say=self.said.append,
        )

    @property
    def arriving(self) -> Arriving | None:
        return self.download.arriving

    async def join(self, *, after_seconds: float = 0.0) -> Snapshot:
        """Fetches as long as it takes; returns what it got."""
        await asyncio.sleep(after_seconds)
        while True:
            found = await self.download.fetch(1, self._scene.is_the_swarms)
            if found is not None:
                self.ended_at = asyncio.get_running_loop().time()
                self.states = [found]
                await self.download.taken_over()
                return found
            await asyncio.sleep(1.0)


class SpreadingScene:
    """One holder and joiners, each with an uplink of its own for all that it gives."""

    def __init__(self, num_joiners: int, folder: Path | None = None) -> None:
        """Joiners keep what comes in folders within `folder`, or in memory."""
        self.network = QueuedNetwork(
            bytes_per_second=CHUNK_BYTES / CHUNK_SECONDS, latency_seconds=0.02
        )
        self.state = state_at(ROUND, num_elements=NUM_ELEMENTS)
        self.holder = DonorNode(
            self.network, NodeId("holder"), self.state, num_elements=NUM_ELEMENTS
        )
        self.joiners = [
            Joiner(self, f"joiner-{number}", folder and folder / f"{number}")
            for number in range(num_joiners)
        ]
        self.nodes: dict[NodeId, DonorNode] = {
            node.node_id: node for node in (self.holder, *self.joiners)
        }

    async def start(self) -> None:
        roster = tuple(
            RosterEntry(node_id=node_id, node_name=node_id, address=ADDRESS)
            for node_id in self.nodes
        )
        for node in self.nodes.values():
            await node.transport.start(node)
            node.transport.set_roster(roster)

    async def stop(self) -> None:
        for node in self.nodes.values():
            node.donor.drop()
            await node.transport.stop()

    async def is_the_swarms(self, round: int, digest: Digest) -> bool:
        return (round, digest) == (ROUND, self.state.outer_digest())

    def leave(self, node: DonorNode) -> None:
        """The node is gone, in the middle of what it gives."""
        self.network.detach(node.transport)

    def given(self, node: DonorNode) -> float:
        """How often a node has given the state, as a multiple of its size."""
        return node.given.total() / NUM_CHUNKS
