"""A swarm of real processes where training loops of contributors' own take part."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lab.processes.family import atoll_environment
from node.kept import kept_model
from protocol.v1 import status_pb2
from tests.integration.typed_commands import ROOT, Running, Swarm, until
from tests.tiny_runs import tiny_text

PROGRAM = Path(__file__).with_name("loop_program.py")
SECONDS = 90.0


class Loop:
    """A program of a contributor's."""

    def __init__(
        self, *command: str | Path, log: Path, through: Sequence[str] = (), **environment: str
    ) -> None:
        self._log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [*(through or (sys.executable,)), *map(str, command)],
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
    """A swarm with nodes that train by ranks, or by a loop, by the names that their folders get."""

    def __init__(self, folder: Path, *names: str, **run: Mapping[str, object]) -> None:
        self.folder = folder
        self.swarm = Swarm(folder / "swarm", tiny_text(**run))
        self.run_file = folder / "swarm" / "run.toml"
        self.invite = self.swarm.invite("--uses", "9")
        names = names or ("ranks", "loop")
        self.homes = {name: self.swarm.join(name, self.invite) for name in names}
        self._loops: list[Loop] = []

    def start_nodes(self) -> tuple[Running, Running]:
        return self.swarm.start_node("ranks"), self.swarm.start_node("loop", "--loop")

    def start_loop(self, name: str, *options: str, node: str = "loop", **environment: str) -> Loop:
        out = self.folder / f"{name}.jsonl"
        home = self.homes.setdefault(node, self.folder / "swarm" / node)
        return self.program(PROGRAM, home, self.run_file, out, *options, name=name, **environment)

    def program(
        self, *command: str | Path, name: str, through: Sequence[str] = (), **environment: str
    ) -> Loop:
        log = self.folder / f"{name}.log"
        loop = Loop(*command, log=log, through=through, **environment)
        self._loops.append(loop)
        return loop

    def told(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / f"{name}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def waits_for_loop(self) -> None:
        """Waits until the swarm says that the node has no loop, and opens no round without."""
        words = "1 of 2 is ready; loop trains nothing now"
        until(lambda: words in self.run().reason, f"{words!r}; {self.run()}")

    def run(self) -> status_pb2.RunStatus:
        return self.swarm.status().run

    def tokens(self) -> dict[str, int]:
        return {name: node.committed_tokens for name, node in self.swarm.nodes().items()}

    def finish(self, name: str) -> None:
        """Lets another loop train to the end of the run."""
        loop = self.start_loop(name, "seed=9", "step_seconds=0.05")
        assert loop.ends() == 0, loop.log
        self.agree()
        assert_holds(self.folder / f"{name}.pt", self.homes["loop"])

    def agree(self) -> None:
        """Waits until all nodes hold the final state, and have ended."""
        until(lambda: self.run().phase == status_pb2.RUN_PHASE_FINISHED, str(self.run()))
        states = (status_pb2.NODE_STATE_LEFT, status_pb2.NODE_STATE_LOST)
        until(
            lambda: all(node.state in states for node in self.swarm.nodes().values()),
            f"an end of {self.swarm.nodes()}",
        )
        assert self.run().digests_agree
        models = [kept_model(home) for home in self.homes.values()]
        assert {model.outer_digest for model in models} == {self.run().outer_digest}

    def end(self) -> None:
        for loop in self._loops:
            loop.kill()
        self.swarm.end()


def assert_holds(saved: Path, home: Path) -> None:
    """The model that a loop ended with is the node's outer state, bit by bit, in its own type."""
    model = kept_model(home)
    tensors = torch.load(saved)
    for place in model.layout.places:
        values = model.parameters[place.offset : place.offset + place.num_elements]
        held = tensors[place.name].flatten()
        assert torch.equal(held, torch.from_numpy(values.copy()).to(held.dtype))
