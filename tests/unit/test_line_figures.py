"""Curves, levels, and series joined by lines: what the figures of benchmarks are drawn with."""

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from benchmarks.figures import Curve, Point, curves, nice_range, scattered, spread

SVG = "{http://www.w3.org/2000/svg}"


def curve(name: str, *points: tuple[float, float]) -> Curve:
    return Curve(name=name, points=points)


def figure(*lines: Curve, **more: object) -> ElementTree.Element:
    text = curves(title="t", across="seconds", upward="loss", lines=lines, **more)  # type: ignore[arg-type]
    return ElementTree.fromstring(text)


def lines_of(drawing: ElementTree.Element) -> list[list[tuple[float, float]]]:
    return [
        [tuple(map(float, pair.split(","))) for pair in (line.get("points") or "").split()]  # type: ignore[misc]
        for line in drawing.iter(f"{SVG}polyline")
    ]


def words_of(drawing: ElementTree.Element) -> dict[str, ElementTree.Element]:
    return {text.text or "": text for text in drawing.iter(f"{SVG}text")}


def test_a_curve_goes_as_far_in_as_much_time_and_down_with_the_loss() -> None:
    (line,) = lines_of(figure(curve("a", (0, 5.0), (10, 4.0), (20, 3.0), (60, 2.0))))
    (x0, y0), (x1, y1), (x2, y2), (x3, y3) = line
    assert x2 - x1 == pytest.approx(x1 - x0, abs=0.2)
    assert x3 - x2 == pytest.approx(4 * (x1 - x0), abs=0.5)
    assert y1 - y0 == pytest.approx(y2 - y1, abs=0.2) and y3 > y2 > y1  # SVG counts from the top


def test_every_curve_has_its_name_at_its_end_and_no_two_names_lie_on_each_other() -> None:
    names = [f"contender-{number}" for number in range(9)]
    drawing = figure(
        *(curve(name, (0, 5.0), (50, 2.5 + 0.001 * i)) for i, name in enumerate(names))
    )
    heights = [float(words_of(drawing)[name].get("y", "nan")) for name in names]
    assert all(abs(one - other) >= 12.9 for one, other in pairwise(sorted(heights)))
    assert sorted(heights, reverse=True) == heights  # in the order of their ends
    assert len({float(words_of(drawing)[name].get("x", "nan")) for name in names}) == 1


def test_with_more_curves_than_colours_the_others_are_dashed() -> None:
    drawing = figure(*(curve(f"c{i}", (0, 5.0), (50, 3.0 + i)) for i in range(8)))
    looks = [
        (line.get("stroke"), line.get("stroke-dasharray"))
        for line in drawing.iter(f"{SVG}polyline")
    ]
    assert len(set(looks)) == 8


def test_what_is_above_the_highest_is_cut_off_and_the_rest_has_the_room() -> None:
    points = ((0.0, 9.0), (10.0, 3.0), (20.0, 2.0))
    (whole,) = lines_of(figure(curve("a", *points)))
    (cut,) = lines_of(figure(curve("a", *points), highest=3.0))
    assert cut[2][1] - cut[1][1] > 3 * (whole[2][1] - whole[1][1])
    assert cut[0][1] < 64  # above the frame, where the clip path ends it
    assert 'clip-path="url(#inside)"' in curves(
        title="t", across="x", upward="y", lines=[curve("a", *points)]
    )


def test_a_level_is_a_dashed_line_where_its_value_is() -> None:
    drawing = figure(
        curve("a", (0, 4.0), (10, 2.0)), curve("b", (0, 4.0), (10, 3.0)), level=(3.0, "aim")
    )
    (level,) = [r for r in drawing.iter(f"{SVG}line") if r.get("stroke-dasharray") == "3 3"]
    assert level.get("y1") == level.get("y2")
    assert float(level.get("y1", "nan")) == pytest.approx(lines_of(drawing)[1][1][1], abs=0.1)
    assert "aim" in words_of(drawing)


def test_a_curve_of_no_points_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one point"):
        figure(curve("a", (0, 1.0)), curve("b"))


@pytest.mark.parametrize(
    ("low", "high", "ends"),
    [
        (2.4, 3.76, (2.4, 3.9)),
        (0.0, 5.0, (0, 5)),
        (-0.02, 0.04, (-0.03, 0.045)),
        (3.0, 3.0, (3.0, 6.0)),
    ],
)
def test_a_scale_holds_what_it_must_in_five_round_parts(
    low: float, high: float, ends: tuple[float, float]
) -> None:
    assert nice_range(low, high) == pytest.approx(ends)


def test_places_that_are_far_apart_stay_and_close_ones_move_as_little_as_they_must() -> None:
    assert spread([10.0, 50.0, 90.0], 13) == [10.0, 50.0, 90.0]
    assert spread([50.0, 50.0], 10) == [45.0, 55.0]
    assert spread([90.0, 50.0, 52.0], 10) == [90.0, 46.0, 56.0]
    crowded = spread([30.0, 31.0, 32.0, 45.0], 10)
    assert all(later - earlier >= 10 - 1e-9 for earlier, later in pairwise(crowded))
    assert spread([], 10) == []


def point(series: str, x: float, y: float) -> Point:
    return Point(series=series, label=f"{series} {x:g}", x=x, y=y, low=y, high=y)


def marks(text: str) -> list[tuple[float, float]]:
    return [
        (float(c.get("cx", "nan")), float(c.get("cy", "nan")))
        for c in ElementTree.fromstring(text).iter(f"{SVG}circle")
    ]


POINTS = [point("a", 1, 1.0), point("a", 10, 2.0), point("b", 1, 3.0), point("b", 10, 4.0)]


def drawn(points: list[Point] = POINTS, **more: object) -> str:
    return scattered(title="t", across="x", upward="", points=points, **more)  # type: ignore[arg-type]


def test_a_joined_series_has_a_line_through_its_own_marks_only() -> None:
    text = drawn(is_joined=True)
    placed = marks(text)
    assert lines_of(ElementTree.fromstring(text)) == [placed[:2], placed[2:]]
    assert "polyline" not in drawn()


def test_series_that_stand_apart_do_not_hide_each_other() -> None:
    together, apart = marks(drawn()), marks(drawn(is_apart=True))
    assert together[0][0] == together[2][0]
    assert apart[2][0] - apart[0][0] > 8  # a mark's width
    assert apart[0][1] == together[0][1]  # and none of it is said of the value


def test_series_that_stand_apart_have_room_beside_the_first_and_the_last_place() -> None:
    text = drawn([point(series, x, 1.0) for series in "abcdef" for x in (1, 5)], is_apart=True)
    across = [x for x, _ in marks(text)]
    assert min(across) > 64 + 20 and max(across) < 760 - 16 - 20
    assert {"1", "2", "5"} <= set(words_of(ElementTree.fromstring(text)))


def test_what_is_far_above_the_rest_stands_at_the_edge_with_its_number() -> None:
    text = drawn([*POINTS, point("c", 3, 50.0)], highest=5.0, is_joined=True)
    assert len(marks(text)) == 4  # the others only, and with the room that they had
    assert marks(text) == marks(drawn(is_joined=True))
    assert "c 3 +50.00" in text and re.search(r'<path d="M[\d.]+ 72', text)


def test_marks_below_zero_lie_below_the_level_of_zero() -> None:
    text = drawn([point("a", 1, -0.02), point("a", 10, 0.03)], level=(0.0, "fp32"))
    (zero,) = [
        float(r.get("y1", "nan"))
        for r in ElementTree.fromstring(text).iter(f"{SVG}line")
        if r.get("stroke-dasharray") == "3 3"
    ]
    (_, below), (_, above) = marks(text)
    assert above < zero < below
