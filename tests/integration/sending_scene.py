"""A sender and its receiver in one process, over socket pairs."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from node.exchange.peers import LEAST_PART_BYTES, Limits, TransferRefusedError
from node.exchange.transport.rates.traffic import Traffic
from node.exchange.transport.sending import Sending
from node.exchange.transport.serving import Server
from node.exchange.transport.streams import (
    BROKEN,
    FrameError,
    TransferStream,
    part_bytes_for,
    refuse,
)
from protocol.v1 import transfer_pb2 as wire
from protocol.wire.payload import Payload, WireCounts
from protocol.wire.rounds import NodeId
from tests.integration.transport_peers import Desk

PART = LEAST_PART_BYTES
BODY = os.urandom(10 * PART + 17)
SENDER = NodeId("sender")


class Breaking(TransferStream):
    """Breaks in the middle of the part after so many whole ones."""

    parts_left = 0

    async def receive_chunks(self, num_bytes: int) -> AsyncIterator[bytes]:
        if not self.parts_left:
            self.abort()
            raise ConnectionResetError("broken by the test")
        self.parts_left -= 1
        async for chunk in super().receive_chunks(num_bytes):
            yield chunk


class Wire:
    """Opens streams to a receiver; `breaks` says which break, by the number of the stream."""

    def __init__(
        self,
        breaks: dict[int, int] | None = None,
        *,
        num_streams: int = 3,
        most_at_rest: int = 0,
        limits: Limits = Limits(idle_seconds=20),  # noqa: B008 (frozen)
        sender: NodeId = SENDER,
        server: Server | None = None,
    ) -> None:
        self.breaks = breaks or {}  # number of the stream -> whole parts before it breaks
        self.desk = Desk()
        self.counts = WireCounts()
        self.num_streams = 0
        self.limits = replace(limits, max_streams_per_body=num_streams)
        self.server = server or Server(self.desk, limits=self.limits)
        self.sender = sender
        self.num_refused = 0  # streams, for want of a place
        self.traffic = Traffic(self.counts, limits=self.limits)
        self.is_offer_let_in: asyncio.Event | None = None
        self.has_part_stream = asyncio.Event()
        self._serving: set[asyncio.Task[None]] = set()
        self.sending = Sending(
            open_stream=self.open,
            num_at_first=lambda round_trip_seconds: num_streams,
            most_at_rest=lambda: most_at_rest,
            traffic=self.traffic,
            limits=self.limits,
        )

    @asynccontextmanager
    async def open(self, sender: NodeId | None = None) -> AsyncIterator[TransferStream]:
        number, self.num_streams = self.num_streams, self.num_streams + 1
        if number:
            self.has_part_stream.set()
        near, far = socket.socketpair()
        theirs = Breaking if number in self.breaks else TransferStream
        stream = await self._stream(near, TransferStream, self.traffic)
        served = await self._stream(far, theirs, Traffic(WireCounts(), limits=self.limits))
        if isinstance(served, Breaking):
            served.parts_left = self.breaks[number]
        late = self.is_offer_let_in if number == 0 else None
        task = asyncio.create_task(self._serve(served, sender or self.sender, late))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        try:
            yield stream
        finally:
            stream.abort()
            stream.count_ended()

    async def _stream(
        self, end: socket.socket, kind: type[TransferStream], traffic: Traffic
    ) -> TransferStream:
        reader, writer = await asyncio.open_connection(sock=end)
        return kind(reader, writer, idle_seconds=self.limits.idle_seconds, traffic=traffic)

    async def _serve(
        self, stream: TransferStream, sender: NodeId, late: asyncio.Event | None
    ) -> None:
        if late is not None:
            await late.wait()
        try:
            await self.server.serve(stream, sender)
        except TransferRefusedError as refusal:  # there is no place
            self.num_refused += 1
            await stream.receive(wire.TransferRequest)
            await refuse(stream, str(refusal))
            await stream.outlast()
        except (FrameError, asyncio.CancelledError, *BROKEN):
            stream.abort()

    async def push(self, payload: Payload) -> None:
        await self.sending.push(payload)

    def break_off(self) -> None:
        """The receiver's end of all streams that are served."""
        for task in self._serving:
            task.cancel()

    async def settle(self) -> None:
        """Waits until no stream is served any more."""
        async with asyncio.timeout(60):
            while self._serving:
                await asyncio.wait(set(self._serving))

    @property
    def sent_bytes(self) -> int:
        return sum(sent for sent, _ in self.counts.totals().values())


def part_of(payload: Payload, index: int, num_bytes: int = PART) -> wire.Part:
    return wire.Part(index=index, digest=payload.digest, num_bytes=num_bytes)


async def offered(link: Wire, stream: TransferStream, payload: Payload) -> None:
    part_bytes = part_bytes_for(len(payload.body))
    offer = wire.Offer(header=payload.header.encode(), part_bytes=part_bytes)
    await stream.send(wire.TransferRequest(offer=offer))
    response = await stream.receive(wire.TransferResponse)
    assert response.status == wire.TRANSFER_STATUS_GO_ON
