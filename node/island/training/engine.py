"""Forward and backward of a batch over the rank's parts of the model, whatever the mesh; and its losses.

The trainer sees one interface; how the parts were made is node.island.parallel.modules's business, what kind
of model they are of is node.island.models'.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from node.island.data.dataset import Batch, Dataset, Indices, SampleOrder, Tree, held_out_choice
from node.island.data.functions import draw_from, drawing, seed_of
from node.island.data.manifest import Split
from node.island.island import Evaluation
from node.island.models.architecture import (
    Architecture,
    Counted,
    Roles,
    architecture_of,
    check_frozen,
    kept_buffers,
)
from node.island.models.decoder_modules import NO_TARGET
from node.island.models.running_statistics import (
    averaging,
    batches_for,
    norms_of,
    spectral_vectors_of,
)
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
from protocol.wire.rounds import SourceLoss


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
        self._vectors = [each for part in self.parts for each in spectral_vectors_of(part)]
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
        check_frozen(values, theirs, base=base)
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
            iteration_device=self._device,
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
        for each in self._vectors:
            each.settle()

    def vectors(self) -> list[Tensor]:
        """Spectral norm's, which training goes by, as it does not by running statistics."""
        return [vector for each in self._vectors for vector in each.buffers]

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


class Losses:
    """Losses at the present parameters: held-out, and of single training samples.

    They teach nothing and draw alike each time. How parameters come there and back is in trainer.py. All
    ranks make the same calls in the same order.
    """

    def __init__(
        self,
        *,
        spec: RunSpec,
        corpus: Dataset,
        order: SampleOrder,
        engine: Engine,
        mesh: Mesh,
        device: torch.device,
    ) -> None:
        self._spec = spec
        self._corpus = corpus
        self._order = order
        self._engine = engine
        self._mesh = mesh
        self._device = device

    def held_out(self, on_batch: Callable[[], None] = lambda: None) -> Evaluation:
        """Over a fixed choice of samples, spread evenly over the held-out split."""
        with self._drawing_alike():
            self._compute_statistics(on_batch)
            available = self._corpus.num_held_out_samples
            chosen = held_out_choice(self._spec.evaluation.samples, available)
            by_source = self._corpus.held_out_by_source(chosen)
            each = torch.stack([self._sums_of(own, on_batch) for own in by_source.values()])
        sums = self._mesh.summed(each)
        loss, weight, metric, samples = sums.sum(dim=0).tolist()
        tokens = [self._corpus.num_counted("held_out", own) for own in by_source.values()]
        losses = (sums[:, 0] / sums[:, 1].clamp(min=1.0)).tolist()
        return Evaluation(
            loss=loss / max(1.0, weight),
            tokens=sum(tokens),
            metric=metric / samples if self._engine.has_metric else None,
            by_source=tuple(
                SourceLoss(source=source, loss=loss, tokens=tokens)
                for source, loss, tokens in zip(by_source, losses, tokens, strict=True)
            )
            if len(by_source) > 1
            else (),
        )

    def _sums_of(self, chosen: Indices, on_batch: Callable[[], None]) -> Tensor:
        """What this rank measures of some held-out samples, as `Measured.tallied` has it."""
        count = len(chosen)
        own = chosen[self._mesh.share(count)]
        rows = self._engine.rows
        most = -(-count // self._mesh.num_data)  # of any rank: all must go on together
        sums = torch.zeros(4, dtype=torch.float64)
        for start in range(0, most, rows):
            own_chosen = own[start : start + rows]
            batch = self._drawn("held_out", own_chosen)
            sums += self._engine.measure(batch, num_samples=len(own_chosen)).tallied()
            on_batch()
        return sums

    def of_samples(
        self, places: Sequence[int], on_sample: Callable[[], None] = lambda: None
    ) -> tuple[float, ...]:
        """Losses [places] in nats per token, by the samples' places in the sample order.

        Ranks share them, and each measures one at a time.
        """
        indices = np.concatenate([self._order.indices(place, 1) for place in places])
        self._corpus.expect("training", indices)
        share = self._mesh.share(len(indices))
        own = range(len(indices))[share]
        sums = torch.zeros((len(indices), 2), dtype=torch.float64)
        with self._drawing_alike():
            self._compute_statistics(on_sample)
            for turn in range(-(-len(indices) // self._mesh.num_data)):
                # Of those that have no sample left too: parameters are gathered by all at once.
                place = own[turn] if turn < len(own) else None
                batch = self._drawn("training", indices[[0 if place is None else place]])
                count = 0 if place is None else 1
                measured = self._engine.measure(batch, num_samples=count, rows=1).tallied()
                if place is not None:
                    sums[place] = measured[:2]
                on_sample()
        sums = self._mesh.summed(sums)
        return tuple((sums[:, 0] / sums[:, 1].clamp(min=1.0)).tolist())

    def _compute_statistics(self, on_batch: Callable[[], None]) -> None:
        """Running statistics for the model's parameters, over the run's first training samples.

        Ranks share batches, and not samples: what a batch normalises by depends on its size.
        """
        if not self._engine.has_statistics:
            return
        chosen = batches_for(self._spec, self._order, self._corpus.num_samples)
        self._corpus.expect("training", np.concatenate(chosen))
        num_data = self._mesh.num_data
        part = self._mesh.share(num_data).start  # of this rank's data, counted from 0

        def batches() -> Iterator[Batch | Tree]:
            for first in range(0, len(chosen), num_data):
                # All ranks take as many.
                yield self._drawn("training", chosen[(first + part) % len(chosen)])
                on_batch()

        self._engine.compute_statistics(batches())

    def _drawing_alike(self) -> contextlib.AbstractContextManager[None]:
        """Within it measures draw by `_drawn`; training goes on with its own draws after it.

        Else a loss that draws, as of masked tokens, is another one at each measure of the same weights:
        held-out losses jump, and what was learned of a sample drowns in it.
        """
        if not self._engine.draws:
            return contextlib.nullcontext()
        return drawing(self._spec.run.seed, self._device)

    def _drawn(self, split: Split, indices: Indices) -> Batch | Tree:
        """Samples, for which the model draws the same each time."""
        if self._engine.draws:
            first = int(indices[0]) if len(indices) else 0
            draw_from(seed_of(self._spec.run.seed, split, first), self._device)
        return self._corpus.batch(split, indices)
