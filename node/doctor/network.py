"""What the doctor says, one finding for each thing that it looked at; and what it says of networks.

That is how members reach this machine, and what of the kernel's settings makes long links slow.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from node.machine.addresses import OwnAddress, require_interface, told_addresses
from node.machine.hardware import SETTINGS, congestion_control, setting
from protocol.errors import AtollError, ExitCode
from protocol.terminal.node_words import NARROW, NARROW_STEP

Verdict = Literal["fine", "note", "advice", "wrong"]
"""A note is for who wants to know; advice makes things better; only what is wrong keeps a node from
its work, and decides on the exit code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at, and what to type when it could be better."""

    about: str
    verdict: Verdict
    what: str
    next_step: str = ""
    exit_code: ExitCode = ExitCode.OK


def wrong(about: str, error: AtollError) -> Finding:
    """What the node's own check refuses, as `atoll node start` would tell it."""
    return Finding(
        about=about,
        verdict="wrong",
        what=error.what,
        next_step=error.next_step,
        exit_code=error.exit_code,
    )


def exit_code_of(findings: Sequence[Finding]) -> ExitCode:
    """That of the first thing that is wrong."""
    return next((found.exit_code for found in findings if found.verdict == "wrong"), ExitCode.OK)


ABOUT_NETWORK = "network"
ABOUT_ADDRESSES = "addresses"

HELPER_STEP = (
    "the run owner types 'atoll invite create --role helper', and on a server with an open port "
    "'atoll join' and 'atoll helper start --port 7710'"
)


@dataclass(slots=True, kw_only=True)
class Network:
    """What the checks have found of it, one after the other."""

    has_joined: bool = False
    is_local: bool = False
    """The coordinator is on this machine, and dialled by loopback."""
    own_address: str = ""
    """Of this machine, that the whole internet dials."""
    has_ipv6_only: bool = False
    """That address is of IPv6, and beside it there is IPv4 behind a router."""
    announce: str = ""
    port: int = 0
    """As in node.toml."""
    forwarded: str = ""
    """From where its router forwards a port that was asked for."""
    is_forwarded_wide: bool = True
    """That address is one of the internet, and not of another router's network."""
    why_no_holes: str = ""
    proxy: str = ""
    """By which this network lets connections out; empty: without one."""
    ways: Sequence[tuple[str, str]] = ()
    """The other members by name, and how the running node reaches each; none while it does not run."""


def what_to_use(network: Network) -> Finding:
    """Nothing, a port, holes or a helper, and what to type."""
    if not network.has_joined:
        return _note("what it takes here shows once a swarm is joined", "atoll join")
    if network.is_local:
        return _fine("nothing is needed: the coordinator and its nodes are on this machine")
    if network.ways:
        return _as_it_runs(network.ways)
    if network.proxy:
        return Finding(
            about=ABOUT_NETWORK,
            verdict="advice",
            what=f"a helper on port 443 is needed, or on another to which the proxy {network.proxy} leads, "
            "for nobody dials this machine, and no datagrams get out",
            next_step=HELPER_STEP.replace("--port 7710", "--port 443"),
        )
    if network.announce:
        port = f"TCP port {network.port}" if network.port else "a TCP port (set port in node.toml)"
        return _fine(
            f"nothing more is needed if {port} of {network.announce} leads to this machine"
        )
    if network.own_address and not network.has_ipv6_only:
        port = f"its TCP port {network.port}" if network.port else "its TCP ports"
        what = f"nothing is needed if no firewall closes {port}: {network.own_address} is this machine's own"
        if ":" in network.own_address:
            what += (
                ", and IPv4 is not to be had here; members that have nothing else exchange with it by a "
                "helper with both"
            )
        return _fine(what)
    if network.forwarded and network.is_forwarded_wide:
        return _fine(
            f"a port was mapped at {network.forwarded} when the router was asked: nothing more is needed"
        )
    known = _known_of(network)
    if why_not := network.why_no_holes:
        return Finding(
            about=ABOUT_NETWORK,
            verdict="advice",
            what=f"{known}an open port or a helper is needed here, for no holes can be punched: {why_not}",
            next_step=HELPER_STEP,
        )
    return _note(
        f"{known}holes in this router and the others' will do, but where one of two is symmetric a helper is "
        "needed",
        HELPER_STEP,
    )


def _known_of(network: Network) -> str:
    """What does not suffice by itself."""
    if network.forwarded:
        return (
            f"the router forwards a port of {network.forwarded}, and is behind another router itself (the "
            "provider's, or a second one here), so others do not get there: "
        )
    if network.own_address:
        return (
            f"{network.own_address} serves those who have IPv6, by holes where a firewall closes its TCP "
            "ports, and for all others "
        )
    return ""


def _as_it_runs(ways: Sequence[tuple[str, str]]) -> Finding:
    if narrow := [name for name, way in ways if NARROW in way]:
        return Finding(
            about=ABOUT_NETWORK,
            verdict="advice",
            what=f"a smaller MTU is needed here or there: {NARROW} to {', '.join(narrow[:4])}",
            next_step=NARROW_STEP,
        )
    apart = [name for name, way in ways if way == "not reached"]
    between = sorted({way for _, way in ways if way.startswith("through ")})
    if apart:
        others = f"{', '.join(apart[:4])}{' and others' if apart[4:] else ''}"
        return Finding(
            about=ABOUT_NETWORK,
            verdict="advice",
            what=f"an open port or a helper is needed here: {others} and this node do not reach each other",
            next_step=HELPER_STEP,
        )
    if between:
        return _fine(
            f"nothing more is needed: whom this node does not reach, it reaches {', '.join(between)}"
        )
    if any(way == "by proxy" for _, way in ways):
        return _fine("the proxy does here: all other members are reached, some through it")
    if any(way == "punched" for _, way in ways):
        return _fine("holes do here: all other members are reached, some through holes in routers")
    return _fine("nothing is needed: all other members are reached directly")


def address_finding(
    own: Sequence[OwnAddress], *, route: Sequence[str], interface: str, is_chosen: bool
) -> Finding:
    """Which addresses peers are told, and why in that order.

    `is_chosen` is that listen or announce decides.
    """
    if is_chosen:
        return Finding(
            about=ABOUT_ADDRESSES,
            verdict="fine",
            what="listen or announce says what peers are told",
        )
    try:
        require_interface(interface, own)
    except AtollError as error:
        return wrong(ABOUT_ADDRESSES, error)
    of = {each.address: each.interface for each in own}
    told = told_addresses(own, route=route, interface=interface)
    if not told:
        return Finding(
            about=ABOUT_ADDRESSES, verdict="note", what="this machine has none but loopback's"
        )
    words = [
        f"{address} of {of[address]}"
        + (", by which the coordinator is reached" if address in route else "")
        for address in told
    ]
    what = f"peers are told {'; '.join(words)}"
    if interface:
        return Finding(about=ABOUT_ADDRESSES, verdict="fine", what=f"{what}; as interface says")
    if len({of[address] for address in told}) == 1:
        return Finding(about=ABOUT_ADDRESSES, verdict="fine", what=what)
    return Finding(
        about=ABOUT_ADDRESSES,
        verdict="note",
        what=what,
        next_step="if only one of them leads to peers, name its interface in node.toml: interface = "
        f'"{of[told[0]]}"',
    )


def _fine(what: str) -> Finding:
    return Finding(about=ABOUT_NETWORK, verdict="fine", what=what)


def _note(what: str, next_step: str) -> Finding:
    return Finding(about=ABOUT_NETWORK, verdict="note", what=what, next_step=next_step)


ABOUT_KERNEL = "kernel"
"""Of its settings, which are only read. A node's peers are far away, and it talks to them for some seconds
every few minutes: neither is what Linux's defaults are made for."""

FAST_BITS_PER_SECOND = 1e9
LONG_ROUND_TRIP_SECONDS = 0.2
"""The link whose bandwidth-delay product buffers are compared with."""

_KEPT = "to keep it, put the setting into a file below /etc/sysctl.d"

_BUFFERS = {
    "net.ipv4.tcp_rmem": ("received", "4096 131072"),
    "net.ipv4.tcp_wmem": ("sent", "4096 16384"),
}
"""What they bound, and the least and the first size that go before the largest one.

Not net.core.rmem_max and wmem_max: they bound what programs set themselves, and neither p2pd nor
gRPC sets a buffer of TCP's.
"""

LARGE_BUFFER_BYTES = 64 << 20
"""What is advised: the kernel takes of it what a connection needs, and no more."""


def kernel_findings(root: Path = SETTINGS) -> list[Finding]:
    """What to change, with the command; a note where there is nothing to read."""
    if not (root / "net/ipv4").is_dir():
        return [
            Finding(
                about=ABOUT_KERNEL, verdict="note", what=f"no settings to look at below {root}/net"
            )
        ]
    found = [*_slow_start(root), *_buffers(root), *_congestion_control(root)]
    if all(finding.verdict == "note" for finding in found):
        found.insert(
            0,
            Finding(about=ABOUT_KERNEL, verdict="fine", what="nothing of it slows long links down"),
        )
    return found


def _slow_start(root: Path) -> Iterator[Finding]:
    name = "net.ipv4.tcp_slow_start_after_idle"
    if setting(name, root) == "1":
        yield Finding(
            about=ABOUT_KERNEL,
            verdict="advice",
            what=f"{name} is 1: after each pause, so in each round, TCP begins slowly again, with "
            "ten packets",
            next_step=f"sudo sysctl -w {name}=0; {_KEPT}",
        )


def _buffers(root: Path) -> Iterator[Finding]:
    needed_bytes = FAST_BITS_PER_SECOND * LONG_ROUND_TRIP_SECONDS / 8
    for name, (moved, smaller) in _BUFFERS.items():
        *_, most = (setting(name, root) or "").split() or [""]
        if most.isdigit() and int(most) < needed_bytes:
            mbit = 8 * int(most) / LONG_ROUND_TRIP_SECONDS / 1e6
            yield Finding(
                about=ABOUT_KERNEL,
                verdict="advice",
                what=f"the largest buffer of {name} is {int(most) / 1e6:.1f} MB: over a round trip of "
                f"{1e3 * LONG_ROUND_TRIP_SECONDS:g} ms no more than {mbit:.0f} Mbit/s are {moved} "
                "on a connection",
                next_step=f"sudo sysctl -w {name}='{smaller} {LARGE_BUFFER_BYTES}', if your link "
                f"carries more; {_KEPT}",
            )


def _congestion_control(root: Path) -> Iterator[Finding]:
    used = congestion_control(root)
    there = (setting("net.ipv4.tcp_available_congestion_control", root) or "").split()
    if used is None:
        return
    if used == "bbr":
        what, next_step = "TCP uses bbr, which loses little to stray losses", ""
    else:
        what = f"TCP uses {used}; over bbr exchanges get more of a link, whole or lossy"
        load = "" if "bbr" in there else "sudo modprobe tcp_bbr && "
        next_step = f"{load}sudo sysctl -w net.ipv4.tcp_congestion_control=bbr; {_KEPT}"
    yield Finding(about=ABOUT_KERNEL, verdict="note", what=what, next_step=next_step)
