"""A coordinator's side of a relay: some connections that wait there, and each stream that comes to a port.

The relay sees who connects, when and how much; what goes through is TLS between nodes and the coordinator.
"""

import asyncio
import secrets
import ssl
from collections.abc import Mapping
from ipaddress import IPv4Address
from random import Random
from typing import Any

import structlog

from coordinator.relay.line import Carriage, RelayLine
from coordinator.relay.stream import CHUNK_BYTES, SILENT_SECONDS, Connection, Message, joined
from coordinator.services.outside import Lookout
from protocol.errors import (
    AtollError,
    NotPermittedError,
    ProtocolMismatchError,
    TemporaryError,
    UnavailableError,
)
from protocol.terminal.console import printable
from protocol.trust.handshake import pinned_connection
from protocol.wire.channel import RETRY_CAP_SECONDS, retried

SPARES = 4
"""Connections that wait at the relay. Each is replaced as soon as somebody comes by it."""

MOST_CARRIED = 2000
"""Streams at once, whatever the relay says that has come."""

DIAL_SECONDS = 10.0
"""For a connection to the relay and its answer."""

IDLE_SECONDS = 600.0
"""Longer than any relay's own."""

_MOST_WORDS = 400

_log = structlog.get_logger(__name__)


class Through:
    """Keeps a coordinator within reach by a relay, until it is stopped."""

    def __init__(
        self,
        carriage: Carriage,
        *,
        name: str,
        host: str,
        ports: Mapping[int, int],
        lookout: Lookout | None = None,
    ) -> None:
        """`ports` says which port of the relay leads to which one that listens at `host` on this machine.

        `lookout` hears of the datagrams that come to those of the relay.
        """
        self.line = carriage.line
        self._host, self._ports = host, ports
        self._hello = {
            "secret": carriage.line.secret.hex(),
            "owner": carriage.owner.hex(),
            "process": secrets.token_hex(8),
            "ports": list(ports),
            "name": name,
        }
        self._lookout = lookout
        self._random = Random()
        self._num_waiting = 0
        self._away = ""  # why
        self._carried: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Dials once, and then keeps at it. Raises what only people can mend."""
        first: Connection | None = None
        try:
            first = await self._dial()
        except (UnavailableError, TemporaryError) as error:
            self._tell_away(error)
        for number in range(SPARES):
            self._spawn(self._keep(first if number == 0 else None))

    async def stop(self) -> None:
        """Ends all of it."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def is_away(self) -> bool:
        """Whether nobody can come through the relay now."""
        return bool(self._away)

    def in_words(self) -> str:
        """How nodes reach this coordinator."""
        if self._away:
            return f"relay {self.line.endpoint} is away: {self._away}"
        return f"through relay {self.line.endpoint}"

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep(self, connection: Connection | None) -> None:
        """One connection that waits, and the next when it is taken or breaks."""
        loop = asyncio.get_running_loop()
        while True:
            if connection is None:
                connection = await self._dialled()
            self._come_back()
            dialled_at = loop.time()
            self._num_waiting += 1
            try:
                port = await self._taken(connection)
                self._spawn(self._carry(connection, port))
            except (OSError, ProtocolMismatchError) as error:
                connection.abort()
                if self._num_waiting == 1:  # now none is left
                    self._tell_away(_nobody(self.line, str(error) or "it is silent"))
                    self._end_carried()
            except asyncio.CancelledError:
                connection.abort()
                raise
            finally:
                self._num_waiting -= 1
            if connection.is_closing and loop.time() - dialled_at < 1.0:
                # A relay that hangs up at once is not dialled ever faster.
                await asyncio.sleep(self._random.uniform(0.5, 1.5))
            connection = None

    def _end_carried(self) -> None:
        """Streams of a relay that is silent stand still, and their ends know nothing of it.

        While they are open, somebody may seem to be heard, and leases run out.
        """
        for one in self._carried:
            one.abort()

    async def _dialled(self) -> Connection:
        """Tries until it is there."""
        while True:
            try:
                return await retried(
                    self._dial,
                    is_wanted=lambda: True,
                    random=self._random,
                    on_wait=lambda error, _: self._tell_away(error),
                )
            except AtollError as error:  # the relay's owner may yet mend it
                self._tell_away(error)
                await asyncio.sleep(RETRY_CAP_SECONDS)

    def _tell_away(self, error: AtollError) -> None:
        if error.what != self._away:
            _log.warning(
                "nodes cannot come through the relay", why=error.what, next_step=error.next_step
            )
        self._away = error.what

    def _come_back(self) -> None:
        if self._away:
            _log.info("nodes can come through the relay again", relay=self.line.endpoint)
        self._away = ""

    async def _dial(self) -> Connection:
        """A connection that waits at the relay. Raises AtollError."""
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                connection = await _connected(self.line)
                try:
                    await connection.send(**self._hello)
                    answer = await connection.receive()
                    if answer.get("waits") is not True:
                        raise _refusal(self.line, answer)
                    self._look_out_on(answer.get("datagrams"))
                    return connection
                except BaseException:
                    connection.abort()
                    raise
        except TimeoutError as error:
            raise _nobody(self.line, "no answer in time") from error
        except OSError as error:
            raise _nobody(self.line, error.strerror or str(error)) from error

    async def _taken(self, connection: Connection) -> int:
        """Waits until somebody comes by it; returns to which port. Raises OSError where it breaks."""
        while True:
            async with asyncio.timeout(SILENT_SECONDS):
                message = await connection.receive()
                if "carry" in message:
                    return message["carry"] if message["carry"] in self._ports else 0
                if "saw" in message:
                    self._saw(message)
                else:
                    await connection.send(ping=True)

    def _look_out_on(self, ports: object) -> None:
        if self._lookout is not None:
            heard = ports if isinstance(ports, list) else []
            self._lookout.ports = tuple(port for port in self._ports if port in heard)

    def _saw(self, message: Message) -> None:
        """Raises ProtocolMismatchError."""
        try:
            host, port = str(IPv4Address(message["host"])), message["port"]
            datagram = bytes.fromhex(message["saw"])
            if type(port) is not int or not 0 < port < 1 << 16:
                raise ValueError(port)
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolMismatchError("the relay has seen what cannot be") from error
        if self._lookout is not None and message.get("on_port") in self._ports:
            self._lookout.saw(datagram, host, port, message["on_port"])

    async def _carry(self, connection: Connection, port: int) -> None:
        """Joins a stream with the coordinator's own port."""
        self._carried.add(connection)
        try:
            if port == 0 or len(self._tasks) > MOST_CARRIED:
                await connection.send(carrying=False)
                return
            try:
                own = await asyncio.open_connection(
                    self._host, self._ports[port], limit=CHUNK_BYTES
                )
            except OSError:  # it is stopping
                await connection.send(carrying=False)
                return
            await connection.send(carrying=True)
            await joined(Connection(*own), connection, idle_seconds=IDLE_SECONDS)
        except OSError as error:
            _log.debug("a stream has ended", why=str(error))
        finally:
            self._carried.discard(connection)
            connection.abort()


async def _connected(line: RelayLine) -> Connection:
    another = ProtocolMismatchError(
        f"what answers at {line.endpoint} is not the relay that the line is of",
        next_step="copy the line again from relay.line in the relay's folder",
    )
    try:
        return Connection(
            *await pinned_connection(
                line.host, line.port, line.pin, another=another, limit=CHUNK_BYTES
            )
        )
    except ssl.SSLError as error:
        raise ProtocolMismatchError(
            f"what answers at {line.endpoint} is no relay ({error.reason})",
            next_step="check host and port, and that 'atoll relay start' runs there",
        ) from error


def _nobody(line: RelayLine, why: str) -> UnavailableError:
    return UnavailableError(
        f"no relay answers at {line.endpoint} ({why})",
        next_step="start it there with 'atoll relay start', and open its port",
    )


def _refusal(line: RelayLine, answer: dict[str, Any]) -> AtollError:
    what = f"relay {line.endpoint}: {_words(answer.get('refused'))}"
    next_step = _words(answer.get("next"))
    if answer.get("is_final") is True:
        return NotPermittedError(what, next_step=next_step)
    return TemporaryError(what, next_step=next_step)


def _words(text: object) -> str:
    return " ".join(printable(text, most=_MOST_WORDS).split()) if isinstance(text, str) else "?"
