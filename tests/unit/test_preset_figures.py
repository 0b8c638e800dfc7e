"""What presets count on is what was measured: every figure against the results that it is from."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, get_args

import pytest

from coordinator.presets.cost import (
    CODEC_COSTS,
    MEASURED_HOST,
    ROUND_TRIPS,
    Setting,
    Situation,
    host_seconds,
    predicted,
)
from coordinator.presets.link_shares import MEASURED_SHARES, CongestionControl, share_of
from protocol.run_spec import CodecName

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"

KINDS = list(get_args(CongestionControl))


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def exchanges() -> Iterator[tuple[CongestionControl, dict[str, Any]]]:
    """With equal slices, which the formula is for. Rows that name nothing are of a host with bbr."""
    for row in [*rows("exchange.jsonl"), *rows("exchange-cubic.jsonl")]:
        if len(set(row["slices"])) == 1:
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
    """Two nodes at 100 Mbit/s: each sends, and receives, as much as the model takes."""
    found: dict[CongestionControl, dict[float, float]] = {}
    for congestion_control, row in exchanges():
        if (row["num_nodes"], row["mbit"]) != (2, 100.0):
            continue
        for_bytes = row["seconds"] - ROUND_TRIPS * row["round_trip_ms"] / 1e3
        share = row["megabytes"] * 8 / row["mbit"] / for_bytes
        found.setdefault(congestion_control, {})[row["megabytes"] * 1e6] = share
    assert found.keys() == MEASURED_SHARES.keys() == set(get_args(CongestionControl))
    for congestion_control, shares in found.items():
        assert MEASURED_SHARES[congestion_control] == pytest.approx(shares, abs=0.006)


def test_predicted_exchanges_are_those_that_were_measured() -> None:
    """Also over other links, and with more nodes, than those that shares are from."""
    ratios = []
    for congestion_control, row in exchanges():
        prediction = predicted(exchange_of(row, congestion_control), WHOLE_MODEL)
        ratios.append(prediction.exchange_seconds / row["seconds"])
    assert len(ratios) >= 7
    assert 0.85 < median(ratios) < 1.15
    assert min(ratios) > 0.75 and max(ratios) < 1.25


@pytest.mark.parametrize("congestion_control", KINDS)
def test_a_share_between_two_measured_sizes_lies_between_theirs(
    congestion_control: CongestionControl,
) -> None:
    for (fewer, share), (more, other) in pairwise(MEASURED_SHARES[congestion_control].items()):
        assert share_of(congestion_control, fewer) == share
        assert share_of(congestion_control, more) == pytest.approx(other)
        halfway = share_of(congestion_control, (fewer * more) ** 0.5)
        assert halfway == pytest.approx((share + other) / 2)


@pytest.mark.parametrize("congestion_control", KINDS)
def test_a_share_beyond_what_was_measured_is_that_of_the_nearest_size(
    congestion_control: CongestionControl,
) -> None:
    shares = MEASURED_SHARES[congestion_control]
    assert share_of(congestion_control, 1.0) == shares[min(shares)]
    assert share_of(congestion_control, 1e12) == shares[max(shares)]


@pytest.mark.parametrize("congestion_control", KINDS)
def test_more_bytes_never_take_less_time(congestion_control: CongestionControl) -> None:
    """Without it a slower link could lead to more of them."""
    sizes = [1e5 * 1.1**exponent for exponent in range(100)]
    times = [size / share_of(congestion_control, size) for size in sizes]
    assert times == sorted(times)


def test_cubic_is_never_counted_on_for_more_than_bbr() -> None:
    """It stands for whatever nobody names."""
    for exponent in range(100):
        size = 1e5 * 1.1**exponent
        assert share_of("cubic", size) < share_of("bbr", size)


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
