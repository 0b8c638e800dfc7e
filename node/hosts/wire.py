"""Messages between the hosts of an island: a little JSON, and after some of them a vector's bytes.

Sizes are checked before anything is read, and nothing is unpickled.
"""

import asyncio
import hashlib
import hmac
import json
import socket
import ssl
import struct
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Final

import numpy as np

from node.hosts.token import HostToken, LeaderKey
from node.outer_state import Vector
from protocol.errors import ProtocolMismatchError, UnavailableError

MAX_MESSAGE_BYTES: Final = 1 << 20
_CHUNK_BYTES = 1 << 20  # keeps the event loop free for others between two of them
_DEAD_AFTER_MILLISECONDS = 20_000

Message = dict[str, Any]


class Wire:
    """One connection; a message is sent and received as a whole."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._sending = asyncio.Lock()
        connection: socket.socket = writer.get_extra_info("socket")
        # A host that lost its power says nothing more.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, 5),
            (socket.TCP_KEEPINTVL, 5),
            (socket.TCP_KEEPCNT, 3),
            (socket.TCP_USER_TIMEOUT, _DEAD_AFTER_MILLISECONDS),
        ):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)

    @property
    def own_host(self) -> str:
        """Our address on the link to the other host."""
        return str(self._writer.get_extra_info("sockname")[0])

    @property
    def peer(self) -> str:
        """The other side's address."""
        address = self._writer.get_extra_info("peername")  # None of who was gone at once
        return str(address[0]) if address else "an unknown address"

    async def send(self, message: Message, vector: Vector | None = None) -> None:
        """Raises OSError when the connection is gone."""
        if vector is not None:
            message = message | {"num_elements": len(vector)}
        text = json.dumps(message).encode()
        assert len(text) <= MAX_MESSAGE_BYTES
        async with self._sending:
            self._writer.write(struct.pack(">I", len(text)) + text)
            if vector is not None:
                view = vector.astype("<f4", copy=False).data.cast("B")
                for start in range(0, len(view), _CHUNK_BYTES):
                    self._writer.write(view[start : start + _CHUNK_BYTES])
                    await self._writer.drain()
            await self._writer.drain()

    async def receive(self, *, most_bytes: int = MAX_MESSAGE_BYTES) -> Message:
        """The next message; its vector must be received before the one after it.

        Raises EOFError or OSError at the end of the connection, ProtocolMismatchError for nonsense.
        """
        (size,) = struct.unpack(">I", await self._reader.readexactly(4))
        if size > most_bytes:
            raise ProtocolMismatchError(f"{self.peer} sends a message of {size:,} bytes")
        try:
            message = json.loads(await self._reader.readexactly(size))
        except (ValueError, RecursionError) as error:
            raise ProtocolMismatchError(f"{self.peer} sends no messages of ours") from error
        if not isinstance(message, dict):
            raise ProtocolMismatchError(f"{self.peer} sends no messages of ours")
        return message

    async def receive_vector(self, message: Message, into: Vector) -> None:
        """What follows a message with a vector, which has to be of that length."""
        if message.get("num_elements") != len(into):
            raise ProtocolMismatchError(
                f"{self.peer} sends {message.get('num_elements')} values instead of {len(into)}"
            )
        view = into.data.cast("B")
        for start in range(0, len(view), _CHUNK_BYTES):
            part = view[start : start + _CHUNK_BYTES]
            part[:] = await self._reader.readexactly(len(part))

    def close(self) -> None:
        """Ends the connection once what was sent is on its way; safe to repeat."""
        self._writer.close()


async def connect(token: HostToken) -> Wire:
    """A connection to the leader that the token names, with the secret told.

    Raises UnavailableError, and ProtocolMismatchError when somebody else answers.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the pin says who it is, wherever it listens
    context.verify_mode = ssl.CERT_NONE
    try:
        reader, writer = await asyncio.open_connection(token.host, token.port, ssl=context)
    except OSError as error:
        raise UnavailableError(
            f"no leader answers at {token.host}:{token.port}: {error.strerror or error}",
            next_step="start it there with --hosts and --island-listen",
        ) from error
    wire = Wire(reader, writer)
    certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    if not hmac.compare_digest(hashlib.sha256(certificate).digest(), token.pin):
        wire.close()
        raise ProtocolMismatchError(
            f"who answers at {token.host}:{token.port} is not the token's leader",
            next_step="copy island.token from the leader's folder again",
        )
    await wire.send({"secret": token.secret})
    return wire


async def is_invited(wire: Wire, secret: str) -> bool:
    """Whether the other side begins with the secret; reads nothing but that."""
    try:
        async with asyncio.timeout(10):
            first = await wire.receive(most_bytes=1024)
    except (OSError, EOFError, TimeoutError, ProtocolMismatchError):
        return False
    told = first.get("secret")
    if not isinstance(told, str):
        return False
    # JSON may hold half a character, which strict encoding would refuse with an error.
    return hmac.compare_digest(told.encode(errors="replace"), secret.encode())


def server_context(key: LeaderKey) -> ssl.SSLContext:
    """The leader's side of TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with NamedTemporaryFile(prefix="atoll-island-") as file:  # Python takes keys from files only
        Path(file.name).write_bytes(key.certificate_pem + key.key_pem)
        context.load_cert_chain(file.name)
    return context


def zeros(num_elements: int) -> Vector:
    """A vector to receive into."""
    return np.zeros(num_elements, np.float32)
