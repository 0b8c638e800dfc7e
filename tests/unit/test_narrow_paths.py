"""Paths on which only small packets get through are told from peers that are gone, and from bad links."""

from node.exchange.transport.rates.tcp import (
    MOST_SMALL_BYTES,
    REMEMBERED_SECONDS,
    TIMES_IN_A_ROW,
    WITHIN_SECONDS,
    NarrowPaths,
    TcpCount,
)

HOST, OTHER = "203.0.113.5", "203.0.113.6"


def seen(*, acked: int = 2000, under_way: int = 14480, resent: int = 3) -> TcpCount:
    return TcpCount(
        num_sent=0,
        num_resent=0,
        under_way_bytes=under_way,
        waiting_bytes=0,
        window_bytes=under_way,
        round_trip_seconds=0.1,
        acked_bytes=acked,
        packet_bytes=1448,
        resent_in_a_row=resent,
    )


def ends(
    paths: NarrowPaths, *stages: TcpCount, times: int = 1, now: float = 0.0, host: str = HOST
) -> None:
    """Connections that come as far as the last stage, and are gone."""
    for number in range(times):
        name = f"{host} {now} {number}"
        for stage in stages:
            paths.look({name: stage}, {name: host}, now)
        paths.look({}, {}, now)


def test_connections_that_shake_hands_and_end_at_their_first_full_packet_again_and_again() -> None:
    paths = NarrowPaths()
    ends(paths, seen(resent=0), seen(), times=TIMES_IN_A_ROW - 1)
    assert paths.hosts(0.0) == frozenset()
    ends(paths, seen(resent=0), seen(), now=1.0)
    assert paths.hosts(1.0) == {HOST}


def test_a_host_that_answers_nothing_is_gone_and_its_path_is_not_narrow() -> None:
    paths = NarrowPaths()
    ends(paths, seen(acked=0), times=10)
    assert paths.hosts(0.0) == frozenset()


def test_connections_that_end_now_and_then_say_nothing() -> None:
    paths = NarrowPaths()
    for number in range(10):
        ends(paths, seen(), now=number * WITHIN_SECONDS)
    assert paths.hosts(0.0) == frozenset()
    for number in range(TIMES_IN_A_ROW):
        ends(paths, seen(), now=1000.0 + number * WITHIN_SECONDS / TIMES_IN_A_ROW)
    assert paths.hosts(1000.0) == {HOST}


def test_a_long_connection_that_ends_says_nothing_and_clears_its_host() -> None:
    paths = NarrowPaths()
    ends(paths, seen(), times=TIMES_IN_A_ROW - 1)
    ends(paths, seen(acked=MOST_SMALL_BYTES + 1), times=10)
    ends(paths, seen(), times=TIMES_IN_A_ROW - 1)
    assert paths.hosts(0.0) == frozenset()


def test_one_that_gets_on_after_it_stood_still_says_nothing() -> None:
    paths = NarrowPaths()
    ends(paths, seen(), seen(acked=4000, resent=0), times=10)
    assert paths.hosts(0.0) == frozenset()


def test_a_few_small_bytes_that_stand_still_say_nothing_of_large_packets() -> None:
    paths = NarrowPaths()
    ends(paths, seen(under_way=600), times=10)
    assert paths.hosts(0.0) == frozenset()


def test_hosts_are_told_apart() -> None:
    paths = NarrowPaths()
    ends(paths, seen(), times=TIMES_IN_A_ROW - 1)
    ends(paths, seen(), times=TIMES_IN_A_ROW, host=OTHER)
    assert paths.hosts(0.0) == {OTHER}


def test_after_a_while_it_is_tried_whether_the_path_is_another_one() -> None:
    paths = NarrowPaths()
    ends(paths, seen(), times=TIMES_IN_A_ROW, now=5.0)
    assert paths.hosts(5.0 + REMEMBERED_SECONDS) == {HOST}
    assert paths.hosts(6.0 + REMEMBERED_SECONDS) == frozenset()
    ends(paths, seen(), times=TIMES_IN_A_ROW, now=1000.0)
    assert paths.hosts(1000.0) == {HOST}
