"""Training loops of contributors' own in a swarm of real processes, beside ranks of the node's."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typed_commands import ROOT, Running, Swarm, atoll, done, until

from benchmarks.processes import atoll_environment
from node.newest import newest_model
from tests.tiny_runs import tiny_text

PROGRAM = Path(__file__).with_name("loop_program.py")
SECONDS = 90.0

RUN = {"run": {"name": "loops", "rounds": 4, "min_nodes": 2}, "evaluation": {"every_rounds": 2}}
# Rounds end at their deadline: none is over before the test has seen it.
SLOW = {
    **RUN,
    "inner": {"steps": 1_000_000},
    "deadlines": {"train": 4, "contribute": 20, "commit": 30},
}


class Loop:
    """A program of a contributor's."""

    def __init__(self, *command: str | Path, log: Path, **environment: str) -> None:
        self._log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, *map(str, command)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                cwd=ROOT,
                env=atoll_environment({"PYTHONUNBUFFERED": "1", **environment}),
            )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def says(self, text: str) -> None:
        def has_said() -> bool:
            assert text in self.log or self.process.poll() is None, self.log
            return text in self.log

        until(has_said, f"{text!r} in\n{self.log}", seconds=SECONDS)

    def ends(self) -> int:
        try:
            return self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end:\n{self.log}") from None

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Scene:
    """A swarm with a node that trains by ranks, and one with a loop."""

    def __init__(self, folder: Path, **run: dict[str, Any]) -> None:
        self.folder = folder
        self.swarm = Swarm(folder / "swarm", tiny_text(**run))
        self.run_file = folder / "swarm" / "run.toml"
        invite = self.swarm.invite("--uses", "3")
        self.homes = {name: self.swarm.join(name, invite) for name in ("ranks", "loop")}
        self._loops: list[Loop] = []

    def start_nodes(self) -> tuple[Running, Running]:
        return self.swarm.start_node("ranks"), self.swarm.start_node("loop", "--loop")

    def start_loop(self, name: str, *options: str) -> Loop:
        out = self.folder / f"{name}.jsonl"
        return self.program(PROGRAM, self.homes["loop"], self.run_file, out, *options, name=name)

    def program(self, *command: str | Path, name: str = "loop", **environment: str) -> Loop:
        loop = Loop(*command, log=self.folder / f"{name}.log", **environment)
        self._loops.append(loop)
        return loop

    def told(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / f"{name}.jsonl").open()]

    def status(self) -> Any:
        return json.loads(done(atoll("status", "--json", "--dir", self.swarm.home)))

    def agreed(self) -> str:
        """The digest of the final state, which both nodes hold."""
        run = self.status()["run"]
        assert (run["phase"], run["committed_round"], run["digests_agree"]) == ("finished", 4, True)
        models = [newest_model(home) for home in self.homes.values()]
        assert {model.outer_digest.hex() for model in models} == {run["outer_digest"]}
        return str(run["outer_digest"])

    def end(self) -> None:
        for loop in self._loops:
            loop.kill()
        self.swarm.end()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path


def assert_holds(saved: Path, home: Path) -> None:
    """The model that a loop ended with is the node's outer state, bit by bit."""
    model = newest_model(home)
    tensors = torch.load(saved)
    for place in model.layout.places:
        values = model.parameters[place.offset : place.offset + place.num_elements]
        assert torch.equal(tensors[place.name].flatten(), torch.from_numpy(values.copy()))


def test_a_loop_and_ranks_train_one_model_bit_by_bit_and_each_sample_once(tmp_path: Path) -> None:
    scene = Scene(tmp_path, **RUN)
    try:
        ranks, node = scene.start_nodes()
        node.says("a training loop may come in")
        loop = scene.start_loop("plain", "evaluates=yes", "seed=5")
        node.says("a training loop is here")
        memory = node.shared_memory()
        assert loop.ends() == 0, loop.log
        assert "the run is finished" in loop.log
        node.ends(memory)
        assert not node.has_torch() and "the ledger counts its tokens" not in node.log
        scene.agreed()
        assert_holds(tmp_path / "plain.pt", scene.homes["loop"])
        told = scene.told("plain")
        assert [step["steps_left"] for step in told[:5]] == [4, 3, 2, 1, 5]
        assert [step["is_replaced"] for step in told[:5]] == [False] * 4 + [True]
        progress = [step["progress"] for step in told]
        assert progress == sorted(progress) and 0.9 < progress[-1] <= 1
        numbers = [number for step in told for number in step["numbers"]]
        assert len(set(numbers)) == len(numbers)
        status = scene.status()
        tokens = {n["node_name"]: n["committed_tokens"] for n in status["nodes"]}
        assert tokens["loop"] == len(told) * 4 * 32
        assert [measured["round"] for measured in status["run"]["held_out_losses"]] == [0, 2, 4]
    finally:
        scene.end()
