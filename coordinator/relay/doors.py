"""Listening for who connects: a place for each, within limits, before a byte is read."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

import structlog

from coordinator.relay.limits import Place, Places, source_of
from coordinator.relay.stream import Connection, accepted
from protocol.errors import ProtocolMismatchError
from protocol.wire.server import refusal_to_listen

EVERYWHERE = frozenset({"0.0.0.0", "::"})
"""Hosts that mean all addresses of this machine, of IPv4 and IPv6, as gRPC takes them too."""

FULL_SECONDS = 0.5
"""Until the next try to accept where the file table is full."""

Serve = Callable[[Connection, Place], Awaitable[None]]
"""Serves one connection, which ends when it returns; it may leave its place earlier."""

_log = structlog.get_logger(__name__)


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

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

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
                if places.enter(source, loop.time()):
                    plain.close()
                else:
                    self._start(_served(plain, Place(places, source), serve, tls))


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
