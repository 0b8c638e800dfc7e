"""Which learning rates each contender of benchmarks/wan does best with: losses only, no network.

    python -m benchmarks.wan.tuning [--every 5 10 20] [--swarm-steps 300] [--ddp-steps 45] [--processes 2]

What is exchanged and how long it takes does not matter here, so all nodes of a contender train in one
process, for as many inner steps as a link leaves it: rounds in fp32 (lab.simulation.plain_calls), for all
that exchange pseudo-gradients; the same with plain averages (outer rate 1, no momentum), which is what
hivemind's Optimizer does; and gradients averaged at every step (benchmarks.learning.data_parallel), for DDP.
The run file is that of benchmarks.wan with all its options. What is best may depend on the number of inner
steps between two exchanges, and all with the same number are set alike: `--every` names the numbers.
"""

import argparse
import itertools
import logging
import math
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import structlog
import torch

from benchmarks.learning.data_parallel import train_data_parallel
from benchmarks.measurement import Rows
from benchmarks.wan import command as wan
from lab.processes.family import nothing_left
from lab.simulation.plain_calls import Setting, train_swarm
from node.island.data.dataset import read_corpus
from protocol.errors import UsageError
from protocol.run.run_files import validated

AVERAGE = (1.0, 0.0)
"""Outer rate and momentum that make an exchange a plain average of parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One setting. Without an outer optimizer gradients are averaged at every step."""

    learning_rate: float
    outer: tuple[float, float] | None  # rate and momentum
    steps_between: int  # inner steps from one exchange to the next; 1 without an outer optimizer
    inner_steps: int  # in all

    def __str__(self) -> str:
        if self.outer is None:
            return f"ddp, learning rate {self.learning_rate:g}"
        kind = "average" if self.outer == AVERAGE else "diloco, outer {:g} with {:g}"
        return (
            f"{kind.format(*self.outer)}, every {self.steps_between} steps, "
            f"learning rate {self.learning_rate:g}"
        )


def loss_of(trial: Trial, chosen: argparse.Namespace) -> float:
    """Held-out loss at the end, in nats per byte."""
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    tables = wan.tables_of(chosen)
    tables["inner"]["steps"] = trial.steps_between
    tables["run"]["rounds"] = trial.inner_steps // trial.steps_between
    tables["inner"]["learning_rate"] = trial.learning_rate
    tables["exchange"] = {"uplink": "fp32", "downlink": "fp32"}
    if trial.outer is not None:
        rate, momentum = trial.outer
        tables["outer"] = {"learning_rate": rate, "momentum": momentum}
    spec = validated(tables, origin="the benchmark's run file")
    corpus = read_corpus(
        spec.data, context=spec.model.context, batch=spec.inner.batch, folder=Path.cwd()
    )
    if trial.outer is None:
        return train_data_parallel(spec, corpus, learning_rate=trial.learning_rate)
    return train_swarm(Setting(name=str(trial)), spec, corpus).loss


def parser() -> argparse.ArgumentParser:
    """Those of benchmarks.wan, and what is tried."""
    made = wan.parser()
    made.prog, made.description = "python -m benchmarks.wan.tuning", __doc__
    made.set_defaults(output=Path("docs/results/wan-tuning.jsonl"))
    made.add_argument("--learning-rates", type=float, nargs="+", default=[1e-3, 2e-3, 4e-3])
    made.add_argument(
        "--outers", nargs="+", default=["0.7,0.9", "0.7,0.3", "1.0,0.2"], metavar="RATE,MOMENTUM"
    )
    made.add_argument(
        "--every", type=int, nargs="+", default=[5, 10, 20], help="inner steps between exchanges"
    )
    made.add_argument("--swarm-steps", type=int, default=300, help="of each node, with rounds")
    made.add_argument("--ddp-steps", type=int, default=45, help="with an exchange at each; 0: none")
    made.add_argument("--processes", type=int, default=2, help="trials side by side")
    return made


def trials_of(chosen: argparse.Namespace) -> list[Trial]:
    """Every combination that was asked for; longest first, so that processes end together."""
    outers = [tuple(map(float, pair.split(","))) for pair in chosen.outers]
    together = math.lcm(*chosen.every)
    if chosen.swarm_steps % together:
        raise UsageError(
            f"--swarm-steps {chosen.swarm_steps}: not all trials exchange after that inner step",
            next_step=f"choose a multiple of {together}",
        )
    trials = [
        Trial(
            learning_rate=rate,
            outer=(outer[0], outer[1]),
            steps_between=every,
            inner_steps=chosen.swarm_steps,
        )
        for every, outer, rate in itertools.product(
            chosen.every, [*outers, AVERAGE], chosen.learning_rates
        )
    ]
    if chosen.ddp_steps:
        trials += [
            Trial(learning_rate=rate, outer=None, steps_between=1, inner_steps=chosen.ddp_steps)
            for rate in chosen.learning_rates
        ]
    return trials


def main() -> None:
    """Tries all, prints, keeps the losses."""
    chosen = parser().parse_args()
    try:
        trials = trials_of(chosen)
    except UsageError as error:
        sys.exit(str(error))
    results = Rows(chosen.results, is_printed=False)
    with ProcessPoolExecutor(chosen.processes, mp_context=get_context("spawn")) as pool:
        losses = pool.map(partial(loss_of, chosen=chosen), trials)
        for trial, loss in zip(trials, losses, strict=True):
            print(f"{loss:.4f}  {trial.inner_steps} steps  {trial}", flush=True)
            results.add(
                {
                    "trial": str(trial),
                    "steps": trial.inner_steps,
                    "loss": loss,
                    "model": chosen.model_size,
                    "every": trial.steps_between,
                    "seed": chosen.seed,
                }
            )


if __name__ == "__main__":
    with nothing_left():
        main()
