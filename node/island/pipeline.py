"""Pipeline parallel: the rank's stages under one of torch's schedules."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor, Shard

from node.island.accumulation import plain
from node.island.mesh import Mesh
from node.island.mesh_shape import ScheduleName
from node.island.model import Decoder, mean_nats
from node.island.precision import LossScale, autocast
from protocol.run_spec import RunSpec

SCHEDULES: dict[ScheduleName, Any] = {
    "gpipe": ScheduleGPipe,  # Huang et al., 2019
    "1f1b": Schedule1F1B,  # PipeDream-Flush, Narayanan et al., 2021
    "interleaved-1f1b": ScheduleInterleaved1F1B,  # Narayanan et al., 2021, section 2.2
    "interleaved-zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,  # Qi et al., "Pipeline parallelism with controllable memory", 2024
}


class Pipeline:
    """Stages and their schedule; implements node.island.engine.Forward."""

    def __init__(
        self,
        parts: list[Decoder],
        mesh: Mesh,
        device: torch.device,
        spec: RunSpec,
        *,
        dtype: torch.dtype,
        loss_scale: LossScale,
    ) -> None:
        assert mesh.devices is not None
        shape = mesh.shape
        self._mesh = mesh
        self._device = device
        self._loss_scale = loss_scale
        self._group = mesh.devices.get_group("pipeline")
        num_microbatches = shape.microbatches(spec)
        rows = spec.inner.batch // shape.num_data // num_microbatches
        length = spec.model.context // shape.context
        # Shapes are given, not found out: torch would run a batch to find them, through collectives
        # and into gradients.
        tokens = torch.empty(rows, length, dtype=torch.int64, device="meta")
        hidden = torch.empty(
            rows,
            length // shape.tensor,
            spec.decoder.hidden_size,
            device="meta",
            requires_grad=True,
        )
        logits = torch.empty(
            *(rows, length, spec.decoder.vocab_size // shape.tensor),
            dtype=dtype,
            device="meta",
            requires_grad=True,
        )
        self._whole_hidden = torch.empty(num_microbatches * rows, *hidden.shape[1:], device="meta")
        self._parts = parts
        for part in parts:
            part.forward = partial(_train_in, dtype, device, part.forward)  # type: ignore[method-assign]  # of this one only
            part.register_forward_hook(_travelling)
        stages = [
            PipelineStage(
                part,
                stage,
                shape.num_stages,
                device,
                input_args=tokens if stage == 0 else hidden,
                output_args=hidden if stage < shape.num_stages - 1 else logits,
                group=self._group,
            )
            for stage, part in zip(mesh.stages, parts, strict=True)
        ]
        schedule = SCHEDULES[shape.schedule]
        self._schedule = schedule(
            stages if issubclass(schedule, PipelineScheduleMulti) else stages[0],
            num_microbatches,
            loss_fn=self._scaled_loss_of,
        )

    def train(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """See node.island.engine.Forward."""
        losses: list[Tensor] = []
        self._schedule.step(
            *((tokens,) if 0 in self._mesh.stages else ()),
            target=targets if self._mesh.has_loss else None,
            losses=losses if self._mesh.has_loss else None,
            return_outputs=False,
        )
        if not losses:
            return torch.zeros((), device=self._device)
        return torch.stack([plain(loss) for loss in losses]).mean() / self._loss_scale.value

    def measure(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """See node.island.engine.Forward.

        Stage after stage: torch's schedules with two stages on a rank have no way forward alone.
        """
        shape = self._mesh.shape
        x = tokens
        with torch.no_grad():
            for stage, part in zip(self._mesh.stages, self._parts, strict=True):
                before, after = stage - 1, stage + 1
                if stage > 0 and before not in self._mesh.stages:
                    x = torch.empty_like(self._whole_hidden, device=self._device)
                    dist.recv(x, group=self._group, group_src=shape.pipeline_of(before))
                x = part(x).contiguous()
                if after < shape.num_stages and after not in self._mesh.stages:
                    dist.send(x, group=self._group, group_dst=shape.pipeline_of(after))
            if not self._mesh.has_loss:
                return torch.zeros((), device=self._device)
            return plain(self._loss_of(x, targets))

    def _scaled_loss_of(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self._loss_of(logits, targets) * self._loss_scale.value

    def _loss_of(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of logits [B, T, vocabulary], or of a rank's part of their vocabulary."""
        if self._mesh.shape.tensor == 1:
            return mean_nats(logits, targets)
        assert self._mesh.devices is not None
        mesh = self._mesh.devices["tensor"]
        return mean_nats(DTensor.from_local(logits, mesh, [Shard(2)], run_check=False), targets)


def _train_in(
    dtype: torch.dtype, device: torch.device, forward: Callable[[Tensor], Tensor], x: Tensor
) -> Tensor:
    """A stage's forward in the precision of training; a forward alone measures, in fp32.

    Not around the schedule, which would have backward in it.
    """
    with autocast(dtype if torch.is_grad_enabled() else torch.float32, device):
        return forward(x)


def _travelling(part: nn.Module, inputs: object, output: Tensor) -> Tensor:
    """A hook, as torch's schedules must see FSDP's own module: what leaves a stage is plain."""
    return output.to_local() if isinstance(output, DTensor) else output
