"""Turns the model into one rank's part of it, by torch's own means.

`parts_of` is read from top to bottom: pipeline, tensor, context, sharding. How each is done to a kind
of model is node.island.models' business, inner steps with the parts are node.island.training.engine's, the
ranks' groups node.island.parallel.mesh's.

Weights that are sharded are given back, and gathered lower to train and in fp32 to measure. Shards stay fp32,
and so do the sums of gradients over ranks. Were weights cast after gathering, as autocast does it, backward
would need the casts of all layers at once, and sharding save nothing.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from node.island.models.architecture import Architecture, give_memory
from node.island.parallel.mesh import Mesh
from node.island.ranks.accelerator import carries_pinned_memory

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
                    reshard_after_forward=shape.zero == 3 and shape.num_shards > 1,
                    mp_policy=policy_of(gathered_in),
                    offload_policy=offload,
                )

        on_cpu = torch.device("cpu")
        give_memory(part, parameters_on=on_cpu if shape.has_offload else device, buffers_on=device)
        architecture.fill_buffers(part, mesh, device)
        parts.append(part)
    return parts
