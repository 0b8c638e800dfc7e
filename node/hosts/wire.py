"""How the hosts of an island reach and trust each other: the token, the connection, and where ranks meet.

A token lets a host follow: it says where the leader listens, whose certificate it has, and a secret. The
follower sends the secret only to who holds the certificate's key, and the leader reads nothing else before
it. Both last as long as the leader's folder.

Messages are a little JSON, and after some of them a vector's bytes. Sizes are checked before anything is
read, and nothing is unpickled.

Ranks meet at a store of torch's on one interface, a fresh one each time. Within the network of the island
nothing is encrypted or authenticated, neither that nor what ranks send each other; docs/footguns.md says so.
"""

import asyncio
import base64
import fcntl
import hmac
import json
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from node.island.ranks.aside import Aside
from node.outer_state import Vector
from protocol.errors import (
    BadDataError,
    ConfigError,
    NoInputError,
    ProtocolMismatchError,
    UnavailableError,
)
from protocol.files.durable import refusing, write_atomically
from protocol.trust.handshake import PinnedKey, client_context, has_pin

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


TOKEN_FILE = "island.token"
_KEY_FILE = "island.key"
_PREFIX = "atoll-island-"

MAX_MESSAGE_BYTES: Final = 1 << 20
_CHUNK_BYTES = 1 << 20  # keeps the event loop free for others between two of them
_DEAD_AFTER_MILLISECONDS = 20_000

Message = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostToken:
    """What a follower is given."""

    host: str
    port: int
    pin: bytes  # of the leader's certificate
    secret: str

    def text(self) -> str:
        """For a file, or a shell's variable."""
        values = [self.host, self.port, self.pin.hex(), self.secret]
        return _PREFIX + base64.urlsafe_b64encode(json.dumps(values).encode()).decode()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises BadDataError."""
        try:
            if not text.startswith(_PREFIX):
                raise ValueError
            values = json.loads(base64.urlsafe_b64decode(text.removeprefix(_PREFIX)))
            host, port, pin, secret = values
            return cls(host=str(host), port=int(port), pin=bytes.fromhex(pin), secret=str(secret))
        except (ValueError, TypeError) as error:
            raise BadDataError(
                "that is not a whole island token",
                next_step=f"copy the leader's {TOKEN_FILE} again",
            ) from error

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises NoInputError, BadDataError."""
        try:
            return cls.parse(path.read_text().strip())
        except (OSError, UnicodeDecodeError) as error:
            raise NoInputError(
                f"{path} cannot be read",
                next_step=f"copy {TOKEN_FILE} from the leader's folder",
            ) from error


class LeaderKey(PinnedKey):
    """What the leader keeps."""

    __slots__ = ()

    @classmethod
    def of_folder(cls, folder: Path) -> Self:
        """Made at the first use. Raises BadDataError."""
        return cls.of_file(
            folder / _KEY_FILE, when_damaged="remove it; hosts then need the new token"
        )

    def token(self, host: str, port: int) -> HostToken:
        """For the hosts that may follow."""
        return HostToken(host=host, port=port, pin=self.pin, secret=self.secret.hex())

    def write_token(self, folder: Path, host: str, port: int) -> Path:
        """The file to copy to the other hosts."""
        path = folder / TOKEN_FILE
        with refusing(path):
            write_atomically(path, self.token(host, port).text().encode() + b"\n", mode=0o600)
        return path


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
    try:
        reader, writer = await asyncio.open_connection(token.host, token.port, ssl=client_context())
    except OSError as error:
        raise UnavailableError(
            f"no leader answers at {token.host}:{token.port}: {error.strerror or error}",
            next_step="start it there with --hosts and --island-listen",
        ) from error
    wire = Wire(reader, writer)
    if not has_pin(writer, token.pin):
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


def zeros(num_elements: int) -> Vector:
    """A vector to receive into."""
    return np.zeros(num_elements, np.float32)


_SIOCGIFADDR = 0x8915


async def open_store(host: str) -> tuple[Aside, int]:
    """A store that listens on this address alone until it is closed; and its port."""
    aside = Aside(_store, host)
    try:
        port: int = await aside.answer()
    except BaseException:
        aside.close()
        raise
    return aside, port


def _store(connection: "Connection[int, None]", host: str) -> None:
    import torch.distributed as dist

    listening = socket.create_server((host, 0))
    port: int = listening.getsockname()[1]
    store = dist.TCPStore(  # type: ignore[attr-defined]  # is public
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),  # else it would listen on all addresses
    )
    connection.send(port)
    with suppress(EOFError, OSError):
        connection.recv()  # until the daemon closes it, or ends
    del store


def interface_of(address: str) -> str:
    """The network interface that has an IPv4 address, as NCCL and gloo want it named."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # it has no IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    raise ConfigError(
        f"no network interface of this machine has the address {address}",
        next_step="give --island-listen an IPv4 address of the link to the other hosts",
    )
