"""One node's training without Atoll: what all other contenders do alike.

Model, first weights, samples, inner optimizer and learning rates are Atoll's own, so that only the way
of exchanging differs. Node p trains in round r the samples that a plan of Atoll would lease it.
"""

import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.wan.peers.order import Order, Teller
from benchmarks.wan.peers.pace import Pace
from node.island.data.dataset import SampleOrder, read_corpus
from node.island.models.architecture import copy_parameters
from node.island.models.decoder_modules import Decoder, Objective
from node.island.models.first_weights import initial_parameters
from node.island.training.optimizers import inner_optimizers
from node.outer_state import Vector
from protocol.run.models import layout_of
from protocol.run.run_spec import InnerSection
from protocol.run.schedule import Position, share_of_peak

MEETING_PATIENCE = timedelta(seconds=180)


def first_sample(inner: InnerSection, step: int, rank: int, num_nodes: int) -> int:
    """The place of a step's first sample in the run's order: each node has a run of them a round."""
    round_, within = divmod(step, inner.steps)
    return ((round_ * num_nodes + rank) * inner.steps + within) * inner.batch


class Training:
    """A node's model and what an inner step does with it."""

    def __init__(self, order: Order) -> None:
        torch.set_num_threads(1)
        self.order = order
        self.spec = order.spec
        self.teller = Teller(order)
        self.pace = Pace(order.step_seconds)
        inner = self.spec.inner
        self._corpus = read_corpus(
            self.spec.data, context=self.spec.model.context, batch=inner.batch, folder=Path.cwd()
        )
        self._samples = SampleOrder(seed=self.spec.run.seed, num_samples=self._corpus.num_samples)
        self._layout = layout_of(self.spec)
        self.decoder = Decoder(self.spec.decoder)
        first = initial_parameters(self.spec)
        copy_parameters(self.decoder, self._layout, first)
        self.pace.attach(self.decoder.model.layers)
        self.objective: nn.Module = Objective(self.decoder)
        (self.optimizer,) = inner_optimizers(self.decoder, inner)

    def inner_step(self, step: int, take: Callable[[], object] | None = None) -> None:
        """Forward, backward, clipping, and the optimizer's step, or `take` in its place."""
        if not self.teller.has_begun:
            self.teller.begin()
        self.pace.begin()
        self._set_learning_rate(step)
        first = first_sample(self.spec.inner, step, self.order.rank, self.order.num_nodes)
        indices = self._samples.indices(first, self.spec.inner.batch)
        windows = torch.from_numpy(self._corpus.windows(self._corpus.training, indices))
        loss: Tensor = self.objective(windows[:, :-1], windows[:, 1:])
        loss.backward()  # type: ignore[no-untyped-call]  # torch declares no types
        nn.utils.clip_grad_norm_(self.decoder.parameters(), self.spec.inner.clip)
        (take or self.optimizer.step)()
        self.optimizer.zero_grad(set_to_none=True)
        self.pace.end()

    def _set_learning_rate(self, step: int) -> None:
        done = step + 0.5
        at = Position(
            progress=min(1.0, done / (self.spec.run.rounds * self.spec.inner.steps)),
            tokens=done * self.order.num_nodes * self.spec.tokens_per_inner_step,
        )
        share = share_of_peak(self.spec.inner, at)
        for group in self.optimizer.param_groups:
            group["lr"] = share * group["peak_rate"]

    def save_if_due(self, exchanges: int) -> None:
        """To be called after an exchange, when the weights are the global ones."""
        self.teller.save_if_due(
            self.weights,
            exchanges=exchanges,
            steps=self.pace.steps,
            late_steps=self.pace.late_steps,
        )

    def weights(self) -> Vector:
        """All parameters as one canonical vector."""
        named = dict(self.decoder.named_parameters())
        vector = np.empty(self._layout.num_elements, np.float32)
        for place in self._layout.places:
            values = named[place.name].detach().reshape(-1).numpy()
            vector[place.offset : place.offset + place.num_elements] = values
        return vector


def meet(order: Order) -> None:
    """Returns when all nodes are as far: before that no contender's clock runs."""
    path = str(order.folder / "meeting")
    meeting = dist.FileStore(path, order.num_nodes)  # type: ignore[attr-defined]  # is public
    meeting.set_timeout(MEETING_PATIENCE)
    meeting.set(f"{order.rank} is here", "")
    meeting.wait([f"{rank} is here" for rank in range(order.num_nodes)])


def join_gloo(order: Order) -> None:
    """Meets the other nodes in a file; what follows goes over the interface that the environment names."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{order.folder}/meeting",
        rank=order.rank,
        world_size=order.num_nodes,
    )
    dist.barrier()


def own_order() -> Order:
    """The one that the command names."""
    return Order.read(sys.argv[1])
