"""A small internet on one machine: hosts with slow links between them, that can be cut at will.

    with NetworkLab({"one": Link(up_bits_per_second=10e6), "other": Link(delay_seconds=0.05)}) as lab:
        server = lab.popen("one", [sys.executable, "-m", "http.server"])
        lab.cut("one", "other", one_way=True).firewall("other")

Each host is a network namespace; a process of its own, switch.py, passes packets between
them. Nothing here can reach anything outside, and nothing stays when the `with` block ends, or when
the process that entered it dies. Needs root and /dev/net/tun.

    python -m lab.network

measures the lab itself: what TCP gets of a link's rate, the round trip, the loss.
"""

import contextlib
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Any, Self

from lab.network.links import Link, Traffic
from lab.network.namespace import inside
from lab.network.router import NatKind
from lab.network.switch import MAX_MESSAGE_BYTES, TUN_DEVICE, end_processes_inside
from protocol.errors import SystemRefusedError, UsageError

INTERNET_MTU = 1500
NETWORK = IPv4Network("10.99.0.0/16")
NETWORK6 = IPv6Network("fd99::/64")

_ROOT = Path(__file__).parents[2]
_ANSWER_SECONDS = 30.0
_END_SECONDS = 15.0


class LabUnavailableError(SystemRefusedError):
    """Here no network lab can be made; the sentence says why."""


class LabBrokenError(SystemRefusedError):
    """The switch has ended or does not answer: a bug, or somebody killed it."""


def check_this_machine() -> None:
    """Raises LabUnavailableError where a lab cannot be made."""
    if sys.platform != "linux":
        raise LabUnavailableError(f"the network lab needs Linux, and this is {sys.platform}")
    if os.geteuid() != 0:
        raise LabUnavailableError(
            f"the network lab needs root, and this is user {os.geteuid()}",
            next_step="run it with sudo",
        )
    if not TUN_DEVICE.exists():
        raise LabUnavailableError(f"the network lab needs {TUN_DEVICE}, which is not there")
    for tool in ("ip", "nsenter"):
        if shutil.which(tool) is None:
            raise LabUnavailableError(
                f"the network lab needs '{tool}', which is not installed",
                next_step="install iproute2 and util-linux",
            )


class NetworkLab:
    """Hosts by name, each behind its link. Use it as a context; what changes it returns it.

    The same seed loses the same packets of each link, counted from its first one.
    `congestion_control` is TCP's, for all hosts: cubic, bbr; "" leaves what the kernel has. With
    `keeps_window` their TCP remembers over a pause what a link carries, as `atoll node doctor` advises.
    `families` says which hosts have an address of IPv6 alone ("6"), or of both ("46").

    `routers` puts hosts behind home routers, a host's own first: such a host has an address of its own
    within, and others know it by its last router's. Those of `mapping` have one that maps ports by NAT-PMP.
    By IPv6 routers translate nothing, and let in what answers.
    """

    def __init__(
        self,
        links: Mapping[str, Link],
        *,
        seed: int = 0,
        mtu: int = INTERNET_MTU,
        families: Mapping[str, str] | None = None,
        congestion_control: str = "",
        keeps_window: bool = False,
        routers: Mapping[str, Sequence[NatKind]] | None = None,
        mapping: Collection[str] = (),
    ) -> None:
        if len(links) > NETWORK.num_addresses - 2:
            raise UsageError(f"{len(links)} hosts do not fit into {NETWORK}")
        self._free = NETWORK.hosts()
        self._prefix_length = NETWORK.prefixlen
        self._addresses = {host: str(next(self._free)) for host in links}
        self._addresses6 = dict(zip(links, map(str, NETWORK6.hosts()), strict=False))
        self._families = {host: (families or {}).get(host, "4") for host in links}
        self._setup = {
            "interfaces": {
                host: [
                    interface
                    for family, interface in (
                        ("4", f"{self._addresses[host]}/{NETWORK.prefixlen}"),
                        ("6", f"{self._addresses6[host]}/{NETWORK6.prefixlen}"),
                    )
                    if family in self._families[host]
                ]
                for host in links
            },
            "links": {host: asdict(link) for host, link in links.items()},
            "mtu": mtu,
            "seed": seed,
            "congestion_control": congestion_control,
            "keeps_window": keeps_window,
            "routers": {
                host: {"kinds": list(kinds), "maps_ports": host in mapping}
                for host, kinds in (routers or {}).items()
            },
        }
        self._routed = frozenset(routers or {})
        self._check(*self._routed, *mapping)
        self._namespaces: dict[str, Path] = {}
        self._inodes: frozenset[int] = frozenset()
        self._started: list[subprocess.Popen[bytes]] = []
        self._asking = threading.Lock()
        self._control: socket.socket
        self._switch: subprocess.Popen[bytes]

    def __enter__(self) -> Self:
        check_this_machine()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(_ANSWER_SECONDS)
        with theirs:
            self._switch = subprocess.Popen(
                [sys.executable, "-m", "lab.network.switch", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=_ROOT,
                start_new_session=True,  # Ctrl-C is for us; the switch ends when we are through
            )
        try:
            made = self._ask(**self._setup)
        except BaseException:
            self._end_switch()
            raise
        self._namespaces = {
            host: Path(f"/proc/{self._switch.pid}/fd/{descriptor}")
            for host, (descriptor, _) in made.items()
        }
        self._inodes = frozenset(inode for _, inode in made.values())
        return self

    def __exit__(self, *_: object) -> None:
        self._end_switch()
        # Mostly done by the switch; not when it was killed.
        end_processes_inside(self._inodes, spared=frozenset({os.getpid()}))
        for process in self._started:
            process.wait()

    @property
    def switch_process_id(self) -> int:
        """For who wants to know what the switch costs, or what happens without it."""
        return self._switch.pid

    @property
    def hosts(self) -> tuple[str, ...]:
        """All hosts, in the order in which they were given."""
        return tuple(self._addresses)

    def address(self, host: str) -> str:
        """By which others know the host, known before the lab is entered; of IPv4 where it has one."""
        self._check(host)
        return self._addresses[host] if "4" in self._families[host] else self.address6(host)

    def address6(self, host: str) -> str:
        """The host's address of IPv6, where it has one."""
        self._check(host)
        return self._addresses6[host]

    # What runs in a host

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        """The same command, to be run in the host by whoever starts processes; its id is kept."""
        self._check(host)
        return ["nsenter", f"--net={self._namespaces[host]}", "--", *argv]

    def namespace(self, host: str) -> Path:
        """The path of the host's network namespace."""
        self._check(host)
        return self._namespaces[host]

    def popen(self, host: str, argv: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
        """Starts a process in the host, with Popen's options; it is killed when the lab ends."""
        process = subprocess.Popen(self.command(host, argv), **options)
        self._started.append(process)
        return process

    @contextlib.contextmanager
    def inside(self, host: str) -> Iterator[None]:
        """Sockets, threads and processes that this thread makes meanwhile are the host's."""
        self._check(host)
        namespace = os.open(self._namespaces[host], os.O_RDONLY | os.O_CLOEXEC)
        try:
            with inside(namespace):
                yield
        finally:
            os.close(namespace)

    def socket(self, host: str, kind: int = socket.SOCK_STREAM) -> socket.socket:
        """A socket of this process that belongs to the host, wherever it is used."""
        with self.inside(host):
            family = socket.AF_INET if "4" in self._families[host] else socket.AF_INET6
            return socket.socket(family, kind)

    # What is between hosts

    def set_link(self, host: str, link: Link) -> Self:
        """Another link for a host, for all that has not left the wire yet."""
        self._check(host)
        self._ask(do="set_link", host=host, link=asdict(link))
        return self

    def cut(self, one: str, other: str, *, one_way: bool = False) -> Self:
        """Lets nothing pass between two hosts, or, one way, nothing from the first to the second.

        What has passed the sender's uplink already still arrives.
        """
        self._check(one, other)
        return self._cut([(one, other)] if one_way else [(one, other), (other, one)])

    def narrow(self, one: str, other: str, largest_packet_bytes: int) -> Self:
        """Has larger packets vanish between two hosts, both ways, and tells neither."""
        self._check(one, other)
        pairs = [(one, other), (other, one)]
        self._ask(do="narrow", pairs=pairs, largest_packet_bytes=largest_packet_bytes)
        return self

    def isolate(self, host: str) -> Self:
        """Cuts a host off from all others."""
        self._check(host)
        return self.partition({host}, set(self.hosts) - {host})

    def partition(self, *groups: Collection[str]) -> Self:
        """Cuts between all hosts of different groups; within a group nothing changes."""
        self._check(*itertools.chain(*groups))
        return self._cut(
            [
                pair
                for one_group, other_group in itertools.permutations(groups, 2)
                for pair in itertools.product(one_group, other_group)
            ]
        )

    def mend(self, *hosts: str) -> Self:
        """Undoes all cuts: all there are, those of one host, or those between some hosts."""
        self._check(*hosts)

        def is_meant(pair: tuple[str, str]) -> bool:
            return hosts[0] in pair if len(hosts) == 1 else set(pair) <= set(hosts or self.hosts)

        pairs = itertools.permutations(self.hosts, 2)
        self._ask(do="mend", pairs=[pair for pair in pairs if is_meant(pair)])
        return self

    def firewall(self, host: str, *, is_up: bool = True, lets_out: int | None = None) -> Self:
        """Lets a host dial, and not be dialled: what NAT on its side looks like from outside.

        Two such hosts cannot reach each other. UDP does not come in at all. With `lets_out` it dials that
        port of TCP alone, as in many an office.
        """
        self._check(host)
        self._ask(do="firewall", host=host, is_up=is_up, lets_out=lets_out)
        return self

    def move(self, host: str) -> Self:
        """Takes a host's address of IPv4 away and gives it a new one, as when a laptop changes networks.

        What it has open goes nowhere from then on, and nothing tells it so but its own kernel.
        """
        self._check(host)
        if host in self._routed:
            raise UsageError(f"{host} is behind a router, and cannot be moved")
        address = next(self._free, None)
        if address is None:
            raise UsageError("all addresses of the network lab have been given away")
        self._ask(do="move", host=host, interface=f"{address}/{self._prefix_length}")
        self._addresses[host] = str(address)
        return self

    def forget_conversations(self, host: str) -> Self:
        """Lets nothing pass any more that belongs to conversations of this host, and tells nobody.

        What a router does that starts anew, or whose provider gives it another address at night: the host
        behind it sees nothing of that. Conversations that begin later pass.
        """
        self._check(host)
        self._ask(do="forget", host=host)
        return self

    def traffic(self, source: str, target: str) -> Traffic:
        """What became so far of what the first host sent to the second."""
        self._check(source, target)
        if source == target:
            raise UsageError(f"what {source} sends to itself does not leave it")
        return Traffic(**self._ask(do="traffic", source=source, target=target))

    def num_mapped(self, host: str) -> int:
        """How often the host's router was asked for a port and mapped it, renewals counted."""
        self._check(host)
        return int(self._ask(do="mapped", host=host))

    def num_strays(self) -> int:
        """Packets that hosts sent to nobody in the lab."""
        return int(self._ask(do="strays"))

    def _cut(self, pairs: list[tuple[str, str]]) -> Self:
        self._ask(do="cut", pairs=pairs)
        return self

    def _check(self, *hosts: str) -> None:
        for host in hosts:
            if host not in self._addresses:
                raise UsageError(
                    f"the network lab has no host {host!r}",
                    next_step=f"name one of {', '.join(self._addresses)}",
                )

    def _ask(self, **order: Any) -> Any:
        try:
            with self._asking:
                self._control.send(json.dumps(order).encode())
                message = self._control.recv(MAX_MESSAGE_BYTES)
        except OSError as error:
            self._control.close()  # an answer that still comes would be taken for the next one's
            raise LabBrokenError(f"the network lab's switch does not answer: {error}") from error
        if not message:
            raise LabBrokenError("the network lab's switch has ended")
        told = json.loads(message)
        if "refused" in told:
            raise LabUnavailableError(f"this machine refuses a network lab: {told['refused']}")
        return told["answer"]

    def _end_switch(self) -> None:
        self._control.close()
        try:
            self._switch.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._switch.kill()
            self._switch.wait()
