"""A conveyor and its receiver in one process, over socket pairs."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from transport_peers import Desk

from node.exchange.transport.conveyor import Conveyor
from node.exchange.transport.frames import BROKEN, FrameError, Limits, TransferStream
from node.exchange.transport.inbound import Inbounds
from node.exchange.transport.parts import LEAST_PART_BYTES, part_bytes_for
from node.exchange.transport.rates.pacing import Pacer
from node.exchange.transport.rates.uplink import Uplink
from node.exchange.transport.serving import serve, verify_inline
from node.exchange.transport.tally import Tally
from node.exchange.transport.transport import TransferRefusedError
from protocol.payload import Payload
from protocol.rounds import NodeId
from protocol.v1 import transfer_pb2 as wire
from protocol.wire_count import WireCounts

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
        idle_seconds: float = 20,
    ) -> None:
        self.breaks = breaks or {}  # number of the stream -> whole parts before it breaks
        self.desk = Desk()
        self.inbounds = Inbounds()
        self.counts = WireCounts()
        self.num_streams = 0
        self.limits = Limits(idle_seconds=idle_seconds)
        self.is_crowded = False
        self.is_offer_let_in: asyncio.Event | None = None
        self.has_stripe = asyncio.Event()
        self._serving: set[asyncio.Task[None]] = set()
        self.conveyor = Conveyor(
            open_stream=self.open,
            broken=(*BROKEN, FrameError, TransferRefusedError),
            num_at_first=lambda round_trip_seconds: num_streams,
            most_streams=num_streams,
            most_at_rest=lambda: most_at_rest,
            uplink=Uplink(),
        )

    @asynccontextmanager
    async def open(self, sender: NodeId = SENDER) -> AsyncIterator[TransferStream]:
        number, self.num_streams = self.num_streams, self.num_streams + 1
        if number:
            self.has_stripe.set()
        near, far = socket.socketpair()
        theirs = Breaking if number in self.breaks else TransferStream
        stream = await self._stream(near, TransferStream, self.counts)
        served = await self._stream(far, theirs, WireCounts())
        if isinstance(served, Breaking):
            served.parts_left = self.breaks[number]
        late = self.is_offer_let_in if number == 0 else None
        task = asyncio.create_task(self._serve(served, sender, late))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        try:
            yield stream
        finally:
            stream.abort()
            stream.count_ended()

    async def _stream(
        self, end: socket.socket, kind: type[TransferStream], counts: WireCounts
    ) -> TransferStream:
        reader, writer = await asyncio.open_connection(sock=end)
        pacer = Pacer(None, floor_bytes_per_second=2048)
        idle_seconds = self.limits.idle_seconds
        return kind(reader, writer, idle_seconds=idle_seconds, pacer=pacer, tally=Tally(counts))

    async def _serve(
        self, stream: TransferStream, sender: NodeId, late: asyncio.Event | None
    ) -> None:
        if late is not None:
            await late.wait()
        try:
            await serve(
                stream,
                sender,
                self.desk,
                limits=self.limits,
                verify=verify_inline,
                inbounds=self.inbounds,
                pieces=asyncio.Semaphore(1),
                is_crowded=self.is_crowded,
            )
            await stream.outlast()
        except (FrameError, asyncio.CancelledError, *BROKEN):
            stream.abort()

    async def push(self, payload: Payload) -> None:
        await self.conveyor.push(payload)

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
