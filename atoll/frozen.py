"""What of a loop's model the run does not train: whether its values are those of the run.

The run tells a few values of each frozen parameter, and sums of all. Whether they stay as they are is for
atoll.watch.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from atoll.errors import ModelMismatchError
from atoll.running_statistics import STATISTICS
from atoll.weights import parts_of, scalings_of, spellings

_ROUNDED = {1: 2**-4, 2: 2**-7}
"""How far values of types of so many bytes may be from the run's, relatively; wider ones as those of two."""

_EXACT = 2**-14
"""The same of sums of fp32 values that are not rounded: what another library may have drawn otherwise."""

SUMS = " sums"
"""Behind a parameter's name: sums of all its values, with signs."""

_ROW, _NUM_SUMS, _ROWS_AT_ONCE = 1024, 4, 1 << 10


def check_frozen(model: nn.Module, few: Mapping[str, Sequence[float]]) -> None:
    """Raises ModelMismatchError where a frozen parameter is not the run's but for rounding.

    `few` are values of the run's own by names, and sums of all values. Buffers are compared where the run
    names them. Whole numbers, as in a quantised model, and other names are not compared.
    """
    for name, values in (*frozen_of(model), *_kept_buffers(model)):
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
        for name, values in (*frozen_of(model), *buffers)
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
    if scalings := sorted({f"{scaling:g}" for *_, scaling in scalings_of(model)}):
        found += f", adapters scaled by {', '.join(scalings[:4])}"  # no shape shows that
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
    return values.full_tensor() if isinstance(values, DTensor) else parts_of(values)[-1]


def frozen_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Frozen parameters that have values here."""
    for name, parameter in model.named_parameters():
        if not (parameter.requires_grad or parameter.is_meta) and parameter.numel():
            yield name, parameter


def _kept_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers of a checkpoint but for running statistics."""
    for name, buffer in persistent_buffers(model):
        if name.rpartition(".")[2] not in STATISTICS and buffer.numel() and not buffer.is_meta:
            yield name, buffer


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that a checkpoint has."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer
