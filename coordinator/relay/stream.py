"""Both ends of a relay's connections: messages while one is idle, and then two streams joined into one.

A coordinator keeps some connections to its relay, over TLS 1.3, and begins each with a message of who it is.
A message is a line of JSON. When somebody connects to one of its ports, the relay says so on one of them;
from the answer on it carries that stream, as it is. What it carries is the coordinator's own TLS.
"""

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable
from typing import Any

from protocol.errors import ProtocolMismatchError
from protocol.wire.sockets import ignore_end_of

MAX_MESSAGE_BYTES = 1 << 14
CHUNK_BYTES = 1 << 16

PING_SECONDS = 3.0
"""The relay pings idle connections so often; one that does not answer until the next is given up."""

SILENT_SECONDS = 2.5 * PING_SECONDS
"""After so long without a ping a coordinator gives an idle connection up."""

UNACKNOWLEDGED_MILLISECONDS = 10_000
"""What the other end's kernel does not acknowledge for so long goes nowhere."""

Message = dict[str, Any]


class Connection:
    """One of them."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        ignore_end_of(writer)
        peer = writer.get_extra_info("peername")
        self.address = str(peer[0]) if peer else "?"
        plain = writer.get_extra_info("socket")
        if plain is not None and plain.family in (socket.AF_INET, socket.AF_INET6):
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MILLISECONDS
            )

    async def send(self, **message: object) -> None:
        """Sends a message."""
        self._write(message)
        await self.writer.drain()

    def mention(self, **message: object) -> None:
        """Sends what may as well be lost: not to who reads slowly."""
        if self.writer.transport.get_write_buffer_size() < CHUNK_BYTES:
            self._write(message)

    def _write(self, message: Message) -> None:
        self.writer.write(json.dumps(message).encode() + b"\n")

    async def receive(self) -> Message:
        """The next message. Raises OSError at the end, ProtocolMismatchError for nonsense."""
        try:
            line = await self.reader.readline()
            if not line.endswith(b"\n"):
                raise ConnectionResetError("the connection was closed")
            message = json.loads(line)
        except (ValueError, RecursionError) as error:  # readline's too, for one without an end
            raise ProtocolMismatchError(f"{self.address} sends no messages of ours") from error
        if not isinstance(message, dict):
            raise ProtocolMismatchError(f"{self.address} sends no messages of ours")
        return message

    @property
    def is_closing(self) -> bool:
        """Whether it ends, or has ended."""
        return self.writer.is_closing()

    def close(self) -> None:
        """Ends it once what was written is on its way; safe to repeat."""
        self.writer.close()

    def abort(self) -> None:
        """Ends it now."""
        self.writer.transport.abort()


async def accepted(plain: socket.socket, **tls: Any) -> Connection:
    """A connection of a socket that was accepted; with `ssl` once TLS is agreed on. Raises OSError."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=CHUNK_BYTES)
    protocol = asyncio.StreamReaderProtocol(reader)
    try:
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, plain, **tls)
    except BaseException:
        plain.close()
        raise
    return Connection(reader, asyncio.StreamWriter(transport, protocol, reader, loop))


async def joined(
    one: Connection,
    other: Connection,
    *,
    idle_seconds: float,
    wait_seconds: Callable[[int], float] = lambda num_bytes: 0.0,
) -> None:
    """Carries bytes both ways until one end closes, or nothing moves for so long; closes both.

    Who reads slowly is sent slowly: no more than a few chunks wait here. `wait_seconds` is asked before
    each chunk is passed on.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(idle_seconds) as idle:

            async def carry(source: Connection, target: Connection) -> None:
                while data := await source.reader.read(CHUNK_BYTES):
                    if (seconds := wait_seconds(len(data))) > 0:
                        idle.reschedule(loop.time() + seconds + idle_seconds)
                        await asyncio.sleep(seconds)
                    target.writer.write(data)
                    await target.writer.drain()
                    idle.reschedule(loop.time() + idle_seconds)

            ways = [asyncio.ensure_future(carry(*way)) for way in ((one, other), (other, one))]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
    except TimeoutError:
        one.abort()
        other.abort()
    finally:
        one.close()
        other.close()
        for end in (one, other):
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(idle_seconds):
                    await end.writer.wait_closed()
