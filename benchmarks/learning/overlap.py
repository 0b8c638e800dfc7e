"""What late results cost in held-out loss, by how ranks take them over.

    python -m benchmarks.learning.overlap [--seeds 0 1 2] [--late 3 15 28] [--report]
        [--results docs/results/overlap.jsonl]

Two nodes train a byte language model of 0.1 million parameters by plain calls (lab.simulation.plain_calls):
600 inner steps of 1,024 tokens a node, exchanged by ec2 both ways every 30. Results are taken over so many
inner steps late, by each rule of [exchange] overlap and blend, and are compared, seed by seed, with the run
of the same seed that waits for them. What is in the file of results is not run again.
"""

import itertools
import logging
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import structlog
import torch

from benchmarks.measurement import Rows, add_results, asked_by, markdown, parser_of, read_rows
from benchmarks.race import RATES, TRAINED, inner_table
from lab.simulation.plain_calls import Setting, spec_of, train_swarm
from node.island.data.dataset import read_corpus

NUM_NODES = 2
STEPS, ROUNDS = 30, 20
RULES: tuple[tuple[str, float], ...] = (("keep", 0), ("keep", 0.25), ("keep", 0.5), ("blend", 0.5))
RESULTS = Path("docs/results/overlap.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """One run."""

    optimizer: str
    late_steps: int = 0
    overlap: str = "none"
    blend: float | None = None
    seed: int = 0


def run(tried: Try) -> float:
    """The held-out loss at the end, in nats per byte."""
    exchange: dict[str, Any] = {"uplink": "ec2", "downlink": "ec2", "overlap": tried.overlap}
    if tried.blend is not None:
        exchange |= {"blend": tried.blend}
    setting = Setting(name="late", tables=TRAINED, late_steps=tried.late_steps).changed(
        "late",
        run={"rounds": ROUNDS, "min_nodes": NUM_NODES},
        inner=inner_table(tried.optimizer, RATES[tried.optimizer][0]) | {"steps": STEPS},
        outer={"learning_rate": 0.7, "momentum": 0.6},
        exchange=exchange,
    )
    spec = spec_of(setting.tables, seed=tried.seed)
    corpus = read_corpus(
        spec.data, context=spec.model.context, batch=spec.inner.batch, folder=Path.cwd()
    )
    return train_swarm(setting, spec, corpus).loss


def report(known: dict[Try, float]) -> str:
    """A table: how much higher than waiting each rule ended, by inner optimizer and lateness."""
    rows: list[list[str]] = []
    for optimizer, late_steps in itertools.product(
        RATES, sorted({t.late_steps for t in known} - {0})
    ):
        row = [f"{optimizer}, {late_steps} of {STEPS}"]
        for overlap, blend in RULES:
            more = [
                loss - known[Try(optimizer=optimizer, seed=each.seed)]
                for each, loss in known.items()
                if (each.optimizer, each.late_steps, each.overlap, each.blend)
                == (optimizer, late_steps, overlap, blend)
            ]
            spread = f"({min(more):+.3f} to {max(more):+.3f})" if more else ""
            row.append(f"{statistics.mean(more):+.3f} {spread}" if more else "")
        rows.append(row)
    rules = (f"`{overlap}`, `blend = {blend:g}`" for overlap, blend in RULES)
    return markdown(("inner optimizer, steps late", *rules), rows)


def main() -> None:
    """Runs what is missing, seed by seed, and prints the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--late", type=int, nargs="+", default=[3, 15, 28])
    parser.add_argument("--report", action="store_true", help="print what is there, run nothing")
    add_results(parser, RESULTS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    known = {asked_by(Try, row): float(row["loss"]) for row in read_rows(chosen.results)}
    results = Rows(chosen.results)
    for seed, optimizer in itertools.product(chosen.seeds, RATES):
        tries = [Try(optimizer=optimizer, seed=seed)]
        for late_steps, (overlap, blend) in itertools.product(chosen.late, RULES):
            tries.append(
                Try(
                    optimizer=optimizer,
                    late_steps=late_steps,
                    overlap=overlap,
                    blend=blend,
                    seed=seed,
                )
            )
        for each in tries:
            if each not in known and not chosen.report:
                known[each] = run(each)
                results.add(asdict(each) | {"loss": known[each]})
    print(report(known))


if __name__ == "__main__":
    main()
