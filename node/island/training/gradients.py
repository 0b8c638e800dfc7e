"""A batch's gradients: a few samples at a time in memory for fewer, and clipped by the norm of the whole."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_unflatten

from node.island.models.architecture import Counted, Tree
from node.island.parallel.mesh import Mesh
from node.island.training.precision import autocast


class GradientClipping:
    """Scales the gradients of a rank's parameters down to a norm over all ranks.

    `copies` are parameters that another pipeline rank has too: scaled, but not counted.

    torch's `clip_grad_norm_` refuses parameters on several meshes, and sees one stage only. Here
    every rank adds up the squares of its own values, a value that n ranks hold alike counts as one
    nth on each, and one sum over all ranks gives all of them the same bits.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        mesh: Mesh,
        copies: frozenset[nn.Parameter] = frozenset(),
    ) -> None:
        self._parameters = list(parameters)
        self._mesh = mesh
        self._copies = copies
        # On the device: a copy from memory that is not pinned would wait for the GPU in each step.
        self._counts: Tensor | None = None
        self._counted: list[nn.Parameter] = []

    def __call__(self, max_norm: float) -> Tensor:
        """Scales gradients down to a norm of at most `max_norm`; returns the norm before, a scalar."""
        held = [p for p in self._parameters if p.grad is not None]
        if not self._mesh.shape.is_fully_sharded:
            return nn.utils.clip_grad_norm_(held, max_norm, foreach=True)
        gradients = [_local(p.grad) for p in held]
        squares = torch.stack(torch._foreach_norm(gradients)).square()
        square = squares @ self._counts_of(held, squares)
        dist.all_reduce(square)
        norm = square.sqrt()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch has it
        torch._foreach_mul_(gradients, scale)
        return norm

    def _counts_of(self, held: list[nn.Parameter], like: Tensor) -> Tensor:
        """What each parameter's square counts on this rank."""
        is_same = len(held) == len(self._counted) and all(
            one is other for one, other in zip(held, self._counted, strict=True)
        )
        if self._counts is None or not is_same:
            counts = [0.0 if p in self._copies else 1 / _num_replicas(p.grad) for p in held]
            self._counts = torch.tensor(counts, dtype=like.dtype, device=like.device)
            self._counted = held
        return self._counts


def _local(gradient: Tensor | None) -> Tensor:
    assert isinstance(gradient, DTensor)
    return gradient.to_local()


def _num_replicas(gradient: Tensor | None) -> int:
    assert isinstance(gradient, DTensor)
    mesh, placements = gradient.device_mesh, gradient.placements
    return prod(mesh.size(dim) for dim, p in enumerate(placements) if isinstance(p, Replicate))


def accumulate_gradients(
    objective: nn.Module,
    *inputs: Tree,
    micro_batch: int,
    keeps_whole_gradients: bool = False,
    dtype: torch.dtype = torch.float32,
    loss_scale: float = 1.0,
    mean_over_ranks: Callable[[Tensor], Tensor] = lambda count: count,
) -> Tensor:
    """Adds the gradients of `loss_scale` times the mean loss; returns that mean.

    Inputs are trees of tensors whose first dimension is the samples. Matrix products are in `dtype`.

    `micro_batch` samples go through the model together, all for 0. A part counts by its samples, so a
    last one that is smaller counts less. Ranks with copies of the model exchange gradients once,
    with the last part. Ranks that share one scatter them with each part, as none might hold all of
    them, unless told that they can (`keeps_whole_gradients`).

    An objective that gives sums with their counts is divided by the mean count of all ranks at the end,
    when it is known: as gradients are averaged over ranks, each target then counts the same.
    """
    leaves, structure = tree_flatten(inputs)
    num_samples = len(leaves[0])
    rows = micro_batch or num_samples
    parts = list(zip(*(torch.split(leaf, rows) for leaf in leaves), strict=True))
    total = torch.zeros((), device=leaves[0].device)
    count: Tensor | None = None
    for i, part in enumerate(parts):
        is_last = i == len(parts) - 1
        with _synchronised(objective, is_last=is_last, keeps_whole=keeps_whole_gradients):
            with autocast(dtype, leaves[0].device):  # not around backward, which has its own dtypes
                mean: Tensor | Counted = objective(*tree_unflatten(part, structure))
            if isinstance(mean, Counted):
                loss = mean.total
                count = mean.number if count is None else count + mean.number
            else:
                loss = mean * (len(part[0]) / num_samples)
            (loss * loss_scale).backward()  # type: ignore[no-untyped-call]  # torch declares no types
        total += plain(loss.detach())
    if count is None:
        return total
    per_rank = mean_over_ranks(count.detach().to(total.dtype)).clamp(min=1.0)
    for parameter in objective.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(per_rank)
    return total / per_rank


@contextlib.contextmanager
def _synchronised(objective: nn.Module, *, is_last: bool, keeps_whole: bool) -> Iterator[None]:
    """A part's forward and backward; what ranks need to tell each other once waits for the last."""
    with contextlib.ExitStack() as within:
        if isinstance(objective, DistributedDataParallel) and not is_last:
            within.enter_context(objective.no_sync())
        for module in objective.modules():
            if isinstance(module, FSDPModule):
                module.set_requires_all_reduce(is_last, recurse=False)  # over copies of all shards
                module.set_requires_gradient_sync(is_last or not keeps_whole, recurse=False)
        yield


def plain(loss: Tensor) -> Tensor:
    """The loss as a tensor of its own: tensor parallel gives one that belongs to a mesh."""
    return loss.full_tensor() if isinstance(loss, DTensor) else loss
