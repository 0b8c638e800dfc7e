"""What comes over streams of parts: parts before their offer, parts of nothing, and what a liar gets."""

import asyncio
import contextlib
import os

import pytest

from node.exchange.peers import (
    Limits,
    TransferRefusedError,
    Want,
    WantChunk,
    WantChunkMap,
    WantInput,
    WantManifest,
    WantResult,
    WantTokens,
)
from node.exchange.transport.rates.traffic import Traffic
from node.exchange.transport.receiver import EarlyParts, Receiver
from node.exchange.transport.serving import complete, take_parts
from node.exchange.transport.streams import FrameError, TransferStream, decode_want, encode_want
from protocol.v1 import transfer_pb2 as wire
from protocol.wire.payload import CONTRIBUTION, PIECE, WireCounts
from protocol.wire.rounds import Digest, NodeId
from tests.integration.sending_scene import BODY, PART, SENDER, Wire, offered, part_of
from tests.integration.transport_peers import NoConnection, make_payload
from tests.unit.exchange_scene import in_virtual_time


class _Answers(NoConnection):
    """Notes what a stream is answered."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.held: list[bool] = []

    def write(self, frame: bytes) -> None:
        response = wire.TransferResponse.FromString(frame[4:])
        self.statuses.append(response.status)
        self.held.append(response.is_held)

    async def drain(self) -> None:
        pass


def fed_stream() -> tuple[TransferStream, asyncio.StreamReader, _Answers]:
    """The receiving end of a stream of parts, what comes over it, and what is answered."""
    reader, answers = asyncio.StreamReader(), _Answers()
    stream = TransferStream(
        reader,
        answers,  # type: ignore[arg-type]  # as much of a writer as a stream needs
        idle_seconds=20,
        traffic=Traffic(WireCounts(), limits=Limits()),
    )
    return stream, reader, answers


DIGEST = Digest(bytes(range(32)))


@pytest.mark.parametrize(
    "want",
    [
        WantResult(round=3, slice_index=0, digest=DIGEST),
        WantManifest(oldest_round=0),
        WantManifest(oldest_round=0, newest_round=0),
        WantChunk(round=0, index=9, digest=DIGEST),
        WantChunkMap(round=0, outer_digest=DIGEST),
        WantTokens(kind=PIECE, digest=DIGEST),
        WantInput(round=1, slice_index=2, contributor_id=None, digest=b"error"),
        WantInput(round=1, slice_index=2, contributor_id=SENDER, digest=b"contribution"),
    ],
)
def test_what_is_asked_for_comes_back_from_its_request(want: Want) -> None:
    request = wire.TransferRequest.FromString(encode_want(want).SerializeToString())
    assert decode_want(request) == want


def test_a_kind_that_is_nothing_of_the_tokens_is_refused() -> None:
    with pytest.raises(TransferRefusedError, match="nothing of the tokens"):
        decode_want(encode_want(WantTokens(kind=CONTRIBUTION, digest=DIGEST)))


def framed(part: wire.Part) -> bytes:
    return part.ByteSize().to_bytes(4, "little") + part.SerializeToString()


@pytest.mark.parametrize(
    ("room_bytes", "status"),
    [(2 * PART, wire.TRANSFER_STATUS_PART_KEPT), (PART, wire.TRANSFER_STATUS_PART_DROPPED)],
)
async def test_a_part_of_nothing_that_was_offered_is_kept_if_there_is_room(
    room_bytes: int, status: int
) -> None:
    link = Wire(limits=Limits(most_early_bytes=room_bytes))
    async with link.open() as stream:
        await stream.send(wire.TransferRequest(stripe=wire.Stripe()))
        await stream.send(part_of(make_payload(body=BODY), 3))
        await stream.send_body(bytes(PART))
        response = await stream.receive(wire.TransferResponse)
    assert (response.status, response.part) == (status, 3)


@in_virtual_time
async def test_parts_whose_offer_is_not_there_keep_nobody_waiting() -> None:
    unknown, there = make_payload(body=BODY), make_payload(body=BODY, round=8)
    receiver = Receiver(Limits())
    receiver.begin(SENDER, there.header, there.digest, PART)
    stream, reader, answers = fed_stream()
    for payload in (unknown, unknown, there):
        reader.feed_data(framed(part_of(payload, 0)) + BODY[:PART])
    reader.feed_eof()
    await take_parts(stream, SENDER, receiver)
    assert asyncio.get_running_loop().time() == 0
    kept, received = wire.TRANSFER_STATUS_PART_KEPT, wire.TRANSFER_STATUS_PART_RECEIVED
    assert answers.statuses == [kept, kept, received]


@pytest.mark.parametrize(
    ("most_bytes", "status", "held"),
    [
        (PART, wire.TRANSFER_STATUS_PART_RECEIVED, {1}),
        (PART - 1, wire.TRANSFER_STATUS_PART_DROPPED, set()),
    ],
)
@in_virtual_time
async def test_a_part_counts_whose_offer_comes_while_it_is_read_unless_it_is_too_large_to_keep(
    most_bytes: int, status: int, held: set[int]
) -> None:
    payload = make_payload(body=BODY)
    receiver = Receiver(Limits(most_early_part_bytes=most_bytes))
    stream, reader, answers = fed_stream()
    serving = asyncio.create_task(take_parts(stream, SENDER, receiver))
    reader.feed_data(framed(part_of(payload, 1)) + BODY[PART : 2 * PART - 1])
    await asyncio.sleep(1)
    inbound = receiver.begin(SENDER, payload.header, payload.digest, PART)
    reader.feed_data(BODY[2 * PART - 1 : 2 * PART])
    reader.feed_eof()
    await serving
    assert answers.statuses == [status]
    assert inbound.assembly.held == held
    if held:
        assert inbound.assembly.body()[PART : 2 * PART] == BODY[PART : 2 * PART]


@pytest.mark.parametrize(
    ("limits", "times_sent"),
    [
        (Limits(early_seconds=3600), 1),
        (Limits(early_seconds=0), 2),
        (Limits(most_early_bytes=0), 2),
    ],
)
async def test_a_body_whose_offer_is_late_holds_no_other_up_and_is_not_sent_over_and_over(
    limits: Limits, times_sent: int
) -> None:
    link = Wire(limits=limits)
    late, other = (make_payload(body=os.urandom(6 * PART), round=number) for number in range(2))
    link.is_offer_let_in = asyncio.Event()  # of the first stream, which is the offer of `late`
    pushing = asyncio.create_task(link.push(late))
    await link.has_part_stream.wait()
    await link.push(other)
    assert link.desk.received == [(SENDER, other)]
    link.is_offer_let_in.set()
    await pushing
    assert link.desk.received == [(SENDER, other), (SENDER, late)]
    assert link.sent_bytes < 1.1 * (times_sent * len(late.body) + len(other.body))


def test_parts_that_come_early_are_kept_for_a_while_and_take_little_room() -> None:
    limits = Limits()
    parts, digests = EarlyParts(limits), [Digest(bytes([number]) * 32) for number in range(3)]
    ours = [(SENDER, digest) for digest in digests]
    others = [(NodeId("other"), digest) for digest in digests]
    num_kept = sum(parts.keep(ours[0], index, bytes(PART), now=0.0) for index in range(99))
    assert num_kept == limits.most_early_bytes // (PART + 1056)  # what each takes besides
    assert not parts.keep(ours[1], 0, bytes(PART), now=0.0)
    assert parts.keep(ours[0], 0, bytes(PART), now=0.0)  # it is there already
    assert parts.keep(others[1], 0, b"another's", now=0.0)
    assert parts.take(ours[1]) == {}
    assert len(parts.take(ours[0])) == num_kept
    num_empty = sum(parts.keep(ours[2], index, b"", now=0.0) for index in range(9999))
    assert num_empty < limits.most_early_bytes // 1000
    assert parts.keep(others[2], 0, b"later", now=limits.early_seconds - 1)
    parts.expire(limits.early_seconds)
    assert parts.take(others[1]) == {}
    assert parts.take(others[2]) == {0: b"later"}
    assert parts.keep(ours[1], 0, bytes(PART), now=limits.early_seconds)  # there is room again


def test_no_more_is_kept_early_of_all_senders_together() -> None:
    parts = EarlyParts(Limits(most_early_bytes_of_all=3 * PART))
    bodies = [(NodeId(f"sender-{number}"), Digest(bytes(32))) for number in range(4)]
    kept = [parts.keep(body, 0, bytes(PART), now=0.0) for body in bodies]
    assert kept == [True, True, False, False]
    parts.expire(Limits().early_seconds)
    assert parts.keep(bodies[3], 0, bytes(PART), now=Limits().early_seconds)


async def test_what_came_early_and_cannot_be_a_part_is_not_taken() -> None:
    link, payload = Wire(), make_payload(body=BODY)
    async with link.open() as parts:
        await parts.send(wire.TransferRequest(stripe=wire.Stripe()))
        for index, num_bytes in ((0, PART - 1), (10**6, PART), (10, 18)):
            await parts.send(part_of(payload, index, num_bytes))
            await parts.send_body(bytes(num_bytes))
            response = await parts.receive(wire.TransferResponse)
            assert response.status == wire.TRANSFER_STATUS_PART_KEPT
        await link.push(payload)
    assert link.desk.received == [(SENDER, payload)]


async def test_a_part_may_take_longer_than_a_stream_may_be_idle() -> None:
    """On a slow link a part takes a minute, and many streams share it."""
    link, payload = Wire(limits=Limits(idle_seconds=0.5)), make_payload(body=BODY)
    async with link.open() as offer, link.open() as parts:
        await offered(link, offer, payload)
        await parts.send(wire.TransferRequest(stripe=wire.Stripe()))
        await parts.send(part_of(payload, 0))
        for start in range(0, PART, PART // 5 + 1):
            await asyncio.sleep(0.2)
            await parts.send_body(BODY[start : min(start + PART // 5 + 1, PART)])
        response = await parts.receive(wire.TransferResponse)
        assert response.status == wire.TRANSFER_STATUS_PART_RECEIVED
        inbound = link.server.receiver.find(SENDER, payload.digest)
        assert inbound is not None
        assert not inbound.is_over


@in_virtual_time
async def test_a_stream_may_have_nothing_to_carry_for_long_but_not_forever() -> None:
    payload, receiver = make_payload(body=BODY), Receiver(Limits())
    receiver.begin(SENDER, payload.header, payload.digest, PART)
    stream, reader, answers = fed_stream()
    serving = asyncio.create_task(take_parts(stream, SENDER, receiver))
    for index in range(2):
        await asyncio.sleep(Limits().unused_seconds)
        reader.feed_data(framed(part_of(payload, index)) + BODY[:PART])
    await asyncio.sleep(Limits().unused_seconds)
    assert answers.statuses == [wire.TRANSFER_STATUS_PART_RECEIVED] * 2
    with pytest.raises(TimeoutError):
        await serving


async def test_nobody_puts_parts_into_anothers_body() -> None:
    link, payload = Wire(), make_payload(body=BODY)
    async with link.open() as offer, link.open(NodeId("other")) as parts:
        await offered(link, offer, payload)
        await parts.send(wire.TransferRequest(stripe=wire.Stripe()))
        await parts.send(part_of(payload, 0))
        await parts.send_body(bytes(PART))
        response = await parts.receive(wire.TransferResponse)
        assert response.status == wire.TRANSFER_STATUS_PART_KEPT
        inbound = link.server.receiver.find(SENDER, payload.digest)
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
        inbound = link.server.receiver.find(SENDER, payload.digest)
        assert inbound is not None
        assert not inbound.is_over
        assert inbound.assembly.held == set()


async def test_who_sends_without_end_what_nobody_wants_is_cut_off() -> None:
    link = Wire(limits=Limits(most_dropped_bytes=3 * PART, most_early_bytes=0))
    payload = make_payload(body=BODY)
    async with link.open() as liar:
        await liar.send(wire.TransferRequest(stripe=wire.Stripe()))
        for _ in range(3):
            await liar.send(part_of(payload, 0))
            await liar.send_body(bytes(PART))
            await liar.receive(wire.TransferResponse)
        await liar.send(part_of(payload, 0))
        with pytest.raises((EOFError, ConnectionError)):
            await liar.receive(wire.TransferResponse)


@pytest.mark.parametrize(
    "limits",
    [
        pytest.param(Limits(most_dropped_bytes=3 * PART, most_early_bytes=0), id="no room"),
        pytest.param(
            Limits(most_dropped_bytes=3 * PART, most_early_part_bytes=PART - 1), id="too large"
        ),
    ],
)
@in_virtual_time
async def test_what_nobody_asked_for_adds_up_until_something_wanted_comes(limits: Limits) -> None:
    payload, receiver = make_payload(body=BODY), Receiver(limits)
    receiver.begin(SENDER, payload.header, payload.digest, PART)
    unwanted = make_payload(body=BODY, round=8)
    stream, reader, answers = fed_stream()
    serving = asyncio.create_task(take_parts(stream, SENDER, receiver))
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


@in_virtual_time
async def test_a_wait_for_a_body_that_is_cancelled_while_it_ends_is_cancelled() -> None:
    """Its stream may take a while to end: a second cancellation is not the stream's."""

    payload, receiver = make_payload(body=BODY), Receiver(Limits())
    inbound = receiver.begin(SENDER, payload.header, payload.digest, PART)
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


@in_virtual_time
async def test_the_answer_to_a_sender_that_is_ahead_waits_for_the_others_briefly() -> None:
    limits = Limits()
    receiver = Receiver(limits)
    payload = make_payload(CONTRIBUTION, body=BODY)
    senders = [SENDER, *(NodeId(name) for name in "xyz")]
    for sender in senders:
        receiver.begin(sender, payload.header, payload.digest, PART)
    stream, reader, answers = fed_stream()
    serving = asyncio.create_task(take_parts(stream, SENDER, receiver))

    def feed(index: int) -> None:
        reader.feed_data(framed(part_of(payload, index)) + BODY[:PART])

    for index in range(3):
        feed(index)
    await asyncio.sleep(0.9 * limits.ahead_seconds)
    assert answers.held == [False, False]  # of two parts nobody is told to wait
    for sender in senders[1:3]:
        receiver.moved(sender, payload.header, PART)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert answers.held == [False, False, True]
    feed(3)  # and nobody gets on any more
    await asyncio.sleep(0.9 * limits.ahead_seconds)
    assert answers.held == [False, False, True]
    await asyncio.sleep(0.2 * limits.ahead_seconds)
    assert answers.held == [False, False, True, True]
    reader.feed_eof()
    await serving


@in_virtual_time
async def test_what_comes_behind_a_part_whose_answer_is_held_back_is_taken_all_the_same() -> None:
    """It may be of the body that all others wait for: then nobody would ever catch up."""

    receiver = Receiver(Limits())
    ahead = make_payload(CONTRIBUTION, body=BODY, round=7)
    awaited = make_payload(CONTRIBUTION, body=BODY[::-1], round=7)
    for sender in (SENDER, *(NodeId(name) for name in "xyz")):
        receiver.begin(sender, ahead.header, ahead.digest, PART)
    body = receiver.begin(SENDER, awaited.header, awaited.digest, PART)
    stream, reader, answers = fed_stream()
    serving = asyncio.create_task(take_parts(stream, SENDER, receiver))
    for payload, index in ((ahead, 0), (ahead, 1), (ahead, 2), (awaited, 0)):
        reader.feed_data(framed(part_of(payload, index)) + bytes(PART))
    await asyncio.sleep(0.1)
    assert answers.held == [False, False]
    assert body.assembly.held == {0}
    serving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await serving
