"""Has the kernel pace the TCP connections of p2pd, which does not ask for it itself.

Without pacing TCP sends at once whatever its window has room for. Such bursts overflow the queue before
an uplink long before the link is full, and cubic gives up a third of its rate for each. A socket that
has a pacing rate, however high, has its packets spread over the round trip by Linux itself
(tcp_update_pacing_rate), as those of bbr always are.

The sockets are p2pd's. A process may take copies of its child's without privileges (pidfd_getfd,
Linux 5.6), unless a container forbids it.
"""

import ctypes
import errno
import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import structlog

_SYS_PIDFD_GETFD = 438
_SO_MAX_PACING_RATE = 47

NEVER_REACHED = 1 << 40
"""A pacing rate, in bytes per second."""

_log = structlog.get_logger(__name__)


class TcpPacing:
    """Of a child process's sockets. `why_not` says what keeps us from it, once that is known."""

    def __init__(self, pid: int) -> None:
        self.why_not = "" if sys.platform == "linux" else "only Linux can"
        self._pid = pid
        self._seen: set[str] = set()  # sockets, as /proc names them

    def look(self) -> None:
        """Sees to sockets that are new: connections, and listeners, whose connections inherit it."""
        if self.why_not:
            return
        try:
            there = dict(sockets_of(self._pid))
            for name in there.keys() - self._seen:
                with suppress(_GoneError), copy_of(self._pid, there[name]) as copy:
                    pace(copy)
            self._seen = set(there)
        except _GoneError:
            pass  # the process: whoever waits for its end is told elsewhere
        except OSError as error:
            self.why_not = str(error)
            _log.info("TCP connections to peers are not paced", reason=self.why_not)


def pace(connection: socket.socket) -> None:
    """Has it paced, if it is TCP's."""
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        rate = struct.pack("=Q", NEVER_REACHED)
        connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, rate)


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
        libc = ctypes.CDLL(None, use_errno=True)
        copy = libc.syscall(_SYS_PIDFD_GETFD, process, descriptor, 0)
        code = ctypes.get_errno()
    finally:
        os.close(process)
    if copy >= 0:
        return socket.socket(fileno=copy)
    if code in (errno.EBADF, errno.ESRCH):
        raise _GoneError
    raise OSError(code, f"pidfd_getfd: {os.strerror(code)}")
