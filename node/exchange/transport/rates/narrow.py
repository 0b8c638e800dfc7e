"""Notices paths on which small packets get through and large ones vanish. Pure.

A tunnel on the way carries less than Ethernet's 1,500 bytes, and a firewall swallows what would tell the
sender so (RFC 2923, section 2.1: a "black hole"). Connections come to be, for handshakes are small, and each
stands still at its first full packet until TCP gives it up. From one connection that looks as if the peer had
gone. But a peer that is gone takes no new connection, and shakes no hand.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

TIMES_IN_A_ROW = 3
"""So many connections to a host must end so before it is said. A bad radio ends one or two."""

WITHIN_SECONDS = 60.0
"""So soon one after the other: a node that moves, or a router that forgets, ends one now and then."""

SHOOK_HANDS_BYTES = 500
"""Acknowledged of a connection on which both sides have spoken."""

MOST_SMALL_BYTES = 8 * 1024
"""Acknowledged of one on which handshakes and offers went, and nothing else: they take half of that."""

STANDS_STILL = 2
"""So often in a row TCP has sent the same again."""

REMEMBERED_SECONDS = 600.0
"""For so long nothing large is tried there: then the path may be another one."""


class Progress(NamedTuple):
    """How far one connection has come."""

    host: str  # at its other end
    acked_bytes: int
    under_way_bytes: int
    packet_bytes: int  # of a full one, without headers
    resent_in_a_row: int


class NarrowPaths:
    """To the hosts at the other ends of one process's connections."""

    def __init__(self) -> None:
        self._still: dict[str, str] = {}  # hosts of connections that stand still, by their names
        self._ended: defaultdict[str, list[float]] = defaultdict(list)  # when, by host, lately
        self._since: dict[str, float] = {}  # hosts that are known for it

    def hosts(self, now: float) -> frozenset[str]:
        """To which only small packets get through."""
        for host in [h for h, since in self._since.items() if since + REMEMBERED_SECONDS < now]:
            self._clear(host)
        return frozenset(self._since)

    def look(self, connections: Mapping[str, Progress], now: float) -> None:
        """Takes note of all connections that there are, by names that no later one has."""
        for name, seen in connections.items():
            is_still = (
                seen.resent_in_a_row >= STANDS_STILL and seen.under_way_bytes >= seen.packet_bytes
            )
            if seen.acked_bytes > MOST_SMALL_BYTES:
                self._clear(seen.host)
                self._still.pop(name, None)
            elif is_still and seen.acked_bytes >= SHOOK_HANDS_BYTES:
                self._still[name] = seen.host
            else:
                self._still.pop(name, None)
        for name in self._still.keys() - connections.keys():
            host = self._still.pop(name)
            lately = [at for at in self._ended[host] if at + WITHIN_SECONDS >= now]
            self._ended[host] = [*lately, now]
            if len(self._ended[host]) >= TIMES_IN_A_ROW:
                self._since.setdefault(host, now)

    def _clear(self, host: str) -> None:
        self._ended.pop(host, None)
        self._since.pop(host, None)
