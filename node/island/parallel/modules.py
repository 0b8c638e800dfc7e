"""Turns the model into one rank's part of it, by torch's own means.

`parts_of` is read from top to bottom: pipeline, tensor, context, sharding. How each is done to a kind
of model is node.island.models' business, inner steps with the parts are node.island.training.engine's, the
ranks' groups node.island.parallel.mesh's.
"""

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from node.island.models.architecture import Architecture, give_memory
from node.island.parallel.mesh import Mesh
from node.island.parallel.sharded_weights import policy_of
from node.island.ranks.accelerator import carries_pinned_memory


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
