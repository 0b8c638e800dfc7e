"""What goes with which mesh: a table of both sides, and how a refusal reads."""

from typing import Any

import pytest

from node.island.parallel.auto_mesh import check_memory, choose, need_of
from node.island.parallel.mesh_shape import (
    PLAIN,
    REFUSED,
    LocalTraining,
    MeshShape,
    check_combination,
    may_be_traced,
)
from protocol.errors import ConfigError
from protocol.run.models import DecoderModel
from protocol.run.run_spec import InnerSection, RunSpec

MESHES = {
    "copies": MeshShape(replicate=2),
    "zero 1": MeshShape(shard=2, zero=1),
    "zero 2": MeshShape(shard=2, zero=2),
    "zero 3": MeshShape(shard=2),
    "tp": MeshShape(tensor=2),
    "pp": MeshShape(pipeline=2),
    "zbv": MeshShape(pipeline=2, schedule="zbv"),
    "cp": MeshShape(context=2),
    "offload": MeshShape(has_offload=True),
}
CHOICES: dict[str, Any] = {
    "micro_batch = 2": LocalTraining(micro_batch=2),
    'precision = "bf16"': LocalTraining(precision="bf16"),
    'precision = "fp16"': LocalTraining(precision="fp16"),
    'activation_checkpointing = "selective"': LocalTraining(activation_checkpointing="selective"),
    'activation_checkpointing = "full"': LocalTraining(activation_checkpointing="full"),
    "compile = true": LocalTraining(compile=True),
    "deterministic = true": LocalTraining(deterministic=True),
    'precision = "auto"': LocalTraining(precision="auto"),
}
SPEC = RunSpec(
    model=DecoderModel(
        hidden_size=256, num_layers=6, num_heads=4, num_kv_heads=2, ffn_size=512, context=64
    ),
    inner=InnerSection(batch=8),
)
ALONE = (MeshShape(), MeshShape(replicate=3))

# fmt: off
REFUSALS = {
    "micro_batch = 2":                        ["pp", "zbv"],
    'precision = "bf16"':                     [],
    'precision = "fp16"':                     [],
    'activation_checkpointing = "selective"': ["zero 2", "zero 3", "tp", "pp", "zbv", "cp", "offload"],
    'activation_checkpointing = "full"':      ["pp", "zbv"],
    "compile = true":                         ["tp", "zbv", "offload"],
    "deterministic = true":                   [],
    'precision = "auto"':                     [],
}
# fmt: on


@pytest.mark.parametrize("words", CHOICES)
def test_a_choice_is_refused_on_these_meshes_and_on_no_others(words: str) -> None:
    refused = []
    for name, shape in MESHES.items():
        try:
            check_combination(shape, CHOICES[words])
        except ConfigError as error:
            assert error.exit_code == 78
            assert words in error.what
            refused.append(name)
    assert refused == REFUSALS[words]
    for shape in ALONE:
        check_combination(shape, CHOICES[words])


@pytest.mark.parametrize(
    ("shape", "choice", "sentence"),
    [
        (
            MeshShape(replicate=2, shard=2),
            LocalTraining(activation_checkpointing="selective"),
            'activation_checkpointing = "selective" does not go with shard = 2 (zero = 3): they are '
            'not known to train right together; set activation_checkpointing = "none", or set '
            "replicate = 4 and shard = 1, in node.toml",
        ),
        (
            MeshShape(pipeline=2, schedule="zbv"),
            LocalTraining(compile=True),
            'compile = true does not go with schedule = "zbv": they are not known to train right '
            'together; set compile = false, or set schedule = "1f1b", in node.toml',
        ),
        (
            MeshShape(has_offload=True),
            LocalTraining(compile=True),
            "compile = true does not go with offload = true: they are not known to train right "
            "together; set compile = false, or set offload = false, in node.toml",
        ),
        (
            MeshShape(pipeline=4, tensor=2),
            LocalTraining(micro_batch=2),
            "micro_batch = 2 does not go with pp = 4: they are not known to train right together; "
            "set micro_batch = 0, or set pp = 1, in node.toml",
        ),
    ],
)
def test_a_refusal_names_both_settings_and_what_to_change(
    shape: MeshShape, choice: LocalTraining, sentence: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        check_combination(shape, choice)
    assert str(refused.value) == sentence


def test_nothing_is_traced_where_native_code_was_seen_to_end_ranks() -> None:
    full = LocalTraining(activation_checkpointing="full")
    assert not may_be_traced(MeshShape(shard=2, tensor=2), full)
    assert may_be_traced(MeshShape(shard=2, tensor=2), PLAIN)
    assert may_be_traced(MeshShape(shard=4), full)


def test_every_setting_in_the_table_is_tried_here() -> None:
    of_no_mesh = {name for name, refused in REFUSALS.items() if not refused}
    assert len(REFUSED) == len(REFUSALS) - len(of_no_mesh)


def test_auto_leaves_out_meshes_that_do_not_go_with_other_settings() -> None:
    copies = need_of(MeshShape(replicate=2), SPEC).num_bytes
    too_little = copies - 1
    assert choose(SPEC, num_ranks=2, bytes_per_rank=too_little, kind="cpu").shape.shard == 2
    frugal = LocalTraining(activation_checkpointing="selective")
    too_little = need_of(MeshShape(shard=2, zero=1), SPEC, frugal).num_bytes - 1
    with pytest.raises(ConfigError, match=r'"selective" does not go with shard = 2'):
        choose(SPEC, num_ranks=2, bytes_per_rank=too_little, kind="cpu", local=frugal)
    odd = SPEC.model_copy(update={"inner": InnerSection(batch=9)})
    with pytest.raises(ConfigError, match=r'"selective" does not go with pp = 2.*, or set pp = 1'):
        choose(odd, num_ranks=2, bytes_per_rank=2**40, kind="cpu", local=frugal)


@pytest.mark.parametrize(
    "local",
    [
        LocalTraining(micro_batch=1),
        LocalTraining(activation_checkpointing="full"),
        LocalTraining(activation_checkpointing="selective"),
        LocalTraining(precision="bf16"),
        LocalTraining(compile=True),
    ],
)
def test_memory_is_not_refused_to_those_who_save_it(local: LocalTraining) -> None:
    plain, saving = need_of(MeshShape(), SPEC), need_of(MeshShape(), SPEC, local)
    assert saving.activations < plain.activations
    with pytest.raises(ConfigError, match="set micro_batch"):
        check_memory(MeshShape(), SPEC, bytes_per_rank=saving.num_bytes)
    check_memory(MeshShape(), SPEC, bytes_per_rank=saving.num_bytes, local=local)


def test_muon_needs_fewer_moments_but_for_the_table() -> None:
    muon = SPEC.model_copy(update={"inner": InnerSection(batch=8, optimizer="muon")})
    assert isinstance(SPEC.model, DecoderModel)
    table = SPEC.model.vocab_size * SPEC.model.hidden_size
    assert need_of(MeshShape(), SPEC).moments == 8 * SPEC.num_parameters
    assert need_of(MeshShape(), muon).moments == 4 * (SPEC.num_parameters + table)
