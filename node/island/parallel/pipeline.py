"""Pipeline and context parallel: a rank's stages by one of torch's schedules, or its part of all positions.

With context parallel each rank has a part of every sample's positions, and asks the others for keys. Keys
and values of all ranks are gathered in each layer (Llama 3, Grattafiori et al., 2024, section 3.3.2):
simple, any number of heads, and cheap with grouped heads. torch's own `context_parallel` has no kernel for
CPUs.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_single_autograd
from torch.utils._pytree import tree_flatten, tree_map

from node.island.data.dataset import Tree
from node.island.models.architecture import Counted
from node.island.models.decoder_modules import attend_to_earlier
from node.island.parallel.mesh import Mesh, local_of
from node.island.parallel.mesh_shape import ScheduleName
from node.island.parallel.modules import plain
from node.island.ranks.accelerator import LossScale, autocast
from protocol.errors import ConfigError
from protocol.run.run_spec import RunSpec

SCHEDULES: dict[ScheduleName, str] = {
    "gpipe": "ScheduleGPipe",  # Huang et al., 2019
    "1f1b": "Schedule1F1B",  # PipeDream-Flush, Narayanan et al., 2021
    "interleaved-1f1b": "ScheduleInterleaved1F1B",  # Narayanan et al., 2021, section 2.2
    "interleaved-zero-bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",  # Qi et al., "Pipeline parallelism with controllable memory", 2024
}
"""By their names in torch, which loads its compiler with them: a second, and nothing to a rank alone."""


class Ends(Protocol):
    """What a model does with samples where a pipeline begins, and where it ends."""

    may_count: bool
    """Whether its loss may be a Counted one."""

    def enter(self, inputs: tuple[Tree, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the first stage is called with."""

    def leave(self, output: Tensor, inputs: tuple[Tree, ...]) -> Tensor | Counted:
        """The loss of what the last stage gives."""

    def leave_metric(self, output: Tensor, inputs: tuple[Tree, ...]) -> Tensor | None:
        """See Architecture.metric."""
        return None


class Pipeline:
    """Stages and their schedule; implements node.island.training.engine.Forward.

    `leaving` are the shapes of one sample, on this rank, as it leaves each of all stages. What enters the
    first stage is not the samples but their numbers within the batch, which every rank of a pipeline has:
    so inputs may be any tree, and the loss sees all of its samples.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        mesh: Mesh,
        device: torch.device,
        spec: RunSpec,
        *,
        ends: Ends,
        leaving: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        loss_scale: LossScale,
    ) -> None:
        from torch.distributed.pipelining import PipelineStage, schedules  # see SCHEDULES

        assert mesh.devices is not None
        shape = mesh.shape
        self._mesh = mesh
        self._device = device
        self._dtype = dtype
        self._ends = ends
        self._leaving = leaving
        self._loss_scale = loss_scale
        self._group = mesh.devices.get_group("pipeline")
        self._num_microbatches = num_microbatches = shape.microbatches(spec)
        self._inputs: tuple[Tree, ...] = ()
        self._losses: list[Tensor | Counted] = []
        rows = spec.inner.batch // shape.num_data // num_microbatches
        # Shapes are given, not found out: torch would run a batch to find them, through collectives
        # and into gradients.
        numbers = torch.empty(rows, dtype=torch.int64, device="meta")
        hidden = [torch.empty(rows, *sizes, device="meta", requires_grad=True) for sizes in leaving]
        self._parts = parts
        for stage, part in zip(mesh.stages, parts, strict=True):
            forward = part.forward if stage else partial(self._entered, part.forward)
            part.forward = partial(_train_in, dtype, device, forward)
            is_last = stage == shape.num_stages - 1
            part.register_forward_hook(partial(_travelling, None if is_last else leaving[stage]))
        stages = [
            PipelineStage(
                part,
                stage,
                shape.num_stages,
                device,
                input_args=numbers if stage == 0 else hidden[stage - 1],
                output_args=hidden[stage],
                group=self._group,
            )
            for stage, part in zip(mesh.stages, parts, strict=True)
        ]
        schedule = getattr(schedules, SCHEDULES[shape.schedule])
        self._schedule = schedule(
            stages if issubclass(schedule, schedules.PipelineScheduleMulti) else stages[0],
            num_microbatches,
            loss_fn=self._scaled_loss_of,
        )

    def train(self, *inputs: Tree) -> Tensor:
        """See node.island.training.engine.Forward."""
        self._inputs, self._losses = inputs, []
        numbers = self._numbers()
        self._schedule.step(
            *((numbers,) if 0 in self._mesh.stages else ()),
            target=numbers if self._mesh.has_loss else None,
            return_outputs=False,
        )
        if self._ends.may_count:
            return self._divided_by_counts()
        losses = [plain(loss) for loss in self._losses if isinstance(loss, Tensor)]
        return torch.stack(losses).mean() if losses else torch.zeros((), device=self._device)

    def measure(self, *inputs: Tree) -> tuple[Tensor | Counted, Tensor | None]:
        """See node.island.training.engine.Forward.

        Stage after stage: torch's schedules with two stages on a rank have no way forward alone.
        """
        shape = self._mesh.shape
        self._inputs = inputs
        x = numbers = self._numbers()
        with torch.no_grad():
            for stage, part in zip(self._mesh.stages, self._parts, strict=True):
                before, after = stage - 1, stage + 1
                if stage > 0 and before not in self._mesh.stages:
                    x = torch.empty(len(numbers), *self._leaving[before], device=self._device)
                    dist.recv(x, group=self._group, group_src=shape.pipeline_of(before))
                x = part(x).contiguous()
                if after < shape.num_stages and after not in self._mesh.stages:
                    dist.send(x, group=self._group, group_dst=shape.pipeline_of(after))
            if not self._mesh.has_loss:
                return torch.zeros((), device=self._device), None
            loss = self._ends.leave(x, inputs)
            metric = self._ends.leave_metric(x, inputs)
            return loss if isinstance(loss, Counted) else plain(loss), metric

    def _numbers(self) -> Tensor:
        """Of the samples of the batch."""
        num_samples = len(tree_flatten(self._inputs)[0][0])
        return torch.arange(num_samples, device=self._device)

    def _samples(self, numbers: Tensor) -> tuple[Tree, ...]:
        chosen: tuple[Tree, ...] = tree_map(lambda tensor: tensor[numbers], self._inputs)
        return chosen

    def _entered(self, forward: Callable[..., Any], numbers: Tensor) -> Any:
        arguments, named = self._ends.enter(self._samples(numbers))
        return forward(*arguments, **named)

    def _scaled_loss_of(self, output: Tensor, numbers: Tensor) -> Tensor:
        with autocast(self._dtype, self._device):
            loss = self._ends.leave(output, self._samples(numbers))
        if isinstance(loss, Counted):
            self._losses.append(Counted(loss.total.detach(), loss.number.detach()))
            # The schedule takes the mean over microbatches; this is a sum.
            return loss.total * self._num_microbatches * self._loss_scale.value
        self._losses.append(loss.detach())
        return loss * self._loss_scale.value

    def _divided_by_counts(self) -> Tensor:
        """See accumulate_gradients: by the mean count of all ranks, which those at the end know."""
        total, count = torch.zeros((), device=self._device), torch.zeros((), device=self._device)
        for loss in self._losses:
            if isinstance(loss, Counted):
                total, count = total + loss.total, count + loss.number.to(count.dtype)
            else:
                total = total + loss / self._num_microbatches
        dist.all_reduce(count)
        shape = self._mesh.shape
        per_rank = (count / (shape.num_ranks // shape.pipeline)).clamp(min=1.0)
        for part in self._parts:
            for parameter in part.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(per_rank)
        return total / per_rank


def _train_in(
    dtype: torch.dtype, device: torch.device, forward: Callable[[Tensor], Any], x: Tensor
) -> Any:
    """A stage's forward in the precision of training; a forward alone measures, in fp32.

    Not around the schedule, which would have backward in it.
    """
    with autocast(dtype if torch.is_grad_enabled() else torch.float32, device):
        return forward(x)


def _travelling(shape: tuple[int, ...] | None, part: nn.Module, inputs: object, output: Any) -> Any:
    """A hook, as torch's schedules must see FSDP's own module: what leaves a stage is plain, and fp32.

    Raises ConfigError for another shape than the one that is waited for; there is none at the end.
    """
    own = local_of(output)
    if shape is None:
        return own
    if tuple(own.shape[1:]) != shape:
        raise ConfigError(
            f"a stage of the pipeline gives {list(own.shape[1:])} for a sample, and the run's description "
            f"says {list(shape)}",
            next_step="give all samples one shape, or set pp = 1",
        )
    return own.to(torch.float32)


def positions_of(part: int, num_parts: int, length: int) -> Tensor:
    """The positions [length / num_parts] of one rank: a piece near the start, and its mirror image.

    Later positions attend to more keys, so two pieces from opposite ends are about as much work on
    every rank.
    """
    pieces = torch.arange(length).view(2 * num_parts, -1)
    return torch.cat((pieces[part], pieces[2 * num_parts - 1 - part]))


class ContextAttention:
    """Causal attention of the rank's own queries to the keys of all ranks before them."""

    def __init__(
        self, *, group: dist.ProcessGroup, part: int, num_parts: int, window: int | None
    ) -> None:
        self._group = group
        self._window = window
        self._pieces = (part, 2 * num_parts - 1 - part)
        gathered = [piece for i in range(num_parts) for piece in (i, 2 * num_parts - 1 - i)]
        self._order = sorted(range(2 * num_parts), key=gathered.__getitem__)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See node.island.models.decoder_modules.Attend, with T the rank's own positions."""
        both = torch.stack((k, v))  # [2, B, kv heads, T, head size]
        gathered = all_gather_single_autograd(both, gather_dim=0, group=self._group)
        pieces = [piece for own in gathered.split(2) for piece in own.chunk(2, dim=3)]
        k, v = torch.cat([pieces[i] for i in self._order], dim=3)  # in the order of positions
        length = q.shape[2] // 2
        mixed = [
            attend_to_earlier(own, k[:, :, :stop], v[:, :, :stop], self._window)
            for own, stop in zip(
                q.chunk(2, dim=2), (length * (i + 1) for i in self._pieces), strict=True
            )
        ]
        return torch.cat(mixed, dim=2)
