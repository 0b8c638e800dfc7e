"""A whole swarm in one process and in virtual time: the real coordinator core and store, the real nodes.

Only the edges differ from `atoll coordinator start` and `atoll node start`: calls go to the
coordinator's desks without gRPC (every message is still serialised), payloads go through the
in-memory transport, and the islands train in place, one after the other. So it is deterministic:
the same run file gives the same digests.
"""

import asyncio
import random
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.message import Message

from benchmarks.virtual_time import run_in_virtual_time
from coordinator.config import rules_of
from coordinator.driver import Driver, LoopClock
from coordinator.services.session import SessionDesk
from coordinator.store import Store
from coordinator.swarm.state import HeldOut, SwarmState
from coordinator.swarm.transition import initial_state
from coordinator.telemetry import Telemetry
from node.coordinator_link import CoordinatorLink
from node.daemon import Daemon, NodeFacts
from node.exchange.codecs.registry import codec_named
from node.exchange.outer import Outer
from node.exchange.outer_optimizer import outer_optimizer_of
from node.exchange.transport.memory import MemoryNetwork, MemoryTransport
from node.heavy import in_place
from node.island.corpus import Corpus, read_corpus
from node.island.first_weights import initial_parameters
from node.island.inline import InlineIsland
from node.island.model import layout_of
from node.outer_state import Vector
from protocol.identity import Identity
from protocol.rounds import Commit, Digest, NodeId
from protocol.run_spec import RunSpec
from protocol.wire_count import WireCounts

Wire = TypeVar("Wire", bound=Message)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """What came of a run."""

    final: SwarmState
    commits: tuple[Commit, ...]
    digests: dict[NodeId, Digest]  # of every node's outer state at the end
    parameters: Vector
    bytes_sent: dict[NodeId, int]
    seconds: float  # virtual

    @property
    def held_out(self) -> tuple[HeldOut, ...]:
        """The held-out losses, oldest first."""
        return self.final.held_out


class DeskStub:
    """SessionService without gRPC: what a stub's caller sees, answered by a desk in this process."""

    def __init__(self, desk: SessionDesk, node_id: NodeId) -> None:
        self._desk = desk
        self._node_id = node_id

    async def GetRun(self, request: Message) -> Any:
        return _over_the_wire(self._desk.get_run(_over_the_wire(request)))

    async def Attach(self, request: Message) -> Any:
        return _over_the_wire(self._desk.attach(self._node_id, _over_the_wire(request)))

    async def Heartbeat(self, request: Message) -> Any:
        return _over_the_wire(self._desk.heartbeat(self._node_id, _over_the_wire(request)))

    async def Report(self, request: Message) -> Any:
        return _over_the_wire(self._desk.report(self._node_id, _over_the_wire(request)))

    async def ListCommits(self, request: Message) -> Any:
        return _over_the_wire(self._desk.list_commits(_over_the_wire(request)))

    async def Detach(self, request: Message) -> Any:
        return _over_the_wire(self._desk.detach(self._node_id, _over_the_wire(request)))

    async def Subscribe(self, request: Message) -> AsyncIterator[Any]:
        async for event in self._desk.subscribe(self._node_id, _over_the_wire(request)):
            yield _over_the_wire(event)


def _over_the_wire(message: Wire) -> Wire:
    return type(message).FromString(message.SerializeToString())


def identity_of(place: int) -> Identity:
    """A fixed identity for the node at a place, so that repeated simulations are equal."""
    return Identity(private_key=Ed25519PrivateKey.from_private_bytes(bytes([place + 1]) * 32))


def simulate(spec: RunSpec, *, num_nodes: int, corpus: Corpus | None = None) -> SimulatedRun:
    """Runs a swarm to its end and returns what came of it."""
    return run_in_virtual_time(_simulate(spec, num_nodes, corpus))


async def _simulate(spec: RunSpec, num_nodes: int, corpus: Corpus | None) -> SimulatedRun:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        store = Store.in_memory()
        try:
            return await _run(spec, num_nodes, corpus or _corpus_of(spec, folder), store, folder)
        finally:
            store.close()


def _corpus_of(spec: RunSpec, folder: Path) -> Corpus:
    return read_corpus(spec.data, context=spec.model.context, batch=spec.inner.batch, folder=folder)


async def _run(
    spec: RunSpec, num_nodes: int, corpus: Corpus, store: Store, folder: Path
) -> SimulatedRun:
    driver = Driver(
        state=initial_state(rules_of(spec), spec.digest()),
        store=store,
        clock=LoopClock(starts_at=0.0),
    )
    desk = SessionDesk(driver, Telemetry(), spec)
    network = MemoryNetwork()
    clock = asyncio.ensure_future(driver.run_clock())
    nodes = [_Node(spec, place, desk, network, corpus, folder) for place in range(num_nodes)]
    try:
        await asyncio.gather(*(node.daemon.run() for node in nodes))
    finally:
        clock.cancel()
    return SimulatedRun(
        final=driver.state,
        commits=store.commits_after(0, limit=1 << 30),
        digests={node.node_id: node.outer.digest for node in nodes},
        parameters=nodes[0].parameters,
        bytes_sent={
            node.node_id: sum(sent for sent, _ in node.counts.totals().values()) for node in nodes
        },
        seconds=asyncio.get_running_loop().time(),
    )


class _Node:
    """One simulated node with its own vectors."""

    def __init__(
        self,
        spec: RunSpec,
        place: int,
        desk: SessionDesk,
        network: MemoryNetwork,
        corpus: Corpus,
        folder: Path,
    ) -> None:
        identity = identity_of(place)
        layout = layout_of(spec.model)
        self.node_id = identity.node_id
        self.counts = WireCounts()
        self.parameters = initial_parameters(spec.model, spec.run.seed)
        published = self.parameters.copy()
        self.outer = Outer(
            layout=layout,
            parameters=self.parameters,
            published=published,
            optimizer=outer_optimizer_of(spec.outer),
            uplink=codec_named(spec.exchange.uplink),
            downlink=codec_named(spec.exchange.downlink),
            error_feedback=spec.exchange.error_feedback,
            run_digest=spec.digest(),
            node_id=self.node_id,
        )
        self.daemon = Daemon(
            facts=NodeFacts(
                node_id=self.node_id,
                node_name=f"node-{place + 1}",
                public_key=identity.public_key,
                device="cpu",
                num_ranks=1,
                version="simulated",
            ),
            spec=spec,
            link=CoordinatorLink(DeskStub(desk, self.node_id)),
            transport=MemoryTransport(network=network, node_id=self.node_id, counts=self.counts),
            island=InlineIsland(
                spec=spec,
                parameters=self.parameters,
                published=published,
                folder=folder,
                corpus=corpus,
                clock=asyncio.get_running_loop().time,
            ),
            outer=self.outer,
            snapshots=None,
            heavy=in_place,
            counts=self.counts,
            rng=random.Random(place),
        )
