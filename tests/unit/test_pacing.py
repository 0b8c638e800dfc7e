"""Paced uploads, in virtual time."""

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.simulation.virtual_time import run_in_virtual_time
from node.exchange.peers import Limits
from node.exchange.transport.rates.traffic import CHUNK_BYTES, TokenBucket, Traffic, wire_bytes
from node.exchange.transport.rates.uplink import (
    HEADROOM,
    LEAST_BYTES,
    LEAST_MEASUREMENTS,
    LinkMeter,
)
from protocol.wire.payload import WireCounts
from protocol.wire.vitals import FREE, NO_UPLOAD, UploadPace, upload_in_words
from tests.unit.exchange_scene import in_virtual_time

RATE = 1_000_000.0  # wire bytes a second
FLOOR = 2048.0
SECONDS = 10.0
BURST_SECONDS = Limits().burst_seconds
BURST = BURST_SECONDS * RATE


def traffic_at(rate: float | None) -> Traffic:
    limits = Limits(floor_bytes_per_second=FLOOR)
    return Traffic(WireCounts(), limits=limits, allowed_bytes_per_second=rate)


def wire(body_bytes: float) -> float:
    """What the headers make of a long body."""
    whole = 10_000_000
    return body_bytes * (wire_bytes(whole, 0)[0] - wire_bytes(0, 0)[0]) / whole


async def upload_for(
    seconds: float, traffic: Traffic, *, num_streams: int, note: Callable[[int], None] | None = None
) -> list[int]:
    """Bytes that each of so many streams, which always have more to send, sent in that time."""
    sent = [0] * num_streams

    async def upload(index: int) -> None:
        while True:
            await traffic.leave(traffic.chunk_bytes)
            sent[index] += traffic.chunk_bytes
            if note is not None:
                note(traffic.chunk_bytes)

    streams = [asyncio.create_task(upload(index)) for index in range(num_streams)]
    await asyncio.sleep(seconds)
    for stream in streams:
        stream.cancel()
    await asyncio.wait(streams)
    return sent


@pytest.mark.parametrize("num_streams", [1, 3, 8])
@in_virtual_time
async def test_streams_use_the_whole_rate_and_share_it_evenly(num_streams: int) -> None:
    sent = await upload_for(SECONDS, traffic_at(RATE), num_streams=num_streams)
    share = RATE * SECONDS / num_streams
    assert [wire(num_bytes) for num_bytes in sent] == pytest.approx([share] * num_streams, rel=0.05)


@in_virtual_time
async def test_in_no_stretch_of_time_is_more_sent_than_the_rate_and_one_burst() -> None:
    loop, log = asyncio.get_running_loop(), list[tuple[float, int]]()
    traffic = traffic_at(RATE)
    for pause in (0.0, 0.01, 5.0):  # what an idle time saves up is one burst, however long
        await asyncio.sleep(pause)
        await upload_for(
            1.0, traffic, num_streams=4, note=lambda size: log.append((loop.time(), size))
        )
    for first, (since, _) in enumerate(log):
        total = 0
        for until, num_bytes in log[first:]:
            total += num_bytes
            assert wire(total) <= RATE * (until - since) + BURST + 1.0
    assert wire(sum(size for _, size in log)) > 2.9 * RATE


def test_bodies_make_room_for_what_does_not_wait() -> None:
    async def sent_beside(work: Callable[[Traffic], None]) -> int:
        traffic = traffic_at(RATE)
        work(traffic)
        return sum(await upload_for(SECONDS, traffic, num_streams=2))

    def cost(work: Callable[[Traffic], None]) -> float:
        alone = run_in_virtual_time(sent_beside(lambda _: None))
        return wire(alone - run_in_virtual_time(sent_beside(work)))

    assert cost(lambda traffic: traffic.sent_message(500_000)) == pytest.approx(
        wire(500_000), abs=BURST
    )
    downloaded = 100_000_000
    acknowledgements = wire_bytes(0, downloaded)[0]
    assert cost(lambda traffic: traffic.received(downloaded)) == pytest.approx(
        acknowledgements, abs=BURST
    )


@in_virtual_time
async def test_a_transfer_that_gives_up_while_it_waits_takes_nothing_from_the_others() -> None:
    loop, traffic = asyncio.get_running_loop(), traffic_at(RATE)
    await traffic.leave(traffic.chunk_bytes)
    waiting = [asyncio.create_task(traffic.leave(traffic.chunk_bytes)) for _ in range(50)]
    await asyncio.sleep(BURST_SECONDS / 2)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    await traffic.leave(traffic.chunk_bytes)
    assert loop.time() == pytest.approx(BURST_SECONDS, rel=0.01)


@in_virtual_time
async def test_so_few_bodies_go_at_once_that_receivers_take_none_for_a_trickle() -> None:
    traffic, most, now = traffic_at(32_000.0), 0, 0

    async def upload() -> None:
        nonlocal most, now
        async with traffic.place():
            now += 1
            most = max(most, now)
            for _ in range(20):
                await traffic.leave(traffic.chunk_bytes)
            now -= 1

    await asyncio.gather(*(upload() for _ in range(40)))
    assert now == 0
    assert 32_000.0 / most > 1.5 * FLOOR
    assert most > 1


def test_chunks_are_short_in_time_at_a_low_rate_and_short_in_bytes_at_a_high_one() -> None:
    async def chunk_bytes_at(rate: float | None) -> int:
        return traffic_at(rate).chunk_bytes

    slow = run_in_virtual_time(chunk_bytes_at(32_000.0))
    assert 0 < wire(slow) / 32_000.0 <= 0.1
    for rate in (1e9, None):
        assert run_in_virtual_time(chunk_bytes_at(rate)) == CHUNK_BYTES


@in_virtual_time
async def test_without_a_rate_nothing_waits() -> None:
    traffic = traffic_at(None)
    for _ in range(1000):
        async with traffic.place():
            await traffic.leave(traffic.chunk_bytes)
        traffic.received(1 << 40)
    assert asyncio.get_running_loop().time() == 0.0


@given(
    steps=st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(0.0, 100.0)), min_size=1, max_size=50)
)
def test_whoever_waits_as_long_as_the_bucket_says_never_leaves_a_debt(
    steps: list[tuple[float, float]],
) -> None:
    bucket = TokenBucket(bytes_per_second=10.0, depth_bytes=100.0, now=0.0)
    now = taken = 0.0
    for pause, num_bytes in steps:
        now += pause
        now += bucket.seconds_until(num_bytes, now)
        bucket.take(num_bytes, now)
        taken += num_bytes
        assert bucket.seconds_until(0.0, now) <= 1e-6
        assert taken <= 100.0 + 10.0 * now + 1e-6


class Meter(LinkMeter):
    """That has seen what a test says."""

    def __init__(self, seen: Callable[[], float | None]) -> None:
        super().__init__(Limits())
        self._seen = seen

    @property
    def most_bytes_per_second(self) -> float | None:
        return self._seen()


def traffic_that_sees(seen: Callable[[], float | None], allowed: float | None = None) -> Traffic:
    traffic = traffic_at(allowed)
    traffic.uplink.meter = Meter(seen)
    return traffic


@in_virtual_time
async def test_without_a_limit_nothing_waits_until_the_uplink_is_known_and_then_there_is_headroom() -> (
    None
):
    seen: list[float] = []
    traffic = traffic_that_sees(lambda: seen[-1] if seen else None)
    began_at = asyncio.get_running_loop().time()
    for _ in range(1000):
        await traffic.leave(traffic.chunk_bytes)
    assert asyncio.get_running_loop().time() == began_at
    seen.append(RATE)
    assert sum(await upload_for(SECONDS, traffic, num_streams=3)) / SECONDS == pytest.approx(
        HEADROOM * RATE, rel=0.05
    )


@pytest.mark.parametrize(("allowed", "kept"), [(RATE, RATE), (100 * RATE, HEADROOM * wire(RATE))])
@in_virtual_time
async def test_of_what_is_allowed_and_what_the_link_carries_the_less_counts(
    allowed: float, kept: float
) -> None:
    traffic = traffic_that_sees(lambda: RATE, allowed)
    assert wire(sum(await upload_for(SECONDS, traffic, num_streams=3))) / SECONDS == pytest.approx(
        kept, rel=0.05
    )


class QueuedUplink:
    """A link behind a queue that never overflows, three peers behind it, and what the node sees of it."""

    def __init__(self, bytes_per_second: float) -> None:
        self.bytes_per_second = bytes_per_second
        self.meter = LinkMeter(Limits())
        self.longest_queue_seconds = 0.0
        self._clock = asyncio.get_running_loop().time
        self._is_free_at = 0.0
        self._traffic = traffic_that_sees(lambda: self.meter.most_bytes_per_second)

    async def exchange(self) -> float:
        """Sends as much to each peer; returns how many seconds that took."""
        began_at, self.longest_queue_seconds = self._clock(), 0.0
        await asyncio.gather(*(self._push(LEAST_BYTES) for _ in range(3)))
        return self._clock() - began_at

    async def _push(self, num_bytes: int) -> None:
        self.meter.begin(self._clock())
        answered_at = self._clock()

        async def answer(sent_at: float, seconds: float) -> None:
            nonlocal answered_at
            await asyncio.sleep(seconds)
            since, answered_at = max(sent_at, answered_at), self._clock()
            self.meter.moved(CHUNK_BYTES, since=since, now=answered_at)

        async with asyncio.TaskGroup() as answers:
            for _ in range(num_bytes // CHUNK_BYTES):
                sent_at = self._clock()
                left = CHUNK_BYTES
                while left > 0:
                    chunk = min(left, self._traffic.chunk_bytes)
                    await self._traffic.leave(chunk)
                    self._is_free_at = max(self._is_free_at, self._clock())
                    self._is_free_at += chunk / self.bytes_per_second
                    left -= chunk
                wait = self._is_free_at - self._clock()
                self.longest_queue_seconds = max(self.longest_queue_seconds, wait)
                answers.create_task(answer(sent_at, wait + 0.05))
        self.meter.end(self._clock())


@in_virtual_time
async def test_a_paced_uplink_stays_full_behind_a_short_queue_and_one_that_gets_faster_is_found_so() -> (
    None
):
    uplink = QueuedUplink(RATE)
    took, queued = [], []
    for number in range(60):
        if number == 30:
            uplink.bytes_per_second = 10 * RATE
        took.append(await uplink.exchange())
        queued.append(uplink.longest_queue_seconds)
        await asyncio.sleep(60)
    least = 3 * LEAST_BYTES / RATE
    assert all(seconds < 1.1 * least for seconds in took[:30])
    assert all(seconds > 0.9 * least for seconds in queued[:LEAST_MEASUREMENTS])
    assert all(seconds < 0.6 * least for seconds in queued[LEAST_MEASUREMENTS:30])
    assert took[40] < 0.2 * least
    assert took[59] < 0.15 * least


class LossyKernel:
    """It paces TCP, and has seen losses."""

    why_not = ""
    shared_bytes_per_second: float | None = 3e6


def test_what_waits_says_for_what_and_forgets_it_when_nothing_waits_any_more() -> None:
    async def scene(traffic: Traffic) -> list[UploadPace]:
        told = [traffic.pace(0)]
        with traffic.sending():
            told.append(traffic.pace(0))
            await upload_for(3.0, traffic, num_streams=2)
            told.append(traffic.pace(2))
            await asyncio.sleep(3.0)
            told.append(traffic.pace(2))
        told.append(traffic.pace(0))
        return told

    async def limited() -> list[UploadPace]:
        return await scene(traffic_at(RATE))

    async def on_a_slow_link() -> list[UploadPace]:
        return await scene(traffic_that_sees(lambda: RATE / HEADROOM, 100 * RATE))

    answers = UploadPace(held_by="answers", num_peers=2)
    limit = UploadPace(held_by="limit", bytes_per_second=RATE)
    link = UploadPace(held_by="link", bytes_per_second=RATE)
    assert run_in_virtual_time(limited()) == [NO_UPLOAD, FREE, limit, answers, NO_UPLOAD]
    assert run_in_virtual_time(on_a_slow_link()) == [NO_UPLOAD, FREE, link, answers, NO_UPLOAD]


@in_virtual_time
async def test_the_kernels_shares_are_told_while_they_hold_something_back() -> None:
    traffic, kernel = traffic_at(None), LossyKernel()
    traffic.kernel = kernel
    with traffic.sending():
        assert traffic.pace(1) == UploadPace(held_by="losses", bytes_per_second=3e6)
        kernel.shared_bytes_per_second = None
        assert traffic.pace(0) == FREE


@in_virtual_time
async def test_the_door_answers_how_long_and_why_and_takes_nothing() -> None:
    traffic, now = traffic_at(RATE), asyncio.get_running_loop().time()
    assert traffic.may_send(traffic.chunk_bytes, now).seconds == 0
    await traffic.leave(traffic.chunk_bytes)
    for _ in range(2):
        seconds, why = traffic.may_send(traffic.chunk_bytes, now)
        assert seconds == pytest.approx(BURST_SECONDS, rel=0.01)
        assert upload_in_words(why) == "its owner's limit of 1 MB/s"


@pytest.mark.parametrize(
    ("pace", "words"),
    [
        (NO_UPLOAD, ""),
        (FREE, "as fast as the network takes it"),
        (UploadPace(held_by="link", bytes_per_second=1.234e6), "the link carries 1.23 MB/s"),
        (
            UploadPace(held_by="losses", bytes_per_second=3e5),
            "packets are lost: connections share 0.3 MB/s",
        ),
        (UploadPace(held_by="answers", num_peers=1), "waiting for answers of 1 peer"),
        (UploadPace(held_by="answers", num_peers=3), "waiting for answers of 3 peers"),
    ],
)
def test_a_pace_is_told_in_words(pace: UploadPace, words: str) -> None:
    assert upload_in_words(pace) == words
