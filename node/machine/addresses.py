"""The addresses that this machine has now, and word of each change, from the Linux kernel by rtnetlink(7).

A laptop goes from cable to Wi-Fi, a DHCP lease ends: the kernel knows at once, and TCP not for minutes, for
its connections from an address that is gone just stay silent.
"""

import asyncio
import contextlib
import itertools
import os
import socket
import struct
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import NamedTuple

import structlog

from protocol.errors import SystemRefusedError
from protocol.trust.proxy import Proxy
from protocol.wire.sockets import in_own_thread

SETTLE_SECONDS = 0.2
"""An address goes and the next one comes: changes that follow so closely are told as one."""

ROUTE_SECONDS = 3.0
"""For the coordinator's name to be resolved."""

_ANY_PORT = 9

ROUTER_LOOKS = (2.0, 2.0, 2.0, 5.0, 10.0, 60.0)
"""After how many seconds each it is looked whether a router forwards a port now. libp2p finds one in 5 s."""

_ADDED, _REMOVED, _ASKED, _END, _FAILED = 20, 21, 22, 3, 2  # RTM_NEWADDR to NLMSG_ERROR
_WHOLE_LIST = 0x301  # NLM_F_REQUEST and NLM_F_DUMP
_GROUPS = 0x10 | 0x100  # RTMGRP_IPV4_IFADDR and RTMGRP_IPV6_IFADDR
_ADDRESS, _LOCAL = 1, 2  # IFA_ADDRESS, which is the other end's on a tunnel, and IFA_LOCAL
_EVERYWHERE, _SITE = 0, 200  # scopes in which others may know it
_NOT_NOW = 0x08 | 0x20 | 0x40  # IFA_F_DADFAILED, IFA_F_DEPRECATED and IFA_F_TENTATIVE

_HEADER = struct.Struct("=IHHII")  # length, type, flags, number, port
_ABOUT = struct.Struct("=BBBBI")  # family, length of the network's prefix, flags, scope, interface
_ATTRIBUTE = struct.Struct("=HH")  # length, type

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reachability:
    """How peers find a node, and how it gets to those that it cannot dial.

    `listen_multiaddrs` are libp2p's: "/ip4/0.0.0.0/tcp/7700". Peers are told first of the address by which
    `coordinator_host` is reached, or of those of `interface` alone.
    """

    listen_multiaddrs: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",)
    announce_host: str | None = None
    """A name or an IP address instead of the host in what peers are told: behind a forwarded port."""
    asks_router: bool = False
    """The router is asked to forward the port, and peers are told of its address too."""
    interface: str = ""
    coordinator_host: Callable[[], str] = lambda: ""
    punching_token: bytes = b""
    """16 random bytes, where it reaches members through their routers and its own."""
    proxy: Proxy | None = None
    """Members that cannot be dialled are dialled through it."""


ON_LOOPBACK = Reachability()
"""Of nodes of one machine, as tests and benchmarks have them."""


class _Told(NamedTuple):
    """One message of the kernel."""

    kind: int
    content: bytes


class OwnAddress(NamedTuple):
    """An address of this machine, and of which of its interfaces."""

    address: str
    interface: str


def own_addresses() -> tuple[str, ...]:
    """`interface_addresses` without their interfaces."""
    return tuple(dict.fromkeys(own.address for own in interface_addresses()))


def interface_addresses() -> tuple[OwnAddress, ...]:
    """Those that others may know, not loopback's or a single link's; in the kernel's order.

    Raises OSError where the kernel does not tell.
    """
    found: list[OwnAddress] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        kernel.send(
            _HEADER.pack(_HEADER.size + _ABOUT.size, _ASKED, _WHOLE_LIST, 1, 0)
            + _ABOUT.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
        )
        while True:
            for told in _messages(kernel.recv(1 << 16)):
                if told.kind == _FAILED:
                    number = -struct.unpack_from("=i", told.content)[0]
                    raise OSError(number, os.strerror(number))
                if told.kind == _END:
                    return tuple(dict.fromkeys(found))
                if told.kind == _ADDED and (address := address_in(told.content)) is not None:
                    with suppress(OSError):  # it went meanwhile
                        found.append(OwnAddress(address, _interface_in(told.content)))


def _interface_in(content: bytes) -> str:
    *_, index = _ABOUT.unpack_from(content)
    return socket.if_indextoname(index)


def sources_to(host: str) -> tuple[str, ...]:
    """From which of this machine's addresses packets go to a host, by its routes; nothing is sent.

    It may wait for the name to be resolved.
    """
    found = []
    with suppress(OSError, UnicodeError):
        for family, kind, _, _, place in socket.getaddrinfo(
            host, _ANY_PORT, type=socket.SOCK_DGRAM
        ):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(place)
                found.append(str(probe.getsockname()[0]).partition("%")[0])
    return tuple(dict.fromkeys(found))


def own_among(host: str) -> frozenset[str]:
    """Those of a host's addresses that are this machine's own. It may wait for the name to be resolved."""
    with suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)
        addresses = {str(place[0]).partition("%")[0] for *_, place in found}
        return frozenset(addresses.intersection(sources_to(host)))
    return frozenset()


async def route_to(host: str) -> tuple[str, ...]:
    """`sources_to`; none where that is not known in time, or no host."""
    if not host:
        return ()
    with suppress(TimeoutError):
        async with asyncio.timeout(ROUTE_SECONDS):
            return await in_own_thread(partial(sources_to, host))
    return ()


def told_addresses(
    own: Sequence[OwnAddress], *, route: Sequence[str], interface: str
) -> tuple[str, ...]:
    """Which of them peers are told: those of the named interface, or all.

    First come those by which the coordinator is reached, which `route` holds.
    """
    told = dict.fromkeys(each.address for each in own if interface in ("", each.interface))
    return tuple(sorted(told, key=lambda address: address not in route))


def require_interface(interface: str, own: Sequence[OwnAddress]) -> None:
    """Raises SystemRefusedError for a named interface that is not there, or has no address now.

    It may come: a service of the machine is started again.
    """
    if not interface or any(each.interface == interface for each in own):
        return
    there = ", ".join(f"{each.interface} ({each.address})" for each in own) or "none"
    raise SystemRefusedError(
        f"interface = {interface!r}, and no interface of that name has an address here; there are: {there}",
        next_step="name one of these in node.toml or by --interface, or leave it out",
    )


def most_useful(multiaddrs: Sequence[str], most: int) -> tuple[str, ...]:
    """No more of the addresses than a coordinator takes, of IPv4 and IPv6 in turns; all of few."""
    if len(multiaddrs) <= most:
        return tuple(multiaddrs)
    sixes = [address for address in multiaddrs if address.startswith("/ip6/")]
    others = [address for address in multiaddrs if not address.startswith("/ip6/")]
    in_turns = (one for pair in zip_longest(others, sixes) for one in pair if one is not None)
    return tuple(in_turns)[:most]


def has_ipv6() -> bool:
    """Whether this machine has IPv6 at all; it may still have no address that others reach."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


_INTERNET = "2000::"
"""The first of all global addresses of IPv6 (RFC 4291); nothing is sent to it."""


def leaving_by_ipv6() -> str | None:
    """Which address this machine's packets to the internet have by IPv6, or else one that others may know."""
    with suppress(OSError), socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
        probe.connect((_INTERNET, 9))
        return str(probe.getsockname()[0])
    with suppress(OSError):
        return next((address for address in own_addresses() if ":" in address), None)
    return None


def address_in(content: bytes) -> str | None:
    """The address that a message is about; None of one that others cannot use now."""
    family, _, flags, scope, _ = _ABOUT.unpack_from(content)
    if family not in (socket.AF_INET, socket.AF_INET6) or scope not in (_EVERYWHERE, _SITE):
        return None
    if flags & _NOT_NOW:
        return None
    attributes = {}
    place = _ABOUT.size
    while place + _ATTRIBUTE.size <= len(content):
        length, kind = _ATTRIBUTE.unpack_from(content, place)
        attributes[kind] = content[place + _ATTRIBUTE.size : place + length]
        place += max(_ATTRIBUTE.size, _aligned(length))
    packed = attributes.get(_LOCAL) or attributes.get(_ADDRESS)
    return None if packed is None else socket.inet_ntop(family, packed)


async def address_changes(looks: Sequence[float] = ()) -> AsyncGenerator[None, None]:
    """Yields after each change of this machine's addresses that the kernel tells of.

    It yields after pauses of `looks` seconds too, the last one again and again: of what a router does
    nobody tells.
    """
    loop = asyncio.get_running_loop()
    pauses = itertools.chain(looks, itertools.repeat(looks[-1] if looks else None))
    with _listening() or contextlib.nullcontext() as kernel:
        while True:
            # What it says does not matter, nor that more came than there was room for (ENOBUFS).
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(next(pauses)):
                    await (
                        asyncio.Event().wait()
                        if kernel is None
                        else loop.sock_recv(kernel, 1 << 16)
                    )
            await asyncio.sleep(SETTLE_SECONDS)
            with suppress(OSError):
                while kernel is not None:
                    kernel.recv(1 << 16)
            yield


def _listening() -> socket.socket | None:
    """To the kernel; None where it does not tell."""
    try:
        kernel = socket.socket(
            socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, socket.NETLINK_ROUTE
        )
        kernel.bind((0, _GROUPS))
    except OSError as error:
        _log.info("changes of this machine's addresses are not told", reason=str(error))
        return None
    return kernel


def _messages(received: bytes) -> list[_Told]:
    messages = []
    while len(received) >= _HEADER.size:
        length, kind, *_ = _HEADER.unpack_from(received)
        messages.append(_Told(kind, received[_HEADER.size : length]))
        received = received[max(_HEADER.size, _aligned(length)) :]
    return messages


def _aligned(length: int) -> int:
    return (length + 3) & ~3


# What peers are told of them, as libp2p writes addresses.


def visible_now(
    at_start: tuple[str, ...], listen_multiaddrs: tuple[str, ...], own: tuple[str, ...]
) -> tuple[str, ...]:
    """Where p2pd listens: at each address that this machine has now, where it listens at all of them.

    p2pd itself looks for new addresses only every few seconds. It gives the port, which may have been 0.
    """
    told: list[str] = []
    for listened in listen_multiaddrs:
        _, kind, host, *_ = listened.split("/")
        ours = [a for a in at_start if a.split("/")[1] == kind]
        if host not in ("0.0.0.0", "::") or not ours:
            return at_start
        ports = dict.fromkeys("/".join(address.split("/")[3:]) for address in ours)
        hosts = [host for host in own if (":" in host) == (kind == "ip6")]
        told += [f"/{kind}/{host}/{port}" for host in hosts for port in ports]
    return tuple(told) or at_start


def forwarded_among(
    multiaddrs: tuple[str, ...], *, before: tuple[str, ...], own: tuple[str, ...]
) -> tuple[str, ...]:
    """Where a router forwards the port from: neither this machine's nor there before it was asked."""
    return tuple(a for a in multiaddrs if a not in before and a.split("/")[2] not in own)


def announced(visible_multiaddrs: tuple[str, ...], announce_host: str | None) -> tuple[str, ...]:
    """What peers are told: the announced host with our ports, or all that is visible from outside.

    Loopback addresses are told only when there is nothing else (a swarm on one machine).
    """
    if announce_host is not None:
        is_number = announce_host.replace(".", "").isdigit()
        kind = "ip6" if ":" in announce_host else "ip4" if is_number else "dns"
        told = [
            "/".join(["", kind, announce_host, *address.split("/")[3:]])
            for address in visible_multiaddrs
        ]
        return tuple(dict.fromkeys(told))
    outside = tuple(a for a in visible_multiaddrs if not a.startswith(("/ip4/127.", "/ip6/::1/")))
    return outside or visible_multiaddrs


def by_route(multiaddrs: Sequence[str], route: Sequence[str]) -> tuple[str, ...]:
    """First those by which the coordinator is reached."""
    return tuple(sorted(multiaddrs, key=lambda one: one.split("/")[2] not in route))
