"""Held-out loss of a swarm against synchronous data parallelism, with the same steps and tokens.

    python -m benchmarks.data_parallel [--seeds 0 1] [--rounds 60] [--nodes 3] [--codecs int4 fp32]

Both train in this process on one thread. The swarm is the demo's: the real coordinator core, nodes,
codecs and outer optimizer (benchmarks.simulation). Data parallelism averages the gradients of all
nodes at every inner step, which is one optimizer with a batch as large as all nodes' together. Both
start from the same weights, take each sample once, and follow the same schedule over tokens. A
larger batch may want another learning rate, so data parallelism runs with the swarm's and with that
divided by the square root of the number of nodes, and the better one is the baseline.
"""

import argparse
import logging
import math
import statistics
import time
import tomllib
from pathlib import Path

import structlog
import torch

from benchmarks.simulation import Life, simulate
from node.demo.command import DEFAULT_ROUNDS, RUN_FILE
from node.island.corpus import Corpus, read_corpus
from node.island.first_weights import initial_parameters
from node.island.island import InnerWork
from node.island.mesh import Mesh
from node.island.trainer import Trainer
from protocol.run_spec import RunSpec, validated


def demo_spec(*, seed: int, rounds: int, num_nodes: int, codec: str) -> RunSpec:
    """The demo's run with another seed, length, size or codec."""
    tables = tomllib.loads(RUN_FILE.format(seed=seed, rounds=rounds, num_nodes=num_nodes))
    tables["exchange"] = {"uplink": codec, "downlink": codec}
    tables["evaluation"] = {"every_rounds": rounds, "samples": 256}
    return validated(tables, origin="the demo's run file")


def train_data_parallel(spec: RunSpec, corpus: Corpus, *, learning_rate: float) -> float:
    """Held-out loss after as many inner steps and tokens as the whole swarm takes."""
    num_nodes = spec.run.min_nodes
    tables = spec.model_dump(mode="json")
    tables["inner"]["batch"] *= num_nodes
    tables["inner"]["learning_rate"] = learning_rate
    tables["run"]["min_nodes"] = 1
    joined = validated(tables, origin="data parallelism")
    trainer = Trainer(
        spec=joined,
        corpus=corpus,
        device=torch.device("cpu"),
        mesh=Mesh(),
        clock=time.monotonic,
    )
    trainer.adopt(initial_parameters(spec.model, spec.run.seed))
    steps = spec.run.rounds * spec.inner.steps
    trainer.train(
        InnerWork(
            round=1,
            inner_steps=steps,
            first_sample=0,
            num_samples=steps * joined.inner.batch,
            token_clock=0,
            tokens_per_inner_step=joined.tokens_per_inner_step,
            max_seconds=float("inf"),
        ),
        lambda progress: None,
    )
    return trainer.evaluate().loss


def main() -> None:
    """Runs both for every seed and prints losses and ratios."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--rounds", type=int, default=DEFAULT_ROUNDS)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--codecs", nargs="+", default=["int4", "fp32"])
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    ratios: dict[str, list[float]] = {codec: [] for codec in chosen.codecs}
    for seed in chosen.seeds:
        specs = {
            codec: demo_spec(seed=seed, rounds=chosen.rounds, num_nodes=chosen.nodes, codec=codec)
            for codec in chosen.codecs
        }
        spec = next(iter(specs.values()))
        corpus = read_corpus(
            spec.data, context=spec.model.context, batch=spec.inner.batch, folder=Path.cwd()
        )
        baseline = float("inf")
        for rate in (
            spec.inner.learning_rate,
            spec.inner.learning_rate / math.sqrt(chosen.nodes),
        ):
            loss = train_data_parallel(spec, corpus, learning_rate=rate)
            print(
                f"seed {seed}: data parallelism at {rate:.4g}: {loss:.4f} nats per byte", flush=True
            )
            baseline = min(baseline, loss)
        for codec, spec in specs.items():
            run = simulate(spec, lives=[Life()] * chosen.nodes, corpus=corpus)
            loss = run.held_out[-1].loss
            ratios[codec].append(loss / baseline)
            sent = max(run.bytes_sent.values())
            print(
                f"seed {seed}: swarm of {chosen.nodes}, {codec}: {loss:.4f} "
                f"({loss / baseline - 1:+.2%}), {sent:,} payload bytes sent by the busiest node",
                flush=True,
            )
    for codec, values in ratios.items():
        spread = f" ± {statistics.stdev(values):.2%}" if len(values) > 1 else ""
        print(f"{codec}: {statistics.mean(values) - 1:+.2%}{spread} over data parallelism")


if __name__ == "__main__":
    main()
