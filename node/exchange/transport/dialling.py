"""Where a member may have this node dial, and how often: a member tells what it likes of where it is.

A dial is a connection of TCP, and where somebody answers, the first lines of libp2p. Even so much should not
reach what only this machine or its link knows: services that trust loopback, a cloud's metadata. Private
ranges are dialled, for the members of one house or site are there.
"""

import ipaddress
import math
from collections.abc import Collection

MOST_AT_ONCE = 64
"""Places of one member that are dialled one after the other: four times what it may tell."""

PLACES_PER_SECOND = 2.0
"""Of one member, from then on."""

_METADATA = frozenset({ipaddress.ip_address("fd00:ec2::254")})
"""What clouds have in a private range; that of IPv4 is link-local."""

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def why_not_dialled(host: str, here: Collection[str]) -> str:
    """Why a host that a member tells is not dialled; empty where it is. A name is known once it is resolved.

    `here` are the hosts that this node tells, and its coordinator's: who is on loopback itself, as in a swarm
    on one machine, dials loopback.
    """
    address = _address(host)
    if address is None:
        is_loopback = host.lower().rstrip(".") == "localhost"
        return _NOT_LOOPBACK if is_loopback and not _is_any_loopback(here) else ""
    if address.is_loopback:
        return "" if _is_any_loopback(here) else _NOT_LOOPBACK
    if address.is_link_local:
        is_there = any(own is not None and own.is_link_local for own in map(_address, here))
        return "" if is_there else "link-local, and this node is not: not dialled"
    if address.is_unspecified or address.is_multicast or address in _METADATA:
        return "no member's address: not dialled"
    if address.version == 4 and address.is_reserved:
        return "no member's address: not dialled"
    return ""


def why_not_punched(multiaddr: str, here: Collection[str]) -> str:
    """Why a place of QUIC is not dialled; empty where it is."""
    match multiaddr.split("/"):
        case ["", "ip4" | "ip6", host, "udp", port, "quic-v1"] if port.isdecimal():
            return why_not_dialled(host, here)
    return "no place of QUIC"


_NOT_LOOPBACK = "this machine's own loopback, where no member is: not dialled"


def _is_any_loopback(here: Collection[str]) -> bool:
    found = map(_address, here)
    return "localhost" in here or any(own is not None and own.is_loopback for own in found)


def _address(host: str) -> _Address | None:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


class Allowance:
    """How many places of each peer may be dialled now. Coming anew under the same key gives no more."""

    def __init__(self) -> None:
        self._spent: dict[str, tuple[float, float]] = {}  # by peer id: places, and when that was

    def take(self, peer_id: str, num_places: int, *, now: float) -> float:
        """Spends so many; returns 0, or after how many seconds they may be dialled, and spends nothing."""
        self._spent = {peer: s for peer, s in self._spent.items() if _left(s, now) > 0.0}
        spent = _left(self._spent.get(peer_id, (0.0, -math.inf)), now)
        too_many = spent + num_places - MOST_AT_ONCE
        if too_many > 0.0:
            return too_many / PLACES_PER_SECOND
        self._spent[peer_id] = (spent + num_places, now)
        return 0.0


def _left(spent: tuple[float, float], now: float) -> float:
    num_places, at = spent
    return max(0.0, num_places - PLACES_PER_SECOND * (now - at))
