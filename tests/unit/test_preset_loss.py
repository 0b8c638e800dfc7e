"""What is chosen by loss: how often, in which codecs, how late; and how what is given narrows it."""

import itertools
from dataclasses import replace

import pytest

from benchmarks.presets import situation_of
from benchmarks.races import RACES
from coordinator.presets.choosing import OFTEN_STEPS, chosen, often_steps
from coordinator.presets.cost import Setting, Situation, predicted
from coordinator.presets.loss import Given, above
from coordinator.presets.reasons import of_steps
from tests.unit.preset_scene import all_settings, codecs_and_interval, ever_slower_mbit, value, why

EVERY_TWENTY: Given = {("exchange", "fragments"): 2, ("inner", "steps"): 10}
SHORT = replace(situation_of("125m", 100), total_steps=1600)


def whole(fragments: int, steps: int, uplink: str = "int4", downlink: str = "int4") -> Setting:
    return Setting(
        uplink=uplink, downlink=downlink, fragments=fragments, has_overlap=True, steps=steps
    )


@pytest.mark.parametrize("mbit", [20, 100, 1000])
@pytest.mark.parametrize("total_steps", [500, 2000, 10_000])
def test_given_weights_send_no_more_for_an_inner_step_and_take_momentum(
    mbit: float, total_steps: int
) -> None:
    new = replace(situation_of("125m", mbit), total_steps=total_steps, inner_optimizer="adamw")
    plans = [chosen(replace(new, has_weights=has_weights)) for has_weights in (False, True)]
    of_new, of_given = (plan.prediction.bytes_per_round / plan.setting.steps for plan in plans)
    assert of_given <= 1.01 * of_new
    assert value(plans[1], "outer.learning_rate") == 0.7
    assert value(plans[1], "outer.momentum") == 0.6
    of_muon = replace(new, inner_optimizer="muon", has_weights=True)
    often = chosen(of_muon, {("exchange", "fragments"): 1, ("inner", "steps"): 4})
    assert value(often, "outer.optimizer") == "sgd", "as new ones: nothing else was measured"


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "one.of.ones.own"])
def test_what_is_exchanged_seldom_or_late_or_coarsely_costs_more(optimizer: str) -> None:
    def cost(setting: Setting, late_steps: int = 0) -> float:
        return above(
            setting,
            num_nodes=2,
            total_steps=1200,
            late_steps=late_steps,
            inner_optimizer=optimizer,
        ).whole

    assert cost(whole(1, 5)) < cost(whole(1, 20)) < cost(whole(1, 60))
    assert cost(whole(2, 10)) == cost(whole(1, 20))
    assert cost(whole(1, 20)) < cost(whole(1, 20), 5) < cost(whole(1, 20), 20)
    assert cost(whole(1, 4), 3) < cost(whole(1, 8), 3), "of results as late, the oftener ones"
    finer_first = [("fp32", "fp32"), ("int4", "int4"), ("ec2", "ec2"), ("topk64", "topk64")]
    costs = [cost(whole(1, 5, up, down)) for up, down in finer_first]
    assert costs == sorted(costs) and len(set(costs)) == 4


def test_a_slow_link_sends_less_for_an_inner_step_and_a_very_slow_one_next_to_nothing() -> None:
    plans = [chosen(situation_of("125m", mbit, "bbr")) for mbit in ever_slower_mbit(10_000, 0.5)]
    sent = [plan.prediction.bytes_per_round / plan.setting.steps for plan in plans]
    assert all(later <= 1.01 * earlier for earlier, later in itertools.pairwise(sent))
    codecs = list(dict.fromkeys(plan.setting.uplink for plan in plans))
    assert codecs == ["ec2", "topk64"]


def test_a_short_run_over_a_fast_link_exchanges_often_and_takes_the_plain_mean() -> None:
    plan = chosen(replace(SHORT, seconds_per_inner_step=60.0))
    assert 1 < plan.setting.interval <= OFTEN_STEPS
    assert value(plan, "outer.optimizer") == "sgd"
    assert (value(plan, "outer.learning_rate"), value(plan, "outer.momentum")) == (1.0, 0.0)
    assert "ended higher" in why(plan, "optimizer")
    said = f"{plan.exchanges} exchanges of each parameter cost about"
    assert said in why(plan, "steps") and "gains less than 0.2 %" in why(plan, "steps")


@pytest.mark.parametrize(("ratio", "num_nodes", "steps"), [(5, 2, 4), (5, 4, 4), (50, 4, 12)])
def test_late_results_of_frequent_exchanges_are_blended_for_adamw_with_the_momentum_that_wants(
    ratio: int, num_nodes: int, steps: int
) -> None:
    whole: Given = {("exchange", "fragments"): 1, ("inner", "steps"): steps}
    plan, of_muon = (
        chosen(replace(RACES[ratio].situation(optimizer), num_nodes=num_nodes), whole)
        for optimizer in ("adamw", "muon")
    )
    assert plan.setting == of_muon.setting and plan.setting.interval <= OFTEN_STEPS
    assert plan.setting.has_overlap and 2 * plan.prediction.late_steps >= plan.setting.interval
    assert (plan.overlap, of_muon.overlap) == ("blend", "keep")
    taken, of_muons = (
        tuple(value(each, f"outer.{key}") for key in ("learning_rate", "momentum"))
        for each in (plan, of_muon)
    )
    own = (1.0, 0.0) if steps <= often_steps(num_nodes) else (0.7, 0.6)
    assert (taken, of_muons) == ((0.7, 0.6), own)
    assert "AdamW" in why(plan, "blend") and "AdamW" in why(plan, "momentum")
    asked = chosen(plan.situation, {**whole, ("exchange", "overlap"): "keep"})
    assert value(asked, "outer.momentum") == own[1], "what is given stays, and gets its own step"


@pytest.mark.parametrize("ratio", RACES)
def test_adamw_which_loses_more_by_seldom_exchanges_is_exchanged_oftener(ratio: int) -> None:
    muon, adamw, other = (
        chosen(RACES[ratio].situation(optimizer)) for optimizer in ("muon", "adamw", "my.own")
    )
    assert adamw.setting.interval < muon.setting.interval
    assert adamw.above.whole > muon.above.whole
    assert other.setting == adamw.setting, "nobody has measured it"


def test_the_longer_a_run_the_more_seldom_it_exchanges_where_links_carry_all() -> None:
    intervals = [
        chosen(replace(SHORT, total_steps=steps, seconds_per_inner_step=60.0)).setting.interval
        for steps in (16, 400, 1600, 6400, 25_600, 100_000, 1_000_000)
    ]
    assert intervals == sorted(intervals)
    assert intervals[0] == 1 and 10 < intervals[-1] < 100


def test_why_not_oftener_is_said_by_what_would_cost_most() -> None:
    slow = replace(SHORT, down_bits_per_second=5e6)
    assert "costs more than it gains, by time that nodes wait" in why(chosen(slow), "steps")
    at_leisure = replace(SHORT, total_steps=100_000, seconds_per_inner_step=60.0)
    assert "gains less than 0.2 %" in why(chosen(at_leisure), "steps")


def test_fragments_bring_results_sooner_and_never_lengthen_the_interval_or_save_bytes() -> None:
    plan = chosen(SHORT)
    assert plan.setting.fragments > 1
    at_once = replace(plan.setting, fragments=1, steps=plan.setting.interval)
    there = predicted(SHORT, at_once)
    assert there.late_steps > plan.prediction.late_steps
    sent = plan.prediction.bytes_per_round * plan.setting.fragments
    assert sent == pytest.approx(there.bytes_per_round, rel=1e-3)  # but for headers
    late = f"{plan.prediction.late_steps} inner step"
    assert late in why(plan, "fragments")
    assert f"the whole model in each round {there.late_steps}" in why(plan, "fragments")
    assert f"every {plan.setting.fragments} rounds" in why(plan, "steps")


def test_round_trips_that_are_long_beside_inner_steps_leave_fewer_fragments() -> None:
    near = replace(SHORT, seconds_per_inner_step=0.2, round_trip_seconds=0.0)
    far = replace(near, round_trip_seconds=0.5)
    assert chosen(far).setting.steps > chosen(near).setting.steps
    assert chosen(far).setting.fragments < chosen(near).setting.fragments


def test_results_are_as_late_as_the_exchange_takes_and_never_later_than_a_round() -> None:
    situation = situation_of("125m", 100)
    setting = Setting(uplink="int4", downlink="int4", fragments=1, has_overlap=True, steps=30)
    there = predicted(situation, setting)
    assert 5 < there.exchange_seconds < 30  # and an inner step takes one
    # The inner step in progress is ended first.
    assert there.exchange_seconds <= there.late_steps < there.exchange_seconds + 1
    assert predicted(situation, replace(setting, steps=5)).late_steps == 5
    assert predicted(situation, replace(setting, has_overlap=False)).late_steps == 0


def test_a_node_with_gpus_is_counted_on_for_more_arithmetic_and_exchanges_more_often() -> None:
    """Seven billion parameters on one core take longer to encode than to send."""
    on_one_core = replace(situation_of("7b", 1000), flops_per_second=0.0, total_steps=2000)
    beside_gpus = replace(on_one_core, flops_per_second=1e14)
    assert chosen(beside_gpus).setting.interval < chosen(on_one_core).setting.interval
    told = replace(beside_gpus, arithmetic=1.0)
    assert chosen(told).setting == chosen(on_one_core).setting


def test_sparse_codecs_and_far_intervals_are_for_a_hundred_exchanges_and_not_for_fewer() -> None:
    for codec, interval in (("topk64", 120), ("ec2", 240)):
        for total_steps, is_there in ((100 * interval, True), (100 * interval - 1, False)):
            found = all_settings(replace(situation_of("7b", 10), total_steps=total_steps))
            assert any(s.uplink == codec and s.interval == interval for s in found) == is_there
    for setting in all_settings(situation_of("7b", 10)):
        assert setting.interval >= 20 or not setting.uplink.startswith("topk")


@pytest.mark.parametrize("total_steps", [16, 100, 400, 1000, 4000, 100_000])
def test_no_parameter_is_exchanged_fewer_times_than_was_ever_measured(total_steps: int) -> None:
    situation = replace(situation_of("7b", 10), total_steps=total_steps)
    for given in ({}, {("exchange", "fragments"): 4}):
        for setting in all_settings(situation, given):
            assert total_steps >= 16 * setting.interval or setting.steps == 1


def test_a_run_of_hardly_any_steps_exchanges_after_each_and_says_so() -> None:
    plan = chosen(replace(SHORT, total_steps=5))
    assert (value(plan, "run.rounds"), value(plan, "inner.steps")) == (5, 1)
    assert plan.exchanges == 5 and not plan.is_too_short
    assert "every step: 5 exchanges of each parameter cost a tenth or more" in why(plan, "steps")


def test_what_is_given_may_make_a_run_too_short_for_one_exchange_of_everything() -> None:
    situation = replace(SHORT, total_steps=100)
    steps = {("inner", "steps"): 30}
    assert not chosen(situation, steps).is_too_short
    assert chosen(situation, {**steps, ("exchange", "fragments"): 4}).is_too_short
    assert chosen(situation, {("inner", "steps"): 101}).is_too_short


def test_rounds_that_are_given_fix_their_steps_so_that_the_run_stays_as_long() -> None:
    """With steps fixed only fragments lengthen the interval."""
    situation = replace(situation_of("125m", 10), total_steps=30_000)
    plan = chosen(situation, {("run", "rounds"): 1000})
    assert (value(plan, "run.rounds"), value(plan, "inner.steps")) == (1000, 30)
    assert plan.exchanges == 1000 // plan.setting.fragments
    assert chosen(situation, {("inner", "steps"): 30}).setting == plan.setting


def test_fragments_that_are_given_cut_the_interval_as_evenly_as_whole_steps_allow() -> None:
    for setting in all_settings(SHORT, {("exchange", "fragments"): 7}):
        assert setting.fragments == 7
    assert chosen(SHORT, {("exchange", "fragments"): 7}).setting.fragments == 7


def test_without_error_feedback_nothing_below_four_bits_is_chosen() -> None:
    given = {("exchange", "error_feedback"): False}
    for mbit in ever_slower_mbit(1000, 1):
        assert codecs_and_interval(chosen(situation_of("7b", mbit), given))[:2] == ("int4", "int4")


def test_how_waiting_would_do_is_told_of_the_interval_that_is_chosen() -> None:
    plan = chosen(SHORT)
    waiting = replace(plan.setting, has_overlap=False, fragments=1, steps=plan.setting.interval)
    share = predicted(SHORT, waiting).utilisation
    assert f"waiting would leave {100 * share:.0f} %" in why(plan, "overlap")


@pytest.mark.parametrize(
    ("total_steps", "given", "is_told"),
    [
        (1600, {}, True),
        (16, {}, True),
        (1600, {("inner", "steps"): 6}, False),
        (1600, {("run", "rounds"): 100}, False),
    ],
)
def test_short_intervals_are_no_reason_to_evaluate_more_often(
    total_steps: int, given: Given, is_told: bool
) -> None:
    situation: Situation = replace(SHORT, total_steps=total_steps, seconds_per_inner_step=60.0)
    plan = chosen(situation, given)
    found = [choice.value for choice in plan.choices if choice.key == "every_rounds"]
    assert bool(found) == is_told
    for rounds in found:
        assert isinstance(rounds, int)
        assert total_steps // plan.setting.steps // rounds >= 4 or rounds == 5
        assert rounds * plan.setting.steps <= 150


def test_the_reason_of_an_interval_says_what_it_costs() -> None:
    said = of_steps(whole(1, 8), 150, seldom=0.0093, oftener="why not")
    assert said == (
        "every 8 steps: 150 exchanges of each parameter cost about 0.93 % of the loss; why not"
    )
    assert of_steps(whole(1, 1), 1, seldom=1.4, oftener="").endswith(
        "cost a tenth or more of the loss"
    )


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_more_than_two_nodes_take_the_plain_mean_of_oftener_exchanges_alone(optimizer: str) -> None:
    def outer(num_nodes: int, interval: int, rounds: int = 200) -> tuple[object, ...]:
        given: Given = {
            ("exchange", "overlap"): "none",
            ("exchange", "fragments"): 1,
            ("inner", "steps"): interval,
        }
        situation = replace(
            RACES[50].situation(optimizer), num_nodes=num_nodes, total_steps=rounds * interval
        )
        plan = chosen(situation, given)
        return tuple(value(plan, f"outer.{key}") for key in ("optimizer", "momentum"))

    plain, nesterov = ("sgd", 0.0), ("nesterov", 0.6)
    assert outer(2, OFTEN_STEPS) == outer(4, often_steps(4)) == outer(8, often_steps(8)) == plain
    assert outer(3, often_steps(3) + 2) == outer(4, OFTEN_STEPS) == nesterov
    assert outer(4, OFTEN_STEPS, rounds=3000) == nesterov, "0.9 was not tried so often"
    assert outer(4, OFTEN_STEPS, rounds=20) == ("nesterov", 0.3), "few exchanges want less"
    assert often_steps(2) == OFTEN_STEPS > often_steps(3)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_more_than_two_nodes_take_wholly_over_what_is_little_late(optimizer: str) -> None:
    two, four = (
        chosen(replace(RACES[50], num_nodes=number).situation(optimizer), EVERY_TWENTY)
        for number in (2, 4)
    )
    assert 0 < 2 * four.prediction.late_steps < four.setting.interval
    assert (two.overlap, four.overlap) == ("keep", "keep")
    assert (value(two, "exchange.blend"), value(four, "exchange.blend")) == (0.5, 0.0)
    assert "wholly" in why(four, "blend")


@pytest.mark.parametrize(
    "given",
    [
        {("exchange", "fragments"): 1, ("inner", "steps"): 12},
        {**EVERY_TWENTY, ("outer", "momentum"): 0.9},
        {**EVERY_TWENTY, ("exchange", "uplink"): "topk64", ("exchange", "downlink"): "topk256"},
    ],
    ids=["late by half of the interval", "by more momentum than was tried", "sparse"],
)
def test_four_nodes_hold_on_to_half_where_nothing_else_was_measured(given: Given) -> None:
    plan = chosen(replace(RACES[50], num_nodes=4).situation("muon"), given)
    assert plan.setting.has_overlap
    assert value(plan, "exchange.blend") == 0.5
