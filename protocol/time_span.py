"""Spans of time as people type them: 100ms, 30, 90s, 30m, 24h, 7d."""

import re

import click

_UNIT_SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def as_seconds(
    _context: click.Context, _parameter: click.Parameter, text: str | None
) -> float | None:
    """A click callback: seconds from a number with a unit; a bare number is seconds.

    Raises click.BadParameter.
    """
    if text is None:
        return None
    seconds = seconds_of(text)
    if seconds is None:
        raise click.BadParameter(f"{text!r} is not a time span such as 30, 90s or 5m")
    return seconds


def seconds_of(text: str) -> float | None:
    """Seconds of a number with a unit, or without one; None for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|[smhd]?)", text.strip())
    return float(match[1]) * _UNIT_SECONDS[match[2]] if match else None
