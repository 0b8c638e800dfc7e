"""Values as people type them: rates (10mbit, 1.25MB/s), links, spans of time (30, 90s, 24h), HOST:PORT."""

import contextlib
import ipaddress
import re

import click

_RATE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) ?([kKmMgG]?)(?:(bit)(?:/s)?|B/s)")
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}

_LINK = re.compile(rf"({_RATE.pattern})(?: ?/ ?({_RATE.pattern}))?")


def bits_per_second_of(rate: str) -> float | None:
    """Bits a second; None for what is no rate. "10mb" is none, for it may mean either."""
    match = _RATE.fullmatch(rate)
    if match is None:
        return None
    number, prefix, bit = match.groups()
    return float(number) * _PREFIXES[prefix.lower()] * (1 if bit else 8)


def directions_of(link: str) -> tuple[float, float] | None:
    """Bits a second down and up of "100mbit/20mbit", or of "100mbit" for both; None: no link."""
    match = _LINK.fullmatch(link.strip())
    if match is None:
        return None
    down = bits_per_second_of(match[1])
    up = bits_per_second_of(match[5]) if match[5] else down
    assert down is not None and up is not None
    return down, up


def rate_in_words(bits_per_second: float) -> str:
    """As it would be typed: "100mbit"."""
    for prefix, factor in (("g", 1e9), ("m", 1e6), ("k", 1e3)):
        if bits_per_second >= factor:
            return f"{bits_per_second / factor:.4g}{prefix}bit"
    return f"{bits_per_second:.4g}bit"


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


_LARGEST_PORT = 65535


def web_address_of(text: str) -> tuple[str, int]:
    """Host and port of "127.0.0.1:8080", "[::1]:8080" or "8080", which is on loopback.

    Raises ValueError with what is wrong.
    """
    host, separator, port = text.rpartition(":")
    if not separator:
        host = "127.0.0.1"
    is_bracketed = host.startswith("[") and host.endswith("]")
    is_whole = is_bracketed or ":" not in host
    host = host[1:-1] if is_bracketed else host
    if not host or not is_whole or not port.isascii() or not port.isdigit():
        raise ValueError("not HOST:PORT, such as 127.0.0.1:8080")
    if int(port) > _LARGEST_PORT:
        raise ValueError(f"port {port} is above {_LARGEST_PORT}")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches that address."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
