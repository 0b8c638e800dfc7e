"""Nodes that nobody can dial, and helpers that reduce for them, in virtual time."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import combinations
from pathlib import Path

from lab.simulation.memory_transport import MemoryNetwork
from lab.simulation.swarm import Life, SimulatedNode, SimulatedRun, simulate
from node.island.data.dataset import Corpus
from protocol.wire.rounds import Commit
from tests.tiny_runs import tiny

DEADLINES = {"train": 20, "contribute": 30, "commit": 40, "apply": 10, "lease": 15}
STEADY = Life(seconds_per_inner_step=1.0, starts_at=1.0)
"""Takes five virtual seconds for a round; helpers are there when it comes."""

HELPER = Life(is_helper=True)
NUM_NODES = 3

Script = Callable[[MemoryNetwork, Sequence[SimulatedNode]], Awaitable[None]]


async def behind_nat(network: MemoryNetwork, nodes: Sequence[SimulatedNode]) -> None:
    """No two of the nodes that train reach each other; all of them reach helpers."""
    for one, other in combinations(nodes[:NUM_NODES], 2):
        network.cut(one.node_id, other.node_id)


def run_behind_nat(
    corpus: Corpus,
    *helpers: Life,
    script: Script = behind_nat,
    disks: Path | None = None,
    nodes: Sequence[Life] = (STEADY,) * NUM_NODES,
    rounds: int = 4,
) -> SimulatedRun:
    spec = tiny(run={"rounds": rounds, "min_nodes": NUM_NODES}, deadlines=DEADLINES)
    return simulate(
        spec,
        lives=[*nodes, *helpers],
        corpus=corpus,
        script=script,
        disks=disks,
        within_seconds=1000,
    )


def num_contributors(commit: Commit) -> set[int]:
    return {0 if s.digest is None else len(s.contributors) for s in commit.slices}


def test_with_a_helper_nodes_that_reach_nobody_else_commit_every_contribution(
    corpus: Corpus,
) -> None:
    run = run_behind_nat(corpus, HELPER)
    assert [num_contributors(commit) for commit in run.commits] == [{NUM_NODES}] * 4
    assert len(run.digests) == NUM_NODES + 1  # the helper holds the state, too
    assert set(run.digests.values()) == {run.final.outer_digest}


def test_without_one_the_same_swarm_commits_nothing_of_all(corpus: Corpus) -> None:
    run = run_behind_nat(corpus, rounds=2)
    assert all(num_contributors(commit) != {NUM_NODES} for commit in run.commits)


def test_a_helper_trains_nothing_counts_as_no_node_and_is_never_at_fault(corpus: Corpus) -> None:
    run = run_behind_nat(corpus, HELPER)
    (helper,) = (member for member in run.final.members.values() if member.is_helper)
    assert helper.committed_tokens == 0
    assert helper.standing.num_faults == 0
    assert all(
        {a.node_id for a in commit.assignments if a.trains} == set(run.digests) - {helper.node_id}
        for commit in run.commits
    )
    assert [held_out.round for held_out in run.held_out] == [0, 2, 4]  # others were asked


def test_the_loss_is_what_it_is_when_all_reach_all(corpus: Corpus) -> None:
    async def nobody_is_cut_off(_: MemoryNetwork, __: Sequence[SimulatedNode]) -> None:
        pass

    behind = run_behind_nat(corpus, HELPER)
    direct = run_behind_nat(corpus, script=nobody_is_cut_off)
    losses = [[h.loss for h in run.held_out] for run in (behind, direct)]
    assert all(abs(one - other) < 0.05 for one, other in zip(*losses, strict=True))
    assert behind.seconds <= direct.seconds + 1


def test_a_round_does_not_wait_for_helpers_to_count_as_nodes(corpus: Corpus) -> None:
    """Two nodes and two helpers open no round of three."""

    async def third_comes(network: MemoryNetwork, nodes: Sequence[SimulatedNode]) -> None:
        await behind_nat(network, nodes)
        await asyncio.sleep(50)
        assert nodes[0].coordinator.driver.state.open_round is None
        assert nodes[0].coordinator.driver.state.committed_round == 0

    late = Life(seconds_per_inner_step=1.0, starts_at=60)
    run = run_behind_nat(corpus, HELPER, HELPER, nodes=(STEADY, STEADY, late), script=third_comes)
    assert all(num_contributors(commit) == {NUM_NODES} for commit in run.commits)


def test_when_one_of_two_helpers_dies_in_a_round_its_slices_are_taken_over(
    corpus: Corpus, tmp_path: Path
) -> None:
    dies = Life(is_helper=True, absences=((8.5, None),))  # in round 2
    run = run_behind_nat(corpus, HELPER, dies, disks=tmp_path)
    assert [num_contributors(commit) for commit in run.commits] == [{NUM_NODES}] * 4


def test_a_helper_that_was_killed_comes_back_and_the_next_round_commits_all(
    corpus: Corpus, tmp_path: Path
) -> None:
    returns = Life(is_helper=True, absences=((8.5, 10.0),))  # in round 2
    run = run_behind_nat(corpus, returns, disks=tmp_path, rounds=5)
    assert [num_contributors(commit) for commit in run.commits][2:] == [{NUM_NODES}] * 3
    assert set(run.digests.values()) == {run.final.outer_digest}


def test_a_node_that_comes_late_is_given_the_state_by_the_helper(corpus: Corpus) -> None:
    late = Life(seconds_per_inner_step=1.0, starts_at=12)

    async def fourth(network: MemoryNetwork, nodes: Sequence[SimulatedNode]) -> None:
        for one, other in combinations([*nodes[:NUM_NODES], nodes[-1]], 2):
            network.cut(one.node_id, other.node_id)

    run = run_behind_nat(corpus, HELPER, late, script=fourth)
    assert num_contributors(run.commits[-1]) == {NUM_NODES + 1}
