"""The receiver: bodies that come in parts, over several streams, from all senders.

The stream of an offer stays open and carries the verdicts; the parts of all bodies that a peer has
offered come over its other streams. When the offer's stream breaks, what has come is kept for a while, and
a new offer of the same payload goes on from there.

An offer leaves first, but opens a stream for itself, which takes it through libp2p's queue more often
than a part on a stream that is there already. When links are full, parts overtake it: they are kept for a
moment, and little of each sender.

`Receiver` is pure: it is told the time, in seconds of any clock that only rises. What waits stands below it.
"""

import asyncio
import io
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from node.exchange.transport.limits import Limits
from node.exchange.transport.streams import (
    FrameError,
    PartError,
    TransferStream,
    num_parts_of,
    part_bytes_for,
    span_of,
)
from node.exchange.transport.transport import TransferRefusedError, do_nothing
from protocol.payload import PayloadHeader
from protocol.rounds import Digest, NodeId
from protocol.v1 import transfer_pb2 as wire

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
        return body

    def refuse(self, sender: NodeId, digest: Digest) -> None:
        """The offer of a body has come, and nothing of it is taken."""
        self.early.take((sender, digest))

    def end(
        self, sender: NodeId, digest: Digest, body: IncomingBody, *, is_kept: bool, now: float
    ) -> None:
        """Nothing more is taken of it; what broke off is kept for a while."""
        body.end()
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


def forget_in_time(receiver: Receiver, seconds: float) -> None:
    """Has what is kept from now on forgotten after so long."""
    loop = asyncio.get_running_loop()
    loop.call_later(seconds, receiver.expire, loop.time() + seconds)


async def take_parts(stream: TransferStream, sender: NodeId, receiver: Receiver) -> None:
    """Serves one stream: takes parts, of whichever body, until its sender has no more.

    Never waits for an offer: parts of other bodies would wait behind it. Raises FrameError, or
    streams.BROKEN when the sender is gone in the middle of a part.
    """
    limits, dropped_bytes = receiver.limits, 0
    while True:
        try:
            async with asyncio.timeout(limits.at_rest_seconds):
                part = await stream.receive(wire.Part, is_patient=True)
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise
            return  # closed between two parts
        began_at = stream.traffic.clock()
        digest = Digest(part.digest)
        if (body := receiver.find(sender, digest)) is not None:
            dropped_bytes = 0
            await _take_part(stream, body, part, began_at=began_at)
            continue
        if dropped_bytes + part.num_bytes > limits.most_dropped_bytes:
            raise FrameError(
                f"{dropped_bytes + part.num_bytes} bytes of parts that nobody asked for"
            )
        early = await _read_early(stream, part.num_bytes, limits.most_early_part_bytes)
        now = stream.traffic.clock()
        if early is None:
            dropped_bytes += part.num_bytes
            await _answer(stream, part, wire.TRANSFER_STATUS_PART_DROPPED)
        elif (body := receiver.find(sender, digest)) is not None:  # it has come meanwhile
            await _take_part(stream, body, part, began_at=began_at, early=early)
        elif receiver.early.keep((sender, digest), part.index, early, now=now):
            forget_in_time(receiver, limits.early_seconds)
            # Counted with the next part: what kind it is, its offer will say.
            stream.traffic.moved(received_bytes=part.num_bytes, since=began_at)
            await _answer(stream, part, wire.TRANSFER_STATUS_PART_KEPT)
        else:
            dropped_bytes += part.num_bytes
            await _answer(stream, part, wire.TRANSFER_STATUS_PART_DROPPED)


async def _read_early(stream: TransferStream, num_bytes: int, most_bytes: int) -> bytes | None:
    """A part whose offer is not here; None when it is too large to be kept."""
    if num_bytes <= most_bytes:
        return await stream.receive_body(num_bytes)
    async for _ in stream.receive_chunks(num_bytes):
        pass
    return None


async def _take_part(
    stream: TransferStream,
    body: IncomingBody,
    part: wire.Part,
    *,
    began_at: float,
    early: bytes | None = None,
) -> None:
    """Puts a part in its place: from the stream, unless it was read already."""
    try:
        span = body.assembly.begin(part.index)
    except PartError as error:
        raise FrameError(str(error)) from error
    if part.num_bytes != span.stop - span.start:
        raise FrameError(f"part {part.index} has {part.num_bytes} bytes of {span}")
    stream.carries(body.header.kind)
    if early is not None:
        body.assembly.write(span.start, early)
    else:
        offset = span.start
        async for chunk in stream.receive_chunks(part.num_bytes):
            body.assembly.write(offset, chunk)
            body.tell()  # on a slow link a part may take longer than a stream may be idle
            offset += len(chunk)
    body.assembly.end(part.index)
    stream.moved(received_bytes=part.num_bytes, since=began_at)
    body.tell()
    await _answer(stream, part, wire.TRANSFER_STATUS_PART_RECEIVED)


async def _answer(
    stream: TransferStream, part: wire.Part, status: "wire.TransferStatus.ValueType"
) -> None:
    await stream.send(wire.TransferResponse(status=status, part=part.index))


async def complete(
    stream: TransferStream,
    body: IncomingBody,
    *,
    is_wanted: Callable[[], bool],
    idle_seconds: float,
) -> bytes:
    """Waits, at the stream of the offer, until all parts are here; returns the body.

    Raises TimeoutError when nothing comes for so long, EOFError when the sender drops the offer or
    repeats it on another stream, TransferRefusedError when the body is not wanted any more.
    """
    has_moved = asyncio.Event()
    body.tell = has_moved.set
    ended = asyncio.ensure_future(stream.ended())
    moved = asyncio.ensure_future(has_moved.wait())
    try:
        while not body.assembly.is_complete:
            if body.is_over:
                raise EOFError("the payload was offered anew")
            if not is_wanted():
                raise TransferRefusedError("not wanted any more")
            has_moved.clear()
            if moved.done():
                moved = asyncio.ensure_future(has_moved.wait())
            done, _ = await asyncio.wait(
                (ended, moved), timeout=idle_seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                raise TimeoutError(f"nothing came within {idle_seconds:g} s")
            if ended in done and not body.assembly.is_complete:
                raise EOFError("the sender has dropped the offer")
        return body.assembly.body()
    finally:
        ended.cancel()
        moved.cancel()
        # Not by catching CancelledError, which could be our own.
        await asyncio.gather(ended, moved, return_exceptions=True)
