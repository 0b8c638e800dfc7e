"""A conveyor and its receiver in one process, over socket pairs: what comes in which order, what breaks,
what is sent again, what a liar gets.
"""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from transport_peers import Desk, make_payload

from benchmarks.virtual_time import run_in_virtual_time
from node.exchange.transport import early
from node.exchange.transport import inbound as receiving
from node.exchange.transport.conveyor import MOST_BODIES, Conveyor
from node.exchange.transport.early import EARLY_SECONDS, MOST_EARLY_BYTES, EarlyParts
from node.exchange.transport.frames import BROKEN, FrameError, Limits, TransferStream
from node.exchange.transport.inbound import (
    KEPT_SECONDS,
    MOST_KEPT_FROM_ONE,
    Inbounds,
    take_stripe,
)
from node.exchange.transport.pacing import Pacer
from node.exchange.transport.parts import LEAST_PART_BYTES, part_bytes_for
from node.exchange.transport.serving import push_over, serve, verify_inline
from node.exchange.transport.tally import Tally
from node.exchange.transport.transport import TransferRefusedError
from protocol.payload import Payload
from protocol.rounds import Digest, NodeId
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

    def __init__(self, breaks: dict[int, int] | None = None, *, num_streams: int = 3) -> None:
        self.breaks = breaks or {}  # number of the stream -> whole parts before it breaks
        self.desk = Desk()
        self.inbounds = Inbounds()
        self.counts = WireCounts()
        self.num_streams = 0
        self.is_crowded = False
        self.is_offer_let_in: asyncio.Event | None = None
        self.has_stripe = asyncio.Event()
        self._serving: set[asyncio.Task[None]] = set()
        self.conveyor = Conveyor(
            open_stripe=self.open,
            broken=(*BROKEN, FrameError, TransferRefusedError),
            num_at_first=lambda: num_streams,
            most_streams=num_streams,
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
        return kind(reader, writer, idle_seconds=20, pacer=pacer, tally=Tally(counts))

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
                limits=Limits(idle_seconds=20),
                verify=verify_inline,
                inbounds=self.inbounds,
                is_crowded=self.is_crowded,
            )
            await stream.outlast()
        except (FrameError, *BROKEN):
            stream.abort()

    async def push(self, payload: Payload) -> None:
        async with self.conveyor.turn() as turn, self.open() as stream:
            await push_over(stream, payload, self.conveyor, turn)

    async def settle(self) -> None:
        """Waits until no stream is served any more."""
        async with asyncio.timeout(60):
            while self._serving:
                await asyncio.wait(set(self._serving))

    @property
    def sent_bytes(self) -> int:
        return sum(sent for sent, _ in self.counts.totals().values())


async def test_a_large_body_comes_over_several_streams_and_whole() -> None:
    link, payload = Wire(), make_payload(body=BODY)
    await link.push(payload)
    assert link.num_streams == 1 + 3
    assert link.desk.received == [(SENDER, payload)]
    assert len(BODY) <= link.counts.totals()["result"][0] < 1.1 * len(BODY)


async def test_a_small_body_takes_one_stream() -> None:
    link, payload = Wire(), make_payload(body=BODY[: PART - 1])
    await link.push(payload)
    assert link.num_streams == 1
    assert link.desk.received == [(SENDER, payload)]


@pytest.mark.parametrize("breaks", [{1: 0}, {1: 1, 2: 2}, {1: 0, 2: 0, 4: 2}])
async def test_what_a_broken_stripe_carried_goes_over_another(breaks: dict[int, int]) -> None:
    link, payload = Wire(breaks), make_payload(body=BODY)
    await link.push(payload)
    assert link.desk.received == [(SENDER, payload)]


async def test_a_push_that_broke_off_goes_on_where_it_was() -> None:
    link, payload = Wire({1: 6, 2: 0, 3: 0, 4: 0}, num_streams=1), make_payload(body=BODY)
    with pytest.raises(ConnectionError):
        await link.push(payload)
    await link.settle()
    assert not link.desk.received
    sent_before = link.sent_bytes
    await link.push(payload)
    assert link.desk.received == [(SENDER, payload)]
    assert link.sent_bytes - sent_before < 1.1 * (len(BODY) - 6 * PART)


async def test_what_broke_off_is_offered_anew_and_admitted_anew() -> None:
    link, payload = Wire({1: 6, 2: 0, 3: 0, 4: 0}, num_streams=1), make_payload(body=BODY)
    with pytest.raises(ConnectionError):
        await link.push(payload)
    await link.settle()
    assert link.desk.abandoned_headers == [payload.header]
    link.desk.max_body_bytes = 0
    with pytest.raises(TransferRefusedError, match="too many"):
        await link.push(payload)


async def test_bodies_arrive_in_the_order_in_which_they_were_pushed() -> None:
    link = Wire(num_streams=1)
    bodies = [os.urandom(3 * PART) for _ in range(2 * MOST_BODIES)]
    payloads = [make_payload(body=body, round=number) for number, body in enumerate(bodies)]
    await asyncio.gather(*map(link.push, payloads))
    assert [payload.header.round for _, payload in link.desk.received] == list(range(len(bodies)))


async def test_stripes_stay_open_from_body_to_body_and_close_after_the_last() -> None:
    link = Wire()
    payloads = [make_payload(body=os.urandom(3 * PART), round=number) for number in range(6)]
    await asyncio.gather(*map(link.push, payloads))
    assert link.num_streams == 6 + 3
    await link.settle()
    assert link.conveyor.is_empty


async def test_a_push_that_is_given_up_leaves_the_way_to_others() -> None:
    link, payload = Wire(), make_payload(body=BODY)
    given_up = asyncio.create_task(link.push(make_payload(body=BODY, round=7)))
    await link.has_stripe.wait()
    given_up.cancel()
    await asyncio.wait([given_up])
    await link.push(payload)
    assert (SENDER, payload) in link.desk.received


async def test_bodies_on_their_way_at_once_do_not_mix() -> None:
    link = Wire()
    payloads = [make_payload(body=os.urandom(len(BODY)), round=number) for number in range(4)]
    await asyncio.gather(*map(link.push, payloads))
    received = sorted((p for _, p in link.desk.received), key=lambda p: p.header.round)
    assert received == payloads


async def test_a_damaged_body_is_refused_and_nothing_of_it_is_kept() -> None:
    link, good = Wire(), make_payload(body=BODY)
    bad = Payload(header=good.header, body=BODY[:-1] + bytes([BODY[-1] ^ 1]))
    with pytest.raises(TransferRefusedError, match="damaged"):
        await link.push(bad)
    await link.settle()
    sent_before = link.sent_bytes
    await link.push(good)
    assert link.desk.received == [(SENDER, good)]
    assert link.sent_bytes - sent_before > len(BODY)


async def test_an_offer_in_parts_of_an_odd_size_is_refused() -> None:
    link, payload = Wire(), make_payload(body=BODY)
    async with link.open() as stream:
        offer = wire.Offer(header=payload.header.encode(), part_bytes=1)
        await stream.send(wire.TransferRequest(offer=offer))
        response = await stream.receive(wire.TransferResponse)
    assert response.status == wire.TRANSFER_STATUS_REFUSED
    assert "parts of 1 bytes" in response.reason


def part_of(payload: Payload, index: int, num_bytes: int = PART) -> wire.Part:
    return wire.Part(index=index, digest=payload.digest, num_bytes=num_bytes)


@pytest.mark.parametrize(
    ("room_bytes", "status"),
    [(2 * PART, wire.TRANSFER_STATUS_PART_KEPT), (PART, wire.TRANSFER_STATUS_PART_DROPPED)],
)
async def test_a_part_of_nothing_that_was_offered_is_kept_if_there_is_room(
    monkeypatch: pytest.MonkeyPatch, room_bytes: int, status: int
) -> None:
    monkeypatch.setattr(early, "MOST_EARLY_BYTES", room_bytes)
    link = Wire()
    async with link.open() as stream:
        await stream.send(wire.TransferRequest(stripe=wire.Stripe()))
        await stream.send(part_of(make_payload(body=BODY), 3))
        await stream.send_body(bytes(PART))
        response = await stream.receive(wire.TransferResponse)
    assert (response.status, response.part) == (status, 3)


class _Answers:
    """Notes what a stripe is answered."""

    def __init__(self) -> None:
        self.statuses: list[int] = []

    def write(self, frame: bytes) -> None:
        self.statuses.append(wire.TransferResponse.FromString(frame[4:]).status)

    async def drain(self) -> None:
        pass


def fed_stripe() -> tuple[TransferStream, asyncio.StreamReader, _Answers]:
    """The receiving end of a stripe, what comes over it, and what is answered."""
    reader, answers = asyncio.StreamReader(), _Answers()
    stream = TransferStream(
        reader,
        answers,  # type: ignore[arg-type]  # as much of a writer as a stripe needs
        idle_seconds=20,
        pacer=Pacer(None, floor_bytes_per_second=2048),
        tally=Tally(WireCounts()),
    )
    return stream, reader, answers


def framed(part: wire.Part) -> bytes:
    return part.ByteSize().to_bytes(4, "little") + part.SerializeToString()


def test_parts_whose_offer_is_not_there_keep_nobody_waiting() -> None:
    async def scene() -> list[int]:
        unknown, there = make_payload(body=BODY), make_payload(body=BODY, round=8)
        inbounds = Inbounds()
        inbounds.begin(SENDER, there.header, there.digest, PART)
        stream, reader, answers = fed_stripe()
        for payload in (unknown, unknown, there):
            reader.feed_data(framed(part_of(payload, 0)) + BODY[:PART])
        reader.feed_eof()
        await take_stripe(stream, SENDER, inbounds)
        assert asyncio.get_running_loop().time() == 0
        return answers.statuses

    kept, received = wire.TRANSFER_STATUS_PART_KEPT, wire.TRANSFER_STATUS_PART_RECEIVED
    assert run_in_virtual_time(scene()) == [kept, kept, received]


@pytest.mark.parametrize(
    ("most_bytes", "status", "held"),
    [
        (PART, wire.TRANSFER_STATUS_PART_RECEIVED, {1}),
        (PART - 1, wire.TRANSFER_STATUS_PART_DROPPED, set()),
    ],
)
def test_a_part_counts_whose_offer_comes_while_it_is_read_unless_it_is_too_large_to_keep(
    monkeypatch: pytest.MonkeyPatch, most_bytes: int, status: int, held: set[int]
) -> None:
    monkeypatch.setattr(receiving, "LEAST_PART_BYTES", most_bytes)

    async def scene() -> None:
        payload, inbounds = make_payload(body=BODY), Inbounds()
        stream, reader, answers = fed_stripe()
        serving = asyncio.create_task(take_stripe(stream, SENDER, inbounds))
        reader.feed_data(framed(part_of(payload, 1)) + BODY[PART : 2 * PART - 1])
        await asyncio.sleep(1)
        inbound = inbounds.begin(SENDER, payload.header, payload.digest, PART)
        reader.feed_data(BODY[2 * PART - 1 : 2 * PART])
        reader.feed_eof()
        await serving
        assert answers.statuses == [status]
        assert inbound.assembly.held == held
        if held:
            assert inbound.assembly.body()[PART : 2 * PART] == BODY[PART : 2 * PART]

    run_in_virtual_time(scene())


@pytest.mark.parametrize(
    ("name", "value", "times_sent"),
    [("EARLY_SECONDS", 3600, 1), ("EARLY_SECONDS", 0, 2), ("MOST_EARLY_BYTES", 0, 2)],
)
async def test_a_body_whose_offer_is_late_holds_no_other_up_and_is_not_sent_over_and_over(
    monkeypatch: pytest.MonkeyPatch, name: str, value: int, times_sent: int
) -> None:
    monkeypatch.setattr(early, name, value)
    link = Wire()
    late, other = (make_payload(body=os.urandom(6 * PART), round=number) for number in range(2))
    link.is_offer_let_in = asyncio.Event()  # of the first stream, which is the offer of `late`
    pushing = asyncio.create_task(link.push(late))
    await link.has_stripe.wait()
    await link.push(other)
    assert link.desk.received == [(SENDER, other)]
    link.is_offer_let_in.set()
    await pushing
    assert link.desk.received == [(SENDER, other), (SENDER, late)]
    assert link.sent_bytes < 1.1 * (times_sent * len(late.body) + len(other.body))


def test_parts_that_come_early_are_kept_for_a_while_and_take_little_room() -> None:
    async def scene() -> None:
        parts, digests = EarlyParts(), [Digest(bytes([number]) * 32) for number in range(3)]
        num_kept = sum(parts.keep(SENDER, digests[0], index, bytes(PART)) for index in range(99))
        assert num_kept == MOST_EARLY_BYTES // (PART + 1056)  # what each takes besides
        assert not parts.keep(SENDER, digests[1], 0, bytes(PART))
        assert parts.keep(SENDER, digests[0], 0, bytes(PART))  # it is there already
        assert parts.keep(NodeId("other"), digests[1], 0, b"another's")
        assert parts.take(SENDER, digests[1]) == {}
        assert len(parts.take(SENDER, digests[0])) == num_kept
        num_empty = sum(parts.keep(SENDER, digests[2], index, b"") for index in range(9999))
        assert num_empty < MOST_EARLY_BYTES // 1000
        await asyncio.sleep(EARLY_SECONDS - 1)
        assert parts.keep(NodeId("other"), digests[2], 0, b"later")
        await asyncio.sleep(2)
        assert parts.take(NodeId("other"), digests[1]) == {}
        assert parts.take(NodeId("other"), digests[2]) == {0: b"later"}
        assert parts.keep(SENDER, digests[1], 0, bytes(PART))  # there is room again

    run_in_virtual_time(scene())


def test_no_more_is_kept_early_of_all_senders_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "MOST_EARLY_BYTES_OF_ALL", 3 * PART)

    async def scene() -> None:
        parts = EarlyParts()
        senders = [NodeId(f"sender-{number}") for number in range(4)]
        kept = [parts.keep(sender, Digest(bytes(32)), 0, bytes(PART)) for sender in senders]
        assert kept == [True, True, False, False]
        parts.clear()
        assert parts.keep(senders[3], Digest(bytes(32)), 0, bytes(PART))

    run_in_virtual_time(scene())


async def test_what_came_early_and_cannot_be_a_part_is_not_taken() -> None:
    link, payload = Wire(), make_payload(body=BODY)
    async with link.open() as stripe:
        await stripe.send(wire.TransferRequest(stripe=wire.Stripe()))
        for index, num_bytes in ((0, PART - 1), (10**6, PART), (10, 18)):
            await stripe.send(part_of(payload, index, num_bytes))
            await stripe.send_body(bytes(num_bytes))
            response = await stripe.receive(wire.TransferResponse)
            assert response.status == wire.TRANSFER_STATUS_PART_KEPT
        await link.push(payload)
    assert link.desk.received == [(SENDER, payload)]


async def test_what_comes_of_a_refused_body_is_dropped_and_of_the_next_one_taken() -> None:
    link, small, payload = Wire(), make_payload(body=BODY[: 2 * PART]), make_payload(body=BODY)
    link.desk.max_body_bytes = len(small.body)
    refused, _ = await asyncio.gather(link.push(payload), link.push(small), return_exceptions=True)
    assert isinstance(refused, TransferRefusedError)
    assert link.desk.received == [(SENDER, small)]
    link.desk.max_body_bytes = len(BODY)
    await link.push(payload)
    assert link.desk.received == [(SENDER, small), (SENDER, payload)]


async def offered(link: Wire, stream: TransferStream, payload: Payload) -> None:
    part_bytes = part_bytes_for(len(payload.body))
    offer = wire.Offer(header=payload.header.encode(), part_bytes=part_bytes)
    await stream.send(wire.TransferRequest(offer=offer))
    response = await stream.receive(wire.TransferResponse)
    assert response.status == wire.TRANSFER_STATUS_GO_ON


async def test_nobody_puts_parts_into_anothers_body() -> None:
    link, payload = Wire(), make_payload(body=BODY)
    async with link.open() as offer, link.open(NodeId("other")) as stripe:
        await offered(link, offer, payload)
        await stripe.send(wire.TransferRequest(stripe=wire.Stripe()))
        await stripe.send(part_of(payload, 0))
        await stripe.send_body(bytes(PART))
        response = await stripe.receive(wire.TransferResponse)
        assert response.status == wire.TRANSFER_STATUS_PART_KEPT
        inbound = link.inbounds.find(SENDER, payload.digest)
        assert inbound is not None
        assert not inbound.assembly.held


@pytest.mark.parametrize(("index", "num_bytes"), [(10**6, PART), (0, PART + 1), (0, 0)])
async def test_a_part_that_cannot_be_ends_its_stream_and_no_other(
    index: int, num_bytes: int
) -> None:
    link, payload = Wire(), make_payload(body=BODY)
    async with link.open() as offer, link.open() as liar:
        await offered(link, offer, payload)
        await liar.send(wire.TransferRequest(stripe=wire.Stripe()))
        await liar.send(part_of(payload, index, num_bytes))
        with pytest.raises((EOFError, OSError)):
            await liar.receive(wire.TransferResponse)
        inbound = link.inbounds.find(SENDER, payload.digest)
        assert inbound is not None
        assert not inbound.is_over
        assert inbound.assembly.held == set()


async def test_who_sends_without_end_what_nobody_wants_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(receiving, "MOST_DROPPED_BYTES", 3 * PART)
    monkeypatch.setattr(early, "MOST_EARLY_BYTES", 0)
    link, payload = Wire(), make_payload(body=BODY)
    async with link.open() as liar:
        await liar.send(wire.TransferRequest(stripe=wire.Stripe()))
        for _ in range(3):
            await liar.send(part_of(payload, 0))
            await liar.send_body(bytes(PART))
            await liar.receive(wire.TransferResponse)
        await liar.send(part_of(payload, 0))
        with pytest.raises((EOFError, OSError)):
            await liar.receive(wire.TransferResponse)


async def test_a_crowded_receiver_leaves_each_body_one_stripe() -> None:
    link, payload = Wire(num_streams=4), make_payload(body=BODY)
    link.is_crowded = True
    await link.push(payload)
    assert link.desk.received == [(SENDER, payload)]


async def test_a_payload_that_is_offered_again_takes_the_place_of_its_stalled_offer() -> None:
    link, payload = Wire(), make_payload(body=BODY)
    async with link.open() as stalled:
        await offered(link, stalled, payload)
        await link.push(payload)
        assert link.desk.received == [(SENDER, payload)]
        with pytest.raises((EOFError, OSError)):
            await stalled.receive(wire.TransferResponse)
    assert link.desk.abandoned_headers == [payload.header]


def test_what_broke_off_is_kept_for_a_while_and_little_of_one_sender() -> None:
    async def scene() -> None:
        inbounds = Inbounds()
        payloads = [make_payload(body=BODY, round=number) for number in range(4)]

        def is_kept(payload: Payload, sender: NodeId = SENDER) -> bool:
            inbound = inbounds.begin(sender, payload.header, payload.digest, PART)
            was_kept = bool(inbound.assembly.held)
            inbounds.end(sender, payload.digest, inbound, is_kept=was_kept)
            return was_kept

        def breaks_off(payload: Payload, sender: NodeId = SENDER) -> None:
            inbound = inbounds.begin(sender, payload.header, payload.digest, PART)
            inbound.assembly.end(0)
            inbounds.end(sender, payload.digest, inbound, is_kept=True)

        for payload in payloads[: MOST_KEPT_FROM_ONE + 1]:
            breaks_off(payload)
        breaks_off(payloads[3], NodeId("other"))
        assert [is_kept(p) for p in payloads] == [False, True, True, False]
        assert is_kept(payloads[3], NodeId("other"))
        await asyncio.sleep(KEPT_SECONDS + 1)
        assert not any(is_kept(p) for p in payloads)
        breaks_off(payloads[0])
        inbounds.clear()
        assert not is_kept(payloads[0])

    run_in_virtual_time(scene())


def test_a_digest_is_no_key_to_another_senders_body() -> None:
    inbounds = Inbounds()
    payload = make_payload(body=BODY)
    begun = inbounds.begin(SENDER, payload.header, payload.digest, PART)
    assert inbounds.find(SENDER, payload.digest) is begun
    assert inbounds.find(NodeId("other"), payload.digest) is None
    assert inbounds.find(SENDER, Digest(bytes(32))) is None
