"""How often, in which codec and how late: what each costs in held-out loss, beside data parallelism.

    python -m benchmarks.learning.intervals [--seeds 0] [--steps 1200] [--report] [--fit]
        [--results docs/results/intervals.jsonl]

Two nodes train a byte language model of 0.1 million parameters by plain calls (lab.simulation.plain_calls),
1,024 tokens a node and inner step, at one inner rate for each optimizer. Presets go by these figures
(coordinator/presets/loss.py): `--fit` prints what they take for SELDOM and LATE from the runs that are as
they choose. What is in the file of results is not run again.

Runs of other settings in the file, of 120 to 4,800 steps, of other seeds and rates, were made by the same
calls. Those of fewer than 600 steps are for what short runs want (coordinator/presets/costly.py).
"""

import itertools
import logging
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog
import torch

from benchmarks.learning.data_parallel import train_data_parallel
from benchmarks.measurement import (
    Rows,
    add_results,
    asked_by,
    markdown,
    parser_of,
    read_rows,
    run_missing,
)
from benchmarks.race import TRAINED, inner_table
from benchmarks.races import RATES
from coordinator.presets.choosing import BLENDS, OFTEN_STEPS
from coordinator.presets.loss import CODEC_LOSSES, POWER, SPARSE
from lab.simulation.plain_calls import Setting, spec_of, train_swarm
from node.island.data.dataset import read_corpus

RESULTS = Path("docs/results/intervals.jsonl")
NUM_NODES = 2
PLAIN, NESTEROV = (1.0, 0.0), (0.7, 0.6)
INTERVALS = (2, 5, 10, 30, 60)
CODECS = ("fp32", "int4", "ec2")
CODECS_AT = (5, 30)
LATE = ((5, 2), (5, 5), (10, 5), (10, 10), (20, 20))
"""Interval and inner steps that results are late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """One run; without an interval it is data parallelism."""

    optimizer: str
    interval: int = 0  # inner steps between two exchanges of the same parameters
    codec: str = ""  # both ways
    outer: tuple[float, float] = PLAIN  # rate and momentum of Nesterov's step
    late_steps: int = 0
    overlap: str = "none"
    blend: float | None = None
    fragments: int = 1
    rate: float = 0.0  # the inner optimizer's; 0: the middle of RATES
    steps: int = 1200
    seed: int = 0


def run(tried: Try) -> float:
    """The held-out loss at the end, in nats per byte."""
    exchange: dict[str, Any] = {"fragments": tried.fragments, "overlap": tried.overlap}
    if tried.codec:
        exchange |= {"uplink": tried.codec, "downlink": tried.codec}
    if tried.blend is not None:
        exchange |= {"blend": tried.blend}
    steps = max(1, tried.interval // tried.fragments)
    learning_rate, momentum = tried.outer
    setting = Setting(name="interval", tables=TRAINED, late_steps=tried.late_steps).changed(
        "interval",
        run={"rounds": tried.steps // steps, "min_nodes": NUM_NODES},
        inner=inner_table(tried.optimizer, tried.rate or RATES[tried.optimizer][0])
        | {"steps": steps},
        outer={"learning_rate": learning_rate, "momentum": momentum},
        exchange=exchange,
    )
    spec = spec_of(setting.tables, seed=tried.seed)
    corpus = read_corpus(
        spec.data, context=spec.model.context, batch=spec.inner.batch, folder=Path.cwd()
    )
    if not tried.interval:
        return train_data_parallel(spec, corpus, learning_rate=spec.inner.learning_rate)
    return train_swarm(setting, spec, corpus).loss


def tries_of(steps: int) -> list[Try]:
    """What is run without being asked for more."""
    found: list[Try] = []
    for optimizer in RATES:
        first = Try(optimizer=optimizer, steps=steps)
        found.append(first)
        found += [
            replace(first, interval=interval, codec="fp32", outer=outer)
            for interval, outer in itertools.product(INTERVALS, (PLAIN, NESTEROV))
        ]
        found += [
            replace(first, interval=interval, codec=codec, outer=usual_outer(interval))
            for interval, codec in itertools.product(CODECS_AT, CODECS)
        ]
        found += [
            replace(
                first,
                interval=interval,
                codec="ec2",
                late_steps=late_steps,
                overlap="keep",
                blend=0.5,
                outer=usual_outer(interval),
            )
            for interval, late_steps in LATE
        ]
        found += [
            replace(first, interval=interval, codec="ec2", outer=usual_outer(interval))
            for interval in {interval for interval, _ in LATE}
        ]
    return list(dict.fromkeys(found))


def usual_outer(interval: int) -> tuple[float, float]:
    """The outer step that presets take for as short a run."""
    return PLAIN if interval <= 10 else NESTEROV


Losses = Mapping[Try, float]


def is_as_presets_choose(tried: Try) -> bool:
    """By the outer step and the overlap that they take for such an interval, with a dense codec."""
    blends = (
        tried.optimizer == BLENDS
        and tried.interval <= OFTEN_STEPS
        and 0 < tried.interval <= 2 * tried.late_steps
    )
    outer = NESTEROV if blends else usual_outer(tried.interval)
    overlap = "none" if not tried.late_steps else "blend" if blends else "keep"
    is_dense = tried.codec in CODEC_LOSSES and tried.codec not in SPARSE
    is_usual = not tried.rate and tried.blend in (None, 0.5)
    return is_usual and is_dense and (tried.outer, tried.overlap) == (outer, overlap)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What presets would take for an inner optimizer."""

    seldom: float
    late: float
    spread: float  # root of the mean square of what is not explained, in parts of the loss
    num_runs: int


def fitted(known: Losses, optimizer: str) -> Fit:
    """Least squares over runs that are as presets choose; what the codecs cost is taken as it stands."""
    rows = []
    for tried in known:
        is_long = tried.steps >= 600
        if tried.optimizer == optimizer and is_long and is_as_presets_choose(tried):
            codecs = 2 * CODEC_LOSSES[tried.codec].noise / tried.steps
            ceiling = Try(optimizer=optimizer, steps=tried.steps, seed=tried.seed)
            if ceiling in known:
                rows.append((tried, known[tried] / known[ceiling] - 1 - codecs))

    def explained(late: float) -> Fit:
        apart = [(t.interval + late * t.late_steps) ** POWER / t.steps / NUM_NODES for t, _ in rows]
        lost = [lost for _, lost in rows]
        seldom = sum(map(math.prod, zip(apart, lost, strict=True))) / sum(x * x for x in apart)
        left = [one - seldom * x for x, one in zip(apart, lost, strict=True)]
        spread = math.sqrt(statistics.mean(one * one for one in left))
        return Fit(seldom=seldom, late=late, spread=spread, num_runs=len(rows))

    return min((explained(tenths / 10) for tenths in range(101)), key=lambda fit: fit.spread)


def report(known: Losses, steps: int) -> Iterator[str]:
    """Three tables: intervals, codecs and late results, above data parallelism of the same seed."""
    rows: list[Sequence[object]] = []
    for interval in INTERVALS:
        cells = [
            _above(
                known, Try(optimizer=o, interval=interval, codec="fp32", outer=outer, steps=steps)
            )
            for o, outer in itertools.product(RATES, (PLAIN, NESTEROV))
        ]
        rows.append((interval, *cells))
    names = [f"{o}, {outer}" for o, outer in itertools.product(RATES, ("plain mean", "0.7, 0.6"))]
    yield markdown(("every", *names), rows)
    rows = [
        (
            interval,
            codec,
            *(
                _above(
                    known,
                    Try(
                        optimizer=o,
                        interval=interval,
                        codec=codec,
                        outer=usual_outer(interval),
                        steps=steps,
                    ),
                )
                for o in RATES
            ),
        )
        for interval, codec in itertools.product(CODECS_AT, CODECS)
    ]
    yield markdown(("every", "codec both ways", *RATES), rows)
    rows = []
    for interval, late_steps in LATE:
        row: list[object] = [interval, late_steps]
        for o in RATES:
            waits = Try(
                optimizer=o,
                interval=interval,
                codec="ec2",
                outer=usual_outer(interval),
                steps=steps,
            )
            late = replace(waits, late_steps=late_steps, overlap="keep", blend=0.5)
            row += [_above(known, waits), _above(known, late)]
        rows.append(row)
    names = [f"{o}, {way}" for o, way in itertools.product(RATES, ("waiting", "late"))]
    yield markdown(("every", "late by", *names), rows)


def above(known: Losses, tried: Try) -> list[float]:
    """By how much, in parts of it, a run ends above data parallelism of each seed that both have."""
    found = []
    for each, loss in known.items():
        ceiling = Try(optimizer=each.optimizer, steps=each.steps, seed=each.seed)
        if replace(each, seed=tried.seed) == tried and ceiling in known:
            found.append(loss / known[ceiling] - 1)
    return found


def _above(known: Losses, tried: Try) -> str:
    return in_per_cent(above(known, tried))


def in_per_cent(found: Sequence[float]) -> str:
    """Their mean, with the least and the most of several; empty for none."""
    if not found:
        return ""
    spread = f" ({100 * min(found):+.1f} to {100 * max(found):+.1f})" if len(found) > 1 else ""
    return f"{100 * statistics.mean(found):+.1f} %{spread}"


def known_in(file: Path) -> dict[Try, float]:
    """What was run already."""
    return {asked_by(Try, row): row["loss"] for row in read_rows(file)}


def main() -> None:
    """Runs what is missing, seed by seed, and prints the tables."""
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--report", action="store_true", help="print what is there, run nothing")
    parser.add_argument("--fit", action="store_true", help="print what presets go by, run nothing")
    add_results(parser, RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    known, results = known_in(options.results), Rows(options.results)
    if options.fit:
        print("\n".join(f"{optimizer}: {fitted(known, optimizer)}" for optimizer in RATES))
        return
    if not options.report:
        asked = itertools.product(options.seeds, tries_of(options.steps))
        run_missing((replace(tried, seed=seed) for seed, tried in asked), known, results, run)
    print("\n\n".join(report(known, options.steps)))


if __name__ == "__main__":
    main()
