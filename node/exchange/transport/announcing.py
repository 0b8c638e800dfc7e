"""What a node tells peers of where they find it, as libp2p writes addresses. Pure."""


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
