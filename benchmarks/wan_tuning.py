"""Which learning rates each contender of benchmarks/wan.py does best with: losses only, no network.

    python -m benchmarks.wan_tuning [--swarm-steps 300] [--ddp-steps 45] [--processes 2]

What is exchanged and how long it takes does not matter here, so all nodes of a contender train in one
process, for as many inner steps as a link leaves it: rounds in fp32 (benchmarks.local_swarm), for all
that exchange pseudo-gradients; the same with plain averages (outer rate 1, no momentum), which is what
hivemind's Optimizer does; and gradients averaged at every step (benchmarks.data_parallel), for DDP. The
run file is that of benchmarks.wan with all its options.
"""

import argparse
import itertools
import json
import logging
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import structlog
import torch

from benchmarks import wan
from benchmarks.data_parallel import train_data_parallel
from benchmarks.ending import nothing_left
from benchmarks.local_swarm import Setting, train_swarm
from node.island.corpus import read_corpus
from protocol.run_spec import validated

AVERAGE = (1.0, 0.0)
"""Outer rate and momentum that make an exchange a plain average of parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One setting. Without an outer optimizer gradients are averaged at every step."""

    learning_rate: float
    outer: tuple[float, float] | None  # rate and momentum
    inner_steps: int

    def __str__(self) -> str:
        if self.outer is None:
            return f"ddp, learning rate {self.learning_rate:g}"
        kind = "average" if self.outer == AVERAGE else "diloco, outer {:g} with {:g}"
        return f"{kind.format(*self.outer)}, learning rate {self.learning_rate:g}"


def loss_of(trial: Trial, chosen: argparse.Namespace) -> float:
    """Held-out loss at the end, in nats per byte."""
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    tables = wan.tables_of(chosen)
    steps = tables["inner"]["steps"]
    tables["run"]["rounds"] = -(-trial.inner_steps // steps)
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
    made.prog, made.description = "python -m benchmarks.wan_tuning", __doc__
    made.set_defaults(output=Path("docs/results/wan-tuning.jsonl"))
    made.add_argument("--learning-rates", type=float, nargs="+", default=[1e-3, 2e-3, 4e-3])
    made.add_argument(
        "--outers", nargs="+", default=["0.7,0.9", "0.7,0.3", "1.0,0.2"], metavar="RATE,MOMENTUM"
    )
    made.add_argument("--swarm-steps", type=int, default=300, help="of each node, with rounds")
    made.add_argument("--ddp-steps", type=int, default=45, help="with an exchange at each; 0: none")
    made.add_argument("--processes", type=int, default=2, help="trials side by side")
    return made


def trials_of(chosen: argparse.Namespace) -> list[Trial]:
    """Every combination that was asked for; longest first, so that processes end together."""
    outers = [tuple(map(float, pair.split(","))) for pair in chosen.outers]
    trials = [
        Trial(learning_rate=rate, outer=(outer[0], outer[1]), inner_steps=chosen.swarm_steps)
        for outer, rate in itertools.product([*outers, AVERAGE], chosen.learning_rates)
    ]
    if chosen.ddp_steps:
        trials += [
            Trial(learning_rate=rate, outer=None, inner_steps=chosen.ddp_steps)
            for rate in chosen.learning_rates
        ]
    return trials


def main() -> None:
    """Tries all, prints, keeps the losses."""
    chosen = parser().parse_args()
    trials = trials_of(chosen)
    with ProcessPoolExecutor(chosen.processes, mp_context=get_context("spawn")) as pool:
        losses = pool.map(partial(loss_of, chosen=chosen), trials)
        for trial, loss in zip(trials, losses, strict=True):
            print(f"{loss:.4f}  {trial.inner_steps} steps  {trial}", flush=True)
            line = {"trial": str(trial), "steps": trial.inner_steps, "loss": loss}
            with chosen.output.open("a") as file:
                file.write(json.dumps(line | {"model": chosen.model_size}) + "\n")


if __name__ == "__main__":
    with nothing_left():
        main()
