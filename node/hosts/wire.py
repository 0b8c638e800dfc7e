"""How the hosts of an island reach and trust each other, and what is ordered: token, connection, orders.

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
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Self, TypeVar

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from node.island.checkpoints.folder import About, Kept, Loaded
from node.island.island import Evaluation, InnerReport, InnerWork
from node.island.parallel.mesh_shape import LocalTraining, MeshShape
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
from protocol.trust.armour import ISLAND_PREFIX
from protocol.trust.handshake import PinnedKey, pinned_connection
from protocol.wire.sockets import ignore_end_of

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


TOKEN_FILE = "island.token"
_KEY_FILE = "island.key"

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
    secret: str = field(repr=False)

    def text(self) -> str:
        """For a file, or a shell's variable."""
        values = [self.host, self.port, self.pin.hex(), self.secret]
        return ISLAND_PREFIX + base64.urlsafe_b64encode(json.dumps(values).encode()).decode()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises BadDataError."""
        try:
            if not text.startswith(ISLAND_PREFIX):
                raise ValueError
            values = json.loads(base64.urlsafe_b64decode(text.removeprefix(ISLAND_PREFIX)))
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
        ignore_end_of(writer)
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
    another = ProtocolMismatchError(
        f"what answers at {token.host}:{token.port} is not the token's leader",
        next_step="copy island.token from the leader's folder again",
    )
    try:
        wire = Wire(*await pinned_connection(token.host, token.port, token.pin, another=another))
        await wire.send({"secret": token.secret})
    except OSError as error:
        raise UnavailableError(
            f"no leader answers at {token.host}:{token.port}: {error.strerror or error}",
            next_step="start it there with --hosts and --island-listen",
        ) from error
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


# What the leader orders of a host that follows, and what it answers: values, and how they look on the wire.
#
# Another machine sends them, so each is checked against its type before it is acted on.


Answer = TypeVar("Answer")


class Order(Generic[Answer]):
    """One order, by the type of its answer. An argument too many is refused."""

    __slots__ = ()
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The ranks are up."""

    corpus: str  # digest of what they read, in hex


@dataclass(frozen=True, slots=True, kw_only=True)
class Start(Order[Started]):
    """Bring up these ranks of the island. Answered when all hosts' ranks have met."""

    spec: dict[str, Any]  # the run file's tables
    shape: MeshShape
    local: LocalTraining
    first_rank: int
    num_ranks: int
    host: str  # where ranks meet
    port: int
    num_hosts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One host's part of one writing."""

    set_id: str
    host: int
    num_hosts: int  # that wrote

    @classmethod
    def of(cls, about: About) -> Self:
        """Whose part of what a checkpoint is."""
        return cls(set_id=about.set_id, host=about.host, num_hosts=about.num_hosts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelved:
    """The parts of checkpoints that lie here."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenShelf(Order[Shelved]):
    """Look which parts of this run's checkpoints are here. No rank runs."""

    run_digest: str  # in hex
    layout_digest: str
    every_rounds: int
    num_hosts: int
    num_elements: int
    num_parts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeOver(Order[Loaded]):
    """Have the ranks go on from a checkpoint; `about` goes without its files, which differ by host."""

    about: About


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold(Order[None]):
    """Note what all hosts published of a fragment; its values come with the order."""

    fragment: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopt(Order[None]):
    """Take over global parameters, of a fragment or of all; they come with the order."""

    fragment: int | None
    is_taken: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Train(Order[InnerReport]):
    """Take inner steps; progress is told meanwhile."""

    work: InnerWork


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish(Order[None]):
    """Send what these ranks publish of a fragment, zero where others do: the values come with the answer."""

    fragment: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepPart(Order[Kept]):
    """Write these ranks' part of a checkpoint."""

    round: int
    is_waited: bool
    set_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate(Order[Evaluation]):
    """Measure the held-out loss of the global parameters, which come with the order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop(Order[None]):
    """End the ranks; others may be started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End(Order[None]):
    """The leader ends."""


_ANSWERS: Mapping[type[Order[Any]], Any] = {
    Start: Started,
    OpenShelf: Shelved,
    TakeOver: Loaded,
    Hold: None,
    Adopt: None,
    Train: InnerReport,
    Publish: None,
    KeepPart: Kept,
    Evaluate: Evaluation,
    Stop: None,
    End: None,
}
_BY_NAME = {order.__name__: order for order in _ANSWERS}
_ORDER_OF = {order: TypeAdapter(order) for order in _ANSWERS}
_ANSWER_OF: Mapping[type[Order[Any]], TypeAdapter[Any]] = {
    order: TypeAdapter(answer) for order, answer in _ANSWERS.items()
}


def to_wire(order: Order[Any]) -> Message:
    """An order as a message."""
    kind = type(order)
    return {"order": kind.__name__, "arguments": _ORDER_OF[kind].dump_python(order)}


def from_wire(message: Message) -> Order[Any]:
    """The order that a message holds; raises ProtocolMismatchError."""
    kind = _BY_NAME.get(str(message.get("order")))
    if kind is None:
        raise ProtocolMismatchError(
            f"the leader orders {message.get('order')!r}, which is no order"
        )
    try:
        order: Order[Any] = _ORDER_OF[kind].validate_python(message.get("arguments"))
    except ValidationError as error:
        raise ProtocolMismatchError(
            f"the leader orders {kind.__name__} wrongly: {_first(error)}"
        ) from error
    return order


def answer_to_wire(order: Order[Answer], answer: Answer) -> Any:
    """An answer as it goes into a message."""
    return _ANSWER_OF[type(order)].dump_python(answer)


def answer_from_wire(order: Order[Answer], told: object) -> Answer:
    """What was answered; raises ProtocolMismatchError."""
    try:
        answer: Answer = _ANSWER_OF[type(order)].validate_python(told)
    except ValidationError as error:
        name = type(order).__name__
        raise ProtocolMismatchError(f"{name} was answered wrongly: {_first(error)}") from error
    return answer


def _first(error: ValidationError) -> str:
    """Its first complaint, with the place."""
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place}: {first['msg']}" if place else str(first["msg"])
