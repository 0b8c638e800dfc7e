"""What a link carries, as its transfers show it."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from node.exchange.peers import Limits
from node.exchange.transport.rates.traffic import Traffic
from node.exchange.transport.rates.uplink import LEAST_BYTES, LEAST_MEASUREMENTS, LinkMeter
from protocol.wire.payload import WireCounts

MB = 1_000_000


def busy(meter: LinkMeter, *moves: tuple[float, int], at: float = 0.0, until: float) -> None:
    """One transfer: bytes that are there at seconds after its beginning, one after the other."""
    meter.begin(at)
    since = at
    for seconds, num_bytes in moves:
        meter.moved(num_bytes, since=since, now=at + seconds)
        since = at + seconds
    meter.end(at + until)


def steady(seconds: int, bytes_per_second: int, start: float = 0.0) -> list[tuple[float, int]]:
    return [(start + second + 1, bytes_per_second) for second in range(seconds)]


def test_steady_transfers_give_their_rate_once_there_were_enough() -> None:
    meter = LinkMeter(Limits())
    for _ in range(LEAST_MEASUREMENTS):
        assert meter.bytes_per_second is None
        busy(meter, *steady(10, MB), until=10)
    assert meter.bytes_per_second == pytest.approx(MB)


def test_a_slow_beginning_and_a_slow_peer_at_the_end_say_nothing_of_the_link() -> None:
    meter = LinkMeter(Limits())
    moves = [(5.0, 1000), *steady(10, MB, start=5), (60.0, MB)]
    for _ in range(LEAST_MEASUREMENTS):
        busy(meter, *moves, until=61)
    assert meter.bytes_per_second == pytest.approx(MB)


def test_transfers_at_once_share_the_link() -> None:
    meter = LinkMeter(Limits())
    for _ in range(LEAST_MEASUREMENTS):
        meter.begin(0.0)
        meter.begin(0.0)
        for second in range(1, 11):
            meter.moved(MB, since=second - 1, now=second)
            meter.moved(MB, since=second - 1, now=second)
        meter.end(10.0)
        assert meter.bytes_per_second is None  # one is still under way
        assert meter.num_active == 1
        meter.end(10.0)
    assert meter.bytes_per_second == pytest.approx(2 * MB)


def test_time_between_transfers_does_not_count() -> None:
    meter = LinkMeter(Limits())
    for start in (0.0, 1000.0, 5000.0, 5500.0, 9000.0):
        busy(meter, *steady(10, MB), at=start, until=10)
    assert meter.bytes_per_second == pytest.approx(MB)


def test_a_small_transfer_says_nothing_unless_it_takes_long() -> None:
    meter = LinkMeter(Limits())
    busy(meter, (0.1, LEAST_BYTES - 1), until=0.2)
    assert meter.bytes_per_second is None
    busy(meter, (60.0, 1000), until=60)  # a trickle: its peer's fault more likely than the link's
    assert meter.bytes_per_second is None
    for _ in range(LEAST_MEASUREMENTS):
        busy(meter, *steady(4, LEAST_BYTES // 8), until=4)
    assert meter.bytes_per_second == pytest.approx(LEAST_BYTES // 8)


def test_odd_measurements_count_for_nothing_as_long_as_they_are_few() -> None:
    meter = LinkMeter(Limits())
    for rate in (8, 1, 1, 30, 1, 1):
        busy(meter, *steady(10, rate * MB), until=10)
    assert meter.bytes_per_second == pytest.approx(MB)


def test_a_link_that_has_changed_is_known_after_half_a_window() -> None:
    meter = LinkMeter(Limits())
    for rate in (1,) * 9 + (4,) * 5:
        busy(meter, *steady(10, rate * MB), until=10)
    assert meter.bytes_per_second == pytest.approx(4 * MB)


def test_answers_that_come_at_once_do_not_make_a_link_fast() -> None:
    """Parts of ten seconds for a second each, and the first seven are answered with the eighth."""
    meter = LinkMeter(Limits())
    for _ in range(LEAST_MEASUREMENTS):
        meter.begin(0.0)
        for second in range(10):
            meter.moved(MB, since=float(second), now=max(8.0, second + 1.0))
        meter.end(10.0)
    assert MB <= (meter.bytes_per_second or 0) <= 2.5 * MB, "all at their answers: 5 MB/s and more"


@pytest.mark.parametrize("num_peers", [1, 4, 15])
def test_parts_for_many_peers_that_wait_for_each_other_give_the_rate_of_the_link(
    num_peers: int,
) -> None:
    """The link sends in turns; whoever's turn comes last has waited for all of the others."""
    meter = LinkMeter(Limits())
    for _ in range(LEAST_MEASUREMENTS):
        meter.begin(0.0)
        for turn in range(10):
            for peer in range(num_peers):
                began = max(0, (turn - 1) * num_peers + peer)  # with four parts under way, say
                meter.moved(MB, since=float(began), now=float(turn * num_peers + peer + 1))
        meter.end(10.0 * num_peers)
    assert meter.bytes_per_second == pytest.approx(MB, rel=0.15)


def test_bytes_over_no_network_say_nothing_of_a_link() -> None:
    meter = LinkMeter(Limits())
    for _ in range(LEAST_MEASUREMENTS):
        meter.begin(0.0)
        meter.moved(50 * MB, since=0.0, now=0.0)
        meter.end(0.0)
    assert meter.bytes_per_second is None


def test_what_comes_after_the_end_is_of_no_transfer() -> None:
    meter = LinkMeter(Limits())
    meter.moved(50 * MB, since=-1.0, now=0.0)
    busy(meter, *steady(10, MB), until=10)
    meter.moved(50 * MB, since=9.0, now=10.1)
    for start in (20, 40, 60, 80):
        busy(meter, *steady(10, MB), at=start, until=10)
    assert meter.bytes_per_second == pytest.approx(MB)


def test_a_transfer_of_any_number_of_parts_takes_little_memory() -> None:
    meter = LinkMeter(Limits())
    for _ in range(LEAST_MEASUREMENTS):
        meter.begin(0.0)
        for number in range(20_000):
            meter.moved(MB, since=0.1 * number, now=0.1 * (number + 1))
        assert len(meter._moves) <= 512
        meter.end(2_000.0)
    assert meter.bytes_per_second == pytest.approx(10 * MB)


def test_a_body_on_its_way_is_told_of_in_both_directions_and_when_it_breaks_off() -> None:
    told: list[str] = []

    @contextmanager
    def moving() -> Iterator[None]:
        told.append("moves")
        try:
            yield
        finally:
            told.append("ends")

    traffic = Traffic(WireCounts(), limits=Limits(), while_moving=moving, clock=lambda: 0.0)
    with traffic.sending():
        assert told == ["moves"]
    with pytest.raises(ConnectionError), traffic.receiving():
        raise ConnectionError
    assert told == ["moves", "ends"] * 2
