"""A coordinator that starts from an old copy of its database, and nodes that come when they like."""

import asyncio
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from coordinator.swarm.ledger import num_samples_of
from lab.simulation.coordinator import Outage
from lab.simulation.memory_transport import MemoryNetwork
from lab.simulation.swarm import Life, Script, SimulatedNode, SimulatedRun, simulate
from node.island.data.dataset import Corpus
from tests.tiny_runs import tiny

DEADLINES = {"train": 20, "contribute": 30, "commit": 40, "apply": 10, "lease": 15}
STEADY = Life(seconds_per_inner_step=1.0)
"""Takes five virtual seconds for a round."""
TOKENS = 5 * 4 * 32
"""That a node trains in a round."""
DIES_AT, RETURNS_AT = 62.5, 70.0
WITHIN = 6000.0
"""Virtual seconds in which each of these runs is over, however late its nodes come."""


async def stay_away(node: SimulatedNode, since: float, until: float) -> None:
    clock = asyncio.get_running_loop().time
    await asyncio.sleep(since - clock())
    node.lose_coordinator()
    await asyncio.sleep(until - clock())
    node.lose_coordinator(is_away=False)


def restored(
    corpus: Corpus,
    disks: Path,
    script: Script | None = None,
    *,
    rounds: int,
    min_nodes: int,
    copied_at: float = 22.5,
    later: Sequence[Outage] = (),
    lives: Sequence[Life] = (STEADY,) * 3,
) -> SimulatedRun:
    """A run whose coordinator dies, and comes back from a copy; `later` again."""
    return simulate(
        tiny(run={"rounds": rounds, "min_nodes": min_nodes}, deadlines=DEADLINES),
        lives=lives,
        corpus=corpus,
        script=script,
        outage=[Outage(copied_at=copied_at, dies_at=DIES_AT, returns_at=RETURNS_AT), *later],
        disks=disks,
        within_seconds=WITHIN,
    )


def assert_sound(run: SimulatedRun, *, rounds: int, nodes: int) -> None:
    """All nodes agree, no round is missing or twice there, and no sample is counted twice."""
    assert len(run.digests) == nodes
    assert set(run.digests.values()) == {run.final.outer_digest}
    assert [commit.round for commit in run.commits] == list(range(1, rounds + 1))
    for before, after in zip(run.commits, run.commits[1:], strict=False):
        assert after.base_digest == before.outer_digest
    assert num_samples_of(run.final.ledger.committed) * 32 == run.final.token_clock
    assert run.final.ledger.leased == ()


@pytest.mark.parametrize("late_seconds", [30, pytest.param(3600, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("copied_at", [3.0, pytest.param(12.5, marks=pytest.mark.nightly), 42.5])
def test_rounds_that_were_closed_without_their_nodes_are_as_if_they_had_never_been(
    corpus: Corpus, tmp_path: Path, copied_at: float, late_seconds: float
) -> None:
    async def come_late(_: MemoryNetwork, nodes: Sequence[SimulatedNode]) -> None:
        back_at = RETURNS_AT + late_seconds
        await asyncio.gather(*(stay_away(n, DIES_AT, back_at + i) for i, n in enumerate(nodes)))

    run = restored(corpus, tmp_path, come_late, rounds=16, min_nodes=3, copied_at=copied_at)
    assert_sound(run, rounds=16, nodes=3)
    assert all(outcome.digest is not None for c in run.commits for outcome in c.slices)
    assert run.final.token_clock == 16 * 3 * TOKENS


@pytest.mark.parametrize(
    "comes_first", ["who is behind", pytest.param("who is ahead", marks=pytest.mark.nightly)]
)
def test_whoever_comes_first_all_go_on_from_the_newest_state(
    corpus: Corpus, tmp_path: Path, comes_first: str
) -> None:
    """Node 3 missed the rounds since 30 s, so it is behind the others and ahead of the copy."""
    late = {True: RETURNS_AT + 100, False: RETURNS_AT + 140}
    is_first = comes_first == "who is behind"

    async def come(_: MemoryNetwork, nodes: Sequence[SimulatedNode]) -> None:
        await asyncio.gather(
            *(stay_away(node, DIES_AT, late[not is_first]) for node in nodes[:2]),
            stay_away(nodes[2], 31, late[is_first]),
        )

    run = restored(corpus, tmp_path, come, rounds=40, min_nodes=2, copied_at=12.5)
    assert_sound(run, rounds=40, nodes=3)
    first_new = next(i for i, at in enumerate(run.begins) if at > RETURNS_AT)
    assert first_new >= 6, "what two nodes had committed is in the history"
    assert {len(outcome.contributors) for outcome in run.commits[-1].slices} == {3}


def run_with_two_that_come_first(
    corpus: Corpus, disks: Path, *, mended_at: float, others_at: float, rounds: int = 40
) -> tuple[SimulatedRun, list[MutableMapping[str, Any]]]:
    """Two of four that are behind come first, without a link between them: nothing commits so long."""

    async def come(network: MemoryNetwork, nodes: Sequence[SimulatedNode]) -> None:
        async def cut() -> None:
            await asyncio.sleep(22.6)
            network.cut(nodes[2].node_id, nodes[3].node_id)
            await asyncio.sleep(mended_at - 22.6)
            network.mend(nodes[2].node_id, nodes[3].node_id)

        await asyncio.gather(
            cut(),
            *(stay_away(node, DIES_AT, others_at) for node in nodes[:2]),
            *(stay_away(node, 22.5, RETURNS_AT + 1) for node in nodes[2:]),
        )

    with capture_logs() as logs:
        run = restored(corpus, disks, come, rounds=rounds, min_nodes=2, lives=[STEADY] * 4)
    return run, logs


def test_who_took_part_in_void_rounds_leaves_them_behind_with_all_that_it_owes(
    corpus: Corpus, tmp_path: Path
) -> None:
    run, logs = run_with_two_that_come_first(corpus, tmp_path, mended_at=460, others_at=400)
    assert_sound(run, rounds=40, nodes=4)
    left = [entry for entry in logs if entry["event"] == "void rounds are no more"]
    assert len(left) == 2 and {entry["residual"] for entry in left} == {"kept"}
    assert not [entry for entry in logs if entry.get("residual") == "dropped"]
    assert {len(outcome.contributors) for outcome in run.commits[-1].slices} == {4}


@pytest.mark.parametrize("rounds", [26, pytest.param(40, marks=pytest.mark.nightly)])
def test_who_comes_after_others_have_committed_anew_goes_on_with_them_and_says_what_it_lets_go(
    corpus: Corpus, tmp_path: Path, rounds: int
) -> None:
    run, logs = run_with_two_that_come_first(
        corpus, tmp_path, mended_at=300, others_at=330, rounds=rounds
    )
    assert_sound(run, rounds=rounds, nodes=4)
    let_go = [entry for entry in logs if entry.get("residual") == "dropped"]
    assert len(let_go) == 2
    assert {entry["log_level"] for entry in let_go} == {"warning"}
    assert all(entry["norm"] > 0 for entry in let_go)
    assert {len(outcome.contributors) for outcome in run.commits[-1].slices} == {4}


def test_two_copies_that_serve_in_turn_end_in_one_history(corpus: Corpus, tmp_path: Path) -> None:
    async def come_late(_: MemoryNetwork, nodes: Sequence[SimulatedNode]) -> None:
        await asyncio.gather(*(stay_away(n, DIES_AT, 200 + 5 * i) for i, n in enumerate(nodes)))

    later = [
        Outage(copied_at=12.5, dies_at=230.5, returns_at=240),
        Outage(copied_at=22.5, dies_at=300.5, returns_at=310),
    ]
    run = restored(corpus, tmp_path, come_late, rounds=24, min_nodes=3, later=later)
    assert_sound(run, rounds=24, nodes=3)
    assert run.final.token_clock == 24 * 3 * TOKENS


def test_a_third_of_the_nodes_that_never_return_are_not_waited_for_longer_than_a_round_may_last(
    corpus: Corpus, tmp_path: Path
) -> None:
    gone = Life(seconds_per_inner_step=1.0, absences=((DIES_AT, None),))
    lives = [STEADY, STEADY, gone]
    run = restored(corpus, tmp_path, rounds=16, min_nodes=2, copied_at=40.0, lives=lives)
    assert_sound(run, rounds=16, nodes=2)
    new = [at for at in run.begins if at > RETURNS_AT]
    assert RETURNS_AT + 20 <= new[0] <= RETURNS_AT + DEADLINES["commit"] - 5
