"""Members that lie, as real processes: the node's real command with one thing replaced (liar.py)."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from liar import LIES
from typed_commands import ROOT, Running, Swarm, atoll, done, until

from tests.tiny_runs import tiny_text

HONEST = ("one", "two", "three")
SECONDS = 240.0
DEADLINES = {"train": 60, "contribute": 90, "commit": 120}


class Scene:
    """A swarm with some liars in it."""

    def __init__(self, folder: Path, **changes: dict[str, object]) -> None:
        run = {"name": "liars", "rounds": 5, "min_nodes": 4, **changes.pop("run", {})}
        tables = {"deadlines": DEADLINES, "evaluation": {"every_rounds": 1}, **changes}
        self.swarm = Swarm(folder / "swarm", tiny_text(run=run, **tables))

    def start(self, lie: str, *liars: str) -> dict[str, Running]:
        """Each honest node has an invite of its own; the liars have one together."""
        started = {}
        invite = self.swarm.invite("--uses", str(len(liars)))
        for name in liars:
            self.swarm.join(name, invite)
            started[name] = self.start_liar(name, lie)
        for name in HONEST:
            self.swarm.join(name, self.swarm.invite())
            started[name] = self.swarm.start_node(name)
        return started

    def start_liar(self, name: str, lie: str) -> Running:
        assert lie in LIES
        through = (sys.executable, "-P", str(ROOT / "tests" / "integration" / "liar.py"), lie)
        return self.swarm.start("node", "start", "--dir", self.swarm.folder / name, through=through)

    def asked(self, command: str) -> Any:
        return json.loads(done(atoll(command, "--json", "--dir", self.swarm.home)))

    def rounds(self) -> list[Any]:
        """Closed rounds, oldest first."""
        return list(reversed(self.asked("rounds")))

    def finishes(self) -> None:
        self.swarm.coordinator.says("run finished")

    def until(self, is_so: Callable[[], bool], what: str) -> None:
        until(is_so, f"{what}\n{self.swarm.coordinator.log}", seconds=SECONDS)


@pytest.fixture
def scene_of(tmp_path: Path) -> Iterator[Callable[..., Scene]]:
    scenes: list[Scene] = []

    def scene(**changes: dict[str, object]) -> Scene:
        scenes.append(Scene(tmp_path, **changes))
        return scenes[-1]

    yield scene
    for each in scenes:
        each.swarm.end()


def test_who_contributes_a_thousand_times_too_much_is_left_out_and_named_and_expelled(
    scene_of: Callable[..., Scene],
) -> None:
    # Rounds end at their deadline: none is over before the test has seen it.
    scene = scene_of(
        run={"rounds": 9, "min_nodes": 3},
        inner={"steps": 1_000_000},
        deadlines={"train": 2, "contribute": 30, "commit": 60},
    )
    started = scene.start("contributes too much", "liar")
    scene.until(lambda: len(scene.rounds()) >= 2, "two rounds")
    nodes = {node["node_name"]: node for node in scene.asked("nodes")}
    screening = nodes["liar"]["screening"]
    assert screening["num_left_out"] == screening["num_contributions"] > 0
    assert nodes["liar"].get("confirmed_work_share", 0) == 0
    assert not any(nodes[name]["screening"].get("num_left_out", 0) for name in HONEST)
    table = done(atoll("nodes", "--dir", scene.swarm.home, COLUMNS="400"))
    count = screening["num_contributions"]
    assert f"{count} left out of {count}" in table and "none of" in table
    assert "liar: " in done(atoll("rounds", "--dir", scene.swarm.home, COLUMNS="400"))

    expel = ("nodes", "expel", "liar", "--dir", scene.swarm.home, "--reason", "shouts")
    done(atoll(*expel))
    started["liar"].ends_with(79, "shouts")
    scene.finishes()
    rounds = scene.rounds()
    named = [{one["node_name"]: one for one in closed.get("screened", [])} for closed in rounds]
    assert "liar" in named[0] and not any(set(names) - {"liar"} for names in named)
    losses = [measured["loss"] for measured in scene.asked("status")["run"]["held_out_losses"]]
    assert losses[-1] == min(losses) < 0.9 * losses[0]
