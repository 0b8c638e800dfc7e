"""A network of one's own: only what the benchmark starts is on its loopback, and every byte shows."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOOPBACK_MTU = 65536
"""What loopback has by itself; the internet has 1500."""

_INSIDE = "ATOLL_BENCHMARK_INSIDE_NAMESPACE"

_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)  # os.setns comes with Python 3.12


def enter(*, mtu: int) -> None:
    """Starts this program anew in a private network namespace; returns there, with loopback up.

    Needs root or unprivileged user namespaces. Below LOOPBACK_MTU segmentation offload is turned
    off as well, so that the counters see packets as a network card sends them.
    """
    if _INSIDE not in os.environ:
        again = [sys.executable, *sys.orig_argv[1:]]
        # The same process goes on: a signal to it reaches the benchmark, and not only unshare.
        os.execvpe(
            "unshare",
            ["unshare", "--map-root-user", "--net", *again],
            os.environ | {_INSIDE: "1"},
        )
    offload = [] if mtu == LOOPBACK_MTU else ["gso_max_segs", "1"]
    subprocess.run(["ip", "link", "set", "lo", "mtu", str(mtu), *offload, "up"], check=True)


def loopback_counters() -> tuple[int, int]:
    """Bytes and packets that loopback carried; each is counted once as sent."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            fields = [int(number) for number in numbers.split()]
            return fields[8], fields[9]
    raise RuntimeError("no loopback interface in /proc/net/dev")


def new_namespace() -> int:
    """A descriptor of a new network namespace without a name: it ends with its last user."""
    home = _current_namespace()
    try:
        _must("unshare", _LIBC.unshare(_CLONE_NEWNET))
        made = _current_namespace()
        _enter(home)
    finally:
        os.close(home)
    return made


@contextmanager
def inside(namespace: int) -> Iterator[None]:
    """Sockets and processes that this thread makes meanwhile belong to that namespace."""
    home = _current_namespace()
    _enter(namespace)
    try:
        yield
    finally:
        _enter(home)
        os.close(home)


def _current_namespace() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _enter(namespace: int) -> None:
    _must("setns", _LIBC.setns(namespace, _CLONE_NEWNET))


def _must(call: str, status: int) -> None:
    if status:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), call)
