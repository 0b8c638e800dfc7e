"""Has the kernel pace the TCP connections of p2pd, which does not ask for it itself.

Without pacing TCP sends at once whatever its window has room for. Such bursts overflow the queue before
an uplink long before the link is full, and cubic gives up a third of its rate for each. A socket that
has a pacing rate, however high, has its packets spread over the round trip by Linux itself
(tcp_update_pacing_rate), as those of bbr always are. And while something is sent, all of them together are
kept to what the uplink carries (tcp_shares).

The sockets are p2pd's. A process may take copies of its child's without privileges (pidfd_getfd,
Linux 5.6), unless a container forbids it.
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import structlog

from node.exchange.transport.rates.tcp_shares import TcpCount, TcpShares

_libc = ctypes.CDLL(None, use_errno=True)
_SYS_PIDFD_GETFD = 438
_SO_MAX_PACING_RATE = 47

NEVER_REACHED = 1 << 40
"""A pacing rate, in bytes per second."""

LOOK_SECONDS = 0.0125
"""So often connections are looked at while something is sent."""

QUIET_SECONDS = 0.5
"""After so long without anything to send nobody looks any more."""

NEW_SECONDS = 1.0
"""So often it is looked for new connections meanwhile."""

_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""A process is short of something for a while."""

_CLOSE_ENOUGH = 0.02  # of a pacing rate: it is not set anew for less

# In the kernel's struct tcp_info:
_ESTABLISHED = 1
_SENT_PACKET_BYTES = 16
_NUM_UNDER_WAY = 24
_ROUND_TRIP_MICROSECONDS = 68
_NUM_IN_WINDOW = 80
_NUM_RESENT = 100
_WAITING_BYTES = 144
_NUM_SENT = 156
_INFO_BYTES = 160

_log = structlog.get_logger(__name__)


class TcpPacing:
    """Of a child process's sockets. `why_not` says what keeps us from it, once that is known."""

    def __init__(self, pid: int) -> None:
        self.why_not = "" if sys.platform == "linux" else "only Linux can"
        self._pid = pid
        self._seen: set[str] = set()  # sockets, as /proc names them
        self._tcp: dict[str, int] = {}  # those of TCP, and their descriptors
        self._rates: dict[str, float] = {}  # that connections have
        self._shares = TcpShares()
        self._is_busy = asyncio.Event()

    def look(self) -> None:
        """Sees to sockets that are new: connections, and listeners, whose connections inherit it."""
        if self.why_not:
            return
        try:
            there = dict(sockets_of(self._pid))
            for name in there.keys() - self._seen:
                with suppress(_GoneError), copy_of(self._pid, there[name]) as copy:
                    if copy.family in (socket.AF_INET, socket.AF_INET6):
                        pace(copy)
                        self._tcp[name] = there[name]
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
            while not self.why_not and (now := clock()) < busy_at + QUIET_SECONDS:
                if now >= looked_at + NEW_SECONDS:
                    self.look()
                    looked_at = now
                counts = self.counts()
                if any(count.is_busy for count in counts.values()):
                    busy_at = now
                was_free = self._shares.bytes_per_second is None
                self.pace(self._shares.deal(counts, seen=seen(), now=now))
                if was_free and (limit := self._shares.bytes_per_second) is not None:
                    _log.info(
                        "many packets were lost: peers share the uplink", bytes_per_second=limit
                    )
                await asyncio.sleep(LOOK_SECONDS)

    def counts(self) -> dict[str, TcpCount]:
        """Of connections, by the names of their sockets."""
        counts = {}
        for name in self._tcp:
            with suppress(_GoneError, OSError), self._copy(name) as copy:
                if (count := count_of(copy)) is not None:
                    counts[name] = count
        return counts

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
        copy = copy_of(self._pid, self._tcp[name])
        if f"socket:[{os.fstat(copy.fileno()).st_ino}]" != name:
            copy.close()
            raise _GoneError
        return copy


def pace(connection: socket.socket, bytes_per_second: float = NEVER_REACHED) -> None:
    """Has a socket of TCP paced, no faster than so."""
    rate = struct.pack("=Q", int(bytes_per_second))
    connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, rate)


def count_of(connection: socket.socket) -> TcpCount | None:
    """What the kernel counts of a connection; None of a listener, or before it is made."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    if len(info) < _INFO_BYTES or info[0] != _ESTABLISHED:
        return None
    (packet_bytes,) = struct.unpack_from("=I", info, _SENT_PACKET_BYTES)
    (num_under_way,) = struct.unpack_from("=I", info, _NUM_UNDER_WAY)
    (round_trip,) = struct.unpack_from("=I", info, _ROUND_TRIP_MICROSECONDS)
    (num_in_window,) = struct.unpack_from("=I", info, _NUM_IN_WINDOW)
    (num_resent,) = struct.unpack_from("=I", info, _NUM_RESENT)
    (waiting_bytes,) = struct.unpack_from("=I", info, _WAITING_BYTES)
    (num_sent,) = struct.unpack_from("=I", info, _NUM_SENT)
    return TcpCount(
        num_sent=num_sent,
        num_resent=num_resent,
        under_way_bytes=num_under_way * packet_bytes,
        waiting_bytes=waiting_bytes,
        window_bytes=num_in_window * packet_bytes,
        round_trip_seconds=1e-6 * round_trip,
    )


def pacing_rate_of(connection: socket.socket) -> int:
    """In bytes per second; the highest number of 64 bits for a connection that has none."""
    size = struct.calcsize("=Q")
    raw = connection.getsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, size)
    return int.from_bytes(raw, sys.byteorder)


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
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError as error:
        raise _GoneError from error
    try:
        copy = _libc.syscall(_SYS_PIDFD_GETFD, process, descriptor, 0)
        code = ctypes.get_errno()
    finally:
        os.close(process)
    if copy >= 0 and stat.S_ISSOCK(os.fstat(copy).st_mode):
        return socket.socket(fileno=copy)
    if copy >= 0:
        os.close(copy)
        raise _GoneError
    if code in (errno.EBADF, errno.ESRCH):
        raise _GoneError
    raise OSError(code, f"pidfd_getfd: {os.strerror(code)}")
