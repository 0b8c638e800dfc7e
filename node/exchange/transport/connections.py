"""Connections with members: p2pd is kept connected with each, and where none can be dialled, through routers.

libp2p sends both ways over a connection, whoever dialled it: a node behind NAT that cannot be dialled is
reachable as long as it keeps its own connections up.

A connection from an address that is gone goes nowhere, and libp2p finds out after 40 s at best; until then it
would prefer it to a new one, for the streams that hang on it. So both ends give it up as soon as they know:
the node that moved by its own kernel, its peers by the roster.

Two members that nobody can dial reach each other when both send to each other at the same time, each to where
the other's router has put it: each one's packets open its own router for the other's. The coordinator sees
where that is, from datagrams that come from p2pd's own socket, and says when to dial
(coordinator.swarm.reach). p2pd does not send these itself; we do, through a copy of its socket.
By IPv6 no router translates: there we know where p2pd is, and say so.

They do so by another p2pd (`Punching`) with the same key, which speaks QUIC alone. So libp2p never takes QUIC
where TCP would do: the kernel paces TCP, and finds dead connections within seconds. QUIC paces itself, and
ends a connection after 30 s without a word; what a router has forgotten is mostly seen before
(`heed_outside`). It is started when a member was out of reach for a while, since most nodes never need it.
"""

import asyncio
import errno
import math
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import structlog

from node.exchange.peers import Limits
from node.exchange.transport.dialling import why_not_punched
from node.exchange.transport.p2pd import DaemonError, P2pd, StreamCallback
from node.exchange.transport.rates.tcp import send_from, udp_sockets_of
from node.exchange.transport.tunnels import host_and_port
from node.heavy import cancelled
from node.machine.addresses import has_ipv6, leaving_by_ipv6
from protocol.errors import AtollError
from protocol.trust.identity import Identity, peer_id_of
from protocol.trust.proxy import ProxyRefusedError
from protocol.wire.rounds import RosterEntry
from protocol.wire.sockets import looked_up

_log = structlog.get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class _Member:
    """What is known of where a member is, and when it is dialled; times are by the loop's clock."""

    multiaddrs: tuple[str, ...]
    due: float  # when to dial next
    retry_seconds: float
    hosts: frozenset[str] = frozenset()  # where it was connected last
    missing_since: float | None = None  # None: it is connected, or nobody has looked yet
    dial: asyncio.Task[None] | None = None
    is_refusal_told: bool = False  # of a proxy

    def end_dial(self) -> None:
        if self.dial is not None:
            self.dial.cancel()
            self.dial = None


class Connections:
    """Dials members that are not connected, ever less often; says once for each connection made."""

    def __init__(
        self,
        daemon: P2pd,
        own_peer_id: str,
        *,
        limits: Limits,
        on_connection: Callable[[], None],
    ) -> None:
        self._daemon = daemon
        self._limits = limits
        self._own_peer_id = own_peer_id
        self._on_connection = on_connection
        self._members: dict[str, _Member] = {}  # by peer id
        self.connected: set[str] = set()
        """Members that are, by peer id."""
        self._restless_until = -math.inf  # by the loop's clock
        self._ending: set[asyncio.Task[None]] = set()
        self._has_news = asyncio.Event()
        self._task = asyncio.create_task(self._stay_connected(), name="connections")

    def set_roster(self, others: tuple[RosterEntry, ...]) -> None:
        """Says who is a member; one that is new, or moved, is dialled soon."""
        before, self._members = self._members, {}
        for entry in others:
            peer_id, multiaddrs = peer_id_of(entry.address.public_key), entry.address.multiaddrs
            member = before.pop(peer_id, None)
            if member is None or member.multiaddrs != multiaddrs:
                wait = 0.0 if self._own_peer_id < peer_id else self._limits.yield_seconds
                moved = _Member(
                    multiaddrs=multiaddrs,
                    due=asyncio.get_running_loop().time() + wait,
                    retry_seconds=self._limits.first_redial_seconds,
                )
                if member is not None:
                    member.end_dial()  # of where it was
                    moved.hosts, moved.is_refusal_told = member.hosts, member.is_refusal_told
                    if not set(member.multiaddrs) <= set(multiaddrs):
                        self._give_up([peer_id])
                member = moved
            self._members[peer_id] = member
        for gone in before.values():
            gone.end_dial()
        self._has_news.set()

    def begin_anew(self) -> None:
        """Ends all connections, which go nowhere now, and dials every member."""
        now = asyncio.get_running_loop().time()
        for member in self._members.values():
            member.end_dial()
            member.due, member.retry_seconds = now, self._limits.first_redial_seconds
        self._give_up(list(self._members))

    def _give_up(self, peer_ids: Sequence[str]) -> None:
        """Both ends do, and the later one ends what the earlier one has made meanwhile."""
        self._restless_until = asyncio.get_running_loop().time() + self._limits.restless_seconds
        for peer_id in peer_ids:
            task = asyncio.create_task(self._end(peer_id), name="end of connections")
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def _end(self, peer_id: str) -> None:
        with suppress(DaemonError):  # it was not connected, or p2pd is gone
            await self._daemon.disconnect(peer_id)
        self.lost(peer_id)
        self._has_news.set()

    def saw(self, peer_id: str) -> None:
        """Notes that a peer is connected."""
        if (member := self._members.get(peer_id)) is not None:
            member.missing_since = None
        if peer_id not in self.connected:
            self.connected.add(peer_id)
            self._daemon.tcp_pacing.look()
            self._on_connection()

    def unreachable(self) -> tuple[str, ...]:
        """Members that have not been connected for a while, though they were dialled.

        Not at once: a member that cannot be dialled dials us itself meanwhile.
        """
        before = asyncio.get_running_loop().time() - self._limits.unreachable_seconds
        missing = ((peer_id, member.missing_since) for peer_id, member in self._members.items())
        return tuple(p for p, since in missing if since is not None and since <= before)

    def at(self, hosts: Collection[str]) -> frozenset[str]:
        """Members that say that they are at one of these addresses, or were connected from it last."""
        return frozenset(
            peer_id
            for peer_id, member in self._members.items()
            if not member.hosts.isdisjoint(hosts)
            or any(place[0] in hosts for place in map(host_and_port, member.multiaddrs) if place)
        )

    def lost(self, peer_id: str) -> None:
        """Notes that the connection to a peer is gone."""
        self.connected.discard(peer_id)
        member = self._members.get(peer_id)
        if member is not None and member.missing_since is None:
            member.missing_since = asyncio.get_running_loop().time()

    async def stop(self) -> None:
        """Dials no more."""
        dials = [member.dial for member in self._members.values() if member.dial is not None]
        await cancelled([self._task, *self._ending, *dials])

    async def _stay_connected(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._has_news.clear()
            try:
                hosts = await self._daemon.connected_hosts()
            except DaemonError:
                return  # p2pd is gone: P2pd.died says so
            self._daemon.tcp_pacing.look()  # p2pd may have dialled anew since
            for peer_id in self.connected - hosts.keys():
                self.lost(peer_id)
            now = loop.time()
            is_restless = now < self._restless_until
            look = self._limits.restless_look_seconds if is_restless else self._limits.look_seconds
            waits = [look]
            for peer_id, member in self._members.items():
                if peer_id in hosts:
                    member.hosts = hosts[peer_id]
                    member.retry_seconds = self._limits.first_redial_seconds
                    self.saw(peer_id)
                    continue
                self.lost(peer_id)
                if member.dial is None and member.due <= now:
                    self._begin_dial(peer_id, member)
                elif member.dial is None:
                    waits.append(member.due - now)
            with suppress(TimeoutError):
                async with asyncio.timeout(min(waits)):
                    await self._has_news.wait()

    def _begin_dial(self, peer_id: str, member: _Member) -> None:
        """Nobody waits for it: an address that swallows packets takes as long as a dial may."""
        member.dial = dial = asyncio.create_task(self._dial(peer_id, member), name="dial")

        def end(_: asyncio.Task[None]) -> None:
            if member.dial is dial:
                member.dial = None
            self._has_news.set()

        dial.add_done_callback(end)

    async def _dial(self, peer_id: str, member: _Member) -> None:
        try:
            async with asyncio.timeout(self._limits.dial_seconds):
                await self._daemon.connect(peer_id, member.multiaddrs)
        except (DaemonError, TimeoutError) as error:
            if isinstance(error.__cause__, ProxyRefusedError) and not member.is_refusal_told:
                member.is_refusal_told = True  # once: it is dialled again and again
                _log.info(
                    "no tunnel to a member",
                    peer_id=peer_id,
                    why=str(error.__cause__),
                    next_step="most proxies lead to port 443 alone: 'atoll helper start --port 443'",
                )
            member.due = asyncio.get_running_loop().time() + member.retry_seconds
            longest = self._limits.last_redial_seconds
            member.retry_seconds = min(2 * member.retry_seconds, longest)
        else:
            self.saw(peer_id)


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
        here: Callable[[], Collection[str]] = lambda: (),
    ) -> None:
        """`token` is told to the coordinator in heartbeats: it knows our datagrams by it."""
        self._own_ipv6 = leaving_by_ipv6
        self._here = here
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
        The place is a datagram's, whose sender may be forged, or told by the member.
        """
        if why_not := why_not_punched(multiaddr, self._here()):
            _log.info("no hole was punched", to=multiaddr, why=why_not)
            return
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
        watch = [] if self._watch is None else [self._watch]
        await cancelled([*self._dials.values(), *self._ends.values(), *watch])
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
    try:
        found = await looked_up(host, port, family=socket.AF_INET, kind=socket.SOCK_DGRAM)
    except OSError:
        return None
    return found[0], port
