"""The benchmark compares equal work: islands and loops without Atoll lose alike, step by step."""

import pytest

from benchmarks.island.loops import Kind
from benchmarks.island.speed import compare, copy_speeds
from node.island.parallel.mesh_shape import PLAIN, MeshShape
from protocol.run.models import DecoderModel
from protocol.run.run_spec import DataSection, InnerSection, RunSpec

pytestmark = pytest.mark.usefixtures("forkserver")


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> RunSpec:
    folder = tmp_path_factory.mktemp("text")
    for i in range(12):
        (folder / f"{i}.txt").write_text(" ".join(f"{i}:{j * j}" for j in range(300)))
    return RunSpec(
        model=DecoderModel(
            hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, ffn_size=24, context=16
        ),
        data=DataSection(source="text", paths=(f"{folder}/*.txt",), held_out=0.2),
        inner=InnerSection(
            steps=6, batch=4, learning_rate=1e-2, schedule="constant", warmup_tokens=0
        ),
    )


@pytest.mark.parametrize(
    ("shape", "kind"), [(MeshShape(replicate=2), "ddp"), (MeshShape(shard=2), "fsdp2")]
)
async def test_an_island_and_torchs_own_loop_train_the_same(
    spec: RunSpec, shape: MeshShape, kind: Kind
) -> None:
    row = await compare(spec, shape, kind, ("cpu", "cpu"), PLAIN, chunks=3)
    # It raises when a chunk's losses part. Here: they fall, so there was something to part.
    losses = [(mine["loss"], theirs["loss"]) for mine, theirs in row["raw"]]
    assert losses[-1][0] < losses[0][0] - 0.1
    for mine, theirs in losses:
        assert mine == pytest.approx(theirs, rel=2e-3)


async def test_copies_are_of_all_parameters(spec: RunSpec) -> None:
    row = await copy_speeds(spec, MeshShape(shard=2), ("cpu", "cpu"), PLAIN, repeats=3)
    assert row["gigabytes"] == pytest.approx(4 * spec.num_parameters / 1e9)
    assert row["adopt_gb_per_second"]["median"] > 0 < row["publish_gb_per_second"]["median"]
