"""A large body in parts: what is here of it, what is still to be sent, and over how many streams.

Pure: no streams, no waiting, no clock. node.exchange.transport.conveyor and inbound move the parts.
"""

import io
import math
from collections import deque
from collections.abc import Iterable

WINDOW_BYTES = 256 * 1024
"""What one fresh stream lets be under way, before libp2p widens its window (go-yamux)."""

PARTS_IN_WINDOW = 2

LEAST_PART_BYTES = WINDOW_BYTES // PARTS_IN_WINDOW - 2048
"""A part is sent again when its stream breaks, and acknowledged alone: small against a body, large
against the acknowledgement. Two fit into a fresh stream's window, with all that is said around them:
for the last few bytes it would otherwise wait a round trip."""

MOST_PARTS = 16_384
"""A larger body has larger parts, so that the map of the parts that are here fits into a frame."""

STRIPED_BYTES = PARTS_IN_WINDOW * LEAST_PART_BYTES
"""Smaller bodies follow their offer on its stream."""

MOST_STREAMS = 8
"""For one body. More brought nothing on any link that we measured (docs/decisions.md)."""

FIRST_BYTES_PER_SECOND = 12.5e6
"""What a link is thought to carry before anything is known of it."""

FIRST_ROUND_TRIP_SECONDS = 0.1
"""What a round trip is thought to take before an offer was answered."""

BOTH_WAYS = 2.0
"""When a link is full in both directions, acknowledgements wait behind what goes the same way as they
do, and a round trip takes so many times longer than the offer's did."""

WIDEN_SECONDS = 0.5
"""How often it is looked at whether another stream pays."""

FIRST_FLIGHT_BYTES = 2 * STRIPED_BYTES
"""Under way to a peer at first: more than TCP's own first windows are."""

FLIGHT_SECONDS = 3.0
"""What a peer acknowledged in so long, pauses apart, may be under way to it besides: more than a round trip
takes."""

_GAIN = 1.1  # a stream more must have brought this for yet another one


class PartError(Exception):
    """The other side sends parts that cannot be."""


def part_bytes_for(body_bytes: int) -> int:
    """The size of the parts of a body."""
    return max(LEAST_PART_BYTES, -(-body_bytes // MOST_PARTS))


def num_parts_of(body_bytes: int, part_bytes: int) -> int:
    """How many parts a body has."""
    return -(-body_bytes // part_bytes)


def span_of(index: int, body_bytes: int, part_bytes: int) -> slice:
    """Where a part lies in the body; raises PartError when there is no such part."""
    if not 0 <= index < num_parts_of(body_bytes, part_bytes):
        raise PartError(f"no part {index} in a body of {body_bytes} bytes in parts of {part_bytes}")
    start = index * part_bytes
    return slice(start, min(start + part_bytes, body_bytes))


class Assembly:
    """A body at its receiver, as its parts come in: in any order, some of them twice.

    Make it only for a header that was admitted: that much is allocated. Raises PartError for a part
    size that no honest sender has.
    """

    def __init__(self, *, body_bytes: int, part_bytes: int) -> None:
        if part_bytes != part_bytes_for(body_bytes):
            raise PartError(
                f"parts of {part_bytes} bytes for a body of {body_bytes}; "
                f"they have {part_bytes_for(body_bytes)}"
            )
        self.body_bytes = body_bytes
        self.part_bytes = part_bytes
        self.held: set[int] = set()
        self._num_taken_bytes = 0
        # BytesIO over a fresh bytes object copies it neither at a write nor at getvalue(): a body
        # is in memory once. The zero pages are only taken as data arrives. What is written after
        # getvalue() goes to a copy, so a late part cannot change a body that was verified.
        self._body = io.BytesIO(bytes(body_bytes))

    @property
    def is_complete(self) -> bool:
        """Whether all parts are here."""
        return len(self.held) == num_parts_of(self.body_bytes, self.part_bytes)

    def begin(self, index: int) -> slice:
        """Where a part belongs that is about to come. Raises PartError when it cannot be taken.

        A part may come twice, when its sender takes a stalled stream for a dead one; but not the
        whole body over and over again.
        """
        span = span_of(index, self.body_bytes, self.part_bytes)
        self._num_taken_bytes += span.stop - span.start
        if self._num_taken_bytes > 3 * self.body_bytes:
            raise PartError(f"sent {self._num_taken_bytes} bytes of a body of {self.body_bytes}")
        return span

    def write(self, offset: int, chunk: bytes) -> None:
        """Puts bytes in their place, within a span that `begin` gave."""
        self._body.seek(offset)
        self._body.write(chunk)

    def end(self, index: int) -> None:
        """A part has come whole."""
        self.held.add(index)

    def put(self, index: int, content: bytes) -> None:
        """Takes a part that came before its body was admitted; not one that cannot be."""
        try:
            span = self.begin(index)
        except PartError:
            return
        if len(content) == span.stop - span.start:
            self.write(span.start, content)
            self.end(index)

    def body(self) -> bytes:
        """The body, once complete."""
        return self._body.getvalue()

    def held_map(self) -> bytes:
        """The parts that are here: bit i % 8 of byte i / 8 is part i; empty when there are none."""
        if not self.held:
            return b""
        bits = bytearray(-(-num_parts_of(self.body_bytes, self.part_bytes) // 8))
        for index in self.held:
            bits[index // 8] |= 1 << index % 8
        return bytes(bits)


def held_in(held_map: bytes) -> frozenset[int]:
    """The parts that a map names; what it names beyond the body does not matter."""
    return frozenset(
        8 * place + bit
        for place, byte in enumerate(held_map)
        for bit in range(8)
        if byte >> bit & 1
    )


class Outgoing:
    """The parts of a body at its sender: which are still to be sent, which are under way."""

    def __init__(self, *, body_bytes: int) -> None:
        self.body_bytes = body_bytes
        self.part_bytes = part_bytes_for(body_bytes)
        self._missing = set(range(num_parts_of(body_bytes, self.part_bytes)))
        self._waiting = deque(sorted(self._missing))

    @property
    def is_complete(self) -> bool:
        """Whether the receiver has acknowledged all parts."""
        return not self._missing

    @property
    def num_waiting(self) -> int:
        """Parts that no stream carries."""
        return len(self._waiting)

    def take(self) -> int | None:
        """The next part to send, which counts as under way from now on; None when none waits."""
        return self._waiting.popleft() if self._waiting else None

    def span(self, index: int) -> slice:
        """Where a part lies in the body."""
        return span_of(index, self.body_bytes, self.part_bytes)

    def acknowledge(self, index: int) -> int:
        """The receiver has a part; returns how many bytes more it has than before."""
        span = self.span(index)
        if index not in self._missing:
            return 0
        self._missing.discard(index)
        return int(span.stop - span.start)

    def skip(self, held: Iterable[int]) -> None:
        """The receiver has these already: those that still wait are not sent."""
        self._missing.difference_update(held)
        self._waiting = deque(index for index in self._waiting if index in self._missing)

    def give_back(self, indices: Iterable[int]) -> None:
        """The stream that carried these is broken: what was not acknowledged goes first now."""
        self._waiting.extendleft(sorted(self._missing.intersection(indices), reverse=True))


def first_streams(
    *,
    round_trip_seconds: float,
    num_others: int,
    bytes_per_second: float | None = None,
    most: int = MOST_STREAMS,
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

    def __init__(self, *, now: float) -> None:
        self._since = now
        self._bytes_then = 0
        self._best = 0.0  # bytes per second
        self._is_over = False

    def is_wider_better(self, acknowledged_bytes: int, now: float) -> bool:
        """Whether to open another stream now; never twice within WIDEN_SECONDS."""
        if self._is_over or now < self._since + WIDEN_SECONDS:
            return False
        rate = (acknowledged_bytes - self._bytes_then) / (now - self._since)
        self._since, self._bytes_then = now, acknowledged_bytes
        if rate < _GAIN * self._best:
            self._is_over = True
            return False
        self._best = rate
        return True


class Flight:
    """How many bytes may be under way to one peer.

    p2pd takes megabytes off us, whatever the link carries. All of it is lost with the connection,
    which p2pd gives up when nothing gets through for some seconds, and what is small waits behind it.
    The room grows as TCP's window does: each answered part lets two more go. It stays over a pause.
    """

    def __init__(self) -> None:
        self._num_bytes = 0
        self._lately: deque[tuple[float, int]] = deque()  # when so much was answered
        self._lately_bytes = 0
        self._busy_seconds = 0.0  # until it was empty last
        self._busy_since = 0.0

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

    def has_room(self, now: float) -> bool:
        """Whether one part more may go."""
        time = self._time(now)
        while self._lately and self._lately[0][0] <= time - FLIGHT_SECONDS:
            self._lately_bytes -= self._lately.popleft()[1]
        return self._num_bytes < FIRST_FLIGHT_BYTES + self._lately_bytes

    def _time(self, now: float) -> float:
        """It stands still while nothing is under way: nothing can be answered then."""
        return self._busy_seconds + (now - self._busy_since if self._num_bytes else 0.0)
