"""The race gives each contender the same time and as many tries, and compares what they end at."""

import math
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.race import (
    SHORTER,
    compete,
    compete_longer,
    course_of,
    first_try,
    is_of_today,
    known_in,
)
from benchmarks.races import (
    ATOLL,
    CEILING,
    CONTENDERS,
    OUTERS,
    PLAIN,
    RACES,
    RATES,
    STREAMING,
    Try,
    best_tries,
    report,
    share_at,
)
from lab.processes.family import SOURCES, atoll_environment


def row_of(tried: Try, loss: float) -> dict[str, Any]:
    return asdict(tried) | {"steps": 1, "rounds": 800, "late_steps": 0, "codec": "", "loss": loss}


@pytest.mark.parametrize("ratio", RACES)
@pytest.mark.parametrize("num_nodes", [2, 4])
def test_a_case_has_the_ratio_that_it_is_called_by_and_nobody_gets_more_time(
    ratio: int, num_nodes: int
) -> None:
    race = replace(RACES[ratio], num_nodes=num_nodes)
    assert race.ratio == pytest.approx(ratio, rel=0.01)
    for contender in CONTENDERS:
        course = course_of(first_try(race, ratio, contender, "adamw"), race)
        assert 0 < course.rounds * course.steps <= race.steps
        assert 0 <= course.late_steps <= course.steps


def test_plain_diloco_waits_for_its_ring_and_atoll_sends_while_it_trains() -> None:
    plain = course_of(first_try(RACES[50], 50, PLAIN, "adamw"), RACES[50])
    assert (plain.steps, plain.late_steps) == (
        50,
        0,
    )  # an exchange takes 25 steps: a third is waited
    assert plain.rounds == int(RACES[50].steps / 74.9)
    streaming = course_of(first_try(RACES[50], 50, STREAMING, "adamw"), RACES[50])
    # 8 bits of half of the model both ways between two nodes: 50 / 4 / 2 steps.
    assert (streaming.steps, streaming.late_steps, streaming.rounds) == (12, 7, 100)
    atoll = course_of(first_try(RACES[50], 50, ATOLL, "adamw"), RACES[50])
    assert atoll.late_steps > 0
    assert atoll.rounds * atoll.steps > 0.9 * RACES[50].steps


def test_what_presets_chose_otherwise_once_is_run_again() -> None:
    race = replace(RACES[50], num_nodes=4)
    tried = first_try(race, 50, ATOLL, "muon")
    course = course_of(tried, race)
    told = {"steps": course.steps, "rounds": course.rounds, "late_steps": course.late_steps}
    row = {
        **told,
        "codec": course.exchange["uplink"],
        "blend": course.exchange["blend"],
        "loss": 1.3,
    }
    assert is_of_today(tried, row, race)
    for once in ({"blend": 0.5}, {"codec": "int4"}, {"late_steps": 9}, {"rounds": 3}):
        assert row | once != row and not is_of_today(tried, row | once, race)


def test_half_the_time_is_half_the_rounds() -> None:
    tried = first_try(RACES[300], 300, ATOLL, "muon")
    whole = course_of(tried, RACES[300])
    half = course_of(replace(tried, share=0.5), RACES[300])
    assert half == replace(whole, rounds=whole.rounds // 2)


def competed(
    losses: dict[str, float], seeds: Iterable[int], best_rate: float = RATES["adamw"][3]
) -> dict[Try, dict[str, Any]]:
    """A race in which a shorter time costs every contender alike."""
    known: dict[Try, dict[str, Any]] = {}

    def loss_of(tried: Try) -> float:
        loss = losses[tried.contender] - math.log(tried.share)
        loss += abs(math.log(tried.rate / best_rate))
        loss += abs(tried.outer[1] - 0.3) if tried.contender != CEILING else 0
        known[tried] = row_of(tried, loss)
        return loss

    compete(
        5,
        race=RACES[5],
        optimizer="adamw",
        seeds=list(seeds),
        losses_of=lambda tries: [loss_of(each) for each in tries],
    )
    return known


def test_contenders_have_as_many_tries_and_each_is_judged_at_its_best() -> None:
    known = competed({CEILING: 1.0, ATOLL: 1.2, PLAIN: 1.9, STREAMING: 1.9 + 0.1}, seeds=[0, 1])
    tries = [each for each in known if each.share == 1 and each.seed == 0]
    counts = {name: sum(each.contender == name for each in tries) for name in CONTENDERS}
    assert counts == {CEILING: 5, PLAIN: 10, STREAMING: 10, ATOLL: 10}
    others = [each for each in known if each.seed == 1]
    assert {each.rate for each in others} == {RATES["adamw"][3]}
    assert {each.outer for each in others if each.contender != CEILING} == {OUTERS[2]}


def test_who_is_best_at_the_last_rate_tries_further_ones() -> None:
    losses = {CEILING: 1.0, ATOLL: 1.2, PLAIN: 1.9, STREAMING: 2.0}
    low = min(RATES["adamw"])
    known = competed(losses, seeds=[0], best_rate=low / 2)
    rates = [each.rate for each in known if each.contender == CEILING and each.share == 1]
    assert sorted(rates) == [low / 4, low / 2, *sorted(RATES["adamw"])]
    assert {each.rate for each in known if each.share < 1} == {low / 2}


def test_a_longer_race_goes_on_from_the_best_of_the_usual_time_at_the_ceilings_rate() -> None:
    usual = competed({CEILING: 1.0, ATOLL: 1.2, PLAIN: 1.9, STREAMING: 2.0}, seeds=[0])
    best_rate = sorted(RATES["adamw"])[1]
    longer: dict[Try, dict[str, Any]] = {}

    def loss_of(tried: Try) -> float:
        loss = 1.0 + abs(math.log(tried.rate / best_rate))
        loss += {CEILING: 0.0, ATOLL: 0.04, STREAMING: 0.3}[tried.contender] * tried.interval
        longer[tried] = row_of(tried, loss)
        return loss

    compete_longer(
        best_tries(usual),
        race=RACES[5],
        times=4,
        seeds=[0, 1],
        losses_of=lambda tries: [loss_of(each) for each in tries],
    )
    assert {each.times for each in longer} == {4}
    assert best_tries(longer).keys() == {CEILING, STREAMING, ATOLL}
    assert {each.rate for each in longer if each.contender != CEILING} == {best_rate}
    assert best_tries(longer)[CEILING].rate == best_rate
    assert {each.interval for each in longer if each.contender == ATOLL} == {1.0, 0.5}
    assert {each.interval for each in longer if each.seed == 1 and each.contender == ATOLL} == {0.5}
    assert {each.share for each in longer} == {1.0}
    told = "\n".join(report(usual | longer))
    assert "4 times as long" in told
    lines = [line for line in told.splitlines() if line.startswith("| Atoll")]
    assert "| 1.0200 (1.0200 to 1.0200) | +2.00% (" in lines[1]
    assert lines[1].endswith("|  |  |")


def test_a_longer_race_wants_to_know_who_was_best_in_the_usual_time() -> None:
    with pytest.raises(SystemExit, match="Streaming DiLoCo has not raced in the usual time"):
        compete_longer(
            {each: first_try(RACES[5], 5, each, "muon") for each in (CEILING, ATOLL)},
            race=RACES[5],
            times=4,
            seeds=[0],
            losses_of=lambda tries: [],
        )


def test_four_times_the_time_is_four_times_the_rounds_and_presets_know() -> None:
    tried = first_try(RACES[50], 50, STREAMING, "muon")
    usual, longer = (course_of(replace(tried, times=times), RACES[50]) for times in (1, 4))
    assert longer == replace(usual, rounds=4 * usual.rounds)
    tried = first_try(RACES[50], 50, ATOLL, "muon")
    usual, longer = (course_of(replace(tried, times=times), RACES[50]) for times in (1, 4))
    assert longer.steps > usual.steps  # in a longer run rare exchanges lose less


def test_it_says_how_much_sooner_a_contender_reaches_what_another_ends_at() -> None:
    known = competed({CEILING: 1.0, ATOLL: 1.2, PLAIN: 1.9, STREAMING: 1.9 + 0.1}, seeds=[0, 1])
    atoll = next(
        line for line in "\n".join(report(known)).splitlines() if line.startswith("| Atoll")
    )
    assert f"| {math.exp(0.7):.2f} (" in atoll  # a loss of 0.7 less is e ** 0.7 times as fast here
    assert f"| {math.exp(-0.2):.2f} (" in atoll  # … as the ceiling


def test_who_never_gets_there_is_slower_and_who_always_does_faster_than_was_tried() -> None:
    slower = competed({CEILING: 1.0, ATOLL: 2.0, PLAIN: 1.9, STREAMING: 1.9 + 0.1}, seeds=[0])
    assert "| under 1.00" in "\n".join(report(slower))
    faster = competed({CEILING: 1.0, ATOLL: 1.2, PLAIN: 9.9, STREAMING: 9.9 + 0.1}, seeds=[0])
    assert f"| over {1 / SHORTER[-1]:.2f}" in "\n".join(report(faster))


def test_between_two_runs_the_time_is_interpolated() -> None:
    curve = [(1.0, 2.0), (0.5, 3.0)]
    assert share_at(2.5, curve) == (pytest.approx(math.sqrt(0.5)), "")
    assert share_at(2.0, curve) == (1.0, "")
    assert share_at(1.9, curve) == (1.0, "more")
    assert share_at(3.5, curve) == (0.5, "less")


@pytest.mark.nightly
def test_its_quick_form_goes_through_all_of_it_and_runs_nothing_twice(tmp_path: Path) -> None:
    results = tmp_path / "race.jsonl"
    command = [sys.executable, "-m", "benchmarks.race", "--quick", "--ratios", "5", "--seeds", "0"]
    for _ in range(2):
        ran = subprocess.run(
            [*command, "--optimizers", "adamw", "--results", str(results)],
            cwd=SOURCES,
            env=atoll_environment({}),
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        assert "| Atoll, adamw, " in ran.stdout
        lines = results.read_text().splitlines()
        assert len(lines) == len(known_in(results)) >= 35
