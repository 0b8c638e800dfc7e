"""Who is ahead of the others, and waits a little."""

import pytest

from node.exchange.transport.rates.uplink import Evenness

LEAD = 100


def moved(*num_bytes: int, round: int = 1) -> Evenness:
    """Peers 0, 1, ... that have so much, and go on."""
    evenness = Evenness(LEAD)
    for peer, num in enumerate(num_bytes):
        evenness.begin(peer, round)
        evenness.moved(peer, round, num)
    return evenness


def ahead(evenness: Evenness, num_peers: int) -> list[int]:
    return [peer for peer in range(num_peers) if evenness.is_ahead(peer)]


def test_whoever_is_ahead_of_those_that_are_waited_for_waits() -> None:
    assert ahead(moved(0, 50, 150, 151, 500), 5) == [3, 4]


@pytest.mark.parametrize("num_slowest", [1, 2])
def test_nobody_waits_for_the_slowest_quarter(num_slowest: int) -> None:
    others = [10_000] * (8 - num_slowest)
    assert not ahead(moved(*[0] * num_slowest, *others), 8)


def test_more_than_a_quarter_is_waited_for() -> None:
    assert ahead(moved(0, 0, 0, 500, 500, 500, 500, 500), 8) == [3, 4, 5, 6, 7]


@pytest.mark.parametrize("num_bytes", [(500,), (0, 500)])
def test_nobody_waits_for_the_only_other_one(num_bytes: tuple[int, ...]) -> None:
    assert not ahead(moved(*num_bytes), len(num_bytes))


def test_nobody_waits_for_whom_nothing_comes_from_any_more() -> None:
    evenness = moved(0, 0, 500, 500)
    assert ahead(evenness, 4) == [2, 3]
    evenness.end(0)
    assert not ahead(evenness, 4)


def test_what_was_moved_in_an_earlier_round_does_not_count() -> None:
    evenness = moved(0, 0, 500, 500)
    evenness.begin(0, 2)
    evenness.moved(3, 1, 500)
    assert not ahead(evenness, 4)
    evenness.moved(2, 2, 500)
    assert ahead(evenness, 4) == [2]


def test_a_body_of_an_earlier_round_does_not_bring_that_round_back() -> None:
    evenness = moved(0, 0, 500, round=2)
    evenness.begin(0, 1)
    assert ahead(evenness, 3) == [2]
