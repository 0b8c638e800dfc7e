"""How much memory this process and its children may still take: of the machine, or of a container.

A container's limit (a control group's, of either version) is not in /proc/meminfo, and who takes more
is killed without a word.
"""

import re
from collections.abc import Iterator
from pathlib import Path

_UNLIMITED = 1 << 60  # version 1 says "no limit" with a number of about this size


def free_bytes(root: Path = Path("/")) -> int:
    """What the kernel can give without swapping, or what the tightest limit leaves."""
    available = _available_bytes((root / "proc/meminfo").read_text())
    return min([available, *(max(0, limit) for limit in _left_by_limits(root))])


def _available_bytes(meminfo: str) -> int:
    match = re.search(r"^MemAvailable: +(\d+) kB$", meminfo, flags=re.MULTILINE)
    assert match is not None, "Linux has it since 3.14"
    return 1024 * int(match[1])


def _left_by_limits(root: Path) -> Iterator[int]:
    """Of our own group and of all around it. Cached files count as used, and are given up at need."""
    for folder, limit_name, usage_name, cache_name in _groups(root):
        try:
            limit = (folder / limit_name).read_text().strip()
            if not limit.isdecimal() or int(limit) >= _UNLIMITED:
                continue
            used = int((folder / usage_name).read_text())
            stat = (folder / "memory.stat").read_text()
        except OSError:
            continue  # the root group has no limit; or it is not shown in here
        cached = re.search(rf"^{cache_name} (\d+)$", stat, flags=re.MULTILINE)
        yield int(limit) - used + (int(cached[1]) if cached else 0)


def _groups(root: Path) -> Iterator[tuple[Path, str, str, str]]:
    """Folders of groups, each with the names of its limit, its usage, and its cache in memory.stat."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            top = root / "sys/fs/cgroup"
            names = ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = top / path.lstrip("/")
        while folder != top.parent:
            yield (folder, *names)
            folder = folder.parent
