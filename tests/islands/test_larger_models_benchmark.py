"""The benchmark for GPUs, with a tiny model on the CPU: all of it runs, and its table says what was run."""

from dataclasses import replace

import pytest

from benchmarks.learning.larger_models import (
    SIZES,
    Try,
    best_rates,
    preset_for,
    report,
    run,
    tries_of,
    tuning,
)


def test_the_best_rate_of_the_ceiling_is_everybodys_and_losses_stand_beside_the_ceilings() -> None:
    rates = SIZES["tiny"].rates
    known = {tried: 4.0 + tried.rate for tried in tuning("tiny", "a/*.py")}
    best = best_rates(known, "tiny", "a/*.py")
    assert best == {optimizer: min(tried) for optimizer, tried in rates.items()}
    for seed, above in ((3, 1.1), (5, 1.2)):
        tries = tries_of("tiny", best, seed=seed, text="a/*.py")
        assert {tried.text for tried in tries} == {"a/*.py"}, "as the rates were chosen on"
        assert {tried.rate for tried in tries} == set(best.values())
        assert all(tried.seed == seed and tried.steps == SIZES["tiny"].steps for tried in tries)
        known |= {tried: 3.0 * above if tried.interval else 3.0 for tried in tries}
    (table,) = report(known)
    assert table.count("3.0000, 3.0000 | +10.0 %, +20.0 %") == 4
    known = {tried: loss for tried, loss in known.items() if tried.interval or tried.seed != 3}
    (table,) = report(known)
    assert table.count("| 3.0000 | +20.0 %") == 4, "a swarm without its ceiling says nothing"


@pytest.mark.parametrize("size", SIZES)
def test_results_that_are_late_are_late_by_no_more_than_an_interval(size: str) -> None:
    best = {optimizer: rates[0] for optimizer, rates in SIZES[size].rates.items()}
    for tried in tries_of(size, best, seed=0, text="", ratios=(5, 50, 300)):
        assert tried.late_steps <= tried.interval
        assert tried.steps % (tried.interval or 1) == 0, "the schedule ends with a round"


def test_what_presets_choose_is_told_apart_by_the_link_and_stands_in_the_table() -> None:
    ceiling = Try(size="5M", optimizer="muon", rate=5e-3, steps=SIZES["5M"].steps)
    fast, slow = (preset_for(ceiling, ratio) for ratio in (5, 300))
    assert fast.interval * fast.fragments < slow.interval * slow.fragments
    assert fast.late_steps > 0 and slow.fragments > 1
    (table,) = report({ceiling: 2.0, fast: 2.02, slow: 2.2})
    assert "| R = 5 | 1.0 0.0 |" in table and "+1.0 %" in table
    assert "| R = 300 | 0.7 0.6 |" in table and "+10.0 %" in table


def test_a_swarm_and_its_ceiling_take_as_many_steps_and_both_learn() -> None:
    ceiling = Try(size="tiny", optimizer="muon", rate=2e-2, steps=20)
    swarm = replace(ceiling, interval=5, codec="ec2", outer=(0.7, 0.6))
    losses = [run(t, "cpu", 1) for t in (ceiling, swarm, preset_for(ceiling, 300))]
    assert len(set(losses)) == 3
    assert all(4.0 < loss < 5.3 for loss in losses), "of 5.55 without having learned anything"
