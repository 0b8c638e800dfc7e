"""Real ranks tell what their inner steps wait for, whatever the mesh; a rank alone waits for nothing."""

from pathlib import Path

import pytest

from lab.simulation.inline_island import lone_work, unseen
from node.island.data.places import DataPlaces
from node.island.parallel.mesh_shape import MeshShape
from node.island.ranks.launcher import ProcessIsland, RanksHere
from protocol.run.models import DecoderModel
from protocol.run.run_spec import DataSection, InnerSection, RunSpec
from tests.islands.rank_scene import initial_vectors, with_texts

SPEC = RunSpec(
    model=DecoderModel(
        hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=2, ffn_size=48, context=16
    ),
    data=DataSection(source="text", paths=("*.txt",), held_out=0.2),
    inner=InnerSection(batch=4, learning_rate=1e-2, schedule="constant"),
)


@pytest.mark.parametrize(
    "shape",
    [
        MeshShape(),
        MeshShape(replicate=2),
        MeshShape(shard=2),
        MeshShape(tensor=2),
        MeshShape(pipeline=2),
        MeshShape(context=2),
    ],
    ids=str,
)
async def test_ranks_report_what_their_inner_steps_wait_for(
    shape: MeshShape, tmp_path: Path
) -> None:
    with initial_vectors(SPEC.model) as vectors:
        island = ProcessIsland(
            ranks=RanksHere(
                devices=("cpu",) * shape.num_ranks,
                shape=shape,
                num_threads=1,
            ),
            spec=SPEC,
            names=vectors.names,
            data=DataPlaces(folder=with_texts(tmp_path)),
        )
        try:
            await island.start()
            await island.adopt()
            first = await island.train(lone_work(SPEC, 1), unseen)
            second = await island.train(lone_work(SPEC, 4), unseen)
            third = await island.train(lone_work(SPEC, 4), unseen)
        finally:
            await island.stop()
    if shape.num_ranks == 1:
        assert [r.communication_seconds for r in (first, second, third)] == [0.0, 0.0, 0.0]
        return
    assert first.communication_seconds is None  # a process's first step is like no other
    for report in (second, third):
        assert report.communication_seconds is not None
        assert 0 < report.communication_seconds < report.seconds
