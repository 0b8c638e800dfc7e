"""What a restart costs: held-out loss after it, with moments of different age or none at all.

    python -m benchmarks.learning.inner_restarts [--seeds 0 1] [--rounds 40]

The demo's model on the standard library's source, one node, one thread, the real trainer and real
checkpoint files. At some rounds training is continued from the same weights and on the same samples
by new ranks that load the checkpoint of that round, one of some rounds before, or none, with the
re-warm-up and without; and is compared with the training that was never interrupted.
"""

import math
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

from benchmarks.learning.data_parallel import demo_spec
from benchmarks.measurement import parser_of
from lab.simulation.inline_island import lone_work, unseen
from node.island.checkpoints.folder import CheckpointFolder
from node.island.checkpoints.writer import CheckpointWriter
from node.island.data.dataset import Corpus, read_corpus
from node.island.models.first_weights import initial_parameters
from node.island.parallel.mesh import Mesh
from node.island.training.trainer import Trainer
from node.outer_state import Vector
from protocol.run.models import layout_of
from protocol.run.run_spec import RunSpec

AGES = (0, 1, 5, 10, 20)
LOOKS = (1, 3)
"""Rounds after the restart at which the loss is measured."""

EVERY = 8
"""Rounds between the restarts that are tried."""


class Line:
    """One training, round by round, with its checkpoints in a folder of their own for each round."""

    def __init__(self, spec: RunSpec, corpus: Corpus, parameters: Vector, place: Path) -> None:
        self._spec = spec
        self._layout = layout_of(spec)
        self._place = place
        self.parameters = parameters.copy()
        self.trainer = Trainer(
            spec=spec, corpus=corpus, device=torch.device("cpu"), mesh=Mesh(), clock=time.monotonic
        )
        self._writer = CheckpointWriter(self.trainer, Mesh())
        self.trainer.adopt(self.parameters)

    def train(self, round_: int) -> None:
        """One round, on the samples that are that round's whoever trains it."""
        self.trainer.train(lone_work(self._spec, self._spec.inner.steps, round=round_), unseen)
        self.trainer.publish(self.parameters, 0)

    def keep(self, round_: int) -> None:
        """Writes a checkpoint."""
        kept = self._writer.keep(self._folder(round_), round_, is_waited=True)
        if kept.failure:
            raise RuntimeError(kept.failure)

    def load(self, round_: int) -> None:
        """Goes on with the moments of a round."""
        (checkpoint,) = self._folder(round_).whole()
        loaded = self._writer.load(checkpoint.about, checkpoint.path)
        if loaded.failure:
            raise RuntimeError(loaded.failure)

    def _folder(self, round_: int) -> CheckpointFolder:
        return CheckpointFolder(
            path=self._place / str(round_),
            run_digest=self._spec.digest(),
            layout_digest=self._layout.summary().digest,
            every_rounds=1,
        )


def excess_losses(spec: RunSpec, corpus: Corpus) -> dict[tuple[str, int], list[float]]:
    """By kind of restart and rounds after it: held-out loss less that without a restart."""
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as place:
        line = Line(spec, corpus, initial_parameters(spec), place=Path(place))
        weights: dict[int, Vector] = {}
        losses: dict[int, float] = {}
        for round_ in range(1, spec.run.rounds + 1):
            line.train(round_)
            line.keep(round_)
            weights[round_] = line.parameters.copy()
            losses[round_] = line.trainer.evaluate().loss
        for at in range(EVERY, spec.run.rounds - max(LOOKS) + 1, EVERY):
            kinds = [f"moments {age} rounds old" for age in AGES if age < at]
            for kind in [*kinds, "zero, re-warm-up", "zero"]:
                again = Line(spec, corpus, weights[at], place=Path(place))
                if kind.startswith("moments"):
                    again.load(at - int(kind.split()[1]))
                elif kind == "zero":
                    again.trainer._rewarming.go_on(0)
                for after in range(1, max(LOOKS) + 1):
                    again.train(at + after)
                    if after in LOOKS:
                        excess = again.trainer.evaluate().loss - losses[at + after]
                        found[kind, after].append(excess)
                if kind.startswith("moments 0 "):
                    np.testing.assert_array_equal(again.parameters, weights[at + max(LOOKS)])
    return found


def main() -> None:
    """Prints the mean and the spread of every kind of restart."""
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--rounds", type=int, default=40)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    all_: dict[tuple[str, int], list[float]] = defaultdict(list)
    for seed in chosen.seeds:
        spec = demo_spec(seed=seed, rounds=chosen.rounds, num_nodes=1, codec="int4")
        corpus = read_corpus(
            spec.data, context=spec.model.context, batch=spec.inner.batch, folder=Path.cwd()
        )
        for key, excess in excess_losses(spec, corpus).items():
            all_[key] += excess
        print(f"seed {seed} done", flush=True)
    for (kind, after), excess in all_.items():
        mean, spread = (
            statistics.mean(excess),
            statistics.stdev(excess) if len(excess) > 1 else math.nan,
        )
        print(
            f"{kind:22} {after} round(s) after: {1000 * mean:+7.2f} (± {1000 * spread:5.2f}, "
            f"{len(excess)} restarts) thousandths of a nat per byte"
        )


if __name__ == "__main__":
    main()
