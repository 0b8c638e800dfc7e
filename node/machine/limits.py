"""When a node's owner lets it train: hours of the day, on battery or not, beside other use or not.

Pure: what was seen of the machine in, the reason not to train out. node.machine.usage looks.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import time

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
    others_share: float = (
        0.0  # of all processors, by what is not this node's, over the last minutes
    )


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
