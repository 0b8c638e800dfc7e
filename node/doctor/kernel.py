"""What of the Linux kernel's settings makes transfers over long links slow. Only reads.

A node's peers are far away, and it talks to them for some seconds every few minutes. Both are what
the kernel's defaults are not made for.
"""

from collections.abc import Iterator
from pathlib import Path

from node.doctor.findings import Finding
from node.machine.hardware import SETTINGS, congestion_control, setting

ABOUT = "kernel"

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
            Finding(about=ABOUT, verdict="note", what=f"no settings to look at below {root}/net")
        ]
    found = [*_slow_start(root), *_buffers(root), *_congestion_control(root)]
    if all(finding.verdict == "note" for finding in found):
        found.insert(
            0, Finding(about=ABOUT, verdict="fine", what="nothing of it slows long links down")
        )
    return found


def _slow_start(root: Path) -> Iterator[Finding]:
    name = "net.ipv4.tcp_slow_start_after_idle"
    if setting(name, root) == "1":
        yield Finding(
            about=ABOUT,
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
                about=ABOUT,
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
    yield Finding(about=ABOUT, verdict="note", what=what, next_step=next_step)
