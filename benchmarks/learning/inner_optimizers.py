"""Held-out loss of AdamW and of Muon on one node, with the same steps, samples and first weights.

    python -m benchmarks.learning.inner_optimizers [--model 0.2m] [--batch 16] [--seeds 0 1] [--steps 400]

A model of a usual size on the standard library's source, trained on one thread by the real trainer. Each
optimizer runs with several peak learning rates around its best, and is judged by that. Rates are told in
multiples of AdamW's usual one for the size (coordinator.presets.composing).
"""

import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.learning.data_parallel import demo_spec
from benchmarks.measurement import parser_of
from coordinator.presets.composing import NAMED_MODELS, NamedModel
from lab.simulation.inline_island import lone_work, unseen
from node.island.data.dataset import Corpus, read_corpus
from node.island.models.first_weights import initial_parameters
from node.island.parallel.mesh import Mesh
from node.island.training.trainer import Trainer
from protocol.run.run_files import validated
from protocol.run.run_spec import RunSpec

TIMES: dict[str, tuple[float, ...]] = {"adamw": (0.3, 0.6, 1.0, 2.0), "muon": (1.2, 1.8, 2.4, 4.8)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one training came to."""

    loss: float  # held out, nats per byte
    milliseconds: float  # of an inner step


def trained(spec: RunSpec, corpus: Corpus) -> Outcome:
    """One round of all the run's inner steps, on one node."""
    trainer = Trainer(
        spec=spec, corpus=corpus, device=torch.device("cpu"), mesh=Mesh(), clock=time.monotonic
    )
    trainer.adopt(initial_parameters(spec))
    report = trainer.train(lone_work(spec, spec.inner.steps), unseen)
    return Outcome(
        loss=trainer.evaluate().loss, milliseconds=1000 * report.seconds / report.inner_steps
    )


def spec_of(named: NamedModel, optimizer: str, rate: float, *, seed: int, steps: int) -> RunSpec:
    """One long round of one node."""
    tables = demo_spec(seed=seed, rounds=1, num_nodes=1, codec="int4").model_dump(mode="json")
    tables["model"] = named.model.model_dump(mode="json", exclude_none=True)
    tables["inner"] |= {"optimizer": optimizer, "learning_rate": rate, "steps": steps}
    tables["inner"] |= {"batch": named.batch, "muon_learning_rate": None}
    return validated(tables, origin="the benchmark's run file")


def main() -> None:
    """Trains every combination and prints losses, then each optimizer's best."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=list(NAMED_MODELS), default="0.2m")
    parser.add_argument("--batch", type=int, default=16, help="samples of an inner step")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=400)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    named = replace(NAMED_MODELS[chosen.model], batch=chosen.batch)
    some = spec_of(named, "adamw", named.learning_rate, seed=0, steps=1)
    corpus = read_corpus(
        some.data, context=some.model.context, batch=some.inner.batch, folder=Path.cwd()
    )
    best: dict[str, float] = {}
    for optimizer, all_times in TIMES.items():
        for times in all_times:
            rate = times * named.learning_rate
            outcomes = [
                trained(spec_of(named, optimizer, rate, seed=seed, steps=chosen.steps), corpus)
                for seed in chosen.seeds
            ]
            mean = statistics.mean(outcome.loss for outcome in outcomes)
            best[optimizer] = min(mean, best.get(optimizer, mean))
            losses = ", ".join(f"{outcome.loss:.4f}" for outcome in outcomes)
            milliseconds = statistics.median(outcome.milliseconds for outcome in outcomes)
            print(f"{optimizer} at {rate:g}: {losses}; {milliseconds:.1f} ms a step", flush=True)
    print(f"best: {', '.join(f'{name} {loss:.4f}' for name, loss in best.items())} nats per byte")


if __name__ == "__main__":
    main()
