"""Six homes of which nobody reaches everybody, or not the one who may reduce all, in virtual time."""

from collections.abc import Callable, Sequence
from itertools import combinations

import pytest

from lab.simulation.memory_transport import MemoryNetwork
from lab.simulation.swarm import Life, SimulatedNode, SimulatedRun, simulate
from node.island.data.dataset import Corpus
from protocol.wire.rounds import Commit
from tests.tiny_runs import tiny

DEADLINES = {"train": 20, "contribute": 30, "commit": 40, "apply": 10, "lease": 15}
STEADY = Life(seconds_per_inner_step=1.0, starts_at=1.0)
NUM_NODES = 6

Reaches = Callable[[int, int], bool]


def by_routers(one: int, other: int) -> bool:
    """The first has a full cone, three have port restricted routers, and two symmetric ones."""
    return max(one, other) < 4 or min(one, other) == 0


def around_a_ring(one: int, other: int) -> bool:
    """All but the one opposite."""
    return abs(one - other) != 3


def run_of(corpus: Corpus, reaches: Reaches, *, carry: float, rounds: int = 6) -> SimulatedRun:
    async def apart(network: MemoryNetwork, nodes: Sequence[SimulatedNode]) -> None:
        network.carry_bytes_per_second = carry
        for one, other in combinations(range(NUM_NODES), 2):
            if not reaches(one, other):
                network.cut(nodes[one].node_id, nodes[other].node_id)

    spec = tiny(run={"rounds": rounds, "min_nodes": NUM_NODES}, deadlines=DEADLINES)
    lives = [STEADY] * NUM_NODES
    return simulate(spec, lives=lives, corpus=corpus, script=apart, within_seconds=1000)


def is_whole(commit: Commit) -> bool:
    return all(s.digest is not None and len(s.contributors) == NUM_NODES for s in commit.slices)


@pytest.mark.parametrize("reaches", [by_routers, around_a_ring])
def test_without_carriers_slices_go_on_missing_somebody_in_every_round(
    corpus: Corpus, reaches: Reaches
) -> None:
    run = run_of(corpus, reaches, carry=0.0)
    assert not any(is_whole(commit) for commit in run.commits[1:])


@pytest.mark.parametrize("reaches", [by_routers, around_a_ring])
def test_with_carriers_every_slice_has_everybodys_work(corpus: Corpus, reaches: Reaches) -> None:
    run = run_of(corpus, reaches, carry=1e6)
    assert all(is_whole(commit) for commit in run.commits[1:])
    assert len(run.digests) == NUM_NODES and set(run.digests.values()) == {run.final.outer_digest}
