"""Tables of benchmarks.convergence: losses with their spread, differences between equal seeds, claims."""

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.convergence.claims import CLAIMS
from benchmarks.convergence.parts import PARTS
from benchmarks.convergence.settings import DATA_PARALLEL
from benchmarks.figures import Point, scattered


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Of two settings' losses over the seeds that both have."""

    mean: float
    error: float  # standard error of the mean; infinite with one seed

    @property
    def is_clear(self) -> bool:
        """Whether it is more than twice its error."""
        return abs(self.mean) > 2 * self.error

    def __str__(self) -> str:
        error = f" ± {self.error:.3f}" if math.isfinite(self.error) else ""
        return f"{self.mean:+.3f}{error}"


NEXT_TO_NOTHING = 0.01
"""Nats per byte: half a percent of a loss around 2."""


FRONTIERS = {
    "frontier": "1,600 steps",
    "muon": "1,600 steps, Muon",
    "long": "6,400 steps",
}
"""Parts that are drawn as loss against bytes, with the names of their runs."""


class Losses:
    """Losses by part, setting and seed."""

    def __init__(self, lines: Iterable[dict[str, Any]]) -> None:
        self._losses: dict[tuple[str, str], dict[int, float]] = {}
        self._bits: dict[tuple[str, str], tuple[float | None, float | None]] = {}
        for line in lines:
            key = (line["part"], line["setting"])
            self._losses.setdefault(key, {})[line["seed"]] = line["loss"]
            self._bits[key] = (line["bits_up"], line["bits_down"])

    def parts(self) -> list[str]:
        """Parts with results, in the order in which they came."""
        return list(dict.fromkeys(part for part, _ in self._losses))

    def difference(self, part: str, of: str, against: str) -> Difference | None:
        """Between two settings, by seed; None unless they have a seed in common."""
        left, right = self._losses.get((part, of), {}), self._losses.get((part, against), {})
        differences = [left[seed] - right[seed] for seed in sorted(left.keys() & right.keys())]
        if not differences:
            return None
        error = math.inf
        if len(differences) > 1:
            error = statistics.stdev(differences) / math.sqrt(len(differences))
        return Difference(mean=statistics.mean(differences), error=error)

    def table(self, part: str) -> list[str]:
        """A part as a Markdown table."""
        settings = [setting for known, setting in self._losses if known == part]
        shows_bits = len({self._bits[part, setting] for setting in settings}) > 1
        bits = " bits up / down |" if shows_bits else ""
        rows = [
            f"| {part} | loss | seeds |{bits} against the first |",
            f"|---|---|---|{'---|' if shows_bits else ''}---|",
        ]
        for setting in settings:
            losses = list(self._losses[part, setting].values())
            up, down = self._bits[part, setting]
            cells = [setting, f"{statistics.mean(losses):.3f}", str(len(losses))]
            if shows_bits:
                cells.append("" if up is None or down is None else f"{up:.2f} / {down:.2f}")
            against = self.difference(part, setting, settings[0])
            cells.append("" if setting == settings[0] or against is None else str(against))
            rows.append(f"| {' | '.join(cells)} |")
        return rows

    def claims(self) -> list[str]:
        """The published signs beside what was measured."""
        rows = ["| published | compared | measured | |", "|---|---|---|---|"]
        for claim in CLAIMS:
            found = self.difference(claim.part, claim.of, claim.against)
            if found is not None:
                compared = f"{claim.of}, against {claim.against}"
                rows.append(
                    f"| {claim.says} | {compared} | {found} | {verdict(claim.sign, found)} |"
                )
        return rows


def frontier(lines: Iterable[dict[str, Any]]) -> list[Point]:
    """Loss above data parallelism's, in percent, over how many times fewer bytes a node sends.

    Against a ring all-reduce of fp32 gradients at every inner step, payload bytes on both sides: that
    takes 2 (n - 1) / n of the 32 bits of each parameter at each step, an exchange (n - 1) / n of the
    bits up and of the bits down. Each part of FRONTIERS has its own data parallelism.
    """
    lines = list(lines)
    return [point for part in FRONTIERS for point in _points_of(part, lines)]


def _points_of(part: str, lines: Sequence[dict[str, Any]]) -> Iterator[Point]:
    steps = {setting.name: setting.tables["inner"]["steps"] for setting in PARTS[part]()}
    lines = [line for line in lines if line["part"] == part]
    baseline: dict[int, float] = {}
    for line in lines:  # the better of data parallelism's rates, where it has several
        if line["setting"].startswith(DATA_PARALLEL):
            baseline[line["seed"]] = min(line["loss"], baseline.get(line["seed"], math.inf))
    for setting in (name for name in steps if not name.startswith(DATA_PARALLEL)):
        runs = [run for run in lines if run["setting"] == setting and run["seed"] in baseline]
        if not runs:
            continue
        above = [100 * (run["loss"] / baseline[run["seed"]] - 1) for run in runs]
        bits = statistics.mean(run["bits_up"] + run["bits_down"] for run in runs)
        yield Point(
            series=FRONTIERS[part],
            label=setting,
            x=2 * 32 * steps[setting] / bits,
            y=statistics.mean(above),
            low=min(above),
            high=max(above),
        )


def frontier_table(points: Sequence[Point]) -> list[str]:
    """The points as a Markdown table."""
    rows = ["| run | codec both ways | times fewer bytes | loss above data parallel |"]
    rows.append("|---|---|---|---|")
    for p in points:
        spread = "" if p.low == p.high else f" ({p.low:+.2f} to {p.high:+.2f})"
        rows.append(f"| {p.series} | {p.label} | {p.x:,.0f} | {p.y:+.2f} %{spread} |")
    return rows


def frontier_drawn(points: Sequence[Point]) -> str:
    """The figure."""
    return scattered(
        title="Held-out loss against bytes: 4 nodes, beside data parallelism with equal tokens",
        across="times fewer bytes than a ring all-reduce of fp32 gradients at every inner step",
        upward="%",
        points=points,
    )


def verdict(sign: int, found: Difference) -> str:
    """Whether a difference has the published sign; 0 stands for nothing lost."""
    if sign == 0 and found.mean <= NEXT_TO_NOTHING:
        return "reproduced"
    if not math.isfinite(found.error):
        return "one seed only"
    if not found.is_clear:
        return "not clear"
    return "reproduced" if found.mean * sign > 0 else "**not reproduced**"
