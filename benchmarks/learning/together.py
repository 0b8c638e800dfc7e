"""How much sooner several nodes reach the held-out loss that one reaches alone. In virtual time.

    python -m benchmarks.learning.together [--ratio 50] [--nodes 2 4 8] [--times 2] [--optimizer muon]
        [--seeds 0] [--processes 1] [--results docs/results/together.jsonl] [--report]

A node alone trains for the whole time (benchmarks.race says what is trained, and what R is). Several nodes
train for parts of that time, each with a schedule that ends within it, by the exchange that presets choose
for their links; and so does data parallelism over links without limits, whose batch is as large as all nodes'
together. Between two parts the logarithm of the time is taken to be straight in the loss. Each has its own
best of three inner rates or more in each part, by the first seed. What is in the file of results is not run
again.
"""

import itertools
import operator
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.measurement import Rows, add_results, markdown, parser_of
from benchmarks.race import (
    TINY,
    TRAINED,
    Losing,
    best_among,
    known_in,
    known_today,
    outer_by_presets,
    prepare_process,
    racing,
    run,
    slower,
)
from benchmarks.races import ATOLL, CEILING, RACES, RATES, Known, Try, race_of, share_at
from lab.processes.family import nothing_left

RESULTS = Path("docs/results/together.jsonl")

SHARED = (ATOLL, CEILING)
PLAIN_MEAN = (1.0, 0.0)

SHARES = {2: (0.75, 0.5, 0.35), 4: (0.7, 0.5, 0.35, 0.25), 8: (0.5, 0.35, 0.25, 0.17, 0.12)}
"""By the number of nodes: parts of the time, tried until one ends higher than a node alone."""


def first_try(alone: Try, contender: str, num_nodes: int) -> Try:
    """In the longest part of the time; Atoll with the outer step that presets choose."""
    outer = alone.outer
    if contender == ATOLL:
        race = replace(RACES[alone.ratio], num_nodes=num_nodes)
        outer = outer_by_presets(race, alone.optimizer, times=alone.times)
    share = SHARES[num_nodes][0]
    return replace(alone, contender=contender, num_nodes=num_nodes, outer=outer, share=share)


def at_its_best_rate(first: Try, losses_of: Losing) -> Try:
    """Its own rate, or a lower or higher one while that is better."""
    best = first
    while (other := best_among([best, slower(best), faster(best)], losses_of)) != best:
        best = other
    return best


def faster(tried: Try) -> Try:
    """At the next of RATES, or twice the highest."""
    above = [rate for rate in RATES[tried.optimizer] if rate > tried.rate]
    return replace(tried, rate=min(above) if above else tried.rate * 2)


def compete(alone: Try, nodes: Sequence[int], seeds: Sequence[int], losses_of: Losing) -> None:
    """All runs that the table needs. The shorter a run, the faster may its best rate be."""
    alone = at_its_best_rate(alone, losses_of)
    goals = losses_of([replace(alone, seed=seed) for seed in seeds])
    for number, contender in itertools.product(nodes, SHARED):
        best = first_try(alone, contender, number)
        for share in SHARES[number]:
            best = at_its_best_rate(replace(best, share=share), losses_of)
            losses = losses_of([replace(best, seed=seed) for seed in seeds])
            is_first = share == SHARES[number][0]  # two points make a line
            if all(map(operator.gt, losses, goals)) and not is_first:
                break


def run_among(tried: Try, *, is_quick: bool) -> dict[str, Any]:
    """Trains with as many nodes as the try says."""
    race = race_of(tried.ratio, tried.num_nodes, is_quick=is_quick)
    return run(tried, race=race, base=TINY if is_quick else TRAINED)


def report(known: Known) -> Iterator[str]:
    """A table for each R, length and optimizer."""
    alone = [each for each in known if each.num_nodes == 1]
    for case in sorted({(each.ratio, each.times, each.optimizer) for each in alone}):
        here = {
            each: row["loss"]
            for each, row in known.items()
            if (each.ratio, each.times, each.optimizer) == case and row["loss"] is not None
        }
        goals = _best_by_share(here, CEILING, 1)[1.0]
        rows = [
            (number, *(_sooner(_best_by_share(here, each, number), goals) for each in SHARED))
            for number in sorted({each.num_nodes for each in here} - {1})
        ]
        ratio, times, optimizer = case
        steps = times * RACES[ratio].steps
        losses = ", ".join(f"{loss:.4f}" for loss in goals.values())
        table = markdown(("nodes", *(f"{each}, × as fast" for each in SHARED)), rows)
        yield f"R = {ratio}, {optimizer}, one node alone: {steps} steps to {losses}\n\n{table}"


Losses = dict[int, float]
"""By seed."""


def _best_by_share(here: dict[Try, float], contender: str, number: int) -> dict[float, Losses]:
    """By the part of the time: what the rate that is best on the first seed ends at."""
    runs = {
        e: loss for e, loss in here.items() if (e.contender, e.num_nodes) == (contender, number)
    }
    found: dict[float, Losses] = {}
    for share in {each.share for each in runs}:
        tries = [each for each in runs if each.share == share]
        first = min(tries, key=lambda each: (each.seed, runs[each]))
        found[share] = {each.seed: runs[each] for each in tries if each.rate == first.rate}
    return found


def _sooner(by_share: dict[float, Losses], goals: Losses) -> str:
    """Mean of seeds, with the least and the most of several; signed where parts do not reach so far."""
    found = []
    for seed, goal in goals.items():
        curve = [(share, losses[seed]) for share, losses in by_share.items() if seed in losses]
        if len(curve) > 1:
            found.append(share_at(goal, curve))
    if not found:
        return ""
    values = [1 / share for share, _ in found]
    sign = {"more": "under ", "less": "over "}.get("".join({sign for _, sign in found}), "")
    spread = f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else ""
    return f"{sign}{statistics.mean(values):.2f}{spread}"


def main() -> None:
    """Runs what is missing, and prints the tables."""
    parser = parser_of(__doc__)
    parser.add_argument("--ratio", type=int, choices=list(RACES), default=50)
    parser.add_argument("--nodes", type=int, nargs="+", choices=list(SHARES), default=list(SHARES))
    parser.add_argument("--times", type=int, default=2, help="the usual time of the race")
    parser.add_argument("--optimizer", choices=list(RATES), default="muon")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--processes", type=int, default=1, help="tries that run side by side")
    parser.add_argument("--report", action="store_true", help="only print what is there")
    parser.add_argument("--quick", action="store_true", help="tiny runs, to see that it works")
    add_results(parser, RESULTS)
    options = parser.parse_args()
    known = known_in(options.results)
    if not options.report:
        known = known_today(options.results, is_quick=options.quick)
        spawn = get_context("spawn")
        with ProcessPoolExecutor(options.processes, spawn, initializer=prepare_process) as pool:
            run_one = partial(run_among, is_quick=options.quick)
            losses_of = racing(pool, known, Rows(options.results), run_one)
            alone = Try(
                ratio=options.ratio,
                num_nodes=1,
                contender=CEILING,
                optimizer=options.optimizer,
                rate=RATES[options.optimizer][0],
                outer=PLAIN_MEAN,
                times=options.times,
            )
            compete(alone, options.nodes, options.seeds, losses_of)
    print("\n\n".join(report(known)))


if __name__ == "__main__":
    with nothing_left():
        main()
