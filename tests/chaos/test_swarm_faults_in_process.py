"""What goes wrong in swarms, in virtual time: latecomers, deaths, stragglers, cut links, wrong states."""

import asyncio
from collections.abc import Sequence

import pytest

from coordinator.swarm.ledger import num_samples_of
from lab.simulation.memory_transport import MemoryNetwork
from lab.simulation.swarm import Life, Script, SimulatedNode, SimulatedRun, simulate
from node.exchange import giving
from node.island.data.dataset import Corpus
from tests.tiny_runs import tiny

DEADLINES = {"train": 20, "contribute": 30, "commit": 40, "apply": 10, "lease": 15}
TOKENS = 5 * 4 * 32
"""What a node trains in a full round of the tiny run."""

STEADY = Life(seconds_per_inner_step=1.0)
"""Takes five virtual seconds for a round."""


def assert_all_agree(run: SimulatedRun) -> None:
    assert run.final.outer_digest is not None
    assert set(run.digests.values()) == {run.final.outer_digest}


def contributors_of(run: SimulatedRun, round_number: int) -> list[dict[str, int]]:
    """For each slice of a round: the tokens of each contributor."""
    commit = run.commits[round_number - 1]
    assert commit.round == round_number
    return [{c.node_id: c.tokens for c in outcome.contributors} for outcome in commit.slices]


def run_of(
    corpus: Corpus,
    lives: list[Life],
    *,
    rounds: int = 6,
    min_nodes: int = 2,
    script: Script | None = None,
) -> SimulatedRun:
    spec = tiny(run={"rounds": rounds, "min_nodes": min_nodes}, deadlines=DEADLINES)
    return simulate(spec, lives=lives, corpus=corpus, script=script)


def test_a_joiner_replays_and_its_first_round_counts_in_full(corpus: Corpus) -> None:
    late = Life(starts_at=12.0, seconds_per_inner_step=1.0)
    run = run_of(corpus, [STEADY, STEADY, late])
    assert_all_agree(run)
    first_with_three = next(c.round for c in run.commits if len(c.slices) == 3)
    assert first_with_three == 4  # it came in the middle of round 3
    for slice_ in contributors_of(run, first_with_three):
        assert list(slice_.values()) == [TOKENS] * 3


def test_a_joiner_takes_a_snapshot_when_results_are_no_longer_kept(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(giving, "KEPT_ROUNDS", 1)
    late = Life(starts_at=12.0, seconds_per_inner_step=1.0)
    run = run_of(corpus, [STEADY, STEADY, late], rounds=8)
    assert_all_agree(run)
    assert all(len(slice_) == 3 for slice_ in contributors_of(run, 8))


def test_a_node_that_dies_while_training_costs_its_own_work_only(corpus: Corpus) -> None:
    mortal = Life(seconds_per_inner_step=1.0, absences=((8.0, None),))
    run = run_of(corpus, [STEADY, STEADY, mortal])
    assert_all_agree(run)
    assert len(run.digests) == 2
    contributors = contributors_of(run, 2)
    assert len(contributors) == 3  # another took over the slice that it should have reduced
    assert all(list(slice_.values()) == [TOKENS] * 2 for slice_ in contributors)
    assert all(list(slice_.values()) == [TOKENS] * 2 for slice_ in contributors_of(run, 3))


def test_a_straggler_contributes_what_it_has_when_the_others_are_done_and_is_asked_for_less(
    corpus: Corpus,
) -> None:
    slow = Life(seconds_per_inner_step=8.0)  # one of five steps when it is told, after 6.25 s
    run = run_of(corpus, [STEADY, STEADY, slow], rounds=3, min_nodes=3)
    assert_all_agree(run)
    for round_number, its_steps in ((1, 1), (2, 1), (3, 1)):
        for slice_ in contributors_of(run, round_number):
            assert sorted(slice_.values()) == [TOKENS * its_steps // 5, TOKENS, TOKENS]
    # What it left of its first range is leased again; the ledger has it all, once.
    assert num_samples_of(run.final.ledger.committed) * 32 == run.final.token_clock
    assert run.final.ledger.leased == ()


def test_a_node_four_times_slower_gets_a_quarter_of_the_steps_and_rounds_become_fast(
    corpus: Corpus,
) -> None:
    spec = tiny(
        run={"rounds": 5, "min_nodes": 3},
        inner={"steps": 16},
        deadlines=DEADLINES | {"train": 80, "contribute": 90, "commit": 100},
    )
    slow = Life(seconds_per_inner_step=4.0)
    run = simulate(spec, lives=[STEADY, STEADY, slow], corpus=corpus)
    assert_all_agree(run)
    full = 16 * 4 * 32
    for slice_ in contributors_of(run, 1):
        assert sorted(slice_.values()) == [full // 16 * 5, full, full]
    for round_number in (2, 3, 4, 5):
        for slice_ in contributors_of(run, round_number):
            assert sorted(slice_.values()) == [full // 4, full, full]
    # In the first round the slow node hands in what it has after 20 s; each of the others takes 16 s for all.
    assert run.seconds == pytest.approx(20 + 4 * 16, rel=0.02)
    assert run.final.last_closed is not None
    assert run.final.last_closed.seconds == pytest.approx(16)


def test_a_cut_between_two_nodes_leaves_the_third_to_reduce_and_pass_results_on(
    corpus: Corpus,
) -> None:
    async def cut_for_a_while(network: MemoryNetwork, nodes: Sequence[SimulatedNode]) -> None:
        network.cut(nodes[0].node_id, nodes[1].node_id)
        await asyncio.sleep(60)
        network.mend(nodes[0].node_id, nodes[1].node_id)

    run = run_of(corpus, [STEADY] * 3, script=cut_for_a_while, rounds=16, min_nodes=3)
    assert_all_agree(run)
    # While it is cut, the contribution of one to the slice of the other is missing, no more.
    assert sorted(len(slice_) for slice_ in contributors_of(run, 1)) == [2, 2, 3]
    # Then they have said so, and the third reduces everything: nothing is missing any more.
    assert [len(slice_) for slice_ in contributors_of(run, 4)] == [3]
    assert [len(slice_) for slice_ in contributors_of(run, 16)] == [3, 3, 3]


def test_a_node_whose_state_was_tampered_with_fetches_it_anew(corpus: Corpus) -> None:
    async def tamper(network: MemoryNetwork, nodes: Sequence[SimulatedNode]) -> None:
        await asyncio.sleep(7)  # in the middle of round 2
        nodes[0].parameters[0] += 1

    run = run_of(corpus, [STEADY] * 3, script=tamper, rounds=8)
    assert_all_agree(run)
    assert [len(slice_) for slice_ in contributors_of(run, 8)] == [3, 3, 3]


def test_a_swarm_of_one_trains_alone(corpus: Corpus) -> None:
    spec = tiny(run={"rounds": 3, "min_nodes": 1}, deadlines=DEADLINES)
    run = simulate(spec, lives=[STEADY], corpus=corpus)
    assert_all_agree(run)
    assert [len(c.slices) for c in run.commits] == [1, 1, 1]


def test_the_same_faults_give_the_same_digests_twice(corpus: Corpus) -> None:
    lives = [STEADY, STEADY, Life(seconds_per_inner_step=1.5, absences=((8.0, None),))]
    first, second = (run_of(corpus, lives, rounds=4) for _ in range(2))
    assert first.digests == second.digests
