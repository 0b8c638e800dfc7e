"""Which exchange is chosen, and why."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from benchmarks.presets import situation_of, table
from coordinator.presets import reasons
from coordinator.presets.choosing import GIVEN, Plan, chosen
from coordinator.presets.cost import (
    CODEC_COSTS,
    GOAL,
    MEASURED_HOST,
    CongestionControl,
    Setting,
    bytes_per_round,
    host_seconds,
    predicted,
)
from coordinator.presets.loss import SPARSE
from coordinator.presets.view import prediction_lines
from node.exchange.codecs.registry import CODECS
from protocol.run.run_spec import CodecName, RunSpec
from tests.unit.preset_scene import all_settings, codecs_and_interval, ever_slower_mbit, value, why

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_table_of_the_docs_is_what_is_chosen() -> None:
    assert table("cubic") in (DOCS / "performance.md").read_text()


def test_the_example_in_the_docs_is_what_is_chosen() -> None:
    """Where a new share turns it, take other rates."""
    owners = " ".join((DOCS / "coordinators.md").read_text().split())
    slow, fast = (chosen(situation_of("125m", mbit)).prediction.link_share for mbit in (10, 100))
    said = f"{slow:.2f} are left to the exchange of 125m at 10 Mbit/s and 100 ms, {fast:.2f} at 100"
    assert said in owners


def test_work_on_a_machine_half_as_fast_takes_twice_as_long_and_bytes_no_longer() -> None:
    situation = replace(situation_of("1b", 1000), flops_per_second=0.0)
    setting = Setting(uplink="ec2", downlink="int4", fragments=2, has_overlap=False, steps=30)
    usual, slow = (
        predicted(replace(situation, arithmetic=times), setting) for times in (None, 0.5)
    )
    own = host_seconds(situation, setting, replace(MEASURED_HOST, member_seconds=0.0))
    assert slow.exchange_seconds - usual.exchange_seconds == pytest.approx(own)
    assert slow.bytes_per_round == usual.bytes_per_round
    assert slow.utilisation < usual.utilisation


def test_spot_checks_take_a_third_of_their_share_of_most_leases_and_it_is_said() -> None:
    setting = Setting(
        uplink="int4", downlink="int4", fragments=1, has_overlap=False, steps=30, audit=0.06
    )
    usual = replace(situation_of("125m", 1000), batch=8)  # 240 samples of a lease
    for situation, expected in (
        (usual, 0.02),
        (replace(usual, batch=32), 0.06 * 4 * 128 / (3 * 960)),
        (replace(usual, batch=1), 0.06 * 4 * 30 / (3 * 30)),
        (replace(usual, num_nodes=2), 0.0),
    ):
        assert predicted(situation, setting).checking_share == pytest.approx(expected)
    assert predicted(usual, replace(setting, steps=1)).checking_share == 0, "8 samples show nothing"
    without = predicted(usual, replace(setting, audit=0.0))
    assert predicted(usual, setting).utilisation == without.utilisation
    told = "\n".join(prediction_lines(chosen(replace(usual, num_nodes=8))))
    assert "spot checks take" in told and "% of the time for inner steps" in told


def test_a_fast_link_exchanges_often_whole_and_in_two_bits_or_more() -> None:
    plan = chosen(situation_of("0.2m", 1000))
    assert 10 < plan.setting.interval <= 32
    assert plan.setting.uplink not in SPARSE
    assert plan.meets_goal and plan.above.whole < 0.01


def test_sparse_codecs_whose_results_hold_all_bring_what_was_measured_best_with_them() -> None:
    plan = chosen(situation_of("7b", 10))
    assert plan.situation.num_nodes == 4
    assert codecs_and_interval(plan)[:2] == ("topk64", "topk256")
    assert value(plan, "outer.optimizer") == "nesterov"
    assert value(plan, "outer.learning_rate") == 1.0
    assert value(plan, "outer.momentum") == 0.3
    longer = chosen(replace(plan.situation, total_steps=4 * plan.situation.total_steps))
    assert codecs_and_interval(longer) == codecs_and_interval(plan)
    assert value(longer, "outer.momentum") == 0.5
    assert value(plan, "exchange.residual_decay") == 0.95
    assert value(plan, "exchange.reducer_error") == "keep"
    assert "256 of 4096 values have room for 64 of each of 4 nodes" in why(plan, "downlink")


def test_a_fifth_node_makes_sparse_results_lossy_and_the_optimizer_plain() -> None:
    sparse = {("exchange", "uplink"): "topk64", ("exchange", "downlink"): "topk256"}
    plan = chosen(replace(situation_of("7b", 15), num_nodes=5), sparse)
    assert value(plan, "outer.optimizer") == "sgd"
    assert value(plan, "outer.learning_rate") == 1.0
    assert value(plan, "outer.momentum") == 0.0
    assert value(plan, "exchange.residual_decay") == 0.95
    assert value(plan, "exchange.reducer_error") == "drop"
    said = reasons.of_downlink(plan.setting, plan.situation)
    assert "256 of 4096 values, of up to 320 that 5 nodes send" in said
    assert "3.7 % in 200" in said


def test_the_sparsest_results_are_for_where_nothing_else_is_enough_and_never_hold_all() -> None:
    situation = replace(situation_of("7b", 10), num_nodes=2, seconds_per_inner_step=0.2)
    plan = chosen(situation)
    assert codecs_and_interval(plan)[:2] == ("topk64", "topk64")
    pair = {("exchange", "downlink"): "topk256", ("exchange", "uplink"): "topk64"}
    assert not chosen(situation, pair).meets_goal
    assert value(plan, "outer.optimizer") == "sgd"
    assert value(plan, "exchange.reducer_error") == "keep"
    assert "64 of 4096 values, of up to 128 that 2 nodes send" in why(plan, "downlink")


def test_a_run_too_short_for_sparse_codecs_is_not_given_them() -> None:
    plan = chosen(replace(situation_of("7b", 10), total_steps=1_900))
    assert plan.setting.uplink not in SPARSE and plan.exchanges >= 16
    assert not plan.meets_goal
    assert "or sparse codecs" in plan.verdict and "100 times" in plan.verdict


def test_cubic_exchanges_more_seldom_than_bbr_and_the_reason_says_why() -> None:
    """Inner steps are short, so round trips count."""

    def plan_over(kind: CongestionControl) -> Plan:
        return chosen(replace(situation_of("42m", 60, kind), seconds_per_inner_step=0.1))

    cubic, bbr = plan_over("cubic"), plan_over("bbr")
    assert cubic.setting.interval > bbr.setting.interval
    for plan, kind in ((cubic, "cubic"), (bbr, "bbr")):
        said = f"counts on {plan.prediction.link_share:.2f} of the link"
        assert said in why(plan, "uplink") and said in "".join(prediction_lines(plan))
        assert f"round trips of it, with {kind}" in why(plan, "uplink")
    assert cubic.prediction.link_share < bbr.prediction.link_share


def test_cubic_never_exchanges_more_often_than_bbr() -> None:
    for mbit in ever_slower_mbit(1000, 1):
        cubic, bbr = (
            chosen(situation_of("42m", mbit, kind)).setting.interval
            for kind in get_args(CongestionControl)
        )
        assert cubic >= bbr


def test_an_exchange_of_many_round_trips_gets_over_cubic_what_it_gets_over_bbr() -> None:
    cubic, bbr = chosen(situation_of("1b", 10)), chosen(situation_of("1b", 10, "bbr"))
    assert cubic.setting == bbr.setting
    num_bytes = cubic.prediction.bytes_per_round
    assert cubic.situation.link.round_trips_of(num_bytes) > 100
    assert cubic.prediction.link_share == pytest.approx(bbr.prediction.link_share, rel=0.01)


def test_slow_start_is_told_of_where_it_costs_anything() -> None:
    plan = chosen(replace(situation_of("0.2m", 1000), round_trip_seconds=0.05))
    lost = plan.situation.link.round_trips_lost(plan.prediction.bytes_per_round)
    assert why(plan, "uplink").endswith(
        f"round trips of it, with cubic, plus {lost:.1f} of slow start"
    )
    bbr = chosen(situation_of("0.2m", 1000, "bbr"))
    assert why(bbr, "uplink").endswith("round trips of it, with bbr")
    here = replace(situation_of("0.2m", 1000), round_trip_seconds=0.0)
    assert why(chosen(here), "uplink").endswith("MB over no distance, with cubic")


def test_rates_that_exchanges_have_achieved_count_whole_and_that_is_said() -> None:
    told, unaudited = situation_of("125m", 10), {("outer", "audit"): 0.0}
    there = chosen(told, unaudited).prediction
    rate = there.link_share * told.up_bits_per_second
    achieved = replace(
        told, down_bits_per_second=rate, up_bits_per_second=rate, congestion_control=None
    )
    setting = chosen(told, unaudited).setting
    here = predicted(achieved, setting)
    assert here.link_share == 1
    assert here.exchange_seconds == pytest.approx(there.exchange_seconds)
    enough = there.enough_bits_per_second
    assert enough is not None
    at_enough = replace(told, down_bits_per_second=enough, up_bits_per_second=enough)
    largest = bytes_per_round(told, setting, max(told.sizes_of(setting.fragments)))
    share = at_enough.link.share_of(largest)
    assert here.enough_bits_per_second == pytest.approx(share * enough)
    words = "counts on all of the link: its rate is what exchanges achieved"
    assert why(chosen(achieved), "uplink").endswith(f"; {words}")
    assert words in "".join(prediction_lines(chosen(achieved)))


def test_a_fragment_that_is_larger_than_the_others_makes_its_own_rounds_longer() -> None:
    even = replace(situation_of("125m", 10), fragment_sizes=())
    setting = Setting(uplink="ec2", downlink="ec2", fragments=4, has_overlap=True, steps=15)
    whole = even.num_parameters
    sizes = (
        (whole,),
        (whole // 2, whole // 2),
        (),
        (whole // 8, 5 * whole // 8, whole // 8, whole // 8),
    )
    uneven = replace(even, fragment_sizes=sizes)
    alike, there = predicted(even, setting), predicted(uneven, setting)
    assert there.bytes_per_round == pytest.approx(alike.bytes_per_round, rel=1e-6)
    assert there.longest_exchange_seconds > 2 * there.exchange_seconds
    waits = there.longest_exchange_seconds - there.training_seconds
    assert there.round_seconds - alike.round_seconds == pytest.approx(waits / 4, rel=0.05)
    enough = there.enough_bits_per_second, alike.enough_bits_per_second
    assert enough[0] is not None and enough[1] is not None
    assert enough[0] > even.up_bits_per_second > enough[1]


def test_a_plan_leaves_time_for_the_largest_fragment_and_says_how_long_it_takes() -> None:
    slow = replace(situation_of("125m", 0.5), seconds_per_inner_step=30.0)
    parts = (slow.num_parameters // 10, 9 * slow.num_parameters // 10)
    plan = chosen(
        replace(slow, fragment_sizes=((slow.num_parameters,), parts)),
        {("exchange", "fragments"): 2},
    )
    longest = plan.prediction.longest_exchange_seconds
    assert longest > 1.5 * plan.prediction.exchange_seconds
    train, commit = (value(plan, f"deadlines.{key}") for key in ("train", "commit"))
    assert isinstance(train, int) and isinstance(commit, int)
    assert commit - train == pytest.approx(4 * longest, rel=0.01)
    said = f"that of the largest fragment, of 114.9M parameters, {longest:.3g} s, beside"
    assert said in "\n".join(prediction_lines(plan))


def test_sgd_that_is_given_gets_a_rate_of_its_own_and_no_momentum() -> None:
    plan = chosen(situation_of("125m", 100), {("outer", "optimizer"): "sgd"})
    assert value(plan, "outer.momentum") == 0.0
    assert value(plan, "outer.learning_rate") == 1.0
    assert "0.9" not in why(plan, "momentum")


def test_momentum_that_is_given_brings_an_optimizer_that_has_it() -> None:
    given = {("exchange", "uplink"): "topk64", ("exchange", "downlink"): "int4"}
    situation = situation_of("0.2m", 1000)
    plan = chosen(situation, {**given, ("outer", "momentum"): 0.5})
    assert value(plan, "outer.optimizer") == "nesterov"
    assert why(plan, "optimizer") == "momentum is given, and sgd has none"
    none_asked = chosen(situation, {**given, ("outer", "momentum"): 0.0})
    assert value(none_asked, "outer.optimizer") == "sgd"


@pytest.mark.parametrize(
    ("total_steps", "momentum", "rate"),
    [(600, 0.3, 0.7), (3_000, 0.6, 0.7), (100_000, 0.9, 0.6)],
)
def test_the_longer_a_run_the_more_outer_momentum_it_gets(
    total_steps: int, momentum: float, rate: float
) -> None:
    situation = replace(situation_of("125m", 100), total_steps=total_steps)
    plan = chosen(situation, {("inner", "steps"): 30, ("exchange", "fragments"): 1})
    assert (value(plan, "outer.momentum"), value(plan, "outer.learning_rate")) == (momentum, rate)


def test_what_is_given_stays_and_is_called_so() -> None:
    given = {
        ("exchange", "uplink"): "int8",
        ("exchange", "overlap"): "none",
        ("inner", "steps"): 500,
        ("outer", "momentum"): 0.5,
    }
    plan = chosen(situation_of("125m", 100), given)
    for (section, key), told in given.items():
        assert value(plan, f"{section}.{key}") == told
    assert {(c.table, c.key) for c in plan.choices if c.reason == GIVEN} == given.keys()
    assert plan.setting == Setting(
        uplink="int8",
        downlink=plan.setting.downlink,
        fragments=plan.setting.fragments,
        has_overlap=False,
        steps=500,
        audit=plan.setting.audit,
    )


def test_sparse_codecs_that_are_given_get_what_fits_them() -> None:
    given = {("exchange", "uplink"): "topk64", ("exchange", "downlink"): "int4"}
    plan = chosen(situation_of("0.2m", 1000), given)
    assert value(plan, "outer.optimizer") == "sgd"
    assert value(plan, "exchange.residual_decay") == 0.95


def test_out_of_reach_is_said_in_one_sentence_with_the_numbers() -> None:
    plan = chosen(replace(situation_of("125m", 0.3), total_steps=10_000))
    assert not plan.meets_goal
    share = f"{100 * plan.prediction.utilisation:.1f} %"
    assert share in plan.verdict and "95 %" in plan.verdict and "Mbit/s" in plan.verdict
    assert "\n" not in plan.verdict


def test_the_best_of_what_is_not_enough_is_not_the_one_with_the_fewest_bytes() -> None:
    """On a fast link coarse codecs cost a slow core more than they save."""
    given = {("inner", "steps"): 30, ("exchange", "fragments"): 1}
    plan = chosen(replace(situation_of("7b", 100_000), seconds_per_inner_step=1e-3), given)
    found = all_settings(plan.situation, given)
    assert not plan.meets_goal
    sent = {each: bytes_per_round(plan.situation, each) for each in found}
    assert sent[plan.setting] > min(sent.values())


def test_overlap_that_is_refused_is_reckoned_without() -> None:
    situation = situation_of("125m", 100)
    plan = chosen(situation, {("exchange", "overlap"): "none"})
    assert chosen(situation).setting.has_overlap and not plan.setting.has_overlap
    prediction = plan.prediction
    assert prediction.round_seconds >= prediction.training_seconds + prediction.exchange_seconds


def test_where_no_link_helps_that_is_said() -> None:
    plan = chosen(replace(situation_of("7b", 1000), seconds_per_inner_step=1e-4))
    assert plan.prediction.enough_bits_per_second is None
    assert "no link is fast enough" in plan.verdict


@pytest.mark.parametrize("congestion_control", [*get_args(CongestionControl), None])
@pytest.mark.parametrize("round_trip_seconds", [0.0, 0.002, 0.1, 1.0])
@pytest.mark.parametrize("has_overlap", [False, True])
def test_a_link_that_is_called_enough_is_enough_and_a_slower_one_is_not(
    congestion_control: CongestionControl | None, round_trip_seconds: float, has_overlap: bool
) -> None:
    """Its share is that at its own rate, not at the link's that was asked about."""
    setting = Setting(
        uplink="int4", downlink="int4", fragments=1, has_overlap=has_overlap, steps=480
    )
    situation = replace(
        situation_of("42m", 100),
        congestion_control=congestion_control,
        round_trip_seconds=round_trip_seconds,
    )
    enough = predicted(situation, setting).enough_bits_per_second
    assert enough is not None

    def at(rate: float) -> float:
        link = replace(situation, down_bits_per_second=rate, up_bits_per_second=rate)
        return predicted(link, setting).utilisation

    assert at(enough) == pytest.approx(GOAL)
    assert at(0.98 * enough) < GOAL


def test_the_slower_direction_of_a_link_counts() -> None:
    both = situation_of("125m", 10)
    one = replace(both, down_bits_per_second=1e9)
    assert chosen(one).prediction == chosen(both).prediction


def test_the_saving_is_that_of_a_ring_all_reduce_at_every_inner_step() -> None:
    int4 = {("exchange", "uplink"): "int4", ("exchange", "downlink"): "int4"}
    plan = chosen(situation_of("125m", 100), {("outer", "audit"): 0.0, **int4})
    # 2 (N - 1) / N · 4 bytes for each step, over (N - 1) / N · 8.25 / 8 bytes of int4 both ways
    saved = 2 * 4 * plan.setting.interval / (8.25 / 8)
    assert plan.prediction.times_fewer_bytes == pytest.approx(saved, rel=1e-3)


@pytest.mark.parametrize("uplink", ["int4", "ec2", "topk64"])
def test_audits_add_a_tenth_at_most_to_what_a_node_sends_and_that_is_said(uplink: str) -> None:
    plan = chosen(situation_of("125m", 100), {("exchange", "uplink"): uplink})
    prediction = plan.prediction
    assert (
        0 < prediction.audit_bytes <= 0.1 * prediction.bytes_per_round or plan.setting.audit == 0.01
    )
    (line,) = [line for line in prediction_lines(plan) if "sends and receives" in line]
    assert "are for audits" in line
    fewer = [c for c in plan.choices if (c.table, c.key) == ("outer", "audit")]
    assert [c.value for c in fewer] == [plan.setting.audit] * (plan.setting.audit < 0.05)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_bits_of_a_codec_are_those_of_its_bodies(codec) -> None:  # type: ignore[no-untyped-def]
    """Of values as pseudo-gradients are: most near zero, some large."""
    values = np.random.default_rng(0).laplace(size=1 << 18).astype(np.float32)
    bits = 8 * len(codec.encode(values)) / len(values)
    assert bits == pytest.approx(CODEC_COSTS[codec.name.partition("/")[0]].bits, rel=0.15)


def test_every_codec_of_the_run_file_has_its_cost() -> None:
    assert set(CODEC_COSTS) == set(get_args(CodecName))


def test_deadlines_leave_room_for_what_is_predicted() -> None:
    plan = chosen(replace(situation_of("7b", 0.3), seconds_per_inner_step=60.0))
    train = value(plan, "deadlines.train")
    contribute, commit = value(plan, "deadlines.contribute"), value(plan, "deadlines.commit")
    assert isinstance(train, int) and isinstance(contribute, int) and isinstance(commit, int)
    assert train >= plan.prediction.training_seconds
    assert commit - train >= plan.prediction.exchange_seconds
    assert train < contribute < commit
    quick = chosen(situation_of("0.2m", 1000))
    usual = RunSpec().deadlines
    assert value(quick, "deadlines.train") == usual.train
    assert value(quick, "deadlines.commit") == usual.commit


def test_deadlines_that_are_given_in_part_are_left_alone() -> None:
    plan = chosen(situation_of("0.2m", 1000), {("deadlines", "train"): 300})
    assert not any(choice.table == "deadlines" for choice in plan.choices)


def test_deadlines_never_exceed_what_a_run_file_takes_and_say_so() -> None:
    week = 7 * 86400
    for seconds, mbit in ((1e6, 1000), (1.0, 1e-4)):
        plan = chosen(replace(situation_of("7b", mbit), seconds_per_inner_step=seconds))
        deadlines = [c for c in plan.choices if c.table == "deadlines"]
        train, contribute, commit = (choice.value for choice in deadlines)
        assert isinstance(train, int) and isinstance(contribute, int) and isinstance(commit, int)
        assert 0 < train < contribute < commit <= week
        assert "shorter than what is predicted" in deadlines[0].reason
