"""A relay on loopback, and coordinators that it carries: the same ports on another address."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from coordinator.relay.doors import Limits
from coordinator.relay.line import PORTS_FILE, Carriage, KeptPorts, RelayKey
from coordinator.relay.server import Relay
from coordinator.relay.through import Through
from coordinator.services.outside import Lookout
from tests import ports

HOST = "127.0.0.1"
AT_HOME = "127.0.0.2"
"""Where coordinators listen, and nobody dials but their own side."""

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def free_port() -> int:
    """On the address that all is started on."""
    return ports.free_port(HOST)


async def until(is_done: Callable[[], bool], seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not is_done():  # noqa: ASYNC110 - nobody tells a test of it
            await asyncio.sleep(0.01)


class World:
    """A relay's folder, and what is started around it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.key = RelayKey.of_folder(folder)
        self.port = free_port()
        self.allowed = range(1024, 1 << 16)

    @asynccontextmanager
    async def relay(self, **limits: object) -> AsyncIterator[Relay]:
        relay = Relay(
            key=self.key,
            ports=KeptPorts(self.folder / PORTS_FILE),
            host=HOST,
            port=self.port,
            allowed=self.allowed,
            limits=replace(Limits(), **limits),  # type: ignore[arg-type]
        )
        try:
            yield relay
        finally:
            await relay.stop()

    @asynccontextmanager
    async def coordinator(
        self,
        port: int,
        *,
        carriage: Carriage | None = None,
        serve: Serve | None = None,
        lookout: Lookout | None = None,
    ) -> AsyncIterator[Through]:
        """One whose port answers with what it is sent, or as `serve` does."""
        server = await asyncio.start_server(serve or echo, AT_HOME, port)
        through = Through(
            carriage or self.carriage(),
            name="run",
            host=AT_HOME,
            ports={port: port},
            lookout=lookout,
        )
        try:
            await through.start()
            yield through
        finally:
            await through.stop()
            server.close()

    def carriage(self) -> Carriage:
        return Carriage.new(self.key.line(HOST, self.port).encode())


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()


async def said(port: int, content: bytes = b"hello") -> bytes:
    """What comes back from the relay's port."""
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(HOST, port)
        try:
            writer.write(content)
            await writer.drain()
            return await reader.readexactly(len(content))
        except asyncio.IncompleteReadError as error:
            return error.partial
        finally:
            writer.close()
