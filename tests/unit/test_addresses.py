"""What the kernel says of this machine's addresses, and what peers are told of them."""

import asyncio
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from lab.network.namespace import inside, new_namespace
from lab.network.switch import _ip as ip
from node.doctor.network import Finding, address_finding
from node.machine import addresses
from node.machine.addresses import (
    OwnAddress,
    address_changes,
    address_in,
    by_route,
    forwarded_among,
    interface_addresses,
    most_useful,
    own_addresses,
    require_interface,
    route_to,
    told_addresses,
    visible_now,
)
from protocol.errors import SystemRefusedError

ADDRESS, LOCAL, LABEL = 1, 2, 3
DEPRECATED, TENTATIVE, PERMANENT = 0x20, 0x40, 0x80
EVERYWHERE, LINK, HOST = 0, 253, 254


def told(
    *attributes: tuple[int, bytes],
    family: int = socket.AF_INET,
    flags: int = PERMANENT,
    scope: int = EVERYWHERE,
) -> bytes:
    content = struct.pack("=BBBBI", family, 24, flags, scope, 7)
    for kind, value in attributes:
        length = 4 + len(value)
        content += struct.pack("=HH", length, kind) + value + bytes(-length % 4)
    return content


def v4(text: str) -> bytes:
    return socket.inet_pton(socket.AF_INET, text)


def v6(text: str) -> bytes:
    return socket.inet_pton(socket.AF_INET6, text)


def test_on_a_tunnel_the_own_address_counts_and_not_the_other_ends() -> None:
    message = told((LABEL, b"tun0\0"), (ADDRESS, v4("10.0.0.1")), (LOCAL, v4("10.0.0.2")))
    assert address_in(message) == "10.0.0.2"
    assert address_in(told((ADDRESS, v6("fd00::2")), family=socket.AF_INET6)) == "fd00::2"


@pytest.mark.parametrize(
    "message",
    [
        told((LOCAL, v4("127.0.0.1")), scope=HOST),
        told((ADDRESS, v6("fe80::1")), family=socket.AF_INET6, scope=LINK),
        told((ADDRESS, v6("fd00::2")), family=socket.AF_INET6, flags=DEPRECATED),
        told((ADDRESS, v6("fd00::2")), family=socket.AF_INET6, flags=TENTATIVE),
        told((ADDRESS, b"12345678"), family=socket.AF_UNIX),
        told((LABEL, b"eth0\0")),
    ],
)
def test_what_others_cannot_use_is_no_address(message: bytes) -> None:
    assert address_in(message) is None


def test_where_it_listens_everywhere_peers_are_told_of_each_address_that_there_is_now() -> None:
    at_start = ("/ip4/127.0.0.1/tcp/7700", "/ip4/10.0.0.2/tcp/7700")
    own = ("10.0.0.9", "192.168.1.4", "fd00::2")
    everywhere = ("/ip4/0.0.0.0/tcp/0",)
    assert visible_now(at_start, everywhere, own) == (
        "/ip4/10.0.0.9/tcp/7700",
        "/ip4/192.168.1.4/tcp/7700",
    )
    assert visible_now(at_start, everywhere, ()) == at_start  # loopback is all that there is
    assert visible_now(at_start, ("/ip4/10.0.0.2/tcp/7700",), own) == at_start
    both = (*everywhere, "/ip6/::/tcp/0")
    at_start_of_both = (*at_start, "/ip6/::1/tcp/7701")
    assert visible_now(at_start_of_both, both, own)[-1] == "/ip6/fd00::2/tcp/7701"


@pytest.mark.usefixtures("may_make_namespaces")
async def test_the_kernel_tells_of_each_change_and_of_what_there_is_then() -> None:
    namespace = new_namespace()
    with inside(namespace):
        ip("link set lo up", "link add dev wired type bridge", "link set wired up")
        changes = address_changes()
        heard = asyncio.ensure_future(anext(changes))
        await asyncio.sleep(0)  # it listens from here on
        assert own_addresses() == ()
        ip("addr add 10.0.0.1/24 dev wired")
        await asyncio.wait_for(heard, 60)
        assert own_addresses() == ("10.0.0.1",)
        ip("addr del 10.0.0.1/24 dev wired", "addr add 10.0.0.2/24 dev wired")
        await asyncio.wait_for(anext(changes), 60)
        assert own_addresses() == ("10.0.0.2",)
        await changes.aclose()


async def test_it_may_be_looked_again_where_nobody_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_told in (True, False):
        if not is_told:
            monkeypatch.setattr(addresses, "_listening", lambda: None)
        changes = address_changes((0.0, 0.01))
        for _ in range(4):
            await asyncio.wait_for(anext(changes), 60)
        await changes.aclose()


def test_a_forwarded_port_is_what_was_not_there_before_and_is_not_this_machines() -> None:
    before = ("/ip4/127.0.0.1/tcp/7700", "/ip4/192.168.1.4/tcp/7700")
    moved = "/ip4/192.168.1.9/tcp/7700"
    outside = "/ip4/203.0.113.5/tcp/51000"
    own = ("192.168.1.9",)
    assert forwarded_among((*before, moved, outside), before=before, own=own) == (outside,)
    assert forwarded_among((*before, moved), before=before, own=own) == ()


OWN = (
    OwnAddress("192.168.1.4", "wlan0"),
    OwnAddress("10.0.0.2", "eth1"),
    OwnAddress("fd00::2", "eth1"),
)


def test_peers_are_told_first_of_the_address_by_which_the_coordinator_is_reached() -> None:
    assert told_addresses(OWN, route=(), interface="") == ("192.168.1.4", "10.0.0.2", "fd00::2")
    assert told_addresses(OWN, route=("fd00::2", "10.0.0.2"), interface="") == (
        *("10.0.0.2", "fd00::2", "192.168.1.4"),
    )
    assert told_addresses(OWN, route=("10.0.0.2",), interface="wlan0") == ("192.168.1.4",)
    told = ("/ip4/192.168.1.4/tcp/1", "/ip4/10.0.0.2/tcp/1", "/ip6/fd00::2/tcp/2")
    assert by_route(told, ("fd00::2",)) == (told[2], *told[:2])


def test_an_interface_that_is_not_there_is_refused_with_those_that_are() -> None:
    for interface in ("", "eth1"):
        require_interface(interface, OWN)
    with pytest.raises(
        SystemRefusedError, match=r"'eth9'.*wlan0 \(192.168.1.4\), eth1 \(10.0.0.2\)"
    ):
        require_interface("eth9", OWN)
    with pytest.raises(SystemRefusedError, match="there are: none"):
        require_interface("eth9", ())


def test_the_doctor_says_which_addresses_peers_are_told_and_why() -> None:
    def found(interface: str = "", *, own: Sequence[OwnAddress] = OWN) -> Finding:
        return address_finding(own, route=("10.0.0.2",), interface=interface, is_chosen=False)

    several = found()
    assert several.verdict == "note" and 'interface = "eth1"' in several.next_step
    assert several.what == (
        "peers are told 10.0.0.2 of eth1, by which the coordinator is reached; 192.168.1.4 of wlan0; "
        "fd00::2 of eth1"
    )
    assert found(own=OWN[1:]).verdict == "fine"
    assert found("wlan0").what == "peers are told 192.168.1.4 of wlan0; as interface says"
    assert (found("eth9").verdict, found("eth9").exit_code) == ("wrong", 71)
    assert found(own=()).verdict == "note"


@pytest.mark.usefixtures("may_make_namespaces")
async def test_the_kernel_says_by_which_interface_a_host_is_reached() -> None:
    with inside(new_namespace()):
        ip("link set lo up")
        for number in (1, 2):
            ip(f"link add dev wire{number} type bridge", f"link set wire{number} up")
            ip(f"addr add 10.0.{number}.1/24 dev wire{number}")
        ip("route add 203.0.113.0/24 via 10.0.2.9")
        assert interface_addresses() == (
            *(OwnAddress("10.0.1.1", "wire1"), OwnAddress("10.0.2.1", "wire2")),
        )
        assert await route_to("203.0.113.7") == ("10.0.2.1",)
        assert await route_to("10.0.1.9") == ("10.0.1.1",)
        assert await route_to("198.51.100.1") == ()  # there is no way
        assert await route_to("") == ()


@pytest.fixture
def may_make_namespaces() -> None:
    if not Path("/proc/self/ns/net").exists():
        pytest.skip("this kernel has no network namespaces")
    try:
        new_namespace()
    except OSError as error:
        pytest.skip(f"no network namespace can be made here: {error}")


def test_of_many_addresses_some_of_each_kind_are_told() -> None:
    fours = tuple(f"/ip4/10.0.0.{number}/tcp/1" for number in range(20))
    sixes = ("/ip6/fd00::1/tcp/2", "/ip6/fd00::2/tcp/2")
    assert most_useful(fours[:3] + sixes, 16) == fours[:3] + sixes
    told = most_useful(fours + sixes, 16)
    assert len(told) == 16 and set(sixes) < set(told) and told[0] == fours[0]
