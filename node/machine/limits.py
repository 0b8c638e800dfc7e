"""When a node's owner lets it train: hours of the day, on battery or not, beside other use or not.

Pure: what was seen of the machine in, the reason not to train out. node.machine.limits looks.
"""

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, time
from pathlib import Path
from time import time as unix_seconds

_SPAN = re.compile(r"(\d{1,2})(?::(\d\d))?\s*-\s*(\d{1,2})(?::(\d\d))?")
_MINUTES_OF_DAY = 24 * 60

QUIET_SECONDS = 300.0
"""Since the last key in a terminal, until nobody counts as typing."""

BUSY_SHARE = 0.25
QUIET_SHARE = 0.15
"""Of all processors, what other programs take when the machine is in use, and when it is idle again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A part of each day, in minutes since midnight; it may go over midnight."""

    begin: int
    end: int

    def has(self, minute: int) -> bool:
        """Whether the minute of the day is in it. Its end is not."""
        if self.begin < self.end:
            return self.begin <= minute < self.end
        return minute >= self.begin or minute < self.end

    def __str__(self) -> str:
        return f"{_clock(self.begin)}-{_clock(self.end)}"


def _clock(minutes: int) -> str:
    return f"{minutes // 60:02}:{minutes % 60:02}"


def hours_of(text: str) -> tuple[Span, ...]:
    """The spans of "22:00-07:00, 12-13"; none of the empty text. Raises ValueError with what is wrong."""
    return tuple(_span(part.strip()) for part in text.split(",")) if text.strip() else ()


def _span(text: str) -> Span:
    match = _SPAN.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no part of a day such as 22:00-07:00")
    first, last = (60 * int(match[n]) + int(match[n + 1] or 0) for n in (1, 3))
    is_clock = all(int(match[n] or 0) < 60 for n in (2, 4)) and first < _MINUTES_OF_DAY
    if not is_clock or last > _MINUTES_OF_DAY or first == last:
        raise ValueError(
            f"{text!r} is no part of a day: write two different times, to 24:00 at most"
        )
    return Span(begin=first, end=last % _MINUTES_OF_DAY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When the owner lets the node train."""

    hours: tuple[Span, ...] = ()  # none: at all hours
    on_battery: bool = True
    only_idle: bool = False

    @property
    def is_any(self) -> bool:
        """Whether there is anything to look at."""
        return bool(self.hours) or not self.on_battery or self.only_idle


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the machine shows now."""

    at: time  # local
    is_on_battery: bool = False
    in_use_by: Sequence[str] = ()  # desktops on which somebody is active, in words
    seconds_since_key: float | None = None  # in a terminal; None: there is none
    others_share: float = 0.0  # of all processors, lately, by what is not this node's


def why_not(limits: Limits, seen: Seen, *, was_in_use: bool) -> str:
    """Why the node may not train now, in words; empty where it may."""
    minute = 60 * seen.at.hour + seen.at.minute
    if limits.hours and not any(span.has(minute) for span in limits.hours):
        return f"its hours are {', '.join(map(str, limits.hours))}"
    if seen.is_on_battery and not limits.on_battery:
        return "this machine runs on its battery"
    return in_use(seen, was_in_use=was_in_use) if limits.only_idle else ""


def in_use(seen: Seen, *, was_in_use: bool) -> str:
    """How the machine is used by others than this node; empty where it is idle.

    `was_in_use`: what began above one share ends below a lower one, or a node at the border would change
    its mind all the time.
    """
    if seen.in_use_by:
        return f"this machine is in use: {', '.join(seen.in_use_by)}"
    if seen.seconds_since_key is not None and seen.seconds_since_key < QUIET_SECONDS:
        return "this machine is in use: somebody types in a terminal"
    if seen.others_share >= (QUIET_SHARE if was_in_use else BUSY_SHARE):
        return (
            f"this machine is in use: other programs take {seen.others_share:.0%} of its processors"
        )
    return ""


# Looks every few seconds whether this machine's owner lets a node train: battery, keys, other programs.


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
            seconds_since_key=seconds_since_key(unix_seconds()),
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
