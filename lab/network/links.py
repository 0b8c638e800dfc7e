"""A small internet as arithmetic: access links, cuts and firewalls, packet by packet.

Time and randomness come in as arguments; sockets, devices and clocks are in switch.py. Every
host has one access link, and all links meet in one place that is infinitely fast: a packet takes the
sender's routers and uplink, meets cuts and the receiver's firewall and routers in the middle, and takes
the receiver's downlink. It never goes in a circle, so one pass from uplinks to downlinks is exact,
however late the pass is made.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from random import Random
from typing import NamedTuple

from lab.network.router import Router, into_through, out_through
from protocol.errors import UsageError

DEFAULT_BUFFER_BYTES = 500_000
"""A common size in home routers: 0.4 s at 10 Mbit/s."""

GATEWAY = IPv4Address("192.168.77.1")
"""A host's own router, as the host sees it."""

_HEADER_BYTES = 20  # of IPv4 without options
_HEADER6_BYTES = 40  # of IPv6, whose headers after it nobody in here sends
_TCP, _ICMP, _ICMP6 = 6, 1, 58
_SYN, _ACK = 0x02, 0x10
_ECHO_REQUESTS = {_ICMP: 8, _ICMP6: 128}


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A host's access link. What says no direction holds for each of the two.

    A path has two links, so its delay is the sum of both, and its round trip is twice that. Jitter
    adds up to so much to a packet's delay, but packets never overtake each other. `loss` is the
    share of packets that vanish on the wire. What does not fit into the buffer before the wire is
    dropped. By default a link is free and instant.
    """

    up_bits_per_second: float = math.inf
    down_bits_per_second: float = math.inf
    delay_seconds: float = 0.0
    jitter_seconds: float = 0.0
    loss: float = 0.0
    buffer_bytes: int = DEFAULT_BUFFER_BYTES
    largest_packet_bytes: int = 1 << 16
    """Larger ones vanish, and nobody is told: a tunnel behind a firewall that drops ICMP."""

    def __post_init__(self) -> None:
        for name in ("up_bits_per_second", "down_bits_per_second", "buffer_bytes"):
            if not getattr(self, name) > 0:
                raise UsageError(
                    f"a link's {name} is {getattr(self, name)}, and must be more than 0",
                    next_step="to let nothing through, cut the link",
                )
        for name in ("delay_seconds", "jitter_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"a link's {name} is {getattr(self, name)}, and must be 0 or more")
        if not 0 <= self.loss <= 1:
            raise UsageError(f"a link's loss is {self.loss}, and must be a share from 0 to 1")


@dataclass(slots=True, kw_only=True)
class Traffic:
    """What became of the packets from one host to another; bytes are those of IP packets."""

    delivered_packets: int = 0
    delivered_bytes: int = 0
    lost_packets: int = 0
    """By the links' `loss`."""
    overflowed_packets: int = 0
    """Found a buffer full."""
    cut_packets: int = 0
    refused_packets: int = 0
    """By the receiver's firewall or routers."""

    @property
    def dropped_packets(self) -> int:
        """Those that did not arrive, for whatever reason."""
        return self.lost_packets + self.overflowed_packets + self.cut_packets + self.refused_packets


class Packet(NamedTuple):
    """An IP packet between two hosts."""

    source: str
    target: str
    content: bytes


class Arrival(NamedTuple):
    """A packet at the end of a pipe, or that it was lost on the way there."""

    at: float
    packet: Packet
    is_lost: bool


def target_of(content: bytes) -> bytes | None:
    """The address whom an IP packet is for, 4 or 16 bytes; None for anything else."""
    if _is_6(content):
        return content[24:40] if len(content) >= _HEADER6_BYTES else None
    if len(content) < _HEADER_BYTES or content[0] >> 4 != 4:
        return None
    return content[16:20]


def _is_6(content: bytes) -> bool:
    return bool(content) and content[0] >> 4 == 6


def _payload(content: bytes) -> tuple[int, bytes]:
    """What an IP packet carries: the number of its protocol, and that packet."""
    if _is_6(content):
        return content[6], content[_HEADER6_BYTES:]
    return content[9], content[(content[0] & 0x0F) * 4 :]


def opens_a_conversation(content: bytes) -> bool:
    """Whether this IP packet may be the first that passes between two hosts.

    A firewall here refuses all such packets, and keeps no memory of what went out: UDP never comes
    in, and neither does a SYN that crosses another one. Hole punching fails, as it does through the
    strict kind of NAT.
    """
    if not _is_6(content) and int.from_bytes(content[6:8]) & 0x1FFF:
        return False  # a later fragment: worthless where the first was refused
    protocol, rest = _payload(content)
    if protocol == _TCP:
        return len(rest) < 14 or rest[13] & (_SYN | _ACK) == _SYN
    if protocol in _ECHO_REQUESTS:
        return len(rest) < 1 or rest[0] == _ECHO_REQUESTS[protocol]
    return True


def conversation_of(content: bytes) -> bytes:
    """What all IP packets of one conversation have in common that go the same way; not for fragments."""
    protocol, rest = _payload(content)
    ends = content[8:40] if _is_6(content) else content[12:20]
    return bytes([protocol]) + ends + rest[:4]


def way_back_of(conversation: bytes) -> bytes:
    """The same of the packets that go the other way."""
    size = (len(conversation) - 5) // 2  # of an address
    source, target = conversation[1 : 1 + size], conversation[1 + size : 1 + 2 * size]
    ports = conversation[1 + 2 * size :]
    return conversation[:1] + target + source + ports[2:] + ports[:2]


class Pipe:
    """One direction of an access link: a buffer, a wire of limited rate, and a way to go.

    Packets leave the wire one after the other, each after the time its bits take, so it never
    carries more than rate × time and the packet that it has begun. Whether a packet is lost, and
    its jitter, depend on the lottery and on how many packets passed before it, on nothing else.
    """

    def __init__(self, *, lottery: Random) -> None:
        self._lottery = lottery
        self._bits_per_second, self._link = math.inf, Link()
        self._waiting: deque[Packet] = deque()
        self._waiting_bytes = 0
        self._head_leaves_at = 0.0  # meaningless while nothing waits
        self._under_way: deque[Arrival] = deque()

    def set(self, link: Link, *, bits_per_second: float, now: float) -> None:
        """Changes the link for what has not left the wire yet; its first packet begins anew."""
        self._leave_wire(now)
        self._bits_per_second, self._link = bits_per_second, link
        if self._waiting:
            self._head_leaves_at = now + self._seconds(self._waiting[0])

    def offer(self, packet: Packet, at: float) -> bool:
        """Takes the packet, or says that the buffer is full. Calls come in the order of their times."""
        self._leave_wire(at)
        size = len(packet.content)
        if self._waiting:
            if self._waiting_bytes + size > self._link.buffer_bytes:
                return False
        else:
            self._head_leaves_at = at + self._seconds(packet)  # the wire is idle
        self._waiting.append(packet)
        self._waiting_bytes += size
        return True

    def arrivals(self, now: float) -> list[Arrival]:
        """What has arrived, or been lost, up to now, in order."""
        self._leave_wire(now)
        arrived = []
        while self._under_way and self._under_way[0].at <= now:
            arrived.append(self._under_way.popleft())
        return arrived

    def next_at(self) -> float:
        """The earliest time at which something may arrive; infinity when the pipe is empty."""
        if self._under_way:
            return self._under_way[0].at
        return self._head_leaves_at + self._link.delay_seconds if self._waiting else math.inf

    def _seconds(self, packet: Packet) -> float:
        return len(packet.content) * 8 / self._bits_per_second

    def _leave_wire(self, until: float) -> None:
        while self._waiting and self._head_leaves_at <= until:
            packet, left_at = self._waiting.popleft(), self._head_leaves_at
            self._waiting_bytes -= len(packet.content)
            if self._waiting:
                self._head_leaves_at = left_at + self._seconds(self._waiting[0])
            # Both are drawn for each packet: what one setting does leaves the other's luck alone.
            is_lost = self._lottery.random() < self._link.loss
            jitter = self._link.jitter_seconds * self._lottery.random()
            at = left_at + self._link.delay_seconds + jitter
            if self._under_way:
                at = max(at, self._under_way[-1].at)
            self._under_way.append(Arrival(at, packet, is_lost))


class Network:
    """Hosts, their links, and what is cut between them."""

    def __init__(
        self,
        links: Mapping[str, Link],
        addresses: Mapping[str, IPv4Address | IPv6Address],
        *,
        seed: int,
        now: float,
        routers: Mapping[str, Sequence[Router]] | None = None,
    ) -> None:
        self._routers = routers or {}  # by host, its own one first
        self._answers: list[tuple[str, bytes]] = []  # of routers to their hosts
        self._hosts = {addresses[host].packed: host for host in links}
        self._up = {host: Pipe(lottery=Random(f"{seed}/{host}/up")) for host in links}
        self._down = {host: Pipe(lottery=Random(f"{seed}/{host}/down")) for host in links}
        self._pipes = (*self._up.values(), *self._down.values())
        self._cuts: set[tuple[str, str]] = set()
        self._firewalled: set[str] = set()
        self._lets_out: dict[str, int] = {}  # the one port of TCP that a host may dial
        self._largest: dict[str, int] = {}
        self._narrow: dict[tuple[str, str], int] = {}
        # Conversations, of hosts whose router forgot others.
        self._known: dict[str, set[bytes]] = {}
        self.num_strays = 0  # packets for nobody in here
        self.traffic = {(one, other): Traffic() for one in links for other in links if one != other}
        for host, link in links.items():
            self.set_link(host, link, now)

    def set_link(self, host: str, link: Link, now: float) -> None:
        """Gives a host another access link, from now on."""
        self._largest[host] = link.largest_packet_bytes
        self._up[host].set(link, bits_per_second=link.up_bits_per_second, now=now)
        self._down[host].set(link, bits_per_second=link.down_bits_per_second, now=now)

    def narrow(self, pairs: Iterable[tuple[str, str]], largest_packet_bytes: int) -> None:
        """Has larger packets vanish between the first of each pair and the second, and tells nobody."""
        self._narrow.update(dict.fromkeys(pairs, largest_packet_bytes))

    def _largest_between(self, source: str, target: str) -> int:
        ends = (self._largest[source], self._largest[target])
        return min(*ends, self._narrow.get((source, target), max(ends)))

    def cut(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Lets nothing from the first of each pair to the second pass the middle."""
        self._cuts.update(pairs)

    def mend(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Undoes `cut` for these pairs."""
        self._cuts.difference_update(pairs)

    def set_firewall(self, host: str, *, is_up: bool, lets_out: int | None = None) -> None:
        """Lets no packet in to this host that may open a conversation, or all again.

        With `lets_out` it may dial that port of TCP, and send nothing else that may open one.
        """
        (self._firewalled.add if is_up else self._firewalled.discard)(host)
        self._lets_out.pop(host, None)
        if is_up and lets_out is not None:
            self._lets_out[host] = lets_out

    def _is_let_in(self, packet: Packet) -> bool:
        return packet.target not in self._firewalled or not opens_a_conversation(packet.content)

    def _is_let_out(self, packet: Packet) -> bool:
        port = self._lets_out.get(packet.source)
        if port is None or not opens_a_conversation(packet.content):
            return True
        protocol, rest = _payload(packet.content)
        return protocol == _TCP and int.from_bytes(rest[2:4]) == port

    def also_at(self, host: str, address: IPv4Address | IPv6Address) -> None:
        """Gives a host an address beside the one that it has."""
        self._hosts[address.packed] = host

    def move(self, host: str, address: IPv4Address) -> None:
        """Gives a host another address of IPv4; what is sent to the one before goes nowhere."""
        self._hosts = {
            a: name
            for a, name in self._hosts.items()
            if name != host or len(a) != len(address.packed)
        }
        self._hosts[address.packed] = host

    def forget_conversations(self, host: str) -> None:
        """What this host and others have begun to say to each other passes no more; nobody is told."""
        self._known[host] = set()
        for router in self._routers.get(host, ()):
            router.forget()

    def _is_forgotten(self, packet: Packet) -> bool:
        """Whether a router has forgotten the packet's conversation; notes one that begins."""
        known = [self._known[h] for h in (packet.source, packet.target) if h in self._known]
        if not known:
            return False
        conversation = conversation_of(packet.content)
        if opens_a_conversation(packet.content):
            for each in known:
                each.update((conversation, way_back_of(conversation)))
        return any(conversation not in each for each in known)

    def send(self, source: str, content: bytes, now: float) -> None:
        """Puts what a host sends on its uplink, through its routers if it has some."""
        address = target_of(content)
        if (routers := self._routers.get(source)) and address is not None:
            if address == GATEWAY.packed:
                if (answer := routers[0].answer(content)) is not None:
                    self._answers.append((source, answer))
                return
            if address in self._hosts:
                passed = out_through(routers, content)
                address, content = (None, content) if passed is None else (address, passed)
        target = None if address is None else self._hosts.get(address)
        if target is None or target == source:
            self.num_strays += 1
        elif len(content) > self._largest_between(source, target):
            self.traffic[source, target].lost_packets += 1
        elif not self._up[source].offer(Packet(source, target, content), now):
            self.traffic[source, target].overflowed_packets += 1

    def deliveries(self, now: float) -> list[tuple[str, bytes]]:
        """What has reached hosts since the last call: the host, and the packet."""
        in_the_middle = [arrival for pipe in self._up.values() for arrival in pipe.arrivals(now)]
        in_the_middle.sort(key=lambda arrival: arrival.at)
        for at, packet, is_lost in in_the_middle:
            traffic = self.traffic[packet.source, packet.target]
            if is_lost:
                traffic.lost_packets += 1
            elif (packet.source, packet.target) in self._cuts or self._is_forgotten(packet):
                traffic.cut_packets += 1
            elif not self._is_let_in(packet) or not self._is_let_out(packet):
                traffic.refused_packets += 1
            else:
                routers = self._routers.get(packet.target, ())
                content = into_through(routers, packet.content)
                if content is None:
                    traffic.refused_packets += 1
                elif not self._down[packet.target].offer(packet._replace(content=content), at):
                    traffic.overflowed_packets += 1
        delivered, self._answers = self._answers, []
        for host, pipe in self._down.items():
            for _, packet, is_lost in pipe.arrivals(now):
                traffic = self.traffic[packet.source, host]
                if is_lost:
                    traffic.lost_packets += 1
                else:
                    traffic.delivered_packets += 1
                    traffic.delivered_bytes += len(packet.content)
                    delivered.append((host, packet.content))
        return delivered

    def next_at(self) -> float:
        """When `deliveries` should be called again; infinity while nothing moves."""
        return -math.inf if self._answers else min(pipe.next_at() for pipe in self._pipes)
