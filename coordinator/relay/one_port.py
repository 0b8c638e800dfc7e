"""One port for members and for who joins, where a network lets out nothing but 443: both by TLS.

Who connects names by its first message whom it wants (SNI, RFC 6066): members the coordinator of the swarm,
whoever joins another name of it. So nothing is decrypted here. What comes goes on to one of the coordinator's
two ports on loopback. Until somebody has said whom it wants, its address has few connections, of which the
oldest go. From then on coordinator.ports counts it, a member by its key: an office behind one address
is as many as it is.
"""

import asyncio
import contextlib
import struct
from dataclasses import replace

from coordinator.relay.doors import Doors, Limits, Place, Places, listening_socket
from coordinator.relay.stream import CHUNK_BYTES, Connection, joined
from protocol.errors import ProtocolMismatchError

MAX_HELLO_BYTES = 1 << 14  # of a record of TLS

IDLE_SECONDS = 660.0
"""Longer than gRPC's own."""

HERE = "127.0.0.1"

MOST_A_SECOND = 100.0
"""New connections of one address, as a whole office makes when the coordinator is back."""

_HANDSHAKE, _CLIENT_HELLO, _SERVER_NAME, _HOST_NAME = 22, 1, 0, 0


def server_name_in(record: bytes) -> str:
    """Whom the first record of TLS names; empty where it names nobody, or is no such record."""
    try:
        return _server_name_in(record)
    except (struct.error, IndexError, UnicodeDecodeError):
        return ""


def _server_name_in(record: bytes) -> str:
    if record[0] != _HANDSHAKE or record[5] != _CLIENT_HELLO:
        return ""
    at = 5 + 4 + 2 + 32  # the headers of record and message, the version, the random
    at += 1 + record[at]  # the session
    at += 2 + struct.unpack_from("!H", record, at)[0]  # ciphers
    at += 1 + record[at]  # compressions
    end = at + 2 + struct.unpack_from("!H", record, at)[0]
    at += 2
    while at + 4 <= end:
        kind, length = struct.unpack_from("!HH", record, at)
        at += 4
        if kind == _SERVER_NAME:
            _, name_kind, size = struct.unpack_from("!HBH", record, at)
            if name_kind != _HOST_NAME or at + 5 + size > len(record):
                return ""
            return record[at + 5 : at + 5 + size].decode("ascii")
        at += length
    return ""


class Unheard:
    """Connections that have not said yet whom they want: few of an address, and a part of all."""

    def __init__(self, *, most: int, most_per_address: int) -> None:
        self._most, self._most_per_address = most, most_per_address
        self._sources: dict[Connection, str] = {}  # the oldest first, as each of these
        self._by_source: dict[str, dict[Connection, None]] = {}

    def add(self, connection: Connection, source: str) -> Connection | None:
        """Takes it in; returns one that has to go for it, the oldest of its address or of all."""
        self._sources[connection] = source
        theirs = self._by_source.setdefault(source, {})
        theirs[connection] = None
        if len(theirs) > self._most_per_address:
            return next(iter(theirs))
        return next(iter(self._sources)) if len(self._sources) > self._most else None

    def remove(self, connection: Connection) -> None:
        """It has spoken, or has ended; safe to repeat."""
        if (source := self._sources.pop(connection, None)) is None:
            return
        del self._by_source[source][connection]
        if not self._by_source[source]:
            del self._by_source[source]


class OnePort:
    """Listens on one port, and passes on what comes, until it is closed."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        control_name: str,
        control_port: int,
        enrolment_port: int,
        most: int,
        most_per_address: int,
        spares_own: bool,
    ) -> None:
        """Both ports are on loopback. With `spares_own` this machine's own have no other bound than `most`.

        Port 0 picks one. Raises SystemRefusedError where nobody can listen there.
        """
        self._control_name = control_name
        self._control_port, self._enrolment_port = control_port, enrolment_port
        limits = Limits(
            most=most,
            most_per_address=most,  # of who is heard coordinator.ports counts them
            # A node that joins makes three; a quick machine makes a second's at once.
            burst_per_address=max(3 * most_per_address, int(MOST_A_SECOND)),
            per_second_per_address=MOST_A_SECOND,
        )
        self._limits, self._places = limits, Places(limits)
        self._unheard = Unheard(most=max(1, most // 4), most_per_address=most_per_address)
        own = replace(limits, burst_per_address=most, per_second_per_address=1e6)
        self._own = Places(own) if spares_own else self._places
        self.sources: dict[tuple[str, int], str] = {}
        """Whose each connection is that comes from here to one of the two ports, by its own end."""
        self._doors = Doors(
            more="where they are of one office, raise connections_per_address in coordinator.toml"
        )
        listener = listening_socket(host, port)
        self.port = int(listener.getsockname()[1])
        self._doors.open(listener, self._places_of, self._carry)

    def _places_of(self, source: str) -> Places:
        return self._own if source in ("127.0.0.1", "::1", "::/64") else self._places

    def _is_counted(self, place: Place) -> bool:
        """Whether it is not this machine's own, by which a relay's come."""
        return place.places is self._places

    async def close(self) -> None:
        """Ends all connections."""
        await self._doors.close()

    async def _carry(self, connection: Connection, place: Place) -> None:
        with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError):
            record = await self._heard(connection, place)
            is_member = server_name_in(record) == self._control_name
            port = self._control_port if is_member else self._enrolment_port
            there = Connection(*await asyncio.open_connection(HERE, port, limit=CHUNK_BYTES))
            end = there.writer.get_extra_info("sockname")
            if self._is_counted(place):
                self.sources[end] = place.source
            try:
                there.writer.write(record)
                await joined(connection, there, idle_seconds=IDLE_SECONDS)
            finally:
                self.sources.pop(end, None)

    async def _heard(self, connection: Connection, place: Place) -> bytes:
        """Its first record of TLS. Who says nothing goes for who comes after."""
        try:
            gone = self._unheard.add(connection, place.source) if self._is_counted(place) else None
            if gone is not None:
                self._unheard.remove(gone)
                gone.abort()
            async with asyncio.timeout(self._limits.first_bytes_seconds):
                return await _first_record(connection)
        finally:
            self._unheard.remove(connection)


async def _first_record(connection: Connection) -> bytes:
    """Raises ProtocolMismatchError for what is no TLS."""
    header = await connection.reader.readexactly(5)
    length = int.from_bytes(header[3:5])
    if header[0] != _HANDSHAKE or not 0 < length <= MAX_HELLO_BYTES:
        raise ProtocolMismatchError(f"{connection.address} speaks no TLS")
    return header + await connection.reader.readexactly(length)
