"""Tunnels through an HTTP proxy to members, for p2pd, which knows no proxies.

p2pd dials an address of loopback, where one connection is taken and joined with the tunnel. What passes is
libp2p's own, encrypted and authenticated from end to end; the proxy sees times and sizes.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

from node.exchange.transport.streams import BROKEN, drop
from node.heavy import cancelled
from protocol.trust.proxy import MAX_ANSWER_BYTES, Proxy, ProxyRefusedError
from protocol.wire.sockets import connection_to, looked_up

CHUNK_BYTES = 1 << 16

SILENT_SECONDS = 15
"""After about so long a proxy whose kernel acknowledges nothing is given up."""

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def host_and_port(multiaddr: str) -> tuple[str, int] | None:
    """Of an address of TCP; None of others."""
    match multiaddr.split("/"):
        case ["", "ip4" | "ip6" | "dns" | "dns4" | "dns6", host, "tcp", port] if port.isdecimal():
            return host, int(port)
    return None


class Tunnels:
    """Those of one node, until it closes them."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self._joined: dict[asyncio.Task[None], str] = {}  # to whom each leads

    @property
    def peer_ids(self) -> frozenset[str]:
        """Whom they lead to now."""
        return frozenset(self._joined.values())

    @contextlib.asynccontextmanager
    async def to(self, multiaddr: str, *, peer_id: str, seconds: float) -> AsyncIterator[str]:
        """A multiaddress of loopback that leads to that peer, to be dialled once within the block.

        Raises OSError where the proxy makes no tunnel within so many seconds.
        """
        place = host_and_port(multiaddr)
        if place is None:
            raise ProxyRefusedError(f"{multiaddr} is no address of TCP")
        try:
            async with asyncio.timeout(seconds):
                there = await self._made(*place)
        except TimeoutError as error:
            raise ProxyRefusedError(
                f"the proxy {self.proxy.endpoint} does not answer within {seconds:g} s"
            ) from error
        taken: list[Ends] = []

        def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if taken:
                drop(writer)
                return
            taken.append((reader, writer))
            task = asyncio.create_task(_joined((reader, writer), there), name="tunnel")
            self._joined[task] = peer_id
            task.add_done_callback(self._joined.pop)

        try:
            listening = await asyncio.start_server(take, "127.0.0.1", 0, limit=CHUNK_BYTES)
            try:
                yield f"/ip4/127.0.0.1/tcp/{listening.sockets[0].getsockname()[1]}"
            finally:
                listening.close()
        finally:
            if not taken:
                drop(there[1])

    async def close(self) -> None:
        """Ends all of them."""
        await cancelled(self._joined)

    async def _made(self, host: str, port: int) -> Ends:
        proxy = self.proxy
        hosts = await looked_up(proxy.host, proxy.port)
        reader, writer = await connection_to(hosts, proxy.port, limit=CHUNK_BYTES)
        try:
            _heed_silence(writer.get_extra_info("socket"))
            writer.write(proxy.request(host, port))
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
                raise ProxyRefusedError(f"the proxy {proxy.endpoint} hangs up") from error
            if len(head) > MAX_ANSWER_BYTES:
                raise ProxyRefusedError(f"the proxy {proxy.endpoint} answers too much")
            proxy.check(head, host, port)
        except BaseException:
            drop(writer)
            raise
        return reader, writer


def _heed_silence(connection: socket.socket) -> None:
    """p2pd's own kernel sees only loopback, so nothing else finds out that a tunnel leads nowhere."""
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_USER_TIMEOUT, 1000 * SILENT_SECONDS),
        (socket.TCP_KEEPIDLE, SILENT_SECONDS // 3),
        (socket.TCP_KEEPINTVL, SILENT_SECONDS // 3),
        (socket.TCP_KEEPCNT, 2),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


async def _joined(one: Ends, other: Ends) -> None:
    """Carries both ways until one end closes. Who reads slowly is sent slowly."""

    async def carry(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(CHUNK_BYTES):
            target.write(data)
            await target.drain()

    ways = [
        asyncio.ensure_future(carry(one[0], other[1])),
        asyncio.ensure_future(carry(other[0], one[1])),
    ]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        for writer in (one[1], other[1]):
            writer.close()  # once what was written is on its way
        with contextlib.suppress(*BROKEN):
            async with asyncio.timeout(SILENT_SECONDS):
                await asyncio.gather(one[1].wait_closed(), other[1].wait_closed())
    finally:
        await cancelled(ways)
        drop(one[1])
        drop(other[1])
