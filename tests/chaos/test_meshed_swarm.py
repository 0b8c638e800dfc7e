"""One swarm whose islands have different meshes, with ranks in processes of their own."""

from collections import defaultdict
from pathlib import Path

import pytest

from lab.simulation.swarm import Life, SimulatedRun, simulate
from node.exchange.outer import Outer
from node.island.data.dataset import read_corpus
from node.island.parallel.mesh_shape import MeshShape
from protocol.run.run_spec import RunSpec
from protocol.wire.rounds import Commit, Digest
from tests.tiny_runs import tiny

MESHES = (MeshShape(), MeshShape(shard=2), MeshShape(pipeline=2))
"""A single rank; parameters, gradients and moments spread over two; layers spread over two."""

ROUNDS = 4


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> RunSpec:
    folder = tmp_path_factory.mktemp("text")
    for i in range(12):
        words = " ".join(f"{i}:{j * j}" for j in range(400))
        (folder / f"{i}.txt").write_text(words)
    return tiny(
        run={"rounds": ROUNDS},
        model={"num_layers": 3},
        data={"source": "text", "paths": (f"{folder}/*.txt",), "held_out": 0.2},
        evaluation={"every_rounds": 1},
    )


def simulated(spec: RunSpec, lives: list[Life]) -> SimulatedRun:
    corpus = read_corpus(
        spec.data, context=spec.model.context, batch=spec.inner.batch, folder=Path.cwd()
    )
    return simulate(spec, lives=lives, corpus=corpus)


def test_islands_with_three_meshes_agree_in_every_round_and_train_like_single_ranks(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests: dict[int, list[Digest]] = defaultdict(list)
    apply = Outer.apply

    def noted(outer: Outer, commit: Commit, *others: object) -> None:
        apply(outer, commit, *others)  # type: ignore[arg-type]
        digests[outer.round].append(outer.digest)

    with monkeypatch.context() as patch:
        patch.setattr(Outer, "apply", noted)
        meshed = simulated(spec, [Life(mesh=mesh) for mesh in MESHES])
    assert sorted(digests) == list(range(1, ROUNDS + 1))
    for of_nodes in digests.values():
        assert len(of_nodes) == len(MESHES)
        assert len(set(of_nodes)) == 1
    assert len({of_nodes[0] for of_nodes in digests.values()}) == ROUNDS  # each round changed it
    assert all(len(o.contributors) == len(MESHES) for c in meshed.commits for o in c.slices)

    single = simulated(spec, [Life()] * len(MESHES))
    assert [held_out.round for held_out in single.held_out] == list(range(ROUNDS + 1))
    for with_meshes, alone in zip(meshed.held_out, single.held_out, strict=True):
        assert with_meshes.loss == pytest.approx(alone.loss, rel=1e-3)
    assert single.held_out[-1].loss < single.held_out[0].loss - 0.5
