"""Transports with real p2pds behind the laboratory's routers, and what they punch through these."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement
from pathlib import Path
from typing import get_args

import pytest
from structlog.testing import capture_logs

from coordinator.services.outside import Lookout, listen
from lab.network.lab import NetworkLab
from lab.network.links import Link
from lab.network.router import NatKind
from node.exchange.peers import Limits, PeerUnreachableError
from node.exchange.transport import connections
from node.exchange.transport.libp2p import Libp2pTransport
from node.machine.addresses import Reachability
from protocol.trust.identity import Identity
from protocol.wire.payload import WireCounts
from protocol.wire.rounds import NodeId
from tests.integration.transport_peers import BIG, Peer, make_payload

ONE, OTHER, OUTSIDE = "one", "other", "outside"
PORTS = (7700, 7701)
QUICK = Limits(
    punch_seconds=6.0, unreachable_seconds=0.5, knock_seconds=0.5, punched_look_seconds=0.2
)
PATIENCE_SECONDS = 90.0

pytestmark = pytest.mark.usefixtures("may_make_network_labs")


@dataclass(frozen=True, slots=True, kw_only=True)
class AtHome:
    """Two members at home, and what the coordinator sees of them."""

    lab: NetworkLab
    lookout: Lookout
    one: Peer
    other: Peer

    @property
    def observers(self) -> tuple[tuple[str, int], ...]:
        return tuple((self.lab.address(OUTSIDE), port) for port in PORTS)

    async def seen(self, peer: Peer) -> tuple[str, ...]:
        """Where each port sees a member, once both do."""
        token = peer.transport.seen().outside_token

        async def shown() -> bool:
            await peer.transport.show_outside(self.observers)
            return len(self.lookout.of(peer.node_id, token)) == len(PORTS)

        await until(shown)
        return self.lookout.of(peer.node_id, token)

    async def dial_each_other(self) -> None:
        """Each is told where the other was seen, as the coordinator tells them."""
        (one, *_), (other, *_) = await self.seen(self.one), await self.seen(self.other)
        self.one.transport.punch(self.other.node_id, other)
        self.other.transport.punch(self.one.node_id, one)

    def is_punched(self) -> bool:
        """Whether both have the hole, and neither still dials: that would come after what ends it."""
        dials = [peer.transport._punching._dials for peer in (self.one, self.other)]  # type: ignore[attr-defined]
        holes = (self.one.transport.seen().punched, self.other.transport.seen().punched)
        return not any(dials) and holes == ((self.other.node_id,), (self.one.node_id,))


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            found = is_so()
            if await found if asyncio.iscoroutine(found) else found:
                return
            await asyncio.sleep(0.05)


@asynccontextmanager
async def at_home(one: NatKind, other: NatKind, *, has_ipv6: bool = False) -> AsyncIterator[AtHome]:
    async with AsyncExitStack() as stack:
        lab = stack.enter_context(
            NetworkLab(
                dict.fromkeys((ONE, OTHER, OUTSIDE), Link(delay_seconds=0.01)),
                routers={ONE: [one], OTHER: [other]},
                families=dict.fromkeys((ONE, OTHER), "46") if has_ipv6 else None,
            )
        )
        clock = asyncio.get_running_loop().time
        lookout = Lookout(clock)
        with lab.inside(OUTSIDE):
            listening = await listen(lookout.saw, lab.address(OUTSIDE), PORTS)
        stack.callback(listening.close)
        assert listening.ports == PORTS
        peers = [
            await stack.enter_async_context(_member(lab, host, has_ipv6)) for host in (ONE, OTHER)
        ]
        for peer in peers:
            peer.transport.set_roster(tuple(each.entry for each in peers))
            lookout.of(peer.node_id, peer.transport.seen().outside_token)
        yield AtHome(lab=lab, lookout=lookout, one=peers[0], other=peers[1])


@asynccontextmanager
async def _member(lab: NetworkLab, host: str, has_ipv6: bool) -> AsyncIterator[Peer]:
    identity, counts = Identity.generate(), WireCounts()
    transport = Libp2pTransport(
        identity=identity,
        counts=counts,
        limits=QUICK,
        reachability=Reachability(punching_token=identity.public_key[:16]),
    )
    peer = Peer(identity.node_id, identity.public_key, transport, counts)
    with lab.inside(host):  # what a thread starts there stays there
        await transport.start(peer.desk)
    transport._punching._own_ipv6 = lambda: lab.address6(host) if has_ipv6 else None
    start_daemon = transport._punching._start_daemon

    async def started_there():  # type: ignore[no-untyped-def]
        with lab.inside(host):
            return await start_daemon()

    transport._punching._start_daemon = started_there
    try:
        yield peer
    finally:
        await transport.stop()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("port restricted", "port restricted"),
        pytest.param("full cone", "port restricted", marks=pytest.mark.nightly),
        ("symmetric", "restricted"),
    ],
)
async def test_members_behind_their_routers_reach_each_other_through_the_holes_they_punch(
    one: NatKind, other: NatKind
) -> None:
    async with at_home(one, other) as home:
        await until(lambda: home.one.transport.seen().unreachable == (home.other.node_id,))
        await home.dial_each_other()
        await until(home.is_punched)
        assert (
            home.one.transport.seen().unreachable == home.other.transport.seen().unreachable == ()
        )
        for sender, receiver in ((home.one, home.other), (home.other, home.one)):
            payload = make_payload(sender_id=sender.node_id, body=bytes(BIG))
            await sender.transport.push(receiver.node_id, payload, timeout_seconds=60)
            assert receiver.desk.received == [(sender.node_id, payload)]
        assert home.lab.traffic(ONE, OTHER).delivered_bytes > BIG
        assert home.lab.traffic(OTHER, ONE).delivered_bytes > BIG
        assert home.lab.traffic(ONE, OUTSIDE).delivered_bytes < 100_000


async def test_through_symmetric_routers_members_reach_each_other_by_ipv6() -> None:
    async with at_home("symmetric", "symmetric", has_ipv6=True) as home:
        await until(lambda: home.one.transport.seen().unreachable == (home.other.node_id,))
        await until(lambda: home.other.transport.seen().unreachable == (home.one.node_id,))
        places = {}
        for peer in (home.one, home.other):
            assert peer.transport.seen().outside_by_ipv6 == ""  # before it is wanted
            await peer.transport.show_outside(home.observers)
            places[peer.node_id] = peer.transport.seen().outside_by_ipv6
        assert all(place.startswith("/ip6/fd99::") for place in places.values())
        home.one.transport.punch(home.other.node_id, places[home.other.node_id])
        home.other.transport.punch(home.one.node_id, places[home.one.node_id])
        await until(home.is_punched)
        for sender, receiver in ((home.one, home.other), (home.other, home.one)):
            payload = make_payload(sender_id=sender.node_id, body=bytes(BIG))
            await sender.transport.push(receiver.node_id, payload, timeout_seconds=60)
            assert receiver.desk.received == [(sender.node_id, payload)]


def pairs_on_the_page() -> list[tuple[NatKind, NatKind, str]]:
    """Each two kinds of routers in the table of docs/networks.md, with the way that it gives them."""
    page = (Path(__file__).parents[2] / "docs/networks.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith(("| | open port", "| **"))]
    kinds, *rows = [[cell.strip(" *") for cell in line.split("|")[1:-1]] for line in lines]
    assert kinds[2:] == list(get_args(NatKind))
    ways = {
        (one, other): way
        for (one, *told) in rows
        for other, way in zip(kinds[1:], told, strict=True)
    }
    assert all(ways[one, other] == ways[other, one] for one, other in ways)
    return [
        (one, other, ways[one, other])
        for one, other in combinations_with_replacement(get_args(NatKind), 2)
    ]


@pytest.mark.nightly
@pytest.mark.parametrize(("one", "other", "way"), pairs_on_the_page())
async def test_each_two_kinds_of_routers_are_passed_as_the_page_says(
    one: NatKind, other: NatKind, way: str
) -> None:
    async with at_home(one, other) as home:
        await until(
            lambda: (
                home.one.transport.seen().unreachable and home.other.transport.seen().unreachable
            )
        )
        await home.dial_each_other()
        if way == "through":
            dials = [p.transport._punching._dials for p in (home.one, home.other)]  # type: ignore[attr-defined]
            await until(lambda: not any(dials))
            assert home.one.transport.seen().punched == home.other.transport.seen().punched == ()
            return
        assert way == "punched"
        await until(home.is_punched)
        payload = make_payload(sender_id=home.one.node_id)
        await home.one.transport.push(home.other.node_id, payload, timeout_seconds=30)
        assert home.other.desk.received == [(home.one.node_id, payload)]


async def test_a_symmetric_and_a_port_restricted_router_are_told_apart_and_no_hole_is_there() -> (
    None
):
    async with at_home("symmetric", "port restricted") as home:
        assert len(set(await home.seen(home.one))) == 2
        assert len(set(await home.seen(home.other))) == 1
        await home.dial_each_other()
        dials = [p.transport._punching._dials for p in (home.one, home.other)]  # type: ignore[attr-defined]
        assert all(dials)
        await until(lambda: not any(dials))
        assert home.one.transport.seen().punched == home.other.transport.seen().punched == ()
        assert home.one.transport.seen().unreachable == (home.other.node_id,)


async def test_whoever_is_no_member_any_more_is_refused_through_its_hole() -> None:
    async with at_home("port restricted", "port restricted") as home:
        await home.dial_each_other()
        await until(home.is_punched)
        home.other.transport.set_roster((home.other.entry,))
        assert home.other.transport.seen().punched == ()
        payload = make_payload(sender_id=home.one.node_id)
        with pytest.raises(Exception, match="you are not on the roster") as refused:
            await home.one.transport.push(home.other.node_id, payload, timeout_seconds=30)
        assert not isinstance(refused.value, PeerUnreachableError)
        assert home.other.desk.admitted == []
        home.other.transport.punch(NodeId("nobody"), "/ip4/10.99.0.1/udp/1/quic-v1")
        assert not home.other.transport._punching._dials  # type: ignore[attr-defined]


@pytest.mark.nightly
async def test_a_hole_to_a_member_that_has_moved_or_by_a_p2pd_that_died_is_punched_again() -> None:
    async with at_home("port restricted", "port restricted") as home:
        await home.dial_each_other()
        await until(home.is_punched)
        entry = home.other.entry
        moved = replace(entry, address=replace(entry.address, multiaddrs=("/ip4/10.1.1.1/tcp/1",)))
        home.one.transport.set_roster((home.one.entry, moved))
        await until(
            lambda: not (home.one.transport.seen().punched or home.other.transport.seen().punched)
        )
        await until(lambda: home.other.transport.seen().unreachable)
        await home.dial_each_other()
        await until(home.is_punched)

        os.kill(home.one.transport._punching._daemon.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        await until(
            lambda: not (home.one.transport.seen().punched or home.other.transport.seen().punched)
        )
        await until(
            lambda: (
                home.one.transport.seen().unreachable and home.other.transport.seen().unreachable
            )
        )
        await home.dial_each_other()
        await until(home.is_punched)
        payload = make_payload(sender_id=home.one.node_id)
        await home.one.transport.push(home.other.node_id, payload, timeout_seconds=30)
        assert home.other.desk.received == [(home.one.node_id, payload)]


async def test_a_hole_that_a_router_has_forgotten_is_given_up_and_punched_again() -> None:
    async with at_home("port restricted", "port restricted") as home:
        before = await home.seen(home.one)
        home.one.transport.heed_outside(before)
        await home.dial_each_other()
        await until(home.is_punched)
        home.one.transport.heed_outside(before)
        home.one.transport.heed_outside(before[:1])  # a datagram was lost
        home.one.transport.heed_outside(())
        assert home.is_punched()

        home.lab.forget_conversations(ONE)
        await home.one.transport.show_outside(home.observers)
        await until(lambda: not set(before) & set(home.lookout.of(home.one.node_id, _token(home))))
        await asyncio.sleep(
            QUICK.punch_seconds
        )  # it is no fresh hole any more, whose dial came first
        home.one.transport.heed_outside(await home.seen(home.one))
        assert home.one.transport.seen().unreachable == (home.other.node_id,)
        assert home.other.transport.seen().punched  # nobody could tell it
        await home.dial_each_other()
        await until(home.is_punched)
        payload = make_payload(sender_id=home.other.node_id)
        await home.other.transport.push(home.one.node_id, payload, timeout_seconds=30)
        assert home.one.desk.received == [(home.other.node_id, payload)]


def _token(home: AtHome) -> bytes:
    return home.one.transport.seen().outside_token


async def test_a_machine_that_lends_no_socket_says_once_why_no_hole_is_punched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "pidfd_getfd: Operation not permitted")

    async with at_home("port restricted", "port restricted") as home:
        transport = home.one.transport
        await until(lambda: transport.seen().unreachable)
        monkeypatch.setattr(connections, "send_from", refuse)
        with capture_logs() as logs:
            for _ in range(3):
                await transport.show_outside(home.observers)
        assert transport.seen().outside_token == b""  # then nobody waits to see it
        (told,) = (line for line in logs if line["log_level"] == "warning")
        assert "no holes are punched in routers" in told["event"]
        assert "pidfd_getfd" in told["why"]


async def test_a_member_that_all_reach_starts_no_second_p2pd_and_sends_no_datagrams() -> None:
    async with at_home("full cone", "full cone") as home:
        for peer in (home.one, home.other):
            peer.transport.set_roster((peer.entry,))
            assert not await peer.transport.show_outside(home.observers)
            assert peer.transport._punching._daemon is None  # type: ignore[attr-defined]
        assert home.lab.traffic(ONE, OUTSIDE).delivered_packets == 0
