"""What of a loop's model no exchange averages: running statistics, which are computed anew, and all else.

What is frozen has to be the run's, which tells a few values of it.

Batch norm's running statistics do nothing while a model trains: each node keeps its own. Where the model is
evaluated or kept, they have to be those of the global parameters. So they are computed anew then, as means
over some training batches ("precise batch norm", Wu and Johnson, 2021, arXiv 2105.07576, section 3). Other
buffers that training changes, such as codebooks, have no such remedy, and are refused.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from atoll.errors import ModelMismatchError, SwarmError
from atoll.ranks import Ranks
from atoll.weights import canonical

Compute = Callable[[], object]

_ROUNDED = {1: 2**-4, 2: 2**-7}
"""How far values of types of so many bytes may be from the run's, relatively; wider ones as those of two."""

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


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
        return frozenset(f"{norm}.{own}" for norm in self._norms for own in _STATISTICS)

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
    for name in _STATISTICS:
        if (tensor := getattr(norm, name)) is not None:
            yield tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    tensor: Tensor
    version: int
    value: Tensor


def check_frozen(model: nn.Module, few: Mapping[str, Sequence[float]]) -> None:
    """Raises ModelMismatchError where a frozen parameter is not the run's but for rounding.

    `few` are values of the run's own, by names. Parameters of whole numbers, as in a quantised model, and
    those that the model does not have under that name are not compared.
    """
    for name, parameter in _frozen(model):
        theirs = few.get(name) or few.get(canonical(name))
        if not theirs or not parameter.is_floating_point():
            continue
        ours = few_values(parameter, len(theirs))
        share = _ROUNDED.get(parameter.element_size(), _ROUNDED[2])
        slack = share / 16 * sum(map(abs, theirs)) / len(theirs)  # where small ones become zero
        for own, known in zip(ours, theirs, strict=True):
            if not abs(own - known) <= share * abs(known) + slack:
                raise ModelMismatchError(
                    f"the frozen parameter {name} is another one here than in the run: one of its values is "
                    f"{own:.6g} and should be {known:.6g}; nobody would train the same model",
                    next_step="load the weights that the run was made with; those that its function draws "
                    "come from torch.manual_seed([run] seed) before the model is built",
                )


class FrozenWatch:
    """Refuses a loop that changes what is frozen, as an average of weights within the model does."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._kept = self._seen()

    def check(self) -> None:
        """Raises ModelMismatchError with the name of the first parameter that has changed."""
        now = self._seen()
        for name, values in self._kept.items():
            # As text: what is no number is not equal to itself.
            if str(now.get(name, values)) != str(values):
                raise ModelMismatchError(
                    f"the loop changes {name}, which is frozen and not exchanged: each node would go on with "
                    "its own",
                    next_step="let the run train it, or keep it in a module beside the one that joins where "
                    "nodes may differ in it, as in averages of weights",
                )

    def _seen(self) -> dict[str, list[float]]:
        return {
            name: few_values(parameter, 8)
            for name, parameter in _frozen(self._model)
            if parameter.is_floating_point()
        }


def few_values(parameter: Tensor, count: int) -> list[float]:
    """So many values of a parameter, evenly chosen: from the middles of equal parts."""
    from torch.distributed.tensor import DTensor

    values = parameter.detach()
    if isinstance(values, DTensor):
        values = values.full_tensor()
    places = [(2 * place + 1) * values.numel() // (2 * count) for place in range(count)]
    found: list[float] = values.reshape(-1)[places].to("cpu", torch.float64).tolist()
    return found


def _frozen(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        if not (parameter.requires_grad or parameter.is_meta) and parameter.numel():
            yield name, parameter


class BufferWatch:
    """Refuses a model whose training changes buffers: each node would have its own, and say nothing of it.

    But for running statistics, buffers that the run names, and those with `persistent=False`, which are no
    part of a model's state.
    """

    def __init__(
        self, model: nn.Module, *, averaged: Iterable[Tensor], but_for: frozenset[str]
    ) -> None:
        known = {id(tensor) for tensor in averaged}
        self._model = model
        self._kept = {
            name: _Kept(tensor=buffer, version=buffer._version, value=buffer.clone())
            for name, buffer in _persistent_buffers(model)
            if id(buffer) not in known and name not in but_for
        }

    def check(self) -> None:
        """Raises ModelMismatchError with the name of the first buffer that has changed."""
        now = dict(_persistent_buffers(self._model))
        for name, kept in self._kept.items():
            buffer = now.get(name, kept.tensor)
            if buffer is kept.tensor and buffer._version == kept.version:
                continue
            # Copies of a model write the same into each other's (DistributedDataParallel).
            if buffer.shape == kept.value.shape and torch.equal(
                buffer, kept.value.to(buffer.device)
            ):
                continue
            owner = type(self._model.get_submodule(name.rpartition(".")[0])).__name__
            raise ModelMismatchError(
                f"training changes the buffer {name} of a {owner}, and buffers are not exchanged: each node "
                "would go on with its own",
                next_step="make it a parameter that the run trains, or register it with persistent=False "
                "where nodes may differ in it",
            )


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer
