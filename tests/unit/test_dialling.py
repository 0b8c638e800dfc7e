"""Members that are dialled, as the roster changes under their dials."""

import asyncio
import gc
from typing import Any

import pytest

from node.exchange.peers import Limits
from node.exchange.transport.connections import Connections
from node.exchange.transport.p2pd import P2pd, knocked
from node.exchange.transport.rates.tcp import TcpPacing
from protocol.trust.identity import Identity, peer_id_of
from protocol.wire.rounds import PeerAddress, RosterEntry

HERE = ("/ip4/192.0.2.1/tcp/7710",)


class Pacing(TcpPacing):
    def __init__(self) -> None:
        pass

    def look(self) -> None:
        pass


class Daemon(P2pd):
    """Is connected with nobody, and notes whom it is to dial."""

    def __init__(self) -> None:
        self.tcp_pacing = Pacing()
        self.dialled: list[tuple[str, ...]] = []

    async def connected_hosts(self) -> dict[str, frozenset[str]]:
        return {}

    async def connect(self, peer_id: str, multiaddrs: tuple[str, ...]) -> None:
        self.dialled.append(multiaddrs)
        await asyncio.Event().wait()


def member(multiaddrs: tuple[str, ...]) -> RosterEntry:
    identity = Identity.generate()
    address = PeerAddress(public_key=identity.public_key, multiaddrs=multiaddrs)
    return RosterEntry(node_id=identity.node_id, node_name="other", address=address)


async def test_a_member_that_leaves_as_its_dial_begins_is_not_looked_for() -> None:
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
    daemon = Daemon()
    connections = Connections(
        daemon, own_peer_id="", limits=Limits(yield_seconds=0.0), on_connection=lambda: None
    )
    await asyncio.sleep(0)
    connections.set_roster((member(HERE),))
    await asyncio.sleep(0)  # its dial is a task by now, and has not begun
    connections.set_roster(())
    for _ in range(3):
        await asyncio.sleep(0)
    await connections.stop()
    gc.collect()
    assert not daemon.dialled and not faults


ODD = (
    "",
    "no slashes",
    "/unix/tmp/socket",
    "/ip4/192.0.2.1/tcp/80/ws",
    "/ip4/192.0.2.1/udp/443/quic-v1/webtransport",
    "/dnsaddr/victim.example",
    "/ip4/192.0.2.1/tcp/99999",
)


@pytest.mark.parametrize("multiaddr", ODD)
async def test_what_is_no_address_of_tcp_is_not_dialled_whatever_a_member_tells(
    multiaddr: str,
) -> None:
    """libp2p would ask a web server, or look for more addresses in DNS."""
    (told,) = [each async for each in knocked([multiaddr], seconds=1.0)]
    assert told[0] == multiaddr
    assert told[1], "why it is not dialled"


async def test_members_are_found_by_host_whatever_others_tell() -> None:
    connections = Connections(Daemon(), own_peer_id="", limits=Limits(), on_connection=lambda: None)
    odd, here = member(ODD[:-1]), member(HERE)
    connections.set_roster((odd, here))
    assert connections.at(["192.0.2.1"]) == {peer_id_of(here.address.public_key)}
    await connections.stop()


async def test_a_member_that_has_moved_is_dialled_where_it_is_now() -> None:
    daemon, there = Daemon(), member(HERE)
    connections = Connections(
        daemon, own_peer_id="", limits=Limits(yield_seconds=0.0), on_connection=lambda: None
    )
    connections.set_roster((there,))
    for _ in range(3):
        await asyncio.sleep(0)
    moved = (*HERE, "/ip4/192.0.2.2/tcp/7710")
    address = PeerAddress(public_key=there.address.public_key, multiaddrs=moved)
    entry = RosterEntry(node_id=there.node_id, node_name=there.node_name, address=address)
    connections.set_roster((entry,))
    for _ in range(3):
        await asyncio.sleep(0)
    await connections.stop()
    assert daemon.dialled == [HERE, moved]
