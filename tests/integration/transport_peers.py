"""Peers for the tests of transports: payloads, a handler that notes what comes, rosters."""

import asyncio
import itertools
from dataclasses import dataclass, field

from node.exchange.peers import Admission, Limits, TransferRefusedError, Transport, Want, WantResult
from node.exchange.transport.libp2p import Libp2pTransport
from protocol.trust.identity import Identity, peer_id_of
from protocol.wire.payload import RESULT, Payload, PayloadHeader, WireCounts
from protocol.wire.rounds import NodeId, PeerAddress, RosterEntry
from tests.unit.payload_scene import sealed

BIG = 3_000_000  # bytes: many chunks, and more than any buffer on the way holds


class NoConnection:
    """For writers of our own: what a stream asks a real one about its connection, which never ends."""

    @property
    def transport(self) -> "NoConnection":
        return self

    def get_protocol(self) -> "NoConnection":
        return self

    def _get_close_waiter(self, writer: object) -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()


def make_payload(
    kind: int = RESULT, *, sender_id: str = "", body: bytes = b"body", round: int = 7
) -> Payload:
    return sealed(
        kind,
        NodeId(sender_id),
        body=body,
        round=round,
        slice_index=1,
        start=256,
        num_elements=4,
        samples=1,
        tokens=5,
    )


def want(payload: Payload) -> WantResult:
    return WantResult(round=7, slice_index=1, digest=payload.digest)


@dataclass
class Desk:
    """A TransferHandler that notes what comes, and holds what it is given."""

    max_body_bytes: int = 10_000_000
    held: Payload | None = None
    fault: Exception | None = None
    gate: asyncio.Event | None = None
    supply_gate: asyncio.Event | None = None
    num_looks_wanted: int | None = None  # how often bodies are wanted, when the transport looks
    has_admitted: asyncio.Event = field(default_factory=asyncio.Event)
    admitted: list[PayloadHeader] = field(default_factory=list)
    ended: list[PayloadHeader] = field(default_factory=list)
    received: list[tuple[NodeId, Payload]] = field(default_factory=list)
    wanted: list[Want] = field(default_factory=list)

    def admit(self, sender: NodeId, header: PayloadHeader) -> Admission:
        if header.body_bytes > self.max_body_bytes:
            raise TransferRefusedError(f"{header.body_bytes} bytes are too many")
        self.admitted.append(header)
        self.has_admitted.set()

        async def take(payload: Payload) -> bytes:
            if self.gate is not None:
                await self.gate.wait()
            if self.fault is not None:
                raise self.fault
            self.received.append((sender, payload))
            return b""

        def is_wanted() -> bool:
            if self.num_looks_wanted is not None:
                self.num_looks_wanted -= 1
            return self.num_looks_wanted is None or self.num_looks_wanted >= 0

        return Admission(take=take, end=lambda: self.ended.append(header), is_wanted=is_wanted)

    async def supply(self, sender: NodeId, want: Want) -> Payload | None:
        self.wanted.append(want)
        if self.supply_gate is not None:
            await self.supply_gate.wait()
        return self.held


@dataclass
class Peer:
    node_id: NodeId
    public_key: bytes
    transport: Transport
    counts: WireCounts
    desk: Desk = field(default_factory=Desk)

    @property
    def entry(self) -> RosterEntry:
        return RosterEntry(
            node_id=self.node_id,
            node_name=f"peer-{self.node_id[:4]}",
            address=PeerAddress(public_key=self.public_key, multiaddrs=self.transport.multiaddrs),
        )


async def start_transport(
    limits: Limits | None = None, identity: Identity | None = None
) -> tuple[Libp2pTransport, Peer]:
    identity = identity or Identity.generate()
    counts = WireCounts()
    transport = Libp2pTransport(identity=identity, counts=counts, limits=limits)
    peer = Peer(identity.node_id, identity.public_key, transport, counts)
    await transport.start(peer.desk)
    return transport, peer


async def introduce(*peers: Peer) -> None:
    """Makes all members of one another's rosters, and waits until libp2p has linked them.

    Two that dial each other at the same instant may both fail, and libp2p refuses to dial again for
    some seconds. A node tries again; a test that pushes once would not.
    """
    roster = tuple(peer.entry for peer in peers)
    for peer in peers:
        peer.transport.set_roster(roster)
    for one, other in itertools.combinations(peers, 2):
        async with asyncio.timeout(30):
            while not (_is_linked(one, other) or _is_linked(other, one)):  # noqa: ASYNC110 (p2pd tells nobody)
                await asyncio.sleep(0.02)


def _is_linked(one: Peer, other: Peer) -> bool:
    if not isinstance(one.transport, Libp2pTransport):
        return True
    return peer_id_of(other.public_key) in one.transport._running.connections.connected
