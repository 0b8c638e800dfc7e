"""Two machines of one name, and a copy of one's folder: real processes, as people meet them."""

import re
import shutil
import signal

import pytest

from protocol.v1 import status_pb2
from tests.integration.typed_commands import Swarm, atoll, done
from tests.tiny_runs import tiny_text

RUN = tiny_text(
    run={"name": "real", "rounds": 1000, "min_nodes": 2},
    inner={"steps": 1_000_000},
    deadlines={"train": 2, "contribute": 20, "commit": 30},
    evaluation={"every_rounds": 1000},
)


def fits(out: str) -> str:
    assert max(map(len, out.splitlines())) <= 80, out
    return out


@pytest.mark.nightly
def test_the_copy_of_a_folder_waits_is_told_so_and_takes_over_when_the_first_is_killed(
    swarm: Swarm,
) -> None:
    invite = swarm.invite("--uses", "2")
    for home in ("one", "other"):
        done(atoll("join", invite, "--dir", swarm.folder / home, "--name", "vm"))
    one = swarm.start_node("one")
    one.says("attached")
    other = swarm.start_node("other")
    other.says("so the swarm calls this one vm-2")
    swarm.does("training", "vm", "vm-2")
    shutil.copytree(swarm.folder / "one", swarm.folder / "copy")
    copy = swarm.start_node("copy")
    copy.says("not attached: this node's key is in use")
    one.says("another process with this node's key asks to attach")
    swarm.coordinator.says("two processes have one node's key, and the second waits")
    at_most = {"COLUMNS": "80"}
    told = "vm has a second process with its key waiting"
    status = fits(done(atoll("status", "--dir", swarm.home, **at_most)))
    assert told in status and re.search(r"^vm-2 +ready", status, re.MULTILINE), status
    nodes = fits(done(atoll("nodes", "--dir", swarm.home, **at_most)))
    assert told in nodes and re.search(r"^vm-2 +[0-9a-f]{12}", nodes, re.MULTILINE), nodes
    num_rounds = swarm.status().run.committed_round
    swarm.coordinator.says("round committed", times=num_rounds + 2)
    fits(done(atoll("rounds", "--dir", swarm.home, **at_most)))
    assert swarm.coordinator.log.count("node attached") == 2, "a session was ended"
    assert "attached " not in copy.log.replace("not attached", "")

    one.process.send_signal(signal.SIGKILL)
    copy.says("attached   ")
    swarm.coordinator.says("node attached", times=3)
    swarm.does("training", "vm", "vm-2")
    status_now = {node.node_name: node for node in swarm.status().nodes}
    assert not status_now["vm"].has_waiting_copy
    assert status_now["vm"].state == status_pb2.NODE_STATE_READY

    swarm.coordinator.process.send_signal(signal.SIGINT)
    assert swarm.coordinator.process.wait(20) == 0
    (line,) = re.findall(r"stopping .*", swarm.coordinator.log)
    assert "2 nodes are attached" in line and "come back when the coordinator starts" in line
    assert f"'atoll coordinator start {swarm.home}'" in line
