"""Held-out loss over bits a value, from the part `bits` of benchmarks.convergence: table and figure.

Losses are compared with those of fp32 seed by seed: seeds differ from each other by more than most
codecs do.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.figures import Point, scattered

PART = "bits"
NOTHING_LOST = "fp32"

SERIES = {
    "integers in blocks, signs": ("int8", "int4", "int2", "sign"),
    "floats": ("bf16",),
    "entropy-coded": ("ec3", "ec2", "ec1"),
    "largest of each chunk": ("topk256", "topk64"),
}
"""From many bits to few."""

SHOWN = 0.15
"""Nats per byte more than fp32's loss; what ends further up would flatten the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one codec did to the loss, over the seeds that it shares with fp32."""

    codec: str
    series: str
    bits: float  # of a value, the mean of both ways
    more: tuple[float, ...]  # loss, less that of fp32 with the same seed

    @property
    def mean(self) -> float:
        return statistics.mean(self.more)

    @property
    def error(self) -> float:
        """Standard error of the mean; infinite with one seed."""
        if len(self.more) < 2:
            return math.inf
        return statistics.stdev(self.more) / math.sqrt(len(self.more))


def costs_of(lines: Iterable[dict[str, Any]]) -> list[Cost]:
    """Of every codec that has run, series by series."""
    runs = {
        (line["setting"], line["seed"]): line for line in lines if line["part"] == PART
    }  # of two runs with one seed the later one
    seeds = sorted(seed for codec, seed in runs if codec == NOTHING_LOST)
    costs = []
    for series, codecs in SERIES.items():
        for codec in codecs:
            shared = [seed for seed in seeds if (codec, seed) in runs]
            if not shared:
                continue
            of_codec = [runs[codec, seed] for seed in shared]
            costs.append(
                Cost(
                    codec=codec,
                    series=series,
                    bits=statistics.mean(
                        (run["bits_up"] + run["bits_down"]) / 2 for run in of_codec
                    ),
                    more=tuple(
                        run["loss"] - runs[NOTHING_LOST, run["seed"]]["loss"] for run in of_codec
                    ),
                )
            )
    return costs


def table(costs: Sequence[Cost]) -> list[str]:
    """As Markdown."""
    rows = ["| codec both ways | bits a value | loss above fp32's | seeds | least to most |"]
    rows.append("|---|---|---|---|---|")
    for cost in costs:
        error = f" ± {cost.error:.3f}" if math.isfinite(cost.error) else ""
        rows.append(
            f"| {cost.codec} | {cost.bits:.2f} | {cost.mean:+.3f}{error} | {len(cost.more)} "
            f"| {min(cost.more):+.3f} to {max(cost.more):+.3f} |"
        )
    return rows


def drawn(costs: Sequence[Cost]) -> str:
    """The figure."""
    return scattered(
        title="Held-out loss above fp32's, nats per byte: one codec both ways, error feedback",
        across="bits a value",
        upward="",
        points=[
            Point(
                series=cost.series,
                label=cost.codec,
                x=cost.bits,
                y=cost.mean,
                low=min(cost.more),
                high=max(cost.more),
            )
            for cost in costs
        ],
        level=(0.0, NOTHING_LOST),
        is_joined=True,
        highest=SHOWN,
    )
