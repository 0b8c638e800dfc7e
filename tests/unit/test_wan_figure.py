"""Which lines of the slow-link benchmark belong together, and what is drawn of them."""

from dataclasses import asdict
from typing import Any

import pytest

from benchmarks.wan.command import parser
from benchmarks.wan.command import report as report_command
from benchmarks.wan.figure import Chosen, drawn, newest_run
from benchmarks.wan.report import Measured, Point
from protocol.errors import UsageError

NAMES = ("atoll", "gloo-diloco", "hivemind")


def measured(name: str, *losses: float, trouble: str = "") -> Measured:
    points = tuple(
        Point(seconds=10.0 * i, inner_steps=i, tokens=i, sent_bytes=i, loss=loss)
        for i, loss in enumerate(losses)
    )
    return Measured(
        name=name,
        words="w",
        is_atoll=name.startswith("atoll"),
        points=points,
        step_seconds=0.3,
        trouble=trouble,
    )


def tables(
    seed: int = 0, steps: int = 5, outer: tuple[float, float] = (0.7, 0.3)
) -> dict[str, Any]:
    return {
        "run": {"seed": seed},
        "inner": {"steps": steps},
        "outer": {"learning_rate": outer[0], "momentum": outer[1]},
    }


def line(name: str, *losses: float, seed: int = 0, **changed: Any) -> dict[str, Any]:
    """As the benchmark writes it."""
    written = {
        "note": "",
        "num_nodes": 2,
        "mbit": 100.0,
        "up_share": 1.0,
        "round_trip_ms": 50.0,
        "step_seconds": 0.3,
        "seconds": 60.0,
        "most_steps": None,
        "num_saves": 14,
        "tables": tables(seed=seed),
        "model": "5m",
        "parameters": 4_800_000,
        **asdict(measured(name, *losses)),
    }
    assert changed.keys() <= written.keys()
    return written | changed


CASE = Chosen.of(line("atoll"))


def ends(rows: list[Measured]) -> list[tuple[str, float]]:
    return [(row.name, row.last.loss) for row in rows]


def test_of_two_runs_of_a_case_the_newer_one_counts_and_nobody_of_the_older() -> None:
    lines = [
        line("atoll", 5.0, 3.0),
        line("hivemind", 5.0, 3.5),
        line("atoll", 5.0, 2.0),
        line("gloo-diloco", 5.0, 2.5),
    ]
    assert ends(newest_run(lines, CASE, NAMES)) == [("atoll", 2.0), ("gloo-diloco", 2.5)]


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"mbit": 10.0},
        {"round_trip_ms": 200.0},
        {"up_share": 0.2},
        {"step_seconds": 0.15},
        {"seconds": 90.0},
        {"tables": tables(steps=10)},
        {"tables": tables(outer=(1.0, 0.0))},
        {"model": "1m"},
        {"num_nodes": 4},
    ],
)
def test_another_case_is_not_of_the_run_and_ends_it(other: dict[str, Any]) -> None:
    lines = [
        line("hivemind", 5.0, 3.5),
        line("atoll", 5.0, 9.0, **other),
        line("atoll", 5.0, 2.0),
        line("gloo-diloco", 5.0, 2.5),
        line("gloo-diloco", 5.0, 9.0, **other),
    ]
    assert ends(newest_run(lines, CASE, NAMES)) == [("atoll", 2.0), ("gloo-diloco", 2.5)]


def test_only_those_who_are_named_are_in_it() -> None:
    lines = [line("atoll", 5.0, 2.0), line("hivemind", 5.0, 2.5)]
    assert ends(newest_run(lines, CASE, ["hivemind"])) == [("hivemind", 2.5)]
    assert newest_run([], CASE, NAMES) == []


def test_variants_of_a_contender_are_of_one_run_and_all_are_in_it_where_nobody_is_named() -> None:
    lines = [
        line("gloo-diloco@5", 5.0, 9.0),
        line("gloo-diloco@5", 5.0, 2.7),
        line("gloo-diloco@20", 5.0, 2.6),
        line("atoll@5", 5.0, 2.0),
    ]
    both = [("gloo-diloco@5", 2.7), ("gloo-diloco@20", 2.6)]
    assert ends(newest_run(lines, CASE)) == [*both, ("atoll@5", 2.0)]
    assert ends(newest_run(lines, CASE, ["gloo-diloco@20"])) == both[1:]


def test_how_often_weights_were_kept_makes_no_other_case() -> None:
    assert Chosen.of(line("atoll", num_saves=20)) == CASE


def test_a_line_that_was_read_is_the_row_that_was_written() -> None:
    assert newest_run([line("atoll", 5.0, 2.0)], CASE, NAMES) == [measured("atoll", 5.0, 2.0)]


def test_the_figure_has_a_line_for_each_who_trained_and_the_loss_to_reach() -> None:
    text = drawn(
        [
            measured("gloo-diloco", 5.0, 3.2, 2.8),
            measured("atoll", 5.0, 3.0, 2.5),
            measured("torchft", trouble="did not start"),
        ],
        CASE,
    )
    assert text.count("<polyline") == 2
    assert ">gloo-diloco<" in text and ">atoll<" in text and "torchft" not in text
    assert "2.800, the loss to reach" in text
    assert "100 Mbit/s, round trip 50 ms, steps of 0.3 s, 5 between exchanges, " in text
    assert "outer 0.7 with 0.3, seed 0" in text
    with pytest.raises(ValueError, match="nothing to draw"):
        drawn([measured("atoll")], CASE)


def test_of_variants_the_figure_has_the_best_and_its_title_says_what_a_number_means() -> None:
    rows = [
        measured("atoll@5", 5.0, 3.0, 2.5),
        measured("gloo-diloco@5", 5.0, 3.2, 2.8),
        measured("gloo-diloco@20", 5.0, 3.3, 2.7),
    ]
    text = drawn(rows, CASE)
    assert text.count("<polyline") == 2
    assert ">gloo-diloco@20<" in text and ">gloo-diloco@5<" not in text
    assert "2.700, the loss to reach" in text
    assert "5 or @N between exchanges" in text


def test_a_case_that_was_not_measured_is_refused_with_what_to_do(tmp_path: Any) -> None:
    results = tmp_path / "wan.jsonl"
    results.write_text("")
    chosen = parser().parse_args(["--report", "--output", str(results), "--rates", "7"])
    with pytest.raises(UsageError, match=r"7 Mbit/s.*the same command without --report"):
        report_command(chosen)


def test_a_figure_of_several_cases_is_refused(tmp_path: Any) -> None:
    chosen = parser().parse_args(
        ["--report", "--figure", str(tmp_path / "a.svg"), "--rates", "10", "100"]
    )
    with pytest.raises(UsageError, match="a figure is of one case, and these are 2"):
        report_command(chosen)
