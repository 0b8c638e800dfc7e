"""What is pushed to one peer, piece by piece: a body, how much may be under way, and over how many streams.

Pure, as node.exchange.transport.sender, which puts these together.
"""

import math
from collections import deque
from collections.abc import Iterable

from node.exchange.peers import WINDOW_BYTES, Limits
from node.exchange.transport.streams import (
    WHOLE_BYTES,
    held_in,
    num_parts_of,
    part_bytes_for,
    span_of,
)

FIRST_BYTES_PER_SECOND = 12.5e6
"""What a link is thought to carry before anything is known of it."""

BOTH_WAYS = 2.0
"""When a link is full in both directions, acknowledgements wait behind what goes the same way as they
do, and a round trip takes so many times longer than the offer's did."""

FIRST_WINDOW_BYTES = 2 * WHOLE_BYTES
"""Under way to a peer at first: more than TCP's own first windows are."""

ROUND_TRIPS_IN_WINDOW = 2
"""What was answered in so many round trips may be under way besides: TCP never waits for us."""

_GAIN = 1.1  # a stream more must have brought this for yet another one


class OutgoingBody:
    """One body for a peer.

    Each part waits, or is under way, or is acknowledged, or is kept early by the receiver. Small bodies go
    whole, on the stream of their offer, and have no parts.
    """

    def __init__(
        self, num_bytes: int, *, even_in: int | None = None, is_prompt: bool = False
    ) -> None:
        self.num_bytes = num_bytes
        self.is_prompt = is_prompt
        """Whether it is waited for before any later one is."""
        self.even_in = even_in
        """The round in which all peers are to get on equally; None: each goes as fast as it can."""
        self.part_bytes = part_bytes_for(num_bytes) if num_bytes >= WHOLE_BYTES else 0
        """Of each part but the last; 0: the body goes whole."""
        num_parts = num_parts_of(num_bytes, self.part_bytes) if self.part_bytes else 0
        self.missing = set(range(num_parts))
        """Parts that the receiver has not acknowledged: those that wait are among them."""
        self.has_passed = False
        """Whether the next body may begin: nothing waited here at least once. It stays so."""
        self._waiting = deque(range(num_parts))  # on no stream; what was given back is first
        self._held: frozenset[int] | None = None  # by the receiver, when it accepted the offer
        self._kept: set[int] = set()  # by the receiver for the offer; empty once that is accepted
        self._is_held_up = False  # until the offer is accepted: parts would be dropped

    @property
    def is_accepted(self) -> bool:
        """Whether the receiver has accepted the offer."""
        return self._held is not None

    @property
    def num_waiting(self) -> int:
        """Parts that no stream carries, and one may."""
        return 0 if self._is_held_up else len(self._waiting)

    def span(self, index: int) -> slice:
        """Where a part lies in the body; raises PartError when there is no such part."""
        return span_of(index, self.num_bytes, self.part_bytes)

    def take(self) -> int | None:
        """The next part to send, which is under way from now on; None when none may go."""
        if self._is_held_up or not self._waiting:
            return None
        index = self._waiting.popleft()
        self.has_passed |= not self._waiting
        return index

    def accept(self, held_map: bytes) -> None:
        """The offer was accepted; the receiver has these parts of an earlier one.

        Some of them may be under way once more. What it kept for the offer it may have no more.
        """
        self._held, kept = held_in(held_map), self._kept
        self._kept, self._is_held_up = set(), False
        self.missing -= self._held
        self._waiting = deque(index for index in self._waiting if index in self.missing)
        self.give_back(kept)
        self.has_passed |= not self._waiting

    def acknowledge(self, index: int) -> int:
        """The receiver has a part; returns how many bytes more it has than before."""
        span = self.span(index)
        if index not in self.missing:
            return 0
        self.missing.discard(index)
        return int(span.stop - span.start)

    def keep(self, index: int) -> int:
        """The receiver has a part whose offer it had not; returns how many bytes that are."""
        if self._held is None:
            self._kept.add(index)
        elif index not in self._held:
            self.give_back([index])
        span = self.span(index)
        return int(span.stop - span.start)

    def drop(self, index: int) -> None:
        """The receiver did not take a part.

        Unless the offer was answered, the part came before it, and there was no room for it: then
        all of them wait for that answer, and other bodies do not.
        """
        if self._held is None:
            self._is_held_up = self.has_passed = True
        self.give_back([index])

    def give_back(self, indices: Iterable[int]) -> None:
        """These did not get through: what was not acknowledged goes first now."""
        self._waiting.extendleft(sorted(self.missing.intersection(indices), reverse=True))


class Window:
    """How many bytes may be under way to one peer.

    p2pd takes megabytes off us, whatever the link carries. All of it is lost with the connection,
    which p2pd gives up when nothing gets through for some seconds, and what is small waits behind it.
    The room grows as TCP's window does: each answered part lets two more go. It stays over a pause.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._memory_seconds = limits.window_seconds
        self._num_bytes = 0
        self._lately: deque[tuple[float, int]] = deque()  # when so much was answered
        self._lately_bytes = 0
        self._busy_seconds = 0.0  # until it was empty last
        self._busy_since = 0.0

    def goes_round_in(self, seconds: float) -> None:
        """A few bytes to the peer and back take so long."""
        self._memory_seconds = max(self._limits.window_seconds, ROUND_TRIPS_IN_WINDOW * seconds)

    def begin(self, num_bytes: int, *, now: float) -> None:
        """So much is sent."""
        if not self._num_bytes:
            self._busy_since = now
        self._num_bytes += num_bytes

    def end(self, num_bytes: int, *, now: float, is_answered: bool = False) -> None:
        """So much is not under way any more: it was answered, or lost with its stream."""
        time = self._time(now)
        self._num_bytes -= num_bytes
        if not self._num_bytes:
            self._busy_seconds = time
        if is_answered:
            self._lately.append((time, num_bytes))
            self._lately_bytes += num_bytes

    def has_room(self, now: float, *, share: float = 1.0) -> bool:
        """Whether one part more may go, where only such a share of the first window is taken."""
        time = self._time(now)
        while self._lately and self._lately[0][0] <= time - self._memory_seconds:
            self._lately_bytes -= self._lately.popleft()[1]
        return self._num_bytes < share * FIRST_WINDOW_BYTES + self._lately_bytes

    def _time(self, now: float) -> float:
        """It stands still while nothing is under way: nothing can be answered then."""
        return self._busy_seconds + (now - self._busy_since if self._num_bytes else 0.0)


def first_streams(
    *,
    round_trip_seconds: float,
    num_others: int,
    bytes_per_second: float | None = None,
    most: int,
) -> int:
    """How many streams a body begins with.

    So many that their windows fill the link, `bytes_per_second` or what links are thought to carry,
    of which as many other uploads as are under way take their share. One where the way is short.
    """
    rate = FIRST_BYTES_PER_SECOND if bytes_per_second is None else bytes_per_second
    needed = math.ceil(BOTH_WAYS * rate * round_trip_seconds / WINDOW_BYTES / (1 + num_others))
    return max(1, min(needed, most))


class Widening:
    """Whether one stream more pays, told from time to time how many bytes were acknowledged.

    Streams are added as long as each brings a tenth more than there was before it. A transfer that
    was slowed by others stops growing, and its share is its streams'.
    """

    def __init__(self, limits: Limits, *, now: float) -> None:
        self._look_seconds = limits.widen_seconds
        self._since = now
        self._bytes_then = 0
        self._best = 0.0  # bytes per second
        self._is_over = False

    def is_wider_better(self, acknowledged_bytes: int, now: float) -> bool:
        """Whether to open another stream now; never twice within `Limits.widen_seconds`."""
        if self._is_over or now < self._since + self._look_seconds:
            return False
        rate = (acknowledged_bytes - self._bytes_then) / (now - self._since)
        self._since, self._bytes_then = now, acknowledged_bytes
        if rate < _GAIN * self._best:
            self._is_over = True
            return False
        self._best = rate
        return True
