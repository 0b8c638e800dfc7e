"""Paced uploads, in virtual time."""

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.virtual_time import run_in_virtual_time
from node.exchange.transport.pacing import BURST_SECONDS, CHUNK_BYTES, Pacer, TokenBucket
from node.exchange.transport.wire_cost import wire_bytes

RATE = 1_000_000.0  # wire bytes a second
FLOOR = 2048.0
SECONDS = 10.0
BURST = BURST_SECONDS * RATE


def pacer_at(rate: float | None) -> Pacer:
    return Pacer(rate, floor_bytes_per_second=FLOOR, now=asyncio.get_running_loop().time)


def wire(body_bytes: float) -> float:
    """What the headers make of a long body."""
    whole = 10_000_000
    return body_bytes * (wire_bytes(whole, 0)[0] - wire_bytes(0, 0)[0]) / whole


async def upload_for(
    seconds: float, pacer: Pacer, *, num_streams: int, note: Callable[[int], None] | None = None
) -> list[int]:
    """Bytes that each of so many streams, which always have more to send, sent in that time."""
    sent = [0] * num_streams

    async def upload(index: int) -> None:
        while True:
            await pacer.body(pacer.chunk_bytes)
            sent[index] += pacer.chunk_bytes
            if note is not None:
                note(pacer.chunk_bytes)

    streams = [asyncio.create_task(upload(index)) for index in range(num_streams)]
    await asyncio.sleep(seconds)
    for stream in streams:
        stream.cancel()
    await asyncio.wait(streams)
    return sent


@pytest.mark.parametrize("num_streams", [1, 3, 8])
def test_streams_use_the_whole_rate_and_share_it_evenly(num_streams: int) -> None:
    async def scene() -> list[int]:
        return await upload_for(SECONDS, pacer_at(RATE), num_streams=num_streams)

    sent = run_in_virtual_time(scene())
    share = RATE * SECONDS / num_streams
    assert [wire(num_bytes) for num_bytes in sent] == pytest.approx([share] * num_streams, rel=0.05)


def test_in_no_stretch_of_time_is_more_sent_than_the_rate_and_one_burst() -> None:
    async def scene() -> list[tuple[float, int]]:
        loop, log = asyncio.get_running_loop(), list[tuple[float, int]]()
        pacer = pacer_at(RATE)
        for pause in (0.0, 0.01, 5.0):  # what an idle time saves up is one burst, however long
            await asyncio.sleep(pause)
            await upload_for(
                1.0, pacer, num_streams=4, note=lambda size: log.append((loop.time(), size))
            )
        return log

    log = run_in_virtual_time(scene())
    for first, (since, _) in enumerate(log):
        total = 0
        for until, num_bytes in log[first:]:
            total += num_bytes
            assert wire(total) <= RATE * (until - since) + BURST + 1.0
    assert wire(sum(size for _, size in log)) > 2.9 * RATE


def test_bodies_make_room_for_what_does_not_wait() -> None:
    async def sent_beside(work: Callable[[Pacer], None]) -> int:
        pacer = pacer_at(RATE)
        work(pacer)
        return sum(await upload_for(SECONDS, pacer, num_streams=2))

    def cost(work: Callable[[Pacer], None]) -> float:
        alone = run_in_virtual_time(sent_beside(lambda _: None))
        return wire(alone - run_in_virtual_time(sent_beside(work)))

    assert cost(lambda pacer: pacer.message(500_000)) == pytest.approx(wire(500_000), abs=BURST)
    downloaded = 100_000_000
    acknowledgements = wire_bytes(0, downloaded)[0]
    assert cost(lambda pacer: pacer.received(downloaded)) == pytest.approx(
        acknowledgements, abs=BURST
    )


def test_a_transfer_that_gives_up_while_it_waits_takes_nothing_from_the_others() -> None:
    async def scene() -> float:
        loop, pacer = asyncio.get_running_loop(), pacer_at(RATE)
        await pacer.body(pacer.chunk_bytes)
        waiting = [asyncio.create_task(pacer.body(pacer.chunk_bytes)) for _ in range(50)]
        await asyncio.sleep(BURST_SECONDS / 2)
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        await pacer.body(pacer.chunk_bytes)
        return loop.time()

    assert run_in_virtual_time(scene()) == pytest.approx(BURST_SECONDS, rel=0.01)


def test_so_few_bodies_go_at_once_that_receivers_take_none_for_a_trickle() -> None:
    async def scene() -> tuple[int, int]:
        pacer, most, now = pacer_at(32_000.0), 0, 0

        async def upload() -> None:
            nonlocal most, now
            async with pacer.place():
                now += 1
                most = max(most, now)
                for _ in range(20):
                    await pacer.body(pacer.chunk_bytes)
                now -= 1

        await asyncio.gather(*(upload() for _ in range(40)))
        return most, now

    most, left = run_in_virtual_time(scene())
    assert left == 0
    assert 32_000.0 / most > 1.5 * FLOOR
    assert most > 1


def test_chunks_are_short_in_time_at_a_low_rate_and_short_in_bytes_at_a_high_one() -> None:
    async def chunk_bytes_at(rate: float | None) -> int:
        return pacer_at(rate).chunk_bytes

    slow = run_in_virtual_time(chunk_bytes_at(32_000.0))
    assert 0 < wire(slow) / 32_000.0 <= 0.1
    for rate in (1e9, None):
        assert run_in_virtual_time(chunk_bytes_at(rate)) == CHUNK_BYTES


def test_without_a_rate_nothing_waits() -> None:
    async def scene() -> float:
        pacer = pacer_at(None)
        for _ in range(1000):
            async with pacer.place():
                await pacer.body(pacer.chunk_bytes)
            pacer.received(1 << 40)
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(scene()) == 0.0


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
