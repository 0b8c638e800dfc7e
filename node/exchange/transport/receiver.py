"""The receiver: who may open one more stream with us, and bodies that come in parts, from all senders.

Peers share the places for streams, take turns, and none takes all of its own. A body needs a place for its
offer, and its sender one for a stream of parts, which is kept free for it. When there are none left, offers
wait in line, first come, first served, and go in one peer after the other: a peer that is in goes on with its
next body. So hundreds of contributors get in without asking again and again.

The stream of an offer stays open and carries the verdicts; the parts of all bodies that a peer has
offered come over its other streams. When the offer's stream breaks, what has come is kept for a while, and
a new offer of the same payload goes on from there.

An offer leaves first, but opens a stream for itself, which takes it through libp2p's queue more often
than a part on a stream that is there already. When links are full, parts overtake it: they are kept for a
moment, and little of each sender.

Nothing here reads a stream or a clock: `Receiver` is told the time, in seconds of any clock that only rises.
node.exchange.transport.serving has the tasks.
"""

import io
from asyncio import Event, Future, get_running_loop
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from node.exchange.peers import Limits, TransferRefusedError, do_nothing
from node.exchange.transport.rates.uplink import LEAD_OF_SENDERS_BYTES, Evenness
from node.exchange.transport.streams import PartError, num_parts_of, part_bytes_for, span_of
from protocol.wire.payload import CONTRIBUTION, PayloadHeader
from protocol.wire.rounds import Digest, NodeId

_PARTS_SHARE = 0.75  # of the places; bodies go on over fewer streams, but an offer must get in

_ENOUGH_STREAMS = 2  # of a peer, when others need the places; a joiner gets on with fewer fetches


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Ticket:
    """An offer that waits in line."""

    peer: str
    is_in_parts: bool
    is_gone: Callable[[], bool]
    turn: Future[None] = field(default_factory=lambda: get_running_loop().create_future())
    """Done when there is a place; raises EOFError when its sender is gone."""


class StreamAdmission:
    """Counts the streams that peers have open with us, by what they are for."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._open: Counter[str] = Counter()  # all of a peer, those that wait included
        # These and all that follow have a place.
        self._offers: Counter[str] = Counter()  # of bodies in parts
        self._wholes: Counter[str] = Counter()  # offers with their bodies
        self._parts: Counter[str] = Counter()
        self._fetches: Counter[str] = Counter()
        self._line: list[_Ticket] = []

    # What a peer may do.

    @contextmanager
    def let_in(self, peer: str) -> Iterator[None]:
        """Counts a stream whose request is read; raises TransferRefusedError when there are too many."""
        limits, total = self._limits, self._open.total()
        if total >= limits.max_streams + limits.max_waiting_streams:
            raise TransferRefusedError(f"busy with {total} transfers; try again later")
        if self._open[peer] >= limits.max_streams_per_peer:
            raise TransferRefusedError(f"busy with {self._open[peer]} transfers of yours already")
        with self._counted(self._open, peer):
            yield

    @asynccontextmanager
    async def offer(
        self, peer: str, *, is_in_parts: bool, is_gone: Callable[[], bool] = lambda: False
    ) -> AsyncIterator[None]:
        """Waits for a place, and holds it; raises EOFError when the peer is gone when its turn comes."""
        ticket = _Ticket(peer=peer, is_in_parts=is_in_parts, is_gone=is_gone)
        self._line.append(ticket)
        self._next_turns()
        try:
            await ticket.turn
            yield
        finally:
            if ticket in self._line:
                self._line.remove(ticket)
            elif not ticket.turn.exception():
                self._leave(self._offers if is_in_parts else self._wholes, peer)

    @contextmanager
    def parts(self, peer: str) -> Iterator[None]:
        """Holds a place for a stream of parts: the first of a peer whose offer is in, or a further one.

        Raises TransferRefusedError when places are wanted for others.
        """
        if self._parts[peer] and self._is_crowded(peer, 1):
            raise TransferRefusedError("busy; go on with the streams that you have")
        if not self._is_kept_for(peer) and (self._line or not self._has_room()):
            raise TransferRefusedError("busy; your parts may come when your offer is answered")
        with self._counted(self._parts, peer):
            yield

    @contextmanager
    def fetch(self, peer: str, *, is_large: bool) -> Iterator[None]:
        """Holds a place for what a peer asks for; raises TransferRefusedError when it has enough."""
        if is_large and self._is_crowded(peer) and self._num_served(peer) >= _ENOUGH_STREAMS:
            raise TransferRefusedError("busy; go on with the transfers that you have")
        if not self._has_room():
            raise TransferRefusedError(f"busy with {self._num_served()} transfers; try again later")
        with self._counted(self._fetches, peer):
            yield

    # Places.

    def _num_served(self, peer: str | None = None) -> int:
        counts = (self._offers, self._wholes, self._parts, self._fetches)
        return sum(count.total() if peer is None else count[peer] for count in counts)

    def _is_crowded(self, peer: str, num_more: int = 0) -> bool:
        """Whether so many places are taken that this peer must leave the rest to others."""
        limits = self._limits
        return (
            self._num_served() + num_more > _PARTS_SHARE * limits.max_streams
            or self._num_served(peer) + num_more > _PARTS_SHARE * limits.max_streams_per_peer
        )

    def _is_kept_for(self, peer: str) -> bool:
        """Whether a place is kept for the parts of an offer that is in."""
        return self._offers[peer] > 0 and not self._parts[peer]

    def _has_room(self, num_more: int = 1) -> bool:
        """Whether there are so many places more, beside those that are kept."""
        num_kept = sum(self._is_kept_for(peer) for peer in self._offers)
        return self._num_served() + num_kept + num_more <= self._limits.max_streams

    def _next_turns(self) -> None:
        """Lets in who may go: first peers that are in already, or their parts would come in vain."""
        if not self._line:
            return
        for ticket in [each for each in self._line if each.is_gone() and not each.turn.done()]:
            self._line.remove(ticket)
            ticket.turn.set_exception(EOFError("the sender has dropped its offer"))
        waiting = [ticket for ticket in self._line if not ticket.turn.done()]  # else: cancelled
        is_full = False
        for ticket in sorted(waiting, key=lambda each: not self._num_served(each.peer)):
            peer = ticket.peer
            # Its stream of parts waits for this offer, and would hold its place in vain.
            is_awaited = ticket.is_in_parts and self._parts[peer] and not self._offers[peer]
            needs_parts = ticket.is_in_parts and not (self._offers[peer] or self._parts[peer])
            is_full = is_full or not self._has_room(1 + needs_parts)
            if is_full and not is_awaited:
                continue
            self._line.remove(ticket)
            counts = self._offers if ticket.is_in_parts else self._wholes
            counts[peer] += 1
            ticket.turn.set_result(None)

    @contextmanager
    def _counted(self, counts: Counter[str], peer: str) -> Iterator[None]:
        counts[peer] += 1
        try:
            yield
        finally:
            self._leave(counts, peer)

    def _leave(self, counts: Counter[str], peer: str) -> None:
        counts[peer] -= 1
        if not counts[peer]:
            del counts[peer]
        self._next_turns()


MOST_KEPT_FROM_ONE = 2
"""Bodies of one sender that are kept when they broke off."""

_OVERHEAD_BYTES = 1024  # so that a sender of empty parts fills its room too

Key = tuple[NodeId, Digest]
"""A body: its sender, and the digest of the payload."""


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


@dataclass(eq=False, slots=True, kw_only=True)
class IncomingBody:
    """A body on its way to us, in parts."""

    header: PayloadHeader
    assembly: Assembly
    is_over: bool = False
    """It takes nothing more."""
    tell: Callable[[], None] = do_nothing
    """Called when bytes came, and when it is over: the stream of its offer waits for that."""

    def end(self) -> None:
        """Takes nothing more."""
        self.is_over = True
        self.tell()


@dataclass(slots=True, kw_only=True)
class _Early:
    """Parts of one body whose offer is not here."""

    until: float
    parts: dict[int, bytes] = field(default_factory=dict)


class EarlyParts:
    """Keeps parts until their body is offered, by their sender and the digest of their payload."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._bodies: dict[Key, _Early] = {}
        self._num_bytes: Counter[NodeId] = Counter()

    def keep(self, key: Key, index: int, content: bytes, *, now: float) -> bool:
        """Keeps a part; False when there is no room for it."""
        if (body := self._bodies.get(key)) is not None and index in body.parts:
            return True  # once is enough
        (sender, digest), limits = key, self._limits
        size = _size(digest, content)
        if (
            self._num_bytes[sender] + size > limits.most_early_bytes
            or self._num_bytes.total() + size > limits.most_early_bytes_of_all
        ):
            return False
        if body is None:
            body = self._bodies[key] = _Early(until=now + limits.early_seconds)
        self._num_bytes[sender] += size
        body.parts[index] = content
        return True

    def take(self, key: Key) -> dict[int, bytes]:
        """What is kept of a body, by its place; nothing is kept of it any more."""
        if (body := self._bodies.pop(key, None)) is None:
            return {}
        sender, digest = key
        self._num_bytes[sender] -= sum(_size(digest, part) for part in body.parts.values())
        if not self._num_bytes[sender]:
            del self._num_bytes[sender]
        return body.parts

    def expire(self, now: float) -> None:
        """Forgets what was kept for its time."""
        for key in [key for key, body in self._bodies.items() if body.until <= now]:
            self.take(key)


class Receiver:
    """The bodies in parts that are on their way to us, those that broke off and are kept, and early parts."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.early = EarlyParts(limits)
        self.evenness = Evenness(LEAD_OF_SENDERS_BYTES)
        """Of those that contribute."""
        self.news = Event()
        """Set, and another one made, when somebody has got on."""
        self._open: dict[Key, IncomingBody] = {}
        self._kept: dict[Key, tuple[Assembly, float]] = {}  # until then, the oldest first

    def begin(
        self, sender: NodeId, header: PayloadHeader, digest: Digest, part_bytes: int
    ) -> IncomingBody:
        """Makes room for an admitted body, or goes on with what is here of it. Raises PartError."""
        key = (sender, digest)
        if (before := self._open.pop(key, None)) is not None:
            # The sender knows that its stream is dead, and we do not yet.
            before.end()
            assembly = before.assembly
        elif key in self._kept:
            assembly, _ = self._kept.pop(key)
        else:
            assembly = Assembly(body_bytes=header.body_bytes, part_bytes=part_bytes)
        for index, content in self.early.take(key).items():
            assembly.put(index, content)
        body = self._open[key] = IncomingBody(header=header, assembly=assembly)
        if header.kind == CONTRIBUTION:
            self.evenness.begin(sender, header.round)
        return body

    def refuse(self, sender: NodeId, digest: Digest) -> None:
        """The offer of a body has come, and nothing of it is taken."""
        self.early.take((sender, digest))

    def end(
        self, sender: NodeId, digest: Digest, body: IncomingBody, *, is_kept: bool, now: float
    ) -> None:
        """Nothing more is taken of it; what broke off is kept for a while."""
        body.end()
        if body.header.kind == CONTRIBUTION:
            self.evenness.end(sender)
            self._tell()
        key = (sender, digest)
        if self._open.get(key) is not body:
            return  # another offer goes on with it
        del self._open[key]
        if not is_kept or not body.assembly.held:
            return
        others = [kept for kept in self._kept if kept[0] == sender]
        for oldest in others[: len(others) - MOST_KEPT_FROM_ONE + 1]:
            del self._kept[oldest]
        self._kept[key] = (body.assembly, now + self.limits.kept_seconds)

    def moved(self, sender: NodeId, header: PayloadHeader, num_bytes: int) -> None:
        """So much more has come of a body in parts."""
        if header.kind == CONTRIBUTION:
            self.evenness.moved(sender, header.round, num_bytes)
            self._tell()

    def _tell(self) -> None:
        self.news.set()
        self.news = Event()

    def find(self, sender: NodeId, digest: Digest) -> IncomingBody | None:
        """The body that a part belongs to; None when none is taken that has this digest."""
        return self._open.get((sender, digest))

    def expire(self, now: float) -> None:
        """Forgets what was kept for its time."""
        self.early.expire(now)
        self._kept = {key: kept for key, kept in self._kept.items() if kept[1] > now}

    def clear(self) -> None:
        """Forgets all that is kept."""
        self.expire(float("inf"))


def _size(digest: Digest, content: bytes) -> int:
    return len(content) + len(digest) + _OVERHEAD_BYTES
