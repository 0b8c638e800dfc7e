"""History that breaks off: reducers and holders that die, a coordinator that comes back older."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.swarm.ledger import num_samples_of
from lab.simulation.coordinator import Outage
from lab.simulation.memory_transport import MemoryNetwork
from lab.simulation.swarm import Life, SimulatedNode, SimulatedRun, simulate
from node.disk.round_folder import LONGEST_SECONDS, DiskBudget
from node.island.data.dataset import Corpus
from tests.tiny_runs import tiny

DEADLINES = {"train": 20, "contribute": 30, "commit": 40, "apply": 10, "lease": 15}
SECONDS_PER_STEP = 1.0
STEADY = Life(seconds_per_inner_step=SECONDS_PER_STEP)
"""Takes five virtual seconds for a round."""


SNAPSHOTS, RESULTS = "a snapshot a round", "results between snapshots"
"""Disks are fast enough for everything, or nothing is written that need not be."""


@pytest.fixture
def disk_pace(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == RESULTS:
        monkeypatch.setattr(DiskBudget, "seconds_between", lambda *_: LONGEST_SECONDS)


at_both_paces = pytest.mark.parametrize("disk_pace", [SNAPSHOTS, RESULTS], indirect=True)


def at_each(name: str, by_day: dict[str, float], *others: float) -> pytest.MarkDecorator:
    """At both paces with all values, of which a day sees one for each pace."""
    cases = [pytest.param(pace, value, id=f"{pace}, {value}") for pace, value in by_day.items()]
    for value in sorted({*by_day.values(), *others}):
        for pace in (SNAPSHOTS, RESULTS):
            if by_day[pace] != value:
                marks = pytest.mark.nightly
                cases.append(pytest.param(pace, value, id=f"{pace}, {value}", marks=marks))
    return pytest.mark.parametrize(("disk_pace", name), cases, indirect=["disk_pace"])


def assert_sound(run: SimulatedRun, *, rounds: int) -> None:
    """All nodes agree, no round is missing or twice there, and no sample is counted twice."""
    assert run.final.outer_digest is not None
    assert set(run.digests.values()) == {run.final.outer_digest}
    assert [commit.round for commit in run.commits] == list(range(1, rounds + 1))
    for before, after in zip(run.commits, run.commits[1:], strict=False):
        assert after.base_digest == before.outer_digest
    assert num_samples_of(run.final.ledger.committed) * 32 == run.final.token_clock
    assert run.final.ledger.leased == ()


@at_both_paces
@pytest.mark.usefixtures("disk_pace")
def test_a_node_that_returns_goes_on_from_its_disk(corpus: Corpus, tmp_path: Path) -> None:
    mortal = Life(seconds_per_inner_step=1.0, absences=((12.5, 40),))
    spec = tiny(run={"rounds": 12, "min_nodes": 2}, deadlines=DEADLINES)
    run = simulate(spec, lives=[STEADY, STEADY, mortal], corpus=corpus, disks=tmp_path)
    assert_sound(run, rounds=12)
    assert len(run.digests) == 3
    assert [len(outcome.contributors) for outcome in run.commits[-1].slices] == [3, 3, 3]


def run_with_a_round_taken_back(
    corpus: Corpus, disks: Path, *, dies_at: float, returns_at: float, rounds: int, min_nodes: int
) -> SimulatedRun:
    """In round 3 one node is cut off from the two others. Both die at once and return much later.

    Round 3 begins at 10 s, commits at 20 s, and is settled without the first node at 30 s. They die
    in between; or in round 4, which is then void, and goes with the one before it.
    """

    async def cut(network: MemoryNetwork, nodes: Sequence[SimulatedNode]) -> None:
        await asyncio.sleep(12)
        for other in nodes[1:]:
            network.cut(nodes[0].node_id, other.node_id)
        await asyncio.sleep(100)
        for other in nodes[1:]:
            network.mend(nodes[0].node_id, other.node_id)

    mortal = Life(seconds_per_inner_step=1.0, absences=((dies_at, returns_at),))
    spec = tiny(run={"rounds": rounds, "min_nodes": min_nodes}, deadlines=DEADLINES)
    # Who comes first trains one round more. Were it the node that is cut off, the two others would have
    # half of the confirmed work, and could commit nothing without it.
    cut_off = replace(STEADY, starts_at=0.1)
    run = simulate(spec, lives=[cut_off, mortal, mortal], corpus=corpus, script=cut, disks=disks)
    assert_sound(run, rounds=rounds)
    assert len(run.digests) == 3
    for outcomes in (commit.slices for commit in run.commits[-2:]):
        assert [len(outcome.contributors) for outcome in outcomes] == [3, 3, 3]
    return run


@at_each("dies_at", {SNAPSHOTS: 20.5, RESULTS: 30.5})
@pytest.mark.usefixtures("disk_pace")
def test_what_nobody_holds_any_more_is_taken_back_and_who_applied_it_comes_round(
    corpus: Corpus, tmp_path: Path, dies_at: float
) -> None:
    """The first node has committed more since, alone."""
    run = run_with_a_round_taken_back(
        corpus, tmp_path, dies_at=dies_at, returns_at=130, rounds=30, min_nodes=1
    )
    assert [commit.incarnation for commit in run.commits] == [0, 0, *[1] * 28]
    assert "taken back" in run.commits[2].slices[0].void_reason
    assert all(outcome.digest is None for outcome in run.commits[2].slices)


@at_each("dies_at", {SNAPSHOTS: 30.5, RESULTS: 20.5})
@pytest.mark.usefixtures("disk_pace")
def test_what_was_taken_back_holds_again_when_who_applied_it_returns_before_anything_else_commits(
    corpus: Corpus, tmp_path: Path, dies_at: float
) -> None:
    run = run_with_a_round_taken_back(
        corpus, tmp_path, dies_at=dies_at, returns_at=260, rounds=8, min_nodes=3
    )
    assert [commit.incarnation for commit in run.commits[:3]] == [0, 0, 0]
    assert max(commit.incarnation for commit in run.commits) == 1, "it was taken back meanwhile"
    assert any(outcome.digest is not None for outcome in run.commits[2].slices)


@at_both_paces
@pytest.mark.usefixtures("disk_pace")
def test_a_coordinator_that_dies_in_mid_round_commits_that_round_once(
    corpus: Corpus, tmp_path: Path
) -> None:
    spec = tiny(run={"rounds": 8, "min_nodes": 3}, deadlines=DEADLINES)
    outage = Outage(dies_at=12.5, returns_at=20)
    run = simulate(spec, lives=[STEADY] * 3, corpus=corpus, outage=outage, disks=tmp_path)
    assert_sound(run, rounds=8)
    assert all(outcome.digest is not None for c in run.commits for outcome in c.slices)
    assert run.final.token_clock == 8 * 3 * 5 * 4 * 32


@at_each("copied_at", {SNAPSHOTS: 3.0, RESULTS: 12.5}, 20.0)
@pytest.mark.usefixtures("disk_pace")
def test_a_coordinator_restored_from_an_old_copy_learns_what_it_lacks_from_its_nodes(
    corpus: Corpus, tmp_path: Path, copied_at: float
) -> None:
    spec = tiny(run={"rounds": 14, "min_nodes": 3}, deadlines=DEADLINES)
    outage = Outage(copied_at=copied_at, dies_at=42.5, returns_at=50)
    run = simulate(spec, lives=[STEADY] * 3, corpus=corpus, outage=outage, disks=tmp_path)
    assert_sound(run, rounds=14)
    # Nothing was trained twice: every round of every node is in the books.
    assert run.final.token_clock == 14 * 3 * 5 * 4 * 32
    assert all(outcome.digest is not None for c in run.commits for outcome in c.slices)
