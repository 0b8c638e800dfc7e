"""Links of nodes, and how long an exchange keeps the slowest one busy."""

import math

from coordinator.swarm.slices import Rates

MB = 1e6


def both(*megabytes_per_second: float | None) -> list[Rates]:
    return [Rates(up=r and r * MB, down=r and r * MB) for r in megabytes_per_second]


def all_may(links: list[Rates]) -> list[bool]:
    return [True] * len(links)


def seconds(links: list[Rates], shares: tuple[float, ...]) -> float:
    """How long the slowest link is busy with a fragment of one byte, by the docstring's formula."""
    return max(
        (1 + (len(links) - 2) * share) / min(link.up or math.inf, link.down or math.inf)
        for link, share in zip(links, shares, strict=True)
    )
