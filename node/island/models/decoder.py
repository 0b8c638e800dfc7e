"""The decoder that comes with Atoll, as an architecture: every axis of a mesh can cut it."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.overrides import TorchFunctionMode

from node.island.data.dataset import Tree
from node.island.models.architecture import Architecture, Roles
from node.island.models.decoder_modules import (
    Decoder,
    DecoderLayer,
    Objective,
    TokenInputs,
    mean_nats,
    rotary_tables,
)
from node.island.parallel.mesh import Mesh
from node.island.parallel.pipeline import ContextAttention, Ends, positions_of
from node.island.ranks.accelerator import LossScale
from protocol.run.run_spec import RunSpec

if TYPE_CHECKING:
    from node.island.parallel.pipeline import Pipeline


class _NothingDrawn(TorchFunctionMode):
    """Leaves an embedding as it is made: to draw what has no memory only loads torch's compiler."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is nn.init.normal_:
            return kwargs["tensor"]
        return func(*args, **(kwargs or {}))


class DecoderArchitecture(TokenInputs, Architecture):
    """See Architecture."""

    draws = False
    has_metric = False
    divides_by_all = True
    may_leave_parameters_out = False

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._sizes = spec.decoder

    def part(self, mesh: Mesh, stage: int) -> nn.Module:
        """See Architecture."""
        shape = mesh.shape
        with torch.device("meta"), _NothingDrawn():
            empty = torch.empty(self._sizes.context, self._sizes.values_of_head)
            part = Decoder(self._sizes, tables=(empty, empty.clone()))
        if shape.pipeline > 1:
            part.cut(
                shape.layers_of(stage, self._sizes.num_layers),
                is_first=stage == 0,
                is_last=stage == shape.num_stages - 1,
            )
        return part

    def cut_by_tensor(self, part: nn.Module, devices: DeviceMesh) -> None:
        """See Architecture."""
        own = _decoder(part)
        parallelize_module(own, devices, _tensor_plan(own))
        if own.is_last:
            # A style of its own: the head wants all positions of what the norm gives.
            parallelize_module(own.model.norm, devices, _GATHERED)

    def cut_by_context(self, part: nn.Module, mesh: Mesh) -> None:
        """See Architecture."""
        assert mesh.context_group is not None
        for layer in _layers(part):
            layer.self_attn.attend = ContextAttention(
                group=mesh.context_group,
                part=mesh.place.context,
                num_parts=mesh.shape.context,
                window=layer.self_attn.window,
            )

    def gathered_together(
        self, part: nn.Module, dtype: torch.dtype
    ) -> Iterator[tuple[list[nn.Module], torch.dtype]]:
        """See Architecture."""
        for layer in _layers(part):
            if dtype != torch.float32:
                norms: list[nn.Module] = [layer.input_layernorm, layer.post_attention_layernorm]
                if layer.self_attn.has_qk_norm:
                    norms += [layer.self_attn.q_norm, layer.self_attn.k_norm]
                yield norms, torch.float32
            yield [layer], dtype
        yield [part], torch.float32

    def fill_buffers(self, part: nn.Module, mesh: Mesh, device: torch.device) -> None:
        """See Architecture."""
        cosines, sines = rotary_tables(self._sizes)
        own = torch.arange(self._sizes.context)
        if mesh.shape.context > 1:
            own = positions_of(mesh.place.context, mesh.shape.context, self._sizes.context)
        stack = _decoder(part).model
        stack.cosines, stack.sines = cosines[own].to(device), sines[own].to(device)

    def layers(self, part: nn.Module) -> Sequence[nn.Module]:
        """See Architecture."""
        return list(_layers(part))

    def objective(self, part: nn.Module) -> nn.Module:
        """See Architecture."""
        return Objective(_decoder(part))

    def pipeline(
        self,
        parts: list[nn.Module],
        mesh: Mesh,
        device: torch.device,
        *,
        dtype: torch.dtype,
        loss_scale: LossScale,
    ) -> "Pipeline":
        """See Architecture."""
        from node.island.parallel.pipeline import Pipeline  # with torch's compiler

        shape, sizes = mesh.shape, self._sizes
        length = self._spec.model.context // shape.context
        hidden = (length // shape.tensor, sizes.hidden_size)
        logits = (length, sizes.vocab_size // shape.tensor)
        return Pipeline(
            parts,
            mesh,
            device,
            self._spec,
            ends=_Ends(mesh),
            leaving=[hidden] * (shape.num_stages - 1) + [logits],
            dtype=dtype,
            loss_scale=loss_scale,
        )

    def roles(self, part: nn.Module) -> Roles:
        """See Architecture."""
        named = dict(part.named_parameters())
        tables = {name for name in named if name.endswith("embed_tokens.weight")}
        matrices = {name for name, p in named.items() if p.ndim == 2} - tables - {"lm_head.weight"}
        return Roles(
            matrices=frozenset(named[name] for name in matrices),
            tables=frozenset(named[name] for name in tables),
        )

    def copies(self, part: nn.Module) -> frozenset[nn.Parameter]:
        """See Architecture."""
        own = _decoder(part)
        if own.is_first or not own.is_tied or not own.is_last:
            return frozenset()
        return frozenset({own.get_parameter("model.embed_tokens.weight")})

    def tied(self, part: nn.Module) -> nn.Parameter | None:
        """See Architecture."""
        own = _decoder(part)
        if own.is_tied and (own.is_first or own.is_last):
            return own.get_parameter("model.embed_tokens.weight")
        return None


class _Ends(Ends):
    """See node.island.parallel.pipeline.Ends."""

    may_count = False

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def enter(self, inputs: tuple[Tree, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """See Ends."""
        return inputs[:1], {}

    def leave(self, output: Tensor, inputs: tuple[Tree, ...]) -> Tensor:
        """The loss of logits [B, T, vocabulary], or of a rank's part of their vocabulary."""
        if self._mesh.shape.tensor == 1:
            return mean_nats(output, inputs[1])
        assert self._mesh.devices is not None
        mesh = self._mesh.devices["tensor"]
        return mean_nats(DTensor.from_local(output, mesh, [Shard(2)], run_check=False), inputs[1])


def _decoder(part: nn.Module) -> Decoder:
    assert isinstance(part, Decoder)
    return part


def _layers(part: nn.Module) -> Iterator[DecoderLayer]:
    for layer in _decoder(part).model.layers.values():
        assert isinstance(layer, DecoderLayer)
        yield layer


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
    for name, module in zip(part.model.layers, _layers(part), strict=True):
        layer = f"model.layers.{name}"
        if module.self_attn.has_qk_norm:
            # Over the rank's own heads, [B, T, heads / tensor, head size].
            own_heads = SequenceParallel(sequence_dim=2, use_local_output=True)
            plan |= {f"{layer}.self_attn.{norm}": own_heads for norm in ("q_norm", "k_norm")}
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
