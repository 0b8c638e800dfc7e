"""Runs the sender of one peer: opens streams, writes parts, hears of them, and tells it all that happens."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

import structlog

from node.exchange.peers import Limits, PeerUnreachableError, TransferRefusedError
from node.exchange.transport.rates.traffic import Traffic
from node.exchange.transport.rates.uplink import UnderWay
from node.exchange.transport.sender import (
    Action,
    Begin,
    Carry,
    Close,
    Fail,
    Open,
    OutgoingBody,
    PartStream,
    PeerSender,
    PeerState,
    SentPart,
)
from node.exchange.transport.streams import BROKEN, FrameError, TransferStream, expect
from node.heavy import cancelled
from protocol.v1 import transfer_pb2 as wire
from protocol.wire.payload import CONTRIBUTION, RESULT, Payload

OpenStream = Callable[[], AbstractAsyncContextManager[TransferStream]]
"""Opens one more stream to the peer. Raises what is `_BREAKING`, as everything on it does."""

_BREAKING = (*BROKEN, FrameError, TransferRefusedError, PeerUnreachableError)
"""What ends one stream, and not the body that it carries a part of."""

_log = structlog.get_logger(__name__)


class _Push(OutgoingBody):
    """A body, and who waits for what becomes of it."""

    def __init__(self, payload: Payload) -> None:
        header = payload.header
        super().__init__(
            len(payload.body),
            even_in=header.round if header.kind == RESULT else None,
            is_prompt=header.kind == CONTRIBUTION,
        )
        self.payload = payload
        self.may_begin = asyncio.Event()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Raises what broke the streams when no part gets through any more."""

    def fail(self, error: Exception) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)
            self.failed.exception()  # nobody may be listening any more


class Sending:
    """All that is pushed to one peer."""

    def __init__(
        self,
        *,
        open_stream: OpenStream,
        num_at_first: Callable[[float], int],
        most_at_rest: Callable[[], int],
        traffic: Traffic,
        limits: Limits,
    ) -> None:
        """Begins with as many streams as `num_at_first` says, and opens more while that pays.

        It is told how many seconds a round trip takes. While there is nothing to carry it keeps
        `most_at_rest` of them open.
        """
        self._open_stream = open_stream
        self._num_at_first = num_at_first
        self._most_at_rest = most_at_rest
        self._traffic = traffic
        self._limits = limits
        self._sender = PeerSender(limits, traffic.uplink, traffic.evenness)
        traffic.on_progress.append(self._go_on)
        self._pushes: set[_Push] = set()
        self._inboxes: dict[PartStream, asyncio.Queue[SentPart]] = {}
        self._tasks: dict[PartStream, asyncio.Task[None]] = {}
        self._looking: asyncio.Task[None] | None = None

    @property
    def is_sending(self) -> bool:
        """Whether something is on its way in parts."""
        return self._sender.is_sending

    @property
    def is_waiting(self) -> bool:
        """Whether all that may go is out, and not answered."""
        return self._sender.state() in (PeerState.WAITING, PeerState.IN_LINE)

    @property
    def round_trip_seconds(self) -> float:
        """Of offers, the shortest lately; a guess before the first."""
        return self._sender.round_trip_seconds

    async def push(self, payload: Payload) -> bytes:
        """Returns its receipt once the peer holds the payload. Raises as everything on its streams does."""
        push = _Push(payload)
        async with self._in_line(push), self._open_stream() as stream:
            with stream.traffic.sending():
                stream.carries(payload.header.kind)
                offered_at = self._traffic.clock()
                offer = wire.Offer(header=payload.header.encode(), part_bytes=push.part_bytes)
                await stream.send(wire.TransferRequest(offer=offer))
                num_streams = self._num_at_first(self._sender.round_trip_seconds)
                now = self._traffic.clock()
                self._do(self._sender.offered(push, num_streams=num_streams, now=now))
                verdict = self._verdict(stream, push, offered_at)
                if push.part_bytes:
                    return await _unless_failed(verdict, push.failed)
                return await self._push_whole(stream, push, verdict, since=offered_at)

    async def _verdict(self, stream: TransferStream, push: _Push, offered_at: float) -> bytes:
        response = await expect(stream, wire.TRANSFER_STATUS_GO_ON)
        now = self._traffic.clock()
        self._sender.went_round_in(now - offered_at)
        self._do(self._sender.accepted(push, response.held_parts, now=now))
        return (await expect(stream, wire.TRANSFER_STATUS_RECEIVED)).receipt

    async def _push_whole(
        self,
        stream: TransferStream,
        push: _Push,
        verdict: Coroutine[Any, Any, bytes],
        *,
        since: float,
    ) -> bytes:
        num_bytes, clock = push.num_bytes, self._traffic.clock
        uplink = self._traffic.uplink
        under_way = uplink.begin(self._sender, num_bytes, now=clock(), is_whole=True)
        sending = asyncio.ensure_future(self._send_whole(stream, push, under_way))
        try:
            receipt = await _unless_failed(verdict, sending)
            stream.moved(sent_bytes=num_bytes, since=since)
            under_way.answered(clock())
            return receipt
        finally:
            under_way.lost(clock())

    async def _send_whole(self, stream: TransferStream, push: _Push, under_way: UnderWay) -> None:
        await stream.send_body(push.payload.body, is_answered=True)
        now = self._traffic.clock()
        under_way.is_out(now)
        self._do(self._sender.went_out(push, now=now))

    @asynccontextmanager
    async def _in_line(self, push: _Push) -> AsyncIterator[None]:
        """Waits until the body may be offered; ends what the sender knows of it."""
        has_arrived = False
        self._pushes.add(push)
        try:
            self._do(self._sender.add(push, now=self._traffic.clock()))
            await push.may_begin.wait()
            yield
            has_arrived = True
        finally:
            self._pushes.remove(push)
            actions = self._sender.ended(
                push,
                has_arrived=has_arrived,
                most_at_rest=self._most_at_rest(),
                now=self._traffic.clock(),
            )
            await self._done(actions)
            self._traffic.tell_progress()

    async def close(self) -> None:
        """Ends streams that are at rest; bodies that are still on their way end with their streams."""
        await self._done(self._sender.close())

    def _go_on(self) -> None:
        if self._sender.is_held:
            self._do(self._sender.looked(now=self._traffic.clock()))

    # What the sender asks for.

    def _do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Begin(body=_Push() as push):
                    push.may_begin.set()
                case Open(stream=stream):
                    self._inboxes[stream] = asyncio.Queue()
                    task = self._tasks[stream] = asyncio.create_task(self._run(stream))
                    task.add_done_callback(partial(self._end, stream))
                case Carry(stream=stream, part=part):
                    self._inboxes[stream].put_nowait(part)
                case Close(stream=stream):
                    self._tasks[stream].cancel()
                case Fail(body=_Push() as push, error=error):
                    push.fail(error)
        if self._looking is None and self._sender.is_sending:
            self._looking = asyncio.create_task(self._look())

    async def _done(self, actions: Iterable[Action]) -> None:
        """Does it, and waits for what it ends."""
        actions = list(actions)
        closing = [self._tasks[a.stream] for a in actions if isinstance(a, Close)]
        self._do(actions)
        if self._looking is not None and not self._sender.is_sending:
            self._looking.cancel()
            closing.append(self._looking)
            self._looking = None
        await asyncio.gather(*closing, return_exceptions=True)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(self._limits.widen_seconds)
            num_streams = self._num_at_first(self._sender.round_trip_seconds)
            self._do(self._sender.looked(num_streams=num_streams, now=self._traffic.clock()))

    def _end(self, stream: PartStream, task: asyncio.Task[None]) -> None:
        del self._tasks[stream], self._inboxes[stream]
        if not task.cancelled() and (error := task.exception()) is not None:
            if not self._pushes:
                _log.error("a stream at rest failed inside this node", exc_info=error)
            for push in self._pushes:  # a fault of ours: it must not look like a link's
                push.fail(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    # Streams of parts.

    async def _run(self, stream: PartStream) -> None:
        """Over one stream: sends part after part, and hears of each that it is there."""
        broke: Exception | None = None
        try:
            async with self._open_stream() as link:
                await link.send(wire.TransferRequest(stripe=wire.Stripe()))
                self._do(self._sender.opened(stream, now=self._traffic.clock()))
                async with asyncio.TaskGroup() as both_ways:
                    hearing = both_ways.create_task(self._hear(link, stream))
                    while (part := await self._next_part(stream)) is not None or stream.under_way:
                        if part is not None:
                            await self._send_part(link, part)
                            self._do(self._sender.wrote(stream, part, now=self._traffic.clock()))
                    hearing.cancel()
        except* _BREAKING as errors:
            broke = _first_of(errors)
        finally:
            self._do(self._sender.closed(stream, now=self._traffic.clock(), error=broke))

    async def _next_part(self, stream: PartStream) -> SentPart | None:
        """What the sender gives it; None when that is nothing for long."""
        try:
            async with asyncio.timeout(self._limits.unused_seconds):
                return await self._inboxes[stream].get()
        except TimeoutError:
            return None

    async def _send_part(self, link: TransferStream, part: SentPart) -> None:
        """Hands a part on to libp2p; it will be answered."""
        assert isinstance(part.body, _Push)
        payload = part.body.payload
        link.carries(payload.header.kind)
        await link.send(
            wire.Part(index=part.index, digest=payload.digest, num_bytes=part.num_bytes)
        )
        content = memoryview(payload.body)[part.span]
        await link.send_body(content, is_answered=True)

    async def _hear(self, link: TransferStream, stream: PartStream) -> None:
        while True:
            # Patient: a paced part takes its time, and each push has its limit.
            response = await link.receive(wire.TransferResponse, is_patient=True)
            if response.status == wire.TRANSFER_STATUS_REFUSED:
                raise TransferRefusedError(response.reason or "refused without a reason")
            if not stream.under_way or stream.under_way[0].index != response.part:
                raise FrameError(f"part {response.part} was answered, which was not the next one")
            since = max(stream.under_way[0].sent_at, stream.answered_at)
            now = self._traffic.clock()
            match response.status:
                case wire.TRANSFER_STATUS_PART_RECEIVED | wire.TRANSFER_STATUS_PART_KEPT as status:
                    is_kept = status == wire.TRANSFER_STATUS_PART_KEPT
                    num_bytes, actions = self._sender.received(
                        stream, now=now, is_kept=is_kept, is_held=response.is_held
                    )
                    link.moved(sent_bytes=num_bytes, since=since)
                    self._traffic.tell_progress()
                    stream.answered_at = self._traffic.clock()
                case wire.TRANSFER_STATUS_PART_DROPPED:
                    actions = self._sender.dropped(stream, now=now)
                case status:
                    raise FrameError(f"status {status} came where a part's was due")
            self._do(actions)


async def _unless_failed(
    verdict: Coroutine[Any, Any, bytes], sending: asyncio.Future[None]
) -> bytes:
    """What the peer says of a body, which it can say before all is sent; or what keeps us from it."""
    hearing = asyncio.ensure_future(verdict)
    try:
        await asyncio.wait((hearing, sending), return_when=asyncio.FIRST_COMPLETED)
        if not hearing.done():
            await sending
        return await hearing
    finally:
        await cancelled((hearing, sending))


def _first_of(errors: BaseExceptionGroup[Exception]) -> Exception:
    first: BaseException = errors
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    assert isinstance(first, Exception)
    return first
