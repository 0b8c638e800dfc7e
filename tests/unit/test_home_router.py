"""The network lab's home routers: whom they let in, what they rewrite, and ports that they map."""

import itertools
import struct
from ipaddress import IPv4Address, IPv6Address
from typing import get_args

import pytest

from lab.network.router import (
    FIRST_PORT,
    NAT_PMP_PORT,
    NatKind,
    Place,
    Router,
    ends_of,
    into_through,
    out_through,
    udp_packet,
)

TCP, UDP = 6, 17
HOME = IPv4Address("192.168.77.2").packed
GATEWAY = IPv4Address("192.168.77.1").packed
OUTSIDE = IPv4Address("10.99.0.7")
FRIEND = IPv4Address("10.99.0.1").packed
OTHER = IPv4Address("10.99.0.2").packed


def place(address: bytes, port: int, protocol: int = UDP) -> Place:
    return Place(protocol, address, port)


def router(kind: NatKind = "port restricted", *, maps_ports: bool = False) -> Router:
    return Router(kind=kind, address=OUTSIDE, maps_ports=maps_ports)


def sent(routed: Router, target: Place, *, port: int = 4000) -> Place:
    """From where a packet of the host comes, as others see it."""
    passed = routed.out(udp_packet(place(HOME, port), target, b"out"))
    assert passed is not None
    ends = ends_of(passed)
    assert ends is not None and ends[1] == target
    return ends[0]


def reaches(routed: Router, source: Place, target: Place) -> bool:
    passed = routed.into(udp_packet(source, target, b"in"))
    if passed is None:
        return False
    ends = ends_of(passed)
    assert ends is not None and ends[0] == source and ends[1].address == HOME
    return True


def by_ipv6(source: str, target: str, *, protocol: int = UDP, port: int = 4001) -> bytes:
    head = bytes([0x60, 0, 0, 0]) + struct.pack("!HBB", 8, protocol, 64)
    return (
        head
        + IPv6Address(source).packed
        + IPv6Address(target).packed
        + struct.pack("!HHHH", port, 4001, 8, 0)
    )


@pytest.mark.parametrize("kind", get_args(NatKind))
@pytest.mark.parametrize("protocol", [UDP, TCP])
def test_by_ipv6_nothing_is_translated_and_what_was_asked_may_answer(
    kind: NatKind, protocol: int
) -> None:
    routed = router(kind)
    out, back = (
        by_ipv6("fd99::1", "fd99::2", protocol=protocol),
        by_ipv6("fd99::2", "fd99::1", protocol=protocol),
    )
    assert routed.into(back) is None
    assert routed.out(out) == out
    assert routed.into(back) == back
    for other in (
        by_ipv6("fd99::3", "fd99::1", protocol=protocol),
        by_ipv6("fd99::2", "fd99::1", protocol=protocol, port=4002),
        by_ipv6("fd99::2", "fd99::1", protocol=TCP + UDP - protocol),
    ):
        assert routed.into(other) is None
    error = by_ipv6("fd99::3", "fd99::1", protocol=58)  # a packet was too large, say
    assert routed.into(error) == error
    routed.forget()
    assert routed.into(back) is None


def asked(routed: Router, request: bytes) -> bytes:
    answer = routed.answer(udp_packet(place(HOME, 999), place(GATEWAY, NAT_PMP_PORT), request))
    assert answer is not None
    assert ends_of(answer) == (place(GATEWAY, NAT_PMP_PORT), place(HOME, 999))
    return answer[28:]


def port_asked_for(routed: Router, *, wanted: int, seconds: int = 60, protocol: int = TCP) -> int:
    operation = 2 if protocol == TCP else 1
    told = asked(routed, struct.pack("!BBHHHI", 0, operation, 0, 7700, wanted, seconds))
    version, answered, result, _, inner, port, granted = struct.unpack("!BBHIHHI", told)
    assert (version, answered, result, inner, granted) == (0, 128 + operation, 0, 7700, seconds)
    return int(port)


@pytest.mark.parametrize(
    ("kind", "same_port", "same_host", "other_host"),
    [
        ("full cone", True, True, True),
        ("restricted", True, True, False),
        ("port restricted", True, False, False),
        ("symmetric", True, False, False),
    ],
)
def test_who_was_sent_nothing_is_let_in_by_some_kinds_only(
    kind: NatKind, same_port: bool, same_host: bool, other_host: bool
) -> None:
    routed = router(kind)
    seen = sent(routed, place(FRIEND, 53))
    assert reaches(routed, place(FRIEND, 53), seen) == same_port
    assert reaches(routed, place(FRIEND, 54), seen) == same_host
    assert reaches(routed, place(OTHER, 53), seen) == other_host
    assert not reaches(routed, place(FRIEND, 53), place(OUTSIDE.packed, seen.port + 1))


def test_only_a_symmetric_router_shows_each_other_end_another_port() -> None:
    for kind in ("full cone", "restricted", "port restricted"):
        routed = router(kind)
        assert sent(routed, place(FRIEND, 53)) == sent(routed, place(OTHER, 9))
        assert sent(routed, place(FRIEND, 53), port=4001).port == FIRST_PORT + 1
    routed = router("symmetric")
    seen = {sent(routed, place(*end)) for end in itertools.product((FRIEND, OTHER), (53, 54))}
    assert len(seen) == 4
    assert sent(routed, place(FRIEND, 53)) in seen  # it remembers


def test_checksums_fit_what_was_rewritten() -> None:
    segment = struct.pack("!HHIIBBHHH", 4000, 80, 1, 2, 0x50, 0x10, 100, 0, 0) + b"odd"
    source, target = place(HOME, 4000, TCP), place(FRIEND, 80, TCP)
    packet = bytearray(udp_packet(source, target, b"")[:20] + segment)
    struct.pack_into("!H", packet, 2, len(packet))
    packet[9] = TCP
    for at, covered in ((10, slice(0, 20)), (36, slice(20, None))):
        packet[at : at + 2] = b"\0\0"
        pseudo = b"" if at == 10 else _pseudo_header(packet)
        struct.pack_into("!H", packet, at, _checksum(pseudo + bytes(packet[covered])))
    passed = router().out(bytes(packet))
    assert passed is not None and passed[12:16] == OUTSIDE.packed
    assert _checksum(passed[:20]) == 0
    assert _checksum(_pseudo_header(passed) + passed[20:]) == 0


def test_a_port_that_is_asked_for_is_open_to_all_until_it_is_given_back() -> None:
    routed = router("symmetric", maps_ports=True)
    told = asked(routed, b"\0\0")
    assert told[-4:] == OUTSIDE.packed
    port = port_asked_for(routed, wanted=7700)
    assert port == 7700
    at = place(OUTSIDE.packed, port, TCP)
    passed = routed.into(_tcp(place(OTHER, 1, TCP), at))
    assert passed is not None
    assert ends_of(passed) == (place(OTHER, 1, TCP), place(HOME, 7700, TCP))
    assert port_asked_for(routed, wanted=7700) == 7700  # renewed
    assert routed.num_mapped == 2
    port_asked_for(routed, wanted=7700, seconds=0)
    assert routed.into(_tcp(place(OTHER, 1, TCP), at)) is None


def test_a_port_that_another_has_is_not_given_twice() -> None:
    routed = router("full cone", maps_ports=True)
    taken = sent(routed, place(FRIEND, 53))
    port = port_asked_for(routed, wanted=taken.port, protocol=UDP)
    assert port != taken.port


def test_who_maps_no_ports_says_nothing_and_nobody_else_is_answered() -> None:
    request = udp_packet(place(HOME, 999), place(GATEWAY, NAT_PMP_PORT), b"\0\0")
    assert router().answer(request) is None
    assert (
        router(maps_ports=True).answer(udp_packet(place(HOME, 9), place(GATEWAY, 53), b"")) is None
    )
    for nonsense in (b"", b"\1\0", b"\0\7", b"\0\1too short"):
        strange = udp_packet(place(HOME, 999), place(GATEWAY, NAT_PMP_PORT), nonsense)
        assert router(maps_ports=True).answer(strange) is None


def test_routers_in_a_row_let_in_what_each_of_them_lets_in() -> None:
    own = Router(kind="full cone", address=IPv4Address("100.64.0.2"))
    provider = Router(kind="port restricted", address=OUTSIDE)
    passed = out_through([own, provider], udp_packet(place(HOME, 1), place(FRIEND, 2), b"x"))
    assert passed is not None
    ends = ends_of(passed)
    assert ends is not None and ends[0].address == OUTSIDE.packed
    back = into_through([own, provider], udp_packet(place(FRIEND, 2), ends[0], b"y"))
    assert back is not None
    assert ends_of(back) == (place(FRIEND, 2), place(HOME, 1))
    assert into_through([own, provider], udp_packet(place(OTHER, 2), ends[0], b"y")) is None


def test_what_is_neither_tcp_nor_udp_is_not_passed_on() -> None:
    ping = bytearray(udp_packet(place(HOME, 1), place(FRIEND, 2), b""))
    ping[9] = 1
    fragment = bytearray(udp_packet(place(HOME, 1), place(FRIEND, 2), b""))
    fragment[6:8] = b"\0\1"
    for packet in (ping, fragment, b"", b"\x60" + bytes(38)):
        assert router().out(bytes(packet)) is None
        assert router().into(bytes(packet)) is None


def _tcp(source: Place, target: Place) -> bytes:
    packet = bytearray(udp_packet(source, target, bytes(12)))
    packet[9] = TCP
    return bytes(packet)


def _pseudo_header(packet: bytes | bytearray) -> bytes:
    return bytes(packet[12:20]) + struct.pack("!BBH", 0, packet[9], len(packet) - 20)


def _checksum(data: bytes) -> int:
    """Of the Internet (RFC 1071), summed in the plainest way."""
    data = data + b"\0" * (len(data) % 2)
    total = sum(data[i] << 8 | data[i + 1] for i in range(0, len(data), 2))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
