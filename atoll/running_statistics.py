"""What a model's norms remember of training, which no exchange averages and every node keeps for itself.

Running statistics do nothing while a model trains. Where the model is evaluated or kept, they have to be
those of the global parameters. So they are computed anew then, as means over some training batches ("precise
batch norm", Wu and Johnson, 2021, arXiv 2105.07576, section 3). Spectral norm's vectors follow from the
weights alone.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm

from atoll.draws import drawing_alike
from atoll.errors import ModelMismatchError, SwarmError
from atoll.ranks import Ranks

Compute = Callable[[], object]

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class RunningStatistics:
    """The running statistics of a model: of BatchNorm, SyncBatchNorm and InstanceNorm; and spectral vectors.

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
        self._model = model
        self._spectral = list(spectral_vectors_of(model))
        self._compute = compute
        self._ranks = ranks
        self._frozen: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        """Of their buffers, in the model."""
        vectors = chain.from_iterable(each.names for each in self._spectral)
        return frozenset(f"{norm}.{own}" for norm in self._norms for own in STATISTICS).union(
            vectors
        )

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
        norms = (own for norm in self._norms.values() for own in _own(norm))
        vectors = (own for each in self._spectral for own in each.buffers)
        kept = [(own, own.clone()) for own in chain(norms, vectors)]
        self.settle()
        try:
            yield
        finally:
            with torch.no_grad():
                for own, value in kept:
                    own.copy_(value)

    def settle(self) -> None:
        """Computes them for the model's present parameters, over what `compute` runs on all ranks."""
        self.settle_vectors()
        live = {name: norm for name, norm in self._norms.items() if name not in self._frozen}
        if not live or self._compute is None:
            return
        means = [_Mean(norm) for norm in live.values()]
        try:
            # What was compiled would be compiled again for each batch's share of the mean.
            with (
                torch.no_grad(),
                torch.compiler.set_stance("force_eager"),
                drawing_alike(self._model, seed=self._ranks.rank),  # ranks see other samples
            ):
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

    def settle_vectors(self) -> None:
        """Spectral norm's alone, which need no batches: also for weights that come from elsewhere."""
        for each in self._spectral:
            each.settle()


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
