"""Meshes as values: who is where, what fits a run, and which one is picked."""

import itertools
from pathlib import Path

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from node.config import SETTINGS_FILE, load_settings
from node.island.models.decoder_modules import Decoder, Objective
from node.island.parallel.auto_mesh import check_memory, choose, need_of, wanted_bytes
from node.island.parallel.mesh_shape import AXES, MeshShape, check_batch, check_shape
from node.island.ranks.devices import check_offload
from protocol.errors import ConfigError
from protocol.run.models import DecoderModel
from protocol.run.run_spec import DataSection, InnerSection, RunSpec

SPEC = RunSpec(
    model=DecoderModel(
        hidden_size=48, num_layers=5, num_heads=6, num_kv_heads=2, ffn_size=64, context=24
    ),
    inner=InnerSection(batch=8),
)
WIDE = MeshShape(replicate=2, shard=3, tensor=2, pipeline=2, context=2)
GIB = 1 << 30


def test_every_rank_has_a_place_of_its_own_and_neighbours_share_a_tensor_group() -> None:
    places = [WIDE.place_of(rank) for rank in range(WIDE.num_ranks)]
    assert len(set(places)) == WIDE.num_ranks == 48
    assert list(WIDE.groups_along("tensor"))[:2] == [(0, 1), (2, 3)]
    assert next(iter(WIDE.groups_along("pipeline"))) == (0, 24)


@pytest.mark.parametrize("axis", AXES)
def test_groups_along_an_axis_cover_every_rank_once(axis: str) -> None:
    groups = list(WIDE.groups_along(axis))  # type: ignore[arg-type]
    assert sorted(itertools.chain(*groups)) == list(range(WIDE.num_ranks))
    assert {len(group) for group in groups} == {getattr(WIDE, axis)}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b", "zbv"])
def test_stages_cover_the_layers_once_and_each_is_on_one_rank(schedule: str) -> None:
    shape = MeshShape(pipeline=3, schedule=schedule)  # type: ignore[arg-type]
    stages = [stage for p in range(3) for stage in shape.stages_of(p)]
    assert sorted(stages) == list(range(shape.num_stages))
    layers = [layer for s in range(shape.num_stages) for layer in shape.layers_of(s, 8)]
    assert layers == list(range(8))


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (MeshShape(tensor=4), "tp = 4 does not divide [model] num_heads = 6"),
        (MeshShape(tensor=6), "tp = 6 does not divide [model] num_kv_heads = 2"),
        (MeshShape(context=5), "cp = 5 cuts [model] context = 24 into 10 pieces"),
        (MeshShape(pipeline=6), "6 stages (a stage on each rank), and it has 5 layers"),
        (MeshShape(pipeline=3, schedule="zbv"), "6 stages (two stages on each rank)"),
        (MeshShape(num_microbatches=2), "microbatches = 2 cuts nothing without a pipeline"),
        (MeshShape(replicate=2, zero=1), "zero = 1 spreads nothing over shard = 1"),
        (MeshShape(shard=2, tensor=2, zero=1), "zero = 1 goes with replicate, shard and cp only"),
        (MeshShape(shard=2, pipeline=2, schedule="zbv"), "zero = 3 gives them back between"),
    ],
)
def test_a_mesh_that_does_not_fit_the_model_is_refused_with_the_numbers(
    shape: MeshShape, words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        check_shape(shape, SPEC)
    assert words in str(refused.value)
    assert refused.value.exit_code == 78
    assert refused.value.next_step


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (MeshShape(shard=3), "batch = 8 cannot be shared evenly by 3 ranks"),
        (MeshShape(pipeline=4, shard=4), "cannot cut 2 samples of a batch into microbatches"),
        (MeshShape(pipeline=2, num_microbatches=3), "8 samples of a batch into 3 microbatches"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused(shape: MeshShape, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_batch(shape, SPEC)
    assert words in str(refused.value)


def test_stages_are_cut_so_that_the_dearest_is_as_cheap_as_can_be() -> None:
    shape = MeshShape(pipeline=3)
    for costs, ends in (
        ([0, 4, 4, 4, 4, 3], [3, 5, 6]),
        ([9, 1, 1, 1], [1, 3, 4]),
        ([0, 0, 0, 7], [2, 3, 4]),
        ([1, 1, 1], [1, 2, 3]),
        ([0, 0, 0], [1, 2, 3]),
    ):
        found = [shape.units_of(stage, costs) for stage in range(3)]
        assert [unit for part in found for unit in part] == list(range(len(costs)))
        assert [part.stop for part in found] == ends


def test_a_pipeline_takes_twice_its_length_of_microbatches_where_the_batch_allows() -> None:
    assert MeshShape(pipeline=2).microbatches(SPEC) == 4
    assert MeshShape(pipeline=4, shard=2).microbatches(SPEC) == 4


def test_each_stage_of_zero_needs_less() -> None:
    copies = need_of(MeshShape(replicate=4), SPEC)
    one, two, three = (need_of(MeshShape(shard=4, zero=zero), SPEC) for zero in (1, 2, 3))
    assert one.moments * 4 == pytest.approx(copies.moments, rel=1e-3)
    assert one.gradients == copies.gradients
    assert two.gradients * 4 == pytest.approx(copies.gradients, rel=1e-3)
    assert two.parameters >= copies.parameters > three.parameters
    assert copies.num_bytes > one.num_bytes > two.num_bytes > three.num_bytes


def test_what_keeps_documents_apart_is_kept_once_for_all_layers() -> None:
    data = DataSection(source="tokens", paths=("x",), digest="0" * 64, across_documents=False)
    model = DecoderModel(context=256, num_layers=6)
    estimates, measured = [], []
    for spec in (RunSpec(model=model), RunSpec(model=model, data=data)):
        estimates.append(need_of(MeshShape(), spec).activations)
        documents = None if spec.data.across_documents else torch.zeros(8, 256, dtype=torch.int32)
        tokens = torch.zeros(8, 256, dtype=torch.int64)
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = Objective(Decoder(model))(tokens, tokens, documents)
            measured.append(sum(kept.values()))
        del loss
    assert estimates[1] - estimates[0] == 4 * 8 * 256 * 256
    assert measured[1] - measured[0] == pytest.approx(4 * 8 * 256 * 256, rel=0.1)


LARGE = RunSpec(
    model=DecoderModel(
        hidden_size=2048, num_layers=24, num_heads=16, num_kv_heads=8, ffn_size=5632, context=512
    ),
    inner=InnerSection(batch=8),
)  # 1.1 billion parameters


@pytest.mark.parametrize(
    ("memory", "shape"),
    [
        (80 * GIB, MeshShape(replicate=4)),
        (21 * GIB, MeshShape(shard=4, zero=1)),
        (18 * GIB, MeshShape(shard=4, zero=2)),
        (13 * GIB, MeshShape(shard=4, zero=3)),
    ],
)
def test_the_less_memory_the_more_is_spread(memory: int, shape: MeshShape) -> None:
    choice = choose(LARGE, num_ranks=4, bytes_per_rank=memory, kind="cuda")
    assert choice.shape == shape, need_of(shape, LARGE)
    assert "GiB" in choice.reason


def test_auto_leaves_room_on_a_gpu_for_what_is_no_tensor() -> None:
    need = need_of(MeshShape(), SPEC)
    assert wanted_bytes(need, "cpu") == need.num_bytes
    margin = int(1.15 * need.num_bytes) + 3_000_000_000
    assert wanted_bytes(need, "cuda") == margin
    choose(SPEC, num_ranks=1, bytes_per_rank=margin, kind="cuda")
    with pytest.raises(ConfigError, match="do not fit 1 ×"):
        choose(SPEC, num_ranks=1, bytes_per_rank=margin - 1, kind="cuda")
    check_memory(MeshShape(), SPEC, bytes_per_rank=need.num_bytes)  # who asks for it gets it


def test_a_model_that_fits_no_mesh_is_refused_with_what_the_closest_needs() -> None:
    with pytest.raises(ConfigError, match=r"do not fit 2 × 1\.0 GiB: with pipeline 2, .* GiB"):
        choose(LARGE, num_ranks=2, bytes_per_rank=GIB, kind="cpu")
    with pytest.raises(ConfigError, match=r"needs about .* and has 1\.0 GiB"):
        check_memory(MeshShape(), LARGE, bytes_per_rank=GIB)
    check_memory(MeshShape(), SPEC, bytes_per_rank=GIB)


def test_a_batch_that_ranks_cannot_share_makes_them_a_pipeline() -> None:
    spec = SPEC.model_copy(update={"inner": InnerSection(batch=9)})
    choice = choose(spec, num_ranks=2, bytes_per_rank=GIB, kind="cpu")
    assert choice.shape == MeshShape(pipeline=2)
    with pytest.raises(ConfigError, match="no mesh of 7 ranks fits this run"):
        choose(spec, num_ranks=7, bytes_per_rank=GIB, kind="cpu")


def test_offload_is_refused_where_the_parameters_are_on_the_cpu_anyway() -> None:
    with pytest.raises(ConfigError, match="the ranks train on the CPU"):
        check_offload(has_offload=True, kind="cpu")
    with pytest.raises(ConfigError, match="an Apple GPU has no other"):
        check_offload(has_offload=True, kind="mps")
    check_offload(has_offload=True, kind="cuda")


def test_ranks_alone_are_copies_and_sizes_make_the_ranks(tmp_path: Path) -> None:
    assert load_settings(tmp_path, ranks=3).mesh_shape == MeshShape(replicate=3)
    assert load_settings(tmp_path, tp=2, shard=2).mesh_shape == MeshShape(tensor=2, shard=2)
    assert load_settings(tmp_path, tp=2, ranks=2).mesh_shape.num_ranks == 2
    with pytest.raises(ConfigError, match="ranks = 3, but the mesh tensor 2 has 2"):
        _ = load_settings(tmp_path, tp=2, ranks=3).mesh_shape
    (tmp_path / SETTINGS_FILE).write_text('mesh = "auto"\npp = 2\n')
    with pytest.raises(ConfigError, match="picks the sizes, and pipeline 2 is asked for"):
        _ = load_settings(tmp_path).mesh_shape
