"""Which mesh an island takes when nobody says, and whether one that somebody chose fits its memory.

Pure and without torch. Estimates leave out what allocators waste: they tell what cannot work, not
what just fits. The benchmark of islands compares them with what torch takes.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from node.island.parallel.mesh_shape import (
    PLAIN,
    LocalTraining,
    MeshShape,
    check_batch,
    check_combination,
    check_shape,
)
from protocol.errors import ConfigError
from protocol.run.models import DecoderModel, layout_of
from protocol.run.node_memory import NODE_PROCESS_BYTES, daemon_bytes
from protocol.run.run_spec import RunSpec

DeviceKind = Literal["cpu", "cuda", "xpu", "mps"]

_VALUE_BYTES = 4
_MOMENTS = {"adamw": 2, "muon": 1, "sgd": 1}
_PROCESS_BYTES = 100 << 20  # what a forked rank has of its own; a GPU's context was not measured
_GPU_MARGIN, _GPU_BYTES = 1.15, 3_000_000_000  # beside a rank's tensors, of a GPU's memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Bytes that the fullest rank of a mesh takes."""

    parameters: int
    gradients: int
    moments: int
    activations: int
    copied: int = 0  # of the moments: a checkpoint is written from a copy, and training goes on
    process: int = _PROCESS_BYTES
    offloaded: int = 0  # in the system's memory, beside all these, which are on the rank's device

    @property
    def num_bytes(self) -> int:
        """All together."""
        trained = self.parameters + self.gradients + self.moments + self.activations
        return trained + self.copied + self.process

    def __str__(self) -> str:
        copied = f"{in_words(self.copied)} copied for checkpoints, " if self.copied else ""
        return (
            f"{in_words(self.parameters)} parameters, {in_words(self.gradients)} gradients, "
            f"{in_words(self.moments)} of the optimizer's moments, {in_words(self.activations)} activations, "
            f"{copied}{in_words(self.process)} torch"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A mesh, and why this one."""

    shape: MeshShape
    reason: str


def need_of(
    shape: MeshShape, spec: RunSpec, local: LocalTraining = PLAIN, *, is_copied: bool = False
) -> Need:
    """What the fullest rank takes of its device, at the peak of an inner step.

    `is_copied`: in the same memory is what a checkpoint is written from. Whoever offloads keeps there what
    two layers take at a time, and all else in the system's memory; that was counted, not measured.
    """
    layers = math.ceil(spec.num_layers / shape.pipeline)
    per_layer, table = _sizes_of(spec)
    # A pipeline's rank has one table at most, at whichever end.
    of_pipeline = layers * per_layer + table
    whole = spec.num_parameters if shape.pipeline == 1 else of_pipeline
    values, table = whole // shape.tensor, table // shape.tensor
    folded = shape.num_shards if shape.is_fully_sharded else shape.shard
    of_moments, of_gradients, of_parameters = (
        folded if shape.zero >= stage else 1 for stage in (1, 2, 3)
    )
    frozen = 0 if spec.description is None else spec.description.num_frozen // of_parameters
    held = values // of_parameters + frozen
    if local.accumulate == "whole":
        of_gradients = 1
    gradients = values // of_gradients
    a_part = min(values, 2 * per_layer // shape.tensor + table)  # two layers, and what is in none
    of_adamw = table if spec.inner.optimizer == "muon" else 0  # which Muon leaves to it
    stepped = (_MOMENTS[spec.inner.optimizer] * values + of_adamw) // of_moments
    activations = _activation_bytes(shape, spec, layers, local)
    if shape.has_offload:
        a_part_of_frozen = 2 * frozen * of_parameters // max(2, layers)
        on_device = a_part + a_part_of_frozen if shape.zero == 3 else values + frozen
        return Need(
            parameters=_VALUE_BYTES * on_device,
            gradients=_VALUE_BYTES * a_part,
            moments=0,
            activations=activations,
            offloaded=_VALUE_BYTES * (held + gradients + stepped),
        )
    gathered = 0 if of_parameters == 1 else a_part
    return Need(
        parameters=_VALUE_BYTES * (held + gathered),
        gradients=_VALUE_BYTES * gradients,
        moments=_VALUE_BYTES * stepped,
        activations=activations,
        copied=_VALUE_BYTES * stepped if is_copied else 0,
    )


def _sizes_of(spec: RunSpec) -> tuple[int, int]:
    """Values of a layer, the largest where they differ, and of what belongs to none."""
    model = spec.model
    if isinstance(model, DecoderModel):
        table = model.vocab_size * model.hidden_size
        return (spec.num_parameters - table) // model.num_layers, table
    of_layer: dict[int | None, int] = {}
    for tensor in spec.tensors:
        of_layer[tensor.layer] = of_layer.get(tensor.layer, 0) + tensor.num_elements
    outside = of_layer.pop(None, 0)
    return max(of_layer.values(), default=0), outside


def _described_activations(shape: MeshShape, spec: RunSpec, local: LocalTraining) -> int:
    """By what was counted when the model was described; 0 where that was not possible."""
    if spec.description is None or spec.description.activation_bytes is None:
        return 0
    rows = spec.inner.batch // shape.num_data
    if shape.pipeline > 1 and shape.schedule != "gpipe":  # as below
        rows = math.ceil(rows / max(1, shape.microbatches(spec))) * shape.pipeline
    rows = min(rows, local.micro_batch or rows)
    # A mask that keeps documents apart is for all layers once.
    of_mask = 0 if spec.data.across_documents else spec.model.context**2
    kept: float = rows * (spec.description.activation_bytes + of_mask)
    if local.activation_checkpointing == "full":
        kept *= min(1.0, 2 / spec.num_layers)  # each layer's input, and all of one layer
    if local.precision not in ("fp32", "tf32"):
        kept /= 2  # at most
    return int(kept / shape.tensor / shape.pipeline)


def _activation_bytes(shape: MeshShape, spec: RunSpec, layers: int, local: LocalTraining) -> int:
    """What autograd keeps of the samples that are under way at once."""
    model = spec.model
    if not isinstance(model, DecoderModel):
        return _described_activations(shape, spec, local)
    rows = spec.inner.batch // shape.num_data
    if shape.pipeline > 1 and shape.schedule != "gpipe":
        # As many microbatches as the pipeline is long are under way in its first rank.
        rows = math.ceil(rows / max(1, shape.microbatches(spec))) * shape.pipeline
    elif local.micro_batch:
        rows = min(rows, local.micro_batch)
    positions = rows * model.context // shape.context
    kv_share = model.num_kv_heads / model.num_heads
    # Of each position: two norms in and out, queries, keys, values and what they turn into, the
    # mixed values, both residuals; gate, up, their product and its parts.
    of_layer = model.hidden_size * (9 + 3 * kv_share) + 4 * model.ffn_size
    kept = layers * of_layer
    if local.activation_checkpointing == "full":
        kept = layers * model.hidden_size + of_layer  # each layer's input, and all of one layer
    elif local.activation_checkpointing == "selective" or local.compile:
        # Matrix products and attention, and what goes in; torch chooses about so when it compiles.
        kept = layers * (model.hidden_size * (5 + 2 * kv_share) + 2 * model.ffn_size)
    if local.precision not in ("fp32", "tf32"):
        kept /= 2  # at most: the residual stream stays fp32
    # Logits, their exponentials, their gradient; and those before a soft-cap.
    of_logits = (3 if model.logit_softcap is None else 4) * model.vocab_size
    # What keeps documents apart is for whole samples, and for all layers once.
    of_mask = 0 if spec.data.across_documents else model.context
    return int(_VALUE_BYTES * positions * ((kept + of_logits) / shape.tensor + of_mask))


def node_bytes(spec: RunSpec) -> int:
    """What a node takes of the system's memory besides its ranks: the outer state, and torch."""
    exchange = spec.exchange
    return NODE_PROCESS_BYTES + daemon_bytes(
        num_elements=spec.num_parameters,
        largest_fragment=layout_of(spec).largest_fragment,
        num_reducers=spec.run.min_nodes,
        keeps_error=exchange.reducer_error == "keep",
        uplink=exchange.uplink,
        downlink=exchange.downlink,
        is_audited=spec.outer.audit > 0,
    )


def check_node_memory(spec: RunSpec, memory_bytes: int) -> None:
    """Raises ConfigError when a machine cannot even hold the outer state."""
    check_holds(spec, node_bytes(spec), memory_bytes)


def check_holds(spec: RunSpec, need: int, memory_bytes: int) -> None:
    """Raises ConfigError when what the outer state needs is more than the memory that is free."""
    if need > memory_bytes:
        raise ConfigError(
            f"the outer state of {spec.num_parameters:,} parameters takes about "
            f"{in_words(need)} of memory, and {in_words(memory_bytes)} are free",
            next_step="free memory, raise the container's limit, or take part with another machine",
        )


def check_memory(
    shape: MeshShape,
    spec: RunSpec,
    *,
    bytes_per_rank: int,
    local: LocalTraining = PLAIN,
    is_copied: bool = False,
    kind: DeviceKind = "cpu",
) -> None:
    """Raises ConfigError when a rank cannot hold its part."""
    need = need_of(shape, spec, local, is_copied=is_copied)
    if need.num_bytes > bytes_per_rank:
        instead = " or checkpoint_every_rounds = 0" if is_copied else ""
        if kind in ("cuda", "xpu") and _would_fit_offloaded(shape, spec, local, bytes_per_rank):
            instead += " or offload = true"
        raise ConfigError(
            f"a rank of the mesh {shape} needs about {in_words(need.num_bytes)} ({need}) and has "
            f"{in_words(bytes_per_rank)}",
            next_step=f"take more ranks with shard or tp, or --mesh auto; or set micro_batch{instead} in "
            "node.toml",
        )


def _would_fit_offloaded(
    shape: MeshShape, spec: RunSpec, local: LocalTraining, bytes_per_rank: int
) -> bool:
    offloading = replace(shape, has_offload=True)
    try:
        check_shape(offloading, spec)
        check_combination(offloading, local)
    except ConfigError:
        return False
    return need_of(offloading, spec, local).num_bytes <= bytes_per_rank


def choose(
    spec: RunSpec,
    *,
    num_ranks: int,
    bytes_per_rank: int,
    kind: DeviceKind,
    local: LocalTraining = PLAIN,
    is_copied: bool = False,
) -> Choice:
    """The first mesh, from the fastest kind to the one that spreads most, that fits.

    Meshes that do not go with other settings are left out. Raises ConfigError with what the closest
    one needs.
    """
    too_large: list[tuple[int, MeshShape]] = []
    misfit: ConfigError | None = None
    left_out: ConfigError | None = None
    for shape, why in _by_preference(num_ranks, kind):
        try:
            check_shape(shape, spec)
            check_batch(shape, spec)
        except ConfigError as error:
            misfit = misfit or error
            continue
        try:
            check_combination(shape, local)
        except ConfigError as error:
            left_out = left_out or error
            continue
        need = wanted_bytes(need_of(shape, spec, local, is_copied=is_copied), kind)
        if need <= bytes_per_rank:
            smaller = f"; {too_large[0][1]} needs {in_words(too_large[0][0])}" if too_large else ""
            return Choice(
                shape=shape,
                reason=f"{why}: a rank needs about {in_words(need)} of {in_words(bytes_per_rank)}{smaller}",
            )
        too_large.append((need, shape))
    if not too_large and left_out is not None:
        raise left_out
    if not too_large:
        assert misfit is not None
        raise ConfigError(
            f"no mesh of {num_ranks} ranks fits this run: {misfit.what}",
            next_step="choose another number of ranks",
        )
    least, shape = min(too_large, key=lambda sized: sized[0])
    others = f". Of other meshes: {left_out.what}" if left_out else ""
    raise ConfigError(
        f"{spec.num_parameters:,} parameters do not fit {num_ranks} × "
        f"{in_words(bytes_per_rank)}: with {shape}, which needs least, a rank takes about "
        f"{in_words(least)} ({need_of(shape, spec, local, is_copied=is_copied)}){others}",
        next_step="add ranks, free memory, or take part with a machine that has more",
    )


def wanted_bytes(need: Need, kind: DeviceKind) -> int:
    """What must be free for `auto` to take a mesh.

    A GPU has more to hold than tensors: its context, the collectives' buffers, and what allocators
    cannot use of what they have. How much was not measured on one.
    """
    if kind == "cpu":
        return need.num_bytes
    return int(_GPU_MARGIN * need.num_bytes) + _GPU_BYTES


def _by_preference(num_ranks: int, kind: DeviceKind) -> Iterator[tuple[MeshShape, str]]:
    """Meshes of all ranks, each with what speaks for it."""
    if num_ranks == 1:
        yield MeshShape(), "there is one rank"
        return
    yield MeshShape(replicate=num_ranks), "whole copies of the model send least"
    yield MeshShape(shard=num_ranks, zero=1), "only AdamW's moments must be spread"
    yield MeshShape(shard=num_ranks, zero=2), "gradients and moments must be spread"
    yield MeshShape(shard=num_ranks), "parameters must be spread as well"
    # Tensor parallel sends in each layer: between GPUs of one machine it is fast enough.
    for tensor in (2, 4, 8) if kind != "cpu" else ():
        if num_ranks % tensor == 0:
            shape = MeshShape(shard=num_ranks // tensor, tensor=tensor)
            yield shape, "even activations must be spread, or the batch has too few samples"
    for pipeline in range(2, num_ranks + 1):
        if num_ranks % pipeline == 0:
            shape = MeshShape(shard=num_ranks // pipeline, pipeline=pipeline)
            yield shape, "layers must be spread, or the batch has too few samples"


def in_words(num_bytes: int) -> str:
    """Such as "1.4 GiB"."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes / 1024:.0f} KiB"
