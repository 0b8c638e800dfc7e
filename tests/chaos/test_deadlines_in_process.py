"""Deadlines that follow short rounds, in virtual time: deaths are cheap, slower nodes get their time."""

import asyncio
from collections.abc import Sequence

import pytest

from lab.simulation.memory_transport import MemoryNetwork
from lab.simulation.swarm import Life, SimulatedNode, simulate
from node.island.data.dataset import Corpus
from tests.tiny_runs import tiny

LONG = {"train": 600, "contribute": 660, "commit": 720, "apply": 60, "lease": 10_000}
"""Bounds far beyond what a round takes, and a lease that never gives up the dead."""

TOKENS_OF_A_STEP = 4 * 32

STEADY = Life(seconds_per_inner_step=1.0)
"""Takes five virtual seconds for a round."""


@pytest.mark.parametrize(("adapt", "seconds"), [(True, 15.6 + 60), (False, 22 + 60)])
def test_a_round_with_a_silent_death_ends_by_what_rounds_usually_take(
    corpus: Corpus, adapt: bool, seconds: float
) -> None:
    spec = tiny(run={"rounds": 10, "min_nodes": 2}, deadlines=LONG | {"adapt": adapt, "floor": 5})
    mortal = Life(seconds_per_inner_step=1.0, absences=((28.0, None),))  # in round 6
    run = simulate(spec, lives=[STEADY, STEADY, STEADY, mortal], corpus=corpus)
    assert set(run.digests.values()) == {run.final.outer_digest}
    assert all(outcome.digest is not None for commit in run.commits for outcome in commit.slices)
    # Training 1.5 × 5 s, the floor for the exchange; a quarter of the time until the commit later a
    # backup takes the dead one's slice over, and has half of the rest for it. With the run file's deadlines
    # the others' slices go without the dead one after 4 × 5 s: it may still train. Its own goes to a backup
    # soon after, as it was waited for already, and the backup does not wait for it a second time. Nobody
    # waits for the dead one to apply; but at the end of the run to take the final state over, as long as may
    # be: with such a lease heartbeats are half an hour apart.
    assert run.seconds == pytest.approx(9 * 5 + seconds, abs=1.5)


def test_a_node_that_becomes_three_times_slower_is_cut_off_in_one_round_only(
    corpus: Corpus,
) -> None:
    async def slow_down(_: MemoryNetwork, nodes: Sequence[SimulatedNode]) -> None:
        await asyncio.sleep(23)  # in round 5
        nodes[2].change_pace(3.0)

    spec = tiny(run={"rounds": 10, "min_nodes": 3}, deadlines=LONG)
    run = simulate(spec, lives=[STEADY] * 3, corpus=corpus, script=slow_down)
    assert set(run.digests.values()) == {run.final.outer_digest}
    steps = []
    for commit in run.commits:
        (in_all,) = {
            tuple(sorted(c.tokens // TOKENS_OF_A_STEP for c in slice_.contributors))
            for slice_ in commit.slices
        }
        steps.append(in_all)
    # In round 6 its deadline of 7.5 s leaves it two of five steps. Then it is asked for fewer, as
    # its speed is measured, and is given more time, so that it takes all of them.
    assert steps == [(5, 5, 5)] * 5 + [(2, 5, 5), (3, 5, 5)] + [(2, 5, 5)] * 3
    plan = run.final.last_closed
    assert plan is not None
    assert [a.inner_steps for a in plan.plan.assignments].count(2) == 1


@pytest.mark.parametrize("seconds_a_step", [0.01, 1.0], ids=["exchange", "training"])
def test_links_of_one_to_ten_cost_no_contribution_and_nobody_its_place(
    corpus: Corpus, seconds_a_step: float
) -> None:
    """What comes is waited for, from the first round on; also where rounds are nothing but exchange."""
    rates = (3000.0, 3000.0, 1000.0, 1000.0, 300.0, 300.0)

    async def slow_down(network: MemoryNetwork, nodes: Sequence[SimulatedNode]) -> None:
        for node, rate in zip(nodes, rates, strict=True):
            network.slow_down(node.node_id, rate)

    spec = tiny(run={"rounds": 6, "min_nodes": 6}, deadlines=LONG)
    life = Life(seconds_per_inner_step=seconds_a_step)
    run = simulate(spec, lives=[life] * 6, corpus=corpus, script=slow_down)
    assert all(len(s.contributors) == 6 for commit in run.commits for s in commit.slices)
    members = run.final.members.values()
    assert {(m.audits.num_void, m.audits.unmade_round, m.standing.num_faults) for m in members} == {
        (0, 0, 0)
    }


def test_rounds_in_which_nothing_commits_leave_no_harm_behind(corpus: Corpus) -> None:
    """All that both had trained meanwhile, from one state, landed at once: the run ended 14 % higher."""

    async def cut(network: MemoryNetwork, nodes: Sequence[SimulatedNode]) -> None:
        pair = nodes[0].node_id, nodes[1].node_id
        await asyncio.sleep(6)
        network.cut(*pair)
        await asyncio.sleep(54)
        network.mend(*pair)

    short = {"train": 12, "contribute": 14, "commit": 16, "apply": 10, "lease": 10_000}
    spec = tiny(run={"rounds": 16, "min_nodes": 2}, deadlines=short | {"adapt": False})
    run = simulate(spec, lives=[STEADY] * 2, corpus=corpus, script=cut)
    whole = simulate(spec, lives=[STEADY] * 2, corpus=corpus)
    void = [c.round for c in run.commits if all(s.digest is None for s in c.slices)]
    assert void == [2, 3, 4]
    assert run.held_out[-1].loss < 1.04 * whole.held_out[-1].loss
