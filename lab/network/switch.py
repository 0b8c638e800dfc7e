"""The process in the middle of the network lab: namespaces, their TUN devices, and packets between.

It is started by lab.py and obeys it over a Unix socket, one JSON message at a time. Where
packets go, and when, is decided in links.py. It is one process with one thread: `setns`
moves a thread, and a slow switch must not slow what it measures. When the socket closes, however
that comes, it kills what still runs in its namespaces and ends; the namespaces have no name, so
nothing of them stays.
"""

import contextlib
import fcntl
import json
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from ipaddress import IPv4Address, IPv4Interface, IPv6Address, IPv6Interface, ip_interface
from pathlib import Path
from typing import Any

from lab.network.links import GATEWAY, Link, Network
from lab.network.namespace import inside, new_namespace
from lab.network.router import Router
from lab.processes.family import end_all

TUN_DEVICE = Path("/dev/net/tun")
DEVICE = "tun0"

MAX_MESSAGE_BYTES = 1 << 17

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_QUEUE_PACKETS = 10_000
"""In the kernel, before the switch reads: large, so that what is dropped is dropped and counted by
a link's buffer."""

_SLOW_START = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")

BEHIND_A_ROUTER = IPv4Interface("192.168.77.2/24")
"""The address within of every host that has a router of its own: they never see each other's."""

BETWEEN_ROUTERS = IPv4Address("100.64.0.2")
"""Of a router behind another one (RFC 6598)."""

_BATCH = 64  # packets of one host before the next one's turn
_PACKET_BYTES = 1 << 16
_LOOK_AROUND_SECONDS = 1.0


class Host:
    """A namespace with one TUN device, whose other end is here."""

    def __init__(
        self,
        interfaces: Sequence[IPv4Interface | IPv6Interface],
        *,
        mtu: int,
        congestion_control: str,
        keeps_window: bool,
    ) -> None:
        self.namespace = new_namespace()
        self.inode = os.fstat(self.namespace).st_ino
        # Through the route, for which every algorithm that the kernel has may be named.
        self._routed = f"congctl {congestion_control}" if congestion_control else ""
        self._interfaces = {interface.version: interface for interface in interfaces}
        with inside(self.namespace):
            self.device = os.open(TUN_DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            request = struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI)
            fcntl.ioctl(self.device, _TUNSETIFF, request)
            # The kernel asks for neighbours by IPv6 as soon as a device is up: strays in the counts.
            with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
                of_device = Path(f"/proc/sys/net/ipv6/conf/{DEVICE}")
                (of_device / "disable_ipv6").write_text("0" if 6 in self._interfaces else "1")
                (of_device / "addr_gen_mode").write_text("1")  # none of the link itself
            _SLOW_START.write_text("0" if keeps_window else "1")  # of this namespace alone
            _ip(
                "link set lo up",
                f"link set {DEVICE} mtu {mtu} txqueuelen {_QUEUE_PACKETS} up",
                *(command for interface in interfaces for command in self._added(interface)),
                *(
                    [f"route add default via {GATEWAY} dev {DEVICE}"]
                    if BEHIND_A_ROUTER in interfaces
                    else []
                ),
            )

    def move(self, interface: IPv4Interface) -> None:
        """Takes its address of IPv4 away, and gives it another one."""
        with inside(self.namespace):
            _ip(f"addr del {self._interfaces[4]} dev {DEVICE}", *self._added(interface))
        self._interfaces[4] = interface

    def _added(self, interface: IPv4Interface | IPv6Interface) -> tuple[str, str]:
        is_unique = "nodad" if interface.version == 6 else ""  # else the kernel asks around first
        return (
            f"addr add {interface} dev {DEVICE} noprefixroute {is_unique}",
            f"route replace {interface.network} dev {DEVICE} src {interface.ip} {self._routed}",
        )

    def read(self) -> list[bytes]:
        """What the host has sent and nobody has read yet; not more than a batch."""
        packets: list[bytes] = []
        with contextlib.suppress(BlockingIOError):
            while len(packets) < _BATCH:
                packets.append(os.read(self.device, _PACKET_BYTES))
        return packets


class Switch:
    """The hosts, the network between them, and the lab's socket."""

    def __init__(self, control: socket.socket, setup: Mapping[str, Any]) -> None:
        self._control = control
        interfaces = {
            host: [ip_interface(one) for one in told] for host, told in setup["interfaces"].items()
        }
        self._routers = {
            host: _routers(**about, address=interfaces[host][0].ip)
            for host, about in setup["routers"].items()
        }
        self.hosts = {
            host: Host(
                [BEHIND_A_ROUTER, *told[1:]] if host in self._routers else told,
                mtu=setup["mtu"],
                congestion_control=setup["congestion_control"],
                keeps_window=setup["keeps_window"],
            )
            for host, told in interfaces.items()
        }
        addresses = {host: told[0].ip for host, told in interfaces.items()}
        links = {host: Link(**link) for host, link in setup["links"].items()}
        self._network = Network(
            links, addresses, seed=setup["seed"], now=time.monotonic(), routers=self._routers
        )
        for host, told in interfaces.items():
            for one in told[1:]:
                self._network.also_at(host, one.ip)

    def run(self, lab: int) -> None:
        """Passes packets on until the lab closes the socket, or that process is gone."""
        devices = {host.device: name for name, host in self.hosts.items()}
        control = self._control.fileno()
        watched = [control, *devices]
        # Both: a fork of the lab's process keeps the socket open when that dies.
        while os.getppid() == lab:
            # Not epoll: its timeout knows only milliseconds.
            wait = self._network.next_at() - time.monotonic()
            readable, _, _ = select.select(
                watched, [], [], min(max(wait, 0.0), _LOOK_AROUND_SECONDS)
            )
            now = time.monotonic()
            for device in readable:
                if device in devices:
                    name = devices[device]
                    for packet in self.hosts[name].read():
                        self._network.send(name, packet, now)
            for name, packet in self._network.deliveries(now):
                os.write(self.hosts[name].device, packet)
            if control in readable:
                message = self._control.recv(MAX_MESSAGE_BYTES)
                if not message:
                    return
                _answer(self._control, self._obey(json.loads(message), now))

    def _obey(self, order: Mapping[str, Any], now: float) -> object:
        match order["do"]:
            case "narrow":
                pairs = [(one, other) for one, other in order["pairs"]]
                self._network.narrow(pairs, order["largest_packet_bytes"])
            case "cut":
                self._network.cut(map(tuple, order["pairs"]))
            case "mend":
                self._network.mend(map(tuple, order["pairs"]))
            case "set_link":
                self._network.set_link(order["host"], Link(**order["link"]), now)
            case "firewall":
                self._network.set_firewall(
                    order["host"], is_up=order["is_up"], lets_out=order["lets_out"]
                )
            case "move":
                interface = IPv4Interface(order["interface"])
                self.hosts[order["host"]].move(interface)
                self._network.move(order["host"], interface.ip)
            case "forget":
                self._network.forget_conversations(order["host"])
            case "traffic":
                return asdict(self._network.traffic[order["source"], order["target"]])
            case "mapped":
                return self._routers[order["host"]][0].num_mapped
            case "strays":
                return self._network.num_strays
            case unknown:
                raise ValueError(f"an order that the switch does not know: {unknown}")
        return None


def _routers(
    *, kinds: list[str], maps_ports: bool, address: IPv4Address | IPv6Address
) -> list[Router]:
    """In a row, the host's own first; the last one has the address by which others know the host."""
    routers = [
        Router(kind=kind, address=BETWEEN_ROUTERS, maps_ports=maps_ports)  # type: ignore[arg-type]
        for kind in kinds
    ]
    assert isinstance(address, IPv4Address)
    routers[-1].address = address
    return routers


def end_processes_inside(namespaces: frozenset[int], *, spared: frozenset[int]) -> None:
    """Kills all whose network namespace has one of these inodes, until there are none.

    `spared` are processes that only look in: whoever runs the lab may have a thread in a host.
    """
    end_all(lambda: _processes_inside(namespaces) - spared)


def _processes_inside(namespaces: frozenset[int]) -> set[int]:
    found = set()
    for folder in Path("/proc").iterdir():
        # One that has ended, and waits for its parent to ask how, has no namespace any more.
        with contextlib.suppress(OSError):
            if folder.name.isdecimal() and (folder / "ns" / "net").stat().st_ino in namespaces:
                found.add(int(folder.name))
    return found


def _ip(*commands: str) -> None:
    ran = subprocess.run(
        ["ip", "-batch", "-"], input="\n".join(commands), text=True, stderr=subprocess.PIPE
    )
    if ran.returncode:
        raise OSError(f"ip: {' '.join(ran.stderr.split())}")


def _answer(control: socket.socket, value: object) -> None:
    control.send(json.dumps({"answer": value}).encode())


def main() -> None:
    """Makes the hosts that the first message asks for, tells where they are, and switches."""
    control = socket.socket(fileno=int(sys.argv[1]))
    lab = os.getppid()
    setup = json.loads(control.recv(MAX_MESSAGE_BYTES))
    try:
        switch = Switch(control, setup)
    except OSError as error:
        control.send(json.dumps({"refused": str(error)}).encode())
        return
    hosts = switch.hosts
    try:
        _answer(control, {name: (host.namespace, host.inode) for name, host in hosts.items()})
        switch.run(lab)
    except ConnectionError:
        pass  # the lab is gone in the midst of an answer
    finally:
        inodes = frozenset(host.inode for host in hosts.values())
        end_processes_inside(inodes, spared=frozenset({lab, os.getpid()}))


if __name__ == "__main__":
    main()
