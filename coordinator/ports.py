"""The coordinator's two gRPC servers: where they are found, and how many connections they have, of whom."""

import asyncio
import contextlib
import os
import socket
import stat
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import grpc.aio
import structlog

from coordinator.config import Home
from coordinator.relay.doors import source_of
from coordinator.relay.one_port import HERE, OnePort
from coordinator.server import (
    CONTROL_OPTIONS,
    ENROLMENT_OPTIONS,
    ReadableMessages,
    WholeMessages,
    bind_control,
    bind_enrolment,
    with_most,
)
from coordinator.settings import CoordinatorConfig
from protocol.service.limits import allow_open_files, require_open_files, require_processes
from protocol.trust.pki import server_name

OWN_OPEN_FILES = 96
DASHBOARD_OPEN_FILES = 128
OPEN_FILES_PER_NODE = 2
"""Sockets, the database and what gRPC takes for itself; the calls that pages answer at once and who watches;
a node's connection, and the one after a break before the old one is given up."""

PROCESSES = 16
"""Threads on two cores: of gRPC, the database and the page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Both servers, which do not serve yet, and where they are found."""

    control: grpc.aio.Server
    enrolment: grpc.aio.Server
    connections: "Connections"
    control_port: int  # as others are told
    enrolment_port: int
    here: str  # the host by which this machine finds them
    local: dict[int, int]  # for each port that others are told, the one on this machine


def bind(
    home: Home, config: CoordinatorConfig, opened: AsyncExitStack, *, is_carried: bool
) -> Ports:
    """Listens for members and for who joins; `is_carried` where they come through a relay."""
    most_members, most_joining = most_connections(
        _files_for_connections(config, is_carried=is_carried)
    )
    own_host = HERE if config.has_one_port else config.host
    control = grpc.aio.server(
        interceptors=[WholeMessages()], options=with_most(CONTROL_OPTIONS, most_members)
    )
    control_port = bind_control(
        control,
        own_host,
        0 if config.has_one_port else config.control_port,
        issuers_pem=home.issuer.certificate_pem + home.authority_pem,
        certificate_pem=home.server_pem,
        key_pem=home.server_key_pem,
    )
    enrolment = grpc.aio.server(
        interceptors=[ReadableMessages()], options=with_most(ENROLMENT_OPTIONS, most_joining)
    )
    enrolment_port = bind_enrolment(
        enrolment,
        own_host,
        0 if config.has_one_port else config.enrolment_port,
        certificate_pem=home.server_pem,
        key_pem=home.server_key_pem,
    )
    watched = {control_port: most_members, enrolment_port: most_joining}
    here, local = config.host, {port: port for port in watched}
    one_port: OnePort | None = None
    if config.has_one_port:
        # Behind a relay its number is the relay's alone: nobody dials it here, and 443 is for root on most
        # machines.
        here = HERE if is_carried else config.host
        one_port = OnePort(
            here,
            0 if is_carried else config.control_port,
            control_name=server_name(home.issuer.swarm_id),
            control_port=control_port,
            enrolment_port=enrolment_port,
            most=most_members + most_joining,
            most_per_address=config.connections_per_address,
            spares_own=is_carried,
        )
        opened.push_async_callback(one_port.close)
        control_port = enrolment_port = config.control_port
        local = {control_port: one_port.port}
    connections = Connections(
        watched,
        Limits(per_address=config.connections_per_address),
        spares_own=is_carried or config.has_one_port,
        sources=None if one_port is None else one_port.sources,
    )
    return Ports(
        control=control,
        enrolment=enrolment,
        connections=connections,
        control_port=control_port,
        enrolment_port=enrolment_port,
        here=here,
        local=local,
    )


def _own_open_files(config: CoordinatorConfig) -> int:
    return OWN_OPEN_FILES + (DASHBOARD_OPEN_FILES if config.dashboard else 0)


def _files_per_connection(config: CoordinatorConfig, *, is_carried: bool) -> int:
    """Through a relay, or one port for all, two more each: both ends of the one to the port behind."""
    return 1 + 2 * is_carried + 2 * config.has_one_port


def _files_for_connections(config: CoordinatorConfig, *, is_carried: bool) -> int:
    left = allow_open_files() - _own_open_files(config)
    return max(0, left) // _files_per_connection(config, is_carried=is_carried)


def require_room_for(config: CoordinatorConfig, *, min_nodes: int, is_carried: bool) -> None:
    """Raises SystemRefusedError where threads are too few, or a run's nodes could not all be connected."""
    require_processes(PROCESSES, of="the coordinator")
    for_nodes = OPEN_FILES_PER_NODE * _files_per_connection(config, is_carried=is_carried)
    require_open_files(_own_open_files(config) + for_nodes * min_nodes, of="the coordinator")


# How many connections one address and one key may have open
#
# gRPC accepts them, bounds their number in all, and ends those that agree on no TLS in time
# (coordinator.server). It has no bound by address. So this looks at the sockets of this process twice a
# second, and ends what is too much. A relay bounds what comes through it (coordinator.relay.doors).

LOOK_SECONDS = 0.5

TELL_SECONDS = 60.0
"""Between two lines of the log: a stranger who comes again and again is not to fill a disk."""

MOST_MEMBERS, MOST_JOINING = 8192, 512
"""At the port for members and at that for joining, where there are files for as many."""

_OPEN_FILES = "/dev/fd"

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of what one may have open at one port. A whole network of IPv6 (/64) counts as one address.

    Members behind one address, as in an office, count by key from their first call on.
    """

    per_address: int = 64
    per_key: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """One that others have opened to a port of ours."""

    descriptor: int
    inode: int  # a descriptor's number is used again, this is not for long
    port: int
    peer: tuple[str, int]
    is_from_here: bool  # from an address of this machine
    since: float


def too_many(
    connections: Iterable[Connection],
    keys: Mapping[tuple[str, int], str],
    limits: Limits,
    *,
    most_strangers: Mapping[int, int],
    sources: Mapping[tuple[str, int], str] | None = None,
) -> dict[Connection, str]:
    """Which of them end, and whose they are: the oldest of those who have more than they may.

    `keys` says by which key a member has called, for each peer that has. `most_strangers` bounds the others
    at each port, of all addresses together. The oldest go, so that who holds connections and asks nothing
    keeps nobody out who comes now. `sources` says whose a connection is that was passed on on this machine.
    """

    def source_by(peer: tuple[str, int]) -> str:
        passed_on = None if sources is None else sources.get(peer)
        return source_of(peer[0]) if passed_on is None else passed_on

    by_source: dict[tuple[int, bool, str], list[Connection]] = defaultdict(list)
    for connection in sorted(connections, key=lambda one: (one.since, one.inode)):
        key = keys.get(connection.peer)
        source = source_by(connection.peer) if key is None else key
        by_source[connection.port, key is not None, source].append(connection)
    ended: dict[Connection, str] = {}
    strangers: dict[int, list[Connection]] = defaultdict(list)
    for (port, is_member, source), theirs in by_source.items():
        most = limits.per_key if is_member else limits.per_address
        kept = len(theirs) - most
        ended |= dict.fromkeys(theirs[: max(0, kept)], source)
        if not is_member:
            strangers[port] += theirs[max(0, kept) :]
    for port, of_all in strangers.items():
        of_all.sort(key=lambda one: (one.since, one.inode))
        for connection in of_all[: max(0, len(of_all) - most_strangers[port])]:
            ended[connection] = source_by(connection.peer)
    return ended


def most_connections(open_files: int) -> tuple[int, int]:
    """How many gRPC may hold at the ports for members and for joining, of so many files for both."""
    joining = max(1, min(MOST_JOINING, open_files // 4))
    return max(1, min(MOST_MEMBERS, open_files - joining)), joining


class Connections:
    """Watches who is connected to this process's ports."""

    def __init__(
        self,
        ports: Mapping[int, int],
        limits: Limits,
        *,
        spares_own: bool = False,
        sources: Mapping[tuple[str, int], str] | None = None,
    ) -> None:
        """`ports` says how many gRPC takes at each; strangers have three quarters of them.

        `spares_own` leaves connections of this machine alone, for a relay's come from here. One port for all
        passes on what comes (coordinator.relay.one_port): `sources` says from where, as long as it does.
        """
        self._limits, self._spares_own = limits, spares_own
        self._sources = {} if sources is None else sources
        self._most_strangers = {port: max(1, most * 3 // 4) for port, most in ports.items()}
        self._seen: dict[int, Connection] = {}  # by descriptor
        self._others: dict[int, int] = {}  # inodes of sockets that are none of these, by descriptor
        self._keys: dict[tuple[str, int], str] = {}
        self._num_ended: Counter[str] = Counter()  # since the last line of the log
        self._told_at: float | None = None
        self.num_ended = 0

    def is_of(self, peer: str, key: str) -> None:
        """A member called over the connection that gRPC names so."""
        if (found := _peer_of(peer)) is not None:
            self._keys[found] = key

    async def watch(self) -> None:
        """Looks until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                self.look(loop.time())
            except OSError as error:  # a full file table, which gRPC's bounds should prevent
                if self._may_tell(loop.time()):
                    why = error.strerror or str(error)
                    _log.error("nobody counts connections now", why=why)

    def look(self, now: float) -> None:
        """Ends what is too much now."""
        self._find(now)
        present = {connection.peer for connection in self._seen.values()}
        self._keys = {peer: key for peer, key in self._keys.items() if peer in present}
        counted = [
            one
            for one in self._seen.values()
            if one.peer in self._sources or not (self._spares_own and one.is_from_here)
        ]
        ended = too_many(
            counted,
            self._keys,
            self._limits,
            most_strangers=self._most_strangers,
            sources=self._sources,
        )
        for connection, source in ended.items():
            if _end(connection):
                self.num_ended += 1
                self._num_ended[source] += 1
            # Until gRPC has closed it, it is there, and no newcomer.
            del self._seen[connection.descriptor]
            self._others[connection.descriptor] = connection.inode
        if self._num_ended and self._may_tell(now):
            (worst, num), *others = self._num_ended.most_common()
            _log.warning(
                "connections were ended: more were open than one address or key may have",
                of=worst,
                num=num,
                others=sum(more for _, more in others),
            )
            self._num_ended.clear()

    def _may_tell(self, now: float) -> bool:
        """Whether the log gets a line now; then it has had one."""
        may = self._told_at is None or now - self._told_at >= TELL_SECONDS
        self._told_at = now if may else self._told_at
        return may

    def _find(self, now: float) -> None:
        seen: dict[int, Connection] = {}
        others: dict[int, int] = {}
        for name in os.listdir(_OPEN_FILES):  # noqa: PTH208 - thousands of them, twice a second
            descriptor = int(name)
            try:
                found = os.fstat(descriptor)
            except OSError:  # closed meanwhile: by another thread, or what listed them
                continue
            if not stat.S_ISSOCK(found.st_mode):
                continue
            known = self._seen.get(descriptor)
            if known is not None and known.inode == found.st_ino:
                seen[descriptor] = known
            elif self._others.get(descriptor) == found.st_ino:
                others[descriptor] = found.st_ino
            elif (connection := self._connection(descriptor, found.st_ino, now)) is not None:
                seen[descriptor] = connection
            else:
                others[descriptor] = found.st_ino
        self._seen, self._others = seen, others

    def _connection(self, descriptor: int, inode: int, now: float) -> Connection | None:
        """What a socket of this process is, where it is one that others opened to these ports."""
        with contextlib.suppress(OSError), _own(descriptor, inode) as own:
            if own.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            here, there = own.getsockname(), own.getpeername()
            if own.type != socket.SOCK_STREAM or here[1] not in self._most_strangers:
                return None
            return Connection(
                descriptor=descriptor,
                inode=inode,
                port=here[1],
                peer=_plain(there),
                is_from_here=_plain(here)[0] == _plain(there)[0],
                since=now,
            )
        return None


@contextlib.contextmanager
def _own(descriptor: int, inode: int) -> Iterator[socket.socket]:
    """The socket by a descriptor of our own, so that gRPC's cannot become another one meanwhile."""
    copy = os.dup(descriptor)
    try:
        if os.fstat(copy).st_ino != inode:
            raise OSError("the descriptor is another file's by now")
        own = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with own:
        yield own


def _end(connection: Connection) -> bool:
    """Ends it for both sides; gRPC sees that, and closes it."""
    try:
        with _own(connection.descriptor, connection.inode) as own:
            own.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False  # it has ended by itself
    return True


def _plain(address: Any) -> tuple[str, int]:
    """Host and port; one of IPv4 by a socket of IPv6 is one of IPv4."""
    return str(address[0]).partition("%")[0].removeprefix("::ffff:"), int(address[1])


def _peer_of(peer: str) -> tuple[str, int] | None:
    """Of gRPC's name: "ipv4:192.0.2.1:5432", "ipv6:%5B2001:db8::1%5D:5432"."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return _plain((host.strip("[]"), port)) if port.isdecimal() else None
