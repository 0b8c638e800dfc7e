"""Limits on open files that are too low, and a coordinator with few of them in a crowd."""

import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from coordinator.ports import OWN_OPEN_FILES, most_connections
from protocol.v1 import status_pb2
from tests.integration.coordinator_scene import new_home, result, two_nodes
from tests.integration.typed_commands import Running, Swarm, until

LIMIT = 110
CROWD = 2 * LIMIT

_LIMITED = """
import os, resource, sys
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
os.execv(sys.argv[2], sys.argv[2:])
"""


def at_most(limit: int) -> tuple[str, ...]:
    return (sys.executable, "-c", _LIMITED, str(limit))


def num_open_files(process_id: int) -> int:
    return len(os.listdir(f"/proc/{process_id}/fd"))  # noqa: PTH208 - only their number counts


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    swarm = Swarm(tmp_path / "swarm", '[run]\nname = "limited"\nmin_nodes = 40\n')
    yield swarm
    swarm.end()


def test_too_low_a_limit_is_refused_at_the_start_with_the_numbers(swarm: Swarm) -> None:
    swarm.join("node", swarm.invite())
    home = swarm.folder / "node"
    node = swarm.start("node", "start", "--dir", home, "--ranks", "2", through=at_most(250))
    node.ends_with(
        71, "atoll: the node needs 272 open files at a time and 250 are allowed", "Hn 272"
    )
    second = swarm.start("coordinator", "start", swarm.home, through=at_most(303))
    second.ends_with(71, "the coordinator needs 304 open files", "303 are allowed")
    third = swarm.start("coordinator", "start", swarm.home, "--no-dashboard", through=at_most(175))
    third.ends_with(71, "the coordinator needs 176 open files", "175 are allowed")


async def test_a_crowd_leaves_a_coordinator_files_and_takes_no_node_from_it(
    tmp_path: Path,
) -> None:
    home = new_home(tmp_path / "home")
    coordinator = Running("coordinator", "start", home.directory, through=at_most(LIMIT))
    try:
        coordinator.says("coordinator ready")
        ready = re.search(r"control 127\.0\.0\.1:(\d+)", coordinator.log)
        assert ready is not None
        async with two_nodes(home) as (a, b):
            plans = [(await node.next("plan")).plan for node in (a, b)]
            with ExitStack() as crowd:
                for _ in range(CROWD):
                    stranger = crowd.enter_context(socket.socket())
                    stranger.setblocking(False)
                    stranger.connect_ex(("127.0.0.1", int(ready[1])))
                process_id = coordinator.process.pid
                most = OWN_OPEN_FILES + sum(most_connections(LIMIT - OWN_OPEN_FILES))
                for node in (a, b):
                    await node.trained(1)
                    await node.reduced(plans[0])
                for node in (a, b):
                    await node.held(plans[0])
                commit = (await a.next("commit")).commit
                assert [outcome.digest for outcome in commit.slices] == [result(0), result(1)]
                assert num_open_files(process_id) <= most
                until(lambda: "connections were ended" in coordinator.log, "an end of the crowd")
                await b.close()
                b.connect()
                status = await b.status.GetStatus(status_pb2.GetStatusRequest())
                assert status.run.open_round == 1
                assert num_open_files(process_id) <= most
        coordinator.process.send_signal(signal.SIGTERM)
        assert coordinator.process.wait(30) == 0
        assert "Traceback" not in coordinator.log, coordinator.log
    finally:
        coordinator.clean_up()
