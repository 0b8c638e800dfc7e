"""Links of nodes, and how long an exchange keeps the slowest one busy."""

import math

from protocol.wire.vitals import LinkRates

MB = 1e6


def both(*megabytes_per_second: float | None) -> list[LinkRates]:
    return [
        LinkRates(up_bytes_per_second=r and r * MB, down_bytes_per_second=r and r * MB)
        for r in megabytes_per_second
    ]


def all_may(links: list[LinkRates]) -> list[bool]:
    return [True] * len(links)


def seconds(links: list[LinkRates], shares: tuple[float, ...]) -> float:
    """How long the slowest link is busy with a fragment of one byte, by the docstring's formula."""
    return max(
        (1 + (len(links) - 2) * share)
        / min(link.up_bytes_per_second or math.inf, link.down_bytes_per_second or math.inf)
        for link, share in zip(links, shares, strict=True)
    )
