"""Which lines of docs/results/wan.jsonl belong together, and the figure of them. Pure.

A run is what one command measured, or several right after each other: lines of one case that follow
each other, each contender and each variant of one once. The newest one counts, so contenders of other
days, which met another Atoll and another machine, do not get into it.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from benchmarks.figures import Curve, curves
from benchmarks.wan.peers.contender import VARIANT_MARK
from benchmarks.wan.report import Measured, Point, best_variants, target_of

SHOWN_ABOVE_TARGET = 1.0
"""Nats per byte. All fall through what is above that in seconds, and it would flatten the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What tells one case from another. Not how often it was saved, nor how losses were evaluated."""

    num_nodes: int
    mbit: float
    up_share: float
    round_trip_ms: float
    step_seconds: float
    seconds: float
    most_steps: int | None
    inner_steps: int  # between exchanges, where a variant's name says no other number
    outer: tuple[float, float]  # rate and momentum
    model: str
    seed: int

    @classmethod
    def of(cls, line: dict[str, Any]) -> "Chosen":
        """The case of a line of results."""
        tables = line["tables"]
        known = {field.name: line[field.name] for field in fields(cls) if field.name in line}
        return cls(
            inner_steps=tables["inner"]["steps"],
            outer=(tables["outer"]["learning_rate"], tables["outer"]["momentum"]),
            seed=tables["run"]["seed"],
            **known,
        )

    def title(self) -> str:
        """For a table: what tells the links of docs apart."""
        up = "" if self.up_share == 1 else f", uplinks {self.mbit * self.up_share:g}"
        seed = f", seed {self.seed}" if self.seed else ""
        return f"{self.mbit:g} Mbit/s{up}, {self.round_trip_ms:g} ms{seed}"

    def words(self, or_variants: str = "") -> str:
        """For a title."""
        rate = f"{self.mbit:g} Mbit/s" if self.mbit else "links without a limit"
        up = "" if self.up_share == 1 else f", uplinks {self.mbit * self.up_share:g} Mbit/s"
        return (
            f"{self.num_nodes} nodes, {rate}{up}, round trip {self.round_trip_ms:g} ms, "
            f"steps of {self.step_seconds:g} s, {self.inner_steps}{or_variants} between exchanges, "
            f"outer {self.outer[0]:g} with {self.outer[1]:g}, seed {self.seed}"
        )


def newest_run(
    lines: Iterable[dict[str, Any]], chosen: Chosen, names: Collection[str] | None = None
) -> list[Measured]:
    """The rows of the newest run of this case, all or those with these names; empty: none ran."""
    run: dict[str, dict[str, Any]] = {}
    is_over = False
    for line in lines:
        if Chosen.of(line) != chosen:
            is_over = True
            continue
        if is_over or line["name"] in run:
            run, is_over = {}, False
        run[line["name"]] = line
    return [measured_of(line) for name, line in run.items() if names is None or name in names]


def measured_of(line: dict[str, Any]) -> Measured:
    """A line of results as a row of the table again."""
    known = {field.name for field in fields(Measured)} & line.keys()
    points = tuple(Point(**point) for point in line["points"])
    return Measured(**{key: line[key] for key in known} | {"points": points})


def drawn(rows: Sequence[Measured], chosen: Chosen, target: float | None = None) -> str:
    """Held-out loss over seconds, a line for the best variant of each contender that has trained."""
    target = target_of(rows) if target is None else target
    if target is None:
        raise ValueError("nobody has trained: there is nothing to draw")
    best = best_variants(rows, target)
    or_variants = f" or {VARIANT_MARK}N" if any(row.is_variant for row in best) else ""
    return curves(
        title=chosen.words(or_variants),
        across="seconds since the first inner step",
        upward="held-out loss, nats per byte",
        lines=[
            Curve(name=row.name, points=tuple((point.seconds, point.loss) for point in row.points))
            for row in sorted(best, key=lambda row: not row.is_atoll)
        ],
        highest=target + SHOWN_ABOVE_TARGET,
        level=(target, f"{target:.3f}, the loss to reach"),
    )
