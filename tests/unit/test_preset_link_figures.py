"""What presets count on of links and hosts is what was measured."""

import math
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, get_args

import pytest

from benchmarks.exchange.shares import Exchange, exchanges, measured_share
from benchmarks.measurement import read_rows
from coordinator.presets.cost import (
    CODEC_COSTS,
    FIRST_WINDOW_BYTES,
    MEASURED_HOST,
    MEASURED_SHARE,
    NO_DISTANCE,
    PEER_ROUND_TRIPS,
    WHOLE,
    CongestionControl,
    Link,
    Setting,
    Situation,
    bytes_per_round,
    host_seconds,
    round_trips_lost,
)
from protocol.run.run_spec import CodecName

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"

KINDS = list(get_args(CongestionControl))


def test_the_share_of_a_full_link_is_what_exchanges_got() -> None:
    """Run 'python -m benchmarks.exchange.shares' after rows have been added: it prints what belongs there."""
    found = exchanges()
    assert measured_share(found) == pytest.approx(MEASURED_SHARE, abs=0.006)
    shares = {
        kind: [each.share() for each in found if each.is_as_hosts_come and is_over(each, kind)]
        for kind in get_args(CongestionControl)
    }
    assert min(map(len, shares.values())) >= 3
    # Hence one share for both.
    medians = [median(each) for each in shares.values()]
    assert max(medians) - min(medians) < max(max(each) - min(each) for each in shares.values())


def is_over(exchange: Exchange, congestion_control: CongestionControl) -> bool:
    return exchange.situation.congestion_control == congestion_control


def test_round_trips_between_peers_are_as_many_as_leave_no_exchange_more_than_its_link() -> None:
    found = exchanges()
    assert max(each.share(PEER_ROUND_TRIPS) for each in found) < 1.05
    assert max(each.share(PEER_ROUND_TRIPS + 1) for each in found) > 1.05


def test_predicted_exchanges_are_those_that_were_measured() -> None:
    """Also over other links, and with more nodes, than those that the share is from."""
    found = exchanges()
    assert {each.situation.num_nodes for each in found} >= {2, 4, 8, 16}
    rates = {each.situation.up_bits_per_second / 1e6 for each in found}
    assert rates >= {10, 20, 50, 100}
    ratios = [each.predicted_seconds / each.seconds for each in found]
    assert len(ratios) >= 15
    assert 0.9 < median(ratios) < 1.1
    assert min(ratios) > 0.75 and max(ratios) < 1.25


def test_kept_windows_save_what_slow_start_is_said_to_cost() -> None:
    """Rows that differ in nothing else."""
    found = [each for each in exchanges() if is_over(each, "cubic")]
    saved = []
    for kept in found:
        forgetful = replace(kept.situation, keeps_windows=False)
        for each in found:
            if kept.situation.keeps_windows and each.situation == forgetful:
                lost = forgetful.link.round_trips_lost(bytes_per_round(forgetful, each.setting))
                took = (each.seconds - kept.seconds) / forgetful.round_trip_seconds
                saved.append((took, lost))
    assert len(saved) >= 2
    for took, lost in saved:
        assert took == pytest.approx(lost, abs=1)


def link(
    mbit: float,
    congestion_control: CongestionControl | None = "cubic",
    *,
    round_trip_seconds: float = 0.05,
    keeps_windows: bool = False,
) -> Link:
    return Link(
        bits_per_second=mbit * 1e6,
        round_trip_seconds=round_trip_seconds,
        congestion_control=congestion_control,
        keeps_windows=keeps_windows,
    )


def test_round_trips_of_bytes_are_more_over_a_slow_link_and_over_a_short_one() -> None:
    assert link(100).round_trips_of(4e6) == pytest.approx(6.4)
    assert link(10).round_trips_of(4e6) == pytest.approx(64)
    assert link(100, round_trip_seconds=0.005).round_trips_of(4e6) == pytest.approx(64)
    assert link(100, round_trip_seconds=0).round_trips_of(4e6) == NO_DISTANCE


def test_slow_start_sends_twice_as_much_in_each_round_trip_until_the_link_is_full() -> None:
    # Seven windows in three round trips, over a link that would carry a hundred in one.
    assert round_trips_lost(7, 100) == pytest.approx(3 - 7 / 100)
    # A link that carries sixteen is full after 2^t = 16 / ln 2; what follows loses nothing.
    full_after = math.log2(16 / math.log(2))
    by_then = 16 / math.log(2) - 1
    assert round_trips_lost(by_then, 16) == pytest.approx(full_after - by_then / 16)
    assert round_trips_lost(1e6, 16) == round_trips_lost(by_then, 16)
    # One that a first window fills, loses nothing at all.
    assert round_trips_lost(1e6, math.log(2)) == 0
    assert round_trips_lost(1e6, math.log(2) + 1e-3) == pytest.approx(0, abs=1e-5)


def test_only_cubic_that_forgets_its_windows_begins_slowly_and_only_over_a_distance() -> None:
    assert link(100).round_trips_lost(16e6) > 4
    assert link(100, keeps_windows=True).round_trips_lost(16e6) == 0
    assert link(100, round_trip_seconds=0).round_trips_lost(16e6) == 0
    for other in ("bbr", None):
        assert link(100, other).round_trips_lost(16e6) == 0
    assert link(100, None).share_of(16e6) == WHOLE


def test_few_bytes_and_fast_or_long_links_lose_most_of_a_share() -> None:
    shares = [link(mbit).share_of(4e6) for mbit in (1, 10, 100, 1000)]
    assert shares == sorted(shares, reverse=True) and shares[-1] < 0.2
    assert link(100).share_of(4e6) < link(100).share_of(16e6) < MEASURED_SHARE
    assert link(100, round_trip_seconds=0.2).share_of(16e6) < link(100).share_of(16e6)
    assert link(100, round_trip_seconds=0).share_of(4e6) == pytest.approx(MEASURED_SHARE)


@pytest.mark.parametrize("congestion_control", KINDS)
def test_more_bytes_never_take_less_time_and_a_slower_link_never_less(
    congestion_control: CongestionControl,
) -> None:
    """Without it a slower link could lead to more of them."""
    factors = [1.05**exponent for exponent in range(400)]
    times = [link(100, congestion_control).seconds_of(1e3 * factor) for factor in factors]
    assert times == sorted(times)
    times = [link(0.1 * factor, congestion_control).seconds_of(1e6) for factor in factors]
    assert times == sorted(times, reverse=True)


def test_cubic_is_never_counted_on_for_more_than_bbr() -> None:
    """It stands for whatever nobody names."""
    for exponent in range(200):
        num_bytes = 1e3 * 1.1**exponent
        assert link(100, "cubic").share_of(num_bytes) <= link(100, "bbr").share_of(num_bytes)


@pytest.mark.parametrize("congestion_control", [*KINDS, None])
@pytest.mark.parametrize("round_trip_seconds", [0.0, 0.001, 0.05, 0.4])
def test_a_rate_that_is_enough_takes_just_as_long_as_there_is(
    congestion_control: CongestionControl | None, round_trip_seconds: float
) -> None:
    """With what slow start costs at that rate; none is enough where it alone takes longer."""
    whatever = link(1, congestion_control, round_trip_seconds=round_trip_seconds)
    slow_start = 0.0
    if congestion_control == "cubic":
        slow_start = math.log2(1 + 4e6 / FIRST_WINDOW_BYTES) * round_trip_seconds
    for exponent in range(-6, 9):
        seconds = 2.0**exponent
        enough = whatever.enough_bits_per_second(4e6, seconds)
        assert (enough is None) == (seconds < slow_start)
        if enough is not None:
            took = replace(whatever, bits_per_second=enough).seconds_of(4e6)
            assert took == pytest.approx(seconds, rel=1e-9)


def test_speeds_of_codecs_are_those_that_were_measured() -> None:
    measured = {
        row["codec"].partition("/")[0]: row for row in read_rows(RESULTS / "codec.jsonl")[1:]
    }
    assert measured.keys() == set(get_args(CodecName))
    for name, row in measured.items():
        cost = CODEC_COSTS[name]
        assert cost.encode == pytest.approx(row["encode"]["median"], rel=0.01)
        assert cost.decode == pytest.approx(row["decode"]["median"], rel=0.01)


def arithmetic() -> list[dict[str, Any]]:
    """Of the newest code. Each row is one setting."""
    return [
        row
        for row in read_rows(RESULTS / "outer-arithmetic.jsonl")
        if row["label"] == "after" and row["codec"] == "int4/1"
    ]


def test_speeds_of_a_host_are_those_of_the_outer_arithmetic() -> None:
    """Codecs apart: their speeds are the table's, as in the formula."""
    int4 = CODEC_COSTS["int4"]
    found: dict[str, list[float]] = {"sums": [], "reduce": [], "apply": [], "digest": []}
    for row in arithmetic():
        seconds = {name: stage["seconds"]["median"] for name, stage in row["stages"].items()}
        fragment = 4 * row["values"] / 1e9
        of_codecs = fragment / int4.decode + fragment / row["nodes"] / int4.encode
        decoding = fragment / int4.decode
        forming = seconds["encode"] - fragment / int4.encode  # sums are formed as they are encoded
        found["sums"].append(fragment / (seconds["accumulate"] + forming + seconds["settle"]))
        found["reduce"].append(fragment / (seconds["reduce"] - of_codecs))
        found["apply"].append(fragment / (seconds["check"] + seconds["apply"] - decoding))
        found["digest"].append(fragment / seconds["digest"])
    for name, speeds in found.items():
        assert getattr(MEASURED_HOST, name) == pytest.approx(median(speeds), rel=0.05), name


def test_the_work_of_a_host_comes_to_what_a_round_took_it() -> None:
    for row in arithmetic():
        situation = Situation(
            num_parameters=row["values"] * row["fragments"],
            num_layers=1,
            num_nodes=row["nodes"],
            down_bits_per_second=1e9,
            up_bits_per_second=1e9,
            round_trip_seconds=0.0,
            seconds_per_inner_step=1.0,
            total_steps=1,
        )
        setting = Setting(
            uplink="int4", downlink="int4", fragments=row["fragments"], has_overlap=False, steps=1
        )
        alone = replace(MEASURED_HOST, member_seconds=0.0)
        predicted_seconds = host_seconds(situation, setting, alone)
        assert predicted_seconds == pytest.approx(
            row["stages"]["whole"]["seconds"]["median"], rel=0.2
        )


def test_copies_are_as_fast_as_the_slowest_island_made_them() -> None:
    speeds = [
        row[f"{way}_gb_per_second"]["median"]
        for row in read_rows(RESULTS / "island-speed.jsonl")
        if row["part"] == "copies"
        for way in ("adopt", "publish")
    ]
    assert pytest.approx(min(speeds), rel=0.01) == MEASURED_HOST.copy
