"""Running statistics of a model's norms, which no exchange averages and every node keeps for itself.

They do nothing while a model trains. Where the model is evaluated or kept, they have to be those of the
global parameters. So they are computed anew then, as means over some training batches ("precise batch norm",
Wu and Johnson, 2021, arXiv 2105.07576, section 3).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from atoll.errors import ModelMismatchError, SwarmError
from atoll.ranks import Ranks

Compute = Callable[[], object]

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class RunningStatistics:
    """The running statistics of a model: of BatchNorm, SyncBatchNorm and InstanceNorm.

    `compute` runs the model over some training batches. Norms that were in eval mode at an inner step are
    frozen: theirs stay.
    """

    def __init__(
        self, model: nn.Module, *, averaged: Iterable[Tensor], compute: Compute | None, ranks: Ranks
    ) -> None:
        """`averaged` are buffers that the run itself exchanges."""
        known = {id(tensor) for tensor in averaged}
        self._norms = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, _NormBase)
            and module.running_mean is not None
            and id(module.running_mean) not in known
        }
        self._compute = compute
        self._ranks = ranks
        self._frozen: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        """Of their buffers, in the model."""
        return frozenset(f"{norm}.{own}" for norm in self._norms for own in STATISTICS)

    def look(self) -> None:
        """Sees which norms train now, and which are frozen. Raises ModelMismatchError as below."""
        self.refuse_if_untold()
        self._frozen = frozenset(n for n, norm in self._norms.items() if not norm.training)

    def refuse_if_untold(self) -> None:
        """Raises ModelMismatchError where norms train, and nobody can compute their statistics."""
        training = [name for name, norm in self._norms.items() if norm.training]
        if training and self._compute is None:
            more = f" and {len(training) - 1} more" if len(training) > 1 else ""
            raise ModelMismatchError(
                f"{training[0]}{more} ({type(self._norms[training[0]]).__name__}) keeps running statistics, "
                "and nobody says how those of the global parameters are computed, which evaluation needs",
                next_step="give atoll.join(…, statistics=FUNCTION), which runs the model over some training "
                "batches, or normalise without a batch (GroupNorm)",
            )

    @contextmanager
    def of_these_weights(self) -> Iterator[None]:
        """Within it they are those of the model's present parameters; then again what they were."""
        kept = [(own, own.clone()) for norm in self._norms.values() for own in _own(norm)]
        self.settle()
        try:
            yield
        finally:
            with torch.no_grad():
                for own, value in kept:
                    own.copy_(value)

    def settle(self) -> None:
        """Computes them for the model's present parameters, over what `compute` runs on all ranks."""
        live = {name: norm for name, norm in self._norms.items() if name not in self._frozen}
        if not live or self._compute is None:
            return
        means = [_Mean(norm) for norm in live.values()]
        try:
            # What was compiled would be compiled again for each batch's share of the mean.
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                self._compute()
        finally:
            for mean in means:
                mean.end()
        if not any(mean.num_batches for mean in means):
            raise SwarmError(
                "the function given as statistics=… has run none of the model's norms, so they have no "
                "running statistics",
                next_step="let it call the model on some training batches",
            )
        for norm in live.values():
            assert norm.running_mean is not None and norm.running_var is not None
            self._ranks.average(norm.running_mean)
            self._ranks.average(norm.running_var)


class _Mean:
    """Has a norm take the mean over all batches from now on, the k-th with a share of 1 / k."""

    def __init__(self, norm: _NormBase) -> None:
        self.num_batches = 0
        self._norm = norm
        self._was = norm.momentum, norm.training
        self._handle = norm.register_forward_pre_hook(self._before)

    def _before(self, norm: nn.Module, _inputs: Any) -> None:
        if not self.num_batches:
            self._norm.reset_running_stats()  # no share of 0 takes away what is no number
        self.num_batches += 1
        self._norm.train()  # also where the function has called eval()
        self._norm.momentum = 1 / self.num_batches

    def end(self) -> None:
        """Leaves the norm as it was, but for what it has measured."""
        self._handle.remove()
        self._norm.momentum, is_training = self._was
        self._norm.train(is_training)


def _own(norm: _NormBase) -> Iterator[Tensor]:
    for name in STATISTICS:
        if (tensor := getattr(norm, name)) is not None:
            yield tensor
