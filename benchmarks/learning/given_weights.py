"""What exchanges cost where nodes go on with given weights, on text of another kind.

    python -m benchmarks.learning.given_weights [--seeds 0 1] [--rates 2e-3 8e-3] [--report]
        [--results docs/results/given-weights.jsonl]

A byte language model of 0.1 million parameters learns the source of the standard library first. Then two
nodes go on with it by plain calls (lab.simulation.plain_calls) on C++, the headers that come with torch: 300
inner steps of 1,024 tokens a node, by AdamW. Presets go by these figures where weights are given
(coordinator/presets/loss.py). What is in the file of results is not run again.
"""

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import structlog
import torch

from benchmarks.learning.data_parallel import train_data_parallel
from benchmarks.learning.intervals import NESTEROV, PLAIN, in_per_cent
from benchmarks.measurement import Rows, add_results, asked_by, markdown, parser_of, read_rows
from benchmarks.race import TRAINED, inner_table
from benchmarks.races import RATES
from lab.simulation.plain_calls import Setting, spec_of, swarm_at_end, train_swarm
from node.island.data.dataset import read_corpus
from node.outer_state import Vector

RESULTS = Path("docs/results/given-weights.jsonl")
FIRST_STEPS, STEPS, NUM_NODES = 1200, 300, 2
HEADERS = Path(torch.__file__).parent / "include/torch/csrc/**/*.h"


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """One run; without an interval it is data parallelism."""

    rate: float  # AdamW's
    interval: int = 0
    codec: str = ""  # both ways
    late_steps: int = 0  # taken over with overlap = "keep", blend = 0.5
    outer: tuple[float, float] = PLAIN
    seed: int = 0


def tries_of(rate: float) -> list[Try]:
    """Data parallelism, and the rows of the table."""
    ten = Try(rate=rate, interval=10, codec="fp32")
    thirty = replace(ten, interval=30, outer=NESTEROV)
    return [
        Try(rate=rate),
        *(replace(ten, codec=codec) for codec in ("fp32", "int4", "ec2", "ec1", "topk256")),
        *(replace(ten, codec="ec2", late_steps=late) for late in (5, 10)),
        replace(ten, codec="ec2", outer=NESTEROV),
        replace(thirty, outer=PLAIN),
        *(replace(thirty, codec=codec) for codec in ("fp32", "ec2")),
        replace(thirty, codec="ec2", late_steps=15),
        replace(thirty, interval=100),
    ]


def _setting(name: str, **tables: dict[str, Any]) -> Setting:
    return Setting(name=name, tables=TRAINED).changed(name, **tables)


@cache
def given_weights() -> Vector:
    """What is gone on with: the first model, trained by one node."""
    steps = 30
    setting = _setting(
        "first",
        run={"rounds": FIRST_STEPS // steps, "min_nodes": 1},
        inner=inner_table("muon", RATES["muon"][0]) | {"steps": steps},
        outer={"learning_rate": 1.0, "momentum": 0.0},
        exchange={"uplink": "fp32", "downlink": "fp32"},
    )
    spec = spec_of(setting.tables, seed=0)
    corpus = read_corpus(
        spec.data, context=spec.model.context, batch=spec.inner.batch, folder=Path.cwd()
    )
    return swarm_at_end(setting, spec, corpus)[0].parameters


def run(tried: Try) -> float:
    """The held-out loss at the end, in nats per byte."""
    steps = tried.interval or 1
    rate, momentum = tried.outer
    overlap = {"overlap": "keep", "blend": 0.5} if tried.late_steps else {}
    codecs = {"uplink": tried.codec, "downlink": tried.codec} if tried.codec else {}
    setting = replace(
        _setting(
            "given",
            run={"rounds": STEPS // steps, "min_nodes": NUM_NODES},
            data={"source": "text", "paths": [str(HEADERS)]},
            inner=inner_table("adamw", tried.rate) | {"steps": steps},
            outer={"learning_rate": rate, "momentum": momentum},
            exchange=codecs | overlap,
        ),
        late_steps=tried.late_steps,
    )
    spec = spec_of(setting.tables, seed=tried.seed)
    corpus = read_corpus(
        spec.data, context=spec.model.context, batch=spec.inner.batch, folder=Path.cwd()
    )
    if not tried.interval:
        return train_data_parallel(spec, corpus, learning_rate=tried.rate, first=given_weights())
    return train_swarm(setting, spec, corpus, first=given_weights()).loss


Losses = Mapping[Try, float]


def above(known: Losses, tried: Try) -> list[float]:
    """By how much, in parts of it, a run ends above data parallelism of each seed that both have."""
    return [
        loss / known[Try(rate=each.rate, seed=each.seed)] - 1
        for each, loss in known.items()
        if replace(each, seed=tried.seed) == tried and Try(rate=each.rate, seed=each.seed) in known
    ]


def report(known: Losses, rates: Sequence[float]) -> Iterator[str]:
    """How much higher than data parallelism each ends, by rate."""
    rows = []
    for tried in tries_of(rates[0])[1:]:
        outer = "plain mean" if tried.outer == PLAIN else "0.7, 0.6"
        cells = [in_per_cent(above(known, replace(tried, rate=rate))) for rate in rates]
        rows.append((tried.interval, outer, tried.codec, tried.late_steps or "", *cells))
    yield markdown(
        ("every", "outer", "codec both ways", "late by", *(f"rate {rate:g}" for rate in rates)),
        rows,
    )


def known_in(file: Path) -> dict[Try, float]:
    """What was run already."""
    return {asked_by(Try, row): row["loss"] for row in read_rows(file)}


def main() -> None:
    """Runs what is missing, seed by seed, and prints the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--rates", type=float, nargs="+", default=[2e-3, 8e-3])
    parser.add_argument("--report", action="store_true", help="print what is there, run nothing")
    add_results(parser, RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    known, results = known_in(options.results), Rows(options.results)
    for seed, rate in itertools.product(options.seeds, options.rates):
        for tried in (replace(each, seed=seed) for each in tries_of(rate)):
            if tried not in known and not options.report:
                known[tried] = run(tried)
                results.add(asdict(tried) | {"loss": known[tried]})
    print("\n".join(report(known, options.rates)))


if __name__ == "__main__":
    main()
