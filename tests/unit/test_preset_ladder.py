"""The order of settings, the interval between exchanges, and how fragments cut it."""

from dataclasses import replace

import pytest

from benchmarks.presets import situation_of
from coordinator.presets.choosing import SOON_STEPS, chosen
from coordinator.presets.cost import GOAL, Prediction, Setting, Situation, predicted
from coordinator.presets.ladder import Given
from coordinator.presets.reasons import of_steps
from tests.unit.preset_scene import (
    all_settings,
    codecs_and_interval,
    ever_slower_mbit,
    rungs,
    slowest_mbit,
    value,
    why,
)


def test_a_slower_link_first_hides_the_exchange_then_coarsens_it_and_makes_it_seldom_last() -> None:
    places = []
    for mbit in ever_slower_mbit(100_000, 2):
        situation = situation_of("125m", mbit, "bbr")
        plan = chosen(situation)
        (place,) = (at for at, rung in enumerate(rungs(situation)) if plan.setting in rung)
        places.append(place)
    assert places == sorted(places)
    first, hidden, coarser, *_, last = [
        rungs(situation)[place][0] for place in dict.fromkeys(places)
    ]
    assert not first.has_overlap
    assert hidden == replace(first, has_overlap=True)
    assert (coarser.downlink, coarser.interval) == (first.downlink, first.interval)
    assert coarser.uplink != first.uplink
    assert last.interval > first.interval


def test_the_order_is_int4_overlap_ec2_up_ec2_both_ways_longer_intervals_and_sparse_codecs() -> (
    None
):
    found = [rung[0] for rung in rungs(situation_of("7b", 10))]
    assert [(s.uplink, s.downlink, s.interval, s.has_overlap) for s in found] == [
        ("int4", "int4", 30, False),
        ("int4", "int4", 30, True),
        ("ec2", "int4", 30, True),
        *(("ec2", "ec2", interval, True) for interval in (30, 60, 120, 240, 480)),
        *(("topk64", "topk256", interval, True) for interval in (120, 240, 480)),
        ("topk64", "topk64", 480, True),
    ]


def test_fragments_cut_an_interval_and_never_lengthen_it_or_save_bytes() -> None:
    situation = situation_of("7b", 10)
    for rung in rungs(situation):
        whole = predicted(situation, rung[0])
        assert rung[0].fragments == 1
        for setting in rung:
            assert setting.interval == rung[0].interval
            cut = predicted(situation, setting)
            sent = cut.bytes_per_round * setting.fragments
            assert sent == pytest.approx(whole.bytes_per_round, rel=1e-4)  # but for headers
        is_cut = len({setting.fragments for setting in rung}) > 1
        assert is_cut == rung[0].has_overlap  # who waits has nothing of it


def test_results_come_as_soon_as_fragments_can_bring_them_and_with_no_more_than_that_takes() -> (
    None
):
    situation = situation_of("125m", 100, "bbr")
    plan = chosen(situation)
    (rung,) = (rung for rung in rungs(situation) if plan.setting in rung)
    late = {setting.fragments: predicted(situation, setting).late_steps for setting in rung}
    fewest = min(fragments for fragments, steps in late.items() if steps <= SOON_STEPS)
    assert 1 < plan.setting.fragments == fewest
    assert plan.prediction.late_steps == late[fewest] < late[1]
    said = f"{late[fewest]} inner steps late, with the whole model in each round {late[1]}"
    assert said in why(plan, "fragments")
    assert chosen(situation_of("125m", 1000)).setting.fragments == 1  # soon enough by itself


def test_results_later_than_half_of_the_interval_are_a_reason_for_a_coarser_codec() -> None:
    """Of a small model there are few fragments to cut, and 2 bits lose less than so late results.

    Over the slowest link where int4 reaches the goal, its results come as late as can be.
    """

    def over(mbit: float) -> Situation:
        return replace(situation_of("3m", mbit), seconds_per_inner_step=0.1)

    def hidden(situation: Situation) -> list[Prediction]:
        found = [predicted(situation, setting) for setting in rungs(situation)[1]]
        return [prediction for prediction in found if prediction.utilisation >= GOAL]

    situation = over(slowest_mbit(lambda mbit: bool(hidden(over(mbit)))))
    soonest = min(prediction.late_steps for prediction in hidden(situation))
    assert soonest > 15
    plan = chosen(situation)
    assert plan.setting.uplink == "ec2" and plan.setting.interval == 30
    assert plan.prediction.late_steps < soonest
    int4 = {("exchange", "uplink"): "int4", ("exchange", "downlink"): "int4"}
    assert chosen(situation, int4).setting.interval == 30  # never a longer one for that


def test_fragments_that_bring_too_many_round_trips_are_not_taken() -> None:
    """Over the slowest link where the whole model keeps up, parts of it do not."""

    def rung(mbit: float) -> dict[int, float]:
        situation = situation_of("125m", mbit)
        (found,) = (r for r in rungs(situation) if (r[0].downlink, r[0].interval) == ("ec2", 60))
        return {s.fragments: predicted(situation, s).utilisation for s in found}

    mbit = slowest_mbit(lambda mbit: rung(mbit)[1] >= GOAL)
    shares = rung(mbit)
    assert len(shares) > 1 and all(share < GOAL for cut, share in shares.items() if cut > 1)
    plan = chosen(situation_of("125m", mbit))
    assert codecs_and_interval(plan) == ("ec2", "ec2", 60)
    assert plan.setting.fragments == 1


def test_results_are_as_late_as_the_exchange_takes_and_never_later_than_a_round() -> None:
    situation = situation_of("125m", 100)
    setting = Setting(uplink="int4", downlink="int4", fragments=1, has_overlap=True, steps=30)
    there = predicted(situation, setting)
    assert 10 < there.exchange_seconds < 30  # and an inner step takes one
    # The inner step in progress is ended first.
    assert there.exchange_seconds <= there.late_steps < there.exchange_seconds + 1
    assert predicted(situation, replace(setting, steps=10)).late_steps == 10
    assert predicted(situation, replace(setting, has_overlap=False)).late_steps == 0


def test_longer_intervals_come_after_coarser_codecs_and_are_no_fragments_in_disguise() -> None:
    plan = chosen(situation_of("1b", 10, "bbr"))
    uplink, downlink, interval = codecs_and_interval(plan)
    assert (uplink, downlink) == ("ec2", "ec2") and interval > 100
    assert plan.setting.fragments > 1
    assert plan.setting.fragments * plan.setting.steps == interval
    assert plan.exchanges == 100_000 // interval
    # Of these exchanges, and not of all rounds.
    assert value(plan, "outer.momentum") == 0.6 and 100_000 // plan.setting.steps > 1000


def test_the_rungs_before_the_chosen_one_were_not_enough() -> None:
    for name, mbit in (("125m", 100), ("125m", 10), ("1b", 10), ("7b", 10)):
        situation = situation_of(name, mbit)
        setting = chosen(situation).setting
        found = rungs(situation)
        place = next(place for place, rung in enumerate(found) if setting in rung)
        assert place > 0
        before = [predicted(situation, each) for rung in found[:place] for each in rung]
        assert max(prediction.utilisation for prediction in before) < GOAL


@pytest.mark.parametrize(
    ("interval", "total_steps", "words"),
    [
        (60, 40 * 60, "2 times the usual"),
        (120, 40 * 120, "ec2 every 160 steps, in 40 exchanges"),
        (120, 40 * 120 - 1, "int4 every 60 steps, in 16 exchanges"),
        (240, 100 * 240, "DiLoCo (Douillard et al. 2023) exchanged every 500 steps"),
    ],
)
def test_longer_intervals_quote_runs_of_no_more_exchanges_than_they_have(
    interval: int, total_steps: int, words: str
) -> None:
    setting = Setting(uplink="ec2", downlink="ec2", fragments=1, has_overlap=True, steps=interval)
    exchanges = total_steps // interval
    assert words in of_steps(setting, total_steps, exchanges, shortest=30)
    halves = replace(setting, fragments=2, steps=interval // 2)
    said = of_steps(halves, total_steps, exchanges, shortest=30)
    assert words in said and f"every 2 rounds, {interval} steps" in said


def test_sparse_codecs_and_far_intervals_are_for_a_hundred_exchanges_and_not_for_fewer() -> None:
    for codec, interval in (("topk64", 120), ("ec2", 240)):
        for total_steps, is_there in ((100 * interval, True), (100 * interval - 1, False)):
            found = all_settings(replace(situation_of("7b", 10), total_steps=total_steps))
            assert any(s.uplink == codec and s.interval == interval for s in found) == is_there
    plan = chosen(replace(situation_of("1b", 10), total_steps=100 * 120))
    assert codecs_and_interval(plan) == ("topk64", "topk256", 120)
    assert "100 times or more" in why(plan, "uplink")


def test_sparse_codecs_are_exchanged_as_often_as_links_allow() -> None:
    """For as many bytes, little of much often costs less loss than much of it seldom."""
    plans = [chosen(situation_of("7b", mbit)) for mbit in ever_slower_mbit(200, 5)]
    sparse = [plan.setting for plan in plans if plan.setting.uplink == "topk64"]
    intervals = [setting.interval for setting in sparse if setting.downlink == "topk256"]
    assert intervals == sorted(intervals) and len(set(intervals)) > 1
    found = all_settings(situation_of("7b", 10))
    on_ladder = {s.interval for s in found if (s.uplink, s.downlink) == ("topk64", "topk256")}
    assert set(intervals) <= on_ladder == {120, 240, 480}


@pytest.mark.parametrize(
    ("total_steps", "interval"),
    [(7680, 30), (7679, 15), (3840, 15), (1600, 6), (1000, 3), (500, 2), (32, 2), (16, 1)],
)
def test_a_short_run_over_a_fast_link_exchanges_each_parameter_as_often_as_is_enough(
    total_steps: int, interval: int
) -> None:
    """256 times, or every second step."""
    situation = replace(
        situation_of("0.2m", 1000), total_steps=total_steps, seconds_per_inner_step=60.0
    )
    plan = chosen(situation)
    assert codecs_and_interval(plan) == ("int4", "int4", interval)
    assert plan.exchanges == total_steps // interval
    assert value(plan, "exchange.overlap") == "none" and plan.meets_goal
    said = f"{plan.exchanges} exchanges of each parameter in a run of {total_steps:,} inner steps"
    assert (said in why(plan, "steps")) == (interval != 30)
    assert "more often" not in why(plan, "steps")


def test_a_short_run_first_exchanges_more_seldom_and_then_as_a_long_one_would() -> None:
    situation = replace(situation_of("125m", 100), total_steps=1600)
    short, long = ([rung[0] for rung in rungs(each)] for each in (situation, _long(situation)))
    assert [(s.uplink, s.downlink, s.interval, s.has_overlap) for s in short[:6]] == [
        ("int4", "int4", interval, has_overlap)
        for interval in (6, 10, 15)
        for has_overlap in (False, True)
    ]
    assert short[6:11] == long[:5]


def _long(situation: Situation) -> Situation:
    return replace(situation, total_steps=100_000)


def test_the_slower_a_link_the_more_seldom_a_short_run_exchanges_and_the_reason_says_why() -> None:
    plans = [
        chosen(replace(situation_of("125m", mbit, "bbr"), total_steps=1600))
        for mbit in ever_slower_mbit(1000, 40)
    ]
    assert all(plan.meets_goal for plan in plans)
    intervals = [plan.setting.interval for plan in plans]
    assert intervals == sorted(intervals)
    assert list(dict.fromkeys(intervals)) == [6, 10, 15, 30]
    assert "every 6 steps: 266 exchanges" in why(plans[0], "steps")
    for plan in plans:
        is_kept_from_more = "more often would leave less than 95 %" in why(plan, "steps")
        assert is_kept_from_more == (plan.setting.interval > 6)


def test_a_short_run_whose_link_is_too_slow_for_that_gets_what_it_would_get_anyway() -> None:
    for name, mbit in (("125m", 10), ("1b", 100), ("1b", 1000)):
        situation = replace(situation_of(name, mbit), total_steps=4000)
        assert chosen(situation).setting == chosen(_long(situation)).setting


@pytest.mark.parametrize(
    ("total_steps", "every_rounds", "given"),
    [
        (1600, 25, {}),  # every 150 steps, as in rounds of 30
        (320, 40, {}),  # four times
        (16, 5, {}),
        (7680, None, {}),
        (1600, None, {("inner", "steps"): 6}),
    ],
)
def test_short_intervals_are_no_reason_to_evaluate_more_often(
    total_steps: int, every_rounds: int | None, given: Given
) -> None:
    plan = chosen(
        replace(situation_of("0.2m", 1000), total_steps=total_steps, seconds_per_inner_step=60.0),
        given,
    )
    found = [choice.value for choice in plan.choices if choice.key == "every_rounds"]
    assert found == ([] if every_rounds is None else [every_rounds])


def test_how_waiting_would_do_is_told_of_the_interval_that_is_chosen() -> None:
    situation = replace(situation_of("125m", 300, "bbr"), total_steps=1600)
    plan = chosen(situation)
    waiting = replace(plan.setting, has_overlap=False, fragments=1, steps=6)
    share = predicted(situation, waiting).utilisation
    assert f"waiting would leave {100 * share:.0f} %" in why(plan, "overlap")


def test_fragments_that_are_given_do_not_keep_a_short_run_from_exchanging_often() -> None:
    situation = replace(situation_of("125m", 1000), total_steps=1600)
    found = rungs(situation, {("exchange", "fragments"): 4})
    assert [rung[0].interval for rung in found[:6:2]] == [8, 16, 32]


@pytest.mark.parametrize("total_steps", [16, 100, 400, 1000, 4000, 100_000])
def test_no_parameter_is_exchanged_fewer_times_than_was_ever_measured(total_steps: int) -> None:
    situation = replace(situation_of("7b", 10), total_steps=total_steps)
    for given in ({}, {("exchange", "fragments"): 4}):
        for setting in all_settings(situation, given):
            assert total_steps >= 16 * setting.interval or setting.steps == 1


def test_a_run_of_hardly_any_steps_exchanges_after_each_and_says_so() -> None:
    plan = chosen(replace(situation_of("125m", 100), total_steps=5))
    assert (value(plan, "run.rounds"), value(plan, "inner.steps")) == (5, 1)
    assert plan.exchanges == 5 and not plan.is_too_short
    assert "every step: 5 exchanges of each parameter in a run of 5 inner steps" in why(
        plan, "steps"
    )
    assert "5 exchanges of each parameter" in why(plan, "momentum")


def test_what_is_given_may_make_a_run_too_short_for_one_exchange_of_everything() -> None:
    situation = replace(situation_of("125m", 100), total_steps=100)
    steps = {("inner", "steps"): 30}
    assert not chosen(situation, steps).is_too_short
    assert chosen(situation, {**steps, ("exchange", "fragments"): 4}).is_too_short
    assert chosen(situation, {("inner", "steps"): 101}).is_too_short


def test_rounds_that_are_given_fix_their_steps_so_that_the_run_stays_as_long() -> None:
    """With steps fixed only fragments lengthen the interval, and last."""
    situation = replace(situation_of("125m", 10), total_steps=30_000)
    plan = chosen(situation, {("run", "rounds"): 1000})
    assert (value(plan, "run.rounds"), value(plan, "inner.steps")) == (1000, 30)
    assert codecs_and_interval(plan) == ("ec2", "ec2", 60)
    assert plan.setting.fragments == 2 and plan.exchanges == 500
    assert chosen(situation, {("inner", "steps"): 30}).setting == plan.setting
    more = chosen(situation, {("run", "rounds"): 2000})
    assert value(more, "inner.steps") == 15
    assert why(more, "steps").startswith("30,000 inner steps over 2,000 rounds, which are given")
    short = chosen(replace(situation, total_steps=600), {("run", "rounds"): 20})
    assert codecs_and_interval(short)[2] == 30  # no shorter: a round is not to be cut


def test_fragments_that_are_given_cut_the_interval_as_evenly_as_whole_steps_allow() -> None:
    for fragments, steps in ((4, 8), (5, 6), (7, 4), (18, 2)):
        given = {("exchange", "fragments"): fragments}
        settings = all_settings(situation_of("125m", 100), given)
        assert (settings[0].fragments, settings[0].steps) == (fragments, steps)
        assert {setting.fragments for setting in settings} == {fragments}


def test_without_error_feedback_nothing_below_four_bits_is_chosen() -> None:
    plan = chosen(situation_of("7b", 10), {("exchange", "error_feedback"): False})
    assert (plan.setting.uplink, plan.setting.downlink) == ("int4", "int4")
    assert not plan.meets_goal
