"""Which of four learns most in the same time, each at its own best: by R, in virtual time.

    python -m benchmarks.race [--ratios 5 50 300] [--nodes 2] [--times 1] [--optimizers adamw muon]
        [--seeds 0 1 2] [--processes 1] [--results docs/results/race.jsonl] [--report] [--quick]

R is the time that a model in fp32 takes over a node's link, divided by the time of an inner step; it decides
how often nodes can exchange. Each case stands for a model, a link and a step of real size, and what is
trained is a byte language model of 0.1 million parameters, 1,024 tokens a node and inner step. Links and
steps take the time that formulas say; everything that touches a number is real (lab.simulation.plain_calls).

    data parallelism    over links without limits: a step takes a step. The ceiling.
    plain DiLoCo        bf16 by a ring all-reduce at the link's full rate, for which nodes wait: it takes
                        (N - 1) / N · R steps
    Streaming DiLoCo    (Douillard et al. 2025) the same layer by layer, in 8 bits as torchft on GPUs,
                        while nodes train on: results are mixed half and half then, its α
    Atoll               the exchange that presets choose for the link, and the time that they predict for it

All take the same time, and schedules fall to their end within it. Each contender has ten tries with each
inner optimizer on the first seed: five inner rates, and more beyond while the last of them is the best, then
two other intervals, then three other outer settings; data parallelism has the rates. The best try runs with
the other seeds, and in shorter times, so that "times as fast" compares runs whose schedules ended. What is in
the file of results is not run again, unless presets choose another exchange since.

With `--times 4` the race takes four times as long, without plain DiLoCo. All begin with what was best in the
usual time, Atoll with what presets choose for the longer one. The ceiling tries lower rates while these are
better, and all take its best; then half of the interval and the other usual momenta are tried. Who is how
much faster is not told: seeds differ by more than a tenth of that time does.
"""

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import structlog
import torch

from benchmarks.learning.data_parallel import train_data_parallel
from benchmarks.measurement import Rows, add_results, asked_by, parser_of, read_rows
from benchmarks.races import (
    ATOLL,
    CEILING,
    CONTENDERS,
    FAST,
    NUM_LAYERS,
    OUTERS,
    PEERS,
    PLAIN,
    RACES,
    RATES,
    STREAMING,
    Known,
    Race,
    Try,
    best_tries,
    of_case,
    race_of,
    report,
)
from coordinator.presets.choosing import chosen
from coordinator.presets.cost import Setting, predicted
from lab.processes.family import nothing_left
from lab.simulation.plain_calls import Setting as Tables
from lab.simulation.plain_calls import spec_of, train_swarm
from node.island.data.dataset import read_corpus

RESULTS = Path("docs/results/race.jsonl")

SHORTER = (0.85, 0.7, 0.5, 0.35, 0.25, 0.17, 0.12)
"""Parts of a race's time in which a contender is tried again, while it still beats the better peer."""

TRAINED: dict[str, dict[str, Any]] = {
    "model": {
        "hidden_size": 64,
        "num_layers": NUM_LAYERS,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_size": 192,
        "context": 64,
    },
    "inner": {"batch": 16},
    "evaluation": {"samples": 512},
}

TINY: dict[str, dict[str, Any]] = {
    "model": {
        "hidden_size": 16,
        "num_layers": NUM_LAYERS,
        "num_heads": 1,
        "num_kv_heads": 1,
        "ffn_size": 32,
        "context": 16,
    },
    "inner": {"batch": 2},
    "evaluation": {"samples": 8},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What a try does in the race's time."""

    steps: int  # between exchanges
    rounds: int
    late_steps: int
    exchange: dict[str, Any]


def course_of(tried: Try, race: Race) -> Course:
    """How many whole rounds fit, maybe none, and when results are taken over."""
    seconds = tried.share * tried.times * race.steps * race.step_seconds
    if tried.contender == CEILING:
        return Course(steps=1, rounds=round(seconds / race.step_seconds), late_steps=0, exchange={})
    one_way = (race.num_nodes - 1) / race.num_nodes * race.ratio  # steps, for the model in fp32
    if tried.contender == PLAIN:
        sent = 2 * one_way / 2  # contributions and results, in half of the bits
        steps = max(math.ceil(sent), round(2 * sent * tried.interval))
        rounds = int(seconds / race.step_seconds / (steps + sent))
        bf16 = {"uplink": "bf16", "downlink": "bf16"}
        return Course(steps=steps, rounds=rounds, late_steps=0, exchange=bf16)
    if tried.contender == STREAMING:
        sent = 2 * one_way / 4 / NUM_LAYERS  # a fragment
        steps = max(math.ceil(sent), round(2 * sent * tried.interval))
        int8 = {"uplink": "int8", "downlink": "int8", "fragments": NUM_LAYERS}
        return Course(
            steps=steps,
            rounds=int(seconds / race.step_seconds / steps),
            late_steps=math.ceil(sent),
            exchange=int8 | {"overlap": "blend", "blend": 0.5},
        )
    plan = chosen(race.situation(tried.optimizer, times=tried.times))
    setting: Setting = replace(
        plan.setting, steps=max(1, round(plan.setting.steps * tried.interval))
    )
    prediction = predicted(plan.situation, setting)
    exchange = {each.key: each.value for each in plan.choices if each.table == "exchange"}
    return Course(
        steps=setting.steps,
        rounds=int(seconds / prediction.round_seconds),
        late_steps=prediction.late_steps,
        exchange=exchange,
    )


def inner_table(optimizer: str, rate: float) -> dict[str, Any]:
    """[inner] of a run file by the inner optimizer and its rate."""
    if optimizer == "adamw":
        return {"learning_rate": rate}
    beside = RATES["adamw"][0]
    return {"optimizer": "muon", "muon_learning_rate": rate, "learning_rate": beside}


def run(tried: Try, *, race: Race, base: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Trains, and gives a line of results."""
    course = course_of(tried, race)
    if not course.rounds:
        return asdict(tried) | {"rounds": 0, "loss": None}
    outer_rate, momentum = tried.outer
    setting = Tables(name=tried.contender, tables=base, late_steps=course.late_steps).changed(
        tried.contender,
        run={"rounds": course.rounds, "min_nodes": race.num_nodes},
        inner=inner_table(tried.optimizer, tried.rate) | {"steps": course.steps},
        outer={"learning_rate": outer_rate, "momentum": momentum},
        exchange=course.exchange,
    )
    spec = spec_of(setting.tables, seed=tried.seed)
    corpus = read_corpus(
        spec.data, context=spec.model.context, batch=spec.inner.batch, folder=Path.cwd()
    )
    if tried.contender == CEILING:
        loss = train_data_parallel(spec, corpus, learning_rate=spec.inner.learning_rate)
    else:
        loss = train_swarm(setting, spec, corpus).loss
    return asdict(tried) | {
        **_told(course),
        "loss": loss,
    }


def _told(course: Course) -> dict[str, Any]:
    """What a line of results says of it."""
    return {
        "steps": course.steps,
        "rounds": course.rounds,
        "late_steps": course.late_steps,
        "codec": course.exchange.get("uplink", ""),
        "blend": course.exchange.get("blend", 0.0),
    }


def is_of_today(tried: Try, row: dict[str, Any], race: Race) -> bool:
    """Whether presets choose the same now as for that line, which may be older than they are."""
    course = course_of(tried, race)
    return not course.rounds or row.items() >= _told(course).items()


Losing = Callable[[Sequence[Try]], list[float]]
"""The held-out losses of tries, which are run side by side where they are not known."""

Running = Callable[[Try], dict[str, Any]]
"""Trains, and gives a line of results."""


def tries_after(best: Try, stage: int) -> list[Try]:
    """What is tried beside the best so far: rates, then intervals, then outer settings."""
    if stage == 0:
        return [replace(best, rate=rate) for rate in RATES[best.optimizer][1:]]
    if best.contender == CEILING:
        return []
    if stage == 1:
        return [replace(best, interval=interval) for interval in (0.5, 2.0)]
    return [replace(best, outer=outer) for outer in OUTERS if outer != best.outer]


def tries_beyond(best: Try) -> list[Try]:
    """A rate beyond the ones that were tried, where the best is the last of them on one side."""
    slow, fast = min(RATES[best.optimizer]), max(RATES[best.optimizer])
    if best.rate <= slow:
        return [replace(best, rate=best.rate / 2)]
    return [replace(best, rate=best.rate * 2)] if best.rate >= fast else []


def best_among(tries: Sequence[Try], losses_of: Losing) -> Try:
    """The one that ends lowest."""
    losses = losses_of(tries)
    return tries[losses.index(min(losses))]


def best_of(first: Try, losses_of: Losing) -> Try:
    """Coordinate by coordinate, from the middle of each."""
    best = best_among([first, *tries_after(first, 0)], losses_of)
    while (beyond := best_among([best, *tries_beyond(best)], losses_of)) != best:
        best = beyond
    for stage in (1, 2):
        best = best_among([best, *tries_after(best, stage)], losses_of)
    return best


def first_try(race: Race, ratio: int, contender: str, optimizer: str) -> Try:
    """Where a contender's tries begin; Atoll's with the outer setting that presets choose."""
    return Try(
        ratio=ratio,
        num_nodes=race.num_nodes,
        contender=contender,
        optimizer=optimizer,
        rate=RATES[optimizer][0],
        outer=outer_by_presets(race, optimizer) if contender == ATOLL else OUTERS[0],
    )


def outer_by_presets(race: Race, optimizer: str, *, times: int = 1) -> tuple[float, float]:
    """Rate and momentum."""
    plan = chosen(race.situation(optimizer, times=times))
    told = {choice.key: choice.value for choice in plan.choices}
    return float(told["learning_rate"]), float(told["momentum"])


def compete(
    ratio: int, *, race: Race, optimizer: str, seeds: Sequence[int], losses_of: Losing
) -> None:
    """One case and optimizer: all tries, then the best with all seeds and in shorter times."""
    best = {
        name: best_of(first_try(race, ratio, name, optimizer), losses_of) for name in CONTENDERS
    }
    for seed in seeds:
        tries = [replace(each, seed=seed) for each in best.values()]
        losses = dict(zip(best, losses_of(tries), strict=True))
        peers = min(losses[name] for name in PEERS)
        for name, goal in ((ATOLL, peers), (CEILING, max(peers, losses[ATOLL]))):
            for share in SHORTER:
                (loss,) = losses_of([replace(best[name], seed=seed, share=share)])
                if loss > goal:
                    break


def compete_longer(
    shorter: dict[str, Try], *, race: Race, times: int, seeds: Sequence[int], losses_of: Losing
) -> None:
    """From the best of the usual time: a lower rate, half of the interval, the other momenta."""
    if missing := {CEILING, *FAST} - shorter.keys():
        raise SystemExit(
            f"{', '.join(sorted(missing))} has not raced in the usual time: leave --times out first"
        )
    ceiling = replace(shorter[CEILING], times=times)
    while (lower := best_among([ceiling, slower(ceiling)], losses_of)) != ceiling:
        ceiling = lower
    best = {CEILING: ceiling}
    for name in FAST:
        first = replace(shorter[name], times=times, rate=ceiling.rate)
        if name == ATOLL:
            outer = outer_by_presets(race, first.optimizer, times=times)
            first = replace(first, interval=1.0, outer=outer)
        others = [replace(first, outer=outer) for outer in OUTERS[:2] if outer != first.outer]
        half = replace(first, interval=first.interval / 2)
        best[name] = best_among([first, half, *others], losses_of)
    for seed in seeds:
        losses_of([replace(each, seed=seed) for each in best.values()])


def slower(tried: Try) -> Try:
    """At the next of RATES, or half of the lowest: the longer a run, the lower is its best rate."""
    below = [rate for rate in RATES[tried.optimizer] if rate < tried.rate]
    return replace(tried, rate=max(below) if below else tried.rate / 2)


def known_in(file: Path) -> Known:
    """What was run already."""
    return {asked_by(Try, row): row for row in read_rows(file)}


def known_today(file: Path, *, is_quick: bool) -> Known:
    """The same without what presets choose otherwise now: that is run again."""
    return {
        each: row
        for each, row in known_in(file).items()
        if is_of_today(each, row, race_of(each.ratio, each.num_nodes, is_quick=is_quick))
    }


def prepare_process() -> None:
    """One thread, and errors alone in the log."""
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))


def racing(pool: Executor, known: Known, rows: Rows, run_one: Running) -> Losing:
    """Runs what is not known in the pool, and keeps each as it comes."""

    def losses_of(tries: Sequence[Try]) -> list[float]:
        running = {pool.submit(run_one, each): each for each in tries if each not in known}
        for done in as_completed(running):
            known[running[done]] = rows.add(done.result())
        losses = [known[each]["loss"] for each in tries]
        return [math.inf if loss is None else float(loss) for loss in losses]

    return losses_of


def main() -> None:
    """Runs what is missing, and prints a table for each case."""
    parser = parser_of(__doc__)
    parser.add_argument("--ratios", type=int, nargs="+", choices=list(RACES), default=list(RACES))
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--times", type=int, default=1, help="the usual time of the race")
    parser.add_argument("--optimizers", nargs="+", choices=list(RATES), default=list(RATES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--processes", type=int, default=1, help="tries that run side by side")
    parser.add_argument("--report", action="store_true", help="only print what is there")
    parser.add_argument("--quick", action="store_true", help="tiny runs, to see that it works")
    add_results(parser, RESULTS)
    options = parser.parse_args()
    known = known_in(options.results)
    if not options.report:
        known = known_today(options.results, is_quick=options.quick)
        processes = options.processes
        spawn = get_context("spawn")
        with ProcessPoolExecutor(processes, spawn, initializer=prepare_process) as pool:
            for ratio, optimizer in itertools.product(options.ratios, options.optimizers):
                race = race_of(ratio, options.nodes, is_quick=options.quick)
                run_one = partial(run, race=race, base=TINY if options.quick else TRAINED)
                losses_of = racing(pool, known, Rows(options.results), run_one)
                if options.times == 1:
                    compete(
                        ratio,
                        race=race,
                        optimizer=optimizer,
                        seeds=options.seeds,
                        losses_of=losses_of,
                    )
                    continue
                compete_longer(
                    best_tries(of_case(known, ratio, options.nodes, 1, optimizer)),
                    race=race,
                    times=options.times,
                    seeds=options.seeds,
                    losses_of=losses_of,
                )
    print("\n\n".join(report(known)))


if __name__ == "__main__":
    with nothing_left():
        main()
