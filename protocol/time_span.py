"""Spans of time as people type them: 30, 90s, 30m, 24h, 7d."""

import re

import click

_UNIT_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def as_seconds(
    _context: click.Context, _parameter: click.Parameter, text: str | None
) -> float | None:
    """A click callback: seconds from a number with a unit; a bare number is seconds.

    Raises click.BadParameter.
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is not a time span such as 30, 90s or 5m")
    return float(match[1]) * _UNIT_SECONDS[match[2]]
