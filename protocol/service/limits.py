"""What the machine allows this process: open files, processes with their threads, and cores.

A process that runs out of files or processes sees errors far from the cause, or is aborted without a word.
So both are compared with the need before anything is started.
"""

import contextlib
import os
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from protocol.errors import SystemRefusedError

COMMAND_PROCESSES = 8
"""Threads of gRPC's in a command that asks a coordinator."""

UNLIMITED = 1 << 60
"""About this number says "no limit" in control groups of version 1."""


def allow_open_files() -> int:
    """Raises the soft limit on open files to the hard one; returns how many there may be now.

    Processes that are started from here on inherit it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # Some systems name a hard limit that they do not allow: then the soft one is what counts.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def require_open_files(needed: int, *, of: str) -> int:
    """Allows as many as there may be; raises SystemRefusedError when that is less than `needed`."""
    allowed = allow_open_files()
    if allowed < needed:
        raise SystemRefusedError(
            f"{of} needs {needed} open files at a time and {allowed} are allowed",
            next_step=f"raise the hard limit: 'ulimit -Hn {needed}' as root, LimitNOFILE={needed} "
            f"in a systemd unit, or 'docker run --ulimit nofile={needed}'",
        )
    return allowed


def open_standard_files() -> None:
    """Opens those of standard input, output and error that the caller has closed, on nothing.

    Otherwise the next file gets the free number: a library that complains to number 2 would write
    into the database.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            stream = os.fdopen(number, mode, encoding="utf-8", closefd=False)
            setattr(sys, name, stream)


def require_processes(needed: int, *, of: str, root: Path = Path("/")) -> None:
    """Raises SystemRefusedError where there may not be enough: gRPC would abort this process, silently."""
    left = processes_left(root)
    if left < needed:
        raise SystemRefusedError(
            f"{of} needs at least {needed} processes and threads, and {max(0, left)} more are allowed",
            next_step="raise the limit: 'ulimit -u 1024', 'docker run --pids-limit 1024', or TasksMax=1024 "
            "in a systemd unit",
        )


def processes_left(root: Path = Path("/")) -> int:
    """How many more processes and threads are allowed; `UNLIMITED` where nothing says."""
    left = [UNLIMITED, _left_to_the_user(root)]
    for folder, _ in groups(root, "pids"):
        with suppress(OSError, ValueError):  # the root group has no limit, and others say "max"
            limit = int((folder / "pids.max").read_text())
            left.append(limit - int((folder / "pids.current").read_text()))
    return min(left)


_MAY_EXCEED = 1 << 24 | 1 << 21
"""Who has CAP_SYS_RESOURCE or CAP_SYS_ADMIN is not held to the limit of its user."""


def _left_to_the_user(root: Path) -> int:
    """By 'ulimit -u', which counts the threads of all processes that a user has."""
    limit, own = None, {}
    with suppress(OSError):
        limits = (root / "proc/self/limits").read_text()
        limit = re.search(r"^Max processes +(\d+)", limits, flags=re.MULTILINE)
        own = _status_of(root / "proc/self")
    # Sandboxes such as gVisor leave lines out.
    if limit is None or "Uid" not in own or int(own.get("CapEff", "0"), 16) & _MAY_EXCEED:
        return UNLIMITED
    left = int(limit[1])
    for process in (root / "proc").glob("[0-9]*"):
        with suppress(OSError, KeyError):  # the former: it has ended
            status = _status_of(process)
            if status["Uid"].split()[0] == own["Uid"].split()[0]:
                left -= int(status["Threads"])
    return left


def _status_of(process: Path) -> dict[str, str]:
    lines = (process / "status").read_text(errors="replace").splitlines()  # a name may be any bytes
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def usable_cores(root: Path = Path("/")) -> int:
    """How many cores may compute for this process: those of its affinity, or its groups' share of time.

    More threads than a share has, as of a container with 4 of 64 cores, use it up early in each tenth of a
    second, and all stand still for the rest.
    """
    cores = len(os.sched_getaffinity(0))
    for folder, version in groups(root, "cpu"):
        # No limit is "max" in version 2, and -1 in version 1; the root group has no file.
        with suppress(OSError, ValueError):
            if version == 2:
                quota, period = map(int, (folder / "cpu.max").read_text().split())
            else:
                quota = int((folder / "cpu.cfs_quota_us").read_text())
                period = int((folder / "cpu.cfs_period_us").read_text())
            if quota > 0:
                cores = min(cores, -(-quota // period))
    return cores


def groups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Folders of our control groups and of all around them, each with its version."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            top, version = root / "sys/fs/cgroup", 2
        elif controller in controllers.split(","):
            top, version = root / "sys/fs/cgroup" / controller, 1
        else:
            continue
        folder = top / path.lstrip("/")
        while folder != top.parent:
            yield folder, version
            folder = folder.parent
