"""Both ends of a transfer over one stream, and who may open one.

Here live the rules that every transport keeps: a body is admitted before it is read, an answer is
what was asked for. How a stream comes to be, and whether its other end is a member, is the
transport's business.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import blake3
import structlog

from node.exchange.transport.conveyor import Conveyor, Turn
from node.exchange.transport.frames import FrameError, Limits, TransferStream
from node.exchange.transport.inbound import Inbounds, complete, take_stripe
from node.exchange.transport.parts import STRIPED_BYTES, PartError, part_bytes_for
from node.exchange.transport.transport import (
    FalseAnswerError,
    NotHeldError,
    TransferHandler,
    TransferRefusedError,
    Want,
    WantChunk,
    WantManifest,
    WantResult,
)
from protocol.payload import (
    CHUNK,
    MANIFEST,
    RESULT,
    Payload,
    PayloadError,
    PayloadHeader,
)
from protocol.rounds import Digest, NodeId
from protocol.v1 import transfer_pb2 as wire

MAX_REASON_CHARACTERS = 1000

Verify = Callable[[PayloadHeader, bytes], Awaitable[Payload]]
"""Payload.verified, off the event loop where that pays; raises PayloadError."""

_log = structlog.get_logger(__name__)


def check_answer(want: Want, header: PayloadHeader, *, max_body_bytes: int) -> None:
    """Decides on an answer before its body is read; raises FalseAnswerError."""
    if header.kind != _kind_of(want) or not _is_wanted(want, header):
        raise FalseAnswerError(
            f"asked for {want}, offered a {header.kind_name} of round {header.round}"
        )
    if header.body_bytes > max_body_bytes:
        raise FalseAnswerError(
            f"{header.kind_name} of {header.body_bytes} bytes offered, at most {max_body_bytes} fit"
        )


def _is_wanted(want: Want, header: PayloadHeader) -> bool:
    match want:
        case WantResult(digest=digest):
            return blake3.blake3(header.encode()).digest() == digest
        case WantManifest():
            return want.includes(header.round)
        case WantChunk(round=round_, digest=digest):
            return (header.round, header.body_digest) == (round_, digest)


def _kind_of(want: Want) -> "wire.PayloadKind.ValueType":
    match want:
        case WantResult():
            return RESULT
        case WantManifest():
            return MANIFEST
        case WantChunk():
            return CHUNK


async def verify_inline(header: PayloadHeader, body: bytes) -> Payload:
    """Payload.verified on the event loop: for small bodies, and where order must not vary."""
    return Payload.verified(header, body)


@contextmanager
def refusing_on_fault(sender: NodeId) -> Iterator[None]:
    """Keeps a fault of our own handler from looking like the peer's, or like a lost link."""
    try:
        yield
    except TransferRefusedError:
        raise
    except Exception as error:
        _log.exception("a transfer failed inside this node", sender=sender)
        raise TransferRefusedError("this node failed inside; its log says how") from error


async def serve(
    stream: TransferStream,
    sender: NodeId,
    handler: TransferHandler,
    *,
    limits: Limits,
    verify: Verify,
    inbounds: Inbounds,
    is_crowded: bool = False,
    is_served_enough: bool = False,
) -> None:
    """Answers a member's request. Raises FrameError, or frames.BROKEN when the member is gone."""
    request = await stream.receive(wire.TransferRequest)
    try:
        match request.WhichOneof("request"):
            case "offer":
                try:
                    await _take(stream, sender, handler, request.offer, limits, verify, inbounds)
                except (TransferRefusedError, PayloadError):
                    inbounds.refuse(sender, _digest_of(request.offer))
                    raise
            case "stripe":
                if is_crowded and inbounds.has_stripe(sender):
                    raise TransferRefusedError("busy; go on with the streams that you have")
                await take_stripe(stream, sender, inbounds)
            case "want_result" | "want_chunk" if is_served_enough:
                raise TransferRefusedError("busy; go on with the transfers that you have")
            case "want_result" | "want_manifest" | "want_chunk":
                await _give(stream, handler, sender, _decode_want(request), limits)
            case _:
                raise TransferRefusedError("the request is empty, or of a newer version of Atoll")
    except TransferRefusedError as refusal:
        await refuse(stream, str(refusal))
    except PayloadError as error:
        await refuse(stream, str(error))


async def refuse(stream: TransferStream, reason: str) -> None:
    """Tells the other side why not."""
    await stream.send(
        wire.TransferResponse(
            status=wire.TRANSFER_STATUS_REFUSED, reason=reason[:MAX_REASON_CHARACTERS]
        )
    )


async def push_over(
    stream: TransferStream, payload: Payload, conveyor: Conveyor, turn: Turn
) -> float:
    """Our side of a push. Raises TransferRefusedError, FrameError, or frames.BROKEN.

    The body follows its offer at once: nearly every offer is accepted, and the link would be idle
    meanwhile. Returns after how many seconds the offer was accepted.
    """
    stream.carries(payload.header.kind)
    body_bytes = len(payload.body)
    part_bytes = part_bytes_for(body_bytes) if body_bytes >= STRIPED_BYTES else 0
    clock = asyncio.get_running_loop().time
    offered_at = clock()
    offer = wire.Offer(header=payload.header.encode(), part_bytes=part_bytes)
    await stream.send(wire.TransferRequest(offer=offer))

    async def verdict(accept: Callable[[bytes], None]) -> float:
        response = await _expect(stream, wire.TRANSFER_STATUS_GO_ON)
        accepted_at = clock()
        accept(response.held_parts)
        await _expect(stream, wire.TRANSFER_STATUS_RECEIVED)
        return accepted_at - offered_at

    if part_bytes:
        async with conveyor.carrying(payload, turn) as load:
            return await _unless_failed(verdict(load.accept), load.failed)
    sending = asyncio.ensure_future(_send_whole(stream, payload, turn))
    seconds = await _unless_failed(verdict(lambda held_map: None), sending)
    stream.moved(sent_bytes=body_bytes)
    return seconds


async def _send_whole(stream: TransferStream, payload: Payload, turn: Turn) -> None:
    await stream.send_body(payload.body)
    turn.pass_on()


async def _unless_failed(
    verdict: Coroutine[Any, Any, float], sending: asyncio.Future[None]
) -> float:
    """What the peer says of a body, which it can say before all is sent; or what keeps us from it."""
    hearing = asyncio.ensure_future(verdict)
    try:
        await asyncio.wait((hearing, sending), return_when=asyncio.FIRST_COMPLETED)
        if not hearing.done():
            await sending
        return await hearing
    finally:
        for task in (hearing, sending):
            task.cancel()
        await asyncio.gather(hearing, sending, return_exceptions=True)


async def fetch_over(
    stream: TransferStream, want: Want, *, max_body_bytes: int, verify: Verify
) -> Payload:
    """Our side of a fetch. Raises as push_over does, and NotHeldError."""
    stream.carries(_kind_of(want))
    await stream.send(_encode_want(want))
    response = await _expect(stream, wire.TRANSFER_STATUS_GO_ON)
    try:
        header = PayloadHeader.decode(response.header)
        check_answer(want, header, max_body_bytes=max_body_bytes)
        return await verify(header, await _receive_body(stream, header))
    except PayloadError as error:
        raise FalseAnswerError(str(error)) from error


async def _take(
    stream: TransferStream,
    sender: NodeId,
    handler: TransferHandler,
    offer: wire.Offer,
    limits: Limits,
    verify: Verify,
    inbounds: Inbounds,
) -> None:
    header = PayloadHeader.decode(offer.header)
    stream.carries(header.kind)
    with refusing_on_fault(sender):
        admission = handler.admit(sender, header)
    try:
        with stream.tally.receiving():
            async with asyncio.timeout(limits.whole_seconds(header.body_bytes)):
                if offer.part_bytes:
                    body = await _receive_parts(stream, sender, header, offer, limits, inbounds)
                else:
                    await stream.send(wire.TransferResponse(status=wire.TRANSFER_STATUS_GO_ON))
                    body = await _receive_body(stream, header)
        payload = await verify(header, body)
        with refusing_on_fault(sender):
            await admission.take(payload)
    finally:
        admission.end()
    await stream.send(wire.TransferResponse(status=wire.TRANSFER_STATUS_RECEIVED))


async def _receive_parts(
    stream: TransferStream,
    sender: NodeId,
    header: PayloadHeader,
    offer: wire.Offer,
    limits: Limits,
    inbounds: Inbounds,
) -> bytes:
    digest = _digest_of(offer)
    try:
        inbound = inbounds.begin(sender, header, digest, offer.part_bytes)
    except PartError as error:
        raise TransferRefusedError(str(error)) from error
    except MemoryError as error:
        raise _no_memory(header) from error
    is_complete = False
    try:
        response = wire.TransferResponse(
            status=wire.TRANSFER_STATUS_GO_ON, held_parts=inbound.assembly.held_map()
        )
        await stream.send(response)
        body = await complete(stream, inbound, idle_seconds=limits.idle_seconds)
        is_complete = True
        return body
    finally:
        inbounds.end(sender, digest, inbound, is_kept=not is_complete)


def _digest_of(offer: wire.Offer) -> Digest:
    return Digest(blake3.blake3(offer.header).digest())


async def _receive_body(stream: TransferStream, header: PayloadHeader) -> bytes:
    try:
        body = await stream.receive_body(header.body_bytes)
        stream.moved(received_bytes=header.body_bytes)
        return body
    except MemoryError as error:
        raise _no_memory(header) from error


def _no_memory(header: PayloadHeader) -> TransferRefusedError:
    return TransferRefusedError(f"no memory for a body of {header.body_bytes} bytes")


async def _give(
    stream: TransferStream, handler: TransferHandler, sender: NodeId, want: Want, limits: Limits
) -> None:
    with refusing_on_fault(sender):
        payload = await handler.supply(sender, want)
    if payload is None:
        await stream.send(wire.TransferResponse(status=wire.TRANSFER_STATUS_NOT_HELD))
        return
    stream.carries(payload.header.kind)
    async with stream.place_for_body():
        await stream.send(
            wire.TransferResponse(status=wire.TRANSFER_STATUS_GO_ON, header=payload.header.encode())
        )
        async with asyncio.timeout(limits.whole_seconds(len(payload.body))):
            await stream.send_body(payload.body)


async def _expect(
    stream: TransferStream, status: "wire.TransferStatus.ValueType"
) -> wire.TransferResponse:
    response = await stream.receive(wire.TransferResponse, is_patient=True)
    if response.status == status:
        return response
    if response.status == wire.TRANSFER_STATUS_NOT_HELD:
        raise NotHeldError("the peer does not hold it")
    if response.status == wire.TRANSFER_STATUS_REFUSED:
        reason = "".join(c if c.isprintable() else "?" for c in response.reason)
        raise TransferRefusedError(reason[:MAX_REASON_CHARACTERS] or "refused without a reason")
    raise FrameError(f"status {response.status} came where {status} was due")


def _encode_want(want: Want) -> wire.TransferRequest:
    match want:
        case WantResult():
            return wire.TransferRequest(
                want_result=wire.WantResult(
                    round=want.round, slice_index=want.slice_index, digest=want.digest
                )
            )
        case WantManifest():
            return wire.TransferRequest(
                want_manifest=wire.WantManifest(
                    oldest_round=want.oldest_round, newest_round=want.newest_round
                )
            )
        case WantChunk():
            return wire.TransferRequest(
                want_chunk=wire.WantChunk(round=want.round, index=want.index, digest=want.digest)
            )


def _decode_want(request: wire.TransferRequest) -> Want:
    match request.WhichOneof("request"):
        case "want_result":
            result = request.want_result
            return WantResult(
                round=result.round, slice_index=result.slice_index, digest=Digest(result.digest)
            )
        case "want_manifest":
            manifest = request.want_manifest
            has_newest = manifest.HasField("newest_round")
            return WantManifest(
                oldest_round=manifest.oldest_round,
                newest_round=manifest.newest_round if has_newest else None,
            )
        case _:
            chunk = request.want_chunk
            return WantChunk(round=chunk.round, index=chunk.index, digest=Digest(chunk.digest))
