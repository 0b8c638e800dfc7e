"""What the transport in memory can do beyond the contract: links that are cut while in use."""

import asyncio

import pytest

from lab.simulation.memory_transport import MemoryNetwork, MemoryTransport
from node.exchange.peers import Admission, PeerUnreachableError, Want
from protocol.wire.payload import RESULT, Payload, PayloadHeader, WireCounts
from protocol.wire.rounds import NodeId, PeerAddress, RosterEntry
from tests.unit.payload_scene import sealed

ONE, OTHER, THIRD = NodeId("one"), NodeId("other"), NodeId("third")
PAYLOAD = sealed(RESULT, ONE)


class Gate:
    """A TransferHandler that takes its time."""

    def __init__(self) -> None:
        self.is_open = asyncio.Event()
        self.has_begun = asyncio.Event()
        self.received: list[Payload] = []

    def admit(self, sender: NodeId, header: PayloadHeader) -> Admission:
        return Admission(take=self._take)

    async def _take(self, payload: Payload) -> bytes:
        self.has_begun.set()
        await self.is_open.wait()
        self.received.append(payload)
        return b""

    async def supply(self, sender: NodeId, want: Want) -> Payload | None:
        return None


async def start(network: MemoryNetwork, node_id: NodeId) -> tuple[MemoryTransport, Gate]:
    transport, gate = (
        MemoryTransport(network=network, node_id=node_id, counts=WireCounts()),
        Gate(),
    )
    await transport.start(gate)
    address = PeerAddress(public_key=bytes(32), multiaddrs=())
    transport.set_roster(
        tuple(
            RosterEntry(node_id=member, node_name=member, address=address)
            for member in (ONE, OTHER, THIRD)
        )
    )
    return transport, gate


async def test_a_cut_parts_two_nodes_and_no_others_until_it_is_mended() -> None:
    network = MemoryNetwork()
    one, _ = await start(network, ONE)
    gates = {node_id: (await start(network, node_id))[1] for node_id in (OTHER, THIRD)}
    for gate in gates.values():
        gate.is_open.set()

    network.cut(OTHER, ONE)
    with pytest.raises(PeerUnreachableError, match="cut"):
        await one.push(OTHER, PAYLOAD, timeout_seconds=1)
    await one.push(THIRD, PAYLOAD, timeout_seconds=1)
    network.mend(ONE, OTHER)
    await one.push(OTHER, PAYLOAD, timeout_seconds=1)
    assert [len(gate.received) for gate in gates.values()] == [1, 1]


async def test_a_cut_before_the_answer_leaves_the_sender_in_doubt_and_the_receiver_holding() -> (
    None
):
    network = MemoryNetwork()
    one, _ = await start(network, ONE)
    _, gate = await start(network, OTHER)
    pushing = asyncio.create_task(one.push(OTHER, PAYLOAD, timeout_seconds=60))
    await gate.has_begun.wait()
    network.cut(ONE, OTHER)
    gate.is_open.set()
    with pytest.raises(PeerUnreachableError, match="cut"):
        await pushing
    assert gate.received == [PAYLOAD]
