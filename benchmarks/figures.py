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


def scattered(*, title: str, across: str, upward: str, points: Sequence[Point]) -> str:
    """Points over a logarithmic axis, in one colour for each series."""
    if any(point.x <= 0 for point in points):
        raise ValueError("a logarithmic axis has nothing at or below zero")
    names = list(dict.fromkeys(point.series for point in points))
    left = math.floor(math.log10(min(point.x for point in points)))
    right = max(left + 1, math.ceil(math.log10(max(point.x for point in points))))
    lowest = min(0.0, *(point.low for point in points))
    top = nice_ceiling(max(point.high for point in points))
    bottom = -nice_ceiling(-lowest) if lowest < 0 else 0.0

    def place(x: float, y: float) -> tuple[float, float]:
        along = (math.log10(x) - left) / (right - left)
        up = (y - bottom) / (top - bottom)
        width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
        return _LEFT + width * along, _HEIGHT - _BOTTOM - height * up

    lines = [*_frame(title), *_scale(top, upward, bottom), *_legend(names)]
    for power in range(left, right + 1):
        x, y = place(10.0**power, bottom)
        lines.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{y:.1f}" stroke="#dddddd"/>')
        lines.append(_text(x, y + 16, f"{10**power:,}" if power >= 0 else f"{10.0**power:g}"))
    lines.append(_text(_WIDTH / 2, _HEIGHT - 12, across))
    taken: list[_Box] = []
    for point in points:
        colour = COLOURS[names.index(point.series) % len(COLOURS)]
        (x, y), (_, high), (_, low) = (
            place(point.x, value) for value in (point.y, point.high, point.low)
        )
        lines.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{high:.1f}" y2="{low:.1f}" stroke="{colour}"/>'
        )
        lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
        lines.append(_beside(x, y, point.label, taken))
    return "\n".join([*lines, "</svg>", ""])


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


def _frame(title: str) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" style="{_STYLE}">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        _text(_WIDTH / 2, 20, title, bold=True),
    ]


def _scale(top: float, unit: str, bottom: float = 0.0) -> list[str]:
    lines = []
    for i in range(6):
        y = _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * i / 5
        lines.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>'
        )
        lines.append(
            _text(_LEFT - 6, y + 4, f"{bottom + (top - bottom) * i / 5:.4g} {unit}", anchor="end")
        )
    return lines


def _legend(names: Sequence[str]) -> list[str]:
    lines = []
    x = float(_LEFT)
    for colour, name in zip(itertools.cycle(COLOURS), names, strict=False):
        lines.append(f'<rect x="{x:.1f}" y="34" width="12" height="12" fill="{colour}"/>')
        lines.append(_text(x + 18, 44, name, anchor="start"))
        x += 40 + 7 * len(name)
    return lines


def _text(x: float, y: float, words: str, *, anchor: str = "middle", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{escape(words)}</text>'
