"""Looks every few seconds whether this machine's owner lets a node train: battery, keys, other programs."""

import asyncio
import contextlib
import os
import shutil
import subprocess
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from node.machine.limits import Limits, Seen, in_use, why_not

LOOK_SECONDS = 10.0
WINDOW_SECONDS = 120.0
"""Over which other programs' share of the processors is taken."""

_ASKING_SECONDS = 5.0
_DESKTOPS = ("x11", "wayland", "mir")


def is_on_battery(root: Path = Path("/")) -> bool:
    """Whether no mains supply is on and a battery of the machine, or of its UPS, is being emptied."""
    supplies = [_supply(folder) for folder in (root / "sys/class/power_supply").glob("*")]
    if any(each.get("type") == "Mains" and each.get("online") == "1" for each in supplies):
        return False
    return any(
        each.get("type") in ("Battery", "UPS")
        and each.get("scope") != "Device"  # of a mouse
        and each.get("status") == "Discharging"
        for each in supplies
    )


def _supply(folder: Path) -> Mapping[str, str]:
    told = {}
    for name in ("type", "online", "scope", "status"):
        with contextlib.suppress(OSError):
            told[name] = (folder / name).read_text().strip()
    return told


def seconds_since_key(now: float, root: Path = Path("/")) -> float | None:
    """Since somebody last typed in a terminal; None without one. The kernel notes it to eight seconds.

    `now` is Unix time.
    """
    typed = []
    for terminal in [*(root / "dev").glob("tty[0-9]*"), *(root / "dev/pts").glob("[0-9]*")]:
        with contextlib.suppress(OSError):
            typed.append(terminal.stat().st_atime)
    return max(0.0, now - max(typed)) if typed else None


def active_desktops(sessions: str) -> tuple[str, ...]:
    """Desktops on which somebody is active, of what `loginctl show-session` says of all sessions."""
    active = []
    for block in sessions.split("\n\n"):
        told = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if told.get("Type") in _DESKTOPS and told.get("IdleHint") == "no" and told.get("Name"):
            active.append(f"{told['Name']} at a desktop")
    return tuple(active)


def _sessions() -> str:
    """What logind says of all sessions; nothing where there is no logind."""
    if shutil.which("loginctl") is None:
        return ""

    def ask(*words: str) -> str:
        asked = subprocess.run(
            ["loginctl", "--no-pager", *words],
            capture_output=True,
            text=True,
            timeout=_ASKING_SECONDS,
            check=False,
        )
        return asked.stdout if asked.returncode == 0 else ""

    try:
        ids = [line.split()[0] for line in ask("list-sessions", "--no-legend").splitlines() if line]
        named = ("--property=Name", "--property=Type", "--property=IdleHint")
        return ask("show-session", *named, *ids) if ids else ""
    except (OSError, subprocess.TimeoutExpired):
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticks:
    """What processors have done since the machine's start, in the kernel's ticks."""

    total: int
    busy: int
    own: int  # of busy, by a process and all that came of it

    @classmethod
    def read(cls, process_id: int, root: Path = Path("/")) -> "Ticks":
        """As /proc tells it. Raises OSError."""
        values = [
            int(word) for word in (root / "proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        ]
        user, nice, system, idle, waiting, *rest = values
        parents: dict[int, int] = {}
        spent: dict[int, int] = {}
        for stat in (root / "proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                # The name in brackets may hold anything.
                fields = stat.read_text(errors="replace").rpartition(")")[2].split()
                parents[int(stat.parent.name)] = int(fields[1])
                spent[int(stat.parent.name)] = int(fields[11]) + int(fields[12])
        own = sum(ticks for found, ticks in spent.items() if _is_below(found, process_id, parents))
        busy = user + nice + system + sum(rest)
        return cls(total=busy + idle + waiting, busy=busy, own=own)


def _is_below(process_id: int, above: int, parents: Mapping[int, int]) -> bool:
    seen = set()
    while process_id not in seen:
        if process_id == above:
            return True
        seen.add(process_id)
        process_id = parents.get(process_id, 0)
    return False


def others_share(before: Ticks, now: Ticks) -> float:
    """Of all processors, what was taken meanwhile by others than the process and what came of it."""
    total = now.total - before.total
    busy = now.busy - before.busy - max(0, now.own - before.own)
    return max(0.0, busy / total) if total > 0 else 0.0


class Usage:
    """Whether the machine's owner lets a node train, looked at again and again."""

    def __init__(self, limits: Limits, *, look: Callable[[], Seen] | None = None) -> None:
        self._limits = limits
        self._ticks: deque[Ticks] = deque(maxlen=round(WINDOW_SECONDS / LOOK_SECONDS) + 1)
        self._look_at_machine = look or self._see
        self._is_in_use = False
        self.why_not = ""
        """Why the node may not train now, as it was last looked at."""

    def look(self) -> None:
        """Looks now. Takes milliseconds, and asks logind."""
        seen, was_in_use = self._look_at_machine(), self._is_in_use
        self._is_in_use = bool(in_use(seen, was_in_use=was_in_use))
        self.why_not = why_not(self._limits, seen, was_in_use=was_in_use)

    def _see(self) -> Seen:
        seen = Seen(at=datetime.now().astimezone().time(), is_on_battery=is_on_battery())
        if not self._limits.only_idle:
            return seen
        with contextlib.suppress(OSError):
            self._ticks.append(Ticks.read(os.getpid()))
        return Seen(
            at=seen.at,
            is_on_battery=seen.is_on_battery,
            in_use_by=active_desktops(_sessions()),
            seconds_since_key=seconds_since_key(time.time()),
            others_share=others_share(self._ticks[0], self._ticks[-1]) if self._ticks else 0.0,
        )

    @asynccontextmanager
    async def watched(self, *, every_seconds: float = LOOK_SECONDS) -> AsyncIterator[None]:
        """Within it, `why_not` is what holds; nothing is looked at where there are no limits."""
        if not self._limits.is_any:
            yield
            return
        await asyncio.to_thread(self.look)

        async def keep_looking() -> None:
            while True:
                await asyncio.sleep(every_seconds)
                await asyncio.to_thread(self.look)

        task = asyncio.ensure_future(keep_looking())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
