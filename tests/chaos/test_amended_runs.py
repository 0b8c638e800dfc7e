"""Amended runs in virtual time: all nodes hold the same state, also those that come late or come back."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from coordinator.rules import rules_in_force
from lab.simulation.coordinator import Outage
from lab.simulation.memory_transport import MemoryNetwork
from lab.simulation.swarm import Life, Script, SimulatedNode, SimulatedRun, simulate
from node.island.data.dataset import Corpus
from tests.chaos.test_history_in_process import DEADLINES, STEADY, assert_sound
from tests.tiny_runs import tiny

COPIED_AT, AMENDED_AT, DIES_AT, RETURNS_AT = 12.5, 18.0, 32.5, 40.0
BACK_AT = 58.0
ROUNDS, MORE = 12, 6
SPEC = tiny(run={"rounds": ROUNDS, "min_nodes": 2}, deadlines=DEADLINES)


async def amend(_: MemoryNetwork, nodes: Sequence[SimulatedNode]) -> None:
    await asyncio.sleep(AMENDED_AT)
    changes = (("inner.learning_rate", 0.02), ("outer.learning_rate", 0.3))
    await nodes[0].coordinator.rulings.amend(changes, more_rounds=MORE, reason="")


async def change_codecs(_: MemoryNetwork, nodes: Sequence[SimulatedNode]) -> None:
    """To a coarse one and to a fine one, while a node is away, and back once it is here again."""
    await asyncio.sleep(AMENDED_AT)
    coarse = (("exchange.uplink", "topk256"), ("exchange.downlink", "int8"))
    await nodes[0].coordinator.rulings.amend(coarse, more_rounds=MORE, reason="")
    await asyncio.sleep(BACK_AT - AMENDED_AT)
    fine = (("exchange.uplink", "ec2"),)
    await nodes[0].coordinator.rulings.amend(fine, more_rounds=0, reason="")


def amended_run(
    corpus: Corpus, disks: Path, *, outage: Outage | None = None, script: Script = amend
) -> SimulatedRun:
    """One node dies before the amendment and comes back after it, and one joins late."""
    lives = [
        *(STEADY, STEADY),
        Life(seconds_per_inner_step=1.0, absences=((14.5, 55.0),)),
        Life(seconds_per_inner_step=1.0, starts_at=62.0),
    ]
    with capture_logs() as logs:
        run = simulate(SPEC, lives=lives, corpus=corpus, disks=disks, script=script, outage=outage)
    diverged = [line for line in logs if "our state is not its base" in line.get("why", "")]
    assert not diverged, "a node applied a commit by other rules than the rest"
    return run


def test_nodes_that_come_back_or_join_apply_each_commit_by_the_rules_of_its_round(
    corpus: Corpus, tmp_path: Path
) -> None:
    run = amended_run(corpus, tmp_path)
    assert_sound(run, rounds=ROUNDS + MORE)
    assert len(run.digests) == 4
    assert run.final.rules == rules_in_force(SPEC, run.final.rulings), "a restart would change them"
    assert [ruling.changes for ruling in run.final.rulings] == [
        (("inner.learning_rate", 0.02), ("outer.learning_rate", 0.3), ("run.rounds", ROUNDS + MORE))
    ]


def test_a_coordinator_from_before_the_amendment_learns_it_and_the_run_goes_on_by_it(
    corpus: Corpus, tmp_path: Path
) -> None:
    outage = Outage(copied_at=COPIED_AT, dies_at=DIES_AT, returns_at=RETURNS_AT)
    run = amended_run(corpus, tmp_path, outage=outage)
    assert_sound(run, rounds=ROUNDS + MORE)
    assert len(run.digests) == 4 and len(run.final.rulings) == 1


OUTAGE = Outage(copied_at=COPIED_AT, dies_at=DIES_AT, returns_at=RETURNS_AT)


@pytest.mark.parametrize("outage", [None, OUTAGE], ids=["steady", "an older copy"])
def test_codecs_change_between_rounds_and_all_nodes_decode_each_round_by_its_own(
    corpus: Corpus, tmp_path: Path, outage: Outage | None
) -> None:
    """One node replays rounds of both codecs from its disk and its peers; another joins after."""
    run = amended_run(corpus, tmp_path, outage=outage, script=change_codecs)
    assert_sound(run, rounds=ROUNDS + MORE)
    assert len(run.digests) == 4
    changes = [dict(ruling.changes) for ruling in run.final.rulings]
    assert changes[0]["exchange.uplink"] == "topk256/1"
    assert changes[1] == {"exchange.uplink": "ec2/2"}
    firsts = [ruling.from_round for ruling in run.final.rulings]
    assert 1 < firsts[0] < firsts[1] <= ROUNDS + MORE
