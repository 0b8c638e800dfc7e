"""Connections through home routers: a second p2pd that speaks QUIC alone, and what shows where it is.

Two members that nobody can dial reach each other when both send to each other at the same time, each to where
the other's router has put it: each one's packets open its own router for the other's. The coordinator sees
where that is, from datagrams that come from p2pd's own socket, and says when to dial
(coordinator.swarm.reach). p2pd does not send these itself; we do, through a copy of its socket.
By IPv6 no router translates: there we know where p2pd is, and say so.

It is another p2pd than the one that speaks TCP, with the same key, so that libp2p never takes QUIC where TCP
would do: the kernel paces TCP, and finds dead connections within seconds. QUIC paces itself, and ends a
connection after 30 s without a word; what a router has forgotten is mostly seen before (`heed_outside`).
It is started when a member was out of reach for a while, since most nodes never need it.
"""

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress

import structlog

from node.exchange.peers import Limits
from node.exchange.transport.p2pd import DaemonError, P2pd, StreamCallback
from node.exchange.transport.rates.tcp import send_from, udp_sockets_of
from node.machine.addresses import has_ipv6, leaving_by_ipv6
from protocol.errors import AtollError
from protocol.trust.identity import Identity

_log = structlog.get_logger(__name__)


_FORBIDDEN = (errno.EPERM, errno.EACCES, errno.ENOSYS)
"""A machine that does not lend us p2pd's socket."""


Place = tuple[str, int]
"""A host and a port of UDP."""


class Punching:
    """What a transport does to reach members through their routers."""

    def __init__(
        self,
        *,
        token: bytes,
        start_daemon: Callable[[], Awaitable[P2pd]],
        limits: Limits,
        on_connection: Callable[[], None],
        own_ipv6: Callable[[], str | None] = leaving_by_ipv6,
    ) -> None:
        """`token` is told to the coordinator in heartbeats: it knows our datagrams by it."""
        self._own_ipv6 = own_ipv6
        self.token = token
        self.connected: frozenset[str] = frozenset()
        """Members that are, by peer id."""
        self.place_by_ipv6 = ""
        """Where p2pd can be dialled by IPv6, as a multiaddress; empty where it cannot."""
        self.why_not = ""
        """What keeps this machine from punching holes, once that is known."""
        self._start_daemon = start_daemon
        self._limits = limits
        self._on_connection = on_connection
        self._daemon: P2pd | None = None
        self._starting = asyncio.Lock()
        self._members: Mapping[str, tuple[str, ...]] = {}  # what they tell of where they are
        self._dials: dict[str, asyncio.Task[None]] = {}  # by peer id
        self._ends: dict[str, asyncio.Task[None]] = {}
        self._since: dict[str, float] = {}  # when connections came to be, by the loop's clock
        self._watch: asyncio.Task[None] | None = None
        self._outside: tuple[str, ...] = ()  # where our router put us last

    def set_roster(self, multiaddrs: Mapping[str, tuple[str, ...]]) -> None:
        """Says who is a member now, by peer id: no other is dialled, or counts as connected.

        The connection with one that has moved goes nowhere.
        """
        before, self._members = self._members, dict(multiaddrs)
        self.connected &= frozenset(self._members)
        for peer_id in self.connected:
            if not set(before[peer_id]) <= set(multiaddrs[peer_id]):
                self.give_up(peer_id)
        for peer_id in self._dials.keys() - self._members:
            self._dials[peer_id].cancel()

    async def show(self, observers: Sequence[Place]) -> None:
        """Has the coordinator's `observers` see where our router puts us, and finds out where IPv6 does.

        Raises nothing: what keeps us is said once.
        """
        own_ipv6 = self._own_ipv6()
        if self.why_not or not (observers or own_ipv6):
            return
        try:
            daemon = await self._running()
            places = [await _resolved(*observer) for observer in observers]
            sockets = list(udp_sockets_of(daemon.pid))
            if not sockets:
                raise OSError("p2pd listens on no port of UDP")
            port = next((s.port for s in sockets if s.family == socket.AF_INET6), None)
            is_there = own_ipv6 is not None and port is not None
            self.place_by_ipv6 = f"/ip6/{own_ipv6}/udp/{port}/quic-v1" if is_there else ""
            by_ipv4 = next((s for s in sockets if s.family == socket.AF_INET), None)
            for place in filter(None, places):
                if by_ipv4 is not None:
                    send_from(daemon.pid, by_ipv4.descriptor, self.token, place)
        except (AtollError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in _FORBIDDEN:
                _log.debug("not shown where this machine's router puts it", why=str(error))
                return  # p2pd has just died, or something is short for a while
            self.why_not = str(error)
            _log.warning(
                "no holes are punched in routers: members that cannot be dialled need a helper",
                why=self.why_not,
            )

    def punch(self, peer_id: str, multiaddr: str) -> None:
        """Dials a member that dials us now. Nobody waits for it.

        Where we have reached it for a while, as we think, it knows better: then the hole is gone.
        """
        if self._daemon is None or peer_id not in self._members or peer_id in self._dials:
            return
        fresh = asyncio.get_running_loop().time() - self._limits.punch_seconds
        if peer_id in self.connected:
            if self._since.get(peer_id, 0.0) > fresh:
                return  # its dial was the quicker one
            self.give_up(peer_id)
        dial = asyncio.create_task(self._dial(self._daemon, peer_id, multiaddr), name="punch")
        self._dials[peer_id] = dial

        def end(_: asyncio.Task[None]) -> None:
            if self._dials.get(peer_id) is dial:
                del self._dials[peer_id]

        dial.add_done_callback(end)

    def leave_to_tcp(self, peer_ids: Collection[str]) -> None:
        """Ends the connections with members that are connected by TCP now, and with it what is paced."""
        for peer_id in self.connected & frozenset(peer_ids):
            self.give_up(peer_id)

    def heed_outside(self, seen: tuple[str, ...]) -> None:
        """Gives all holes up when our router puts us elsewhere than before: it has forgotten them.

        Where only some lookers have seen us lately that says nothing.
        """
        if seen and len(seen) == len(self._outside) and seen != self._outside and self.connected:
            _log.info("this machine's router puts it elsewhere: holes are punched anew")
            self.begin_anew()
        if len(seen) >= len(self._outside):
            self._outside = seen

    def begin_anew(self) -> None:
        """Ends all connections: this machine has moved, and they go nowhere."""
        for peer_id in self.connected:
            self.give_up(peer_id)

    def give_up(self, peer_id: str) -> None:
        """Ends a connection, and its streams; a dial that may have made it too."""
        self.connected -= {peer_id}
        if self._daemon is None or peer_id in self._ends:
            return
        if (dial := self._dials.get(peer_id)) is not None:
            dial.cancel()
        end = asyncio.create_task(_end(self._daemon, peer_id), name="end of a punched connection")
        self._ends[peer_id] = end
        end.add_done_callback(lambda _: self._ends.pop(peer_id, None))

    async def open_stream(
        self, peer_id: str, protocol: str
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Opens a stream to a member that is connected; raises DaemonError."""
        if self._daemon is None:
            raise DaemonError("no hole is punched")
        return await self._daemon.open_stream(peer_id, protocol)

    async def stop(self) -> None:
        """Ends all connections, and p2pd."""
        self.why_not = self.why_not or "this node's transport is stopped"
        tasks = [
            *self._dials.values(),
            *self._ends.values(),
            *([self._watch] if self._watch else []),
        ]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        async with self._starting:
            daemon, self._daemon = self._daemon, None
            if daemon is not None:
                await daemon.stop()

    async def _running(self) -> P2pd:
        async with self._starting:
            if self._daemon is not None and self._daemon.died.is_set():
                self._end_watch()
                await self._daemon.stop()
                self._daemon = None
            if self._daemon is None:
                self._daemon = daemon = await self._start_daemon()
                self._watch = asyncio.create_task(self._look(daemon), name="punched connections")
                _log.info("looks for a way through this machine's router", by="QUIC")
            return self._daemon

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()

    async def _dial(self, daemon: P2pd, peer_id: str, multiaddr: str) -> None:
        try:
            async with asyncio.timeout(self._limits.punch_seconds):
                if (end := self._ends.get(peer_id)) is not None:
                    await asyncio.wait([end])
                await daemon.dial(peer_id, multiaddr)
        except (DaemonError, TimeoutError) as error:
            _log.info("no hole was punched", to=multiaddr, why=str(error) or "no answer")
        else:
            await self._heed(daemon)

    async def _look(self, daemon: P2pd) -> None:
        with suppress(DaemonError):  # it is gone
            while True:
                await self._heed(daemon)
                await asyncio.sleep(self._limits.punched_look_seconds)
        self.connected = frozenset()

    async def _heed(self, daemon: P2pd) -> None:
        connected = await daemon.connected_peer_ids() & frozenset(self._members) - self._ends.keys()
        for peer_id in connected - self.connected:
            self._since[peer_id] = asyncio.get_running_loop().time()
            _log.info("a hole is punched: connected through routers", peer_id=peer_id)
            self._on_connection()
        for peer_id in self.connected - connected:
            self._since.pop(peer_id, None)
            _log.info("a punched connection is lost", peer_id=peer_id)
        self.connected = connected


def punching_daemon(
    identity: Identity, *, on_streams: Mapping[str, StreamCallback], limits: Limits
) -> Callable[[], Awaitable[P2pd]]:
    """Starts the p2pd that speaks QUIC."""
    by_ipv6 = ("/ip6/::/udp/0/quic-v1",) if has_ipv6() else ()
    return lambda: P2pd.start(
        identity,
        listen_multiaddrs=("/ip4/0.0.0.0/udp/0/quic-v1", *by_ipv6),
        on_streams=on_streams,
        limits=limits,
    )


async def _end(daemon: P2pd, peer_id: str) -> None:
    with suppress(DaemonError):  # it is gone already
        await daemon.disconnect(peer_id)


async def _resolved(host: str, port: int) -> Place | None:
    """Its address of IPv4; None where it has none now."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, family=socket.AF_INET, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    return str(found[0][4][0]), int(found[0][4][1])
