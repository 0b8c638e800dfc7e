"""Forward and backward of a batch over the rank's parts of the model, whatever the mesh.

The trainer sees one interface; how the parts were made is node.island.parallel's business.
"""

import contextlib
import warnings
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from node.island.accumulation import accumulate_gradients, plain
from node.island.clipping import GradientClipping
from node.island.compiling import compile_layers
from node.island.context import positions_of
from node.island.local_training import PLAIN, LocalTraining
from node.island.mesh import Mesh
from node.island.model import NO_TARGET, Decoder, Objective
from node.island.optimizers import Muon, inner_optimizers, iteration_dtype_of
from node.island.parallel import parts_of
from node.island.pipeline import Pipeline
from node.island.precision import LossScale, dtype_of
from node.island.recomputing import recompute_layers
from node.island.sharded_weights import gathered_as_they_are
from node.island.whole_matrices import WholeMatrices
from protocol.run_spec import InnerSection, RunSpec


class Forward(Protocol):
    """The model over one batch of this rank's samples, tokens and targets [B, T]."""

    def train(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Adds gradients; returns the mean loss in nats, 0 on ranks without the end of the model."""

    def measure(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The same loss, without gradients."""


class Whole:
    """All layers on this rank: tensors may be parts, the sequence of layers is not."""

    def __init__(
        self,
        decoder: Decoder,
        mesh: Mesh,
        device: torch.device,
        *,
        micro_batch: int,
        keeps_whole_gradients: bool,
        dtype: torch.dtype,
        loss_scale: LossScale,
    ) -> None:
        self._micro_batch = micro_batch
        self._keeps_whole_gradients = keeps_whole_gradients
        self._dtype = dtype
        self._loss_scale = loss_scale
        self._measured = Objective(decoder)
        self._trained: nn.Module = self._measured
        if mesh.num_ranks > 1 and not mesh.shape.is_fully_sharded:
            with warnings.catch_warnings():
                # torch wants another argument that does not yet leave buffers alone at the start:
                # ours are constants, and with context parallel each rank's own.
                warnings.simplefilter("ignore", FutureWarning)
                self._trained = DistributedDataParallel(
                    self._measured,
                    device_ids=[device.index] if device.type != "cpu" else None,
                    broadcast_buffers=False,
                    gradient_as_bucket_view=True,
                )

    def train(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """See Forward."""
        return accumulate_gradients(
            self._trained,
            tokens,
            targets,
            micro_batch=self._micro_batch,
            keeps_whole_gradients=self._keeps_whole_gradients,
            dtype=self._dtype,
            loss_scale=self._loss_scale.value,
        )

    def measure(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """See Forward."""
        with torch.no_grad():
            return plain(self._measured(tokens, targets))


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
        self.dtype = dtype_of(local.precision, device)
        """What matrix products are computed in."""
        self.loss_scale = LossScale(self.dtype)
        self.parts = parts_of(spec.decoder, mesh, device, self.dtype)
        """The rank's parts of the model, in the order of its stages."""
        for part in self.parts:
            if local.compile:
                compile_layers(part, device)
            recompute_layers(part, local.activation_checkpointing)
        self._parameters = [p for part in self.parts for p in part.parameters()]
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
                self.parts[0],
                mesh,
                device,
                micro_batch=local.micro_batch,
                keeps_whole_gradients=local.accumulate == "whole",
                dtype=self.dtype,
                loss_scale=self.loss_scale,
            )
            if shape.pipeline == 1
            else Pipeline(
                self.parts, mesh, device, spec, dtype=self.dtype, loss_scale=self.loss_scale
            )
        )
        ends = [
            part
            for part in self.parts
            if shape.pipeline > 1 and part.is_tied and (part.is_first or part.is_last)
        ]
        self._tied = [_embedding(part) for part in ends]
        self._clip = GradientClipping(
            self._parameters,
            mesh=mesh,
            copies=frozenset(_embedding(part) for part in ends if part.is_last),
        )

    @property
    def named_parameters(self) -> nn.ModuleList:
        """The parts as one module, for optimizers that choose parameters by name and shape."""
        return nn.ModuleList(self.parts)

    def optimizers(self, inner: InnerSection) -> list[Optimizer]:
        """The inner optimizers over the rank's parameters; with ZeRO 1 their state is spread."""
        shape = self._mesh.shape
        has_parts = shape.is_fully_sharded and shape.num_shards * shape.tensor > 1
        whole = inner_optimizers(
            self.named_parameters,
            inner,
            iteration_dtype=iteration_dtype_of(self.dtype, self._device),
            gather=self._whole_matrices if has_parts else None,
        )
        return [self._spread(each) for each in whole] if self._mesh.shape.zero == 1 else whole

    def _whole_matrices(self, parts: list[Tensor]) -> WholeMatrices:
        return WholeMatrices(parts, self._mesh.new_group("shard", "context", "tensor"))

    def _spread(self, whole: Optimizer) -> Optimizer:
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

    def train(self, windows: Tensor) -> Tensor:
        """Leaves the scaled gradients of this rank's samples, [B, T + 1]; returns its loss.

        That is 0 without the end of the model, and of the rank's own positions only.
        """
        with self._loss_context():
            loss = self._forward.train(*self._split(windows))
        self._sum_tied_gradients()
        return loss.detach()

    def measure(self, windows: Tensor) -> Tensor:
        """Nats of samples [≤ B, T + 1], summed over the rank's own positions, without gradients.

        All ranks take B rows, padded with what does not count: sharded parameters are gathered by
        all at once, and pipelines have one shape.
        """
        tokens, targets = self._split(windows)
        missing = self.rows - len(windows)
        tokens = nn.functional.pad(tokens, (0, 0, 0, missing))
        targets = nn.functional.pad(targets, (0, 0, 0, missing), value=NO_TARGET)
        with self._loss_context(), gathered_as_they_are(self.parts):
            return self._forward.measure(tokens, targets) * targets.numel()

    def clip(self, max_norm: float) -> Tensor:
        """Takes the loss scale out of the gradients, and scales them to a norm of at most `max_norm`.

        Returns the whole model's norm between the two.
        """
        self.loss_scale.remove_from([p.grad for p in self._parameters if p.grad is not None])
        return self._clip(max_norm).to(self._device)

    def forget_gradients(self) -> None:
        """Before the next batch, as gradients add up."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def _split(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens, and the ones after them: [B, T], or the rank's own positions of T."""
        tokens, targets = windows[:, :-1], windows[:, 1:]
        if self._positions is not None:
            tokens, targets = tokens[:, self._positions], targets[:, self._positions]
        return tokens, targets

    def _loss_context(self) -> contextlib.AbstractContextManager[None]:
        """Logits are cut by the vocabulary with tensor parallel, and so is their loss."""
        return loss_parallel() if self._mesh.shape.tensor > 1 else contextlib.nullcontext()

    def _sum_tied_gradients(self) -> None:
        """A tied embedding at both ends of a pipeline gets the gradients of both uses."""
        if not self._tied:
            return
        with torch.no_grad():
            gradients = [_local(weight.grad) for weight in self._tied]
            total = gradients[0] if len(gradients) == 1 else gradients[0] + gradients[1]
            if self._mesh.ends_group is not None:
                dist.all_reduce(total, group=self._mesh.ends_group)
            for gradient in gradients:
                gradient.copy_(total)


def _embedding(part: Decoder) -> nn.Parameter:
    return cast("nn.Parameter", part.model.embed_tokens.weight)


def _local(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
