"""Stays connected with every member, so that nodes behind NAT can be reached.

libp2p sends both ways over a connection, whoever dialled it: a node that cannot be dialled is
reachable as long as it keeps its own connections up. Two nodes that both cannot be dialled do not
reach each other; their transfers fail with the reason.
"""

import asyncio
from collections.abc import Callable

from node.exchange.transport.limits import Limits
from node.exchange.transport.p2pd import DaemonError, P2pd
from protocol.rounds import RosterEntry
from protocol.trust.identity import peer_id_of


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
        self.connected: set[str] = set()
        """Members that are, by peer id."""
        self._missing_since: dict[str, float] = {}  # members that are not connected
        self._has_news = asyncio.Event()
        self._task = asyncio.create_task(self._stay_connected(), name="connections")

    def set_roster(self, others: tuple[RosterEntry, ...]) -> None:
        """Says who is a member; one that is new, or moved, is dialled soon."""
        multiaddrs = {peer_id_of(e.address.public_key): e.address.multiaddrs for e in others}
        now = asyncio.get_running_loop().time()
        for peer_id, addresses in multiaddrs.items():
            if self._multiaddrs.get(peer_id) != addresses:
                wait = 0.0 if self._own_peer_id < peer_id else self._limits.yield_seconds
                self._due[peer_id] = now + wait
                self._retry_seconds[peer_id] = self._limits.first_redial_seconds
                self._missing_since.pop(peer_id, None)
        self._multiaddrs = multiaddrs
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

    def lost(self, peer_id: str) -> None:
        """Notes that the connection to a peer is gone."""
        self.connected.discard(peer_id)
        self._missing_since.setdefault(peer_id, asyncio.get_running_loop().time())

    async def stop(self) -> None:
        """Dials no more."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _stay_connected(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._has_news.clear()
            try:
                connected = await self._daemon.connected_peer_ids()
            except DaemonError:
                return  # p2pd is gone: P2pd.died says so
            self._daemon.tcp_pacing.look()  # p2pd may have dialled anew since
            for peer_id in self.connected - connected:
                self.lost(peer_id)
            for peer_id in connected & self._multiaddrs.keys():
                self.saw(peer_id)
                self._retry_seconds[peer_id] = self._limits.first_redial_seconds
            now = loop.time()
            missing = self._multiaddrs.keys() - connected
            self._missing_since = {p: self._missing_since.get(p, now) for p in missing}
            due = [peer_id for peer_id in missing if self._due[peer_id] <= now]
            await asyncio.gather(*(self._dial(peer_id) for peer_id in due))
            waits = [self._due[peer_id] - loop.time() for peer_id in missing]
            try:
                async with asyncio.timeout(max(0.0, min([self._limits.look_seconds, *waits]))):
                    await self._has_news.wait()
            except TimeoutError:
                continue

    async def _dial(self, peer_id: str) -> None:
        try:
            async with asyncio.timeout(self._limits.dial_seconds):
                await self._daemon.connect(peer_id, self._multiaddrs[peer_id])
        except (DaemonError, TimeoutError):
            wait = self._retry_seconds[peer_id]
            self._due[peer_id] = asyncio.get_running_loop().time() + wait
            self._retry_seconds[peer_id] = min(2 * wait, self._limits.last_redial_seconds)
        else:
            self.saw(peer_id)
