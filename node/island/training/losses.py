"""Losses of a rank's model at its present parameters: held-out, and of single training samples.

They teach nothing and draw alike each time. How parameters come there and back is in trainer.py.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from node.island.data.dataset import Batch, Dataset, Indices, SampleOrder, Tree, held_out_choice
from node.island.data.functions import draw_from, drawing, seed_of
from node.island.data.manifest import Split
from node.island.island import Evaluation
from node.island.models.running_statistics import batches_for
from node.island.parallel.mesh import Mesh
from node.island.training.engine import Engine
from protocol.run.run_spec import RunSpec


class Losses:
    """Measures. All ranks make the same calls in the same order."""

    def __init__(
        self,
        *,
        spec: RunSpec,
        corpus: Dataset,
        order: SampleOrder,
        engine: Engine,
        mesh: Mesh,
        device: torch.device,
    ) -> None:
        self._spec = spec
        self._corpus = corpus
        self._order = order
        self._engine = engine
        self._mesh = mesh
        self._device = device

    def held_out(self, on_batch: Callable[[], None] = lambda: None) -> Evaluation:
        """Over a fixed choice of samples, spread evenly over the held-out split."""
        with self._drawing_alike():
            self._compute_statistics(on_batch)
            available = self._corpus.num_held_out_samples
            chosen = held_out_choice(self._spec.evaluation.samples, available)
            count = len(chosen)
            own = chosen[self._mesh.share(count)]
            rows = self._engine.rows
            most = -(-count // self._mesh.num_data)  # of any rank: all must go on together
            sums = torch.zeros(4, dtype=torch.float64)
            for start in range(0, most, rows):
                own_chosen = own[start : start + rows]
                batch = self._drawn("held_out", own_chosen)
                sums += self._engine.measure(batch, num_samples=len(own_chosen)).tallied()
                on_batch()
        loss, weight, metric, samples = self._mesh.summed(sums).tolist()
        return Evaluation(
            loss=loss / max(1.0, weight),
            tokens=self._corpus.num_counted("held_out", chosen),
            metric=metric / samples if self._engine.has_metric else None,
        )

    def of_samples(
        self, places: Sequence[int], on_sample: Callable[[], None] = lambda: None
    ) -> tuple[float, ...]:
        """Losses [places] in nats per token, by the samples' places in the sample order.

        Ranks share them, and each measures one at a time.
        """
        indices = np.concatenate([self._order.indices(place, 1) for place in places])
        self._corpus.expect("training", indices)
        share = self._mesh.share(len(indices))
        own = range(len(indices))[share]
        sums = torch.zeros((len(indices), 2), dtype=torch.float64)
        with self._drawing_alike():
            self._compute_statistics(on_sample)
            for turn in range(-(-len(indices) // self._mesh.num_data)):
                # Of those that have no sample left too: parameters are gathered by all at once.
                place = own[turn] if turn < len(own) else None
                batch = self._drawn("training", indices[[0 if place is None else place]])
                count = 0 if place is None else 1
                measured = self._engine.measure(batch, num_samples=count, rows=1).tallied()
                if place is not None:
                    sums[place] = measured[:2]
                on_sample()
        sums = self._mesh.summed(sums)
        return tuple((sums[:, 0] / sums[:, 1].clamp(min=1.0)).tolist())

    def _compute_statistics(self, on_batch: Callable[[], None]) -> None:
        """Running statistics for the model's parameters, over the run's first training samples.

        Ranks share batches, and not samples: what a batch normalises by depends on its size.
        """
        if not self._engine.has_statistics:
            return
        chosen = batches_for(self._spec, self._order, self._corpus.num_samples)
        self._corpus.expect("training", np.concatenate(chosen))
        num_data = self._mesh.num_data
        part = self._mesh.share(num_data).start  # of this rank's data, counted from 0

        def batches() -> Iterator[Batch | Tree]:
            for first in range(0, len(chosen), num_data):
                # All ranks take as many.
                yield self._drawn("training", chosen[(first + part) % len(chosen)])
                on_batch()

        self._engine.compute_statistics(batches())

    def _drawing_alike(self) -> contextlib.AbstractContextManager[None]:
        """Within it measures draw by `_drawn`; training goes on with its own draws after it.

        Else a loss that draws, as of masked tokens, is another one at each measure of the same weights:
        held-out losses jump, and what was learned of a sample drowns in it.
        """
        if not self._engine.draws:
            return contextlib.nullcontext()
        return drawing(self._spec.run.seed, self._device)

    def _drawn(self, split: Split, indices: Indices) -> Batch | Tree:
        """Samples, for which the model draws the same each time."""
        if self._engine.draws:
            first = int(indices[0]) if len(indices) else 0
            draw_from(seed_of(self._spec.run.seed, split, first), self._device)
        return self._corpus.batch(split, indices)
