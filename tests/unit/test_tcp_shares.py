"""Connections that begin at once, over one uplink behind a queue: with and without shares of it."""

import math
from dataclasses import dataclass, field

import pytest

from node.exchange.peers import Limits
from node.exchange.transport.rates.tcp import (
    LEAST_GAIN,
    MANY,
    MANY_LOST,
    MOST_GAIN,
    TcpCount,
    TcpShares,
)

PAUSE_SECONDS = Limits().tcp_pause_seconds
RATE = 2_500_000.0  # bytes per second
ROUND_TRIP = 0.05
QUEUE_BYTES = 250_000
PACKET = 1_500
FIRST_WINDOW = 10 * PACKET
STEP_SECONDS = 0.002
LOOKS = 6  # steps from one look to the next
NUM_PEERS = 15
BODY_BYTES = 62_500


def count(
    *, waiting: int = 0, under_way: int = 0, window: int = 15_000, sent: int = 0, resent: int = 0
) -> TcpCount:
    return TcpCount(
        num_sent=sent,
        num_resent=resent,
        under_way_bytes=under_way,
        waiting_bytes=waiting,
        window_bytes=window,
        round_trip_seconds=ROUND_TRIP,
    )


HELD_BACK = count(waiting=100_000, window=100_000)
"""By its pace."""


def shares_after_losses() -> TcpShares:
    shares = TcpShares(Limits())
    shares.deal({"a": HELD_BACK}, seen=RATE, now=0.0)
    shares.deal({"a": HELD_BACK._replace(num_resent=MANY)}, seen=RATE, now=0.01)
    return shares


def test_nothing_is_limited_before_anything_was_lost() -> None:
    shares = TcpShares(Limits())
    for now in range(3):
        assert shares.deal({"a": HELD_BACK}, seen=RATE, now=now) == {"a": math.inf}


def test_nothing_is_limited_before_the_uplink_is_known() -> None:
    shares = shares_after_losses()
    assert shares.deal({"a": HELD_BACK}, seen=None, now=0.02) == {"a": math.inf}


def test_a_connection_that_was_repaired_before_we_saw_it_has_lost_nothing_now() -> None:
    shares = TcpShares(Limits())
    assert shares.deal({"a": HELD_BACK._replace(num_resent=70)}, seen=RATE, now=0) == {
        "a": math.inf
    }


def test_a_few_packets_of_many_limit_nothing_however_often_they_are_lost() -> None:
    shares, now = TcpShares(Limits()), 0.0
    num_sent = num_resent = 0
    for _ in range(20):
        now += 0.1
        num_sent, num_resent = num_sent + 1000, num_resent + int(0.5 * MANY_LOST * 1000)
        counts = {"a": HELD_BACK._replace(num_sent=num_sent, num_resent=num_resent)}
        assert shares.deal(counts, seen=RATE, now=now) == {"a": math.inf}


def test_connections_that_are_held_back_share_equally_and_idle_ones_may_begin_at_once() -> None:
    counts = {"a": HELD_BACK, "b": HELD_BACK, "idle": count()}
    allowed = LEAST_GAIN * RATE
    dealt = shares_after_losses().deal(counts, seen=RATE, now=0.02)
    assert dealt == pytest.approx({"a": allowed / 2, "b": allowed / 2, "idle": allowed})


def test_what_a_connection_behind_a_small_window_cannot_use_is_the_others() -> None:
    slow = count(waiting=100_000, under_way=FIRST_WINDOW, window=FIRST_WINDOW)
    usable = 2 * FIRST_WINDOW / ROUND_TRIP  # its window may double
    dealt = shares_after_losses().deal({"a": HELD_BACK, "slow": slow}, seen=RATE, now=0.02)
    assert dealt == pytest.approx({"a": LEAST_GAIN * RATE - usable, "slow": usable})


def test_where_no_window_can_use_the_uplink_nothing_of_it_is_kept_back() -> None:
    slow = count(waiting=100_000, under_way=FIRST_WINDOW, window=FIRST_WINDOW)
    dealt = shares_after_losses().deal({"a": slow, "b": slow}, seen=RATE, now=0.02)
    assert sum(dealt.values()) == pytest.approx(LEAST_GAIN * RATE)


def test_each_busy_time_without_losses_allows_a_little_more_and_losses_end_that() -> None:
    shares, now, counts = shares_after_losses(), 0.0, {"a": HELD_BACK._replace(num_resent=MANY)}
    before = LEAST_GAIN * RATE
    for _ in range(8):
        now += 2 * PAUSE_SECONDS
        (allowed,) = shares.deal(counts, seen=RATE, now=now).values()
        assert 1.0 <= allowed / before < 1.1
        before = allowed
    assert before > 1.3 * LEAST_GAIN * RATE
    counts = {"a": HELD_BACK._replace(num_resent=2 * MANY)}
    assert shares.deal(counts, seen=RATE, now=now + 0.1) == {"a": LEAST_GAIN * RATE}


def test_what_is_allowed_stays_finite_however_long_nothing_is_lost() -> None:
    shares, counts = shares_after_losses(), {"a": HELD_BACK._replace(num_resent=MANY)}
    for now in range(1, 20_000):
        dealt = shares.deal(counts, seen=RATE, now=now)
    assert dealt == {"a": MOST_GAIN * RATE}


def test_busy_times_that_nothing_was_held_back_in_say_nothing() -> None:
    shares = shares_after_losses()
    shares.deal({"a": HELD_BACK._replace(num_resent=MANY)}, seen=RATE, now=1.0)
    before = shares.deal({"a": count(resent=MANY)}, seen=RATE, now=1.1)["a"]
    small = count(waiting=1, under_way=FIRST_WINDOW, window=FIRST_WINDOW, resent=MANY)
    for now in range(2, 9):
        (allowed,) = shares.deal({"a": small}, seen=RATE, now=now).values()
    assert allowed <= 1.06 * before


@dataclass
class Connection:
    """TCP in slow start, and after it: a window that doubles, and halves when something is lost."""

    left: float = 0.0
    window: float = FIRST_WINDOW
    threshold: float = math.inf
    sent: float = 0.0
    resent: int = 0
    on_way: list[tuple[float, float]] = field(default_factory=list)  # arrives at, bytes

    @property
    def under_way(self) -> float:
        return sum(size for _, size in self.on_way)

    def count(self) -> TcpCount:
        return count(
            waiting=int(self.left),
            under_way=int(self.under_way),
            window=int(self.window),
            sent=int(self.sent / PACKET),
            resent=self.resent,
        )


class Swarm:
    """One node that sends as much to each of its peers, over and over."""

    def __init__(self, shares: TcpShares | None) -> None:
        self.rate = RATE
        self.num_lost = 0
        self._shares = shares
        self._peers = {f"peer {n}": Connection() for n in range(NUM_PEERS)}
        self._pace = dict.fromkeys(self._peers, math.inf)
        self._queue = 0.0
        self._now = 0.0
        self._seen: list[float] = []

    def exchange(self) -> float:
        """Returns how many times its limit it took."""
        self._now += 10.0
        self.num_lost, began_at = 0, self._now
        for peer in self._peers.values():
            peer.left, peer.window, peer.threshold = BODY_BYTES, FIRST_WINDOW, math.inf
        step = 0
        while any(peer.left or peer.on_way for peer in self._peers.values()):
            if step % LOOKS == 0:
                self._look()
            self._step()
            step += 1
        took = self._now - began_at
        self._seen.append(0.85 * NUM_PEERS * BODY_BYTES / took)
        return took * self.rate / (NUM_PEERS * BODY_BYTES)

    def _look(self) -> None:
        if self._shares is not None:
            counts = {name: peer.count() for name, peer in self._peers.items()}
            seen = sorted(self._seen[-9:])[-2] if len(self._seen) >= 2 else None
            self._pace = self._shares.deal(counts, seen=seen, now=self._now)

    def _step(self) -> None:
        self._now += STEP_SECONDS
        self._queue = max(0.0, self._queue - self.rate * STEP_SECONDS)
        for name, peer in self._peers.items():
            arrived = sum(size for at, size in peer.on_way if at <= self._now)
            peer.on_way = [entry for entry in peer.on_way if entry[0] > self._now]
            peer.window += arrived if peer.window < peer.threshold else 0.0
            paced = min(self._pace[name], 2 * peer.window / ROUND_TRIP) * STEP_SECONDS
            sent = max(0.0, min(peer.left, peer.window - peer.under_way, paced))
            if self._queue + sent > QUEUE_BYTES:
                self.num_lost += 1
                peer.resent += math.ceil(sent / PACKET)
                peer.window = peer.threshold = max(PACKET, 0.7 * peer.window)
                continue  # it is sent again later
            peer.left -= sent
            peer.sent += sent
            self._queue += sent
            if sent:
                peer.on_way.append((self._now + ROUND_TRIP + self._queue / self.rate, sent))


def test_connections_that_begin_at_once_overrun_the_queue_by_themselves() -> None:
    swarm = Swarm(None)
    for _ in range(5):
        swarm.exchange()
        assert swarm.num_lost > 0


def test_with_shares_most_exchanges_lose_nothing_and_none_is_held_back() -> None:
    swarm = Swarm(TcpShares(Limits()))
    for _ in range(3):
        swarm.exchange()
    losses = []
    for _ in range(20):
        assert swarm.exchange() < 1.35
        losses.append(swarm.num_lost)
    assert sum(lost == 0 for lost in losses) >= 15


@pytest.mark.parametrize("factor", [0.3, 5.0])
def test_a_link_that_changed_is_known_again_after_some_exchanges(factor: float) -> None:
    swarm = Swarm(TcpShares(Limits()))
    for _ in range(5):
        swarm.exchange()
    swarm.rate *= factor
    for _ in range(15):
        swarm.exchange()
    free = Swarm(None)
    free.rate = swarm.rate
    assert swarm.exchange() <= 1.1 * free.exchange()
