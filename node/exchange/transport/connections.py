"""Keeps p2pd connected with every member, so that nodes behind NAT can be reached.

libp2p sends both ways over a connection, whoever dialled it: a node that cannot be dialled is reachable as
long as it keeps its own connections up. Two nodes that both cannot be dialled do not reach each other this
way: see punching.py.

A connection from an address that is gone goes nowhere, and libp2p finds out after 40 s at best; until then it
would prefer it to a new one, for the streams that hang on it. So both ends give it up as soon as they know:
the node that moved by its own kernel, its peers by the roster.
"""

import asyncio
import math
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

import structlog

from node.exchange.peers import Limits
from node.exchange.transport.p2pd import DaemonError, P2pd
from protocol.trust.identity import peer_id_of
from protocol.trust.proxy import ProxyRefusedError
from protocol.wire.rounds import RosterEntry

_log = structlog.get_logger(__name__)


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
        self._multiaddrs: dict[str, tuple[str, ...]] = {}  # by peer id
        self._due: dict[str, float] = {}  # when to dial next, by the loop's clock
        self._retry_seconds: dict[str, float] = {}
        self._hosts: dict[str, frozenset[str]] = {}  # where members were connected last
        self.connected: set[str] = set()
        """Members that are, by peer id."""
        self._missing_since: dict[str, float] = {}  # members that are not connected
        self._told_refusals: set[str] = set()  # of a proxy, by peer id
        self._restless_until = -math.inf  # by the loop's clock
        self._ending: set[asyncio.Task[None]] = set()
        self._dials: dict[str, asyncio.Task[None]] = {}  # by peer id
        self._has_news = asyncio.Event()
        self._task = asyncio.create_task(self._stay_connected(), name="connections")

    def set_roster(self, others: tuple[RosterEntry, ...]) -> None:
        """Says who is a member; one that is new, or moved, is dialled soon."""
        multiaddrs = {peer_id_of(e.address.public_key): e.address.multiaddrs for e in others}
        now = asyncio.get_running_loop().time()
        for peer_id, addresses in multiaddrs.items():
            before = self._multiaddrs.get(peer_id, addresses)
            if not set(before) <= set(addresses):
                self._give_up([peer_id])
            if self._multiaddrs.get(peer_id) != addresses:
                wait = 0.0 if self._own_peer_id < peer_id else self._limits.yield_seconds
                self._due[peer_id] = now + wait
                self._retry_seconds[peer_id] = self._limits.first_redial_seconds
                self._missing_since.pop(peer_id, None)
                self._end_dial(peer_id)  # of where it was
        self._multiaddrs = multiaddrs
        self._hosts = {p: hosts for p, hosts in self._hosts.items() if p in multiaddrs}
        self._has_news.set()

    def begin_anew(self) -> None:
        """Ends all connections, which go nowhere now, and dials every member."""
        now = asyncio.get_running_loop().time()
        for peer_id in tuple(self._dials):
            self._end_dial(peer_id)
        self._due = dict.fromkeys(self._multiaddrs, now)
        self._retry_seconds = dict.fromkeys(self._multiaddrs, self._limits.first_redial_seconds)
        self._give_up(list(self._multiaddrs))

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
        self._missing_since.pop(peer_id, None)
        if peer_id not in self.connected:
            self.connected.add(peer_id)
            self._daemon.tcp_pacing.look()
            self._on_connection()

    def unreachable(self) -> tuple[str, ...]:
        """Members that have not been connected for a while, though they were dialled.

        Not at once: a member that cannot be dialled dials us itself meanwhile.
        """
        before = asyncio.get_running_loop().time() - self._limits.unreachable_seconds
        return tuple(peer_id for peer_id, since in self._missing_since.items() if since <= before)

    def at(self, hosts: Collection[str]) -> frozenset[str]:
        """Members that say that they are at one of these addresses, or were connected from it last."""
        return frozenset(
            peer_id
            for peer_id, told in self._multiaddrs.items()
            if not self._hosts.get(peer_id, frozenset()).isdisjoint(hosts)
            or any(address.split("/")[2] in hosts for address in told)
        )

    def lost(self, peer_id: str) -> None:
        """Notes that the connection to a peer is gone."""
        self.connected.discard(peer_id)
        self._missing_since.setdefault(peer_id, asyncio.get_running_loop().time())

    async def stop(self) -> None:
        """Dials no more."""
        tasks = [self._task, *self._ending, *self._dials.values()]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    async def _stay_connected(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._has_news.clear()
            try:
                hosts = await self._daemon.connected_hosts()
            except DaemonError:
                return  # p2pd is gone: P2pd.died says so
            connected = frozenset(hosts)
            self._hosts |= {
                peer_id: hosts[peer_id] for peer_id in connected & self._multiaddrs.keys()
            }
            self._daemon.tcp_pacing.look()  # p2pd may have dialled anew since
            for peer_id in self.connected - connected:
                self.lost(peer_id)
            for peer_id in connected & self._multiaddrs.keys():
                self.saw(peer_id)
                self._retry_seconds[peer_id] = self._limits.first_redial_seconds
            now = loop.time()
            missing = self._multiaddrs.keys() - connected
            self._missing_since = {p: self._missing_since.get(p, now) for p in missing}
            for peer_id in missing - self._dials.keys():
                if self._due[peer_id] <= now:
                    self._begin_dial(peer_id)
            is_restless = now < self._restless_until
            look = self._limits.restless_look_seconds if is_restless else self._limits.look_seconds
            waits = [self._due[peer_id] - now for peer_id in missing - self._dials.keys()]
            try:
                async with asyncio.timeout(max(0.0, min([look, *waits]))):
                    await self._has_news.wait()
            except TimeoutError:
                continue

    def _begin_dial(self, peer_id: str) -> None:
        """Nobody waits for it: an address that swallows packets takes as long as a dial may."""
        self._dials[peer_id] = dial = asyncio.create_task(self._dial(peer_id), name="dial")

        def end(_: asyncio.Task[None]) -> None:
            if self._dials.get(peer_id) is dial:
                del self._dials[peer_id]
            self._has_news.set()

        dial.add_done_callback(end)

    def _end_dial(self, peer_id: str) -> None:
        if (dial := self._dials.pop(peer_id, None)) is not None:
            dial.cancel()

    def _tell_refusal(self, peer_id: str, cause: BaseException | None) -> None:
        """Once for each member: it is dialled again and again."""
        if isinstance(cause, ProxyRefusedError) and peer_id not in self._told_refusals:
            self._told_refusals.add(peer_id)
            _log.info(
                "no tunnel to a member",
                peer_id=peer_id,
                why=str(cause),
                next_step="most proxies lead to port 443 alone: 'atoll helper start --port 443'",
            )

    async def _dial(self, peer_id: str) -> None:
        try:
            async with asyncio.timeout(self._limits.dial_seconds):
                await self._daemon.connect(peer_id, self._multiaddrs[peer_id])
        except (DaemonError, TimeoutError) as error:
            self._tell_refusal(peer_id, error.__cause__)
            wait = self._retry_seconds[peer_id]
            self._due[peer_id] = asyncio.get_running_loop().time() + wait
            self._retry_seconds[peer_id] = min(2 * wait, self._limits.last_redial_seconds)
        else:
            self.saw(peer_id)
