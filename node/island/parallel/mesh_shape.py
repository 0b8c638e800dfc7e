"""How an island's ranks are laid out and train, by their owner's choice, and what goes with what.

Pure and without torch, so that a mesh which cannot work is refused at once. Which mesh to take and
how much memory it needs is the business of auto_mesh, beside this; process groups are mesh's.

A machine's choices of how it trains are of speed and memory, never of the run's rules. None changes what is
computed but for rounding, so nodes of one swarm may differ in all of it.

Of settings of inner training and meshes, what is not known to be right together is refused. What is not
refused here is compared with one process in the tests, on every kind of mesh.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from protocol.errors import ConfigError
from protocol.run.models import DecoderModel, Description
from protocol.run.run_spec import RunSpec

ScheduleName = Literal["gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv"]
Axis = Literal["pipeline", "replicate", "shard", "context", "tensor"]
AXES: tuple[Axis, ...] = ("pipeline", "replicate", "shard", "context", "tensor")
"""From the slowest to the fastest: neighbouring ranks share a tensor group."""

SPLIT_BACKWARD: tuple[ScheduleName, ...] = ("interleaved-zero-bubble", "zbv")
"""Schedules that compute the gradients of weights later than those of inputs."""

_STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A rank's coordinates."""

    pipeline: int
    replicate: int
    shard: int
    context: int
    tensor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """Ranks along each axis. `replicate` and `shard` see different samples; the others share them.

    `zero` says what is spread over the shard axis (ZeRO, Rajbhandari et al., 2020): 1 the
    optimizer's state, 2 gradients too, 3 parameters too.
    """

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    zero: int = 3
    schedule: ScheduleName = "1f1b"
    num_microbatches: int = 0  # 0 lets `microbatches` choose
    has_offload: bool = False

    @property
    def num_ranks(self) -> int:
        """Processes that the mesh takes."""
        return self.replicate * self.shard * self.tensor * self.pipeline * self.context

    @property
    def num_data(self) -> int:
        """Into how many parts a batch is shared out."""
        return self.replicate * self.shard

    @property
    def num_shards(self) -> int:
        """Parts of each parameter under FSDP: context ranks take part in it."""
        return self.shard * self.context

    @property
    def num_stages(self) -> int:
        """Parts that the layers are cut into."""
        return self.pipeline * self.stages_per_rank

    @property
    def stages_per_rank(self) -> int:
        """Two with schedules that interleave."""
        return 1 if self.pipeline == 1 else _STAGES_PER_RANK.get(self.schedule, 2)

    @property
    def is_fully_sharded(self) -> bool:
        """Whether FSDP2 holds the parameters, rather than each rank all of them.

        Tensor and pipeline parallel go through it also with one shard: one way for all of them.
        """
        has_model_axes = self.tensor > 1 or self.pipeline > 1
        return has_model_axes or self.has_offload or (self.shard > 1 and self.zero > 1)

    def place_of(self, rank: int) -> Place:
        """The coordinates of a rank."""
        coordinates: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, coordinates[axis] = divmod(rank, getattr(self, axis))
        return Place(**coordinates)

    def groups_along(self, *axes: Axis) -> Iterator[tuple[int, ...]]:
        """All sets of ranks that differ in nothing but these axes, in a fixed order."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.num_ranks):
            place = self.place_of(rank)
            key = tuple(getattr(place, axis) for axis in AXES if axis not in axes)
            groups.setdefault(key, []).append(rank)
        return (tuple(group) for group in groups.values())

    def stages_of(self, pipeline: int) -> tuple[int, ...]:
        """The stages of a pipeline coordinate, in the order of the layers."""
        last = self.num_stages - 1
        if self.stages_per_rank == 1:
            return (pipeline,)
        if self.schedule == "zbv":  # down and up again, so that the first rank has the loss
            return (pipeline, last - pipeline)
        return (pipeline, pipeline + self.pipeline)

    def pipeline_of(self, stage: int) -> int:
        """The pipeline coordinate that holds a stage."""
        return next(p for p in range(self.pipeline) if stage in self.stages_of(p))

    def layers_of(self, stage: int, num_layers: int) -> range:
        """The layers of a stage; the first stages have one more when they do not divide."""
        each, more = divmod(num_layers, self.num_stages)
        start = stage * each + min(stage, more)
        return range(start, start + each + (stage < more))

    def units_of(self, stage: int, operations: Sequence[int]) -> range:
        """Which of a model's units, which cost so much each, are in a stage."""
        return _evenly(operations, self.num_stages)[stage]

    def microbatches(self, spec: RunSpec) -> int:
        """Microbatches of a rank's share of the batch, or 0 when no number suits.

        Twice the pipeline's length leaves a third of it idle at most; more make each one smaller.
        """
        if self.pipeline == 1:
            return 1
        rows = spec.inner.batch // self.num_data
        if self.num_microbatches:
            return self.num_microbatches if self._suits(self.num_microbatches, rows) else 0
        suitable = [number for number in range(1, rows + 1) if self._suits(number, rows)]
        enough = [number for number in suitable if number >= 2 * self.pipeline]
        return enough[0] if enough else (suitable or [0])[-1]

    def _suits(self, number: int, rows: int) -> bool:
        rounds = max(1, number // self.pipeline)
        is_even = self.stages_per_rank == 1 or number % rounds == 0
        return rows % number == 0 and number >= self.pipeline and is_even

    def __str__(self) -> str:
        """Such as "shard 2 (ZeRO 3) × tensor 2"; "1 rank" for one."""
        words = [f"{axis} {getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        text = " × ".join(words) or "1 rank"
        return text.replace(f"shard {self.shard}", f"shard {self.shard} (ZeRO {self.zero})")


def _evenly(costs: Sequence[int], num_parts: int) -> list[range]:
    """Cuts a row of things into parts of one at least, so that the dearest part is as cheap as can be."""

    def cut(most: int) -> list[range] | None:
        parts, start = [], 0
        for others in reversed(range(num_parts)):
            stop = start + 1
            while stop < len(costs) - others and sum(costs[start : stop + 1]) <= most:
                stop += 1
            parts.append(range(start, stop))
            start = stop
        fits = start == len(costs) and all(sum(costs[i] for i in part) <= most for part in parts)
        return parts if fits else None

    too_little, enough = -1, sum(costs)
    while enough - too_little > 1:
        middle = (too_little + enough) // 2
        too_little, enough = (middle, enough) if cut(middle) is None else (too_little, middle)
    found = cut(enough)
    assert found is not None, "check_shape has refused more stages than units"
    return found


def check_shape(shape: MeshShape, spec: RunSpec) -> None:
    """Raises ConfigError with the numbers when the run's model or batch does not fit the mesh."""
    for problem, next_step in itertools.chain(
        _of_model(shape, spec),
        _of_documents(shape, spec),
        _of_pipeline(shape, spec),
        _of_schedule(shape),
        _of_zero(shape),
    ):
        raise ConfigError(problem, next_step=next_step)


def check_batch(shape: MeshShape, spec: RunSpec) -> None:
    """Raises ConfigError when a batch cannot be shared evenly."""
    if spec.inner.batch % shape.num_data:
        raise ConfigError(
            f"[inner] batch = {spec.inner.batch} cannot be shared evenly by {shape.num_data} ranks",
            next_step="start the node with a number of ranks that divides it, or with tp, pp or cp",
        )
    rows = spec.inner.batch // shape.num_data
    if not shape.microbatches(spec):
        asked = f"{shape.num_microbatches} " if shape.num_microbatches else ""
        raise ConfigError(
            f"a pipeline of {shape.pipeline} with {shape.schedule} cannot cut {rows} samples of a "
            f"batch into {asked}microbatches: at least {shape.pipeline}, all of the same size",
            next_step="lower pp, replicate or shard, or set microbatches to a number that divides "
            f"{rows}",
        )


def _of_model(shape: MeshShape, spec: RunSpec) -> Iterator[tuple[str, str]]:
    model = spec.model
    if isinstance(model, DecoderModel):
        yield from _of_tensor(shape, model)
        yield from _of_context(shape, model)
        return
    described = spec.description or Description()
    more = [
        name for name, plan in (("tp", described.tensor_plan), ("pp", described.stages)) if plan
    ]
    works = "replicate and shard work" + "".join(f", and {name}" for name in more)
    if shape.context > 1:
        yield (
            f'cp = {shape.context} does not go with [model] source = "{model.source}": its attention '
            "does not ask other ranks for keys",
            f"set cp = 1: {works}",
        )
    if shape.pipeline > 1 and not described.stages:
        why = described.no_stages or "the run's model has no stages"
        yield f"pp = {shape.pipeline} is not possible: {why}", f"set pp = 1: {works}"
    if shape.pipeline * shape.tensor > 1 and described.num_running_statistics:
        yield (
            f"tp = {shape.tensor} with pp = {shape.pipeline} is not possible: running statistics, as batch "
            "norm's, want ranks with the whole model",
            "set tp = 1 and pp = 1: replicate and shard work",
        )
    if shape.pipeline > 1 and described.num_frozen:
        yield (
            f"pp = {shape.pipeline} is not possible: the model has parameters that are not trained",
            "set pp = 1, or shard instead",
        )
    if shape.tensor == 1:
        return
    if not described.tensor_plan:
        why = described.no_tensor_plan or "the run's model has no plan for it"
        yield f"tp = {shape.tensor} is not possible: {why}", f"set tp = 1: {works}"
    for what, number in _cut_by_tensor(spec, described):
        if number % shape.tensor:
            yield (
                f"tp = {shape.tensor} does not divide {what} = {number}",
                "choose a tp that divides it, or shard instead",
            )


def goes_by_a_plan(shape: MeshShape, spec: RunSpec) -> bool:
    """Whether a mesh takes a function's word for how it is cut."""
    return spec.model.source == "function" and (shape.tensor > 1 or shape.pipeline > 1)


def _cut_by_tensor(spec: RunSpec, described: Description) -> Iterator[tuple[str, int]]:
    """Sizes that tensor parallel cuts: of the plan's matrices, and the heads that a config names."""
    heads = ("num_attention_heads", "num_key_value_heads")
    for key in heads if spec.model.source == "transformers" else ():
        if isinstance(number := described.config.get(key), int):
            yield key, number
    plan = described.tensor_plan
    for tensor in spec.tensors:
        module = tensor.name.rpartition(".")[0]
        style = next((plan[pattern] for pattern in plan if matches(pattern, module)), None)
        if style == "row" and len(tensor.shape) == 2:
            yield f"the columns of {tensor.name}", tensor.shape[1]
        elif style in ("column", "table"):
            yield f"the rows of {tensor.name}", tensor.shape[0]


def matches(pattern: str, module: str) -> bool:
    """Whether a plan's name, with `*` for parts of names, means a module."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), module) is not None


def _of_tensor(shape: MeshShape, model: DecoderModel) -> Iterator[tuple[str, str]]:
    tensor = shape.tensor
    for what, number in (
        ("num_heads", model.num_heads),
        ("num_kv_heads", model.num_kv_heads),
        ("ffn_size", model.ffn_size),
    ):
        if number % tensor:
            yield (
                f"tp = {tensor} does not divide [model] {what} = {number}",
                "choose a tp that divides it, or shard instead",
            )
    if model.vocab_size % tensor:
        yield (
            f"tp = {tensor} does not divide [model] vocab_size = {model.vocab_size}",
            "choose a power of two for tp, or shard instead",
        )
    length = model.context // shape.context
    if length % tensor:
        yield (
            f"tp = {tensor} does not divide the {length} positions of each rank (sequence parallel)",
            "choose a tp that divides them, or shard instead",
        )


def _of_context(shape: MeshShape, model: DecoderModel) -> Iterator[tuple[str, str]]:
    if shape.context > 1 and model.context % (2 * shape.context):
        yield (
            f"cp = {shape.context} cuts [model] context = {model.context} into "
            f"{2 * shape.context} pieces of different size",
            "choose a cp whose double divides it",
        )


def _of_documents(shape: MeshShape, spec: RunSpec) -> Iterator[tuple[str, str]]:
    """What masks attention is found in the tokens: whole samples of them, at the first layer and the last."""
    for option, number in (("pp", shape.pipeline), ("cp", shape.context)):
        if number > 1 and not spec.data.across_documents:
            yield (
                f"{option} = {number} does not go with [data] across_documents = false: each rank would "
                "need the documents of tokens that others have",
                "shard instead, or choose tp",
            )


def _of_pipeline(shape: MeshShape, spec: RunSpec) -> Iterator[tuple[str, str]]:
    units, what = spec.num_layers, "layers"
    if not isinstance(spec.model, DecoderModel):
        units, what = len((spec.description or Description()).stages), "modules one after another"
    if shape.pipeline > 1 and shape.num_stages > units:
        each = "a stage" if shape.stages_per_rank == 1 else "two stages"
        yield (
            f"pp = {shape.pipeline} with {shape.schedule} cuts the model into {shape.num_stages} "
            f"stages ({each} on each rank), and it has {units} {what}",
            "lower pp" if shape.stages_per_rank == 1 else "lower pp, or choose schedule 1f1b",
        )
    if shape.pipeline == 1 and shape.num_microbatches:
        yield (
            f"microbatches = {shape.num_microbatches} cuts nothing without a pipeline",
            "set pp, or remove microbatches",
        )


def _of_schedule(shape: MeshShape) -> Iterator[tuple[str, str]]:
    # torch finds the weights of the second half of the backward pass among the parameters that the
    # forward pass used. Resharded after it, they are others, and their gradients are lost silently.
    splits_backward = shape.schedule in SPLIT_BACKWARD
    if shape.pipeline > 1 and splits_backward and shape.zero == 3 and shape.num_shards > 1:
        yield (
            f"{shape.schedule} needs parameters to stay whole from forward to backward, and "
            f"zero = 3 gives them back between",
            "choose zero = 2, or schedule 1f1b or interleaved-1f1b",
        )


def _of_zero(shape: MeshShape) -> Iterator[tuple[str, str]]:
    if shape.zero < 3 and shape.shard == 1:
        yield (
            f"zero = {shape.zero} spreads nothing over shard = 1",
            f"set shard to the ranks that should share, as: --shard 2 --zero {shape.zero}",
        )
    if shape.zero == 1 and (shape.tensor > 1 or shape.pipeline > 1 or shape.has_offload):
        yield (
            f"zero = 1 goes with replicate, shard and cp only, not with {shape}",
            "choose zero = 2 or 3",
        )


Precision = Literal["auto", "fp32", "tf32", "bf16", "fp16"]
Accumulating = Literal["sharded", "whole"]
Recomputing = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTraining:
    """What node.toml says about the inner steps of this machine's ranks."""

    micro_batch: int = 0  # samples that a rank puts through the model together; 0: all of its share
    accumulate: Accumulating = "sharded"  # what a rank keeps between the parts of a batch
    precision: Precision = "fp32"
    activation_checkpointing: Recomputing = "none"
    compile: bool = False
    deterministic: bool = False
    load: float = 1.0  # the part of its time that it trains; for the others it rests

    def check(self) -> None:
        """Raises ConfigError for choices that exclude each other; needs no torch."""
        if self.compile and self.activation_checkpointing == "selective":
            raise ConfigError(
                'activation_checkpointing = "selective" has no effect on compiled layers, for which '
                "torch chooses by itself what to keep",
                next_step='set it to "none" or "full" in node.toml, or compile = false',
            )
        if self.accumulate == "whole" and not self.micro_batch:
            raise ConfigError(
                'accumulate = "whole" has no effect where a batch goes through the model at once',
                next_step="set micro_batch to the samples of a part, or remove accumulate",
            )


PLAIN = LocalTraining()
"""Everything at once, in fp32: what tests and simulations train with."""


Setting = Literal["micro_batch", "selective", "full", "compile"]
Feature = Literal["shard", "zero", "tp", "pp", "zero-bubble", "cp", "offload"]
"""What of a mesh is more than whole copies of the model; "zero" is shards of the optimizer alone, and
"zero-bubble" a pipeline whose schedule takes backward in two halves."""

REFUSED: dict[Setting, tuple[Feature, ...]] = {
    "micro_batch": ("pp",),  # a pipeline has microbatches of its own
    "selective": ("shard", "tp", "pp", "cp", "offload"),
    "full": ("pp",),  # schedules that split backward would run half of it twice
    # With tp compiled layers train something else, and say nothing; halves of a compiled backward fail.
    "compile": ("tp", "zero-bubble", "offload"),
}


def check_combination(shape: MeshShape, local: LocalTraining) -> None:
    """Raises ConfigError that names the setting and what of the mesh it does not go with."""
    features = dict(_features_of(shape))
    for setting, words, instead in _settings_of(local):
        for feature in REFUSED[setting]:
            if feature in features:
                there, without = features[feature]
                raise ConfigError(
                    f"{words} does not go with {there}: they are not known to train right together",
                    next_step=f"{instead}, or {without}, in node.toml",
                )


def check_local(spec: RunSpec, local: LocalTraining) -> None:
    """Raises ConfigError for a setting that is done layer by layer, where a model has no layers."""
    if any(tensor.layer is not None for tensor in spec.tensors):
        return
    for setting, words, instead in _settings_of(local):
        if setting in ("selective", "full", "compile"):
            raise ConfigError(
                f"{words} is done layer by layer, and no layers were found in this model",
                next_step=f"{instead} in node.toml",
            )


def check_mesh(shape: MeshShape, spec: RunSpec, local: LocalTraining) -> None:
    """Raises ConfigError for whatever of the run or of the settings does not go with the mesh."""
    check_shape(shape, spec)
    check_batch(shape, spec)
    check_combination(shape, local)
    check_local(spec, local)


def may_be_traced(shape: MeshShape, local: LocalTraining) -> bool:
    """Whether inner steps may be traced for the share of communication in them.

    Native code was seen to end ranks, once in a thousand trainings, where steps were traced, cut
    tensors' layers recomputed, and collectives gloo's. What brings it about is not known, so there
    nothing is traced, and the share is not known.
    """
    return shape.tensor == 1 or local.activation_checkpointing != "full"


def _features_of(shape: MeshShape) -> Iterator[tuple[Feature, tuple[str, str]]]:
    """Each with its setting, and what to set instead."""
    copies = f"replicate = {shape.num_data} and shard = 1"
    if shape.shard > 1 and shape.zero > 1:
        yield "shard", (f"shard = {shape.shard} (zero = {shape.zero})", f"set {copies}")
    if shape.shard > 1 and shape.zero == 1:
        yield "zero", (f"shard = {shape.shard} (zero = 1)", f"set {copies}, and remove zero")
    if shape.tensor > 1:
        yield "tp", (f"tp = {shape.tensor}", "set tp = 1")
    if shape.pipeline > 1:
        yield "pp", (f"pp = {shape.pipeline}", "set pp = 1")
        if shape.schedule in SPLIT_BACKWARD:
            yield "zero-bubble", (f'schedule = "{shape.schedule}"', 'set schedule = "1f1b"')
    if shape.context > 1:
        yield "cp", (f"cp = {shape.context}", "set cp = 1")
    if shape.has_offload:
        yield "offload", ("offload = true", "set offload = false")


def _settings_of(local: LocalTraining) -> Iterator[tuple[Setting, str, str]]:
    """Each with its words, and what to set instead."""
    if local.micro_batch:
        yield "micro_batch", f"micro_batch = {local.micro_batch}", "set micro_batch = 0"
    if local.activation_checkpointing != "none":
        words = f'activation_checkpointing = "{local.activation_checkpointing}"'
        yield local.activation_checkpointing, words, 'set activation_checkpointing = "none"'
    if local.compile:
        yield "compile", "compile = true", "set compile = false"
