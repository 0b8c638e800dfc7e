"""What we answer to a request of a member, and our own request when we fetch.

A body is admitted before it is read, whole or in parts; what is known of it meanwhile, and who may open a
stream, is in node.exchange.transport.receiver. How a stream comes to be, and whether its other end is a
member, is the transport's business. Pushes of our own are node.exchange.transport.sending's.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import NamedTuple

import blake3

from node.exchange.peers import (
    PIECES_AT_ONCE,
    FalseAnswerError,
    Limits,
    TransferHandler,
    TransferRefusedError,
    Want,
    check_answer,
    do_nothing,
    kind_of,
    refusing_on_fault,
    turn_of,
)
from node.exchange.transport.receiver import IncomingBody, Receiver, StreamAdmission
from node.exchange.transport.streams import (
    WANTS,
    FrameError,
    PartError,
    TransferStream,
    decode_want,
    encode_want,
    expect,
    refuse,
)
from node.heavy import cancelled
from protocol.v1 import transfer_pb2 as wire
from protocol.wire.payload import CONTRIBUTION, Payload, PayloadError, PayloadHeader
from protocol.wire.rounds import Digest, NodeId

MOST_DUE = 64
"""Answers that one stream owes: no sender that keeps to its window waits for so many."""

SMALL = frozenset({"want_manifest", "want_chunk_map"})
"""What is given also to who has enough under way: it says whom to ask."""

_THREAD_BYTES = 1 << 20  # hashing less is quicker than asking a thread to


class Server:
    """Answers the requests of all members. The handler is asked about what comes, and for what is given."""

    def __init__(self, handler: TransferHandler, *, limits: Limits) -> None:
        self.admission = StreamAdmission(limits)
        self.receiver = Receiver(limits)
        self._handler = handler
        self._limits = limits
        # Pieces are large, and exchanges come first.
        self._pieces = asyncio.Semaphore(PIECES_AT_ONCE)

    async def serve(self, stream: TransferStream, sender: NodeId) -> None:
        """Answers a member's request.

        Raises FrameError, or streams.BROKEN when the member is gone, and TransferRefusedError when it
        has too many streams, or all have: then nothing was read.
        """
        with self.admission.let_in(sender):
            try:
                await self._answer(stream, sender)
            except (TransferRefusedError, PayloadError) as refusal:
                await refuse(stream, str(refusal))
            finally:
                stream.count_ended()
            await stream.outlast()

    async def _answer(self, stream: TransferStream, sender: NodeId) -> None:
        request = await stream.receive(wire.TransferRequest)
        match request.WhichOneof("request"):
            case "offer":
                offer = request.offer
                try:
                    async with self.admission.offer(
                        sender, is_in_parts=bool(offer.part_bytes), is_gone=lambda: stream.is_gone
                    ):
                        await self._take(stream, sender, offer)
                except (TransferRefusedError, PayloadError):
                    self.receiver.refuse(sender, _digest_of(offer))
                    raise
            case "stripe":
                with self.admission.parts(sender):
                    await take_parts(stream, sender, self.receiver)
            case kind if kind in WANTS.values():
                with self.admission.fetch(sender, is_large=kind not in SMALL):
                    want = decode_want(request)
                    async with turn_of(want, self._pieces):
                        await self._give(stream, sender, want)
            case _:
                raise TransferRefusedError("the request is empty, or of a newer version of Atoll")

    async def _take(self, stream: TransferStream, sender: NodeId, offer: wire.Offer) -> None:
        header = PayloadHeader.decode(offer.header)
        stream.carries(header.kind)
        with refusing_on_fault(sender):
            admission = self._handler.admit(sender, header)
        try:
            with stream.traffic.receiving():
                async with asyncio.timeout(_whole_seconds(self._limits, header.body_bytes)):
                    if offer.part_bytes:
                        body = await self._take_parts(
                            stream, sender, header, offer, admission.is_wanted
                        )
                    else:
                        await stream.send(wire.TransferResponse(status=wire.TRANSFER_STATUS_GO_ON))
                        body = await _receive_body(stream, header)
            payload = await _verified(header, body)
            with refusing_on_fault(sender):
                receipt = await admission.take(payload)
        finally:
            admission.end()
        received = wire.TRANSFER_STATUS_RECEIVED
        await stream.send(wire.TransferResponse(status=received, receipt=receipt))

    async def _take_parts(
        self,
        stream: TransferStream,
        sender: NodeId,
        header: PayloadHeader,
        offer: wire.Offer,
        is_wanted: Callable[[], bool],
    ) -> bytes:
        digest = _digest_of(offer)
        try:
            body = self.receiver.begin(sender, header, digest, offer.part_bytes)
        except PartError as error:
            raise TransferRefusedError(str(error)) from error
        except MemoryError as error:
            raise _no_memory(header) from error
        is_kept = True
        try:
            response = wire.TransferResponse(
                status=wire.TRANSFER_STATUS_GO_ON, held_parts=body.assembly.held_map()
            )
            await stream.send(response)
            whole = await complete(
                stream, body, is_wanted=is_wanted, idle_seconds=self._limits.idle_seconds
            )
            is_kept = False
            return whole
        except TransferRefusedError:
            is_kept = False
            raise
        finally:
            now = stream.traffic.clock()
            self.receiver.end(sender, digest, body, is_kept=is_kept, now=now)
            if is_kept:
                forget_in_time(self.receiver, self._limits.kept_seconds)

    async def _give(self, stream: TransferStream, sender: NodeId, want: Want) -> None:
        with refusing_on_fault(sender):
            payload = await self._handler.supply(sender, want)
        if payload is None:
            await stream.send(wire.TransferResponse(status=wire.TRANSFER_STATUS_NOT_HELD))
            return
        stream.carries(payload.header.kind)
        async with stream.traffic.place():
            await stream.send(
                wire.TransferResponse(
                    status=wire.TRANSFER_STATUS_GO_ON, header=payload.header.encode()
                )
            )
            async with asyncio.timeout(_whole_seconds(self._limits, len(payload.body))):
                await stream.send_body(payload.body)


async def fetch_over(
    stream: TransferStream, want: Want, *, max_body_bytes: int, heard: Callable[[], None]
) -> Payload:
    """Our side of a fetch. Raises as `streams.expect`, FalseAnswerError, or streams.BROKEN."""
    stream.carries(kind_of(want))
    await stream.send(encode_want(want))
    response = await expect(stream, wire.TRANSFER_STATUS_GO_ON)
    heard()
    try:
        header = PayloadHeader.decode(response.header)
        check_answer(want, header, max_body_bytes=max_body_bytes)
        return await _verified(header, await _receive_body(stream, header, heard))
    except PayloadError as error:
        raise FalseAnswerError(str(error)) from error


async def _verified(header: PayloadHeader, body: bytes) -> Payload:
    """Payload.verified, off the event loop where that pays; raises PayloadError."""
    if len(body) < _THREAD_BYTES:
        return Payload.verified(header, body)
    return await asyncio.to_thread(Payload.verified, header, body)


def _digest_of(offer: wire.Offer) -> Digest:
    return Digest(blake3.blake3(offer.header).digest())


async def _receive_body(
    stream: TransferStream, header: PayloadHeader, heard: Callable[[], None] = do_nothing
) -> bytes:
    try:
        began_at = stream.traffic.clock()
        body = await stream.receive_body(header.body_bytes, heard)
        stream.moved(received_bytes=header.body_bytes, since=began_at)
        return body
    except MemoryError as error:
        raise _no_memory(header) from error


def _no_memory(header: PayloadHeader) -> TransferRefusedError:
    return TransferRefusedError(f"no memory for a body of {header.body_bytes} bytes")


def forget_in_time(receiver: Receiver, seconds: float) -> None:
    """Has what is kept from now on forgotten after so long."""
    loop = asyncio.get_running_loop()
    loop.call_later(seconds, receiver.expire, loop.time() + seconds)


async def take_parts(stream: TransferStream, sender: NodeId, receiver: Receiver) -> None:
    """Serves one stream: takes parts, of whichever body, until its sender has no more.

    Never waits for an offer: parts of other bodies would wait behind it. Nor does it stop reading while an
    answer is held back: behind it may be parts of a body that all others wait for. Raises FrameError, or
    streams.BROKEN when the sender is gone in the middle of a part.
    """
    due: asyncio.Queue[_Answer | None] = asyncio.Queue(MOST_DUE)
    reading = asyncio.ensure_future(_read_parts(stream, sender, receiver, due))
    answering = asyncio.ensure_future(_give_answers(stream, sender, receiver, due))
    try:
        await asyncio.wait((reading, answering), return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            await answering
        await reading
        await answering
    finally:
        await cancelled((reading, answering))


async def _read_parts(
    stream: TransferStream, sender: NodeId, receiver: Receiver, due: "asyncio.Queue[_Answer | None]"
) -> None:
    limits, dropped_bytes = receiver.limits, 0
    while True:
        try:
            async with asyncio.timeout(limits.at_rest_seconds):
                part = await stream.receive(wire.Part, is_patient=True)
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise
            await due.put(None)
            return  # closed between two parts
        began_at = stream.traffic.clock()
        digest = Digest(part.digest)
        if (body := receiver.find(sender, digest)) is not None:
            dropped_bytes = 0
            await due.put(await _taken(stream, sender, receiver, body, part, began_at=began_at))
            continue
        if dropped_bytes + part.num_bytes > limits.most_dropped_bytes:
            raise FrameError(
                f"{dropped_bytes + part.num_bytes} bytes of parts that nobody asked for"
            )
        early = await _read_early(stream, part.num_bytes, limits.most_early_part_bytes)
        now = stream.traffic.clock()
        if early is None:
            dropped_bytes += part.num_bytes
            answer = _Answer(part.index, wire.TRANSFER_STATUS_PART_DROPPED)
        elif (body := receiver.find(sender, digest)) is not None:  # it has come meanwhile
            answer = await _taken(
                stream, sender, receiver, body, part, began_at=began_at, early=early
            )
        elif receiver.early.keep((sender, digest), part.index, early, now=now):
            forget_in_time(receiver, limits.early_seconds)
            # Counted with the next part: what kind it is, its offer will say.
            stream.traffic.moved(received_bytes=part.num_bytes, since=began_at)
            answer = _Answer(part.index, wire.TRANSFER_STATUS_PART_KEPT)
        else:
            dropped_bytes += part.num_bytes
            answer = _Answer(part.index, wire.TRANSFER_STATUS_PART_DROPPED)
        await due.put(answer)


async def _read_early(stream: TransferStream, num_bytes: int, most_bytes: int) -> bytes | None:
    """A part whose offer is not here; None when it is too large to be kept."""
    if num_bytes <= most_bytes:
        return await stream.receive_body(num_bytes)
    async for _ in stream.receive_chunks(num_bytes):
        pass
    return None


async def _taken(
    stream: TransferStream,
    sender: NodeId,
    receiver: Receiver,
    body: IncomingBody,
    part: wire.Part,
    *,
    began_at: float,
    early: bytes | None = None,
) -> "_Answer":
    """Puts a part in its place: from the stream, unless it was read already. Returns what to answer."""
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
    receiver.moved(sender, body.header, part.num_bytes)
    may_wait = body.header.kind == CONTRIBUTION and receiver.evenness.is_ahead(sender)
    return _Answer(part.index, wire.TRANSFER_STATUS_PART_RECEIVED, may_wait=may_wait)


class _Answer(NamedTuple):
    """What a part is answered with."""

    part: int
    status: "wire.TransferStatus.ValueType"
    may_wait: bool = False
    """For those who are behind: until then its sender sends no more than its window lets it."""


async def _give_answers(
    stream: TransferStream, sender: NodeId, receiver: Receiver, due: "asyncio.Queue[_Answer | None]"
) -> None:
    """In the order of the parts, until there is nothing more to answer."""
    while (answer := await due.get()) is not None:
        is_held = answer.may_wait and await waited_for_others(receiver, sender)
        await stream.send(
            wire.TransferResponse(status=answer.status, part=answer.part, is_held=is_held)
        )


async def waited_for_others(receiver: Receiver, sender: NodeId) -> bool:
    """Has a sender that is ahead of others wait for them, briefly; returns whether it did."""
    if not receiver.evenness.is_ahead(sender):
        return False
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(receiver.limits.ahead_seconds):
            while receiver.evenness.is_ahead(sender):
                await receiver.news.wait()
    return True


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
        await cancelled((ended, moved))


def _whole_seconds(limits: Limits, num_bytes: int) -> float:
    """How long a body may take altogether, so that a trickle cannot hold a stream forever."""
    return 2 * limits.idle_seconds + num_bytes / limits.floor_bytes_per_second
