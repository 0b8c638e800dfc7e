"""Figures of the docs, drawn from results as SVG. Nothing here measures.

Pure text, so that a figure changes only when its data does, and needs no library. Colours are told
apart without colour vision (Okabe and Ito, 2008).
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cccccc", "#d55e00", "#56b4e9")

_WIDTH, _HEIGHT = 760, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 64, 56
_NAMES_WIDTH = 170  # to the right of curves
_LINE = 13.0  # from one name to the next below it
_STYLE = "font-family: sans-serif; font-size: 12px"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One bar, from the bottom up."""

    group: str  # bars of a group stand together, with its name below
    label: str
    parts: tuple[float, ...]


def stacked_bars(*, title: str, unit: str, names: Sequence[str], stacks: Sequence[Stack]) -> str:
    """Bars in groups; each bar has one part for each of `names`."""
    if any(len(stack.parts) != len(names) for stack in stacks):
        raise ValueError(f"each bar needs {len(names)} parts: {', '.join(names)}")
    if any(part < 0 for stack in stacks for part in stack.parts):
        raise ValueError("a bar has no part below zero")
    top = nice_ceiling(max(sum(stack.parts) for stack in stacks))
    height = _HEIGHT - _TOP - _BOTTOM
    groups = [list(some) for _, some in itertools.groupby(stacks, key=lambda stack: stack.group)]
    slot = (_WIDTH - _LEFT - _RIGHT) / (len(stacks) + len(groups))
    lines = [*_frame(title), *_scale(top, unit), *_legend(names)]
    x = _LEFT + slot / 2
    for group in groups:
        for stack in group:
            floor = float(_HEIGHT - _BOTTOM)
            for colour, part in zip(itertools.cycle(COLOURS), stack.parts, strict=False):
                size = height * part / top
                floor -= size
                lines.append(
                    f'<rect x="{x + slot * 0.1:.1f}" y="{floor:.1f}" width="{slot * 0.8:.1f}" '
                    f'height="{size:.1f}" fill="{colour}"/>'
                )
            middle = x + slot / 2
            lines.append(_text(middle, floor - 5, f"{sum(stack.parts):.3g}"))
            lines.append(_text(middle, _HEIGHT - _BOTTOM + 16, stack.label))
            x += slot
        lines.append(
            _text(x - slot * len(group) / 2, _HEIGHT - _BOTTOM + 38, group[0].group, bold=True)
        )
        x += slot
    return "\n".join([*lines, "</svg>", ""])


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One mark with its name beside it, and a line from `low` to `high` through it."""

    series: str
    label: str
    x: float
    y: float
    low: float
    high: float


def scattered(
    *,
    title: str,
    across: str,
    upward: str,
    points: Sequence[Point],
    level: tuple[float, str] | None = None,
    is_joined: bool = False,
    is_apart: bool = False,
    highest: float = math.inf,
) -> str:
    """Points over a logarithmic axis, in one colour for each series.

    A `level` is a dashed line with its name. `is_joined`: a line through the points of a series, in
    their order. `is_apart`: series stand side by side where they have points at the same place. What is
    above `highest` stands at the upper edge, as an arrow with its number.
    """
    if any(point.x <= 0 for point in points):
        raise ValueError("a logarithmic axis has nothing at or below zero")
    names = list(dict.fromkeys(point.series for point in points))
    least, most = min(point.x for point in points), max(point.x for point in points)
    left: float = math.floor(math.log10(least))
    right: float = max(left + 1, math.ceil(math.log10(most)))
    ticks = [10.0**power for power in range(int(left), int(right) + 1)]
    if is_apart:  # marks beside the first and last places want room
        left, right = math.log10(least / _ROOM), math.log10(most * _ROOM)
        parts = [part * tick for tick in ticks for part in (1, 2, 5)]
        ticks = [tick for tick in parts if 10**left <= tick <= 10**right]
    within = [point for point in points if point.y <= highest]
    lowest = min(0.0, *(point.low for point in points))
    highest_bar = max(point.high for point in within)
    bottom, top = (0.0, nice_ceiling(highest_bar))
    if lowest < 0:
        bottom, top = nice_range(lowest, highest_bar)

    def place(x: float, y: float) -> tuple[float, float]:
        along = (math.log10(x) - left) / (right - left)
        up = (y - bottom) / (top - bottom)
        width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
        return _LEFT + width * along, _HEIGHT - _BOTTOM - height * up

    lines = [*_frame(title), *_scale(top, upward, bottom), *_legend(names)]
    for tick in ticks:
        x, y = place(tick, bottom)
        lines.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{y:.1f}" stroke="#dddddd"/>')
        lines.append(_text(x, y + 16, f"{tick:,.0f}" if tick >= 1 else f"{tick:g}"))
    lines.append(_text(_WIDTH / 2, _HEIGHT - 12, across))
    if level is not None:
        lines += _level(place(10.0**left, level[0])[1], level[1], _WIDTH - _RIGHT)

    def shift(point: Point) -> float:
        return _SERIES_APART * (names.index(point.series) - (len(names) - 1) / 2) * is_apart

    if is_joined:
        for name in names:
            joined = [
                (x + shift(point), y)
                for point in within
                if point.series == name
                for x, y in (place(point.x, point.y),)
            ]
            lines.append(_polyline(joined, _colour(names.index(name))))
    taken: list[_Box] = []
    for point in points:
        colour = _colour(names.index(point.series))
        if point.y > highest:
            x = place(point.x, top)[0] + shift(point)
            lines.append(f'<path d="M{x - 4:.1f} {_TOP + 8} h8 l-4 -8 z" fill="{colour}"/>')
            lines.append(_beside(x, _TOP + 8, f"{point.label} {point.y:+.2f}", taken))
            continue
        (x, y), (_, high), (_, low) = (
            place(point.x, value) for value in (point.y, point.high, point.low)
        )
        x += shift(point)
        lines.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{high:.1f}" y2="{low:.1f}" stroke="{colour}"/>'
        )
        lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
        lines.append(_beside(x, y, point.label, taken))
    return "\n".join([*lines, "</svg>", ""])


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line through its points, with its name at its end."""

    name: str
    points: tuple[tuple[float, float], ...]  # x and y, from the left to the right


def curves(
    *,
    title: str,
    across: str,
    upward: str,
    lines: Sequence[Curve],
    highest: float = math.inf,
    level: tuple[float, str] | None = None,
) -> str:
    """Lines over linear axes, the horizontal one from zero. What is above `highest` is cut off.

    A `level` is a dashed line with its name.
    """
    if not all(line.points for line in lines):
        raise ValueError("a curve needs at least one point")
    end = nice_ceiling(max(x for line in lines for x, _ in line.points))
    heights = [y for line in lines for _, y in line.points]
    bottom, top = nice_range(min(heights), min(highest, max(heights)))
    past = _WIDTH - _NAMES_WIDTH

    def place(x: float, y: float) -> tuple[float, float]:
        height = _HEIGHT - _TOP - _BOTTOM
        return (
            _LEFT + (past - _LEFT) * x / end,
            _HEIGHT - _BOTTOM - height * (y - bottom) / (top - bottom),
        )

    drawn = [*_frame(title), *_scale(top, "", bottom, right=_NAMES_WIDTH)]
    drawn.append(_text(_LEFT, _TOP - 10, upward, anchor="start"))
    for i in range(6):
        x, y = place(end * i / 5, bottom)
        drawn.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{y:.1f}" stroke="#dddddd"/>')
        drawn.append(_text(x, y + 16, f"{end * i / 5:.4g}"))
    drawn.append(_text((_LEFT + past) / 2, _HEIGHT - 12, across))
    drawn.append(
        f'<clipPath id="inside"><rect x="{_LEFT}" y="{_TOP}" width="{past - _LEFT + 1}" '
        f'height="{_HEIGHT - _TOP - _BOTTOM + 1}"/></clipPath>'
    )
    if level is not None:
        drawn += _level(place(0, level[0])[1], level[1], past)
    ends = [place(*line.points[-1]) for line in lines]
    beside = spread([max(y, float(_TOP)) for _, y in ends], _LINE)
    for number, (line, (x, y), name_y) in enumerate(zip(lines, ends, beside, strict=True)):
        colour = _colour(number)
        dashes = ' stroke-dasharray="6 3"' if number >= len(COLOURS) else ""
        placed = [place(*point) for point in line.points]
        drawn.append(_polyline(placed, colour, f'{dashes} clip-path="url(#inside)"'))
        drawn.append(
            f'<line x1="{x:.1f}" y1="{max(y, float(_TOP)):.1f}" x2="{past + 10}" y2="{name_y:.1f}" '
            f'stroke="{colour}" stroke-width="0.5"/>'
        )
        drawn.append(_text(past + 14, name_y + 4, line.name, anchor="start"))
    return "\n".join([*drawn, "</svg>", ""])


def spread(places: Sequence[float], least: float) -> list[float]:
    """The same places, moved downwards or upwards until no two are closer than `least`.

    In the same order, and those that lie close around the middle of where they were.
    """
    order = sorted(range(len(places)), key=places.__getitem__)
    heaps: list[list[int]] = []
    for index in order:
        heaps.append([index])
        while len(heaps) > 1 and _top_of(heaps[-1], places, least) < (
            _top_of(heaps[-2], places, least) + least * len(heaps[-2])
        ):
            last = heaps.pop()
            heaps[-1] += last
    moved = [0.0] * len(places)
    for heap in heaps:
        top = _top_of(heap, places, least)
        for position, index in enumerate(heap):
            moved[index] = top + least * position
    return moved


def _top_of(heap: Sequence[int], places: Sequence[float], least: float) -> float:
    """Where the first of a heap goes so that the heap's middle is that of its places."""
    middle = sum(places[index] for index in heap) / len(heap)
    return middle - least * (len(heap) - 1) / 2


_SERIES_APART = 14.0
_ROOM = 1.4  # times as far along as the last place

_Box = tuple[float, float, float, float]
"""Left, top, right and bottom."""


def _beside(x: float, y: float, label: str, taken: list[_Box]) -> str:
    """A mark's name where no other one stands, if there is such a place; adds it to those."""
    width = 6.5 * len(label)  # of this font, about
    places = [(side, x + 7 * side, y + down) for side in (1, -1) for down in (-5, 15)]
    boxes = [
        (start - width * (side < 0), base - 11, start + width * (side > 0), base + 3)
        for side, start, base in places
    ]
    free = (i for i, box in enumerate(boxes) if not any(_meet(box, other) for other in taken))
    chosen = next(free, 0)
    taken.append(boxes[chosen])
    side, start, base = places[chosen]
    return _text(start, base, label, anchor="start" if side > 0 else "end")


def _meet(one: _Box, other: _Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def nice_ceiling(value: float) -> float:
    """The next number that a scale of five parts can end with."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(
        step * power for step in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if step * power >= value
    )


def nice_range(low: float, high: float) -> tuple[float, float]:
    """Ends of a scale of five parts that has both in it."""
    step = nice_ceiling((high - low) / 5 or abs(high) / 5 or 1.0)
    while True:
        bottom = math.floor(low / step + 1e-9) * step  # not one lower for a rounding error
        if bottom + 5 * step >= high:
            return bottom, bottom + 5 * step
        step = nice_ceiling(1.01 * step)


def _frame(title: str) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" style="{_STYLE}">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        _text(_WIDTH / 2, 20, title, bold=True),
    ]


def _scale(top: float, unit: str, bottom: float = 0.0, *, right: int = _RIGHT) -> list[str]:
    lines = []
    for i in range(6):
        y = _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * i / 5
        lines.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>'
        )
        lines.append(
            _text(
                _LEFT - 6,
                y + 4,
                f"{bottom + (top - bottom) * i / 5:.4g} {unit}".strip(),
                anchor="end",
            )
        )
    return lines


def _legend(names: Sequence[str]) -> list[str]:
    lines = []
    x, y = float(_LEFT), 34
    for colour, name in zip(itertools.cycle(COLOURS), names, strict=False):
        width = 40 + 7 * len(name)
        if x > _LEFT and x + width > _WIDTH:
            x, y = float(_LEFT), y + 16
        lines.append(f'<rect x="{x:.1f}" y="{y}" width="12" height="12" fill="{colour}"/>')
        lines.append(_text(x + 18, y + 10, name, anchor="start"))
        x += width
    return lines


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _polyline(places: Sequence[tuple[float, float]], colour: str, more: str = "") -> str:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"{more}/>'


def _level(y: float, name: str, right: int) -> list[str]:
    return [
        f'<line x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#555555" '
        'stroke-dasharray="3 3"/>',
        _text(_LEFT + 4, y - 4, name, anchor="start"),
    ]


def _text(x: float, y: float, words: str, *, anchor: str = "middle", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{escape(words)}</text>'
