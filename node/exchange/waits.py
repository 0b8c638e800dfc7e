"""How long the exchange waits for what, above the transport: one value, passed in.

The transport's own waits are node.exchange.transport.limits'.
"""

from dataclasses import dataclass

from node.exchange.transport.limits import stretched

SLOWEST_BYTES_PER_SECOND = 16_000
"""A fetch that is slower is given up, and another donor is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Of one node's exchange."""

    grace_seconds: float = 2.0
    """A result that does not come of itself is fetched so long after the commit."""
    first_retry_seconds: float = 0.2
    last_retry_seconds: float = 3.0
    """The longest pauses before a push is repeated: the first one, and all from the fifth on. Each pause is
    drawn from zero to its longest ("full jitter"): what failed together would otherwise be tried together."""
    soon_seconds: float = 3.0
    """When a piece takes less, its donor is asked for one more at a time. A chunk that has the way for
    itself takes about six round trips, whatever the link carries."""
    late_seconds: float = 6.0
    """When a piece takes longer, its donor is asked for one less at a time: the link is full, or others
    fetch from it too."""
    overdue_seconds: float = 10.0
    """A piece that takes longer, and much longer than those that came, is asked of another donor too, once
    nothing else is left to ask for."""
    silent_seconds: float = 1.0
    """A donor that is asked and of which nothing comes for longer, and for some round trips, is silent. A
    slow donor sends a few kilobytes several times a second, so only bytes count and not pieces."""
    asked_last_seconds: float = 600.0
    """How long a silent donor is asked only where nobody else is left, unless something comes from it."""
    fetch_seconds: float = 60.0
    """A fetch may take so long, and what its bytes take at SLOWEST_BYTES_PER_SECOND."""
    pause_seconds: float = 1.0
    """Between the first two times of asking everybody; later ones are longer."""
    settle_seconds: float = 120.0
    """How long a snapshot may wait to be fetched until the swarm has agreed on its round's digest."""
    recruit_seconds: float = 15.0
    """How often more donors are looked for while there are too few."""
    distrust_seconds: float = 600.0
    """How long a donor that lied is not asked again. It may have been its memory that lied."""

    def for_fetch_of(self, num_bytes: int) -> float:
        """How long the fetch of a piece of so many bytes may take."""
        return self.fetch_seconds + num_bytes / SLOWEST_BYTES_PER_SECOND

    def stretched(self, factor: float) -> "Waits":
        """For links on which everything takes so many times as long."""
        return stretched(self, factor)
