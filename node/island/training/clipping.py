"""Clipping by the norm of the whole gradient, wherever its parts lie."""

from collections.abc import Iterable
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from node.island.parallel.mesh import Mesh


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
