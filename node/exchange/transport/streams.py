"""What is on the wire: streams of small messages in capped frames and raw bodies, and the parts of a body.

A frame is a little-endian 32-bit length and a protobuf message. The length is checked before
anything is allocated; a body's size was in a header that was admitted first. Nothing is waited for forever.
"""

import asyncio
import contextlib
import io
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from node.exchange.peers import (
    LEAST_PART_BYTES,
    PARTS_IN_WINDOW,
    NotHeldError,
    TransferRefusedError,
    Want,
    WantChunk,
    WantChunkMap,
    WantInput,
    WantManifest,
    WantResult,
    WantTokens,
    do_nothing,
)
from node.exchange.transport.rates.traffic import CHUNK_BYTES, Traffic
from protocol.v1 import transfer_pb2 as wire
from protocol.wire.payload import (
    CHUNK,
    CHUNK_MAP,
    CONTRIBUTION,
    MANIFEST,
    PIECE,
    PIECE_MAP,
    REDUCER_ERROR,
    RESULT,
    TOKENS_MANIFEST,
    WireKind,
)
from protocol.wire.rounds import same_fields
from protocol.wire.sockets import ignore_end_of

MAX_FRAME_BYTES = 8192
"""No message is larger: a header has at most 4096 bytes, a reason is cut to 1000 characters."""

MAX_REASON_CHARACTERS = 1000

MOST_PARTS = 16_384
"""A larger body has larger parts, so that the map of the parts that are here fits into a frame."""

WHOLE_BYTES = PARTS_IN_WINDOW * LEAST_PART_BYTES
"""Smaller bodies follow their offer on its stream."""

_LENGTH_BYTES = 4

WIRE_KINDS_BY_PAYLOAD: dict[int, WireKind] = {
    CONTRIBUTION: "contribution",
    RESULT: "result",
    REDUCER_ERROR: "result",
    MANIFEST: "snapshot",
    CHUNK: "snapshot",
    CHUNK_MAP: "snapshot",
    TOKENS_MANIFEST: "data",
    PIECE_MAP: "data",
    PIECE: "data",
}
"""What a payload is counted as."""

MessageT = TypeVar("MessageT", bound=Message)

BROKEN = (OSError, EOFError, TimeoutError)
"""What reading or writing raises when the other side is gone, or silent for too long."""


class FrameError(Exception):
    """The other side does not speak this protocol."""


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


def held_in(held_map: bytes) -> frozenset[int]:
    """The parts that a map names; what it names beyond the body does not matter."""
    return frozenset(
        8 * place + bit
        for place, byte in enumerate(held_map)
        for bit in range(8)
        if byte >> bit & 1
    )


def drop(writer: asyncio.StreamWriter) -> None:
    """Ends a connection at once, whatever state it is in."""
    # asyncio's abort() fails on a transport that is closed already.
    if not writer.transport.is_closing() or writer.transport.get_write_buffer_size():
        writer.transport.abort()


class TransferStream:
    """Reads and writes one transfer; counts its bytes, frames included. Bodies are paced.

    Every read and every write must get on within `idle_seconds`, or raises TimeoutError. A peer
    that went away shows as OSError or EOFError (asyncio.IncompleteReadError).
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        idle_seconds: float,
        traffic: Traffic,
    ) -> None:
        self._reader = reader
        self._writer = writer
        ignore_end_of(writer)
        self._idle_seconds = idle_seconds
        self.traffic = traffic
        traffic.opened_stream()
        self.kind: WireKind = "control"  # until a header says what the transfer carries
        self.bytes_sent = 0
        self.bytes_received = 0
        self._counted = (0, 0)

    def moved(self, *, sent_bytes: int = 0, received_bytes: int = 0, since: float) -> None:
        """So much of a body has reached its receiver; `since` is when it was begun, by the traffic's clock.

        What was said until now is counted.
        """
        self._count()
        self.traffic.moved(sent_bytes=sent_bytes, received_bytes=received_bytes, since=since)

    def count_ended(self) -> None:
        """Counts the rest, and the stream itself."""
        if self.bytes_sent or self.bytes_received:  # else nothing of it was answered
            self._count(num_streams=1)

    def _count(self, *, num_streams: int = 0) -> None:
        sent, received = self._counted
        self._counted = self.bytes_sent, self.bytes_received
        self.traffic.count(
            self.kind,
            self.bytes_sent - sent,
            self.bytes_received - received,
            num_streams=num_streams,
        )

    def carries(self, kind: int) -> None:
        """Says what the transfer carries from now on, for the counts; what opened it belongs to it."""
        counted_as = WIRE_KINDS_BY_PAYLOAD[kind]
        if self.kind not in ("control", counted_as):
            self._count()
        self.kind = counted_as

    async def send(self, message: Message) -> None:
        """Writes one message in a frame of its own."""
        encoded = message.SerializeToString()
        if len(encoded) > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {len(encoded)} bytes; the limit is {MAX_FRAME_BYTES}")
        frame = len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded
        self.traffic.sent_message(len(frame))
        await self._write(frame)

    async def receive(self, message_type: type[MessageT], *, is_patient: bool = False) -> MessageT:
        """Reads one message; raises FrameError when it is too long or none of that type.

        Patient: the other side may work before it answers, and the caller bounds the whole.
        """
        async with asyncio.timeout(None if is_patient else self._idle_seconds):
            prefix = await self._reader.readexactly(_LENGTH_BYTES)
            num_bytes = int.from_bytes(prefix, "little")
            if num_bytes > MAX_FRAME_BYTES:
                raise FrameError(f"a frame of {num_bytes} bytes; the limit is {MAX_FRAME_BYTES}")
            encoded = await self._reader.readexactly(num_bytes)
        self._got(_LENGTH_BYTES + num_bytes)
        try:
            return message_type.FromString(encoded)
        except DecodeError as error:
            raise FrameError(f"no {message_type.DESCRIPTOR.name} in a frame: {error}") from error

    async def secure(self, context: ssl.SSLContext) -> None:
        """Goes on in TLS, with who is at the end of what carries this stream; raises OSError.

        We are the server where the other side has opened the stream. Nothing of TLS may have come yet.
        """
        async with asyncio.timeout(self._idle_seconds):
            await self._writer.start_tls(context)

    async def pass_on(
        self,
        sink: "TransferStream",
        *,
        leave: Callable[[int], Awaitable[None]],
        chunk_bytes: Callable[[], int],
        idle_seconds: float,
    ) -> None:
        """Passes on what comes, unread, until this stream ends or nothing comes for so long; both count it.

        No more than `chunk_bytes` wait to `leave` at a time.
        """
        while True:
            async with asyncio.timeout(idle_seconds):
                data = await self._reader.read(chunk_bytes())
            if not data:
                return
            self._got(len(data))
            await leave(len(data))
            await sink._write(data)
            self._count()
            sink._count()

    async def send_body(self, body: bytes | memoryview, *, is_answered: bool = False) -> None:
        """Writes a body, no faster than the other side takes it and the traffic allows.

        Hold a place of the traffic meanwhile.
        """
        view = memoryview(body)
        chunk_bytes = self.traffic.chunk_bytes
        for offset in range(0, len(view), chunk_bytes):
            chunk = view[offset : offset + chunk_bytes]
            if not is_answered:
                self.traffic.uplink.unanswered()
            await self.traffic.leave(len(chunk))  # our own wait: idle_seconds are the other side's
            await self._write(chunk)

    async def receive_body(self, num_bytes: int, heard: Callable[[], None] = do_nothing) -> bytes:
        """Reads exactly so many bytes; raises EOFError when fewer come. `heard` is called as they come.

        `num_bytes` must have been admitted: that much is allocated.
        """
        # BytesIO over a fresh bytes object neither copies it at the first write nor at getvalue():
        # a body is in memory once. The zero pages are only taken as data arrives.
        body = io.BytesIO(bytes(num_bytes))
        async for chunk in self.receive_chunks(num_bytes):
            body.write(chunk)
            heard()
        return body.getvalue()

    async def receive_chunks(self, num_bytes: int) -> AsyncIterator[bytes]:
        """Reads exactly so many bytes, as they come; raises EOFError when fewer come."""
        missing = num_bytes
        while missing:
            async with asyncio.timeout(self._idle_seconds):
                chunk = await self._reader.read(min(CHUNK_BYTES, missing))
            if not chunk:
                raise EOFError(f"{missing} of {num_bytes} bytes of a body did not come")
            missing -= len(chunk)
            self._got(len(chunk))
            yield chunk

    @property
    def is_gone(self) -> bool:
        """Whether the other side has ended the stream, and nothing of it is left to read."""
        return self._reader.at_eof() or self._reader.exception() is not None

    async def ended(self) -> None:
        """Returns when the other side ends the stream, or says something out of turn."""
        with contextlib.suppress(*BROKEN):
            await self._reader.read(1)

    async def outlast(self) -> None:
        """Waits until the other side, which asked, has what it wanted and ends the stream.

        If we ended it first, p2pd would reset it under what it has not delivered yet.
        """
        try:
            async with asyncio.timeout(self._idle_seconds):
                while await self._reader.read(CHUNK_BYTES):
                    pass  # nothing more is due from there
        except BROKEN:
            pass  # so it has ended, or never will
        self.abort()

    def abort(self) -> None:
        """Drops the stream at once."""
        drop(self._writer)

    def _got(self, num_bytes: int) -> None:
        self.bytes_received += num_bytes
        self.traffic.received(num_bytes)

    async def _write(self, data: bytes | memoryview) -> None:
        self.bytes_sent += len(data)
        self._writer.write(data)
        async with asyncio.timeout(self._idle_seconds):
            await self._writer.drain()


async def refuse(stream: TransferStream, reason: str) -> None:
    """Tells the other side why not."""
    await stream.send(
        wire.TransferResponse(
            status=wire.TRANSFER_STATUS_REFUSED, reason=reason[:MAX_REASON_CHARACTERS]
        )
    )


async def expect(
    stream: TransferStream, status: "wire.TransferStatus.ValueType"
) -> wire.TransferResponse:
    """Waits for this answer; raises NotHeldError, TransferRefusedError or FrameError at another."""
    response = await stream.receive(wire.TransferResponse, is_patient=True)
    if response.status == status:
        return response
    if response.status == wire.TRANSFER_STATUS_NOT_HELD:
        raise NotHeldError("the peer does not hold it")
    if response.status == wire.TRANSFER_STATUS_REFUSED:
        reason = "".join(c if c.isprintable() else "?" for c in response.reason)
        raise TransferRefusedError(reason[:MAX_REASON_CHARACTERS] or "refused without a reason")
    raise FrameError(f"status {response.status} came where {status} was due")


WANTS: dict[type[Want], str] = {
    WantResult: "want_result",
    WantManifest: "want_manifest",
    WantChunk: "want_chunk",
    WantChunkMap: "want_chunk_map",
    WantTokens: "want_tokens",
    WantInput: "want_input",
}
"""What a request calls them; their fields have the same names there."""


def encode_want(want: Want) -> wire.TransferRequest:
    """What a peer is asked for, as a request."""
    request: Any = {WANTS[type(want)]: asdict(want)}
    return wire.TransferRequest(**request)


def decode_want(request: wire.TransferRequest) -> Want:
    """What a peer asks for; raises TransferRefusedError where that is nothing."""
    name = request.WhichOneof("request")
    kind = next(kind for kind, own in WANTS.items() if own == name)
    asked = getattr(request, str(name))
    told = same_fields(asked, kind)
    if kind is WantManifest and not asked.HasField("newest_round"):
        told["newest_round"] = None
    if kind is WantInput:
        told["contributor_id"] = told["contributor_id"] or None
    want = kind(**told)
    if isinstance(want, WantTokens) and want.kind not in (TOKENS_MANIFEST, PIECE_MAP, PIECE):
        raise TransferRefusedError(f"payload kind {want.kind} is nothing of the tokens")
    return want
