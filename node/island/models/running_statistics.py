"""Running statistics of BatchNorm, SyncBatchNorm and InstanceNorm, which no exchange averages.

They do nothing while a model trains. Before it is evaluated or exported they are computed anew for its
global parameters, as means over some training batches ("precise batch norm", Wu and Johnson, 2021, arXiv
2105.07576, section 3). All nodes take the same samples in the same batches, so they agree but for rounding.
`atoll.running_statistics` does the same for loops of contributors' own, in environments of theirs.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from node.island.data.dataset import Indices, SampleOrder
from protocol.run.run_spec import RunSpec

STATISTICS_ROWS = 32
"""Samples that go through the model together for them, or `[inner] batch` where that is less.

The same on all nodes, whatever their micro-batches: in smaller ones the layers above see other inputs.
"""

STATISTICS_BATCHES = 16
"""Least number of those batches; more where evaluation takes more samples."""


def batches_for(spec: RunSpec, order: SampleOrder, num_samples: int) -> list[Indices]:
    """The training samples that they are computed over, batch by batch: the first of the run's order."""
    size = min(STATISTICS_ROWS, spec.inner.batch)
    most = max(spec.evaluation.samples, STATISTICS_BATCHES * size)
    chosen = order.indices(0, min(most, num_samples))
    return [chosen[first : first + size] for first in range(0, len(chosen) - size + 1, size)]


def norms_of(parts: Iterable[nn.Module]) -> dict[str, _NormBase]:
    """Those that keep running statistics, by their names."""
    return {
        name: module
        for part in parts
        for name, module in part.named_modules()
        if isinstance(module, _NormBase) and module.running_mean is not None
    }


def statistics_of(parts: Iterable[nn.Module]) -> dict[str, Tensor]:
    """The buffers, by their names."""
    return {
        f"{name}.{own}": buffer
        for name, norm in norms_of(parts).items()
        for own, buffer in norm.named_buffers(recurse=False)
        if own in ("running_mean", "running_var", "num_batches_tracked")
    }


@contextmanager
def averaging(
    parts: Iterable[nn.Module], over_ranks: Callable[[Tensor], Tensor] = lambda each: each
) -> Iterator[None]:
    """Within it norms in training mode see batches; then their statistics are the means over those.

    `over_ranks` gives the mean over ranks that have seen other samples.
    """
    norms = [norm for norm in norms_of(parts).values() if norm.training]
    means = [_Mean(norm) for norm in norms]
    try:
        # What was compiled would be compiled again for each batch's share of the mean.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for mean in means:
            mean.end()
    for norm in norms:
        assert norm.running_mean is not None and norm.running_var is not None
        for statistic in (norm.running_mean, norm.running_var):
            statistic.copy_(over_ranks(statistic))


class _Mean:
    """Has a norm take the mean over all batches from now on, the k-th with a share of 1 / k."""

    def __init__(self, norm: _NormBase) -> None:
        self._num_batches = 0
        self._norm = norm
        self._momentum = norm.momentum
        self._handle = norm.register_forward_pre_hook(self._before)

    def _before(self, _norm: nn.Module, _inputs: Any) -> None:
        if not self._num_batches:
            self._norm.reset_running_stats()  # no share of 0 takes away what is no number
        self._num_batches += 1
        self._norm.momentum = 1 / self._num_batches

    def end(self) -> None:
        """Leaves the norm as it was, but for what it has measured."""
        self._handle.remove()
        self._norm.momentum = self._momentum
