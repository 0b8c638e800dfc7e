"""Which settings of inner training go with which meshes: what is not known to be right is refused.

Pure and without torch, so that people are told before any process starts. What is not refused here
is compared with one process in the tests, on every kind of mesh.
"""

from collections.abc import Iterator
from typing import Literal

from node.island.parallel.mesh_shape import SPLIT_BACKWARD, MeshShape
from node.island.training.local_training import LocalTraining
from protocol.errors import ConfigError
from protocol.run.run_spec import RunSpec

Setting = Literal[
    "micro_batch",
    "selective",
    "full",
    "compile",
]
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


def may_be_traced(shape: MeshShape, local: LocalTraining) -> bool:
    """Whether inner steps may be traced for the share of communication in them.

    Native code was seen to end ranks, once in a thousand trainings, where steps were traced, cut
    tensors' layers recomputed, and collectives gloo's. What brings it about is not known, so there
    nothing is traced, and the share is not known (`benchmarks/island/native_crashes.py` counts).
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
