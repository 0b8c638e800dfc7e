"""The relay itself, and its process: who is carried, who connects to whom, and by which connection.

Coordinators dial one port, with the secret of the relay's line; for each the relay listens on its ports as
long as it is here. It reads nothing of what it carries, has no key of any run, and dials nobody. Of datagrams
to those ports it tells the coordinator from where they come, and answers none (coordinator.services.outside).
"""

import asyncio
import contextlib
import hmac
from collections import deque
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import structlog

from coordinator.relay.doors import Doors, Limits, Pace, Place, Places, listening_socket, source_of
from coordinator.relay.line import LINE_FILE, PORTS_FILE, KeptPorts, RelayKey
from coordinator.relay.stream import CHUNK_BYTES, PING_SECONDS, Connection, Message, joined
from coordinator.services.outside import TOKEN_BYTES, Listening, listen
from protocol.errors import AtollError, ProtocolMismatchError, SystemRefusedError
from protocol.files.durable import FolderLock, make_folder, write_atomically
from protocol.service.beside import beside
from protocol.service.limits import require_open_files
from protocol.service.notify import ServiceManager, stop_signals
from protocol.terminal.console import printable, say
from protocol.terminal.logging import keeping_the_end, start_logging
from protocol.trust.invite import endpoint_of

if TYPE_CHECKING:
    import socket


HELLO_SECONDS = 10.0
"""For TLS, and again for who a coordinator says it is."""

STRANGERS = Limits(most=256, most_per_address=64, burst_per_address=1 << 20)
"""Connections in that state; coordinators open as many as nodes come at once."""

MOST_PORTS = 3
"""Of one coordinator."""

MOST_NAME = 128
"""Characters of what a coordinator says of itself."""

MOST_DATAGRAMS = 200
"""A second, that one coordinator is told of: anybody can send them. Its nodes send one a second at most."""

MOST_SPARES = 64
"""Connections that wait for somebody, of one coordinator."""

_log = structlog.get_logger(__name__)


class _Spare(Connection):
    """A coordinator's connection that waits for somebody to be carried."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection.reader, connection.writer)
        self.taken: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.carries: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def wait(self) -> None:
        """Pings until it is taken; then settles `carries`. Raises OSError, ProtocolMismatchError."""
        told = asyncio.ensure_future(self.receive())
        try:
            is_answered = True
            while not self.taken.done():
                waits_for: set[asyncio.Future[Any]] = {told, self.taken}
                await asyncio.wait(
                    waits_for, timeout=PING_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                if told.done():
                    told.result()
                    is_answered, told = True, asyncio.ensure_future(self.receive())
                elif not self.taken.done():
                    if not is_answered:
                        raise TimeoutError("it does not answer")
                    is_answered = False
                    await self.send(ping=True)
            await self.send(carry=self.taken.result())
            while "carrying" not in (message := await told):  # a ping's answer may come before
                told = asyncio.ensure_future(self.receive())
            self.carries.set_result(message["carrying"] is True)
        finally:
            told.cancel()
            if not self.carries.done():
                self.carries.set_result(False)
            await asyncio.gather(told, return_exceptions=True)


class _Carried:
    """A coordinator that is here: its ports, and its connections that wait for somebody."""

    def __init__(self, hello: "_Hello", address: str) -> None:
        self.name, self.process, self.address = hello.name, hello.process, address
        self.listening: dict[int, asyncio.Task[None]] = {}
        self.datagrams = Listening({})
        self._told_in_second = (0, 0)  # the second, and of how many datagrams
        self.num_connections = 0
        self.spares: deque[_Spare] = deque()
        self.came = asyncio.Condition()

    def saw(self, datagram: bytes, host: str, port: int, on_port: int) -> None:
        """Tells the coordinator, by a connection that waits."""
        second = int(asyncio.get_running_loop().time())
        num = self._told_in_second[1] if self._told_in_second[0] == second else 0
        if len(datagram) != TOKEN_BYTES or not self.spares or num == MOST_DATAGRAMS:
            return
        self._told_in_second = (second, num + 1)
        # By all in turns: one of them may be dead, and nobody has noticed.
        self.spares[num % len(self.spares)].mention(
            saw=datagram.hex(), host=host, port=port, on_port=on_port
        )

    async def connection_for(self, port: int) -> _Spare:
        """One that carries from now on; waits for it."""
        while True:
            async with self.came:
                await self.came.wait_for(lambda: bool(self.spares))
                spare = self.spares.popleft()
            spare.taken.set_result(port)
            try:
                if await asyncio.shield(spare.carries):
                    return spare
            except asyncio.CancelledError:
                spare.abort()
                raise
            spare.abort()  # it was gone, and nobody had seen it; or the coordinator cannot carry more


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hello:
    """Who a coordinator says it is. `owner` is the secret of its folder, `process` a name of its start."""

    owner: bytes
    process: str
    ports: tuple[int, ...]
    name: str

    @classmethod
    def read(cls, message: Message) -> Self:
        """Raises ProtocolMismatchError."""
        owner, process, ports, name = map(message.get, ("owner", "process", "ports", "name"))
        if (
            not (isinstance(owner, str) and isinstance(process, str) and isinstance(name, str))
            or not (isinstance(ports, list) and 0 < len(ports) <= MOST_PORTS)
            or not all(type(port) is int and 0 < port < 1 << 16 for port in ports)
            or not all(len(text) <= MOST_NAME for text in (owner, process, name))
        ):
            raise ProtocolMismatchError("what connects is no coordinator of this version of Atoll")
        try:
            return cls(
                owner=bytes.fromhex(owner),
                process=process,
                ports=tuple(ports),
                name=" ".join(printable(name, most=MOST_NAME).split()),
            )
        except ValueError as error:
            raise ProtocolMismatchError("a coordinator's own secret cannot be read") from error


class Relay:
    """A relay that serves. `allowed` are the ports that it may listen on for coordinators."""

    def __init__(
        self,
        *,
        key: RelayKey,
        ports: KeptPorts,
        host: str,
        port: int,
        allowed: range,
        limits: Limits,
    ) -> None:
        """Listens. Raises SystemRefusedError."""
        self._key, self._kept, self._host = key, ports, host
        self._allowed, self._limits = allowed, limits
        self._places = Places(limits)
        self._pace = Pace(limits.bytes_per_second)
        self._carried: dict[bytes, _Carried] = {}
        self._changing = asyncio.Lock()
        self._doors = Doors(
            more="where they are of one office, start the relay with more --connections-per-address"
        )
        listener = listening_socket(host, port)
        self.port = int(listener.getsockname()[1])
        tls = {"ssl": key.server_context(), "ssl_handshake_timeout": HELLO_SECONDS}
        strangers, known = Places(STRANGERS), Places(STRANGERS)

        def places_of(source: str) -> Places:
            """Strangers who take all their places keep none of those out who are here."""
            is_known = any(source == source_of(one.address) for one in self._carried.values())
            return known if is_known else strangers

        self._doors.open(listener, places_of, self._coordinator, tls)

    async def stop(self) -> None:
        """Ends all connections."""
        for carried in self._carried.values():
            carried.datagrams.close()
        await self._doors.close()

    def in_words(self) -> str:
        """What it does, for its log and its service manager."""
        names = ", ".join(
            f"{one.name} on {' and '.join(map(str, one.listening))}"
            for one in self._carried.values()
        )
        open_, refused = self._places.num_open, self._places.num_refused
        return f"carries {names or 'nobody'}; {open_} connections, {refused} refused"

    # Coordinators

    async def _coordinator(self, connection: Connection, place: Place) -> None:
        """Asks who it is, and lets its connection wait for somebody."""
        async with asyncio.timeout(HELLO_SECONDS):
            message = await connection.receive()
            refusal, hello = self._secret_refusal(message), None
            if refusal is None:
                hello = _Hello.read(message)
                async with self._changing:
                    refusal = await self._let_in(hello, connection.address)
            if refusal is not None:
                _log.warning("a coordinator is refused", why=refusal.what, address=place.source)
                await connection.send(
                    refused=refusal.what, next=refusal.next_step, is_final=refusal.is_final
                )
                connection.close()
                await connection.writer.wait_closed()
                return
        assert hello is not None
        place.leave()  # it is no stranger any more
        carried = self._carried[hello.owner]
        try:
            await self._wait_for_somebody(connection, carried)
        finally:
            carried.num_connections -= 1
            if not carried.num_connections:
                async with self._changing:
                    await self._forget(hello.owner, carried)

    def _secret_refusal(self, message: Message) -> "_Refusal | None":
        secret = message.get("secret")
        if isinstance(secret, str) and hmac.compare_digest(
            secret.encode(errors="replace"), self._key.secret.hex().encode()
        ):
            return None
        return _Refusal(
            "the secret of the relay's line is not this relay's",
            "copy the line again from relay.line in the relay's folder",
        )

    async def _let_in(self, hello: _Hello, address: str) -> "_Refusal | None":
        """Counts its connection in, and listens for it from its first on; or says why not."""
        carried = self._carried.get(hello.owner)
        if carried is None:
            refusal = await self._listen(hello, address)
            if refusal is not None:
                return refusal
            carried = self._carried[hello.owner]
        elif (carried.process, tuple(carried.listening)) != (hello.process, hello.ports):
            return _Refusal(
                f"another coordinator of this folder is here, from {carried.address}",
                "stop one of the two; one that has just ended is forgotten in some seconds",
                is_final=False,
            )
        elif len(carried.spares) >= MOST_SPARES:
            return _Refusal(f"{MOST_SPARES} connections wait already", "", is_final=False)
        carried.num_connections += 1
        return None

    async def _listen(self, hello: _Hello, address: str) -> "_Refusal | None":
        outside = [port for port in hello.ports if port not in self._allowed]
        first, last = self._allowed[0], self._allowed[-1]
        if outside:
            return _Refusal(
                f"port {outside[0]} is none of the relay's, which has {first} to {last}",
                "choose others by --port and --enrolment-port, or start the relay with other --ports",
            )
        if taken := self._kept.taken(hello.ports, hello.owner):
            return _Refusal(
                f"another coordinator has port {taken[0]} of the relay",
                "choose others by --port and --enrolment-port; of one that is gone for good the "
                f"relay's owner removes the line from {PORTS_FILE} and starts the relay again",
            )
        try:
            self._kept.give(hello.ports, hello.owner)
        except AtollError as error:
            return _Refusal(f"on the relay's machine {error.what}", error.next_step, is_final=False)
        sockets: list[socket.socket] = []
        try:
            for port in hello.ports:
                sockets.append(listening_socket(self._host, port))
        except SystemRefusedError as error:
            for one in sockets:
                one.close()
            return _Refusal(f"on the relay's machine {error.what}", "free it there")
        carried = self._carried[hello.owner] = _Carried(hello, address)
        for port, listener in zip(hello.ports, sockets, strict=True):
            serve = partial(self._client, carried, port)
            carried.listening[port] = self._doors.open(listener, lambda _: self._places, serve)
        carried.datagrams = await listen(carried.saw, self._host, hello.ports)
        _log.info("a coordinator is here", run=carried.name, address=address, ports=hello.ports)
        return None

    async def _forget(self, owner: bytes, carried: _Carried) -> None:
        """Listens for it no more: who dials its ports hears at once that nobody is there."""
        if carried.num_connections or self._carried.get(owner) is not carried:
            return
        del self._carried[owner]
        carried.datagrams.close()
        for task in carried.listening.values():
            task.cancel()
        await asyncio.gather(*carried.listening.values(), return_exceptions=True)
        _log.info("a coordinator is gone", run=carried.name, address=carried.address)

    async def _wait_for_somebody(self, connection: Connection, carried: _Carried) -> None:
        spare = _Spare(connection)
        await spare.send(waits=True, datagrams=carried.datagrams.ports)
        async with carried.came:
            carried.spares.append(spare)
            carried.came.notify()
        try:
            await spare.wait()
        finally:
            with contextlib.suppress(ValueError):
                carried.spares.remove(spare)
        with contextlib.suppress(OSError):
            await spare.writer.wait_closed()  # whoever it was taken for closes it

    # Everybody

    async def _client(self, carried: _Carried, port: int, connection: Connection, _: Place) -> None:
        """Carries what comes to a coordinator's port, from its first bytes on."""
        limits = self._limits
        async with asyncio.timeout(limits.first_bytes_seconds):
            first = await connection.reader.read(CHUNK_BYTES)
        if not first:
            return
        async with asyncio.timeout(limits.wait_seconds):
            spare = await carried.connection_for(port)
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._pace.wait_seconds(len(first), loop.time()))
        spare.writer.write(first)
        await joined(
            connection,
            spare,
            idle_seconds=limits.idle_seconds,
            wait_seconds=lambda num_bytes: self._pace.wait_seconds(num_bytes, loop.time()),
        )


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Why a coordinator is not carried. One that is not final may pass by itself."""

    what: str
    next_step: str
    is_final: bool = True


# A relay as a process: its folder, its line, signals and its service manager.


OWN_OPEN_FILES = 64
STOP_SECONDS = 20.0
"""What a service manager should grant it for its end."""

HELPER_SECONDS = 150.0
"""For a helper beside it to leave with its work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What 'atoll relay start' was told."""

    host: str
    port: int
    allowed: range
    advertise: str
    limits: Limits
    helper: Path | None = None  # whose helper runs beside it


async def until_stopped(status: str) -> None:
    """Tells the service manager what is served, and waits for a signal that means stop."""
    stopped = asyncio.Event()
    for number in stop_signals():
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    manager = ServiceManager.of_environment()
    manager.ready(status)
    async with manager.watching():
        await stopped.wait()
    manager.stopping("stopping", within_seconds=STOP_SECONDS)


def _helping(folder: Path | None) -> contextlib.AbstractAsyncContextManager[None]:
    """It ends before the relay does, through which it may reach its coordinator."""
    if folder is None:
        return contextlib.nullcontext()
    command = ("helper", "start", "--dir", str(folder))
    return beside("the helper", command, hear=say, end_seconds=HELPER_SECONDS)


async def run_relay(folder: Path, settings: Settings, *, log_json: bool) -> None:
    """Serves until a signal stops it. Raises AtollError."""
    require_open_files(OWN_OPEN_FILES + 2 * settings.limits.most, of="the relay")
    make_folder(folder, mode=0o700)
    lock = FolderLock.take(folder, holder="relay", next_step="stop it, or choose another folder")
    try:
        log = start_logging(as_json=log_json, folder=folder, process="relay")
        with keeping_the_end(folder, "relay"):
            key = RelayKey.of_folder(folder)
            relay = Relay(
                key=key,
                ports=KeptPorts(folder / PORTS_FILE),
                host=settings.host,
                port=settings.port,
                allowed=settings.allowed,
                limits=settings.limits,
            )
            try:
                line = key.line(settings.advertise, relay.port)
                path = folder / LINE_FILE
                is_new = not path.exists()
                write_atomically(path, f"{line.encode()}\n".encode(), mode=0o600)
                ready = f"relay ready at {endpoint_of(settings.host, relay.port)}"
                if is_new:
                    ready += f"\natoll coordinator start DIR --through {line.encode()}"
                say(ready, or_else=log.write)
                log.write(f"the line for coordinators, who dial {line.endpoint}, is in {path}\n")
                async with _helping(settings.helper):
                    await until_stopped(f"serves coordinators at {line.endpoint}")
            finally:
                await relay.stop()
    finally:
        lock.release()
