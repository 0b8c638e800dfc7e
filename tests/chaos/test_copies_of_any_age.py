"""Copies of any age, nodes that come when they like or never, disks that are lost: the run goes on."""

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from lab.simulation.coordinator import Outage
from lab.simulation.memory_transport import MemoryNetwork
from lab.simulation.swarm import Life, SimulatedNode, SimulatedRun, simulate
from node.island.data.dataset import Corpus
from tests.chaos.test_restored_copies import DEADLINES, assert_sound, stay_away
from tests.tiny_runs import tiny

ROUND = 5.0
"""Virtual seconds of a round."""
DOWN = 8.0
"""That the coordinator is down."""
LONGEST = float(DEADLINES["commit"])
IN_FLIGHT, BETWEEN = 2.5, 0.1
"""When in a round the copy is made: while nodes train, or right after the commit of the one before."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What happens; nodes are counted from 0, and seconds from the return of the coordinator."""

    rounds_old: int
    late: tuple[float | None, ...]  # by node; None: never comes back
    min_nodes: int
    made: float = IN_FLIGHT
    made_in_round: int = 2
    behind: int | None = None  # a node that has missed the last rounds before the outage
    lost_disk: int | None = None

    @property
    def copied_at(self) -> float:
        return ROUND * (self.made_in_round - 1) + self.made

    @property
    def dies_at(self) -> float:
        return self.copied_at + ROUND * self.rounds_old + 1.3

    @property
    def returns_at(self) -> float:
        return self.dies_at + DOWN

    @property
    def rounds_before(self) -> int:
        """That were committed before the coordinator died."""
        return int(self.dies_at // ROUND)

    def comes_at(self, node: int) -> float | None:
        late = self.late[node]
        return None if late is None else self.returns_at + late


CASES = {
    "one round old, two nodes, a minute": Case(rounds_old=1, late=(60, 61), min_nodes=2),
    "three rounds old, one a second and one an hour late": Case(
        rounds_old=3, late=(1, 3600, 3601), min_nodes=3, made=BETWEEN
    ),
    "eight rounds old, one that is behind comes first": Case(
        rounds_old=8, late=(30, 900, 905, 902), min_nodes=4, behind=0
    ),
    "one round old, one that is behind the copy comes first": Case(
        rounds_old=1, late=(1, 600, 601), min_nodes=3, behind=0, made=BETWEEN, made_in_round=3
    ),
    "one that is behind the copy, which alone could go on": Case(
        rounds_old=1, late=(1, 30, 31), min_nodes=1, behind=0, made=BETWEEN, made_in_round=3
    ),
    "twenty rounds old, a lost disk comes first": Case(
        rounds_old=20, late=(1, 120, 121), min_nodes=2, lost_disk=0
    ),
    "of the first round, a lost disk comes first and the others an hour late": Case(
        rounds_old=3, late=(1, 3600, 3601), min_nodes=3, made=BETWEEN, lost_disk=0
    ),
    "one never comes back": Case(rounds_old=8, late=(1, 2, 3, 4, None), min_nodes=3),
    "a hundred rounds old": Case(rounds_old=100, late=(30, 1), min_nodes=2),
}
LONG = (
    "of the first round, a lost disk comes first and the others an hour late",
    "a hundred rounds old",
)
"""They differ from others by how long they take."""


async def be_hit(case: Case, disks: Path, node: SimulatedNode, place: int) -> None:
    """Away from when the coordinator dies, or before; with a new process and no disk, if that is lost."""
    comes_at = case.comes_at(place)
    if comes_at is None:
        return
    missed = ROUND * min(case.rounds_old + 1, 3) if place == case.behind else 0.0
    if place == case.lost_disk:
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(case.dies_at + 1 - clock())
        folder = disks / f"node-{place + 1}"
        shutil.rmtree(folder)
        folder.mkdir()
    else:
        await stay_away(node, case.dies_at - missed, comes_at)


def run_of(case: Case, corpus: Corpus, disks: Path) -> tuple[SimulatedRun, int]:
    """The run, and the newest round that a node held when the coordinator died."""
    held = 0

    async def script(_: MemoryNetwork, nodes: Sequence[SimulatedNode]) -> None:
        async def look() -> None:
            nonlocal held
            await asyncio.sleep(case.dies_at)
            held = max(node.outer.round for node in nodes)

        await asyncio.gather(look(), *(be_hit(case, disks, n, i) for i, n in enumerate(nodes)))

    lives = []
    for place in range(len(case.late)):
        comes_at = case.comes_at(place)
        is_killed = comes_at is None or place == case.lost_disk
        absences = ((case.dies_at, comes_at),) if is_killed else ()
        lives.append(Life(seconds_per_inner_step=1.0, absences=absences))
    rounds = case.rounds_before + 6
    run = simulate(
        tiny(run={"rounds": rounds, "min_nodes": case.min_nodes}, deadlines=DEADLINES),
        lives=lives,
        corpus=corpus,
        script=script,
        outage=Outage(copied_at=case.copied_at, dies_at=case.dies_at, returns_at=case.returns_at),
        disks=disks,
        within_seconds=case.returns_at + 5000,
    )
    assert_sound(run, rounds=rounds, nodes=sum(late is not None for late in case.late))
    return run, held


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.nightly] if name in LONG else [])
        for name, case in CASES.items()
    ],
)
def test_no_round_is_lost_whoever_comes_when_from_however_old_a_copy(
    corpus: Corpus, tmp_path: Path, case: Case
) -> None:
    run, held = run_of(case, corpus, tmp_path)
    opened = [number for number, at in enumerate(run.begins, 1) if at > case.returns_at]
    assert min(opened) > held >= 2, "a round that was committed is trained again"
    voids = [c.round for c in run.commits if all(o.digest is None for o in c.slices)]
    assert not voids
    back = sorted(at for i in range(len(case.late)) if (at := case.comes_at(i)) is not None)
    assert {len(outcome.contributors) for outcome in run.commits[-1].slices} == {len(back)}
    assert min(run.begins[held:]) <= max(back[case.min_nodes - 1], case.returns_at) + LONGEST


def test_a_run_that_was_finished_without_its_nodes_ends_with_what_they_had_committed(
    corpus: Corpus, tmp_path: Path
) -> None:
    """Who joined last cannot fetch the final state, so the run is not over when the coordinator dies."""
    rounds = 4
    copied_at, dies_at = ROUND * (rounds - 1) + IN_FLIGHT, ROUND * rounds + 0.5
    returns_at = dies_at + DOWN

    async def come_late(network: MemoryNetwork, nodes: Sequence[SimulatedNode]) -> None:
        async def cut() -> None:
            for other in nodes[:2]:
                network.cut(other.node_id, nodes[2].node_id)
            await asyncio.sleep(returns_at + 290)
            for other in nodes[:2]:
                network.mend(other.node_id, nodes[2].node_id)

        away = (stay_away(n, dies_at, returns_at + 302 - i) for i, n in enumerate(nodes))
        await asyncio.gather(cut(), *away)

    with capture_logs() as logs:
        run = simulate(
            tiny(run={"rounds": rounds, "min_nodes": 2}, deadlines=DEADLINES),
            lives=[
                Life(seconds_per_inner_step=1.0),
                Life(seconds_per_inner_step=1.0),
                Life(seconds_per_inner_step=1.0, starts_at=copied_at - 1),
            ],
            corpus=corpus,
            script=come_late,
            outage=Outage(copied_at=copied_at, dies_at=dies_at, returns_at=returns_at),
            disks=tmp_path,
            within_seconds=5000,
        )
    assert_sound(run, rounds=rounds, nodes=3)
    assert [entry for entry in logs if entry["event"].startswith("the run goes on")]
    assert all(any(o.digest is not None for o in commit.slices) for commit in run.commits)
    assert run.held_out[-1].round == rounds


@pytest.mark.parametrize(
    ("num_nodes", "made"),
    [
        (3, IN_FLIGHT),
        (3, BETWEEN),
        pytest.param(6, IN_FLIGHT, marks=pytest.mark.nightly),
        pytest.param(6, BETWEEN, marks=pytest.mark.nightly),
    ],
)
def test_without_a_third_of_the_nodes_a_round_commits_within_the_longest_round(
    corpus: Corpus, tmp_path: Path, made: float, num_nodes: int
) -> None:
    gone = num_nodes // 3
    late = (*(0.5 * i for i in range(num_nodes - gone)), *(None,) * gone)
    case = Case(rounds_old=2, late=late, min_nodes=num_nodes - gone, made=made)
    run, held = run_of(case, corpus, tmp_path)
    second_new = run.begins[held + 1]  # when the first new one is applied
    assert second_new <= case.returns_at + LONGEST
