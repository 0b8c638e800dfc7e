"""Times to a loss and the table of benchmarks/wan."""

from dataclasses import replace

import pytest

from benchmarks.wan.report import (
    COLUMNS,
    Measured,
    Point,
    as_markdown,
    best_variants,
    cells_of,
    quickest,
    reached,
    target_of,
    verdict,
)


def points(*pairs: tuple[float, float]) -> tuple[Point, ...]:
    """Evaluations as (seconds, loss): ten steps and a thousand bytes in each second."""
    return tuple(
        Point(
            seconds=seconds,
            inner_steps=round(10 * seconds),
            tokens=round(1000 * seconds),
            sent_bytes=round(1000 * seconds),
            loss=loss,
        )
        for seconds, loss in pairs
    )


def row(name: str, *pairs: tuple[float, float], is_atoll: bool = False) -> Measured:
    return Measured(
        name=name, words="words", is_atoll=is_atoll, points=points(*pairs), step_seconds=0.05
    )


def test_a_loss_is_reached_on_the_line_between_two_evaluations() -> None:
    found = reached(points((0, 5.0), (10, 3.0), (20, 2.0)), target=2.25)
    assert found is not None
    assert found.seconds == pytest.approx(17.5)
    assert found.sent_bytes == pytest.approx(17_500)


def test_the_first_crossing_counts_though_the_loss_rises_again() -> None:
    found = reached(points((0, 5.0), (10, 3.0), (20, 4.0), (30, 1.0)), target=3.0)
    assert found is not None
    assert found.seconds == pytest.approx(10)


def test_a_loss_that_nobody_came_to_is_not_reached() -> None:
    assert reached(points((0, 5.0), (10, 3.0)), target=2.9) is None
    assert reached((), target=2.9) is None


def test_the_loss_to_reach_is_the_lowest_that_a_peer_ends_with() -> None:
    rows = [
        row("ours", (0, 5.0), (10, 1.0), is_atoll=True),
        row("slow", (0, 5.0), (10, 4.0)),
        row("quick", (0, 5.0), (5, 2.5), (10, 3.0)),
    ]
    assert target_of(rows) == 3.0
    assert target_of(rows[:1]) == 1.0
    assert target_of([]) is None


def test_ratios_are_over_the_quickest_peer_and_never_over_ourselves() -> None:
    rows = [
        row("ours", (0, 5.0), (10, 1.0), is_atoll=True),
        row("one", (0, 5.0), (10, 3.0)),
        row("other", (0, 5.0), (20, 1.0)),
    ]
    found = quickest(rows, 3.0, is_atoll=False)
    assert found is not None and found[1] == pytest.approx(10)
    ours, one, other = cells_of(rows, 3.0)
    assert ours[1:3] == ("5.0 s", "× 2.00")
    assert one[1:3] == ("10.0 s", "× 1.00")
    assert other[1:3] == ("10.0 s", "× 1.00")


VARIANTS = [
    row("ours@5", (0, 5.0), (10, 2.0), is_atoll=True),
    row("ours@3", (0, 5.0), (8, 2.0), (10, 1.9), is_atoll=True),
    row("peer@5", (0, 5.0), (18, 3.0)),
    row("peer@20", (0, 5.0), (30, 2.0)),
    row("other", (0, 5.0), (20, 4.0)),
    Measured(name="gone@20", words="words", is_atoll=False, trouble="did not start"),
]


def test_the_loss_to_reach_and_the_quickest_are_those_of_the_best_variant() -> None:
    assert target_of(VARIANTS) == 2.0
    assert verdict(VARIANTS, 2.0) == (
        "to 2.000: ours@3 in 8.0 s, the quickest peer, peer@20, in 30.0 s: × 3.75"
    )
    assert [cells[2] for cells in cells_of(VARIANTS, 2.0)[:4]] == ["× 3.00", "× 3.75", "", "× 1.00"]


def test_nobody_is_quicker_where_one_side_is_missing_or_never_came_there() -> None:
    assert verdict(VARIANTS, 1.95) == ""
    assert verdict(VARIANTS[:2], 2.0) == ""
    assert verdict([], None) == ""


def test_of_each_contenders_variants_the_first_at_the_loss_is_best_else_the_lowest() -> None:
    assert [r.name for r in best_variants(VARIANTS, 2.0)] == ["ours@3", "peer@20", "other"]
    assert [r.name for r in best_variants(VARIANTS, 3.0)] == ["ours@3", "peer@5", "other"]
    assert [r.name for r in best_variants(VARIANTS, 0.5)] == ["ours@3", "peer@20", "other"]


def test_computing_is_steps_by_their_set_length() -> None:
    paced = row("one", (0, 5.0), (10, 3.0))
    assert paced.utilisation == pytest.approx(100 * 0.05 / 10)
    assert replace(paced, step_seconds=0.0).utilisation is None


def test_a_contender_without_figures_has_a_row_that_says_so() -> None:
    missing = Measured(name="gone", words="a peer", is_atoll=False, trouble="not installed: …")
    (cells,) = cells_of([missing], 3.0)
    assert len(cells) == len(COLUMNS)
    assert cells[:2] == ("gone: a peer", "no figures")
    assert target_of([missing]) is None


def test_in_the_table_for_docs_who_is_first_to_the_loss_comes_first() -> None:
    missing = Measured(name="gone", words="a peer", is_atoll=False, trouble="not installed: …")
    rows = [
        missing,
        row("high", (0, 5.0), (10, 3.0)),
        row("peer", (0, 5.0), (10, 2.0)),
        row("low", (0, 5.0), (10, 2.5)),
        row("ours@3", (0, 5.0), (5, 2.0), is_atoll=True),
        row("ours@2", (0, 5.0), (4, 2.0), is_atoll=True),
    ]
    head, line, *body = as_markdown(rows, 2.0, of="10 Mbit/s").splitlines()
    assert head.startswith("| 10 Mbit/s | to the loss, 2.000 | of the best peer |")
    assert {text.count("|") for text in (head, line, *body)} == {
        len(COLUMNS)
    }  # tokens/s is left out
    assert [text.split("`")[1] for text in body] == [
        "ours@2",
        "ours@3",
        "peer",
        "low",
        "high",
        "gone",
    ]
    assert "| **× 2.50** |" in body[0]
    assert "| × 2.00 |" in body[1]
    assert "not reached" in body[3]
    assert "no figures" in body[5]
