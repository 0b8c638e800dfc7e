"""Settings of the Linux kernel that this host has. Only reads."""

from pathlib import Path

SETTINGS = Path("/proc/sys")


def setting(name: str, root: Path = SETTINGS) -> str | None:
    """By its name for sysctl; None where this kernel has none of the name, or does not show it."""
    try:
        return (root / name.replace(".", "/")).read_text().strip()
    except OSError:
        return None


def congestion_control(root: Path = SETTINGS) -> str | None:
    """TCP's, for connections that name none, as all of a node's."""
    return setting("net.ipv4.tcp_congestion_control", root)
