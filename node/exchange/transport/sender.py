"""The sender: the whole state of what is pushed to one peer, and what follows from each event.

A round's bodies for a peer are wanted one by one: the first is reduced while the second travels. Sent
side by side they would all arrive at the end; sent each when the one before has arrived, the link
would lie idle for a round trip between two of them. Here each stream takes the next part of the first
body that has one left, so the link is never idle and the bodies arrive in order.

One libp2p stream fills its window and waits for a round trip; several fill the link. Each part is
acknowledged. When a stream breaks, its parts go over another one. Between two rounds a few of them stay
open, at rest: libp2p has widened their windows by then, and a new one would begin with a narrow one.

First a body and a stream, then PeerSender, which has all of them. How much may be under way, and over how
many streams, rates/uplink.py says. Pure: no streams, no waiting, no clock. Events come in with the time, in
seconds of any clock that only rises, and actions go out; node.exchange.transport.sending carries them out.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from node.exchange.peers import PARTS_IN_WINDOW, Limits, TransferRefusedError
from node.exchange.transport.rates.uplink import Evenness, UnderWay, Uplink, Widening, Window
from node.exchange.transport.streams import (
    WHOLE_BYTES,
    held_in,
    num_parts_of,
    part_bytes_for,
    span_of,
)

SHARE_OF_PROMPT = 1 / 2
"""Of the first window, for bodies that are waited for one by one: what libp2p has of several it sends side by
side, and the first would be there when the last is."""

MOST_BODIES = 8
"""On their way to one peer at once, however small: each waits for its verdict on a stream of its own,
and a peer lets only so many in (Limits.max_streams_per_peer)."""

MOST_BREAKS = 3
"""Streams that may break one after the other, without a part getting through, until pushes fail."""

WORTH_KEEPING = 8
"""Parts that a stream has carried when it stays open over a pause: libp2p widens a window that is used up
several times. One that is not may be only half free in the next round, and a fresh one is better."""

_LENGTHENING = 1.25  # by which a round trip may be longer than the one that was known before


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
        self.has_arrived = False
        """Whether the peer has all of it: answers to some parts may still be on their streams."""
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

    def acknowledge(self, index: int) -> bool:
        """The receiver has a part; returns whether it had not said so before."""
        is_new = index in self.missing
        self.missing.discard(index)
        return is_new

    def keep(self, index: int) -> None:
        """The receiver has a part whose offer it had not."""
        if self._held is None:
            self._kept.add(index)
        elif index not in self._held:
            self.give_back([index])

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SentPart:
    """A part on its way over a stream."""

    body: OutgoingBody
    index: int
    span: slice  # of the body
    sent_at: float
    under_way: UnderWay  # what the uplink's estimate learns from it

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return int(self.span.stop - self.span.start)


@dataclass(slots=True, eq=False)
class PartStream:
    """One of the streams that parts go over."""

    under_way: deque[SentPart] = field(default_factory=deque)
    """In the order of their answers; its last one may not be out yet."""
    is_open: bool = False
    is_writing: bool = False
    """A part is handed over to libp2p, which takes it when it has room."""
    is_wide: bool = False
    """Its window has opened at least once, and libp2p doubles it each time."""
    num_carried: int = 0  # parts that arrived
    answered_at: float = -math.inf
    """When the part before was counted, which the next one waited for."""

    @property
    def is_ready(self) -> bool:
        """Whether it may take a part: one more than its window has room for would wait in it."""
        has_room = self.is_wide or len(self.under_way) < PARTS_IN_WINDOW
        return self.is_open and not self.is_writing and has_room


class PeerState(StrEnum):
    """What a sender is at."""

    AT_REST = "at rest"  # there is no body, and the streams that are open carry nothing
    PROBING = "probing"  # nothing was acknowledged since the first of these bodies came
    STREAMING = "streaming"  # parts go out, and are acknowledged
    WAITING = "waiting for answers"  # all that may go is out
    IN_LINE = "in line"  # the peer takes no parts before it has answered an offer
    BREAKING = "breaking"  # streams broke since a part got through


@dataclass(frozen=True, slots=True)
class Begin:
    """Offer this body, on a stream of its own."""

    body: OutgoingBody


@dataclass(frozen=True, slots=True)
class Open:
    """Open this stream for parts."""

    stream: PartStream


@dataclass(frozen=True, slots=True)
class Carry:
    """Send this part over a stream."""

    stream: PartStream
    part: SentPart


@dataclass(frozen=True, slots=True)
class Close:
    """End this stream."""

    stream: PartStream


@dataclass(frozen=True, slots=True)
class Fail:
    """Give this body up."""

    body: OutgoingBody
    error: Exception


Action = Begin | Open | Carry | Close | Fail


class PeerSender:
    """Of one peer. Each event returns what is to be done, in that order."""

    def __init__(self, limits: Limits, uplink: Uplink, evenness: Evenness) -> None:
        """`evenness` is that of all peers."""
        self._held_since: float | None = None
        self._evenness = evenness
        self.streams: list[PartStream] = []
        """Open or being opened, the oldest first; none that was told to close."""
        self._limits = limits
        self._uplink = uplink
        self._window = Window(limits)
        self._round_trip_seconds: float | None = None  # None: no offer was answered yet
        self._line: deque[OutgoingBody] = deque()  # not begun
        self._begun: list[OutgoingBody] = []  # at most MOST_BODIES, the first to begin first
        self._offered: list[OutgoingBody] = []  # of those in parts: their parts may go
        self._latest: OutgoingBody | None = None  # to begin; the next one waits for it to pass
        self._num_streams = 1  # wanted, as long as so many parts wait
        self._widening = Widening(limits, now=0.0)
        self._acknowledged_bytes = 0  # since the first of these bodies came
        self._errors: list[Exception] = []  # of streams that broke since a part got through
        self._is_in_line = False  # no stream of parts is opened until an offer is accepted

    @property
    def round_trip_seconds(self) -> float:
        """Of offers, the shortest lately; a guess before the first."""
        known = self._round_trip_seconds
        return self._limits.first_round_trip_seconds if known is None else known

    @property
    def is_sending(self) -> bool:
        """Whether there are bodies in parts whose parts may go."""
        return bool(self._offered)

    @property
    def is_held(self) -> bool:
        """Whether parts wait for peers that are behind: tell it that time has passed when these get on."""
        return self._held_since is not None

    def state(self) -> PeerState:
        """What it is at now, by its fields: nothing is noted twice."""
        if not self._begun:
            return PeerState.AT_REST
        if self._errors:
            return PeerState.BREAKING
        if self._is_in_line and not self.streams:
            return PeerState.IN_LINE
        is_out = any(stream.under_way for stream in self.streams)
        if is_out and not any(stream.is_writing for stream in self.streams):
            return PeerState.WAITING
        return PeerState.STREAMING if self._acknowledged_bytes else PeerState.PROBING

    # Bodies.

    def add(self, body: OutgoingBody, *, now: float) -> list[Action]:
        """There is a body to push."""
        self._line.append(body)
        return self._next(now)

    def offered(self, body: OutgoingBody, *, num_streams: int, now: float) -> list[Action]:
        """The offer is out. Parts follow at once: nearly every offer is accepted.

        With no other body in parts under way it begins with so many streams.
        """
        if body.part_bytes and not self._offered:
            self._num_streams = num_streams
            self._widening = Widening(self._limits, now=now)
            self._acknowledged_bytes = 0
            self._errors.clear()
            self._is_in_line = False
        if body.part_bytes:
            self._offered.append(body)
            if body.even_in is not None:
                self._evenness.begin(self, body.even_in)
        return self._next(now)

    def accepted(self, body: OutgoingBody, held_map: bytes, *, now: float) -> list[Action]:
        """The peer has accepted the offer, and has these parts already."""
        body.accept(held_map)
        self._is_in_line = False
        return self._next(now)

    def went_out(self, body: OutgoingBody, *, now: float) -> list[Action]:
        """A whole body has left."""
        body.has_passed = True
        return self._next(now)

    def ended(
        self, body: OutgoingBody, *, has_arrived: bool, most_at_rest: int, now: float
    ) -> list[Action]:
        """The peer has it, or it was given up. After the last one some streams stay, at rest."""
        body.has_passed = True
        body.has_arrived = has_arrived
        if body in self._offered and body.even_in is not None:
            self._evenness.end(self)
        for bodies in (self._line, self._begun, self._offered):
            if body in bodies:
                bodies.remove(body)
        actions = [] if self._offered else self._rest(most_at_rest)
        return [*actions, *self._next(now)]

    def went_round_in(self, seconds: float) -> None:
        """An offer was answered. The shortest lately counts: queues come and go, and ways change."""
        if self._is_in_line:
            return  # it says nothing of the way
        known = self._round_trip_seconds
        self._round_trip_seconds = seconds if known is None else min(seconds, _LENGTHENING * known)
        self._uplink.goes_round_in(self, self._round_trip_seconds)
        self._window.goes_round_in(self._round_trip_seconds)

    # Streams.

    def opened(self, stream: PartStream, *, now: float) -> list[Action]:
        """A stream may carry parts."""
        stream.is_open = True
        return self._next(now)

    def wrote(self, stream: PartStream, part: SentPart, *, now: float) -> list[Action]:
        """The part that it was given was handed over; it may have been answered already."""
        stream.is_writing = False
        part.under_way.is_out(now)
        return self._next(now)

    def received(
        self, stream: PartStream, *, now: float, is_kept: bool, is_held: bool = False
    ) -> tuple[int, list[Action]]:
        """The peer has the part that was sent first, or keeps it for its offer: so many bytes.

        Held: it had it before, and has waited with its answer.
        """
        if is_held:
            stream.under_way[0].under_way.lost(now)
        part = self._answered(stream, now)
        num_bytes = part.num_bytes
        if is_kept:
            part.body.keep(part.index)
        elif not part.body.acknowledge(part.index):
            num_bytes = 0
        self._acknowledged_bytes += num_bytes
        if part.body.even_in is not None:
            self._evenness.moved(self, part.body.even_in, num_bytes)
        self._errors.clear()
        return num_bytes, self._next(now)

    def dropped(self, stream: PartStream, *, now: float) -> list[Action]:
        """The peer did not take the part that was sent first."""
        part = self._answered(stream, now)
        part.body.drop(part.index)
        return self._next(now)

    def closed(
        self, stream: PartStream, *, now: float, error: Exception | None = None
    ) -> list[Action]:
        """A stream has ended: it was told to, had nothing to carry for long, or broke."""
        for part in reversed(stream.under_way):
            self._window.end(part.num_bytes, now=now)
            part.under_way.lost(now)
            part.body.give_back([part.index])
        stream.under_way.clear()
        if stream not in self.streams:
            return self._next(now)
        self.streams.remove(stream)
        if isinstance(error, TransferRefusedError) and not any(
            b.is_accepted for b in self._offered
        ):
            self._is_in_line = True  # a full receiver has a line for offers, and none for parts
        elif error is not None:
            self._errors.append(error)
        if len(self._errors) >= MOST_BREAKS and not self.streams:
            failed, self._errors = self._errors[-1], []
            return [Fail(body, failed) for body in self._offered]
        return self._next(now)

    def looked(self, *, now: float, num_streams: int = 1) -> list[Action]:
        """Some time has passed: see `Limits.widen_seconds`. A body would begin with so many streams now.

        That is more than it began with where others have ended meanwhile, and left their shares of the link.
        """
        self._num_streams = max(self._num_streams, num_streams)
        return self._next(now)

    def close(self) -> list[Action]:
        """Nothing more is pushed: ends streams that are at rest."""
        return [] if self._offered else self._rest(0)

    # What follows.

    def _next(self, now: float) -> list[Action]:
        return [*self._carry(now), *self._open(now), *self._begin()]

    def _begin(self) -> list[Action]:
        """The next body begins when all of the one before is on its way."""
        actions: list[Action] = []
        while self._line and len(self._begun) < MOST_BODIES:
            if self._latest is not None and not self._latest.has_passed:
                break
            self._latest = self._line.popleft()
            self._begun.append(self._latest)
            actions.append(Begin(self._latest))
        return actions

    def _open(self, now: float) -> list[Action]:
        """Keeps as many streams open as pay."""
        num_waiting = sum(body.num_waiting for body in self._offered)
        if self._errors:
            self._num_streams = max(1, min(self._num_streams, len(self.streams)))
        elif self._num_streams < min(self._limits.max_streams_per_body, num_waiting):
            self._num_streams += self._widening.is_wider_better(self._acknowledged_bytes, now)
        num_opening = sum(not stream.is_open for stream in self.streams)
        num_missing = min(num_waiting - num_opening, self._num_streams - len(self.streams))
        if num_missing <= 0 or self._is_in_line or not self._has_room(now):
            return []
        new = [PartStream() for _ in range(num_missing)]
        self.streams.extend(new)
        return [Open(stream) for stream in new]

    def _carry(self, now: float) -> list[Action]:
        """Of the streams that are ready one whose window has room takes the next part."""
        actions: list[Action] = []
        while ready := [stream for stream in self.streams if stream.is_ready]:
            if not self._has_room(now):
                break
            stream = min(ready, key=lambda each: len(each.under_way))
            is_opening = not all(each.is_open for each in self.streams)
            if len(stream.under_way) >= PARTS_IN_WINDOW and is_opening:
                break  # it might wait for its window, and others will soon be there
            if (taken := self._take(now)) is None:
                break
            part = self._sent(*taken, now=now)
            stream.under_way.append(part)
            stream.is_writing = True
            actions.append(Carry(stream, part))
        return actions

    def _has_room(self, now: float) -> bool:
        is_prompt = any(body.is_prompt for body in self._offered if body.num_waiting)
        return self._window.has_room(now, share=SHARE_OF_PROMPT if is_prompt else 1.0)

    def _take(self, now: float) -> tuple[OutgoingBody, int] | None:
        for body in self._offered:
            if body.num_waiting and body.even_in is not None and self._waits_for_others(now):
                continue
            if (index := body.take()) is not None:
                return body, index
        return None

    def _waits_for_others(self, now: float) -> bool:
        """Briefly, before each part: they may never get on."""
        if not self._evenness.is_ahead(self):
            self._held_since = None
        elif self._held_since is None:
            self._held_since = now
        elif now - self._held_since >= self._limits.ahead_seconds:
            self._held_since = None
            return False
        return self._held_since is not None

    def _sent(self, body: OutgoingBody, index: int, *, now: float) -> SentPart:
        span = body.span(index)
        num_bytes = span.stop - span.start
        self._window.begin(num_bytes, now=now)
        under_way = self._uplink.begin(self, num_bytes, now=now)
        return SentPart(body=body, index=index, span=span, sent_at=now, under_way=under_way)

    def _answered(self, stream: PartStream, now: float) -> SentPart:
        part = stream.under_way.popleft()
        part.under_way.answered(now)
        self._window.end(part.num_bytes, now=now, is_answered=True)
        stream.is_wide = True
        stream.num_carried += 1
        return part

    def _rest(self, most: int) -> list[Action]:
        """Keeps only streams that are wide, and carry nothing of bodies that were given up."""
        worth = [
            stream
            for stream in self.streams
            if stream.num_carried >= WORTH_KEEPING
            and all(part.body.has_arrived for part in stream.under_way)
        ]
        kept, self.streams = worth[:most], self.streams
        ended = [stream for stream in self.streams if stream not in kept]
        self.streams = kept
        return [Close(stream) for stream in ended]
