"""The receiving end of a conveyor: bodies that come in parts, over several streams (stripes).

The stream of an offer stays open and carries the verdicts; the parts of all bodies that a peer has
offered come over its stripes. When the offer's stream breaks, what has come is kept for a while, and
a new offer of the same payload goes on from there.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from node.exchange.transport.early import EarlyParts
from node.exchange.transport.frames import FrameError, TransferStream
from node.exchange.transport.parts import LEAST_PART_BYTES, Assembly, PartError
from node.exchange.transport.transport import TransferRefusedError
from protocol.payload import PayloadHeader
from protocol.rounds import Digest, NodeId
from protocol.v1 import transfer_pb2 as wire

KEPT_SECONDS = 60.0
"""How long the parts of a body that broke off are kept for its sender to come back."""

MOST_KEPT_FROM_ONE = 2
"""Bodies of one sender that are kept so."""

MOST_DROPPED_BYTES = 256 << 20
"""Of one stripe, one after the other: more that nobody asked for ends it."""

AT_REST_SECONDS = 1200.0
"""So long a stripe may have nothing to carry. Its sender closes it sooner."""


@dataclass(eq=False, kw_only=True)
class Inbound:
    """A body on its way to us, in parts."""

    header: PayloadHeader
    assembly: Assembly
    is_over: bool = False
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when bytes came, and when it is over. Only the offer's stream waits for it."""

    def end(self) -> None:
        """Takes nothing more."""
        self.is_over = True
        self.moved.set()


class Inbounds:
    """The bodies in parts that are on their way to us, and those that broke off and are kept."""

    def __init__(self) -> None:
        self._open: dict[tuple[NodeId, Digest], Inbound] = {}
        self._kept: dict[tuple[NodeId, Digest], tuple[Assembly, asyncio.TimerHandle]] = {}
        self._early = EarlyParts()
        self._stripes: Counter[NodeId] = Counter()

    def begin(self, sender: NodeId, header: PayloadHeader, digest: Digest, size: int) -> Inbound:
        """Makes room for an admitted body, or goes on with what is here of it. Raises PartError."""
        key = (sender, digest)
        if (before := self._open.pop(key, None)) is not None:
            # The sender knows that its stream is dead, and we do not yet.
            before.end()
            assembly = before.assembly
        elif key in self._kept:
            assembly, timer = self._kept.pop(key)
            timer.cancel()
        else:
            assembly = Assembly(body_bytes=header.body_bytes, part_bytes=size)
        for index, content in self._early.take(sender, digest).items():
            assembly.put(index, content)
        inbound = self._open[key] = Inbound(header=header, assembly=assembly)
        return inbound

    def keep_early(self, sender: NodeId, digest: Digest, index: int, content: bytes) -> bool:
        """Keeps a part until its body is offered; False when there is no room for it."""
        return self._early.keep(sender, digest, index, content)

    def refuse(self, sender: NodeId, digest: Digest) -> None:
        """The offer of a body has come, and nothing of it is taken."""
        self._early.take(sender, digest)

    def end(self, sender: NodeId, digest: Digest, inbound: Inbound, *, is_kept: bool) -> None:
        """Nothing more is taken of it; what broke off is kept for a while."""
        inbound.end()
        key = (sender, digest)
        if self._open.get(key) is not inbound:
            return  # another offer goes on with it
        del self._open[key]
        if not is_kept or not inbound.assembly.held:
            return
        others = [kept for kept in self._kept if kept[0] == sender]
        for oldest in others[: len(others) - MOST_KEPT_FROM_ONE + 1]:
            self._forget(oldest)
        timer = asyncio.get_running_loop().call_later(KEPT_SECONDS, self._forget, key)
        self._kept[key] = (inbound.assembly, timer)

    def find(self, sender: NodeId, digest: Digest) -> Inbound | None:
        """The body that a part belongs to; None when none is taken that has this digest."""
        return self._open.get((sender, digest))

    def has_stripe(self, sender: NodeId) -> bool:
        """Whether a sender has a stripe open."""
        return sender in self._stripes

    @contextlib.contextmanager
    def stripe(self, sender: NodeId) -> Iterator[None]:
        """Counts one while it is served."""
        self._stripes[sender] += 1
        try:
            yield
        finally:
            self._stripes[sender] -= 1
            if not self._stripes[sender]:
                del self._stripes[sender]

    def clear(self) -> None:
        """Forgets all of them."""
        self._early.clear()
        for key in list(self._kept):
            self._forget(key)

    def _forget(self, key: tuple[NodeId, Digest]) -> None:
        if (kept := self._kept.pop(key, None)) is not None:
            kept[1].cancel()


async def take_stripe(stream: TransferStream, sender: NodeId, inbounds: Inbounds) -> None:
    """Serves one stripe: takes parts, of whichever body, until its sender has no more.

    Never waits for an offer: parts of other bodies would wait behind it. Raises FrameError, or
    frames.BROKEN when the sender is gone in the middle of a part.
    """
    dropped_bytes = 0
    with inbounds.stripe(sender):
        while True:
            try:
                async with asyncio.timeout(AT_REST_SECONDS):
                    part = await stream.receive(wire.Part, is_patient=True)
            except asyncio.IncompleteReadError as error:
                if error.partial:
                    raise
                return  # closed between two parts
            began_at = stream.tally.now()
            digest = Digest(part.digest)
            if (inbound := inbounds.find(sender, digest)) is not None:
                dropped_bytes = 0
                await _take_part(stream, inbound, part, began_at=began_at)
                continue
            if dropped_bytes + part.num_bytes > MOST_DROPPED_BYTES:
                raise FrameError(
                    f"{dropped_bytes + part.num_bytes} bytes of parts that nobody asked for"
                )
            early = await _read_early(stream, part.num_bytes)
            if early is None:
                dropped_bytes += part.num_bytes
                await _answer(stream, part, wire.TRANSFER_STATUS_PART_DROPPED)
            elif (inbound := inbounds.find(sender, digest)) is not None:  # it has come meanwhile
                await _take_part(stream, inbound, part, began_at=began_at, early=early)
            elif inbounds.keep_early(sender, digest, part.index, early):
                # Counted with the next part: what kind it is, its offer will say.
                stream.tally.moved(received_bytes=part.num_bytes, since=began_at)
                await _answer(stream, part, wire.TRANSFER_STATUS_PART_KEPT)
            else:
                dropped_bytes += part.num_bytes
                await _answer(stream, part, wire.TRANSFER_STATUS_PART_DROPPED)


async def _read_early(stream: TransferStream, num_bytes: int) -> bytes | None:
    """A part whose offer is not here; None when it is too large to be kept."""
    if num_bytes <= LEAST_PART_BYTES:
        return await stream.receive_body(num_bytes)
    async for _ in stream.receive_chunks(num_bytes):
        pass
    return None


async def _take_part(
    stream: TransferStream,
    inbound: Inbound,
    part: wire.Part,
    *,
    began_at: float,
    early: bytes | None = None,
) -> None:
    """Puts a part in its place: from the stream, unless it was read already."""
    try:
        span = inbound.assembly.begin(part.index)
    except PartError as error:
        raise FrameError(str(error)) from error
    if part.num_bytes != span.stop - span.start:
        raise FrameError(f"part {part.index} has {part.num_bytes} bytes of {span}")
    stream.carries(inbound.header.kind)
    if early is not None:
        inbound.assembly.write(span.start, early)
    else:
        offset = span.start
        async for chunk in stream.receive_chunks(part.num_bytes):
            inbound.assembly.write(offset, chunk)
            inbound.moved.set()  # on a slow link a part may take longer than a stream may be idle
            offset += len(chunk)
    inbound.assembly.end(part.index)
    stream.moved(received_bytes=part.num_bytes, since=began_at)
    inbound.moved.set()
    await _answer(stream, part, wire.TRANSFER_STATUS_PART_RECEIVED)


async def _answer(
    stream: TransferStream, part: wire.Part, status: "wire.TransferStatus.ValueType"
) -> None:
    await stream.send(wire.TransferResponse(status=status, part=part.index))


async def complete(
    stream: TransferStream,
    inbound: Inbound,
    *,
    is_wanted: Callable[[], bool],
    idle_seconds: float,
) -> bytes:
    """Waits, at the stream of the offer, until all parts are here; returns the body.

    Raises TimeoutError when nothing comes for so long, EOFError when the sender drops the offer or
    repeats it on another stream, TransferRefusedError when the body is not wanted any more.
    """
    ended = asyncio.ensure_future(stream.ended())
    moved = asyncio.ensure_future(inbound.moved.wait())
    try:
        while not inbound.assembly.is_complete:
            if inbound.is_over:
                raise EOFError("the payload was offered anew")
            if not is_wanted():
                raise TransferRefusedError("not wanted any more")
            inbound.moved.clear()
            if moved.done():
                moved = asyncio.ensure_future(inbound.moved.wait())
            done, _ = await asyncio.wait(
                (ended, moved), timeout=idle_seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                raise TimeoutError(f"nothing came within {idle_seconds:g} s")
            if ended in done and not inbound.assembly.is_complete:
                raise EOFError("the sender has dropped the offer")
        return inbound.assembly.body()
    finally:
        ended.cancel()
        moved.cancel()
        # Not by catching CancelledError, which could be our own.
        await asyncio.gather(ended, moved, return_exceptions=True)
