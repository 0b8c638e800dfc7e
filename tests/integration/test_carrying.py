"""Streams that a third member carries, over real p2pd processes: two reach it and not each other."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from node.exchange.peers import Limits, PeerUnreachableError, TransferRefusedError
from node.exchange.transport.libp2p import Libp2pTransport
from node.exchange.transport.streams import TransferStream
from protocol.trust.identity import Identity
from protocol.v1 import transfer_pb2 as wire
from protocol.wire.payload import Payload, WireCounts
from protocol.wire.rounds import NodeId, PeerAddress, RosterEntry, Way
from tests.integration.transport_peers import BIG, Peer, make_payload, want

IMPATIENT = replace(Limits(), unreachable_seconds=0.3, knock_seconds=0.5, yield_seconds=0.1)
NOWHERE = ("/ip4/127.0.0.1/tcp/1",)


@dataclass
class Three:
    """One and other, that have no address of each other, and those that may carry between them."""

    one: Peer
    other: Peer
    carriers: list[Peer]

    @property
    def peers(self) -> list[Peer]:
        return [self.one, self.other, *self.carriers]

    def way(self) -> Way:
        low, high = sorted((self.one.node_id, self.other.node_id))
        return Way(one=low, other=high, through=tuple(c.node_id for c in self.carriers))

    def plan(self, *ways: Way) -> None:
        for peer in self.peers:
            peer.transport.set_ways(ways)


@asynccontextmanager
async def three(
    *shares: float, limits: Limits = IMPATIENT, most: float | None = None
) -> AsyncIterator[Three]:
    """Real transports; `shares` are those of the carriers."""
    peers = []
    try:
        for share in (0.0, 0.0, *shares):
            identity, counts = Identity.generate(), WireCounts()
            transport = Libp2pTransport(
                identity=identity,
                counts=counts,
                limits=limits,
                carry_share=share,
                max_upload_bytes_per_second=most if share else None,
            )
            peer = Peer(identity.node_id, identity.public_key, transport, counts)
            await transport.start(peer.desk)
            peers.append(peer)
        home = Three(peers[0], peers[1], peers[2:])
        for peer in peers:
            peer.transport.set_roster(tuple(as_seen(home, each, by=peer) for each in peers))
        await until(lambda: all(num_connected(c) == len(peers) - 1 for c in home.carriers))
        yield home
    finally:
        for peer in peers:
            await peer.transport.stop()


def as_seen(home: Three, peer: Peer, *, by: Peer) -> RosterEntry:
    """The ends know no address of each other that anybody answers at."""
    if {peer.node_id, by.node_id} != {home.one.node_id, home.other.node_id}:
        return peer.entry
    address = PeerAddress(public_key=peer.public_key, multiaddrs=NOWHERE)
    return replace(peer.entry, address=address)


def num_connected(peer: Peer) -> int:
    assert isinstance(peer.transport, Libp2pTransport)
    return len(peer.transport._running.connections.connected)


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not is_so():  # noqa: ASYNC110 (p2pd tells nobody)
            await asyncio.sleep(0.05)


async def test_bodies_come_through_a_member_that_both_reach_and_count_as_the_senders() -> None:
    async with three(1.0) as home:
        home.plan(home.way())
        (carrier,) = home.carriers
        payload = make_payload(sender_id=home.one.node_id, body=bytes(BIG))
        await home.one.transport.push(home.other.node_id, payload, timeout_seconds=30)
        assert [(s, p.body) for s, p in home.other.desk.received] == [
            (home.one.node_id, payload.body)
        ]
        assert not carrier.desk.admitted  # it has passed on what it cannot read
        home.one.desk.held = payload
        fetched = await home.other.transport.fetch(
            home.one.node_id, want(payload), max_body_bytes=BIG, timeout_seconds=30
        )
        assert fetched.body == payload.body
        await until(lambda: carrier.counts.totals()["carried"][0] > 2 * BIG)
        sent, received = carrier.counts.totals()["carried"]
        assert 2 * BIG < sent < 2.4 * BIG and 2 * BIG < received < 2.4 * BIG
        await until(
            lambda: (
                home.one.transport.seen().unreachable and home.other.transport.seen().unreachable
            )
        )
        assert home.one.transport.seen().through == {home.other.node_id: carrier.node_id}
        assert home.other.transport.seen().through == {home.one.node_id: carrier.node_id}


async def test_nobody_carries_for_a_pair_that_no_plan_names() -> None:
    async with three(1.0) as home:
        home.one.transport.set_ways((home.way(),))  # its own word; the others have heard of no plan
        home.other.transport.set_ways((home.way(),))
        payload = make_payload(sender_id=home.one.node_id)
        with pytest.raises(
            TransferRefusedError, match="no plan here names this node for this pair"
        ):
            await home.one.transport.push(home.other.node_id, payload, timeout_seconds=20)
        assert not home.other.desk.admitted


async def test_who_is_carried_to_takes_nothing_from_a_carrier_that_no_plan_names() -> None:
    async with three(1.0) as home:
        home.one.transport.set_ways((home.way(),))
        home.carriers[0].transport.set_ways((home.way(),))
        payload = make_payload(sender_id=home.one.node_id)
        with pytest.raises(TransferRefusedError, match="no plan here names you for this pair"):
            await home.one.transport.push(home.other.node_id, payload, timeout_seconds=20)
        assert not home.other.desk.admitted


async def test_a_node_whose_owner_wants_it_so_carries_nothing_and_says_so() -> None:
    async with three(0.0) as home:
        home.plan(home.way())
        assert home.carriers[0].transport.seen().carry_bytes_per_second == 0
        payload = make_payload(sender_id=home.one.node_id)
        with pytest.raises(TransferRefusedError, match="carries nothing: its owner wants it so"):
            await home.one.transport.push(home.other.node_id, payload, timeout_seconds=20)


async def test_when_the_first_carrier_is_gone_the_second_one_carries() -> None:
    async with three(1.0, 1.0) as home:
        home.plan(home.way())
        first, second = home.carriers
        payload = make_payload(sender_id=home.one.node_id, body=bytes(BIG))
        pushing = asyncio.create_task(pushed(home, payload))
        await home.other.desk.has_admitted.wait()
        await first.transport.stop()
        await pushing
        assert home.other.desk.received[0][1].body == payload.body
        assert second.counts.totals()["carried"][0] >= BIG  # its stream may be gone again


async def pushed(home: Three, payload: Payload) -> None:
    """As node.exchange.giving does it: again until it is there."""
    async with asyncio.timeout(60):
        while True:
            try:
                await home.one.transport.push(home.other.node_id, payload, timeout_seconds=50)
                return
            except (PeerUnreachableError, TransferRefusedError):
                await asyncio.sleep(0.2)


async def test_a_carrier_that_takes_a_stream_and_says_nothing_is_left_for_the_second_one() -> None:
    async with three(1.0, 1.0, limits=replace(IMPATIENT, knock_seconds=1.0)) as home:
        home.plan(home.way())
        first, second = home.carriers
        num_asked = 0

        async def says_nothing(stream: TransferStream, sender: NodeId) -> None:
            nonlocal num_asked
            num_asked += 1
            await asyncio.sleep(60)

        first.transport._carrying.answer = says_nothing  # type: ignore[attr-defined]
        for _ in range(3):
            payload = make_payload(sender_id=home.one.node_id)
            await home.one.transport.push(home.other.node_id, payload, timeout_seconds=30)
        assert len(home.other.desk.received) == 3
        assert num_asked == 1  # it is asked last until there is another plan
        assert home.one.transport._carrying.through == {home.other.node_id: second.node_id}  # type: ignore[attr-defined]


async def test_a_pair_has_so_many_streams_carried_and_is_told_when_there_are_more() -> None:
    async with three(1.0, limits=replace(IMPATIENT, max_streams_per_peer=2)) as home:
        home.plan(home.way())
        opened = [
            await home.one.transport._carrying.open(home.other.entry)  # type: ignore[attr-defined]
            for _ in range(2)
        ]
        with pytest.raises(TransferRefusedError, match="busy with 2 transfers of yours"):
            await home.one.transport._carrying.open(home.other.entry)  # type: ignore[attr-defined]
        for stream in opened:
            stream.abort()
        payload = make_payload(sender_id=home.one.node_id)

        async def is_free() -> bool:
            try:
                await home.one.transport.push(home.other.node_id, payload, timeout_seconds=20)
            except TransferRefusedError:
                return False
            return True

        async with asyncio.timeout(30):
            while not await is_free():  # noqa: ASYNC110 (p2pd tells nobody)
                await asyncio.sleep(0.1)
        assert len(home.other.desk.received) == 1


async def test_what_is_carried_keeps_to_its_share_of_what_the_owner_allows() -> None:
    async with three(0.5, most=400_000.0) as home:
        home.plan(home.way())
        assert home.carriers[0].transport.seen().carry_bytes_per_second == 200_000
        began_at = asyncio.get_running_loop().time()
        payload = make_payload(sender_id=home.one.node_id, body=bytes(600_000))
        await home.one.transport.push(home.other.node_id, payload, timeout_seconds=60)
        assert asyncio.get_running_loop().time() - began_at > 600_000 / 200_000 - 0.5


async def test_a_carrier_that_speaks_for_another_end_is_found_out() -> None:
    async with three(1.0) as home:
        home.plan(home.way())
        (carrier,) = home.carriers
        assert isinstance(carrier.transport, Libp2pTransport)
        own = carrier.transport._carrying._tls.certificate

        async def answers_itself(stream: TransferStream, sender: NodeId) -> NodeId:
            await stream.receive(wire.Carry)
            go_on = wire.TRANSFER_STATUS_GO_ON
            await stream.send(wire.TransferResponse(status=go_on, certificate=own))
            return sender

        carrier.transport._carrying.answer = answers_itself  # type: ignore[method-assign]
        payload = make_payload(sender_id=home.one.node_id)
        with pytest.raises(TransferRefusedError, match="not of the key that the roster has"):
            await home.one.transport.push(home.other.node_id, payload, timeout_seconds=20)
        assert not home.other.desk.admitted and not carrier.desk.admitted


async def test_a_stranger_is_carried_nowhere() -> None:
    async with three(1.0) as home:
        home.plan(home.way())
        (carrier,) = home.carriers
        carrier.transport.set_roster(tuple(p.entry for p in (home.other, carrier)))
        payload = make_payload(sender_id=home.one.node_id)
        with pytest.raises((PeerUnreachableError, TransferRefusedError)):
            await home.one.transport.push(home.other.node_id, payload, timeout_seconds=20)
        assert not home.other.desk.admitted
