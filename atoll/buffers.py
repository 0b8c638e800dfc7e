"""What of a loop's model no exchange averages: running statistics, which are computed anew, and all else.

What is frozen has to be the run's, which tells a few values of it, and sums of all.

Batch norm's running statistics do nothing while a model trains: each node keeps its own. Where the model is
evaluated or kept, they have to be those of the global parameters. So they are computed anew then, as means
over some training batches ("precise batch norm", Wu and Johnson, 2021, arXiv 2105.07576, section 3). Other
buffers that training changes, such as codebooks, have no such remedy, and are refused.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from atoll.errors import ModelMismatchError, SwarmError
from atoll.ranks import Ranks
from atoll.weights import spellings

Compute = Callable[[], object]

_ROUNDED = {1: 2**-4, 2: 2**-7}
"""How far values of types of so many bytes may be from the run's, relatively; wider ones as those of two."""

_EXACT = 2**-14
"""The same of sums of fp32 values that are not rounded: what another library may have drawn otherwise."""

SUMS = " sums"
"""Behind a parameter's name: sums of all its values, with signs."""

_ROW, _NUM_SUMS, _ROWS_AT_ONCE = 1024, 4, 1 << 10

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


def check_frozen(model: nn.Module, few: Mapping[str, Sequence[float]]) -> None:
    """Raises ModelMismatchError where a frozen parameter is not the run's but for rounding.

    `few` are values of the run's own by names, and sums of all values. Buffers are compared where the run
    names them. Whole numbers, as in a quantised model, and other names are not compared.
    """
    for name, values in (*_frozen(model), *_kept_buffers(model)):
        known = _known(name, values, few)
        if known is None:
            continue
        theirs = few[known]
        ours = few_values(values, len(theirs))
        share = _ROUNDED.get(values.element_size(), _ROUNDED[2])
        slack = share / 16 * sum(map(abs, theirs)) / len(theirs)  # where small ones become zero
        for own, of_the_run in zip(ours, theirs, strict=True):
            if not abs(own - of_the_run) <= share * abs(of_the_run) + slack:
                raise _another(
                    name, f"one of its values is {own:.6g} and should be {of_the_run:.6g}"
                )
        if not (sums := few.get(known + SUMS)):
            continue  # a run of before
        whole = summed(values)
        share = 2 * share if whole.is_rounded else _EXACT
        for own, of_the_run in zip(whole.sums, sums, strict=True):
            if not abs(own - of_the_run) <= share * whole.norm:
                raise _another(name, "a few of its values are the same, and all together are not")


def _known(name: str, values: Tensor, few: Mapping[str, Sequence[float]]) -> str | None:
    """By which name the run tells values of it; None where they cannot be compared."""
    if not values.is_floating_point():
        return None
    return next((each for each in spellings(name) if few.get(each)), None)


def digest_of_the_rest(model: nn.Module, few: Mapping[str, Sequence[float]]) -> str:
    """Of what is frozen and the run cannot compare, as a body of 4 bits; empty where there is none.

    Loops compare it with each other's. Buffers of floating point are left out: devices compute them.
    """
    buffers = [(n, b) for n, b in _kept_buffers(model) if not b.is_floating_point()]
    rest = [
        (spellings(name)[-1], values)
        for name, values in (*_frozen(model), *buffers)
        if _known(name, values, few) is None
    ]
    if not rest:
        return ""
    hasher = hashlib.blake2b(digest_size=6)
    for name, values in sorted(rest, key=lambda each: each[0]):
        whole = _whole(values).contiguous().reshape(-1)
        hasher.update(f"{name}:{values.dtype}:{tuple(values.shape)};".encode())
        octets: Any = whole.cpu().view(torch.uint8).numpy()
        hasher.update(octets)
    return hasher.hexdigest()


def software_of(model: nn.Module, few: Mapping[str, Sequence[float]]) -> str:
    """What decides what a loop computes of a sample, in words that are equal where it is the same."""
    found = f"a loop with torch {'.'.join(torch.__version__.split('.')[:2])}"
    rest = digest_of_the_rest(model, few)
    return f"{found} and the frozen values {rest}" if rest else found


def _another(name: str, why: str) -> ModelMismatchError:
    return ModelMismatchError(
        f"the frozen parameter {name} is another one here than in the run: {why}; nobody would train the "
        "same model",
        next_step="load the weights that the run was made with; those that its function draws come from "
        "torch.manual_seed([run] seed) before the model is built",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Summed:
    """All values of a parameter in a few figures: whoever has others somewhere has other sums."""

    sums: tuple[float, ...]
    norm: float  # what a sum is away from another parameter's, about
    is_rounded: bool  # whether 16 bits or fewer hold all values


def summed(parameter: Tensor) -> Summed:
    """Sums with signs that stand in a fixed lot, for each row and each place of a row of 1024 values.

    Values that differ by d move a sum by the norm of d, about; what rounding moves is far less (AMS sketch:
    Alon, Matias and Szegedy, 1996).
    """
    flat = _whole(parameter).reshape(-1)
    columns = _signs("places", _ROW).to(flat.device)
    rows = _signs("rows", -(-len(flat) // _ROW)).to(flat.device)
    sums = torch.zeros(_NUM_SUMS, dtype=torch.float64, device=flat.device)
    squares = torch.zeros((), dtype=torch.float64, device=flat.device)
    is_wide, fits_bf16, fits_fp16 = flat.element_size() > 2, True, True
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        part = flat[first * _ROW : (first + _ROWS_AT_ONCE) * _ROW].to(torch.float32)
        squares += part.square().sum(dtype=torch.float64)
        if is_wide:
            fits_bf16 = fits_bf16 and torch.equal(part.to(torch.bfloat16).float(), part)
            fits_fp16 = fits_fp16 and torch.equal(part.to(torch.float16).float(), part)
        part = nn.functional.pad(part, (0, -len(part) % _ROW)).view(-1, _ROW)
        sums += ((part @ columns) * rows[first : first + len(part)]).sum(0, dtype=torch.float64)
    found: list[float] = sums.tolist()
    return Summed(sums=tuple(found), norm=float(squares.sqrt()), is_rounded=fits_bf16 or fits_fp16)


def _signs(of: str, count: int) -> Tensor:
    """1 or -1 [count, sums], the same on all machines and in all versions of torch."""
    drawn = hashlib.shake_256(f"atoll frozen {of}".encode()).digest(-(-count * _NUM_SUMS // 8))
    octets = torch.frombuffer(bytearray(drawn), dtype=torch.uint8)
    bits = (octets[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.reshape(-1)[: count * _NUM_SUMS].view(count, _NUM_SUMS).float() * 2 - 1


class FrozenWatch:
    """Refuses a loop that changes what is frozen, as an average of weights within the model does.

    Each look compares a few values of each parameter, and all of some: of a small model of each, of a large
    one in turns, for sums of a billion values take a second.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._few = {name: few_values(each, 8) for name, each in _frozen(model)}
        self._whole = {name: summed(each) for name, each in _frozen(model)}
        self._turn = 0

    def check(self) -> None:
        """Raises ModelMismatchError with the name of the first parameter that has changed."""
        now = [(name, each) for name, each in _frozen(self._model) if name in self._few]
        for name, each in now:
            # As text: what is no number is not equal to itself.
            if str(few_values(each, 8)) != str(self._few[name]):
                raise _changed(name)
        left = _SUMMED_AT_A_LOOK
        for _ in now:
            name, each = now[self._turn % len(now)]
            kept, found = self._whole[name], summed(each)
            slack = _SAME * kept.norm
            if any(abs(a - b) > slack for a, b in zip(found.sums, kept.sums, strict=True)):
                raise _changed(name)
            self._turn += 1
            if (left := left - each.numel()) <= 0:
                return


_SUMMED_AT_A_LOOK = 1 << 26
"""Values that are read of what is frozen, at most but for the last parameter: a tenth of a second."""

_SAME = 2**-20
"""How far sums of the same values may be from each other, by the order in which a device adds."""


def _changed(name: str) -> ModelMismatchError:
    return ModelMismatchError(
        f"the loop changes {name}, which is frozen and not exchanged: each node would go on with its own",
        next_step="let the run train it, or keep it in a module beside the one that joins where nodes may "
        "differ in it, as in averages of weights",
    )


def few_values(parameter: Tensor, count: int) -> list[float]:
    """So many values of a parameter, evenly chosen: from the middles of equal parts."""
    values = _whole(parameter)
    places = [(2 * place + 1) * values.numel() // (2 * count) for place in range(count)]
    found: list[float] = values.reshape(-1)[places].to("cpu", torch.float64).tolist()
    return found


def _whole(parameter: Tensor) -> Tensor:
    """All of it, also where ranks share it: they gather it together."""
    from torch.distributed.tensor import DTensor

    values = parameter.detach()
    return values.full_tensor() if isinstance(values, DTensor) else values


def _frozen(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        if not (parameter.requires_grad or parameter.is_meta) and parameter.numel():
            yield name, parameter


def _kept_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers of a checkpoint but for running statistics."""
    for name, buffer in _persistent_buffers(model):
        if name.rpartition(".")[2] not in _STATISTICS and buffer.numel() and not buffer.is_meta:
            yield name, buffer


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
            name: buffer.clone()
            for name, buffer in _persistent_buffers(model)
            if id(buffer) not in known and name not in but_for
        }

    def check(self) -> None:
        """Raises ModelMismatchError with the name of the first buffer that has changed."""
        now = dict(_persistent_buffers(self._model))
        for name, kept in self._kept.items():
            # By its values: codebooks write to `.data`, of which torch's counter of changes knows nothing,
            # and copies of a model write the same into each other's (DistributedDataParallel).
            if _is_same(now.get(name, kept), kept):
                continue
            owner = type(self._model.get_submodule(name.rpartition(".")[0])).__name__
            raise ModelMismatchError(
                f"training changes the buffer {name} of a {owner}, and buffers are not exchanged: each node "
                "would go on with its own",
                next_step="make it a parameter that the run trains, or register it with persistent=False "
                "where nodes may differ in it",
            )


def _is_same(buffer: Tensor, kept: Tensor) -> bool:
    if buffer.shape != kept.shape or buffer.dtype != kept.dtype:
        return False
    kept = kept.to(buffer.device)
    return torch.equal(buffer, kept) or (
        buffer.is_floating_point() and torch.allclose(buffer, kept, rtol=0, atol=0, equal_nan=True)
    )


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer
