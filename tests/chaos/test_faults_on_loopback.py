"""Real processes, killed at each phase they pass, come back to a swarm where nothing is lost.

Three nodes must be there for a round to open, so that no round passes while a victim restarts, and
the round of a fault is the round that is written here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lab.processes.faults import Faults
from lab.processes.invariants import broken, gather
from lab.processes.swarm import Member, RealSwarm
from tests.tiny_runs import tiny_text


def run_text(rounds: int) -> str:
    return tiny_text(
        run={"name": "faults", "rounds": rounds, "min_nodes": 3},
        inner={"steps": 40},
        deadlines={"train": 5, "contribute": 6, "commit": 7, "apply": 20, "lease": 3},
        evaluation={"every_rounds": 5},
    )


PATIENCE_SECONDS = 900
"""It takes a tenth of that on two cores with nothing else to do."""

SOON = 0.2
"""Seconds until a victim is started again."""


class Scene:
    """A swarm of three with its faults."""

    def __init__(self, swarm: RealSwarm) -> None:
        self.swarm = swarm
        self.coordinator = swarm.coordinator
        self.a, self.b, self.c = swarm.join("a", "b", "c")
        self.faults = Faults(swarm.logs)

    def runs_to_its_end(self) -> None:
        """All faults happen, the run is finished all the same, and everything adds up."""
        nodes = (self.a, self.b, self.c)
        for node in nodes:
            node.start()
        # A node may end by itself a little after what it needs has been killed.
        self.swarm.until(
            lambda: self.swarm.is_finished, "the end of the run", seconds=PATIENCE_SECONDS
        )
        self.swarm.until(lambda: all(node.has_ended for node in nodes), "the nodes' ends")
        assert [str(fault) for fault in self.faults.left] == []
        assert broken(gather(self.swarm)) == []
        assert self.swarm.left_nothing() == []
        assert [member.exit_codes[-1] for member in self.swarm.members] == [0] * 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "swarm"


@contextmanager
def scene_of(folder: Path, *, rounds: int) -> Iterator[Scene]:
    with RealSwarm(folder, run_text(rounds)) as swarm:
        yield Scene(swarm)


def killed(scene: Scene, victim: Member, *, round: int, phase: str) -> None:
    scene.faults.kill(victim).when(round=round, phase=phase).then_restart(after_seconds=SOON)


def test_nothing_is_lost_when_each_sort_of_process_dies_once(folder: Path) -> None:
    with scene_of(folder, rounds=5) as scene:
        killed(scene, scene.a, round=2, phase="reducing")
        scene.faults.kill_rank(scene.b).when(round=3, phase="training")
        killed(scene, scene.coordinator, round=3, phase="exchanging")
        helper = scene.faults.kill_p2pd(scene.c).when(round=4, phase="training")
        helper.then_restart(after_seconds=SOON)
        scene.runs_to_its_end()


@pytest.mark.nightly
@pytest.mark.timeout(2 * PATIENCE_SECONDS)
def test_whoever_dies_in_whatever_phase_nothing_is_lost(folder: Path) -> None:
    """One swarm for all of it: most of what a fault costs is a node's start."""
    with scene_of(folder, rounds=21) as scene:
        faults = scene.faults
        # Nodes, on the way to a result and to the next state.
        killed(scene, scene.a, round=2, phase="training")
        killed(scene, scene.b, round=3, phase="contributing")
        killed(scene, scene.c, round=4, phase="reducing")
        killed(scene, scene.a, round=5, phase="handing out")
        killed(scene, scene.b, round=6, phase="holding")
        killed(scene, scene.c, round=7, phase="applying")
        killed(scene, scene.a, round=9, phase="adopting")
        # The coordinator, and ranks beside it.
        for number, phase in enumerate(("opened", "exchanging", "committed", "settled"), start=11):
            killed(scene, scene.coordinator, round=number, phase=phase)
        faults.kill_rank(scene.a).when(round=12, phase="training")
        faults.kill_rank(scene.b).when(round=14, phase="contributing")
        faults.kill_rank(scene.c).when(round=15, phase="adopting")
        # What nodes need, and a machine that stalls.
        again = {"after_seconds": SOON}
        faults.kill_p2pd(scene.a).when(round=16, phase="training").then_restart(**again)
        faults.kill_p2pd(scene.b).when(round=17, phase="handing out").then_restart(**again)
        faults.stop(scene.c).when(round=18, phase="contributing").for_seconds(6)
        scene.runs_to_its_end()
        assert scene.c.num_starts == 3  # it was killed twice, and then only stood still
