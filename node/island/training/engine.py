"""Forward and backward of a batch over the rank's parts of the model, whatever the mesh.

The trainer sees one interface; how the parts were made is node.island.parallel.modules's business, what kind
of model they are of is node.island.models'.
"""

import contextlib
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from node.island.data.dataset import Batch, Tree
from node.island.models.architecture import (
    Architecture,
    Counted,
    Roles,
    architecture_of,
    check_frozen,
    kept_buffers,
)
from node.island.models.decoder_modules import NO_TARGET
from node.island.models.running_statistics import averaging, norms_of, spectral_vectors_of
from node.island.parallel.mesh import Mesh, fill, local_of
from node.island.parallel.mesh_shape import PLAIN, LocalTraining
from node.island.parallel.modules import (
    GradientClipping,
    accumulate_gradients,
    compile_layers,
    gathered_as_they_are,
    parts_of,
    plain,
    recompute_layers,
    reshard,
)
from node.island.parallel.pipeline import positions_of
from node.island.ranks.accelerator import LossScale, carries_pinned_memory, dtype_of
from node.island.training.optimizers import (
    Muon,
    WholeMatrices,
    inner_optimizers,
    iteration_dtype_of,
)
from protocol.run.run_spec import InnerSection, RunSpec


class Forward(Protocol):
    """The model over one batch of this rank's samples, as its architecture takes them."""

    def train(self, *inputs: Tree) -> Tensor:
        """Adds gradients; returns the mean loss, 0 on ranks without the end of the model."""

    def measure(self, *inputs: Tree) -> tuple[Tensor | Counted, Tensor | None]:
        """The same loss, without gradients, and the metric where there is one and the model ends here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Sums over this rank's samples, and what to divide them by once all ranks' are added."""

    loss: Tensor
    weight: Tensor | float
    metric: Tensor | None  # times the samples
    num_samples: int  # that the rank has the end of the model for

    def tallied(self) -> Tensor:
        """Loss, its weight, metric, samples: [4] in fp64, to be added up."""
        metric = 0.0 if self.metric is None else float(self.metric)
        return torch.tensor(
            [float(self.loss), float(self.weight), metric, self.num_samples], dtype=torch.float64
        )


class Whole:
    """All layers on this rank: tensors may be parts, the sequence of layers is not."""

    def __init__(
        self,
        architecture: Architecture,
        part: nn.Module,
        mesh: Mesh,
        device: torch.device,
        *,
        micro_batch: int,
        keeps_whole_gradients: bool,
        dtype: torch.dtype,
        loss_scale: LossScale,
    ) -> None:
        self._architecture = architecture
        self._part = part
        self._mesh = mesh
        self._micro_batch = micro_batch
        self._keeps_whole_gradients = keeps_whole_gradients
        self._dtype = dtype
        self._loss_scale = loss_scale
        self._measured = architecture.objective(part)
        self._trained: nn.Module = self._measured
        if mesh.num_ranks > 1 and not mesh.is_fully_sharded:
            with warnings.catch_warnings():
                # torch wants another argument that does not yet leave buffers alone at the start:
                # ours are constants, and with context parallel each rank's own.
                warnings.simplefilter("ignore", FutureWarning)
                self._trained = DistributedDataParallel(
                    self._measured,
                    device_ids=[device.index] if device.type != "cpu" else None,
                    broadcast_buffers=False,
                    gradient_as_bucket_view=True,
                    find_unused_parameters=architecture.may_leave_parameters_out,
                )

    def train(self, *inputs: Tree) -> Tensor:
        """See Forward."""
        return accumulate_gradients(
            self._trained,
            *inputs,
            micro_batch=self._micro_batch,
            keeps_whole_gradients=self._keeps_whole_gradients,
            dtype=self._dtype,
            loss_scale=self._loss_scale.value,
            mean_over_ranks=self._mean_over_ranks,
        )

    def measure(self, *inputs: Tree) -> tuple[Tensor | Counted, Tensor | None]:
        """See Forward."""
        with torch.no_grad():
            result: Tensor | Counted = self._measured(*inputs)
            metric = self._architecture.metric(self._part, inputs)
        return result if isinstance(result, Counted) else plain(result), metric

    def see(self, *inputs: Tree) -> None:
        """Computes the loss as training does, and leaves no gradients: for what norms remember of it."""
        self._measured(*inputs)

    def _mean_over_ranks(self, count: Tensor) -> Tensor:
        if self._mesh.num_ranks > 1:
            dist.all_reduce(count)
        return count / self._mesh.num_ranks


class Engine:
    """A rank's model and what training does with it. All ranks make the same calls."""

    def __init__(
        self,
        *,
        spec: RunSpec,
        mesh: Mesh,
        device: torch.device,
        local: LocalTraining = PLAIN,
    ) -> None:
        self._mesh = mesh
        self._device = device
        self._pins_memory = carries_pinned_memory(device)
        self._description = spec.description
        self.dtype = dtype_of(local.precision, device)
        """What matrix products are computed in."""
        self.loss_scale = LossScale(self.dtype)
        self._architecture = architecture = architecture_of(spec)
        self.parts = parts_of(architecture, mesh, device, self.dtype)
        """The rank's parts of the model, in the order of its stages."""
        for part in self.parts:
            layers = architecture.layers(part)
            if local.compile:
                compile_layers(layers, device)
            recompute_layers(layers, local.activation_checkpointing, draws=architecture.draws)
        self._parameters = [p for part in self.parts for p in part.parameters() if p.requires_grad]
        place, shape = mesh.place, mesh.shape
        self._positions: Tensor | None = None
        if shape.context > 1:
            own = positions_of(place.context, shape.context, spec.model.context)
            self._positions = own.to(device)
        share = spec.inner.batch // shape.num_data
        self.rows = min(share, local.micro_batch or share)
        """Samples that go through the model together."""
        self._forward: Forward = (
            Whole(
                architecture,
                self.parts[0],
                mesh,
                device,
                micro_batch=local.micro_batch,
                keeps_whole_gradients=local.accumulate == "whole",
                dtype=self.dtype,
                loss_scale=self.loss_scale,
            )
            if shape.pipeline == 1
            else architecture.pipeline(
                self.parts, mesh, device, dtype=self.dtype, loss_scale=self.loss_scale
            )
        )
        ends = [] if shape.pipeline == 1 else [architecture.tied(part) for part in self.parts]
        self._tied = [weight for weight in ends if weight is not None]
        self.copies: frozenset[nn.Parameter] = frozenset().union(
            *(architecture.copies(part) for part in self.parts)
        )
        """Parameters of this rank whose first use is in another part of the model."""
        self.has_statistics = bool(norms_of(self.parts))
        """Whether there are running statistics, which are computed before parameters are measured."""
        self._clip = GradientClipping(self._parameters, mesh=mesh, copies=self.copies)

    @property
    def named_parameters(self) -> nn.ModuleList:
        """The parts as one module."""
        return nn.ModuleList(self.parts)

    @property
    def draws(self) -> bool:
        """Whether training draws random numbers."""
        return self._architecture.draws

    @property
    def divides_by_all(self) -> bool:
        """Whether losses are means over all targets, counted or not."""
        return self._architecture.divides_by_all

    @property
    def has_metric(self) -> bool:
        """Whether a measure has one beside the loss."""
        return self._architecture.has_metric

    def take_base(self, base: Path | None) -> None:
        """Fills what is not trained, from the node's own copy; raises BadDataError where it is not the run's.

        All of it is in the CPU's memory for that. Nothing happens where all is trained.
        """
        frozen = {
            name: parameter
            for part in self.parts
            for name, parameter in part.named_parameters()
            if not parameter.requires_grad
        }
        if not frozen:
            return
        buffers = {n: b for part in self.parts for n, b in kept_buffers(part).items()}
        values = self._architecture.frozen_values([*frozen, *buffers], base)
        theirs = None if self._description is None else self._description.frozen_digest
        check_frozen(values, theirs, where=str(base or "what its function makes"))
        reshard(self.parts)
        for name, parameter in frozen.items():
            fill(parameter, values[name])
        for name, buffer in buffers.items():
            if name in values:
                buffer.copy_(values[name])

    def optimizers(self, inner: InnerSection) -> list[Optimizer]:
        """The inner optimizers over the rank's parameters; with ZeRO 1 their state is spread."""
        shape = self._mesh.shape
        has_parts = shape.is_fully_sharded and shape.num_shards * shape.tensor > 1
        whole = inner_optimizers(
            self.named_parameters,
            inner,
            roles=self._roles(),
            iteration_dtype=iteration_dtype_of(self.dtype, self._device),
            gather=self._whole_matrices if has_parts else None,
        )
        return [self._spread(each) for each in whole] if self._mesh.shape.zero == 1 else whole

    def _roles(self) -> Roles:
        own = [self._architecture.roles(part) for part in self.parts]
        return Roles(
            matrices=frozenset().union(*(each.matrices for each in own)),
            tables=frozenset().union(*(each.tables for each in own)),
        )

    def _whole_matrices(self, parts: list[Tensor]) -> WholeMatrices:
        return WholeMatrices(parts, self._mesh.new_group("shard", "context", "tensor"))

    def _spread(self, whole: Optimizer) -> Optimizer:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # it costs every start 0.2 s

        # AdamW keeps a mark of its class among its defaults, which its constructor does not take.
        settings = {k: v for k, v in whole.defaults.items() if k != "decoupled_weight_decay"}
        if isinstance(whole, Muon):
            settings["iteration_dtype"] = whole.iteration_dtype
        return ZeroRedundancyOptimizer(
            whole.param_groups,
            optimizer_class=type(whole),
            process_group=self._mesh.shard_group,
            **settings,
        )

    def train(self, batch: Batch | Tree) -> Tensor:
        """Leaves the scaled gradients of this rank's samples; returns its loss.

        That is 0 without the end of the model, and of the rank's own positions only.
        """
        with self._loss_context():
            loss = self._forward.train(*self._inputs(batch))
        self._sum_tied_gradients()
        return loss.detach()

    def measure(
        self, batch: Batch | Tree, *, num_samples: int, rows: int | None = None
    ) -> Measured:
        """Loss of at most `rows` samples, summed over the rank's own positions, without gradients.

        `rows` of a micro-batch unless told. Sharded parameters are gathered by all ranks at once, so all call
        it alike: those that have no samples left too, with a batch that counts 0.
        """
        if rows is None or self._mesh.shape.pipeline > 1:  # which has one shape
            rows = self.rows
        inputs = self._architecture.padded(self._inputs(batch), rows)
        for part in self.parts:
            part.eval()
        with self._loss_context(), gathered_as_they_are(self.parts):
            mean, metric = self._forward.measure(*inputs)
        for part in self.parts:
            part.train()
        loss, weight = self._architecture.measured(mean, inputs, num_samples)
        has_loss = self._mesh.has_loss
        return Measured(
            loss=loss,
            weight=weight if has_loss else 0.0,
            metric=None if metric is None else metric * num_samples,
            num_samples=num_samples if has_loss else 0,
        )

    def settle_vectors(self) -> None:
        """Has spectral norm's vectors be those of the present parameters, where these came from elsewhere."""
        reshard(self.parts)
        for part in self.parts:
            for each in spectral_vectors_of(part):
                each.settle()

    def vectors(self) -> list[Tensor]:
        """Spectral norm's, which training goes by, as it does not by running statistics."""
        found = (each for part in self.parts for each in spectral_vectors_of(part))
        return [vector for each in found for vector in each.buffers]

    def compute_statistics(self, batches: Iterable[Batch | Tree]) -> None:
        """Computes running statistics for the present parameters, over as many batches on each rank."""
        assert isinstance(self._forward, Whole)  # others were refused

        def over_ranks(statistic: Tensor) -> Tensor:
            return self._mesh.added(statistic.cpu()) / self._mesh.num_ranks

        with averaging(self.parts, over_ranks), gathered_as_they_are(self.parts):
            for batch in batches:
                self._forward.see(*self._inputs(batch))

    def clip(self, max_norm: float) -> Tensor:
        """Takes the loss scale out of the gradients, and scales them to a norm of at most `max_norm`.

        Returns the whole model's norm between the two.
        """
        self.loss_scale.remove_from([p.grad for p in self._parameters if p.grad is not None])
        return self._clip(max_norm).to(self._device)

    def scale_gradients(self, factor: float) -> None:
        """Multiplies what `train` left: its loss is the mean over all targets, counted or not."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def forget_gradients(self) -> None:
        """Before the next batch, as gradients add up."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def placed(self, batch: Batch | Tree) -> Tree:
        """Samples on the rank's device.

        Windows [B, T + 1]; tokens and targets [B, T] where not all is counted; or a function's tree. Where
        attention keeps to documents, with the document of each token, [B, T], as a third.
        """
        if not isinstance(batch, Batch):
            return tree_map(self._moved, batch)
        windows = torch.from_numpy(batch.tokens)  # [B, T + 1]
        if batch.counted is None and batch.documents is None:
            return self._moved(windows)
        tokens, targets = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
        if batch.counted is not None:
            targets = targets.masked_fill(~torch.from_numpy(batch.counted), NO_TARGET)
        if batch.documents is None:
            return self._moved(tokens), self._moved(targets)
        documents = torch.from_numpy(batch.documents)[:, :-1].contiguous()
        return self._moved(tokens), self._moved(targets), self._moved(documents)

    def _moved(self, tensor: Tensor) -> Tensor:
        if self._pins_memory:
            return tensor.pin_memory().to(self._device, non_blocking=True)
        return tensor.to(self._device)

    def _inputs(self, batch: Batch | Tree) -> tuple[Tree, ...]:
        """What the model takes: of tokens and targets [B, T] the rank's own positions."""
        inputs = self._architecture.inputs(self.placed(batch))
        if self._positions is None:
            return inputs
        own: tuple[Tree, ...] = tree_map(lambda tensor: tensor[:, self._positions], inputs)
        return own

    def _loss_context(self) -> contextlib.AbstractContextManager[None]:
        """Logits are cut by the vocabulary with tensor parallel, and so is their loss."""
        return loss_parallel() if self._mesh.shape.tensor > 1 else contextlib.nullcontext()

    def _sum_tied_gradients(self) -> None:
        """A tied embedding at both ends of a pipeline gets the gradients of both uses."""
        if not self._tied:
            return
        with torch.no_grad():
            gradients = [local_of(weight.grad) for weight in self._tied]
            total = gradients[0] if len(gradients) == 1 else gradients[0] + gradients[1]
            if self._mesh.ends_group is not None:
                dist.all_reduce(total, group=self._mesh.ends_group)
            for gradient in gradients:
                gradient.copy_(total)
