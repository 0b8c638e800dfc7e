"""Listening for who connects: what a relay allows, and a place for each before a byte is read.

Limits are arithmetic: connections by address and in all, and bytes a second. Time comes in as an argument,
in seconds.
"""

import asyncio
import ipaddress
import socket
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from coordinator.relay.stream import Connection, accepted
from coordinator.server import refusal_to_listen
from protocol.errors import ProtocolMismatchError

MAX_ADDRESSES = 10_000
"""Addresses whose latest connections are remembered; the one that came longest ago is forgotten first."""

EVERYWHERE = frozenset({"0.0.0.0", "::"})
"""Hosts that mean all addresses of this machine, of IPv4 and IPv6, as gRPC takes them too."""

TELL_SECONDS = 60.0
"""Between two lines of the log about who was refused: a stranger is not to fill a disk."""

FULL_SECONDS = 0.5
"""Until the next try to accept where the file table is full."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one relay. A whole network of IPv6 (/64) counts as one address."""

    most: int = 1000
    most_per_address: int = 64
    burst_per_address: int = 64  # new connections at once …
    per_second_per_address: float = 1.0  # … and from then on
    bytes_per_second: float | None = None  # of all that is carried, both ways together
    first_bytes_seconds: float = 10.0
    """Who connects and says nothing for so long goes, and has taken no connection of the coordinator's."""
    idle_seconds: float = 300.0
    """Nodes and coordinators ping each other every 20 s."""
    wait_seconds: float = 10.0
    """For a connection of the coordinator's to be free."""


def source_of(address: str) -> str:
    """Whom a connection counts for."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((found, 64), strict=False))
    return str(found)


class Places:
    """Who may have another connection."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._open: Counter[str] = Counter()
        self._allowed: OrderedDict[str, tuple[float, float]] = OrderedDict()  # and as of when
        self.num_refused = 0

    @property
    def num_open(self) -> int:
        """Connections that have a place."""
        return self._open.total()

    def enter(self, source: str, now: float) -> str:
        """Takes a place, to be given back by `leave`; or says why there is none."""
        limits = self._limits
        allowed, as_of = self._allowed.get(source, (float(limits.burst_per_address), now))
        allowed = min(
            limits.burst_per_address, allowed + limits.per_second_per_address * (now - as_of)
        )
        why = ""
        if self.num_open >= limits.most:
            why = f"{limits.most} connections are open"
        elif self._open[source] >= limits.most_per_address:
            why = f"{source} has {limits.most_per_address} connections open"
        elif allowed < 1:
            why = f"{source} connects more often than {limits.per_second_per_address:g} times a second"
        if why:
            self.num_refused += 1
            return why
        self._open[source] += 1
        self._allowed[source] = allowed - 1, now
        self._allowed.move_to_end(source)
        if len(self._allowed) > MAX_ADDRESSES:
            self._allowed.popitem(last=False)
        return ""

    def leave(self, source: str) -> None:
        """Gives a place back."""
        self._open[source] -= 1
        if not self._open[source]:
            del self._open[source]


@dataclass(slots=True)
class Place:
    """A place that was taken, to be left once."""

    places: Places
    source: str
    is_left: bool = False

    def leave(self) -> None:
        """Gives it back; safe to repeat."""
        if not self.is_left:
            self.is_left = True
            self.places.leave(self.source)


class Pace:
    """Deals out bytes at a rate, a tenth of a second's at once; None is no limit."""

    def __init__(self, bytes_per_second: float | None) -> None:
        self._rate = bytes_per_second
        self._free_at = 0.0

    def wait_seconds(self, num_bytes: int, now: float) -> float:
        """Counts bytes that are about to be carried; returns how long they must wait for that."""
        if self._rate is None:
            return 0.0
        begins = max(self._free_at, now - 0.1)
        self._free_at = begins + num_bytes / self._rate
        return max(0.0, self._free_at - now)


Serve = Callable[[Connection, Place], Awaitable[None]]
"""Serves one connection, which ends when it returns; it may leave its place earlier."""


def listening_socket(host: str, port: int) -> socket.socket:
    """Listens. Raises SystemRefusedError."""
    try:
        if host in EVERYWHERE and socket.has_dualstack_ipv6():
            made = socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=256
            )
        else:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            made = socket.create_server((host, port), family=family, backlog=256)
    except (OSError, OverflowError) as error:
        raise refusal_to_listen(host, port) from error
    made.setblocking(False)
    return made


class Doors:
    """Sockets that are listened on, and the tasks of all who came in by them."""

    def __init__(self, *, more: str = "") -> None:
        """`more` says how their owner lets an address have more connections, if that can be."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._more = more
        self._num_refused = 0  # since the last line of the log
        self._told_at: float | None = None

    def open(
        self,
        listener: socket.socket,
        places_of: Callable[[str], Places],
        serve: Serve,
        tls: Mapping[str, Any] | None = None,
    ) -> asyncio.Task[None]:
        """Lets people in by a socket until its task is cancelled; `tls` is as asyncio takes it.

        `places_of` says whose places an address takes.
        """
        return self._start(self._accept(listener, places_of, serve, tls or {}))

    async def close(self) -> None:
        """Ends all connections, and listens no more."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(
        self,
        listener: socket.socket,
        places_of: Callable[[str], Places],
        serve: Serve,
        tls: Mapping[str, Any],
    ) -> None:
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                try:
                    plain, address = await loop.sock_accept(listener)
                except OSError as error:
                    _log.warning("nobody can connect now", why=error.strerror or str(error))
                    await asyncio.sleep(FULL_SECONDS)
                    continue
                source = source_of(str(address[0]))
                places = places_of(source)
                if why := places.enter(source, loop.time()):
                    plain.close()
                    self._tell(why, loop.time())
                else:
                    self._start(_served(plain, Place(places, source), serve, tls))

    def _tell(self, why: str, now: float) -> None:
        """Who is refused hears nothing, so that the log has to say it."""
        self._num_refused += 1
        if self._told_at is None or now - self._told_at >= TELL_SECONDS:
            next_step = {"next_step": self._more} if self._more else {}
            _log.warning("connections are refused", why=why, num=self._num_refused, **next_step)
            self._num_refused, self._told_at = 0, now


async def _served(plain: socket.socket, place: Place, serve: Serve, tls: Mapping[str, Any]) -> None:
    try:
        connection = await accepted(plain, **tls)
        try:
            await serve(connection, place)
        finally:
            connection.abort()
    except (OSError, ProtocolMismatchError) as error:
        _log.debug("a connection has ended", address=place.source, why=str(error))
    finally:
        place.leave()
