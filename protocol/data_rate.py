"""Rates as people type them: 10mbit, 1.25MB/s; and links with two directions: 100mbit/20mbit."""

import re

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
