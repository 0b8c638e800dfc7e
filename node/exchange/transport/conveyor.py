"""The way to one peer: bodies go one after the other, in parts, over a few streams that stay open.

A round's bodies for a peer are wanted one by one: the first is reduced while the second travels. Sent
side by side they would all arrive at the end; sent each when the one before has arrived, the link
would lie idle for a round trip between two of them. Here each stream (a stripe) takes the next part
of the first body that has one left, so the link is never idle and the bodies arrive in order.

One libp2p stream fills its window and waits for a round trip; several fill the link. Each part is
acknowledged. When a stripe breaks, its parts go over another one. Between two rounds a few of them stay
open, at rest: libp2p has widened their windows by then, and a new one would begin with a narrow one.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Set
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import structlog

from node.exchange.transport.answers import expect
from node.exchange.transport.frames import FrameError, TransferStream
from node.exchange.transport.load import Load, Turn
from node.exchange.transport.parts import (
    FIRST_ROUND_TRIP_SECONDS,
    PARTS_IN_WINDOW,
    STRIPED_BYTES,
    WIDEN_SECONDS,
    Flight,
    Widening,
    part_bytes_for,
)
from node.exchange.transport.rates.uplink import UnderWay, Uplink
from node.exchange.transport.stripe import Sent, Stripe, send_part
from node.exchange.transport.transport import TransferRefusedError
from protocol.payload import Payload
from protocol.v1 import transfer_pb2 as wire

MOST_BODIES = 8
"""On their way to one peer at once, however small: each waits for its verdict on a stream of its own,
and a peer lets only so many in (Limits.max_streams_per_peer)."""

MOST_BREAKS = 3
"""Stripes that may break one after the other, without a part getting through, until pushes fail."""

UNUSED_SECONDS = 600.0
"""A stripe that had nothing to carry for so long is closed: longer than most pauses between rounds."""

WORTH_KEEPING = 8
"""Parts that a stripe has carried when it stays open over a pause: libp2p widens a window that is used up
several times. One that is not may be only half free in the next round, and a fresh one is better."""

OpenStream = Callable[[], AbstractAsyncContextManager[TransferStream]]
"""Opens one more stream to the peer. Raises what `broken` names, as everything on it does."""

_log = structlog.get_logger(__name__)

_LENGTHENING = 1.25
"""By how much a round trip may be longer than the one that was known before."""


class Conveyor:
    """All that is pushed to one peer."""

    def __init__(
        self,
        *,
        open_stream: OpenStream,
        broken: tuple[type[Exception], ...],
        num_at_first: Callable[[float], int],
        most_streams: int,
        most_at_rest: Callable[[], int],
        uplink: Uplink,
    ) -> None:
        """Begins with as many streams as `num_at_first` says, and opens more while that pays.

        It is told how many seconds a round trip takes. While there is nothing to carry it keeps
        `most_at_rest` of them open.
        """
        self._open_stream = open_stream
        self._broken = broken
        self._num_at_first = num_at_first
        self._most_streams = most_streams
        self._most_at_rest = most_at_rest
        self._uplink = uplink
        self._round_trip_seconds: float | None = None  # of offers, the shortest lately
        self._places = asyncio.Semaphore(MOST_BODIES)
        self._turn = asyncio.Lock()  # first come, first served
        self._loads: list[Load] = []  # in their order
        self._stripes: dict[asyncio.Task[None], Stripe] = {}
        self._running: asyncio.Task[None] | None = None
        self._may_go = asyncio.Event()  # parts that wait, or room for one
        self._changed = asyncio.Event()  # loads or stripes
        self._errors: list[Exception] = []  # of stripes that broke since a part got through
        self._acknowledged_bytes = 0
        self._flight = Flight()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is on its way in parts."""
        return not self._loads

    @property
    def round_trip_seconds(self) -> float:
        """Of offers, the shortest lately; a guess before the first."""
        known = self._round_trip_seconds
        return FIRST_ROUND_TRIP_SECONDS if known is None else known

    async def push(self, payload: Payload) -> None:
        """Returns once the peer holds the payload. Raises as everything on its streams does.

        The body follows its offer at once: nearly every offer is accepted, and the link would be idle
        meanwhile.
        """
        body_bytes = len(payload.body)
        part_bytes = part_bytes_for(body_bytes) if body_bytes >= STRIPED_BYTES else 0
        offer = wire.Offer(header=payload.header.encode(), part_bytes=part_bytes)
        clock = asyncio.get_running_loop().time
        async with self._in_turn() as turn, self._open_stream() as stream:
            with stream.tally.sending():
                stream.carries(payload.header.kind)
                offered_at, sent_at = clock(), stream.tally.now()

                async def verdict(accept: Callable[[bytes], None]) -> None:
                    response = await expect(stream, wire.TRANSFER_STATUS_GO_ON)
                    self._note_round_trip(clock() - offered_at)
                    accept(response.held_parts)
                    await expect(stream, wire.TRANSFER_STATUS_RECEIVED)

                await stream.send(wire.TransferRequest(offer=offer))
                if part_bytes:
                    async with self._carrying(payload, turn) as load:
                        await _unless_failed(verdict(load.accept), load.failed)
                else:
                    under_way = self._uplink.begin(self, body_bytes, now=clock(), is_whole=True)
                    sending = asyncio.ensure_future(_send_whole(stream, payload, turn, under_way))
                    try:
                        await _unless_failed(verdict(lambda held_map: None), sending)
                        stream.moved(sent_bytes=body_bytes, since=sent_at)
                        under_way.answered(clock())
                    finally:
                        under_way.lost(clock())

    def _note_round_trip(self, seconds: float) -> None:
        # The shortest lately: queues come and go, and ways change.
        known = self._round_trip_seconds
        self._round_trip_seconds = seconds if known is None else min(seconds, _LENGTHENING * known)
        self._uplink.goes_round_in(self, self._round_trip_seconds)

    @asynccontextmanager
    async def _in_turn(self) -> AsyncIterator[Turn]:
        """Waits until all of the bodies before is on its way. Passed on at the end at the latest."""
        async with self._places:
            await self._turn.acquire()
            turn = Turn(self._turn)
            try:
                yield turn
            finally:
                turn.pass_on()

    @asynccontextmanager
    async def _carrying(self, payload: Payload, turn: Turn) -> AsyncIterator[Load]:
        """Sends the parts of a body that was just offered, as long as this is entered."""
        load = Load(payload, turn, on_waiting=self._wake)
        self._loads.append(load)
        self._wake()
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        try:
            yield load
        finally:
            self._loads.remove(load)
            if not self._loads:
                await self._rest()

    def _wake(self) -> None:
        self._may_go.set()
        self._changed.set()

    async def _rest(self) -> None:
        """Keeps only stripes that are wide, and carry nothing of bodies that were given up."""
        worth = [
            task
            for task, stripe in self._stripes.items()
            if not stripe.under_way and stripe.num_carried >= WORTH_KEEPING
        ]
        await self._end(self._stripes.keys() - set(worth[: self._most_at_rest()]))

    async def close(self) -> None:
        """Ends stripes that are at rest; bodies that are still on their way end with their streams."""
        if self.is_empty:
            await self._end(self._stripes.keys())

    async def _end(self, stripes: Set[asyncio.Task[None]]) -> None:
        running, self._running = self._running, None
        tasks = [*stripes, running] if running is not None else [*stripes]
        for task in tasks:
            self._stripes.pop(task, None)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        """Keeps as many stripes open as pay."""
        clock = asyncio.get_running_loop().time
        num_streams = self._num_at_first(self.round_trip_seconds)
        widening = Widening(now=clock())
        self._errors.clear()
        self._acknowledged_bytes = 0
        while True:
            num_waiting = sum(load.num_waiting for load in self._loads)
            has_room = self._flight.has_room(clock())
            while len(self._stripes) < num_streams and num_waiting > 0 and has_room:
                self._begin_stripe()
                num_waiting -= 1
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WIDEN_SECONDS):
                    await self._changed.wait()
            if self._errors:
                num_streams = max(1, min(num_streams, len(self._stripes)))
                if len(self._errors) >= MOST_BREAKS and not self._stripes:
                    for load in self._loads:
                        load.fail(self._errors[-1])
                    self._errors.clear()
            elif num_streams < min(self._most_streams, num_waiting) and widening.is_wider_better(
                self._acknowledged_bytes, clock()
            ):
                num_streams += 1

    def _begin_stripe(self) -> None:
        stripe = Stripe()
        task = asyncio.create_task(self._carry(stripe))
        self._stripes[task] = stripe
        task.add_done_callback(self._end_stripe)

    def _end_stripe(self, task: asyncio.Task[None]) -> None:
        self._stripes.pop(task, None)
        self._wake()
        if not task.cancelled() and (error := task.exception()) is not None:
            if not self._loads:
                _log.error("a stripe at rest failed inside this node", exc_info=error)
            for load in self._loads:  # a fault of ours: it must not look like a link's
                load.fail(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    async def _carry(self, stripe: Stripe) -> None:
        """Over one stream: sends part after part, and hears of each that it is there."""
        under_way = stripe.under_way
        try:
            async with self._open_stream() as stream:
                await stream.send(wire.TransferRequest(stripe=wire.Stripe()))
                async with asyncio.TaskGroup() as both_ways:
                    hearing = both_ways.create_task(self._hear(stream, stripe))
                    while (taken := await self._next_part(stripe)) is not None or under_way:
                        if taken is not None:
                            sent = self._sent(*taken, at=stream.tally.now())
                            under_way.append(sent)
                            await send_part(stream, sent)
                            if len(under_way) >= PARTS_IN_WINDOW:
                                # One part more would wait here, and another stripe can carry it.
                                await stripe.is_wide.wait()
                    hearing.cancel()
        except* self._broken as errors:
            self._errors.append(_first_of(errors))
        finally:
            now = asyncio.get_running_loop().time()
            for sent in reversed(under_way):
                self._flight.end(sent.num_bytes, now=now)
                sent.under_way.lost(now)
                sent.load.give_back(sent.part)

    def _sent(self, load: Load, part: int, at: float) -> Sent:
        num_bytes = len(load.part(part))
        now = asyncio.get_running_loop().time()
        self._flight.begin(num_bytes, now=now)
        self._may_go.set()  # for stripes that let this one go first
        return Sent(load, part, at, self._uplink.begin(self, num_bytes, now=now))

    async def _next_part(self, stripe: Stripe) -> tuple[Load, int] | None:
        """The next part of the first body that has one; None when none could go for a while.

        Of the stripes that are ready one whose window has room takes it, if there is one: else it waits.
        """
        stripe.is_ready = True
        try:
            while True:
                if (taken := self._take(stripe)) is not None:
                    return taken
                self._may_go.clear()
                async with asyncio.timeout(UNUSED_SECONDS):
                    await self._may_go.wait()
        except TimeoutError:
            return None
        finally:
            stripe.is_ready = False

    def _take(self, stripe: Stripe) -> tuple[Load, int] | None:
        ready = (each.num_in_window for each in self._stripes.values() if each.is_ready)
        if stripe.num_in_window > min(ready):
            return None
        if self._flight.has_room(asyncio.get_running_loop().time()):
            for load in self._loads:
                if (index := load.take()) is not None:
                    return load, index
        return None

    async def _hear(self, stream: TransferStream, stripe: Stripe) -> None:
        clock = asyncio.get_running_loop().time
        answered_at = -math.inf  # the part before, which this one waited for
        while True:
            # Patient: a paced part takes its time, and each push has its limit.
            response = await stream.receive(wire.TransferResponse, is_patient=True)
            if response.status == wire.TRANSFER_STATUS_REFUSED:
                raise TransferRefusedError(response.reason or "refused without a reason")
            if not stripe.under_way or stripe.under_way[0].part != response.part:
                raise FrameError(f"part {response.part} was answered, which was not the next one")
            sent = stripe.under_way.popleft()
            load, index, sent_at, _ = sent
            sent.under_way.answered(clock())
            self._flight.end(sent.num_bytes, now=clock(), is_answered=True)
            self._may_go.set()
            stripe.is_wide.set()
            stripe.num_carried += 1
            match response.status:
                case wire.TRANSFER_STATUS_PART_RECEIVED | wire.TRANSFER_STATUS_PART_KEPT as status:
                    is_kept = status == wire.TRANSFER_STATUS_PART_KEPT
                    num_bytes = load.keep(index) if is_kept else load.acknowledge(index)
                    stream.moved(sent_bytes=num_bytes, since=max(sent_at, answered_at))
                    answered_at = stream.tally.now()
                    self._acknowledged_bytes += num_bytes
                    self._errors.clear()
                case wire.TRANSFER_STATUS_PART_DROPPED:
                    load.drop(index)
                case status:
                    raise FrameError(f"status {status} came where a part's was due")


async def _send_whole(
    stream: TransferStream, payload: Payload, turn: Turn, under_way: UnderWay
) -> None:
    await stream.send_body(payload.body, is_answered=True)
    under_way.is_out(asyncio.get_running_loop().time())
    turn.pass_on()


async def _unless_failed(verdict: Coroutine[Any, Any, None], sending: asyncio.Future[None]) -> None:
    """What the peer says of a body, which it can say before all is sent; or what keeps us from it."""
    hearing = asyncio.ensure_future(verdict)
    try:
        await asyncio.wait((hearing, sending), return_when=asyncio.FIRST_COMPLETED)
        if not hearing.done():
            await sending
        await hearing
    finally:
        for task in (hearing, sending):
            task.cancel()
        await asyncio.gather(hearing, sending, return_exceptions=True)


def _first_of(errors: BaseExceptionGroup[Exception]) -> Exception:
    first: BaseException = errors
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    assert isinstance(first, Exception)
    return first
