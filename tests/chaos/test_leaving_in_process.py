"""Nodes that leave in the middle of a round, in virtual time: what they trained is in its commit."""

import asyncio
from collections.abc import Sequence

from lab.simulation.memory_transport import MemoryNetwork
from lab.simulation.swarm import Life, SimulatedNode, SimulatedRun, simulate
from node.island.data.dataset import Corpus
from tests.tiny_runs import tiny

DEADLINES = {"train": 20, "contribute": 30, "commit": 40, "apply": 10, "lease": 15}
TOKENS_OF_A_STEP = 4 * 32
STEPS = 5

STEADY = Life(seconds_per_inner_step=1.0)
"""Takes five virtual seconds for a round."""

SLOW = Life(seconds_per_inner_step=3.0)


def run_with_leaver(
    corpus: Corpus, lives: list[Life], *, at: float, within: float
) -> tuple[SimulatedRun, SimulatedNode]:
    """A run whose first node is asked to leave at a time."""
    leavers = []

    async def leave(_: MemoryNetwork, nodes: Sequence[SimulatedNode]) -> None:
        await asyncio.sleep(at)
        nodes[0].drain(within)
        leavers.append(nodes[0])

    spec = tiny(run={"rounds": 4, "min_nodes": 2}, deadlines=DEADLINES)
    run = simulate(spec, lives=lives, corpus=corpus, script=leave)
    (leaver,) = leavers
    return run, leaver


def steps_in(run: SimulatedRun, round_number: int, leaver: SimulatedNode) -> list[tuple[int, int]]:
    """For each slice of a round that is not void: inner steps of the leaver, and of the others."""
    slices = [s for s in run.commits[round_number - 1].slices if s.digest is not None]
    tokens = [{c.node_id: c.tokens for c in slice_.contributors} for slice_ in slices]
    return [
        (of.pop(leaver.node_id, 0) // TOKENS_OF_A_STEP, sum(of.values()) // TOKENS_OF_A_STEP)
        for of in tokens
    ]


def test_what_a_leaving_node_has_trained_is_in_the_commit_and_the_others_go_on(
    corpus: Corpus,
) -> None:
    run, leaver = run_with_leaver(corpus, [STEADY] * 3, at=7.5, within=30)  # in round 2
    assert steps_in(run, 1, leaver) == [(STEPS, STEPS)] * 2  # the third came a little later
    assert steps_in(run, 2, leaver) == [(3, 2 * STEPS)] * 3
    assert steps_in(run, 3, leaver) == [(0, 2 * STEPS)] * 2  # it is not even in the plan
    assert leaver.outer.round == 2
    assert leaver.outer.digest == run.commits[1].outer_digest
    assert len(run.digests) == 2 and set(run.digests.values()) == {run.final.outer_digest}


def test_a_node_that_must_leave_before_the_commit_leaves_its_contributions_behind(
    corpus: Corpus,
) -> None:
    run, leaver = run_with_leaver(corpus, [STEADY, SLOW, SLOW], at=2.5, within=5)
    # The other trains for 15 s. It took the leaver's slice over, and what the leaver had for it.
    assert len(run.commits[0].slices) == 2
    assert steps_in(run, 1, leaver) == [(3, STEPS)] * 2
    assert leaver.outer.round == 0
    assert all(steps == 0 for steps, _ in steps_in(run, 2, leaver))
