"""The fault injector on logs that grow line by line, with victims of paper and a clock of our own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lab.processes.faults import STRIKE_AGAIN_SECONDS, Faults
from lab.processes.logs import FollowedLogs


class Paper:
    """A victim that notes what is done to it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.suffered: list[str] = []
        self.has_ended = False
        self.has_rank = True
        self.num_tries = 0

    def _note(self, what: str) -> bool:
        self.suffered.append(what)
        return True

    def kill(self) -> bool:
        self.has_ended = True
        return self._note("killed")

    def kill_rank(self) -> bool:
        self.num_tries += 1
        return self.has_rank and self._note("rank killed")

    def kill_p2pd(self) -> bool:
        return self._note("p2pd killed")

    def stop(self) -> bool:
        return self._note("stopped")

    def go_on(self) -> None:
        self._note("went on")

    def start(self) -> None:
        self.has_ended = False
        self._note("started")


class Stage:
    def __init__(self, folder: Path) -> None:
        self.now = 0.0
        self.logs = FollowedLogs()
        self.node, self.other = Paper("node"), Paper("other")
        self._paths = {name: folder / name for name in ("node", "other")}
        for name, path in self._paths.items():
            self.logs.follow(name, path)
        self.faults = Faults(self.logs, clock=lambda: self.now)

    def write(self, text: str, *, to: str = "node") -> None:
        with self._paths[to].open("a") as log:
            log.write(text)
        self.logs.look()

    def phase(self, round: int, phase: str, *, of: str = "node") -> None:
        line = {"event": "phase", "phase": phase, "round": round}
        self.write(json.dumps(line) + "\n", to=of)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.logs.look()


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_a_kill_comes_with_the_first_line_of_its_phase_and_round(stage: Stage) -> None:
    fault = stage.faults.kill(stage.node).when(round=7, phase="reducing")
    stage.phase(6, "reducing")
    stage.phase(7, "training")
    stage.phase(7, "reducing", of="other")
    stage.write("round 7, phase reducing\n")
    assert stage.node.suffered == [] and fault.fired is None
    stage.phase(7, "reducing")
    stage.phase(7, "reducing")
    assert stage.node.suffered == ["killed"] and stage.other.suffered == []
    assert fault.fired is not None
    assert (fault.fired.round, fault.fired.phase) == (7, "reducing")


def test_a_round_that_the_victim_misses_is_made_up_for_in_the_next(stage: Stage) -> None:
    fault = stage.faults.kill(stage.node).when(round=7, phase="reducing")
    stage.phase(9, "reducing")
    assert fault.fired is not None and fault.fired.round == 9


def test_half_a_line_is_not_a_line_yet(stage: Stage) -> None:
    stage.faults.kill(stage.node).when(round=1, phase="training")
    stage.write('{"event": "phase", "phase": "training", "rou')
    assert stage.node.suffered == []
    stage.write('nd": 1}\n')
    assert stage.node.suffered == ["killed"]


def test_a_victim_comes_back_so_long_after_it_has_ended(stage: Stage) -> None:
    fault = stage.faults.kill_p2pd(stage.node).when(round=1, phase="training")
    fault.then_restart(after_seconds=2)
    stage.phase(1, "training")
    stage.wait(10)  # it has not noticed yet
    assert stage.node.suffered == ["p2pd killed"]
    stage.node.has_ended = True
    stage.wait(0)
    stage.wait(1.9)
    assert stage.node.suffered == ["p2pd killed"] and stage.faults.left == (fault,)
    stage.wait(0.1)
    assert stage.node.suffered == ["p2pd killed", "started"] and stage.faults.left == ()


def test_a_restart_that_is_asked_for_after_the_kill_still_comes(stage: Stage) -> None:
    fault = stage.faults.kill(stage.node).when(round=1, phase="training")
    stage.phase(1, "training")
    stage.wait(0)
    fault.then_restart(after_seconds=0)
    stage.wait(0)
    assert stage.node.suffered == ["killed", "started"]


def test_a_stopped_machine_goes_on(stage: Stage) -> None:
    stage.faults.stop(stage.node).when(round=1, phase="training").for_seconds(5)
    stage.phase(1, "training")
    stage.wait(4.9)
    assert stage.node.suffered == ["stopped"]
    stage.wait(0.1)
    stage.wait(10)
    assert stage.node.suffered == ["stopped", "went on"]


def test_a_fault_by_time_strikes_as_soon_as_there_is_something_to_strike(stage: Stage) -> None:
    stage.node.has_rank = False
    fault = stage.faults.kill_rank(stage.node).after(3)
    stage.wait(3)
    stage.wait(0)
    assert fault.fired is None and stage.node.num_tries == 1  # looking for a rank takes its time
    stage.node.has_rank = True
    stage.wait(STRIKE_AGAIN_SECONDS)
    assert stage.node.suffered == ["rank killed"]
    assert fault.fired is not None and fault.fired.phase is None
    stage.wait(0)
    assert stage.faults.left == ()


def test_what_goes_wrong_while_following_is_told_to_who_asks(tmp_path: Path) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    logs = FollowedLogs()
    logs.follow("node", tmp_path / "node")
    logs.tick(fail)
    with pytest.raises(ZeroDivisionError), logs:
        pass


READ_WHILE_IT_GROWS = """
import gc, sys
from pathlib import Path
from lab.processes.logs import FollowedLogs

class Forgotten:
    def __init__(self):
        self.itself = self
    def __del__(self):  # as when the thread that reads has its turn here
        log.write('{"event": "later"}\\n' * 2000)
        log.flush()
        logs.look()
        others.append(b"\\xff" * 9 * size)

others = []
for size in range(10, 400, 13):
    path = Path(sys.argv[1]) / str(size)
    logs = FollowedLogs()
    logs.follow("node", path)
    with path.open("w") as log:
        log.write('{"event": "before"}\\n' * size)
        log.flush()
        logs.look()
        gc.disable()
        Forgotten()
        gc.set_threshold(1, 1, 1)
        gc.enable()
        said = logs.said_by("node")
        gc.disable()
        gc.collect()
    assert {entry["event"] for entry in said[:size]} == {"before"}, said
print("all is read")
"""


def test_what_a_log_says_can_be_read_while_it_grows_in_whatever_moment(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", READ_WHILE_IT_GROWS, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert ran.stdout == "all is read\n", ran.stderr
