"""What presets count on is what was measured: every figure against the results that it is from."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any, get_args

import pytest

from benchmarks.convergence_long import FRAGMENTS_STEPS
from benchmarks.presets import situation_of
from coordinator.presets.cost import (
    CODEC_COSTS,
    MEASURED_HOST,
    ROUND_TRIPS,
    Setting,
    Situation,
    host_seconds,
    predicted,
)
from coordinator.presets.link_shares import (
    MEASURED_SHARES,
    NO_DISTANCE,
    CongestionControl,
    enough_bits_per_second,
    round_trips_of,
    share_of,
)
from coordinator.presets.reasons import of_downlink, of_steps
from protocol.run_spec import CodecName

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"

KINDS = list(get_args(CongestionControl))


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def exchanges() -> Iterator[tuple[CongestionControl, dict[str, Any]]]:
    """With equal slices, which the formula is for, and as hosts come: windows end with a pause.

    Rows that name nothing are of a host with bbr.
    """
    for row in [*rows("exchange.jsonl"), *rows("exchange-cubic.jsonl")]:
        if len(set(row["slices"])) == 1 and not row.get("keeps_window"):
            yield row.get("congestion_control", "bbr"), row


def exchange_of(row: dict[str, Any], congestion_control: CongestionControl) -> Situation:
    link = row["mbit"] * row["slow"] * 1e6
    return Situation(
        num_parameters=round(row["megabytes"] * 8e6 / CODEC_COSTS["int4"].bits),
        num_layers=1,
        num_nodes=row["num_nodes"],
        down_bits_per_second=link,
        up_bits_per_second=link,
        round_trip_seconds=row["round_trip_ms"] / 1e3,
        seconds_per_inner_step=1.0,
        total_steps=1,
        congestion_control=congestion_control,
    )


WHOLE_MODEL = Setting(uplink="int4", downlink="int4", fragments=1, has_overlap=False, steps=1)


def test_shares_of_links_are_those_that_exchanges_got() -> None:
    """Two nodes: each sends, and receives, as much as the model takes."""
    found: dict[CongestionControl, dict[float, float]] = {}
    for congestion_control, row in exchanges():
        if row["num_nodes"] != 2:
            continue
        round_trip = row["round_trip_ms"] / 1e3
        whole = row["megabytes"] * 8 / row["mbit"]
        share = whole / (row["seconds"] - ROUND_TRIPS * round_trip)
        found.setdefault(congestion_control, {})[round(whole / round_trip, 3)] = share
    assert found.keys() == MEASURED_SHARES.keys() == set(get_args(CongestionControl))
    for congestion_control, shares in found.items():
        assert MEASURED_SHARES[congestion_control] == pytest.approx(shares, abs=0.006)
        assert list(MEASURED_SHARES[congestion_control]) == sorted(shares)


def test_predicted_exchanges_are_those_that_were_measured() -> None:
    """Also over other links, and with more nodes, than those that shares are from."""
    ratios = []
    for congestion_control, row in exchanges():
        prediction = predicted(exchange_of(row, congestion_control), WHOLE_MODEL)
        ratios.append(prediction.exchange_seconds / row["seconds"])
    assert len(ratios) >= 9
    assert 0.85 < median(ratios) < 1.15
    assert min(ratios) > 0.75 and max(ratios) < 1.25


def counted(congestion_control: CongestionControl, round_trips: float) -> float:
    """What was measured, but for cubic never more than for bbr."""
    return min(share_of("bbr", round_trips), MEASURED_SHARES[congestion_control][round_trips])


@pytest.mark.parametrize("congestion_control", KINDS)
def test_a_share_between_two_measured_points_lies_between_theirs(
    congestion_control: CongestionControl,
) -> None:
    for (fewer, share), (more, other) in pairwise(MEASURED_SHARES[congestion_control].items()):
        assert share_of(congestion_control, fewer) == counted(congestion_control, fewer)
        assert share_of(congestion_control, more) == pytest.approx(
            counted(congestion_control, more)
        )
        halfway = (fewer * more) ** 0.5
        on_the_line = min((share + other) / 2, share_of("bbr", halfway))
        assert share_of(congestion_control, halfway) == pytest.approx(on_the_line)


@pytest.mark.parametrize("congestion_control", KINDS)
def test_a_share_beyond_what_was_measured_is_that_of_the_nearest_point(
    congestion_control: CongestionControl,
) -> None:
    points = MEASURED_SHARES[congestion_control]
    assert share_of(congestion_control, 0.01) == counted(congestion_control, min(points))
    furthest = counted(congestion_control, max(points))
    assert share_of(congestion_control, 1e9) == furthest
    assert share_of(congestion_control, NO_DISTANCE) == furthest


def test_what_counts_is_how_many_round_trips_bytes_take() -> None:
    """As many over a link that is ten times as slow, or a tenth as long, as ten times the bytes."""

    def trips(num_bytes: float, mbit: float, round_trip_seconds: float) -> float:
        return round_trips_of(
            num_bytes, bits_per_second=mbit * 1e6, round_trip_seconds=round_trip_seconds
        )

    assert trips(4e6, 100, 0.05) == pytest.approx(6.4)
    assert trips(4e6, 10, 0.05) == pytest.approx(64)
    assert trips(4e6, 100, 0.005) == pytest.approx(64)
    assert trips(40e6, 100, 0.05) == pytest.approx(64)
    assert trips(4e6, 100, 0) == NO_DISTANCE


@pytest.mark.parametrize("congestion_control", KINDS)
def test_more_bytes_never_take_less_time_and_a_slower_link_never_less(
    congestion_control: CongestionControl,
) -> None:
    """Without it a slower link could lead to more of them. In round trips both are the same."""
    amounts = [0.1 * 1.02**exponent for exponent in range(600)]
    times = [amount / share_of(congestion_control, amount) for amount in amounts]
    assert times == sorted(times)


def test_cubic_is_never_counted_on_for_more_than_bbr() -> None:
    """It stands for whatever nobody names."""
    for exponent in range(600):
        round_trips = 0.1 * 1.02**exponent
        assert share_of("cubic", round_trips) <= share_of("bbr", round_trips)


@pytest.mark.parametrize("congestion_control", [*KINDS, None])
@pytest.mark.parametrize("round_trip_seconds", [0.0, 0.001, 0.05, 0.4])
def test_a_rate_that_is_enough_takes_just_as_long_as_there_is(
    congestion_control: CongestionControl | None, round_trip_seconds: float
) -> None:
    """With the share that it gets itself: below, between and beyond what was measured."""
    for exponent in range(-6, 9):
        seconds = 2.0**exponent
        enough = enough_bits_per_second(
            congestion_control, 4e6, seconds=seconds, round_trip_seconds=round_trip_seconds
        )
        trips = round_trips_of(4e6, bits_per_second=enough, round_trip_seconds=round_trip_seconds)
        took = 4e6 * 8 / enough / share_of(congestion_control, trips)
        assert took == pytest.approx(seconds, rel=1e-9)


def test_speeds_of_codecs_are_those_that_were_measured() -> None:
    measured = {row["codec"].partition("/")[0]: row for row in rows("codec.jsonl")[1:]}
    assert measured.keys() == set(get_args(CodecName))
    for name, row in measured.items():
        cost = CODEC_COSTS[name]
        assert cost.encode == pytest.approx(row["encode"]["median"], rel=0.01)
        assert cost.decode == pytest.approx(row["decode"]["median"], rel=0.01)


def arithmetic() -> list[dict[str, Any]]:
    """Of the newest code. Each row is one setting."""
    return [row for row in rows("outer-arithmetic.jsonl") if row["label"] == "after"]


def test_speeds_of_a_host_are_those_of_the_outer_arithmetic() -> None:
    """Codecs apart: their speeds are the table's, as in the formula."""
    int4 = CODEC_COSTS["int4"]
    found: dict[str, list[float]] = {"sums": [], "reduce": [], "apply": [], "digest": []}
    for row in arithmetic():
        seconds = {name: stage["seconds"]["median"] for name, stage in row["stages"].items()}
        fragment = 4 * row["values"] / 1e9
        of_codecs = fragment / int4.decode + fragment / row["nodes"] / int4.encode
        decoding = fragment / int4.decode
        found["sums"].append(fragment / (seconds["accumulate"] + seconds["settle"]))
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
        predicted_seconds = host_seconds(situation, setting, MEASURED_HOST)
        assert predicted_seconds == pytest.approx(
            row["stages"]["whole"]["seconds"]["median"], rel=0.2
        )


def test_copies_are_as_fast_as_the_slowest_island_made_them() -> None:
    speeds = [
        row[f"{way}_gb_per_second"]["median"]
        for row in rows("island-speed.jsonl")
        if row["part"] == "copies"
        for way in ("adopt", "publish")
    ]
    assert pytest.approx(min(speeds), rel=0.01) == MEASURED_HOST.copy


def above(part: str, setting: str, other: str = "data parallel") -> float:
    """Per cent of the other's loss, the mean of the seeds that both have."""
    losses = {
        (row["setting"], row["seed"]): row["loss"]
        for row in rows("convergence.jsonl")
        if row["part"] == part
    }
    return mean(
        100 * (loss / losses[other, seed] - 1)
        for (name, seed), loss in losses.items()
        if name == setting
    )


def test_what_reasons_say_of_sparse_codecs_was_measured() -> None:
    pair, both = "topk64 up, topk256 down, H = {}", "topk256, H = 32"
    situation = situation_of("7b", 10)
    setting = Setting(uplink="topk64", downlink="topk256", fragments=1, has_overlap=True, steps=120)
    of_both = [above("frontier", both), above("long", both)]
    assert (
        f"{above('frontier', pair.format(20)):.1f} % in {1600 // 20} exchanges, "
        f"{above('long', pair.format(25)):.1f} % in {6400 // 25}, and topk256 both ways "
        f"{of_both[0]:.1f} % and {of_both[1]:.1f} %"
    ) in of_downlink(setting, situation)
    assert (
        f"cost {of_both[0]:.1f} % in {1600 // 32} exchanges, {of_both[1]:.1f} % in {6400 // 32}"
    ) in of_downlink(setting, replace(situation, num_nodes=5))


def test_what_reasons_say_of_long_intervals_was_measured() -> None:
    seldom = Setting(uplink="ec2", downlink="ec2", fragments=1, has_overlap=True, steps=60)
    assert (
        f"every 160 steps, in {6400 // 160} exchanges, ended {above('long', 'ec2, H = 160'):.1f} %"
    ) in of_steps(seldom, 2400, 6400 // 160, shortest=30)
    few = above("fragments", "int4, F = 1, H = 60", "int4, F = 1, H = 15")
    assert (
        f"int4 every 60 steps, in {FRAGMENTS_STEPS // 60} exchanges, ended {few:.1f} % above every 15"
    ) in of_steps(seldom, 1000, 16, shortest=30)
