"""Gradients of a batch, a few samples at a time: memory for fewer, the same sum but for rounding."""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_unflatten

from node.island.models.architecture import Counted, Tree
from node.island.training.precision import autocast


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
