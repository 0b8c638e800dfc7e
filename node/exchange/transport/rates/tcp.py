"""Has the kernel pace p2pd's TCP connections, deal them the uplink after losses, and give up dead ones.

Without pacing TCP sends at once whatever its window has room for. Such bursts overflow the queue before
an uplink long before the link is full, and cubic gives up a third of its rate for each. A socket that
has a pacing rate, however high, has its packets spread over the round trip by Linux itself
(tcp_update_pacing_rate), as those of bbr always are. p2pd does not ask for it, and its sockets are its own:
a process may take copies of its child's without privileges (pidfd_getfd, Linux 5.6), unless a container
forbids it.

TCP finds the rate of each connection for itself. A swarm's connections all begin at once: fifteen with
windows of ten packets that double have overflowed the queue before a slow uplink before one of them
could notice, and the round waits for what was lost. So once many packets were lost, all of them together
are kept to what the uplink was seen to carry, and a little more; with each busy time in which few
are lost, a little more still. It is dealt out by max-min fairness (Bertsekas and Gallager, "Data Networks",
1992, section 6.5.2): a connection that cannot use an equal share leaves the rest of it to the others.
Where a router between two nodes has forgotten a connection, nobody tells them: Linux sends again for a
quarter of an hour, and libp2p asks after 40 s. So TCP is told to give up sooner (TCP_USER_TIMEOUT, RFC 5482).

On some paths small packets get through and large ones vanish (`NarrowPaths`). A tunnel on the way carries
less than Ethernet's 1,500 bytes, and a firewall swallows what would tell the sender so (RFC 2923, section
2.1: a "black hole"). Connections come to be, for handshakes are small, and each stands still at its first
full packet until TCP gives it up. From one connection that looks as if the peer had gone. But a peer that is
gone takes no new connection, and shakes no hand.

What deals (TcpShares) and what finds such paths is pure: it is told the time, in seconds of any clock that
only rises.
"""

import asyncio
import ctypes
import errno
import math
import os
import socket
import stat
import struct
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

import structlog

from node.exchange.peers import Limits

LEAST_GAIN = 1.25
"""So many times as fast as the uplink was seen to carry at best all may send together after losses. What was
seen is a tenth to a fifth less than it carries, since parts count until they are answered."""

CREEP = 1.05
"""By so much this grows with each busy time with few losses in which it held something back: links change."""

MOST_GAIN = 16.0
"""It grows no further: then nothing is held back that TCP lets go."""

MANY_LOST, MANY = 0.01, 10
"""Of the packets of a busy time, and packets: radio and other people's bursts lose a few. What overruns a
queue loses some in a hundred."""

_GROWTH = 2.0
"""A connection that its window holds back may go so many times as fast: windows at most double."""

_FEW_BYTES = 4096  # on their way, and none waits: nothing is being sent

_libc = ctypes.CDLL(None, use_errno=True)
_SYS_PIDFD_GETFD = 438
_SO_MAX_PACING_RATE = 47

NEVER_REACHED = 1 << 40
"""A pacing rate, in bytes per second."""

MOST_OF_A_CORE = 0.1
"""Looking at connections takes no more of a core: with hundreds of them it is more seldom."""

_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""A process is short of something for a while."""

_CLOSE_ENOUGH = 0.02  # of a pacing rate: it is not set anew for less

_INFO = struct.Struct("=BxB13xI4xI40xI8xI16xI16xQ16xI8xI")
"""Of the kernel's struct tcp_info: state, times in a row that the same was sent again, bytes of a packet that
is sent, packets under way, round trip in microseconds, packets in the window, packets sent again, bytes that
were acknowledged, bytes that wait, packets sent."""

_ESTABLISHED = 1

_log = structlog.get_logger(__name__)


class TcpCount(NamedTuple):
    """What the kernel says of one connection now."""

    num_sent: int  # packets, since it began
    num_resent: int
    under_way_bytes: int
    waiting_bytes: int  # for the window, or for their pace
    window_bytes: int  # TCP's congestion window
    round_trip_seconds: float  # lately, with what it waits in queues
    acked_bytes: int = 0
    packet_bytes: int = 0  # of a full one
    resent_in_a_row: int = 0  # times that the same was sent again, by now

    @property
    def is_busy(self) -> bool:
        """Whether something is being sent over it."""
        return self.waiting_bytes > 0 or self.under_way_bytes > _FEW_BYTES

    @property
    def is_held_back(self) -> bool:
        """Whether its pace is what keeps it from sending more: its window has room."""
        return self.waiting_bytes > 0 and self.under_way_bytes < self.window_bytes - _FEW_BYTES

    @property
    def usable_bytes_per_second(self) -> float:
        """What it could use, if that were its share."""
        if self.is_held_back:
            return math.inf
        return _GROWTH * self.window_bytes / max(self.round_trip_seconds, 1e-6)


class TcpShares:
    """Of the uplink of one node."""

    def __init__(self, limits: Limits) -> None:
        self._pause_seconds = limits.tcp_pause_seconds
        self.bytes_per_second: float | None = None
        """What all may send together; None: as much as TCP lets them."""
        self.is_holding_back = False
        """Whether some connection has more to send than that now."""
        self._gain: float | None = None  # None: never were many lost
        self._before: Mapping[str, TcpCount] = {}
        self._busy_at = -math.inf  # last
        self._num_sent = self._num_lost = 0  # in this busy time
        self._has_held_back = False

    def deal(
        self, counts: Mapping[str, TcpCount], *, seen: float | None, now: float
    ) -> dict[str, float]:
        """Bytes per second for each connection, by its name; infinity for no limit.

        `seen` is what the uplink was seen to carry at best, bytes per second; None: not known.
        """
        busy = {name: count for name, count in counts.items() if count.is_busy}
        if busy:
            if now > self._busy_at + self._pause_seconds:
                self._end_busy_time()
            self._busy_at = now
        self._note_losses(counts)
        if self._gain is None or seen is None:
            return dict.fromkeys(counts, math.inf)
        self.is_holding_back = any(count.is_held_back for count in busy.values())
        self._has_held_back |= self.is_holding_back
        self.bytes_per_second = allowed = self._gain * seen
        # A connection with nothing to send may begin at any time, and gets its share at the next look.
        return dict.fromkeys(counts, allowed) | _dealt(
            allowed, {name: count.usable_bytes_per_second for name, count in busy.items()}
        )

    @property
    def _has_lost(self) -> bool:
        return self._num_lost >= max(MANY, MANY_LOST * self._num_sent)

    def _end_busy_time(self) -> None:
        if self._gain is not None and self._has_held_back and not self._has_lost:
            self._gain = min(MOST_GAIN, CREEP * self._gain)
        self._num_sent = self._num_lost = 0
        self._has_held_back = False

    def _note_losses(self, counts: Mapping[str, TcpCount]) -> None:
        for name, count in counts.items():
            before = self._before.get(name, count)
            self._num_sent += count.num_sent - before.num_sent
            self._num_lost += count.num_resent - before.num_resent
        self._before = counts
        if self._has_lost:
            self._gain = LEAST_GAIN


def _dealt(rate: float, usable: Mapping[str, float]) -> dict[str, float]:
    """To each what it can use, or an equal share of what the others leave; what nobody can use, to all."""
    dealt: dict[str, float] = {}
    left = rate
    for number, (name, most) in enumerate(sorted(usable.items(), key=lambda item: item[1])):
        dealt[name] = min(most, left / (len(usable) - number))
        left -= dealt[name]
    return {name: share + left / len(dealt) for name, share in dealt.items()}


TIMES_IN_A_ROW = 3
"""So many connections to a host must end so before it is said. A bad radio ends one or two."""

WITHIN_SECONDS = 60.0
"""So soon one after the other: a node that moves, or a router that forgets, ends one now and then."""

SHOOK_HANDS_BYTES = 500
"""Acknowledged of a connection on which both sides have spoken."""

MOST_SMALL_BYTES = 8 * 1024
"""Acknowledged of one on which handshakes and offers went, and nothing else: they take half of that."""

STANDS_STILL = 2
"""So often in a row TCP has sent the same again."""

REMEMBERED_SECONDS = 600.0
"""For so long nothing large is tried there: then the path may be another one."""


class NarrowPaths:
    """To the hosts at the other ends of one process's connections."""

    def __init__(self) -> None:
        self._still: dict[str, str] = {}  # hosts of connections that stand still, by their names
        self._ended: defaultdict[str, list[float]] = defaultdict(list)  # when, by host, lately
        self._since: dict[str, float] = {}  # hosts that are known for it

    def hosts(self, now: float) -> frozenset[str]:
        """To which only small packets get through."""
        for host in [h for h, since in self._since.items() if since + REMEMBERED_SECONDS < now]:
            self._clear(host)
        return frozenset(self._since)

    def look(
        self, connections: Mapping[str, TcpCount], hosts: Mapping[str, str], now: float
    ) -> None:
        """Takes note of all connections that there are, by names that no later one has."""
        for name, seen in connections.items():
            host = hosts.get(name, "")
            is_still = (
                seen.resent_in_a_row >= STANDS_STILL and seen.under_way_bytes >= seen.packet_bytes
            )
            if seen.acked_bytes > MOST_SMALL_BYTES:
                self._clear(host)
                self._still.pop(name, None)
            elif is_still and seen.acked_bytes >= SHOOK_HANDS_BYTES:
                self._still[name] = host
            else:
                self._still.pop(name, None)
        for name in self._still.keys() - connections.keys():
            host = self._still.pop(name)
            lately = [at for at in self._ended[host] if at + WITHIN_SECONDS >= now]
            self._ended[host] = [*lately, now]
            if len(self._ended[host]) >= TIMES_IN_A_ROW:
                self._since.setdefault(host, now)

    def _clear(self, host: str) -> None:
        self._ended.pop(host, None)
        self._since.pop(host, None)


class TcpPacing:
    """Of a child process's sockets. `why_not` says what keeps us from it, once that is known."""

    def __init__(self, pid: int, limits: Limits) -> None:
        self._limits = limits
        self.why_not = "" if sys.platform == "linux" else "only Linux can"
        self._child = _Child(pid)
        self._seen: set[str] = set()  # sockets, as /proc names them
        self._tcp: dict[str, _Place] = {}  # those of TCP
        self._rates: dict[str, float] = {}  # that connections have
        self._shares = TcpShares(limits)
        self._hosts: dict[str, str] = {}  # at the other ends of connections
        self._paths = NarrowPaths()
        self._is_busy = asyncio.Event()

    def look(self) -> None:
        """Sees to sockets that are new: connections, and listeners, whose connections inherit it."""
        if self.why_not:
            return
        try:
            there = dict(sockets_of(self._child.pid))
            for name in there.keys() - self._seen:
                with suppress(_GoneError), self._child.copy_of(there[name]) as copy:
                    is_tcp = copy.type == socket.SOCK_STREAM  # else it asks a router for something
                    if is_tcp and copy.family in (socket.AF_INET, socket.AF_INET6):
                        pace(copy)
                        end_when_silent(copy, self._limits.silent_seconds)
                        self._tcp[name] = _Place(there[name], copy.family)
            self._seen = set(there)
            self._tcp = {name: place for name, place in self._tcp.items() if name in there}
            self._rates = {name: rate for name, rate in self._rates.items() if name in there}
        except _GoneError:
            pass  # the process: whoever waits for its end is told elsewhere
        except OSError as error:
            if error.errno in _PASSING:
                return  # what is new stays so
            self.why_not = str(error)
            _log.info("TCP connections to peers are not paced", reason=self.why_not)

    @property
    def shared_bytes_per_second(self) -> float | None:
        """What all connections may send together after losses; None: it holds none of them back now."""
        return self._shares.bytes_per_second if self._shares.is_holding_back else None

    @property
    def narrow_hosts(self) -> frozenset[str]:
        """To which only small packets get through."""
        return self._paths.hosts(asyncio.get_running_loop().time())

    def close(self) -> None:
        """Lets go of the process, which has ended."""
        self._child.close()

    def wake(self) -> None:
        """Something may be sent soon."""
        self._is_busy.set()

    async def share(self, seen: Callable[[], float | None]) -> None:
        """Deals out the uplink, for as long as this runs; `seen` is what it was seen to carry at best."""
        clock = asyncio.get_running_loop().time
        while not self.why_not:
            await self._is_busy.wait()
            self._is_busy.clear()
            looked_at, busy_at = -math.inf, clock()
            while not self.why_not and (now := clock()) < busy_at + self._limits.tcp_quiet_seconds:
                began = time.thread_time()
                if now >= looked_at + self._limits.tcp_new_seconds:
                    self.look()
                    looked_at = now
                counts = self.counts()
                self._look_for_narrow_paths(counts, now)
                if any(count.is_busy for count in counts.values()):
                    busy_at = now
                was_free = self._shares.bytes_per_second is None
                self.pace(self._shares.deal(counts, seen=seen(), now=now))
                if was_free and (limit := self._shares.bytes_per_second) is not None:
                    _log.info(
                        "many packets were lost: peers share the uplink", bytes_per_second=limit
                    )
                spent = time.thread_time() - began
                await asyncio.sleep(pause_after(spent, self._limits.tcp_look_seconds))

    def counts(self) -> dict[str, TcpCount]:
        """Of connections, by the names of their sockets."""
        counts = {}
        for name in self._tcp:
            with suppress(_GoneError, OSError), self._copy(name) as copy:
                if (count := count_of(copy)) is not None:
                    counts[name] = count
                    if name not in self._hosts:
                        self._hosts[name] = copy.getpeername()[0].removeprefix("::ffff:")
        self._hosts = {name: host for name, host in self._hosts.items() if name in self._tcp}
        return counts

    def _look_for_narrow_paths(self, counts: Mapping[str, TcpCount], now: float) -> None:
        before = self._paths.hosts(now)
        self._paths.look(counts, self._hosts, now)
        for host in sorted(self._paths.hosts(now) - before):
            _log.warning(
                "only small packets get through to a peer: larger ones get lost on the way",
                host=host,
                next_step="lower this machine's MTU or that one's: 'sudo ip link set dev NAME mtu 1280', "
                "with the NAME that 'ip route get' shows",
            )

    def pace(self, rates: Mapping[str, float]) -> None:
        """Bytes per second at most, of connections by the names of their sockets."""
        for name, rate in rates.items():
            rate = min(rate, NEVER_REACHED)
            before = self._rates.get(name, NEVER_REACHED)
            if abs(rate - before) <= _CLOSE_ENOUGH * before:
                continue
            with suppress(_GoneError, OSError), self._copy(name) as copy:
                pace(copy, rate)
                self._rates[name] = rate

    def _copy(self, name: str) -> socket.socket:
        """For a moment only: as long as there is a copy, a socket that p2pd closes stays open."""
        place = self._tcp[name]
        return self._child.copy_of(place.descriptor, name=name, family=place.family)


def pause_after(spent_seconds: float, look_seconds: float) -> float:
    """Seconds until the next look, after one that took the processor for so long."""
    return max(look_seconds, spent_seconds * (1 / MOST_OF_A_CORE - 1))


def pace(connection: socket.socket, bytes_per_second: float = NEVER_REACHED) -> None:
    """Has a socket of TCP paced, no faster than so."""
    rate = struct.pack("=Q", int(bytes_per_second))
    connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, rate)


def end_when_silent(connection: socket.socket, seconds: float) -> None:
    """Has TCP give the connection up when nothing is acknowledged for so long; at rest it asks as often."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * seconds))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(seconds)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(seconds / 3)))


def count_of(connection: socket.socket) -> TcpCount | None:
    """What the kernel counts of a connection; None of a listener, or before it is made."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    if len(info) < _INFO.size or info[0] != _ESTABLISHED:
        return None
    (
        _,
        in_a_row,
        packet_bytes,
        under_way,
        round_trip,
        in_window,
        resent,
        acked_bytes,
        waiting_bytes,
        sent,
    ) = _INFO.unpack(info)
    return TcpCount(
        num_sent=sent,
        num_resent=resent,
        under_way_bytes=under_way * packet_bytes,
        waiting_bytes=waiting_bytes,
        window_bytes=in_window * packet_bytes,
        round_trip_seconds=1e-6 * round_trip,
        acked_bytes=acked_bytes,
        packet_bytes=packet_bytes,
        resent_in_a_row=in_a_row,
    )


class _GoneError(Exception):
    """The process has ended, or has closed the socket since."""


def sockets_of(pid: int) -> Iterator[tuple[str, int]]:
    """Their names, which no other socket has, and their descriptors."""
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                name = str(entry.readlink())
                if name.startswith("socket:"):
                    yield name, int(entry.name)
    except FileNotFoundError as error:
        if not Path("/proc/self/fd").exists():
            raise  # nothing can be told of any process here
        raise _GoneError from error


def copy_of(pid: int, descriptor: int) -> socket.socket:
    """Another process's socket as one of ours. Raises OSError where that is not allowed, and _GoneError."""
    with closing(_Child(pid)) as child:
        return child.copy_of(descriptor)


class UdpSocket(NamedTuple):
    """Where a process listens by UDP."""

    descriptor: int
    family: int
    port: int


def udp_sockets_of(pid: int) -> Iterator[UdpSocket]:
    """Those of IPv4 and IPv6. Raises OSError where they are not to be known."""
    try:
        for _, descriptor in sockets_of(pid):
            with suppress(_GoneError), copy_of(pid, descriptor) as copy:
                is_ip = copy.family in (socket.AF_INET, socket.AF_INET6)
                if is_ip and copy.type == socket.SOCK_DGRAM:
                    yield UdpSocket(descriptor, copy.family, copy.getsockname()[1])
    except _GoneError as error:
        raise OSError(errno.ESRCH, "the process has ended") from error


def send_from(pid: int, descriptor: int, datagram: bytes, to: tuple[str, int]) -> None:
    """Sends a datagram from a process's own socket: routers take it for that process's.

    Raises OSError where that is not allowed. That there is no way now, or no room, is no error.
    """
    with suppress(_GoneError), copy_of(pid, descriptor) as copy, suppress(OSError):
        copy.sendto(datagram, to)


class _Place(NamedTuple):
    """Where a socket of TCP is."""

    descriptor: int
    family: int


class _Child:
    """A process whose sockets are copied again and again.

    What holds the process is kept: it says for ever which one is meant, and holds nothing of its sockets.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._process: int | None = None

    def close(self) -> None:
        """Lets go of the process; it may be asked again."""
        if self._process is not None:
            os.close(self._process)
            self._process = None

    def copy_of(
        self, descriptor: int, *, name: str = "", family: int | None = None
    ) -> socket.socket:
        """A socket as one of ours; with a name, that one or none, and of a family that is known.

        Raises OSError where that is not allowed, and _GoneError.
        """
        if self._process is None:
            try:
                self._process = os.pidfd_open(self.pid)
            except ProcessLookupError as error:
                raise _GoneError from error
        copy = _libc.syscall(_SYS_PIDFD_GETFD, self._process, descriptor, 0)
        if copy < 0:
            code = ctypes.get_errno()
            if code in (errno.EBADF, errno.ESRCH):
                raise _GoneError
            raise OSError(code, f"pidfd_getfd: {os.strerror(code)}")
        found = os.fstat(copy)
        if not stat.S_ISSOCK(found.st_mode) or (name and name != f"socket:[{found.st_ino}]"):
            os.close(copy)
            raise _GoneError
        if family is None:
            return socket.socket(fileno=copy)  # it asks the kernel for what it is not told
        return socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=copy)
