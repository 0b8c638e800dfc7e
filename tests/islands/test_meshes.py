"""Every mesh trains as one process does, and publishes the same bytes for the same weights."""

import math
import multiprocessing
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from node.island.models.first_weights import initial_parameters
from node.island.parallel.mesh_shape import PLAIN, LocalTraining, MeshShape, Precision
from node.island.ranks.forkserver import prepare_forkserver
from protocol.run.run_spec import RunSpec
from tests.islands.mesh_scene import (
    LIKE_BOTH,
    LIKE_MISTRAL,
    LIKE_QWEN,
    MODEL,
    STEPS,
    Figures,
    NativeCrashError,
    Outcome,
    spec_of,
    tell_ends,
    trained,
    with_muon,
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, tuple[Figures, np.ndarray]]:
    """What one process comes to, with tied and with separate embeddings."""
    prepare_forkserver()
    place = tmp_path_factory.mktemp("alone")
    found = {}
    for tied in (True, False):
        figures, _, last = trained(spec_of(tied=tied), MeshShape(), place)
        found[tied] = (figures, last)
    return found


TWO = [
    MeshShape(replicate=2),
    MeshShape(shard=2, zero=1),
    MeshShape(context=2),
    MeshShape(pipeline=2, schedule="interleaved-1f1b"),
    MeshShape(pipeline=2, schedule="zbv"),
]
MORE_OF_TWO = [
    # By day beside each other in FOUR, and with all that families and a machine choose.
    MeshShape(shard=2, zero=3),
    MeshShape(tensor=2),
    MeshShape(pipeline=2, schedule="1f1b"),
    MeshShape(shard=2, zero=2),
    MeshShape(pipeline=2, schedule="gpipe"),
    MeshShape(pipeline=2, schedule="interleaved-zero-bubble"),
]
FOUR = [MeshShape(shard=2, tensor=2), MeshShape(shard=2, pipeline=2)]
"""By day; shards beside copies and beside a context are there with what a machine chooses."""
MORE_OF_FOUR = [
    MeshShape(replicate=2, shard=2),
    MeshShape(tensor=2, context=2),
    MeshShape(context=2, pipeline=2),
    MeshShape(replicate=2, shard=2, zero=1),
    MeshShape(shard=4),
    MeshShape(replicate=2, tensor=2),
    MeshShape(shard=2, context=2),
    MeshShape(shard=2, context=2, zero=1),
    MeshShape(context=4),
    MeshShape(shard=2, pipeline=2, zero=2, schedule="zbv"),
    MeshShape(tensor=2, pipeline=2),
    MeshShape(pipeline=4, num_microbatches=8),
]


NIGHTLY = [pytest.mark.nightly]


@pytest.mark.parametrize(
    "shape",
    [*TWO, *FOUR, *(pytest.param(shape, marks=NIGHTLY) for shape in MORE_OF_TWO + MORE_OF_FOUR)],
    ids=lambda s: f"{s}, {s.schedule}, zero {s.zero}",
)
def test_a_mesh_trains_as_one_process_and_publishes_the_same_bytes(
    shape: MeshShape, alone: dict[bool, tuple[Figures, np.ndarray]], tmp_path: Path
) -> None:
    check_alike(shape, alone, tmp_path, tied=True)


@pytest.mark.parametrize(
    "shape",
    [
        MeshShape(pipeline=2),
        # The model of all families has such a head too.
        pytest.param(MeshShape(shard=2), marks=NIGHTLY),
        pytest.param(MeshShape(tensor=2), marks=NIGHTLY),
        pytest.param(MeshShape(pipeline=2, schedule="zbv"), marks=NIGHTLY),
    ],
    ids=lambda s: f"{s}, {s.schedule}",
)
def test_a_head_of_its_own_is_trained_likewise(
    shape: MeshShape, alone: dict[bool, tuple[Figures, np.ndarray]], tmp_path: Path
) -> None:
    check_alike(shape, alone, tmp_path, tied=False)


# 3 of a rank's 4 samples and then 1; layers recomputed; and with torch's deterministic kernels.
IN_PARTS = LocalTraining(micro_batch=3)
IN_WHOLE_PARTS = LocalTraining(micro_batch=1, accumulate="whole")
RECOMPUTED = LocalTraining(activation_checkpointing="full")
DETERMINISTIC = LocalTraining(deterministic=True)
AT_ONCE = LocalTraining(micro_batch=3, activation_checkpointing="full", deterministic=True)
WHOLE_COPIES = [MeshShape(replicate=2), MeshShape(shard=2, zero=1)]
SPREAD = [
    MeshShape(shard=2, zero=2),
    MeshShape(shard=2, zero=3),
    MeshShape(tensor=2),
    MeshShape(context=2),
]

OF_FAMILIES = {
    "like both": spec_of(model=LIKE_BOTH),
    "like Qwen": spec_of(model=LIKE_QWEN),
    "like Mistral": spec_of(model=LIKE_MISTRAL),
}


@pytest.fixture(scope="module")
def family_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """What one process comes to."""
    prepare_forkserver()
    place = tmp_path_factory.mktemp("families")
    return {name: trained(spec, MeshShape(), place) for name, spec in OF_FAMILIES.items()}


OF_QWEN = [
    MeshShape(replicate=2),
    MeshShape(shard=2),
    MeshShape(tensor=2),
    MeshShape(context=2),
    MeshShape(pipeline=2, schedule="zbv"),
    MeshShape(shard=2, tensor=2),
    MeshShape(tensor=2, pipeline=2),
]
OF_MISTRAL = [
    MeshShape(shard=2),
    MeshShape(tensor=2),
    MeshShape(context=2),
    MeshShape(context=4),
    MeshShape(tensor=2, pipeline=2),
]


@pytest.mark.parametrize(
    ("family", "shape", "local"),
    [
        ("like both", MeshShape(shard=2), RECOMPUTED),
        ("like both", MeshShape(tensor=2), AT_ONCE),
        ("like both", MeshShape(context=2), PLAIN),
        ("like both", MeshShape(pipeline=2, schedule="zbv"), PLAIN),
        *(
            pytest.param(family, shape, PLAIN, marks=NIGHTLY)
            for family, shapes in (("like Qwen", OF_QWEN), ("like Mistral", OF_MISTRAL))
            for shape in shapes
        ),
    ],
    ids=str,
)
def test_what_a_family_of_models_has_besides_is_trained_by_every_kind_of_mesh(
    family: str,
    shape: MeshShape,
    local: LocalTraining,
    family_alone: dict[str, Outcome],
    tmp_path: Path,
) -> None:
    one, first, one_last = family_alone[family]
    assert not np.array_equal(first, one_last)
    check_against(OF_FAMILIES[family], (one, one_last), shape, tmp_path, local)


@pytest.mark.nightly
def test_pipeline_tensor_and_shards_go_together_on_eight_ranks(
    alone: dict[bool, tuple[Figures, np.ndarray]], tmp_path: Path
) -> None:
    check_alike(MeshShape(shard=2, tensor=2, pipeline=2), alone, tmp_path, tied=True)


def words_of(local: LocalTraining) -> str:
    words = [
        f"recomputed {local.activation_checkpointing}",
        f"parts of {local.micro_batch}",
        local.accumulate,
        *(["deterministic"] if local.deterministic else []),
    ]
    return ", ".join(words)


@pytest.mark.parametrize(
    ("shape", "local"),
    [
        # Beside shards there is offload, which changes nothing else; tensors are split with all families.
        *((shape, AT_ONCE) for shape in [*WHOLE_COPIES, MeshShape(context=2)]),
        *(pytest.param(shape, AT_ONCE, marks=NIGHTLY) for shape in SPREAD[:3]),
        *(
            pytest.param(shape, local, marks=NIGHTLY)
            for shape in WHOLE_COPIES + SPREAD
            for local in (IN_PARTS, RECOMPUTED, DETERMINISTIC)
        ),
        (MeshShape(pipeline=2), DETERMINISTIC),
        (
            MeshShape(shard=2, zero=1),
            LocalTraining(activation_checkpointing="selective", micro_batch=1),
        ),
        pytest.param(
            MeshShape(replicate=2),
            LocalTraining(activation_checkpointing="selective", micro_batch=1),
            marks=NIGHTLY,
        ),
        *(
            pytest.param(
                shape,
                LocalTraining(activation_checkpointing="full", micro_batch=1),
                # Of four ranks that which shares most.
                marks=[] if shape == MeshShape(shard=2, context=2) else NIGHTLY,
            )
            for shape in FOUR + MORE_OF_FOUR
            if shape.pipeline == 1
        ),
        (MeshShape(replicate=2, shard=2), IN_WHOLE_PARTS),
        pytest.param(MeshShape(shard=2), IN_WHOLE_PARTS, marks=NIGHTLY),
        (MeshShape(shard=2, has_offload=True), AT_ONCE),
        *(
            pytest.param(MeshShape(shard=2, has_offload=True), local, marks=NIGHTLY)
            for local in (IN_PARTS, RECOMPUTED)
        ),
        (MeshShape(has_offload=True), DETERMINISTIC),
    ],
    ids=lambda value: str(value) if isinstance(value, MeshShape) else words_of(value),
)
def test_what_a_machine_chooses_changes_nothing_on_meshes_that_allow_it(
    shape: MeshShape,
    local: LocalTraining,
    alone: dict[bool, tuple[Figures, np.ndarray]],
    tmp_path: Path,
) -> None:
    """All at once by day; nightly says which of them does."""
    check_alike(shape, alone, tmp_path, local=local)


@pytest.mark.parametrize(
    ("shape", "backend"),
    [
        # Code is made of what was traced, whatever the mesh, so running the trace will do.
        pytest.param(MeshShape(replicate=2), "inductor", marks=NIGHTLY),
        pytest.param(MeshShape(replicate=2), "aot_eager", marks=NIGHTLY),
        (MeshShape(shard=2), "aot_eager"),
        pytest.param(MeshShape(context=2), "aot_eager", marks=NIGHTLY),
        pytest.param(
            MeshShape(pipeline=2, schedule="interleaved-1f1b"), "aot_eager", marks=NIGHTLY
        ),
    ],
    ids=lambda value: f"{value}, {value.schedule}" if isinstance(value, MeshShape) else value,
)
def test_a_mesh_with_compiled_layers_trains_as_one_process_without(
    shape: MeshShape,
    backend: str,
    alone: dict[bool, tuple[Figures, np.ndarray]],
    tmp_path: Path,
) -> None:
    spec, local = spec_of(), LocalTraining(compile=True)
    many, _, last = trained(spec, shape, tmp_path, local, backend=backend)
    one, one_last = alone[True]
    assert many[:3] == pytest.approx(one[:3], abs=1e-5)
    assert many[3] == pytest.approx(one[3], abs=1e-5)
    np.testing.assert_allclose(last, one_last, rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def alone_with_muon(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """What one process comes to."""
    prepare_forkserver()
    return trained(with_muon(spec_of()), MeshShape(), tmp_path_factory.mktemp("muon"))


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(MeshShape(replicate=2), marks=NIGHTLY),  # copies, as with context
        MeshShape(context=2),
        MeshShape(shard=2, zero=1),
        pytest.param(MeshShape(shard=2, zero=2), marks=NIGHTLY),  # as with offload
        MeshShape(tensor=2),
        MeshShape(pipeline=2, schedule="zbv"),
        pytest.param(MeshShape(shard=2, tensor=2), marks=NIGHTLY),
        MeshShape(shard=2, has_offload=True),
    ],
    ids=lambda s: f"{s}, zero {s.zero}",
)
def test_muon_steps_by_whole_matrices_on_every_mesh(
    shape: MeshShape, alone_with_muon: Outcome, tmp_path: Path
) -> None:
    one, _, one_last = alone_with_muon
    many, _, last = trained(with_muon(spec_of()), shape, tmp_path)
    assert many[:3] == pytest.approx(one[:3], abs=1e-5)
    assert many[3] == pytest.approx(one[3], abs=1e-5)
    np.testing.assert_allclose(last, one_last, rtol=0, atol=1e-4)


BF16, FP16 = LocalTraining(precision="bf16"), LocalTraining(precision="fp16")


@pytest.fixture(scope="module")
def alone_in_lower(tmp_path_factory: pytest.TempPathFactory) -> dict[Precision, Outcome]:
    """What one process comes to in each precision."""
    prepare_forkserver()
    place = tmp_path_factory.mktemp("lower")
    return {
        local.precision: trained(spec_of(), MeshShape(), place, local) for local in (BF16, FP16)
    }


@pytest.mark.parametrize(
    ("shape", "local"),
    [
        (MeshShape(replicate=2), BF16),
        (MeshShape(shard=2), FP16),
        (
            MeshShape(shard=2),
            LocalTraining(precision="bf16", micro_batch=3, activation_checkpointing="full"),
        ),
        (MeshShape(context=2), FP16),
        (MeshShape(pipeline=2), BF16),
        *(
            pytest.param(shape, local, marks=NIGHTLY)
            for shape, local in [
                (MeshShape(replicate=2), FP16),
                (MeshShape(shard=2, zero=1), FP16),
                (MeshShape(shard=2, zero=1), BF16),
                (MeshShape(shard=2, zero=2), BF16),
                (
                    MeshShape(shard=2, has_offload=True),
                    LocalTraining(precision="bf16", activation_checkpointing="full"),
                ),
                (MeshShape(tensor=2), BF16),  # by day a gradient overflows there
                (MeshShape(pipeline=2, schedule="zbv"), FP16),
            ]
        ),
    ],
    ids=lambda value: str(value),
)
def test_a_mesh_trains_in_a_lower_precision_as_one_process_does(
    shape: MeshShape,
    local: LocalTraining,
    alone: dict[bool, tuple[Figures, np.ndarray]],
    alone_in_lower: dict[Precision, Outcome],
    tmp_path: Path,
) -> None:
    one, first, one_last = alone_in_lower[local.precision]
    many, _, last = trained(spec_of(), shape, tmp_path, local)
    assert not np.array_equal(one_last, alone[True][1])
    assert many[0] == pytest.approx(one[0], abs=1e-5)  # measured in fp32
    # What is gathered takes half the memory; whole copies are cast where they are used.
    lower = torch.bfloat16 if local.precision == "bf16" else torch.float16
    matrix = lower if shape.is_fully_sharded else torch.float32
    assert many[5] == {("matrix", matrix), ("norm", torch.float32)}
    assert many[:3] == pytest.approx(one[:3], rel=2e-3)
    assert many[3] == pytest.approx(one[3], rel=3e-2)
    assert np.linalg.norm(last - one_last) < 0.1 * np.linalg.norm(one_last - first)


def test_norms_of_queries_and_keys_are_gathered_in_fp32_as_all_norms_are(
    family_alone: dict[str, Outcome], tmp_path: Path
) -> None:
    _, first, one_last = family_alone["like Qwen"]
    many, _, last = trained(OF_FAMILIES["like Qwen"], MeshShape(shard=2), tmp_path, BF16)
    assert many[5] == {("matrix", torch.bfloat16), ("norm", torch.float32)}
    assert np.linalg.norm(last - one_last) < 0.1 * np.linalg.norm(one_last - first)


@pytest.mark.parametrize("shape", [MeshShape(tensor=2), MeshShape(pipeline=2)], ids=str)
def test_a_gradient_that_overflows_on_one_rank_leaves_the_step_out_on_all(
    shape: MeshShape, alone_in_lower: dict[Precision, Outcome], tmp_path: Path
) -> None:
    (*_, one, _, _), _, _ = alone_in_lower["fp16"]
    (*_, norms, _, _), _, last = trained(spec_of(), shape, tmp_path, FP16, overflows_on=1)
    assert [math.isfinite(norm) for norm in norms] == [True, False, True]
    assert norms[0] == pytest.approx(one[0], rel=3e-2)
    assert norms[2] != pytest.approx(one[2], rel=3e-2)  # the second step was not taken
    assert np.isfinite(last).all()


@pytest.mark.parametrize(
    ("shape", "optimizer"),
    [
        pytest.param(MeshShape(shard=4), "adamw", marks=NIGHTLY),
        (MeshShape(shard=4), "muon"),
        (MeshShape(replicate=2, shard=2, zero=2), "adamw"),
    ],
    ids=str,
)
def test_tensors_with_fewer_rows_than_ranks_are_trained_and_published_whole(
    shape: MeshShape, optimizer: str, tmp_path: Path
) -> None:
    # Norms of 2 values leave some of four shards empty, and 3 rows make them of different size.
    narrow = MODEL.model_copy(
        update={"hidden_size": 2, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "ffn_size": 3}
    )
    spec = spec_of().model_copy(update={"model": narrow})
    spec = with_muon(spec) if optimizer == "muon" else spec
    prepare_forkserver()
    one, _, one_last = trained(spec, MeshShape(), tmp_path)
    many, first, last = trained(spec, shape, tmp_path)
    assert first.tobytes() == initial_parameters(RunSpec(model=narrow)).tobytes()
    assert many[:3] == pytest.approx(one[:3], abs=1e-5)
    assert many[3] == pytest.approx(one[3], abs=1e-5)
    np.testing.assert_allclose(last, one_last, rtol=0, atol=1e-4)


def check_alike(
    shape: MeshShape,
    alone: dict[bool, tuple[Figures, np.ndarray]],
    place: Path,
    *,
    tied: bool = True,
    local: LocalTraining = PLAIN,
) -> None:
    check_against(spec_of(tied=tied), alone[tied], shape, place, local)


def check_against(
    spec: RunSpec,
    alone: tuple[Figures, np.ndarray],
    shape: MeshShape,
    place: Path,
    local: LocalTraining,
) -> None:
    (before, after, loss, norms, passes, _), first, last = trained(spec, shape, place, local)
    (one_before, one_after, one_loss, one_norms, *_), one_last = alone
    assert first.tobytes() == initial_parameters(spec).tobytes()
    assert (before, after, loss) == pytest.approx((one_before, one_after, one_loss), abs=1e-5)
    assert norms == pytest.approx(one_norms, abs=1e-5)
    assert len(norms) == STEPS
    assert min(norms) > spec.inner.clip  # else clipping did nothing
    np.testing.assert_allclose(last, one_last, rtol=0, atol=1e-4)
    if shape.pipeline == 1:
        share, most = 8 // shape.num_data, local.micro_batch
        parts = [len(part) for part in torch.empty(share).split(most or share)]
        times = MODEL.num_layers * (1 if local.activation_checkpointing == "none" else 2)
        assert passes == sorted(STEPS * times * parts)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT])
def test_only_what_native_code_ends_may_be_tried_again(number: int) -> None:
    context = multiprocessing.get_context("forkserver")
    crashed = context.Process(target=signal.raise_signal, args=(number,))
    failed = context.Process(target=sys.exit, args=(1,))
    for process in (crashed, failed):
        process.start()
    with pytest.raises(NativeCrashError, match=rf"ended with \[1, -{number}\]"):
        tell_ends([failed, crashed], MeshShape())
    with pytest.raises(pytest.fail.Exception, match=r"ended with \[1\]"):
        tell_ends([failed], MeshShape())
