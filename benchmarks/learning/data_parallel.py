"""Held-out loss of a swarm against synchronous data parallelism, with the same steps and tokens.

    python -m benchmarks.learning.data_parallel [--seeds 0 1] [--rounds 80] [--nodes 3] [--codecs int4 fp32]
        [--processes 1]

Both train in this process on one thread. The swarm is like the demo's: the real coordinator core, nodes,
codecs and outer optimizer (lab.simulation.swarm). Data parallelism averages the gradients of all
nodes at every inner step, which is one optimizer with a batch as large as all nodes' together. Both
start from the same weights, take each sample once, and follow the same schedule over tokens. A
larger batch may want another learning rate, so data parallelism runs with the swarm's and with that
divided by the square root of the number of nodes, and the better one is the baseline.
"""

import logging
import math
import statistics
import time
import tomllib
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import structlog
import torch

from benchmarks.measurement import parser_of
from lab.processes.family import nothing_left
from lab.simulation.inline_island import lone_work, unseen
from lab.simulation.swarm import Life, simulate
from node.demo.command import DEFAULT_ROUNDS, RUN_FILE
from node.island.data.dataset import Corpus, read_corpus
from node.island.models.first_weights import initial_parameters
from node.island.parallel.mesh import Mesh
from node.island.parallel.mesh_shape import PLAIN, LocalTraining
from node.island.training.trainer import Trainer
from node.outer_state import Vector
from protocol.run.run_files import validated
from protocol.run.run_spec import RunSpec

ADAMW = {"optimizer": "adamw", "learning_rate": 1e-2, "muon_learning_rate": None}


def demo_spec(*, seed: int, rounds: int, num_nodes: int, codec: str) -> RunSpec:
    """The demo's run with another seed, length, size or codec, by AdamW and a model without norms of queries.

    So that figures stay what they were measured with, whatever the demo shows.
    """
    tables = tomllib.loads(RUN_FILE.format(seed=seed, rounds=rounds, num_nodes=num_nodes))
    tables["inner"] |= ADAMW
    tables["model"] |= {"qk_norm": False}
    tables["exchange"] = {"uplink": codec, "downlink": codec}
    tables["evaluation"] = {"every_rounds": rounds, "samples": 256}
    return validated(tables, origin="the demo's run file")


def train_data_parallel(
    spec: RunSpec,
    corpus: Corpus,
    *,
    learning_rate: float,
    device: str = "cpu",
    local: LocalTraining = PLAIN,
    first: Vector | None = None,
) -> float:
    """Held-out loss after as many inner steps and tokens as the whole swarm takes, from the same weights."""
    num_nodes = spec.run.min_nodes
    tables = spec.model_dump(mode="json")
    tables["inner"]["batch"] *= num_nodes
    tables["inner"]["learning_rate"] = learning_rate
    # One round, as schedules follow rounds.
    tables["inner"]["steps"] *= spec.run.rounds
    tables["run"] |= {"min_nodes": 1, "rounds": 1}
    joined = validated(tables, origin="data parallelism")
    trainer = Trainer(
        spec=joined,
        corpus=corpus,
        device=torch.device(device),
        mesh=Mesh(),
        clock=time.monotonic,
        local=local,
    )
    trainer.adopt(initial_parameters(spec) if first is None else first)
    trainer.train(lone_work(joined, joined.inner.steps), unseen)
    return trainer.evaluate().loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What one seed gave."""

    lines: tuple[str, ...]
    ratios: dict[str, float]  # codec -> the swarm's loss over the baseline's


def compare(seed: int, *, rounds: int, num_nodes: int, codecs: tuple[str, ...]) -> Comparison:
    """Trains both with one seed; on one thread, so that seeds may run side by side."""
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    specs = {
        codec: demo_spec(seed=seed, rounds=rounds, num_nodes=num_nodes, codec=codec)
        for codec in codecs
    }
    spec = specs[codecs[0]]
    corpus = read_corpus(
        spec.data, context=spec.model.context, batch=spec.inner.batch, folder=Path.cwd()
    )
    lines: list[str] = []
    baseline = float("inf")
    for rate in (spec.inner.learning_rate, spec.inner.learning_rate / math.sqrt(num_nodes)):
        loss = train_data_parallel(spec, corpus, learning_rate=rate)
        lines.append(f"seed {seed}: data parallelism at {rate:.4g}: {loss:.4f} nats per byte")
        baseline = min(baseline, loss)
    ratios: dict[str, float] = {}
    for codec, swarm_spec in specs.items():
        run = simulate(swarm_spec, lives=[Life()] * num_nodes, corpus=corpus)
        ratios[codec] = run.held_out[-1].loss / baseline
        lines.append(
            f"seed {seed}: swarm of {num_nodes}, {codec}: {run.held_out[-1].loss:.4f} "
            f"({ratios[codec] - 1:+.2%}), {max(run.bytes_sent.values()):,} payload bytes sent "
            "by the busiest node"
        )
    return Comparison(lines=tuple(lines), ratios=ratios)


def main() -> None:
    """Compares for every seed and prints losses and ratios."""
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--rounds", type=int, default=DEFAULT_ROUNDS)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--codecs", nargs="+", default=["int4", "fp32"])
    parser.add_argument("--processes", type=int, default=1, help="seeds that run side by side")
    chosen = parser.parse_args()
    one_seed = partial(
        compare, rounds=chosen.rounds, num_nodes=chosen.nodes, codecs=tuple(chosen.codecs)
    )
    ratios: dict[str, list[float]] = {codec: [] for codec in chosen.codecs}
    with ProcessPoolExecutor(chosen.processes, mp_context=get_context("spawn")) as pool:
        for comparison in pool.map(one_seed, chosen.seeds):
            print("\n".join(comparison.lines), flush=True)
            for codec, ratio in comparison.ratios.items():
                ratios[codec].append(ratio)
    for codec, values in ratios.items():
        spread = f" ± {statistics.stdev(values):.2%}" if len(values) > 1 else ""
        print(f"{codec}: {statistics.mean(values) - 1:+.2%}{spread} over data parallelism")


if __name__ == "__main__":
    with nothing_left():
        main()
