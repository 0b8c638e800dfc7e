"""Real nodes of a model that is too large for a snapshot in every round, killed between two of them."""

from pathlib import Path

import pytest

from lab.processes.invariants import broken, gather
from lab.processes.swarm import Member, RealSwarm
from tests.tiny_runs import tiny_text

PATIENCE_SECONDS = 300
"""It takes a tenth of that on two cores with nothing else to do."""

ROUNDS = 24
RUN = tiny_text(
    run={"name": "large", "rounds": ROUNDS, "min_nodes": 2},
    # 113 MB a snapshot, which may be written every 6 s; rounds take a second or two.
    model={"hidden_size": 384, "num_layers": 4, "ffn_size": 1024, "context": 32},
    inner={"steps": 2, "batch": 2},
    evaluation={"every_rounds": 100},
)


def newest_on_disk(node: Member, kind: str) -> int:
    """The newest round that a node has a file of, 0 where there is none."""
    return max(
        (int(p.stem[-8:]) for p in (node.home / "snapshots").glob(f"round-*.{kind}")), default=0
    )


def resumed(node: Member, swarm: RealSwarm) -> list[tuple[int, int]]:
    """At which round it took up its state each time, and of which round the snapshot was."""
    lines = swarm.entries(node.name, "resuming from disk")
    return [(line["round"], line["snapshot"]) for line in lines]


@pytest.mark.timeout(2 * PATIENCE_SECONDS)
@pytest.mark.nightly
def test_who_is_killed_between_snapshots_goes_on_from_the_results_after_one(tmp_path: Path) -> None:
    with RealSwarm(tmp_path / "swarm", RUN) as swarm:
        a, b = swarm.join("a", "b")
        a.start()
        b.start()
        swarm.until(
            lambda: newest_on_disk(a, "results") > newest_on_disk(a, "safetensors") > 0,
            "a round with results and no snapshot",
            seconds=PATIENCE_SECONDS,
        )
        a.kill()
        swarm.until(lambda: a.has_ended, "its death")
        whole, last = newest_on_disk(a, "safetensors"), newest_on_disk(a, "results")
        a.start()
        swarm.until(lambda: swarm.is_finished, "the end of the run", seconds=PATIENCE_SECONDS)
        swarm.until(lambda: a.has_ended and b.has_ended, "the nodes' ends")
        assert resumed(a, swarm) == [(last, whole)]
        assert last > whole
        # An orderly end writes all of the last state.
        assert newest_on_disk(a, "safetensors") == newest_on_disk(b, "safetensors") == ROUNDS
        assert broken(gather(swarm)) == []
        assert swarm.left_nothing() == []
