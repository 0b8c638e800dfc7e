"""What comes over stripes: parts before their offer, parts of nothing, and what a liar gets."""

import asyncio
import contextlib
import os

import pytest
from conveyor_scene import BODY, PART, SENDER, Wire, offered, part_of
from transport_peers import make_payload

from lab.simulation.virtual_time import run_in_virtual_time
from node.exchange.transport import early
from node.exchange.transport import inbound as receiving
from node.exchange.transport.conveyor import UNUSED_SECONDS
from node.exchange.transport.early import EARLY_SECONDS, MOST_EARLY_BYTES, EarlyParts
from node.exchange.transport.frames import FrameError, TransferStream
from node.exchange.transport.inbound import Inbounds, complete, take_stripe
from node.exchange.transport.rates.pacing import Pacer
from node.exchange.transport.tally import Tally
from protocol.rounds import Digest, NodeId
from protocol.v1 import transfer_pb2 as wire
from protocol.wire_count import WireCounts


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


async def test_a_part_may_take_longer_than_a_stream_may_be_idle() -> None:
    """On a slow link a part takes a minute, and many streams share it."""
    link, payload = Wire(idle_seconds=0.5), make_payload(body=BODY)
    async with link.open() as offer, link.open() as stripe:
        await offered(link, offer, payload)
        await stripe.send(wire.TransferRequest(stripe=wire.Stripe()))
        await stripe.send(part_of(payload, 0))
        for start in range(0, PART, PART // 5 + 1):
            await asyncio.sleep(0.2)
            await stripe.send_body(BODY[start : min(start + PART // 5 + 1, PART)])
        response = await stripe.receive(wire.TransferResponse)
        assert response.status == wire.TRANSFER_STATUS_PART_RECEIVED
        inbound = link.inbounds.find(SENDER, payload.digest)
        assert inbound is not None
        assert not inbound.is_over


def test_a_stripe_may_have_nothing_to_carry_for_long_but_not_forever() -> None:
    async def scene() -> None:
        payload, inbounds = make_payload(body=BODY), Inbounds()
        inbounds.begin(SENDER, payload.header, payload.digest, PART)
        stream, reader, answers = fed_stripe()
        serving = asyncio.create_task(take_stripe(stream, SENDER, inbounds))
        for index in range(2):
            await asyncio.sleep(UNUSED_SECONDS)
            reader.feed_data(framed(part_of(payload, index)) + BODY[:PART])
        await asyncio.sleep(UNUSED_SECONDS)
        assert answers.statuses == [wire.TRANSFER_STATUS_PART_RECEIVED] * 2
        with pytest.raises(TimeoutError):
            await serving

    run_in_virtual_time(scene())


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
        with pytest.raises((EOFError, ConnectionError)):
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
        with pytest.raises((EOFError, ConnectionError)):
            await liar.receive(wire.TransferResponse)


@pytest.mark.parametrize("way", ["has no room", "is too large to be kept"])
def test_what_nobody_asked_for_adds_up_until_something_wanted_comes(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(receiving, "MOST_DROPPED_BYTES", 3 * PART)
    if way == "has no room":
        monkeypatch.setattr(early, "MOST_EARLY_BYTES", 0)
    else:
        monkeypatch.setattr(receiving, "LEAST_PART_BYTES", PART - 1)

    async def scene() -> None:
        payload, inbounds = make_payload(body=BODY), Inbounds()
        inbounds.begin(SENDER, payload.header, payload.digest, PART)
        unwanted = make_payload(body=BODY, round=8)
        stream, reader, answers = fed_stripe()
        serving = asyncio.create_task(take_stripe(stream, SENDER, inbounds))
        for part in (*[part_of(unwanted, 0)] * 3, part_of(payload, 0), *[part_of(unwanted, 0)] * 3):
            reader.feed_data(framed(part) + BODY[:PART])
            await asyncio.sleep(1)
            assert not serving.done()
        dropped, received = (
            wire.TRANSFER_STATUS_PART_DROPPED,
            wire.TRANSFER_STATUS_PART_RECEIVED,
        )
        assert answers.statuses == [dropped] * 3 + [received] + [dropped] * 3
        reader.feed_data(framed(part_of(unwanted, 0, 1)))  # one byte more, and it is not read
        with pytest.raises(FrameError, match=f"{3 * PART + 1} bytes of parts that nobody asked"):
            await serving

    run_in_virtual_time(scene())


def test_a_wait_for_a_body_that_is_cancelled_while_it_ends_is_cancelled() -> None:
    """Its stream may take a while to end: a second cancellation is not the stream's."""

    async def scene() -> None:
        payload, inbounds = make_payload(body=BODY), Inbounds()
        inbound = inbounds.begin(SENDER, payload.header, payload.digest, PART)
        is_ending = asyncio.Event()

        class Stream:
            async def ended(self) -> None:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    is_ending.set()
                    await asyncio.sleep(5)
                    raise

        async def take() -> str:
            waiting = complete(
                Stream(),  # type: ignore[arg-type]
                inbound,
                is_wanted=lambda: True,
                idle_seconds=20,
            )
            with contextlib.suppress(TimeoutError):
                await waiting
            return "went on as if nothing had been asked"

        task = asyncio.create_task(take())
        await asyncio.wait_for(is_ending.wait(), 60)  # nothing came within 20 s
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(10)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_in_virtual_time(scene())
