"""What norms remember of training, which no exchange averages: it is computed anew for global parameters.

Running statistics of BatchNorm, SyncBatchNorm and InstanceNorm do nothing while a model trains. Before it is
evaluated or exported they become means over some training batches ("precise batch norm", Wu and Johnson,
2021, arXiv 2105.07576, section 3). All nodes take the same samples in the same batches, so they agree but for
rounding. Spectral norm's vectors follow from the weights alone.

`atoll.running_statistics` does the same for loops of contributors' own, in environments of theirs.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm

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
    """The buffers, by their names, and spectral norm's vectors."""
    parts = list(parts)
    vectors = [each for part in parts for each in spectral_vectors_of(part)]
    return {
        f"{name}.{own}": buffer
        for name, norm in norms_of(parts).items()
        for own, buffer in norm.named_buffers(recurse=False)
        if own in ("running_mean", "running_var", "num_batches_tracked")
    } | {
        name: buffer
        for each in vectors
        for name, buffer in zip(each.names, each.buffers, strict=True)
    }


def num_norms_of(module: nn.Module) -> int:
    """How many norms of a model remember something of training."""
    return len(norms_of([module])) + len(list(spectral_vectors_of(module)))


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


class SpectralVectors:
    """What spectral norm knows of one weight: its leading singular vectors, as far as training has come.

    They follow from the weight, so each node keeps its own while it trains, one step behind. Both forms of
    torch's have them, the parametrization and the older hook.
    """

    def __init__(
        self, *, names: tuple[str, str], owner: nn.Module, of: Callable[[], Tensor]
    ) -> None:
        self.names = names  # of u and v, in the model
        self._owner = owner
        self._matrix = of

    @property
    def buffers(self) -> tuple[Tensor, Tensor]:
        """Both of them: some ways of moving a model put others in their place."""
        u, v = (self._owner.get_buffer(name.rpartition(".")[2]) for name in self.names)
        return u, v

    @torch.no_grad()
    def settle(self) -> None:
        """Makes them those of the present weight, by iterations from a fixed start: alike on all nodes."""
        matrix = self._matrix()
        u, v = leading_vectors(matrix.to(torch.promote_types(matrix.dtype, torch.float32)))
        for buffer, value in zip(self.buffers, (u, v), strict=True):
            buffer.copy_(value)


def spectral_vectors_of(model: nn.Module) -> Iterator[SpectralVectors]:
    """Of all weights of a model that have spectral norm."""
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, ParametrizationList):
            for place, each in enumerate(module):
                if isinstance(each, _SpectralNorm) and hasattr(each, "_u"):  # none of a vector
                    names = f"{prefix}{place}._u", f"{prefix}{place}._v"
                    yield SpectralVectors(
                        names=names, owner=each, of=partial(_parametrized, module, place)
                    )
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                names = f"{prefix}{hook.name}_u", f"{prefix}{hook.name}_v"
                yield SpectralVectors(names=names, owner=module, of=partial(_hooked, module, hook))


def leading_vectors(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The leading singular vectors [rows], [columns] of a matrix, until its norm by them stands still."""
    draws = torch.Generator().manual_seed(0)
    v = nn.functional.normalize(torch.randn(matrix.shape[1], generator=draws).to(matrix), dim=0)
    before = 0.0
    for _ in range(MOST_LOOKS):
        for _ in range(BETWEEN_LOOKS):
            u = nn.functional.normalize(matrix @ v, dim=0)
            back = matrix.mH @ u
            v = nn.functional.normalize(back, dim=0)
        if (norm := float(back.norm())) <= before * (1 + NEAR_ENOUGH):
            break
        before = norm
    return u, v


MOST_LOOKS, BETWEEN_LOOKS, NEAR_ENOUGH = 20, 20, 1e-6
"""Times that the norm is looked at, power iterations before each, and by what share it still grows then."""


def _parametrized(owner: ParametrizationList, place: int) -> Tensor:
    """The matrix that the parametrization at `place` is given: of others before it, what they make."""
    originals = [owner.original] if owner.is_tensor else []
    originals = originals or [getattr(owner, f"original{n}") for n in range(owner.ntensors)]
    found: Any = [_whole(each, owner) for each in originals]
    for number, each in enumerate(owner):
        if number == place:
            break
        found = [each(*found)]
    norm: Any = owner[place]
    matrix: Tensor = norm._reshape_weight_to_matrix(found[0])
    return matrix


def _hooked(module: nn.Module, hook: SpectralNorm) -> Tensor:
    weight = _whole(getattr(module, f"{hook.name}_orig"), module)
    return hook.reshape_weight_to_matrix(weight)


def _whole(weight: Tensor, owner: nn.Module) -> Tensor:
    """All of it where the vectors are, also where ranks share it: they gather it together."""
    from torch.distributed.tensor import DTensor

    device = next(owner.buffers()).device  # shards may be in the CPU's memory
    values = weight.detach().to(device)
    return values.full_tensor() if isinstance(values, DTensor) else values
