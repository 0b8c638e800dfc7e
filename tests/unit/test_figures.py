"""Figures show what the numbers say."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.convergence.bits import costs_of
from benchmarks.convergence.bits import drawn as drawn_bits
from benchmarks.convergence.report import frontier, frontier_drawn
from benchmarks.exchange.report import drawn as drawn_exchange
from benchmarks.figures import Point, Stack, nice_ceiling, scattered, stacked_bars
from benchmarks.island.memory import drawn as drawn_memory
from benchmarks.island.memory import rows_of
from benchmarks.learning.larger_models import known_in
from benchmarks.learning.larger_models import report as report_larger
from benchmarks.learning.together import report as report_together
from benchmarks.measurement import read_rows
from benchmarks.race import known_in as known_tries

DOCS = Path(__file__).resolve().parents[2] / "docs"

SVG = "{http://www.w3.org/2000/svg}"


def drawn(*stacks: Stack) -> ElementTree.Element:
    return ElementTree.fromstring(
        stacked_bars(title="a < b", unit="MB", names=("held", "more"), stacks=stacks)
    )


def bars_of(figure: ElementTree.Element) -> list[tuple[float, float, float]]:
    """x, y and height of every part of a bar: what is neither background nor legend."""
    parts = [r for r in figure.iter(f"{SVG}rect") if r.get("x") and r.get("height") != "12"]
    return [tuple(float(r.get(key, "nan")) for key in ("x", "y", "height")) for r in parts]  # type: ignore[misc]


def test_the_height_of_a_part_is_its_value_and_parts_stand_on_each_other() -> None:
    bars = bars_of(
        drawn(
            Stack(group="1 rank", label="copies", parts=(30.0, 10.0)),
            Stack(group="2 ranks", label="ZeRO 3", parts=(15.0, 5.0)),
        )
    )
    (x, y, held), (above_x, above_y, more), (other_x, _, other), _ = bars
    assert held == pytest.approx(3 * more, rel=0.01) and held == pytest.approx(2 * other, rel=0.01)
    assert (above_x, above_y + more) == (x, pytest.approx(y, abs=0.2))
    assert other_x > x


def test_every_bar_and_group_has_its_name_and_every_total_its_number() -> None:
    figure = drawn(
        Stack(group="4 ranks", label="ZeRO 1", parts=(3.0, 1.0)),
        Stack(group="4 ranks", label="ZeRO 2", parts=(2.0, 0.5)),
    )
    words = [text.text for text in figure.iter(f"{SVG}text")]
    assert {"a < b", "ZeRO 1", "ZeRO 2", "held", "more", "4", "2.5", "4 MB"} <= set(words)
    assert words.count("4 ranks") == 1


@pytest.mark.parametrize(("value", "ceiling"), [(1.0, 1), (93.97, 100), (128, 150), (0.21, 0.25)])
def test_a_scale_ends_with_a_round_number_above_the_highest_bar(
    value: float, ceiling: float
) -> None:
    assert nice_ceiling(value) == pytest.approx(ceiling)


def test_the_figure_in_the_docs_is_drawn_from_the_results_beside_it() -> None:
    """Run 'python -m benchmarks.island.memory RESULTS FIGURE' after either has changed."""
    rows = rows_of(DOCS / "results" / "island-memory.jsonl")
    assert len(rows) == 12
    assert (DOCS / "figures" / "island-memory.svg").read_text() == drawn_memory(rows)


def test_the_table_of_a_gpu_in_the_docs_is_what_was_measured() -> None:
    section = (DOCS / "performance.md").read_text().partition("## An island on a GPU")[2]
    rows = [
        row for row in read_rows(DOCS / "results" / "island-gpu.jsonl") if row["part"] == "speed"
    ]
    lines = [line for line in section.splitlines() if line.startswith(("| 164", "| 85"))]
    for row, line in zip(rows, lines, strict=True):
        ratio = row["training_time_ratio"]
        assert f"| {row['parameters']:,} |" in line
        assert f"× {ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})" in line
        assert line.endswith(f"| {row['loop_tokens_per_second']:,.0f} |")
    (copies,) = [
        row for row in read_rows(DOCS / "results" / "island-gpu.jsonl") if row["part"] == "copies"
    ]
    words = " ".join(section.split())
    assert (
        f"{copies['adopt_gb_per_second']['median']:.1f} GB/s to adopt and "
        f"{copies['publish_gb_per_second']['median']:.1f} GB/s to publish"
    ) in words
    whole = next(row["time_ratio"] for row in rows if row["parameters"] == 85_150_464)
    assert f"× {whole['median']:.3f} ({whole['low']:.3f} to {whole['high']:.3f})" in words


def test_the_table_of_larger_models_in_the_docs_is_what_was_measured() -> None:
    section = (DOCS / "results" / "tables.md").read_text().partition("## Of 5 and 20 million")[2]
    lines = [line for line in section.partition("## ")[0].splitlines() if "%" in line]
    told = [line.split(" | ", 1)[1].strip("| ") for line in lines if line.startswith("| ")]
    tables = list(report_larger(known_in(DOCS / "results" / "larger-models.jsonl")))
    measured = [line for table in tables for line in table.splitlines() if line.startswith("| ")]
    rows = [line.strip("| ").split(" | ") for line in measured if "%" in line]
    assert sorted(told) == sorted(" | ".join([*cells[:7], *cells[8:]]) for cells in rows)


def test_how_much_sooner_several_nodes_are_is_told_as_it_was_measured() -> None:
    section = (DOCS / "learning.md").read_text().partition("## Sooner than one")[2]
    section = section.partition("\n## ")[0]
    (table,) = report_together(known_tries(DOCS / "results" / "together.jsonl"))
    title, _, rows = table.partition("\n\n")
    assert rows in section
    loss = title.rpartition(" ")[2]
    assert f"held-out loss of {loss}" in " ".join(section.split())


def test_the_frontier_in_the_docs_is_drawn_from_the_results_beside_it() -> None:
    """Run 'python -m benchmarks.convergence --report --figure FIGURE' after either has changed."""
    points = frontier(read_rows(DOCS / "results" / "convergence.jsonl"))
    assert (DOCS / "figures" / "frontier.svg").read_text() == frontier_drawn(points)


def test_the_curve_of_codecs_in_the_docs_is_drawn_from_the_results_beside_it() -> None:
    """Run 'python -m benchmarks.convergence --report --bits-figure FIGURE' after either has changed."""
    costs = costs_of(read_rows(DOCS / "results" / "convergence.jsonl"))
    assert (DOCS / "figures" / "codec-bits.svg").read_text() == drawn_bits(costs)


def test_exchanges_of_many_nodes_in_the_docs_are_drawn_from_the_results_beside_them() -> None:
    """Run 'python -m benchmarks.exchange --report RESULTS … --figure FIGURE' after either has changed."""
    rows = read_rows(DOCS / "results" / "exchange-nodes.jsonl")
    assert (DOCS / "figures" / "exchange-nodes.svg").read_text() == drawn_exchange(rows)


@pytest.mark.parametrize("parts", [(1.0,), (1.0, 2.0, 3.0), (1.0, -0.1)])
def test_bars_that_cannot_be_drawn_are_refused(parts: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=re.compile("each bar needs 2 parts|below zero")):
        drawn(Stack(group="g", label="l", parts=parts))


def point(**changed: float) -> Point:
    given = {"x": 10.0, "y": 2.0, "low": 1.0, "high": 3.0} | changed
    return Point(series="int4", label=f"at {given['x']:g}", **given)


def marks_of(*points: Point) -> list[tuple[float, float]]:
    figure = ElementTree.fromstring(
        scattered(title="loss", across="times fewer bytes", upward="%", points=points)
    )
    return [
        (float(c.get("cx", "nan")), float(c.get("cy", "nan"))) for c in figure.iter(f"{SVG}circle")
    ]


def test_ten_times_as_much_is_always_as_far_along_and_more_is_higher_up() -> None:
    (x1, _), (x2, low), (x3, high) = marks_of(
        point(x=1.0), point(x=10.0, y=1.0, low=1.0), point(x=100.0, y=3.0)
    )
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2)
    assert high < low  # SVG counts from the top


def test_a_point_below_zero_has_room() -> None:
    (_, y), (_, below) = marks_of(point(), point(y=-1.0, low=-2.0))
    assert y < below < 380 - 56  # the axis


def test_a_logarithmic_axis_refuses_zero() -> None:
    with pytest.raises(ValueError, match="at or below zero"):
        marks_of(point(x=0.0))


def test_names_of_marks_that_lie_close_do_not_lie_on_each_other() -> None:
    def near(label: str, x: float) -> Point:
        return Point(series="s", label=label, x=x, y=1.0, low=1.0, high=1.0)

    text = scattered(
        title="t", across="a", upward="%", points=[near("one", 500.0), near("other", 510.0)]
    )
    figure = ElementTree.fromstring(text)
    placed = {t.text: t for t in figure.iter(f"{SVG}text")}
    one, other = placed["one"], placed["other"]
    assert one.get("text-anchor") == other.get("text-anchor") == "start"
    assert float(other.get("y", "nan")) - float(one.get("y", "nan")) == pytest.approx(20)
