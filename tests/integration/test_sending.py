"""A sender and its receiver in one process, over socket pairs: what comes in which order, what breaks,
what is sent again, what a liar gets.
"""

import asyncio
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest

from node.exchange.peers import Limits, TransferRefusedError
from node.exchange.transport import sender as sender_room
from node.exchange.transport.rates.traffic import Traffic
from node.exchange.transport.rates.uplink import FIRST_WINDOW_BYTES, UnderWay, Uplink
from node.exchange.transport.receiver import MOST_KEPT_FROM_ONE, Receiver
from node.exchange.transport.sender import MOST_BODIES, WORTH_KEEPING, PartStream
from node.exchange.transport.sending import Sending
from node.exchange.transport.streams import TransferStream
from protocol.v1 import transfer_pb2 as wire
from protocol.wire.payload import Payload, WireCounts
from protocol.wire.rounds import Digest, NodeId
from tests.integration.sending_scene import BODY, PART, SENDER, Wire, offered
from tests.integration.transport_peers import NoConnection, make_payload
from tests.unit.exchange_scene import in_virtual_time


async def test_a_large_body_comes_over_several_streams_and_whole() -> None:
    link, payload = Wire(), make_payload(body=BODY)
    await link.push(payload)
    assert link.num_streams == 1 + 3
    assert link.desk.received == [(SENDER, payload)]
    assert len(BODY) <= link.counts.totals()["result"][0] < 1.1 * len(BODY)


async def test_parts_of_one_stream_count_for_the_link_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two are under way at once, and what both of them wait for must not count twice."""
    told: dict[TransferStream, list[tuple[float, float]]] = defaultdict(list)

    def moved(
        stream: TransferStream, *, sent_bytes: int = 0, received_bytes: int = 0, since: float
    ) -> None:
        if sent_bytes:
            told[stream].append((since, stream.traffic.clock()))

    monkeypatch.setattr(TransferStream, "moved", moved)
    link = Wire(num_streams=1)
    await link.push(make_payload(body=BODY))
    (parts,) = told.values()
    assert len(parts) == 11
    assert all(since < until for since, until in parts)
    assert all(before[1] <= after[0] for before, after in pairwise(parts))


async def test_bodies_in_parts_and_whole_ones_tell_the_uplink_of_the_same_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peers = set[Hashable]()
    begin, goes_round_in = Uplink.begin, Uplink.goes_round_in

    def noted(uplink: Uplink, peer: Hashable, *size: int, **more: Any) -> UnderWay:
        peers.add(peer)
        return begin(uplink, peer, *size, **more)

    def noted_round(uplink: Uplink, peer: Hashable, seconds: float) -> None:
        peers.add(peer)
        goes_round_in(uplink, peer, seconds)

    monkeypatch.setattr(Uplink, "begin", noted)
    monkeypatch.setattr(Uplink, "goes_round_in", noted_round)
    link = Wire()
    for body in (BODY, BODY[: PART - 1]):
        await link.push(make_payload(body=body))
    assert len(peers) == 1


async def test_a_small_body_takes_one_stream() -> None:
    link, payload = Wire(), make_payload(body=BODY[: PART - 1])
    await link.push(payload)
    assert link.num_streams == 1
    assert link.desk.received == [(SENDER, payload)]


@pytest.mark.parametrize("breaks", [{1: 0}, {1: 1, 2: 2}, {1: 0, 2: 0, 4: 2}])
async def test_what_a_broken_stream_carried_goes_over_another(breaks: dict[int, int]) -> None:
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
    assert link.desk.ended == [payload.header]
    link.desk.max_body_bytes = 0
    with pytest.raises(TransferRefusedError, match="too many"):
        await link.push(payload)


async def test_bodies_arrive_in_the_order_in_which_they_were_pushed() -> None:
    link = Wire(num_streams=1)
    bodies = [os.urandom(3 * PART) for _ in range(2 * MOST_BODIES)]
    payloads = [make_payload(body=body, round=number) for number, body in enumerate(bodies)]
    await asyncio.gather(*map(link.push, payloads))
    assert [payload.header.round for _, payload in link.desk.received] == list(range(len(bodies)))


async def test_streams_stay_open_from_body_to_body_and_close_after_the_last() -> None:
    link = Wire()
    payloads = [make_payload(body=os.urandom(3 * PART), round=number) for number in range(6)]
    await asyncio.gather(*map(link.push, payloads))
    assert link.num_streams == 6 + 3
    await link.settle()
    assert not link.sending.is_sending


def streams_of(link: Wire) -> list[PartStream]:
    """Those of parts, that are open."""
    return list(link.sending._sender.streams)


LONG = 4 * BODY
"""So many parts that three streams carry enough each to stay."""


async def test_a_few_streams_stay_open_between_two_bodies_until_the_sender_is_closed() -> None:
    link = Wire(num_streams=3, most_at_rest=2)
    await link.push(make_payload(body=LONG, round=1))
    num_kept = len(streams_of(link))
    assert num_kept in (1, 2)
    await link.push(make_payload(body=LONG, round=2))
    assert link.num_streams == 1 + 3 + 1 + (3 - num_kept)
    await link.sending.close()
    await link.settle()
    assert [payload.header.round for _, payload in link.desk.received] == [1, 2]


async def test_parts_are_shared_out_among_streams_whose_windows_have_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sender_room, "WORTH_KEEPING", 0)
    link = Wire(num_streams=3, most_at_rest=3)
    await link.push(make_payload(body=BODY, round=1))
    streams = list(streams_of(link))
    before = [stream.num_carried for stream in streams]
    await link.push(make_payload(body=BODY[: 3 * PART], round=2))
    assert [s.num_carried - b for s, b in zip(streams, before, strict=True)] == [1, 1, 1]
    await link.sending.close()


async def test_a_stream_that_has_carried_little_does_not_stay() -> None:
    link = Wire(num_streams=3, most_at_rest=3)
    await link.push(make_payload(body=BODY[: 3 * PART]))
    assert not streams_of(link)


async def test_a_stream_that_breaks_at_rest_is_replaced() -> None:
    link = Wire(num_streams=1, most_at_rest=1)
    await link.push(make_payload(body=BODY, round=1))
    assert streams_of(link)
    link.break_off()
    await link.settle()
    await link.push(make_payload(body=BODY, round=2))
    assert link.num_streams == 2 * (1 + 1)
    assert len(link.desk.received) == 2
    await link.sending.close()


async def test_a_sender_that_begins_anew_knows_how_long_offers_took() -> None:
    link, told = Wire(), list[float]()

    def noted(seconds: float) -> int:
        told.append(seconds)
        return 1

    link.sending._num_at_first = noted
    for number in range(2):
        await link.push(make_payload(body=BODY, round=number))
    assert told[0] == Limits().first_round_trip_seconds
    assert told[1] != Limits().first_round_trip_seconds


async def test_a_push_that_is_given_up_leaves_the_way_to_others() -> None:
    link, payload = Wire(), make_payload(body=BODY)
    given_up = asyncio.create_task(link.push(make_payload(body=BODY, round=7)))
    await link.has_part_stream.wait()
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


async def test_what_comes_of_a_refused_body_is_dropped_and_of_the_next_one_taken() -> None:
    link, small, payload = Wire(), make_payload(body=BODY[: 2 * PART]), make_payload(body=BODY)
    link.desk.max_body_bytes = len(small.body)
    refused, _ = await asyncio.gather(link.push(payload), link.push(small), return_exceptions=True)
    assert isinstance(refused, TransferRefusedError)
    assert link.desk.received == [(SENDER, small)]
    link.desk.max_body_bytes = len(BODY)
    await link.push(payload)
    assert link.desk.received == [(SENDER, small), (SENDER, payload)]


async def test_the_rest_of_a_body_that_is_not_wanted_any_more_is_refused() -> None:
    link, payload = Wire(num_streams=1), make_payload(body=BODY)
    link.desk.num_looks_wanted = 3
    with pytest.raises(TransferRefusedError, match="not wanted any more"):
        await link.push(payload)
    await link.settle()
    assert link.desk.ended == [payload.header]
    assert not link.desk.received
    sent_before = link.sent_bytes
    link.desk.num_looks_wanted = None
    await link.push(payload)
    assert link.sent_bytes - sent_before > len(BODY)  # nothing of it was kept in memory


async def test_a_crowded_receiver_leaves_each_body_one_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link, payload = Wire(num_streams=4), make_payload(body=BODY)
    monkeypatch.setattr(link.server.admission, "_is_crowded", lambda peer, num_more=0: True)
    await link.push(payload)
    assert link.desk.received == [(SENDER, payload)]


async def test_a_payload_that_is_offered_again_takes_the_place_of_its_stalled_offer() -> None:
    link, payload = Wire(), make_payload(body=BODY)
    async with link.open() as stalled:
        await offered(link, stalled, payload)
        await link.push(payload)
        assert link.desk.received == [(SENDER, payload)]
        with pytest.raises((EOFError, ConnectionError)):
            await stalled.receive(wire.TransferResponse)
    assert link.desk.ended == [payload.header] * 2  # the stalled one, and the one that came


def test_what_broke_off_is_kept_for_a_while_and_little_of_one_sender() -> None:
    receiver, now = Receiver(Limits()), 100.0
    payloads = [make_payload(body=BODY, round=number) for number in range(4)]

    def is_kept(payload: Payload, sender: NodeId = SENDER) -> bool:
        body = receiver.begin(sender, payload.header, payload.digest, PART)
        was_kept = bool(body.assembly.held)
        receiver.end(sender, payload.digest, body, is_kept=was_kept, now=now)
        return was_kept

    def breaks_off(payload: Payload, sender: NodeId = SENDER) -> None:
        body = receiver.begin(sender, payload.header, payload.digest, PART)
        body.assembly.end(0)
        receiver.end(sender, payload.digest, body, is_kept=True, now=now)

    for payload in payloads[: MOST_KEPT_FROM_ONE + 1]:
        breaks_off(payload)
    breaks_off(payloads[3], NodeId("other"))
    assert [is_kept(p) for p in payloads] == [False, True, True, False]
    assert is_kept(payloads[3], NodeId("other"))
    receiver.expire(now + Limits().kept_seconds - 1)
    assert is_kept(payloads[3], NodeId("other"))
    receiver.expire(now + Limits().kept_seconds)
    assert not any(is_kept(p) for p in payloads)
    breaks_off(payloads[0])
    receiver.clear()
    assert not is_kept(payloads[0])


async def test_what_broke_off_is_forgotten_in_time() -> None:
    link = Wire({1: 6, 2: 0, 3: 0, 4: 0}, num_streams=1, limits=Limits(kept_seconds=0.1))
    payload = make_payload(body=BODY)
    with pytest.raises(ConnectionError):
        await link.push(payload)
    await link.settle()
    await asyncio.sleep(0.2)
    sent_before = link.sent_bytes
    await link.push(payload)
    assert link.sent_bytes - sent_before > len(BODY)


def test_a_digest_is_no_key_to_another_senders_body() -> None:
    inbounds = Receiver(Limits())
    payload = make_payload(body=BODY)
    begun = inbounds.begin(SENDER, payload.header, payload.digest, PART)
    assert inbounds.find(SENDER, payload.digest) is begun
    assert inbounds.find(NodeId("other"), payload.digest) is None
    assert inbounds.find(SENDER, Digest(bytes(32))) is None


class _Sink(NoConnection):
    """Takes all that it is given at once, as p2pd does."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def write(self, data: bytes) -> None:
        self.num_bytes += len(data)

    async def drain(self) -> None:
        pass


class _Peer:
    """Answers when it is told to. Its first stream is the offer's, the others carry parts."""

    def __init__(
        self, num_streams: int, *, most_at_rest: int = 0, traffic: Traffic | None = None
    ) -> None:
        limits = Limits(max_streams_per_body=num_streams)
        self._readers: list[asyncio.StreamReader] = []
        self._sinks: list[_Sink] = []
        self.traffic = traffic or Traffic(WireCounts(), limits=limits)
        self.sending = Sending(
            open_stream=self._open,
            num_at_first=lambda round_trip_seconds: num_streams,
            most_at_rest=lambda: most_at_rest,
            traffic=self.traffic,
            limits=limits,
        )

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[TransferStream]:
        self._readers.append(asyncio.StreamReader())
        self._sinks.append(_Sink())
        yield TransferStream(
            self._readers[-1],
            self._sinks[-1],  # type: ignore[arg-type]  # as much of a writer as a stream needs
            idle_seconds=1e6,
            traffic=self.traffic,
        )

    @property
    def num_parts(self) -> int:
        """Parts that were handed over."""
        return sum(sink.num_bytes for sink in self._sinks) // PART

    def answer(self, stream: int, part: int) -> None:
        """Acknowledges a part."""
        frame = wire.TransferResponse(
            status=wire.TRANSFER_STATUS_PART_RECEIVED, part=part
        ).SerializeToString()
        self._readers[stream].feed_data(len(frame).to_bytes(4, "little") + frame)


@in_virtual_time
async def test_a_peer_that_is_ahead_with_results_goes_on_as_soon_as_others_have_got_on() -> None:
    traffic = Traffic(WireCounts(), limits=Limits())
    peers = [_Peer(num_streams=1, traffic=traffic) for _ in range(3)]
    payload = make_payload(body=os.urandom(60 * PART))
    pushing = [asyncio.create_task(peer.sending.push(payload)) for peer in peers]
    await asyncio.sleep(0.01)
    *others, fast = peers
    for part in range(9):
        fast.answer(1, part)
        await asyncio.sleep(0.001)
    held_at = fast.num_parts
    fast.answer(1, 9)
    await asyncio.sleep(0.01)
    assert fast.num_parts == held_at
    for peer in others:
        for part in range(3):
            peer.answer(1, part)
    await asyncio.sleep(0.01)  # long before anybody looks whether time has passed
    assert fast.num_parts > held_at
    for push in pushing:
        push.cancel()
    await asyncio.wait(pushing)


@in_virtual_time
async def test_no_more_is_handed_over_than_the_peer_was_seen_to_take() -> None:
    peer = _Peer(num_streams=2)
    payload = make_payload(body=os.urandom(60 * PART))
    pushing = asyncio.create_task(peer.sending.push(payload))
    await asyncio.sleep(1)
    assert peer.num_parts == FIRST_WINDOW_BYTES // PART
    peer.answer(1, 0)
    await asyncio.sleep(100)
    assert peer.num_parts == FIRST_WINDOW_BYTES // PART + 2
    pushing.cancel()
    await asyncio.wait([pushing])


@in_virtual_time
async def test_a_stream_that_carries_what_was_given_up_does_not_stay() -> None:
    peer = _Peer(num_streams=1, most_at_rest=1)
    pushing = asyncio.create_task(peer.sending.push(make_payload(body=os.urandom(60 * PART))))
    for part in range(WORTH_KEEPING):
        await asyncio.sleep(1)
        peer.answer(1, part)
    await asyncio.sleep(1)
    assert peer.num_parts > WORTH_KEEPING
    pushing.cancel()
    await asyncio.wait([pushing])
    assert not peer.sending._sender.streams


@in_virtual_time
async def test_what_a_slow_uplink_queues_is_seen_in_the_answers_and_slows_the_rest() -> None:
    """The link carries a part in a tenth of a second; what is handed over sooner waits before it."""

    peer = _Peer(num_streams=1)
    payload = make_payload(body=os.urandom(300 * PART))
    pushing = asyncio.create_task(peer.sending.push(payload))
    waiting: list[int] = []  # before each answer
    for _ in range(250):
        await asyncio.sleep(0.1)
        if peer.num_parts > len(waiting):
            waiting.append(peer.num_parts - len(waiting))
            peer.answer(1, len(waiting) - 1)
    rate = peer.traffic.uplink.bytes_per_second
    assert rate is not None and 0.8 * 10 * PART < rate < 1.2 * 10 * PART
    assert max(waiting) >= 10 and max(waiting[150:]) < 5
    assert len(waiting) > 240  # and the link is full
    pushing.cancel()
    await asyncio.wait([pushing])
