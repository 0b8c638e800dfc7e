"""A run goes back, in virtual time: all nodes end at the same bits, and no sample is counted twice."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from google.protobuf.message import Message
from structlog.testing import capture_logs

from coordinator.swarm.explain import explain
from lab.simulation.coordinator import Outage
from lab.simulation.memory_transport import MemoryNetwork
from lab.simulation.swarm import Life, SimulatedNode, SimulatedRun, simulate
from node.disk.round_folder import LONGEST_SECONDS, DiskBudget, Retention
from node.island.data.dataset import Corpus
from protocol.errors import UsageError
from protocol.trust.rulings import Ruling, RulingKind
from protocol.v1 import session_pb2
from protocol.wire.rounds import Digest
from tests.chaos.test_history_in_process import DEADLINES, assert_sound
from tests.tiny_runs import tiny

ROUNDS = 8
ALL = Retention(keep=100, every=1)
STEADY = Life(seconds_per_inner_step=1.0, retention=ALL)
"""Takes five virtual seconds for a round, and keeps every state."""

FORGETFUL = Life(seconds_per_inner_step=1.0)
"""Likewise, and keeps the latest two."""


def gone_back(
    corpus: Corpus,
    disks: Path,
    *asked: tuple[float, int],
    lives: Sequence[Life] = (STEADY, STEADY, STEADY),
    outage: Outage | None = None,
    believed: str = "",
) -> SimulatedRun:
    """A run that goes back: each time when, and to which round; by the word of one, where it is named."""

    async def script(_: MemoryNetwork, nodes: Sequence[SimulatedNode]) -> None:
        for at, round in asked:
            await asyncio.sleep(at - asyncio.get_running_loop().time())
            await nodes[0].coordinator.rulings.go_back(
                round, reason="the loss has jumped", believed=believed
            )

    run = simulate(
        tiny(run={"rounds": ROUNDS, "min_nodes": 2}, deadlines=DEADLINES),
        lives=lives,
        corpus=corpus,
        disks=disks,
        script=script,
        outage=outage,
        within_seconds=1500,
    )
    assert_sound(run, rounds=ROUNDS)
    assert len(run.digests) == sum(
        not life.absences or life.absences[-1][1] is not None for life in lives
    )
    for ruling in run.final.rulings:
        assert ruling.kind is RulingKind.ROLLED_BACK
    return run


def states_of(ruling: Ruling, run: SimulatedRun) -> tuple[Digest | None, Digest]:
    """What the round that was gone back to led to, and what its successor was made on."""
    round = ruling.from_round - 1
    assert bytes.fromhex(ruling.outer_digest) == run.commits[round - 1].outer_digest
    return run.commits[round - 1].outer_digest, run.commits[round].base_digest


@pytest.mark.parametrize("at", [32.0, pytest.param(35.0, marks=pytest.mark.nightly)])
def test_all_go_on_from_the_state_after_the_round_and_later_rounds_are_trained_anew(
    corpus: Corpus, tmp_path: Path, at: float
) -> None:
    run = gone_back(corpus, tmp_path, (at, 3))
    assert [commit.incarnation for commit in run.commits] == [0, 0, 0, *[1] * 5]
    (ruling,) = run.final.rulings
    before, base = states_of(ruling, run)
    assert before == base
    assert ruling.contributors == ("node-1", "node-2", "node-3")
    # The samples of undone rounds are leased again before any other.
    (whole,) = run.final.ledger.committed
    assert whole.first == 0 and not run.final.ledger.leased


def test_nodes_go_back_by_the_results_between_two_snapshots(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DiskBudget, "seconds_between", lambda *_: LONGEST_SECONDS)
    lives = [Life(seconds_per_inner_step=1.0)] * 3
    run = gone_back(corpus, tmp_path, (37.0, 5), lives=lives)
    assert [commit.incarnation for commit in run.commits] == [*[0] * 5, *[1] * 3]


def test_one_node_that_the_run_owner_believes_gives_its_state_to_the_others(
    corpus: Corpus, tmp_path: Path
) -> None:
    lives = [STEADY, FORGETFUL, FORGETFUL]
    with pytest.raises(UsageError, match="node-1 alone says that the run can go back to round 2"):
        gone_back(corpus, tmp_path / "refused", (38.0, 2), lives=lives)
    with capture_logs() as logs:
        run = gone_back(corpus, tmp_path, (38.0, 2), lives=lives, believed="node-1")
    assert [commit.incarnation for commit in run.commits] == [0, 0, *[1] * 6]
    assert sum(line["event"] == "went back" for line in logs) == 3


def test_a_state_that_no_disk_has_is_made_again_from_the_first_while_its_results_are_kept(
    corpus: Corpus, tmp_path: Path
) -> None:
    false = Life(seconds_per_inner_step=1.0, says=says_to_keep(1, 2, 3))
    run = gone_back(corpus, tmp_path, (38.0, 3), lives=[FORGETFUL, false, false])
    assert [commit.incarnation for commit in run.commits] == [0, 0, 0, *[1] * 5]


def test_the_run_goes_back_to_the_weights_that_nodes_draw(corpus: Corpus, tmp_path: Path) -> None:
    run = gone_back(corpus, tmp_path, (38.0, 0), lives=[FORGETFUL] * 3)
    assert [commit.incarnation for commit in run.commits] == [1] * 8


def says_to_keep(*rounds: int) -> Callable[[Message], Message]:
    """A disk that has these rounds, until one wants them; or who lies about them."""

    def says(message: Message) -> Message:
        if isinstance(message, session_pb2.HeartbeatRequest):
            del message.reach_back[:]
            message.reach_back.add(first=rounds[0], last=rounds[-1])
        return message

    return says


@pytest.mark.parametrize(
    ("num_others", "retention"),
    [
        (1, Retention(keep=100, every=2)),
        (2, Retention()),
        pytest.param(1, Retention(), marks=pytest.mark.nightly),
        pytest.param(2, Retention(keep=100, every=2), marks=pytest.mark.nightly),
    ],
)
def test_where_no_disk_has_the_state_after_all_the_run_goes_on_from_what_it_had(
    corpus: Corpus,
    tmp_path: Path,
    num_others: int,
    retention: Retention,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two of three say that they keep round 3, and do not; a restart of a node changes nothing.

    Nor does an earlier state on their disks, without the results that lead from there to round 3.
    """
    monkeypatch.setattr("node.exchange.giving.KEPT_ROUNDS", 1)
    monkeypatch.setattr("node.exchange.state.sources.KEPT_ROUNDS", 0)  # or they replay from round 0
    false = Life(seconds_per_inner_step=1.0, says=says_to_keep(1, 2, 3), retention=retention)
    mortal = Life(seconds_per_inner_step=1.0, absences=((50.0, 55.0),))
    lives = [*[FORGETFUL, mortal][:num_others], false, false]
    told: list[str] = []

    async def script(_: MemoryNetwork, nodes: Sequence[SimulatedNode]) -> None:
        await asyncio.sleep(38.0)
        coordinator = nodes[0].coordinator
        believed = "node-3" if num_others == 2 else ""
        await coordinator.rulings.go_back(3, reason="the loss has jumped", believed=believed)
        assert coordinator.driver.state.committed_round == 3
        while coordinator.driver.state.paused is None:
            await asyncio.sleep(1)
            told.append(explain(coordinator.driver.state, 0))
        rulings = coordinator.rulings
        await rulings.make(RulingKind.RESUMED)

    run = simulate(
        tiny(run={"rounds": ROUNDS, "min_nodes": len(lives)}, deadlines=DEADLINES),
        lives=lives,
        corpus=corpus,
        disks=tmp_path,
        script=script,
        within_seconds=1500,
    )
    assert_sound(run, rounds=ROUNDS)
    assert len(run.digests) == len(lives)
    assert [ruling.kind for ruling in run.final.rulings] == [
        RulingKind.ROLLED_BACK,
        RulingKind.WITHDRAWN,
        RulingKind.RESUMED,
    ]
    incarnations = [commit.incarnation for commit in run.commits]
    assert incarnations[:6] == [0] * 6 and incarnations[-1] == 1
    assert "too few nodes came to hold the state after round 3" in told[-1]


def test_the_run_goes_back_twice_the_second_time_behind_the_first(
    corpus: Corpus, tmp_path: Path
) -> None:
    run = gone_back(corpus, tmp_path, (32.0, 4), (46.0, 2))
    first, second = run.final.rulings
    assert (first.incarnation, second.incarnation) == (1, 2)
    assert [commit.incarnation for commit in run.commits] == [0, 0, *[2] * 6]


@pytest.mark.parametrize("returns_at", [36.0, pytest.param(50.0, marks=pytest.mark.nightly)])
def test_a_node_that_was_away_drops_what_it_knows_of_undone_rounds(
    corpus: Corpus, tmp_path: Path, returns_at: float
) -> None:
    away = Life(seconds_per_inner_step=1.0, retention=ALL, absences=((31.0, returns_at),))
    run = gone_back(corpus, tmp_path, (34.0, 3), lives=[STEADY, STEADY, away])
    assert [commit.incarnation for commit in run.commits] == [0, 0, 0, *[1] * 5]


@pytest.mark.parametrize("copied_at", [9.0, pytest.param(27.0, marks=pytest.mark.nightly)])
def test_a_coordinator_from_an_older_copy_learns_that_rounds_are_undone(
    corpus: Corpus, tmp_path: Path, copied_at: float
) -> None:
    outage = Outage(copied_at=copied_at, dies_at=48.5, returns_at=55.0)
    run = gone_back(corpus, tmp_path, (33.0, 3), outage=outage)
    assert [commit.incarnation for commit in run.commits] == [0, 0, 0, *[1] * 5]
    assert len(run.final.rulings) == 1


def test_a_node_with_undone_rounds_alone_does_not_bring_them_back_to_an_older_copy(
    corpus: Corpus, tmp_path: Path
) -> None:
    """It is away from before the ruling on, and the first to meet the copy."""
    away = Life(seconds_per_inner_step=1.0, retention=ALL, absences=((31.0, 52.0),))
    outage = Outage(copied_at=12.0, dies_at=48.5, returns_at=51.0)
    run = gone_back(corpus, tmp_path, (33.0, 3), lives=[STEADY, STEADY, away], outage=outage)
    assert [commit.incarnation for commit in run.commits] == [0, 0, 0, *[1] * 5]


def test_who_dies_while_it_goes_back_comes_to_the_same_state(
    corpus: Corpus, tmp_path: Path
) -> None:
    mortal = Life(seconds_per_inner_step=1.0, retention=ALL, absences=((34.01, 39.0),))
    gone_back(corpus, tmp_path, (34.0, 3), lives=[STEADY, STEADY, mortal])


def test_a_round_that_nobody_reaches_is_refused_with_those_that_are_reached(
    corpus: Corpus, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="no node that is here can go back to round 1") as refused:
        gone_back(corpus, tmp_path, (38.0, 1), lives=[FORGETFUL] * 3)
    assert refused.value.next_step is not None
    assert "can go back to these rounds: 0 and 6" in refused.value.next_step


def losses_told(
    corpus: Corpus, disks: Path, is_bad: Callable[[int, int], bool]
) -> tuple[SimulatedRun | None, list[Ruling]]:
    """A run whose nodes tell a bad loss of some states, by round and incarnation; ends when it pauses."""
    rulings: list[Ruling] = []
    rounds: dict[int, int] = {}

    def says(message: Message) -> Message:
        if isinstance(message, session_pb2.ReportRequest):
            for report in message.reports:
                if report.HasField("applied"):
                    rounds[report.round] = report.applied.incarnation
                if report.HasField("evaluated") and is_bad(
                    report.round, rounds.get(report.round, 0)
                ):
                    report.evaluated.held_out_loss = math.nan
        return message

    async def script(_: MemoryNetwork, nodes: Sequence[SimulatedNode]) -> None:
        coordinator = nodes[0].coordinator
        while coordinator.driver.state.paused is None:
            await asyncio.sleep(1)
            rulings[:] = coordinator.driver.state.rulings
        rulings[:] = coordinator.driver.state.rulings
        raise RunPausedError

    lives = [replace(STEADY, says=says)] * 3
    spec = tiny(
        run={"rounds": ROUNDS, "min_nodes": 3},
        deadlines=DEADLINES,
        evaluation={"every_rounds": 1, "samples": 16},
    )
    try:
        run = simulate(
            spec, lives=lives, corpus=corpus, disks=disks, script=script, within_seconds=900
        )
    except RunPausedError:
        return None, rulings
    assert_sound(run, rounds=ROUNDS)
    return run, list(run.final.rulings)


class RunPausedError(Exception):
    """Ends a simulation."""


def test_a_run_whose_state_is_ruined_goes_back_by_itself_and_names_who_contributed(
    corpus: Corpus, tmp_path: Path
) -> None:
    run, rulings = losses_told(
        corpus, tmp_path, lambda round, incarnation: round == 6 > incarnation * 9
    )
    (ruling,) = rulings
    assert (ruling.kind, ruling.by) == (RulingKind.ROLLED_BACK, "the coordinator")
    assert ruling.from_round == 6 and ruling.contributors == ("node-1", "node-2", "node-3")
    assert "no number after round 6" in ruling.reason
    assert run is not None and run.commits[-1].incarnation == 1


def test_a_run_that_is_ruined_again_at_the_same_place_pauses(
    corpus: Corpus, tmp_path: Path
) -> None:
    run, rulings = losses_told(corpus, tmp_path, lambda round, _: round == 6)
    assert run is None
    assert [ruling.kind for ruling in rulings] == [RulingKind.ROLLED_BACK, RulingKind.PAUSED]
    assert "again after the run went back from there" in rulings[1].reason
