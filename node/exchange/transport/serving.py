"""What we answer to a request of a member, and our own request when we fetch.

Here live the rules that every transport keeps: a body is admitted before it is read, an answer is
what was asked for. How a stream comes to be, and whether its other end is a member, is the
transport's business. Pushes of our own are node.exchange.transport.sending's.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext

import blake3
import structlog

from node.exchange.transport.admission import StreamAdmission
from node.exchange.transport.limits import Limits
from node.exchange.transport.receiver import (
    Receiver,
    complete,
    forget_in_time,
    take_parts,
)
from node.exchange.transport.streams import PartError, TransferStream, expect, refuse
from node.exchange.transport.transport import (
    PIECES_AT_ONCE,
    FalseAnswerError,
    TransferHandler,
    TransferRefusedError,
    Want,
    WantChunk,
    WantManifest,
    WantResult,
    WantTokens,
    do_nothing,
)
from protocol.payload import (
    CHUNK,
    MANIFEST,
    PIECE,
    PIECE_MAP,
    RESULT,
    TOKENS_MANIFEST,
    Payload,
    PayloadError,
    PayloadHeader,
)
from protocol.rounds import Digest, NodeId
from protocol.v1 import transfer_pb2 as wire

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
        case WantTokens(kind=kind, digest=digest):
            return kind != PIECE or header.body_digest == digest


def _kind_of(want: Want) -> "wire.PayloadKind.ValueType":
    match want:
        case WantResult():
            return RESULT
        case WantManifest():
            return MANIFEST
        case WantChunk():
            return CHUNK
        case WantTokens(kind=kind):
            return kind


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


class Server:
    """Answers the requests of all members. The handler is asked about what comes, and for what is given."""

    def __init__(self, handler: TransferHandler, *, limits: Limits, verify: Verify) -> None:
        self.admission = StreamAdmission(limits)
        self.receiver = Receiver(limits)
        self._handler = handler
        self._limits = limits
        self._verify = verify
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
            case "want_result" | "want_manifest" | "want_chunk" | "want_tokens" as kind:
                with self.admission.fetch(sender, is_large=kind != "want_manifest"):
                    want = _decode_want(request)
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
                async with asyncio.timeout(self._limits.whole_seconds(header.body_bytes)):
                    if offer.part_bytes:
                        body = await self._take_parts(
                            stream, sender, header, offer, admission.is_wanted
                        )
                    else:
                        await stream.send(wire.TransferResponse(status=wire.TRANSFER_STATUS_GO_ON))
                        body = await _receive_body(stream, header)
            payload = await self._verify(header, body)
            with refusing_on_fault(sender):
                await admission.take(payload)
        finally:
            admission.end()
        await stream.send(wire.TransferResponse(status=wire.TRANSFER_STATUS_RECEIVED))

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
        async with stream.place_for_body():
            await stream.send(
                wire.TransferResponse(
                    status=wire.TRANSFER_STATUS_GO_ON, header=payload.header.encode()
                )
            )
            async with asyncio.timeout(self._limits.whole_seconds(len(payload.body))):
                await stream.send_body(payload.body)


async def fetch_over(
    stream: TransferStream,
    want: Want,
    *,
    max_body_bytes: int,
    verify: Verify,
    heard: Callable[[], None],
) -> Payload:
    """Our side of a fetch. Raises as `streams.expect`, FalseAnswerError, or streams.BROKEN."""
    stream.carries(_kind_of(want))
    await stream.send(_encode_want(want))
    response = await expect(stream, wire.TRANSFER_STATUS_GO_ON)
    heard()
    try:
        header = PayloadHeader.decode(response.header)
        check_answer(want, header, max_body_bytes=max_body_bytes)
        return await verify(header, await _receive_body(stream, header, heard))
    except PayloadError as error:
        raise FalseAnswerError(str(error)) from error


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


def turn_of(want: Want, pieces: asyncio.Semaphore) -> AbstractAsyncContextManager[None]:
    """Held from before a piece is read until it is sent; nothing else waits."""
    is_piece = isinstance(want, WantTokens) and want.kind == PIECE
    return pieces if is_piece else nullcontext()


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
        case WantTokens():
            return wire.TransferRequest(
                want_tokens=wire.WantTokens(kind=want.kind, digest=want.digest)
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
        case "want_tokens":
            tokens = request.want_tokens
            if tokens.kind not in (TOKENS_MANIFEST, PIECE_MAP, PIECE):
                raise TransferRefusedError(f"payload kind {tokens.kind} is nothing of the tokens")
            return WantTokens(kind=tokens.kind, digest=Digest(tokens.digest))
        case _:
            chunk = request.want_chunk
            return WantChunk(round=chunk.round, index=chunk.index, digest=Digest(chunk.digest))
