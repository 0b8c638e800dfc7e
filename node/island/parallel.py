"""Turns the model into one rank's part of it, by torch's own means.

`parts_of` is read from top to bottom: pipeline, tensor, context, sharding. Inner steps with the
parts are node.island.engine's business, the ranks' groups node.island.mesh's.
"""

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from node.island.accelerator import carries_pinned_memory
from node.island.context import ContextAttention, positions_of
from node.island.mesh import Mesh
from node.island.model import Decoder, DecoderLayer, rotary_tables
from node.island.sharded_weights import policy_of
from protocol.models import DecoderModel


def parts_of(
    spec: DecoderModel, mesh: Mesh, device: torch.device, dtype: torch.dtype = torch.float32
) -> list[Decoder]:
    """The rank's parts of the model: one, or two with schedules that interleave.

    Their parameters hold nothing until they are adopted: the whole model is never in one rank's
    memory, unless it is to be. `dtype` is what matrices of layers are gathered in where they are
    sharded; the rest of the weights goes into the residual stream, which is fp32.
    """
    shape, place = mesh.shape, mesh.place
    parts = []
    for stage in mesh.stages:
        with torch.device("meta"):
            part = Decoder(spec)

        if shape.pipeline > 1:
            part.cut(
                shape.layers_of(stage, spec.num_layers),
                is_first=stage == 0,
                is_last=stage == shape.num_stages - 1,
            )

        if shape.tensor > 1:
            assert mesh.devices is not None
            parallelize_module(part, mesh.devices["tensor"], _tensor_plan(part))
            if part.is_last:
                # A style of its own: the head wants all positions of what the norm gives.
                parallelize_module(part.model.norm, mesh.devices["tensor"], _GATHERED)

        if mesh.context_group is not None:
            for layer in _layers(part):
                layer.self_attn.attend = ContextAttention(
                    group=mesh.context_group, part=place.context, num_parts=shape.context
                )

        if shape.is_fully_sharded:
            assert mesh.devices is not None
            across = ("replicate", "shard") if shape.replicate > 1 else ("shard",)
            offload = (
                CPUOffloadPolicy(pin_memory=carries_pinned_memory(device))
                if shape.has_offload
                else OffloadPolicy()
            )
            for modules, gathered_in in _gathered_together(part, dtype):
                fully_shard(
                    modules,
                    mesh=mesh.devices[across],
                    reshard_after_forward=shape.zero == 3 and shape.num_shards > 1,
                    mp_policy=policy_of(gathered_in),
                    offload_policy=offload,
                )

        part.to_empty(device="cpu" if shape.has_offload else device)
        cosines, sines = rotary_tables(spec)
        own = positions_of(place.context, shape.context, spec.context)
        if shape.context == 1:
            own = torch.arange(spec.context)
        part.model.cosines, part.model.sines = cosines[own].to(device), sines[own].to(device)
        parts.append(part)
    return parts


def _layers(part: Decoder) -> Iterator[DecoderLayer]:
    for layer in part.model.layers.values():
        assert isinstance(layer, DecoderLayer)
        yield layer


def _gathered_together(
    part: Decoder, dtype: torch.dtype
) -> Iterator[tuple[list[nn.Module], torch.dtype]]:
    """Modules whose weights travel together, inner ones first, and the precision they travel in."""
    for layer in _layers(part):
        if dtype != torch.float32:
            yield [layer.input_layernorm, layer.post_attention_layernorm], torch.float32
        yield [layer], dtype
    yield [part], torch.float32


_GATHERED = PrepareModuleOutput(
    output_layouts=Shard(1), desired_output_layouts=Replicate(), use_local_output=False
)


def _tensor_plan(part: Decoder) -> dict[str, ParallelStyle]:
    """Tensor parallel (Megatron-LM, Shoeybi et al., 2019) with sequence parallel between.

    Between layers each rank holds its part of the positions, [B, T / tensor, hidden]. Logits stay
    cut by the vocabulary, [B, T, vocabulary / tensor], for a loss that is computed so.
    """
    plan: dict[str, ParallelStyle] = {}
    if hasattr(part.model, "embed_tokens"):
        plan["model.embed_tokens"] = RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1)
        )
    for name in part.model.layers:
        layer = f"model.layers.{name}"
        plan |= {
            f"{layer}.input_layernorm": SequenceParallel(),
            f"{layer}.self_attn": PrepareModuleInput(
                input_layouts=(Shard(1), None, None),
                desired_input_layouts=(Replicate(), None, None),
            ),
            f"{layer}.self_attn.q_proj": ColwiseParallel(),
            f"{layer}.self_attn.k_proj": ColwiseParallel(),
            f"{layer}.self_attn.v_proj": ColwiseParallel(),
            f"{layer}.self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
            f"{layer}.post_attention_layernorm": SequenceParallel(),
            f"{layer}.mlp": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            f"{layer}.mlp.gate_proj": ColwiseParallel(),
            f"{layer}.mlp.up_proj": ColwiseParallel(),
            f"{layer}.mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
        }
    if part.is_last:
        plan["model.norm"] = SequenceParallel()
        if not part.is_tied:
            plan["lm_head"] = ColwiseParallel()
    return plan
