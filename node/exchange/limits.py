"""What a node lets its peers take, how long it waits for what, and how it pauses before it asks again.

Limits and waits are two values, passed in. Sizes and shares that no link changes stand with the controller
that they belong to.
"""

import asyncio
import contextlib
import random
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


Value = TypeVar("Value", bound="DataclassInstance")

WINDOW_BYTES = 256 * 1024
"""What one fresh stream lets be under way, before libp2p widens its window (go-yamux)."""

PARTS_IN_WINDOW = 2

LEAST_PART_BYTES = WINDOW_BYTES // PARTS_IN_WINDOW - 2048
"""A part is sent again when its stream breaks, and acknowledged alone: small against a body, large
against the acknowledgement. Two fit into a fresh stream's window, with all that is said around them:
for the last few bytes it would otherwise wait a round trip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one node's transport.

    Raise `idle_seconds` when links stall for longer without being dead, and lower
    `floor_bytes_per_second` when honest peers are slower still: many streams share an uplink. A body
    in parts takes nine streams at most, and gives way to other transfers when most are taken.
    """

    # What peers may take.
    floor_bytes_per_second: float = 2048.0
    ahead_seconds: float = 1.0
    """Whoever is ahead of others waits so long for them, before each part, at most."""
    max_streams_per_peer: int = 24
    max_streams: int = 128
    """That are served at once: 64 contributors with a body in parts each."""
    max_waiting_streams: int = 1024
    """Offers in line besides, and streams whose request is being read."""
    max_streams_per_body: int = 8
    """More brought nothing on any link that we measured (docs/decisions.md)."""
    most_early_bytes: int = 4 << 20
    """Parts of one sender that are kept for their offer: a third of a second at 100 Mbit/s."""
    most_early_bytes_of_all: int = 32 << 20
    most_early_part_bytes: int = LEAST_PART_BYTES
    """A larger part is not kept for its offer."""
    most_dropped_bytes: int = 256 << 20
    """Of one stream, one after the other: more that nobody asked for ends it."""

    # Streams.
    idle_seconds: float = 30.0
    """A stream that does not get on for so long is given up."""
    early_seconds: float = 5.0
    """How long parts are kept for an offer; it should come within a few round trips."""
    kept_seconds: float = 60.0
    """How long the parts of a body that broke off are kept for its sender to come back."""
    unused_seconds: float = 600.0
    """A sender closes a stream that had nothing to carry for so long: longer than most pauses of rounds."""
    at_rest_seconds: float = 1200.0
    """A receiver gives up a stream that had nothing to carry for so long."""

    # The sender.
    first_round_trip_seconds: float = 0.1
    """What a round trip is thought to take before an offer was answered."""
    widen_seconds: float = 0.5
    """How often it is looked at whether another stream pays."""
    window_seconds: float = 0.5
    """What a peer acknowledged in so long, or in two round trips, may be under way to it besides; pauses do
    not count."""

    # Connections.
    look_seconds: float = 10.0
    """How often it is looked at who is connected."""
    silent_seconds: float = 3.0
    """A connection whose other end acknowledges nothing for so long is given up, and dialled anew: a
    router between has forgotten it. At rest it is asked as often. The kernel must let us (TcpPacing)."""
    restless_seconds: float = 10.0
    """For so long after a node has moved it is looked more often, and who is missing is dialled at once."""
    restless_look_seconds: float = 0.5
    yield_seconds: float = 3.0
    """Of two members one dials first; both at once make a connection too many."""
    unreachable_seconds: float = 10.0
    """A member that is away for so long is told of; one that cannot be dialled dials us meanwhile."""
    first_redial_seconds: float = 2.0
    last_redial_seconds: float = 60.0
    """A member that is away is dialled ever less often, so often in the end."""
    knock_seconds: float = 10.0
    """An address that does not answer within so long is not dialled."""
    dial_seconds: float = 20.0

    # Connections through home routers.
    punch_seconds: float = 10.0
    """A dial by QUIC that meets the other's; p2pd gives it up after 5 s."""
    punched_look_seconds: float = 2.0
    """How often it is looked at who is connected that way."""

    # Rates: what the uplink carries.
    measured_seconds: float = 0.5
    """A busy time that is shorter, and of few bytes, says more of round trips than of the link."""
    burst_seconds: float = 0.05
    """What may leave at once, in seconds of the rate: so long a heartbeat may wait behind a chunk."""
    epoch_seconds: float = 0.2
    """So often it is looked at how answers come."""
    queue_seconds: float = 0.06
    """What the quickest answer of an epoch may take longer than the quickest of all lately. Less finds a
    queue where data only waits for data that goes the other way; LEDBAT++ allows as much."""
    lasting_seconds: float = 3.0
    """So long nothing is paced above TCP where the kernel paces: most exchanges are over then."""

    # Rates: the kernel's part.
    tcp_look_seconds: float = 0.0125
    """So often connections are looked at while something is sent, if that takes little of a core."""
    tcp_new_seconds: float = 1.0
    """So often it is looked for new connections meanwhile."""
    tcp_pause_seconds: float = 0.25
    """When nothing was sent for so long a busy time is over."""
    tcp_quiet_seconds: float = 0.5
    """After so long without anything to send nobody looks any more."""

    def stretched(self, factor: float) -> "Limits":
        """For links on which everything takes so many times as long."""
        return stretched(self, factor)


def stretched(waits: Value, factor: float) -> Value:
    """With all that is in seconds so many times as long."""
    names = [field.name for field in fields(waits) if field.name.endswith("_seconds")]
    return replace(waits, **{name: factor * getattr(waits, name) for name in names})


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


LONGEST_PAUSE_SECONDS = 60.0
"""Between two times of asking everybody, if there are no news."""


class Patience:
    """Pauses that double, with jitter, so that nodes that wait together do not ask together.

    News from the coordinator ends a pause at once: somebody may have come who supplies what is missing.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._news = asyncio.Event()

    def tell(self) -> None:
        """The coordinator has told something. Heard by the next pause, if there is none now."""
        self._news.set()

    async def pause(self, asked: int, *, first_seconds: float) -> None:
        """Waits after everybody was asked for the `asked`-th time in vain."""
        longest = min(LONGEST_PAUSE_SECONDS, first_seconds * 2.0 ** min(asked - 1, 10))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._rng.uniform(longest / 2, longest)):
                await self._news.wait()
        self._news.clear()
