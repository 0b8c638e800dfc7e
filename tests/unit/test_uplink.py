"""How fast bodies may go, in virtual time: a link behind a queue, and peers behind both."""

import asyncio

import pytest

from lab.simulation.virtual_time import run_in_virtual_time
from node.exchange.peers import Limits
from node.exchange.transport.rates.traffic import HEADER_SHARE, Traffic
from node.exchange.transport.rates.uplink import (
    LEAST_ANSWERS,
    LEAST_MEASUREMENTS,
    MEMORY,
    UnderWay,
    Uplink,
)
from protocol.wire.payload import WireCounts
from tests.unit.exchange_scene import in_virtual_time

LIMITS = Limits(floor_bytes_per_second=1.0)
EPOCH_SECONDS, QUEUE_SECONDS = LIMITS.epoch_seconds, LIMITS.queue_seconds
LASTING_SECONDS = LIMITS.lasting_seconds
RATE = 1_000_000.0  # bytes of bodies a second
PART = 32_768
NUM_PARTS = 128  # for each peer in one exchange
NUM_PEERS = 3
WINDOW_PARTS = 64  # under way to a peer
ROUND_TRIP = 0.05
LEAST_SECONDS = NUM_PEERS * NUM_PARTS * PART / RATE


class PacingKernel:
    """It paces TCP, and nothing was lost yet."""

    why_not = ""
    shared_bytes_per_second = None


class QueuedLink:
    """A link behind a queue that never overflows, three peers behind it, and a node that fills it."""

    def __init__(
        self,
        *,
        allowed: float | None = None,
        is_answered: bool = True,
        is_paced_below: bool = False,
    ) -> None:
        self.bytes_per_second = RATE
        self.late_seconds = [0.0] * NUM_PEERS
        """By so much each peer's answers come later than the way takes."""
        self.queues: list[float] = []
        """For how long each part of an exchange waited before the link."""
        self._is_answered = is_answered
        self._clock = asyncio.get_running_loop().time
        self._is_free_at = 0.0
        self.traffic = Traffic(WireCounts(), limits=LIMITS, allowed_bytes_per_second=allowed)
        if is_paced_below:
            self.traffic.kernel = PacingKernel()
        self.uplink = self.traffic.uplink

    async def exchange(self) -> float:
        """Sends as much to each peer; returns how many seconds that took."""
        began_at, self.queues = self._clock(), []
        await asyncio.gather(*(self._push(peer) for peer in range(NUM_PEERS)))
        took = self._clock() - began_at
        await asyncio.sleep(60)
        return took

    async def _push(self, peer: int) -> None:
        room = asyncio.Semaphore(WINDOW_PARTS)
        async with asyncio.TaskGroup() as answers:
            for _ in range(NUM_PARTS):
                await room.acquire()
                under_way = self.uplink.begin(peer, PART, now=self._clock())
                left = PART
                while left > 0:
                    chunk = min(left, self.traffic.chunk_bytes)
                    if not self._is_answered:
                        self.uplink.unanswered()
                    await self.traffic.leave(chunk)
                    self._is_free_at = max(self._is_free_at, self._clock())
                    self._is_free_at += chunk / self.bytes_per_second
                    left -= chunk
                under_way.is_out(self._clock())
                self.queues.append(self._is_free_at - self._clock())
                seconds = self.queues[-1] + ROUND_TRIP + self.late_seconds[peer]
                answers.create_task(self._answer(under_way, seconds, room))

    async def _answer(self, under_way: UnderWay, seconds: float, room: asyncio.Semaphore) -> None:
        await asyncio.sleep(seconds)
        under_way.answered(self._clock())
        room.release()


async def known_link() -> QueuedLink:
    """One whose rate was learnt."""
    link = QueuedLink()
    for _ in range(3):
        await link.exchange()
    return link


@in_virtual_time
async def test_an_uplink_stays_full_behind_a_short_queue() -> None:
    link = QueuedLink()
    await link.exchange()
    assert max(link.queues) > 4  # nothing was known of it at first
    for _ in range(10):
        assert await link.exchange() < 1.02 * LEAST_SECONDS
        assert max(link.queues) < 0.2


@pytest.mark.parametrize("factor", [0.2, 0.6, 1.5, 5.0])
@in_virtual_time
async def test_a_link_that_changes_is_full_again_behind_a_short_queue(factor: float) -> None:
    link = await known_link()
    link.bytes_per_second *= factor
    for _ in range(3):
        await link.exchange()
    assert await link.exchange() < 1.1 * LEAST_SECONDS / factor
    assert max(link.queues) < 0.5


def test_where_the_kernel_paces_each_exchange_finds_the_rate_anew() -> None:
    async def seconds_of_a_short_one(*, is_paced_below: bool) -> float:
        link = QueuedLink(is_paced_below=is_paced_below)
        await link.exchange()
        assert link.uplink.bytes_per_second is not None  # a long one is paced towards its end
        link.uplink.begin(0, PART, now=asyncio.get_running_loop().time()).lost(0.0)
        began_at = asyncio.get_running_loop().time()
        for _ in range(NUM_PARTS):
            await link.traffic.leave(min(PART, link.traffic.chunk_bytes))
        return asyncio.get_running_loop().time() - began_at

    assert run_in_virtual_time(seconds_of_a_short_one(is_paced_below=True)) == 0
    assert run_in_virtual_time(seconds_of_a_short_one(is_paced_below=False)) > 1


@pytest.mark.parametrize("is_paced_below", [True, False])
@in_virtual_time
async def test_where_the_kernel_paces_only_what_lasts_is_paced(is_paced_below: bool) -> None:
    link = QueuedLink(is_paced_below=is_paced_below)
    link.bytes_per_second = 1.5 * LEAST_SECONDS / LASTING_SECONDS * RATE
    await link.exchange()
    assert max(link.queues) > QUEUE_SECONDS
    assert (link.uplink.bytes_per_second is None) == is_paced_below


@in_virtual_time
async def test_what_never_waits_is_not_paced() -> None:
    link = QueuedLink()
    link.bytes_per_second = 1e12
    for _ in range(3):
        await link.exchange()
    assert link.uplink.bytes_per_second is None


@in_virtual_time
async def test_one_peer_whose_answers_come_late_slows_nobody() -> None:
    link = await known_link()
    link.late_seconds[0] = 0.5
    for _ in range(5):
        assert await link.exchange() < 1.02 * LEAST_SECONDS + 0.5


@in_virtual_time
async def test_a_queue_of_others_takes_half_of_our_rate_at_most_and_not_for_ever() -> None:
    link = await known_link()
    link.late_seconds = [0.5] * NUM_PEERS
    rates = []
    for _ in range(4):
        await link.exchange()
        rates.append(link.uplink.bytes_per_second or 0.0)
    assert min(rates) >= 0.45 * RATE
    assert rates[-1] == pytest.approx(RATE, rel=0.2)  # a longer way, then


@in_virtual_time
async def test_the_owners_limit_holds_whatever_the_link_carries() -> None:
    link = QueuedLink(allowed=0.5 * (1 + HEADER_SHARE) * RATE)
    for _ in range(3):
        assert await link.exchange() == pytest.approx(2 * LEAST_SECONDS, rel=0.05)


@in_virtual_time
async def test_beside_bodies_that_nobody_answers_nothing_is_learnt() -> None:
    link = QueuedLink(is_answered=False)
    await link.exchange()
    assert link.uplink.bytes_per_second is None


@in_virtual_time
async def test_peers_that_take_their_time_for_every_answer_are_not_taken_for_a_queue_for_long() -> (
    None
):
    link = QueuedLink()
    for peer in range(NUM_PEERS):
        link.uplink.goes_round_in(peer, ROUND_TRIP)
    link.late_seconds = [0.5] * NUM_PEERS
    for _ in range(3):
        await link.exchange()
    assert await link.exchange() < 1.05 * LEAST_SECONDS + 0.5


def test_a_queue_that_was_there_before_the_first_answer_is_seen_by_the_round_trip() -> None:
    uplink = Uplink(LIMITS)
    uplink.goes_round_in("peer", 0.05)
    answer_all(uplink, since=0.0, seconds=1.0, apart=0.1, times=2 * LEAST_ANSWERS + 1)
    assert uplink.bytes_per_second == pytest.approx(0.85 * PART / 0.1, rel=0.01)


def answer_all(uplink: Uplink, *, since: float, seconds: float, apart: float, times: int) -> float:
    """So many parts, one after the other, all answered after so many seconds; returns when the last is."""
    flying = [uplink.begin("peer", PART, now=since) for _ in range(times)]
    for number, part in enumerate(flying):
        part.is_out(since + number * apart)
        part.answered(since + number * apart + seconds)
    return since + times * apart + seconds


def test_a_way_that_got_longer_is_taken_for_a_queue_only_for_a_while() -> None:
    uplink = Uplink(LIMITS)
    apart, times = 1.01 * EPOCH_SECONDS / LEAST_ANSWERS, 2 * LEAST_ANSWERS + 1
    now = answer_all(uplink, since=0.0, seconds=0.05, apart=apart, times=times)
    now = answer_all(uplink, since=now, seconds=0.05 + 2 * QUEUE_SECONDS, apart=apart, times=times)
    slow = uplink.bytes_per_second
    assert slow is not None
    for _ in range(MEMORY):
        now = answer_all(
            uplink, since=now, seconds=0.05 + 2 * QUEUE_SECONDS, apart=apart, times=times
        )
    uplink.bytes_per_second = 1.0
    answer_all(uplink, since=now, seconds=0.05 + 2 * QUEUE_SECONDS, apart=apart, times=times)
    assert uplink.bytes_per_second == 1.0  # no queue any more


def test_what_is_over_before_tcp_has_felt_its_way_says_nothing() -> None:
    uplink = Uplink(LIMITS)
    uplink.goes_round_in("peer", 0.05)
    for number in range(2 * MEMORY):
        answer_all(uplink, since=100.0 * number, seconds=1.0, apart=0.1, times=LEAST_ANSWERS + 1)
    assert uplink.bytes_per_second is None


def test_what_was_lost_and_what_was_answered_too_early_says_nothing() -> None:
    uplink = Uplink(LIMITS)
    for number in range(10 * LEAST_ANSWERS):
        now = number * EPOCH_SECONDS
        lost, early = (uplink.begin("peer", PART, now=now) for _ in range(2))
        lost.is_out(now)
        lost.lost(now)
        early.answered(now + 0.05 * number)
        early.lost(now)
    assert uplink.bytes_per_second is None


@pytest.mark.parametrize(
    ("peers", "is_paced_below", "is_held_to"),
    [
        (("only",), False, True),
        (("one", "other"), False, False),  # it may be ours, and nobody else keeps it short
        (("one", "other"), True, True),
    ],
)
@pytest.mark.parametrize("has_measured", [True, False])
def test_a_queue_that_may_be_before_the_peers_is_not_yielded_to_below_what_the_uplink_has_carried(
    peers: tuple[str, ...], is_paced_below: bool, is_held_to: bool, has_measured: bool
) -> None:
    uplink = Uplink(LIMITS, is_paced_below=lambda: is_paced_below)
    for exchange in range(LEAST_MEASUREMENTS if has_measured else 0):
        uplink.meter.begin(100.0 * exchange)
        uplink.meter.moved(int(10 * RATE), since=100.0 * exchange, now=100.0 * exchange + 10)
        uplink.meter.end(100.0 * exchange + 10)
    now = 1000.0

    def exchange_at(rate: float, answered_after: float, num_epochs: int) -> None:
        nonlocal now
        for _ in range(2 * num_epochs * LEAST_ANSWERS):
            now += EPOCH_SECONDS / LEAST_ANSWERS
            for peer in peers:
                size = int(rate * EPOCH_SECONDS / LEAST_ANSWERS / len(peers))
                part = uplink.begin(peer, size, now=now - answered_after)
                part.is_out(now - answered_after)
                part.answered(now)

    exchange_at(RATE, 0.05, 3)
    exchange_at(0.1 * RATE, 0.05 + 3 * QUEUE_SECONDS, 30)
    assert uplink.bytes_per_second is not None
    if is_held_to and (has_measured or is_paced_below):
        assert 0.8 * RATE < uplink.bytes_per_second < RATE
    else:
        assert uplink.bytes_per_second < 0.2 * RATE
