"""Home routers as arithmetic: they translate addresses of IPv4 (NAT), and map ports when they are asked to.

By IPv6 they translate nothing, and let in what answers, from where it was asked.

How a router maps, and whom it lets in, in the words of RFC 4787 and in those of everybody:

| kind | one mapping for | lets in |
|---|---|---|
| full cone | all others | whoever sends to it |
| restricted | all others | hosts that were sent something |
| port restricted | all others | hosts and ports that were sent something |
| symmetric | each host and port | that host and port |

Routers behind each other (a provider's before one's own) are several of them in a row. A router that maps
ports does so by NAT-PMP (RFC 6886): what it maps is open to all.
"""

import itertools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from typing import Literal, NamedTuple

NatKind = Literal["full cone", "restricted", "port restricted", "symmetric"]

FIRST_PORT = 20_000
"""The first one that a router gives; then one after the other."""

NAT_PMP_PORT = 5351

_TCP, _UDP = 6, 17
_CHECKSUM_AT = {_TCP: 16, _UDP: 6}  # in the header of either
_PROTOCOLS = {1: _UDP, 2: _TCP}  # NAT-PMP's requests for a mapping


class Place(NamedTuple):
    """One end of a conversation."""

    protocol: int
    address: bytes  # 4 bytes, or 16
    port: int


@dataclass(slots=True, kw_only=True)
class _Mapping:
    inside: Place
    port: int
    told: set[Place] = field(default_factory=set)  # who was sent something through it
    is_open: bool = False  # to all


@dataclass(slots=True, kw_only=True)
class Router:
    """Between one host and the rest. Forgets when it is told to; `maps_ports`: whether it obeys NAT-PMP."""

    kind: NatKind
    address: IPv4Address
    """By which others know it."""
    maps_ports: bool = False
    num_mapped: int = 0
    """Mappings that were asked for so far, renewals counted."""
    _ports: Callable[[], int] = field(default_factory=lambda: itertools.count(FIRST_PORT).__next__)
    _out: dict[tuple[Place, Place | None], _Mapping] = field(default_factory=dict)
    _in: dict[tuple[int, int], _Mapping] = field(default_factory=dict)
    _asked_by_ipv6: set[tuple[Place, Place]] = field(default_factory=set)  # from within, to where

    def out(self, content: bytes) -> bytes | None:
        """A packet of the host as the rest sees it; None of what no router passes on."""
        if is_ipv6(content):
            if (within := ends_by_ipv6(content)) is not None:
                self._asked_by_ipv6.add(within)
            return content
        ends = ends_of(content)
        if ends is None:
            return None
        source, target = ends
        mapping = self._mapping(source, target)
        mapping.told.add(target)
        return rewritten(content, source=Place(source.protocol, self.address.packed, mapping.port))

    def into(self, content: bytes) -> bytes | None:
        """A packet for the router as the host sees it; None of what is not let in."""
        if is_ipv6(content):
            coming = ends_by_ipv6(content)
            return content if coming is None or coming[::-1] in self._asked_by_ipv6 else None
        ends = ends_of(content)
        if ends is None:
            return None
        source, target = ends
        mapping = self._in.get((target.protocol, target.port))
        if mapping is None or not self._lets_in(mapping, source):
            return None
        return rewritten(content, target=mapping.inside)

    def forget(self) -> None:
        """Starts anew, with no mapping; the ports that it gives go on."""
        self._out.clear()
        self._in.clear()
        self._asked_by_ipv6.clear()

    def answer(self, content: bytes) -> bytes | None:
        """What the router itself says to a packet of the host that is for its address within."""
        ends = ends_of(content)
        if ends is None or not self.maps_ports:
            return None
        source, target = ends
        if target.protocol != _UDP or target.port != NAT_PMP_PORT:
            return None
        told = self._obey(source, content[(content[0] & 0x0F) * 4 + 8 :])
        return None if told is None else udp_packet(target, source, told)

    def _mapping(self, source: Place, target: Place) -> _Mapping:
        opened = self._out.get((source, None))
        if opened is not None and (opened.is_open or self.kind != "symmetric"):
            return opened
        key = (source, target if self.kind == "symmetric" else None)
        if key not in self._out:
            self._out[key] = self._in_new(source, self._ports())
        return self._out[key]

    def _in_new(self, inside: Place, port: int) -> _Mapping:
        made = self._in[inside.protocol, port] = _Mapping(inside=inside, port=port)
        return made

    def _lets_in(self, mapping: _Mapping, source: Place) -> bool:
        if mapping.is_open:
            return True
        match self.kind:
            case "full cone":
                return True
            case "restricted":
                return any(place.address == source.address for place in mapping.told)
            case "port restricted" | "symmetric":
                return source in mapping.told

    def _obey(self, asker: Place, request: bytes) -> bytes | None:
        if len(request) < 2 or request[0] != 0:
            return None
        if request[1] == 0:
            return struct.pack("!BBHI4s", 0, 128, 0, 0, self.address.packed)
        if request[1] not in _PROTOCOLS or len(request) < 12:
            return None
        inner_port, wanted_port, seconds = struct.unpack_from("!HHI", request, 4)
        inside = Place(_PROTOCOLS[request[1]], asker.address, inner_port)
        mapping = self._out.get((inside, None))
        if seconds and mapping is None:
            is_free = wanted_port and (inside.protocol, wanted_port) not in self._in
            port = wanted_port if is_free else self._ports()
            mapping = self._out[inside, None] = self._in_new(inside, port)
        if mapping is not None:
            mapping.is_open = bool(seconds)
        self.num_mapped += bool(seconds)
        port = 0 if mapping is None else mapping.port
        return struct.pack("!BBHIHHI", 0, 128 + request[1], 0, 0, inner_port, port, seconds)


def out_through(routers: Sequence[Router], content: bytes) -> bytes | None:
    """Through all of them, the host's own first."""
    for router in routers:
        passed = router.out(content)
        if passed is None:
            return None
        content = passed
    return content


def into_through(routers: Sequence[Router], content: bytes) -> bytes | None:
    """Back through all of them, to the host."""
    for router in reversed(routers):
        passed = router.into(content)
        if passed is None:
            return None
        content = passed
    return content


def ends_of(content: bytes) -> tuple[Place, Place] | None:
    """From where to where a packet goes; None of what is not TCP or UDP over IPv4, and of later fragments."""
    if len(content) < 20 or content[0] >> 4 != 4 or content[9] not in _CHECKSUM_AT:
        return None
    start = (content[0] & 0x0F) * 4
    if int.from_bytes(content[6:8]) & 0x1FFF or len(content) < start + 8:
        return None
    ports = struct.unpack_from("!HH", content, start)
    return (
        Place(content[9], content[12:16], ports[0]),
        Place(content[9], content[16:20], ports[1]),
    )


def is_ipv6(content: bytes) -> bool:
    """Whether a packet is one of IPv6."""
    return len(content) >= 40 and content[0] >> 4 == 6


def ends_by_ipv6(content: bytes) -> tuple[Place, Place] | None:
    """From where to where a packet goes; None of what is not TCP or UDP, such as errors."""
    if content[6] not in _CHECKSUM_AT or len(content) < 48:
        return None
    ports = struct.unpack_from("!HH", content, 40)
    return Place(content[6], content[8:24], ports[0]), Place(content[6], content[24:40], ports[1])


def rewritten(content: bytes, *, source: Place | None = None, target: Place | None = None) -> bytes:
    """The packet from or to another place, with checksums that fit."""
    packet = bytearray(content)
    start = (packet[0] & 0x0F) * 4
    for place, address_at, port_at in ((source, 12, start), (target, 16, start + 2)):
        if place is not None:
            packet[address_at : address_at + 4] = place.address
            struct.pack_into("!H", packet, port_at, place.port)
    addresses = content[12:20], bytes(packet[12:20])
    ports = content[start : start + 4], bytes(packet[start : start + 4])
    _adjust(packet, 10, *addresses)
    checksum_at = start + _CHECKSUM_AT[packet[9]]
    if packet[9] == _TCP or packet[checksum_at : checksum_at + 2] != b"\0\0":  # UDP may have none
        _adjust(packet, checksum_at, addresses[0] + ports[0], addresses[1] + ports[1])
    return bytes(packet)


def udp_packet(source: Place, target: Place, body: bytes) -> bytes:
    """A packet of UDP, whose body has no checksum."""
    length = 28 + len(body)
    head = bytearray(struct.pack("!BBHHHBBH", 0x45, 0, length, 0, 0, 64, _UDP, 0))
    head += source.address + target.address
    struct.pack_into("!H", head, 10, ~_folded(_sum(bytes(head))) & 0xFFFF)
    return bytes(head) + struct.pack("!HHHH", source.port, target.port, 8 + len(body), 0) + body


def _adjust(packet: bytearray, at: int, before: bytes, after: bytes) -> None:
    """A checksum, after words that it covers have changed (RFC 1624)."""
    (checksum,) = struct.unpack_from("!H", packet, at)
    words = len(before) // 2
    total = (~checksum & 0xFFFF) + (0xFFFF * words - _sum(before)) + _sum(after)
    struct.pack_into("!H", packet, at, ~_folded(total) & 0xFFFF)


def _sum(words: bytes) -> int:
    return sum(struct.unpack(f"!{len(words) // 2}H", words))


def _folded(total: int) -> int:
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total
