"""What late results cost in held-out loss, by how ranks take them over.

    python -m benchmarks.learning.overlap [--seeds 0 1 2] [--late 3 15 28] [--by-nodes | --often] [--report]
        [--results docs/results/overlap.jsonl]

Two nodes train a byte language model of 0.1 million parameters by plain calls (lab.simulation.plain_calls):
600 inner steps of 1,024 tokens a node, exchanged by ec2 both ways every 30. Results are taken over so many
inner steps late, by each rule of [exchange] overlap and blend, and are compared, seed by seed, with the run
of the same seed that waits for them. What is in the file of results is not run again.

With `--by-nodes` two nodes, four and eight train 1,200 inner steps in two fragments, and `blend` 0 is
compared with 0.5. With `--often` four and eight exchange more often, and the plain mean is compared with
Nesterov's 0.7, 0.6.
"""

import itertools
import logging
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog
import torch

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
from lab.simulation.plain_calls import Setting, spec_of, train_swarm
from node.island.data.dataset import read_corpus

STEPS, TOTAL_STEPS = 30, 600
RULES: tuple[tuple[str, float], ...] = (("keep", 0), ("keep", 0.25), ("keep", 0.5), ("blend", 0.5))
BLENDS = (0.0, 0.5)
RESULTS = Path("docs/results/overlap.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """One run."""

    optimizer: str
    late_steps: int = 0
    overlap: str = "none"
    blend: float | None = None
    seed: int = 0
    num_nodes: int = 2
    fragments: int = 1
    steps: int = STEPS  # of a round
    total_steps: int = TOTAL_STEPS
    outer: tuple[float, float] = (0.7, 0.6)  # rate and momentum of Nesterov's step
    rate: float = 0.0  # the inner optimizer's; 0: the middle of RATES


BY_NODES = tuple(
    Try(
        optimizer=optimizer,
        late_steps=late_steps,
        overlap="keep",
        num_nodes=num_nodes,
        fragments=fragments,
        steps=steps,
        total_steps=1200,
        rate={"muon": 1.1e-2, "adamw": 9e-3}[optimizer],
    )
    for num_nodes, optimizer, fragments, steps, late_steps in (
        (2, "muon", 2, 10, 5),
        (2, "adamw", 2, 10, 5),
        (2, "muon", 1, 20, 15),
        (4, "muon", 2, 10, 5),
        (4, "adamw", 2, 10, 5),
        (4, "muon", 2, 12, 10),
        (4, "adamw", 2, 12, 10),
        (8, "muon", 2, 10, 5),
        (8, "adamw", 2, 10, 5),
    )
)
"""The first as presets have it where the model in fp32 takes 50 inner steps of the link; then later ones."""

PLAIN, NESTEROV = (1.0, 0.0), (0.7, 0.6)
OFTEN = tuple(
    replace(each, blend=0.0, steps=steps, late_steps=late_steps)
    for num_nodes, steps, late_steps in ((4, 3, 2), (4, 4, 3), (4, 6, 5), (8, 6, 5))
    for each in BY_NODES
    if (each.num_nodes, each.steps, each.late_steps) == (num_nodes, 10, 5)
)


def run(tried: Try) -> float:
    """The held-out loss at the end, in nats per byte."""
    exchange: dict[str, Any] = {
        "uplink": "ec2",
        "downlink": "ec2",
        "fragments": tried.fragments,
        "overlap": tried.overlap,
    }
    if tried.blend is not None:
        exchange |= {"blend": tried.blend}
    rate, momentum = tried.outer
    setting = Setting(name="late", tables=TRAINED, late_steps=tried.late_steps).changed(
        "late",
        run={"rounds": tried.total_steps // tried.steps, "min_nodes": tried.num_nodes},
        inner=inner_table(tried.optimizer, tried.rate or RATES[tried.optimizer][0])
        | {"steps": tried.steps},
        outer={"learning_rate": rate, "momentum": momentum},
        exchange=exchange,
    )
    spec = spec_of(setting.tables, seed=tried.seed)
    corpus = read_corpus(
        spec.data, context=spec.model.context, batch=spec.inner.batch, folder=Path.cwd()
    )
    return train_swarm(setting, spec, corpus).loss


def report(known: dict[Try, float]) -> str:
    """A table: how much higher than waiting each rule ended, by inner optimizer and lateness."""
    waiting = {(t.optimizer, t.seed): loss for t, loss in known.items() if not t.late_steps}
    late = [t for t in known if t.total_steps == TOTAL_STEPS and t.late_steps]
    rows: list[list[str]] = []
    for optimizer, late_steps in itertools.product(RATES, sorted({t.late_steps for t in late})):
        row = [f"{optimizer}, {late_steps} of {STEPS}"]
        for rule in RULES:
            more = [
                known[each] - waiting[optimizer, each.seed]
                for each in late
                if (each.optimizer, each.late_steps) == (optimizer, late_steps)
                and (each.overlap, each.blend) == rule
            ]
            spread = f"({min(more):+.3f} to {max(more):+.3f})" if more else ""
            row.append(f"{statistics.mean(more):+.3f} {spread}" if more else "")
        rows.append(row)
    rules = (f"`{overlap}`, `blend = {blend:g}`" for overlap, blend in RULES)
    return markdown(("inner optimizer, steps late", *rules), rows)


def report_by_nodes(known: dict[Try, float]) -> str:
    """A table: what each blend ended at, and how much lower without than with one, seed by seed."""
    rows: list[list[str]] = []
    for each in BY_NODES:
        without, with_one = (_by_seed(known, replace(each, blend=blend)) for blend in BLENDS)
        if both := sorted(without.keys() & with_one.keys()):
            late = f"{each.late_steps} of {each.fragments * each.steps}"
            what = f"{each.num_nodes}, {each.optimizer}, {late}"
            rows.append([what, *_compared(with_one, without, both)])
    blends = (f"`blend = {blend:g}`" for blend in reversed(BLENDS))
    return markdown(("nodes, inner optimizer, steps late", *blends, "difference"), rows)


def report_often(known: dict[Try, float]) -> str:
    """A table: what each outer step ended at, and how much higher Nesterov's did, seed by seed."""
    rows: list[list[str]] = []
    for each in OFTEN:
        plain, nesterov = (
            _by_seed(known, replace(each, outer=outer)) for outer in (PLAIN, NESTEROV)
        )
        if both := sorted(plain.keys() & nesterov.keys()):
            interval = each.fragments * each.steps
            what = f"{each.num_nodes}, {each.optimizer}, every {interval}"
            rows.append([what, *_compared(plain, nesterov, both)])
    names = ("nodes, inner optimizer, interval", "plain mean", "0.7, 0.6", "difference")
    return markdown(names, rows)


def _by_seed(known: dict[Try, float], tried: Try) -> dict[int, float]:
    return {each.seed: loss for each, loss in known.items() if replace(each, seed=0) == tried}


def _compared(first: dict[int, float], then: dict[int, float], seeds: list[int]) -> list[str]:
    """Both means, and by how much the second ended higher."""
    more = [100 * (then[seed] / first[seed] - 1) for seed in seeds]
    return [
        *(f"{statistics.mean(losses[seed] for seed in seeds):.4f}" for losses in (first, then)),
        f"{statistics.mean(more):+.1f} % ({', '.join(f'{value:+.1f}' for value in more)})",
    ]


def tries_of(seed: int, late: Sequence[int]) -> Iterator[Try]:
    """Those that wait, and every rule."""
    for optimizer in RATES:
        yield Try(optimizer=optimizer, seed=seed)
        for late_steps, (overlap, blend) in itertools.product(late, RULES):
            waits = Try(optimizer=optimizer, seed=seed)
            yield replace(waits, late_steps=late_steps, overlap=overlap, blend=blend)


def main() -> None:
    """Runs what is missing, seed by seed, and prints the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--late", type=int, nargs="+", default=[3, 15, 28])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--by-nodes", action="store_true", help="two nodes and four, longer runs")
    which.add_argument("--often", action="store_true", help="four nodes, two outer steps")
    parser.add_argument("--report", action="store_true", help="print what is there, run nothing")
    add_results(parser, RESULTS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    known = {asked_by(Try, row): float(row["loss"]) for row in read_rows(chosen.results)}
    results = Rows(chosen.results)
    for seed in [] if chosen.report else chosen.seeds:
        if chosen.by_nodes:
            tries = [replace(each, blend=blend, seed=seed) for each in BY_NODES for blend in BLENDS]
        elif chosen.often:
            outers = (PLAIN, NESTEROV)
            tries = [replace(each, outer=outer, seed=seed) for each in OFTEN for outer in outers]
        else:
            tries = list(tries_of(seed, chosen.late))
        run_missing(tries, known, results, run)
    print((report_by_nodes if chosen.by_nodes else report_often if chosen.often else report)(known))


if __name__ == "__main__":
    main()
