"""Tunnels through an HTTP proxy, against real sockets: what passes, what is refused, and what is left."""

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import structlog

from node.exchange.peers import Limits
from node.exchange.transport.libp2p import Libp2pTransport
from node.exchange.transport.tunnels import Tunnels, host_and_port
from node.machine.addresses import Reachability
from protocol.trust.identity import Identity
from protocol.trust.proxy import Proxy, ProxyRefusedError
from protocol.wire.payload import WireCounts
from protocol.wire.rounds import PeerAddress, RosterEntry
from tests.integration import connect_proxy
from tests.integration.transport_peers import Desk
from tests.integration.typed_commands import Swarm, done, refused, typed_here
from tests.ports import free_port
from tests.relay_scene import echo
from tests.tiny_runs import tiny_text

HOST = "127.0.0.1"
MB = bytes(range(256)) * 4096
SAID = "no tunnel to a member"

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def listening(serve: Serve) -> AsyncIterator[int]:
    server = await asyncio.start_server(serve, HOST, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@contextlib.contextmanager
def proxy_to(port: int, login: str = "") -> Iterator[Proxy]:
    """The proxy's process, which lets through to that port alone."""
    command = [sys.executable, connect_proxy.__file__, HOST, "0", str(port), login]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield Proxy.read(f"http://{login}@{HOST}:{process.stdout.readline().split()[-1]}")
        finally:
            process.kill()


async def dialled(local: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    place = host_and_port(local)
    assert place is not None and place[0] == HOST
    return await asyncio.open_connection(*place)


async def test_a_tunnel_carries_both_ways_and_takes_one_connection_alone() -> None:
    async with listening(echo) as port:
        with proxy_to(port, "me:secret") as proxy:
            tunnels = Tunnels(proxy)
            async with tunnels.to(f"/ip4/{HOST}/tcp/{port}", peer_id="them", seconds=10) as local:
                reader, writer = await dialled(local)
                writer.write(MB)
                assert await reader.readexactly(len(MB)) == MB
                assert tunnels.peer_ids == {"them"}
                another, its_writer = await dialled(local)
                assert await another.read() == b""
                its_writer.close()
            with pytest.raises(OSError):  # nobody listens there any more
                await dialled(local)
            writer.write(b"and it goes on")
            assert await reader.readexactly(14) == b"and it goes on"
            await tunnels.close()
            assert await reader.read() == b""
            assert tunnels.peer_ids == frozenset()
            writer.close()


async def test_the_end_of_one_side_is_the_end_of_the_other_with_all_that_was_sent() -> None:
    async def say_all(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(16 * MB)  # more than kernels hold
        writer.close()

    async with listening(say_all) as port:
        with proxy_to(port) as proxy:
            tunnels = Tunnels(proxy)
            async with tunnels.to(f"/ip4/{HOST}/tcp/{port}", peer_id="them", seconds=10) as local:
                reader, writer = await dialled(local)
            assert await reader.read() == 16 * MB
            writer.close()
            await tunnels.close()


async def test_what_a_proxy_refuses_is_said_with_its_words() -> None:
    async with listening(echo) as port:
        with proxy_to(port + 1, "me:secret") as proxy:
            for given, words in (
                (proxy, r"lets nobody through to 127.0.0.1:\d+ \(403 Forbidden\)"),
                (Proxy(host=proxy.host, port=proxy.port), r"\(407 Proxy Authentication Required\)"),
            ):
                with pytest.raises(ProxyRefusedError, match=words):
                    async with Tunnels(given).to(
                        f"/ip4/{HOST}/tcp/{port}", peer_id="them", seconds=10
                    ):
                        pytest.fail("there is no tunnel")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "hangs up"),
        (b"HTTP/1.1 200 OK\r\n", "hangs up"),
        (b"SSH-2.0-OpenSSH_9\r\n\r\n", "is no HTTP proxy"),
        (b"HTTP/1.1 200 " + b"x" * 20_000 + b"\r\n\r\n", "answers too much"),
        (b"HTTP/1.1 200 " + b"x" * 200_000, "hangs up"),
    ],
)
async def test_what_is_no_proxy_is_left(answer: bytes, words: str) -> None:
    async def odd(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with listening(odd) as port:
        tunnels = Tunnels(Proxy(host=HOST, port=port))
        with pytest.raises(ProxyRefusedError, match=words):
            async with tunnels.to(f"/ip4/{HOST}/tcp/443", peer_id="them", seconds=10):
                pytest.fail("there is no tunnel")


async def test_a_silent_proxy_is_given_up_and_what_is_no_address_of_tcp_is_not_asked() -> None:
    async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    async with listening(silent) as port:
        tunnels = Tunnels(Proxy(host=HOST, port=port))
        with pytest.raises(ProxyRefusedError, match=r"does not answer within 0\.2 s"):
            async with tunnels.to(f"/ip4/{HOST}/tcp/443", peer_id="them", seconds=0.2):
                pytest.fail("there is no tunnel")
        for odd in ("/ip4/127.0.0.1/udp/443/quic-v1", "/p2p/x", "", "/ip4/127.0.0.1/tcp/x"):
            with pytest.raises(ProxyRefusedError, match="is no address of TCP"):
                async with tunnels.to(odd, peer_id="them", seconds=10):
                    pytest.fail("there is no tunnel")


async def test_a_member_to_whom_the_proxy_does_not_lead_is_said_once() -> None:
    other = Identity.generate()
    nowhere = f"/ip4/{HOST}/tcp/{free_port()}"
    entry = RosterEntry(
        node_id=other.node_id,
        node_name="other",
        address=PeerAddress(public_key=other.public_key, multiaddrs=(nowhere,)),
    )
    limits = Limits(first_redial_seconds=0.05, last_redial_seconds=0.05, yield_seconds=0.0)
    with proxy_to(443) as proxy, structlog.testing.capture_logs() as logged:
        transport = Libp2pTransport(
            identity=Identity.generate(),
            counts=WireCounts(),
            limits=limits,
            reachability=Reachability(proxy=proxy),
        )
        await transport.start(Desk())
        try:
            transport.set_roster((entry,))
            async with asyncio.timeout(30):
                while not (told := [one for one in logged if one["event"] == SAID]):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert "403 Forbidden" in told[0]["why"] and "--port 443" in told[0]["next_step"]
            await asyncio.sleep(0.5)  # it is dialled some times more
            assert len([one for one in logged if one["event"] == SAID]) == 1
        finally:
            await transport.stop()


def test_a_member_joins_and_asks_through_a_proxy_and_not_past_it(tmp_path: Path) -> None:
    """Its coordinator has one port, as where firewalls let out no other."""
    swarm = Swarm(tmp_path / "swarm", tiny_text(run={"name": "office"}))
    try:
        swarm.coordinator.stop(signal.SIGTERM)
        port, home = free_port(), tmp_path / "node"
        swarm.coordinator = swarm.begin_coordinator("--one-port", str(port))
        swarm.coordinator.says("coordinator ready")
        join = ("join", swarm.invite(), "--dir", home, "--name", "behind", "--proxy")
        with proxy_to(port, "me:secret") as proxy:
            wrong = proxy.url.replace("secret", "wrong")
            refused(typed_here(*join, wrong), 69, "407 Proxy Authentication", "--one-port 443")
            refused(typed_here(*join, "https://proxy.example"), 64, "spoken to by http")
            done(typed_here(*join, proxy.url))
            assert (home / "link.toml").stat().st_mode & 0o777 == 0o600
            assert "office" in done(typed_here("status", "--dir", home))
        # It has ended, and the coordinator is where it was.
        refused(typed_here("status", "--dir", home), 69)
        assert "office" in done(typed_here("status", "--dir", swarm.home))
    finally:
        swarm.end()
