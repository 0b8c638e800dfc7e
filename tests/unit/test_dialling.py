"""Members that are dialled, as the roster changes under their dials."""

import asyncio
import gc
import socket
from typing import Any

import pytest

from node.exchange.peers import Limits
from node.exchange.transport import dialling
from node.exchange.transport.connections import Connections, Punching
from node.exchange.transport.dialling import Allowance, why_not_dialled, why_not_punched
from node.exchange.transport.p2pd import DaemonError, P2pd, knocked
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
    (told,) = [each async for each in knocked([multiaddr], here=[], seconds=1.0)]
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


ON_A_LAN = ("192.168.1.7", "coordinator.example")
ON_LOOPBACK = ("127.0.0.1",)

FOR_THIS_MACHINE_ALONE = (
    "127.0.0.1",
    "127.8.9.10",
    "::1",
    "::ffff:127.0.0.1",
    "localhost",
    "LOCALHOST.",
    "0.0.0.0",
    "::",
    "169.254.169.254",
    "::ffff:169.254.169.254",
    "fe80::1",
    "fd00:ec2::254",
    "224.0.0.1",
    "ff02::1",
    "255.255.255.255",
)


@pytest.mark.parametrize("host", FOR_THIS_MACHINE_ALONE)
def test_no_member_has_others_dial_what_only_their_machine_or_link_knows(host: str) -> None:
    assert why_not_dialled(host, ON_A_LAN)


@pytest.mark.parametrize(
    "host", ["192.168.1.8", "10.0.0.2", "100.64.0.9", "fd12::7", "203.0.113.5", "peer.example"]
)
def test_members_of_one_house_are_dialled(host: str) -> None:
    assert not why_not_dialled(host, ON_A_LAN)


@pytest.mark.parametrize("here", [ON_LOOPBACK, ("::1",), ("192.168.1.7", "localhost")])
def test_a_swarm_on_one_machine_dials_loopback_and_no_metadata(here: tuple[str, ...]) -> None:
    assert not why_not_dialled("127.0.0.1", here)
    assert not why_not_dialled("localhost", here)
    assert why_not_dialled("169.254.169.254", here)


def test_nodes_whose_own_addresses_are_link_local_dial_each_other() -> None:
    assert not why_not_dialled("169.254.7.8", ("169.254.1.2",))


@pytest.mark.parametrize(
    "multiaddr",
    [
        "/ip4/127.0.0.1/udp/443/quic-v1",
        "/ip4/169.254.169.254/udp/80/quic-v1",
        "/ip4/192.0.2.1/tcp/80",
        "/dns/victim.example/udp/443/quic-v1",
        "",
    ],
)
async def test_no_hole_is_punched_to_this_machine_itself_nor_by_another_protocol(
    multiaddr: str,
) -> None:
    assert why_not_punched(multiaddr, ON_A_LAN)

    async def started() -> P2pd:
        return Daemon()

    punching = Punching(
        token=bytes(16),
        start_daemon=started,
        limits=Limits(),
        on_connection=lambda: None,
        here=lambda: ON_A_LAN,
    )
    punching.set_roster({"peer": ()})
    punching._daemon = await started()
    punching.punch("peer", multiaddr)
    assert not punching._dials


def test_a_hole_is_punched_where_a_router_is() -> None:
    assert not why_not_punched("/ip4/203.0.113.5/udp/4001/quic-v1", ON_A_LAN)
    assert not why_not_punched("/ip6/2001:db8::5/udp/4001/quic-v1", ON_A_LAN)


async def test_a_name_that_leads_to_loopback_is_not_dialled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def resolved(*_: object, flags: int = 0) -> list[Any]:
        if flags:
            raise socket.gaierror(socket.EAI_NONAME, "no address")
        return [(2, 1, 6, "", ("127.0.0.1", 80)), (2, 1, 6, "", ("169.254.169.254", 80))]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    (told,) = [
        each async for each in knocked(["/dns4/sly.example/tcp/80"], here=ON_A_LAN, seconds=1.0)
    ]
    assert told[1].startswith("sly.example is 127.0.0.1, 169.254.169.254: this machine's own loop")


async def test_p2pd_dials_the_address_that_was_looked_at_and_not_the_name_again() -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    (told,) = [
        each
        async for each in knocked([f"/dns4/localhost/tcp/{port}"], here=ON_LOOPBACK, seconds=5.0)
    ]
    server.close()
    assert told == (f"/ip4/127.0.0.1/tcp/{port}", "")


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Dialling(P2pd):
    """Notes how often it dials, and ends no dial before it is told."""

    def __init__(self) -> None:
        self._dials = {}
        self.num_dials = self.num_cancelled = 0
        self.may_end = asyncio.Event()
        self.why_not = ""

    async def connected_hosts(self) -> dict[str, frozenset[str]]:
        return {}

    async def _dial_first_to_answer(self, peer_id: str, multiaddrs: tuple[str, ...]) -> None:
        self.num_dials += 1
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if self.why_not:
            raise DaemonError(self.why_not)


@pytest.mark.parametrize("why_not", ["", "nobody answers"])
async def test_streams_that_want_a_member_at_once_share_one_dial_and_what_comes_of_it(
    why_not: str,
) -> None:
    """A body in parts opens eight: each would take as much of what its member may have dialled."""
    daemon = Dialling()
    daemon.why_not = why_not
    streams = [asyncio.create_task(daemon.connect("peer", HERE)) for _ in range(8)]
    other = asyncio.create_task(daemon.connect("peer", (*HERE, "/ip4/192.0.2.9/tcp/1")))
    await settled()
    daemon.may_end.set()
    found = await asyncio.gather(*streams, other, return_exceptions=True)
    assert [str(each) if each else "" for each in found] == 9 * [why_not]
    assert daemon.num_dials == 2
    assert not daemon._dials


async def test_a_dial_ends_when_the_last_one_that_waits_for_it_goes() -> None:
    daemon = Dialling()
    streams = [asyncio.create_task(daemon.connect("peer", HERE)) for _ in range(2)]
    await settled()
    streams[0].cancel()
    await settled()
    assert not daemon.num_cancelled
    streams[1].cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    await settled()
    assert (daemon.num_dials, daemon.num_cancelled) == (1, 1)
    assert not daemon._dials


MOST_TOLD = 16


def test_a_member_that_comes_again_and_again_has_few_places_dialled_a_second() -> None:
    allowance = Allowance()
    dialled = [
        second for second in range(160) if not allowance.take("peer", MOST_TOLD, now=float(second))
    ]
    at_once = dialling.MOST_AT_ONCE // MOST_TOLD
    assert dialled[:at_once] == list(range(at_once))
    assert len(dialled) * MOST_TOLD <= dialling.MOST_AT_ONCE + dialling.PLACES_PER_SECOND * 160
    assert allowance.take("another", MOST_TOLD, now=159.0) == 0.0


def test_who_may_not_be_dialled_yet_is_told_when_and_may_then() -> None:
    allowance = Allowance()
    while not (wait := allowance.take("peer", MOST_TOLD, now=0.0)):
        pass
    assert allowance.take("peer", MOST_TOLD, now=wait - 0.5)
    assert not allowance.take("peer", MOST_TOLD, now=wait)


def test_nothing_is_remembered_of_peers_that_were_dialled_long_ago() -> None:
    allowance = Allowance()
    for number in range(100):
        allowance.take(str(number), MOST_TOLD, now=0.0)
    allowance.take("later", 1, now=1000.0)
    assert len(allowance._spent) == 1
