"""What this machine needs so that other members and it reach each other, in one sentence."""

from collections.abc import Sequence
from dataclasses import dataclass

from node.doctor.findings import Finding, wrong
from node.machine.addresses import OwnAddress, require_interface, told_addresses
from protocol.errors import AtollError
from protocol.terminal.node_words import NARROW, NARROW_STEP

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
        return _fine(
            f"nothing is needed if no firewall closes {port}: {network.own_address} is this machine's own"
        )
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
