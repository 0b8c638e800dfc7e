"""What a run file's own settings cost in loss is said before the run begins, with what to write instead."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from coordinator.config import run_text
from coordinator.presets.costly import costs_in_words
from protocol.run.models import Description
from protocol.run.run_files import load_run_file, validated
from protocol.run.run_spec import RunSpec

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "functions"


PLAIN = {"optimizer": "sgd", "learning_rate": 1.0, "momentum": 0.0}


def run_of(*, rounds: int = 100, steps: int = 15, **tables: dict[str, Any]) -> RunSpec:
    tables = {"run": {"rounds": rounds, "min_nodes": 2}, "inner": {"steps": steps}} | tables
    tables["outer"] = {"momentum": 0.6} | tables.get("outer", {})
    tables["model"] = {"num_layers": 8}
    return validated(tables, origin="the test")


def said(**told: Any) -> str:
    return "\n".join(costs_in_words(run_of(**told)))


@pytest.mark.parametrize(
    ("told", "instead"),
    [
        (
            {"rounds": 8},
            "exchanged only 8 times: 0.6 ended 1 to 9 % higher than 0.3; write momentum = 0.3",
        ),
        ({"rounds": 31, "outer": {"momentum": 0.9}}, "and 0.9 6 to 21 %; write momentum = 0.3"),
        (
            {"steps": 8},
            'write optimizer = "sgd" and learning_rate = 1.0 there, and leave momentum out',
        ),
        ({"rounds": 2, "steps": 60}, "exchanged 2 times in the whole run"),
        ({"rounds": 1, "steps": 120}, "exchanged once in the whole run"),
        ({"rounds": 2, "steps": 60}, "write [run] rounds = 8 and [inner] steps = 15"),
        ({"rounds": 12, "steps": 30}, "write [run] rounds = 17 and [inner] steps = 22"),
        ({"exchange": {"fragments": 8}}, "exchanged 12 times in the whole run"),
        ({"exchange": {"fragments": 8}}, "write [exchange] fragments = 6"),
        (
            {"rounds": 10, "steps": 60, "exchange": {"fragments": 8}},
            "write [run] rounds = 17 and [inner] steps = 37, and [exchange] fragments = 1",
        ),
    ],
)
def test_a_setting_that_costs_loss_is_said_with_what_to_write_instead(
    told: dict[str, Any], instead: str
) -> None:
    assert instead in said(**told)


@pytest.mark.parametrize(
    "told",
    [
        {"rounds": 32, "steps": 13},
        {"rounds": 8, "outer": {"momentum": 0.3}},
        {"steps": 5, "outer": PLAIN},
        {"steps": 12},
        {"steps": 29, "outer": PLAIN},
        {"steps": 30, "inner": {"steps": 30, "optimizer": "muon"}, "outer": PLAIN},
        {"steps": 60, "rounds": 31, "outer": PLAIN},
        {"steps": 60, "outer": PLAIN, "exchange": {"uplink": "topk64", "error_feedback": True}},
        {"steps": 5, "inner": {"steps": 5, "optimizer": "adamw"}, "exchange": {"overlap": "blend"}},
        {"rounds": 8, "inner": {"steps": 15, "optimizer": "muon"}},
        {"rounds": 12, "steps": 10},
        {"rounds": 24, "steps": 5},
        {"rounds": 20, "exchange": {"uplink": "topk64", "error_feedback": True}},
        {"rounds": 8, "run": {"rounds": 8, "min_nodes": 1}},
    ],
)
def test_nothing_is_said_of_what_costs_nothing_or_was_not_measured(told: dict[str, Any]) -> None:
    assert said(**told) == ""


def test_a_run_of_loops_hears_of_momentum_by_what_they_train_by() -> None:
    loops = {"data": {"source": "loop"}}
    heard = said(rounds=20, **loops)
    assert "write momentum = 0.3 if loops train by AdamW" in heard
    assert 'if they do by SGD, write [inner] optimizer = "sgd" instead' in heard
    assert "leave momentum out if loops train by AdamW" in said(steps=5, **loops)
    assert "loops" not in said(rounds=20) + said(steps=5)
    for rounds, steps in ((20, 15), (100, 5), (16, 60)):
        by_sgd = {"inner": {"steps": steps, "optimizer": "sgd"}} | loops
        assert said(rounds=rounds, steps=steps, **by_sgd) == "", "0.6 is best for them"
        for outer in (PLAIN, {"momentum": 0.3}):
            assert "up to 29 % lower" in said(rounds=rounds, steps=steps, outer=outer, **by_sgd)


def test_loops_by_sgd_may_take_the_plain_mean_where_exchanges_are_most_frequent() -> None:
    by_sgd: dict[str, Any] = {
        "data": {"source": "loop"},
        "inner": {"steps": 2, "optimizer": "sgd"},
    }
    assert said(steps=2, **by_sgd) == said(steps=2, outer=PLAIN, **by_sgd) == ""


def test_who_writes_what_was_said_hears_nothing_more() -> None:
    assert said(rounds=2, steps=60, outer={"momentum": 0.3}) != ""
    assert said(rounds=8, steps=15, outer={"momentum": 0.3}) == ""
    assert "momentum" not in said(rounds=3, steps=20)  # of which 8 exchanges are every 7 steps
    assert said(rounds=40, steps=8) != said(rounds=40, steps=8, outer=PLAIN) == ""
    assert said(steps=60, outer=PLAIN) != said(steps=60) == ""


def test_the_plain_mean_costs_those_who_take_part_and_not_the_fewest_of_a_run() -> None:
    """Two nodes that exchange every 9 to 12 steps end alike by both, and more end higher by it."""
    for steps in (9, 12, 20):
        of_two, lost = run_of(steps=steps, outer=PLAIN), "ended 0.2 to 3.0 % lower by it"
        assert not list(costs_in_words(of_two))
        assert not list(costs_in_words(of_two, num_nodes=2))
        assert lost in "".join(costs_in_words(of_two, num_nodes=4))
        assert lost in said(steps=steps, run={"rounds": 100, "min_nodes": 3}, outer=PLAIN)
    assert not list(costs_in_words(run_of(steps=8, outer=PLAIN), num_nodes=4))
    alone = run_of(steps=12, run={"rounds": 100, "min_nodes": 1}, outer=PLAIN)
    assert not list(costs_in_words(alone)) and list(costs_in_words(alone, num_nodes=4))


def test_shared_tokens_make_fewer_steps_of_more_nodes() -> None:
    step_tokens = run_of().tokens_per_inner_step
    shared = run_of(inner={"round_tokens": 2 * 60 * step_tokens}, outer=PLAIN)
    assert "every 15 inner steps" in "".join(costs_in_words(shared, num_nodes=8))
    assert not list(costs_in_words(shared, num_nodes=15))
    few = run_of(rounds=2, inner={"round_tokens": 2 * 64 * step_tokens}, outer={"momentum": 0.3})
    for num_nodes in (2, 4):
        tokens = 2 * 64 * step_tokens // 4
        assert f"round_tokens = {tokens}" in "".join(costs_in_words(few, num_nodes=num_nodes))


def test_momentum_costs_nobody_in_exchanges_that_are_neither_few_nor_frequent() -> None:
    for num_nodes in (None, 2, 4, 8):
        for steps in range(9, 40):
            assert not list(costs_in_words(run_of(steps=steps), num_nodes=num_nodes))
        for steps in range(3, 9):
            assert "overshoots" in "".join(costs_in_words(run_of(steps=steps), num_nodes=num_nodes))


def test_momentum_is_left_to_those_who_go_on_with_weights() -> None:
    """By AdamW at a low rate from given weights the plain mean ended higher."""
    run = run_of(steps=5)
    given = run.model_copy(update={"description": Description(has_loaded=True)})
    assert list(costs_in_words(run)) and not list(costs_in_words(given))


@pytest.mark.parametrize(
    "name", ["template", *sorted(path.name for path in EXAMPLES.glob("*.toml"))]
)
def test_no_run_file_of_ours_costs_loss(name: str) -> None:
    template = run_text(name=None)
    run = (
        validated(tomllib.loads(template), origin="the template")
        if name == "template"
        else load_run_file(EXAMPLES / name)
    )
    assert list(costs_in_words(run)) == []
