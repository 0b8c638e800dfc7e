"""Turns the model into one rank's part of it, by torch's own means, and forms a batch's gradients over it.

`parts_of` is read from top to bottom: pipeline, tensor, context, sharding. How each is done to a kind
of model is node.island.models' business, inner steps with the parts are node.island.training.engine's, the
ranks' groups node.island.parallel.mesh's.

Weights that are sharded are given back, and gathered lower to train and in fp32 to measure. Shards stay fp32,
and so do the sums of gradients over ranks. Were weights cast after gathering, as autocast does it, backward
would need the casts of all layers at once, and sharding save nothing.

A batch's gradients are formed a few samples at a time, which takes memory for fewer, and clipped by the norm
of the whole.

On request torch compiles layers, or computes them again in backward. Activation
checkpointing: backward computes parts of a layer again instead of having kept them (Chen et al., 2016,
"Training deep nets with sublinear memory cost"). Layers keep their names and their place in the module tree:
only what calling one does is replaced.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils._triton import has_triton
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from node.island.data.dataset import Tree
from node.island.models.architecture import Architecture, Counted, give_memory
from node.island.parallel.mesh import Mesh
from node.island.parallel.mesh_shape import Recomputing
from node.island.ranks.accelerator import autocast, carries_pinned_memory
from protocol.errors import ConfigError

_AS_THEY_ARE = MixedPrecisionPolicy()


def policy_of(dtype: torch.dtype) -> MixedPrecisionPolicy:
    """For the matrices of a layer. Inputs stay what they are: autocast sees to them."""
    if dtype == torch.float32:
        return _AS_THEY_ARE
    return MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )


@contextmanager
def gathered_as_they_are(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Within it all layers are gathered in fp32; before and after, their weights are given back.

    torch has a policy for good only, so this goes by its private names: the buffers that it gathers
    into are made at their first use, in that use's precision.
    """
    reshard(parts)
    groups = list(_lower_groups_of(parts))
    policies = [group.mp_policy for group in groups]
    for group in groups:
        _set_policy(group, _AS_THEY_ARE)
    try:
        yield
    finally:
        reshard(parts)
        for group, policy in zip(groups, policies, strict=True):
            _set_policy(group, policy)


def reshard(parts: Sequence[nn.Module]) -> None:
    """Gives FSDP's gathered parameters back; edits of those, after a forward alone, would be lost."""
    for module in _sharded(parts):
        module.reshard()


def _sharded(parts: Sequence[nn.Module]) -> Iterator[FSDPModule]:
    for part in parts:
        yield from (module for module in part.modules() if isinstance(module, FSDPModule))


def _lower_groups_of(parts: Sequence[nn.Module]) -> Iterator[Any]:
    for module in _sharded(parts):
        for group in module._get_fsdp_state()._fsdp_param_groups:
            if group.mp_policy.param_dtype is not None:
                yield group


def _set_policy(group: Any, policy: MixedPrecisionPolicy) -> None:
    group.mp_policy = policy
    group._init_mp_dtypes()
    for each in group.fsdp_params:
        each.all_gather_outputs = []
        if hasattr(each, "_unsharded_param"):
            del each._unsharded_param


def parts_of(
    architecture: Architecture,
    mesh: Mesh,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> list[nn.Module]:
    """The rank's parts of the model: one, or two with schedules that interleave.

    Their parameters hold nothing until they are adopted: the whole model is never in one rank's
    memory, unless it is to be. `dtype` is what matrices of layers are gathered in where they are
    sharded; the rest of the weights goes into the residual stream, which is fp32.
    """
    shape = mesh.shape
    parts = []
    for stage in mesh.stages:
        part = architecture.part(mesh, stage)

        if shape.tensor > 1:
            assert mesh.devices is not None
            architecture.cut_by_tensor(part, mesh.devices["tensor"])

        if mesh.context_group is not None:
            architecture.cut_by_context(part, mesh)

        if shape.is_fully_sharded:
            refuse_scalars(part)
            assert mesh.devices is not None
            across = ("replicate", "shard") if shape.replicate > 1 else ("shard",)
            offload = (
                CPUOffloadPolicy(pin_memory=carries_pinned_memory(device))
                if shape.has_offload
                else OffloadPolicy()
            )
            for modules, gathered_in in architecture.gathered_together(part, dtype):
                fully_shard(
                    modules,
                    mesh=mesh.devices[across],
                    reshard_after_forward=shape.zero == 3
                    and (shape.num_shards > 1 or shape.has_offload),
                    mp_policy=policy_of(gathered_in),
                    offload_policy=offload,
                )

        on_cpu = torch.device("cpu")
        give_memory(part, parameters_on=on_cpu if shape.has_offload else device, buffers_on=device)
        architecture.fill_buffers(part, mesh, device)
        parts.append(part)
    return parts


def refuse_scalars(part: nn.Module) -> None:
    """Raises ConfigError for a parameter without a dimension, which FSDP cannot shard."""
    scalar = next((name for name, each in part.named_parameters() if not each.ndim), None)
    if scalar is not None:
        raise ConfigError(
            f"the parameter {scalar} has no dimension, and shards are parts of rows",
            next_step="set zero = 1 or shard = 1 in node.toml; or let the run's function make it with one "
            "value, as torch.ones(1)",
        )


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
        if not self._mesh.is_fully_sharded:
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


_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def compile_layers(
    layers: Iterable[nn.Module], device: torch.device, *, backend: str = "inductor"
) -> None:
    """Has torch compile each layer at its first use; equal layers share the code.

    Comes before recompute_layers: torch would not compile what recomputes, and not say so.

    Raises ConfigError when the compiler that torch calls for this device is not there: it would
    only fail in the middle of the first inner step.
    """
    if device.type == "cpu":
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is None and shutil.which("clang++") is None:
            raise ConfigError(
                f"compile = true needs a C++ compiler, and {compiler!r} is not found",
                next_step="install g++, or set compile = false in node.toml",
            )
    elif not has_triton():
        raise ConfigError(
            f"compile = true needs Triton for {device}, and it is not there or too old a GPU for it",
            next_step="install triton, or set compile = false in node.toml",
        )
    import torch._inductor.config  # with torch's compiler: a second of every start

    torch._inductor.config.compile_threads = 1  # else a pool of processes that a killed rank leaves
    for layer in layers:
        layer.forward = torch.compile(layer.forward, backend=backend)


def be_deterministic() -> None:
    """The same work gives the same bits; torch raises where it cannot. Before CUDA is first used."""
    os.environ[_WORKSPACE] = ":4096:8"  # cuBLAS picks by what is free otherwise
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


_aten = torch.ops.aten
_DEAR = frozenset(
    {
        _aten.mm.default,
        _aten.bmm.default,
        _aten.addmm.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,
    }
)
"""Matrix products and attention: nearly all the time of a layer, in less than half of its memory."""


def recompute_layers(
    layers: Iterable[nn.Module], recomputing: Recomputing, *, draws: bool = False
) -> None:
    """Makes backward compute "full" layers again, or ("selective") all but their dear products.

    Layers that draw random numbers, for dropout, have to draw the same ones again.
    """
    if recomputing == "none":
        return
    # Where nothing in a layer is random, there is no state of generators to keep and to set again.
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": draws}
    if recomputing == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, **options)


def _policy(context: Any, operation: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    is_dear = operation in _DEAR
    return CheckpointPolicy.MUST_SAVE if is_dear else CheckpointPolicy.PREFER_RECOMPUTE
