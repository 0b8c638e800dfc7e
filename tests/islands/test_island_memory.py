"""What a mesh is thought to need, against what its ranks' tensors take."""

import pytest

from benchmarks.island.memory import memory_of
from node.island.parallel.mesh_shape import PLAIN, LocalTraining, MeshShape
from protocol.run.models import DecoderModel
from protocol.run.run_spec import InnerSection, RunSpec

SPEC = RunSpec(
    model=DecoderModel(
        hidden_size=256, num_layers=4, num_heads=8, num_kv_heads=4, ffn_size=704, context=64
    ),
    inner=InnerSection(batch=4, schedule="constant", warmup_tokens=0),
)  # 3 million parameters: what torch takes for anything but them counts little


ESTIMATE_FACTOR = 1.3
"""What a rank's tensors take and what is estimated are within this factor of each other, for models that fill
some megabytes: benchmarks/island measures it, on the CPU."""

pytestmark = pytest.mark.usefixtures("forkserver")


@pytest.mark.parametrize(
    ("shape", "local"),
    [
        (MeshShape(), PLAIN),
        (MeshShape(), LocalTraining(micro_batch=1)),
        (MeshShape(), LocalTraining(activation_checkpointing="full")),
        (MeshShape(shard=2, zero=1), PLAIN),
        (MeshShape(shard=2), PLAIN),
        (MeshShape(pipeline=2), PLAIN),
    ],
    ids=str,
)
def test_a_rank_takes_about_what_is_estimated(shape: MeshShape, local: LocalTraining) -> None:
    row = memory_of(SPEC, shape, ("cpu",) * shape.num_ranks, local)
    for what in ("parameters", "gradients", "moments"):
        # Gathered parameters are in the estimate, and only for moments in a rank.
        assert row[what] <= ESTIMATE_FACTOR * row["estimate"][what], what
    assert row["estimated"] / ESTIMATE_FACTOR < row["peak"] < ESTIMATE_FACTOR * row["estimated"], (
        row
    )
