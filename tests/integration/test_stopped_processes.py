"""Processes that stand still for longer than the lease, as on a laptop whose lid is closed."""

import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

from protocol.terminal.query import StatusLink
from protocol.v1 import status_pb2
from tests.integration.typed_commands import Swarm
from tests.tiny_runs import tiny_text

ROUNDS = 14
LEASE_SECONDS = 3
SLEEP_SECONDS = 8.0
"""Longer than the lease, and than what a coordinator may be stopped without anybody's notice."""

RUN = tiny_text(
    run={"name": "stopped", "rounds": ROUNDS, "min_nodes": 1},
    inner={"steps": 1_000_000},  # rounds end at their deadline
    deadlines={"train": 2, "contribute": 8, "commit": 12, "lease": LEASE_SECONDS},
    evaluation={"every_rounds": 1000},
)


def signal_all(process_ids: Iterable[int], number: signal.Signals) -> None:
    for process_id in process_ids:
        os.kill(process_id, number)


@contextmanager
def stopped(process_ids: set[int]) -> Iterator[None]:
    signal_all(process_ids, signal.SIGSTOP)
    try:
        yield
    finally:
        signal_all(process_ids, signal.SIGCONT)


def contributors_by_round(swarm: Swarm) -> dict[int, int]:
    with StatusLink(swarm.home) as link:
        return {closed.round: closed.num_contributors for closed in link.rounds(100).rounds}


def goes_on(swarm: Swarm, *, num_rounds: int) -> None:
    opened = swarm.coordinator.log.count("round opened")
    swarm.coordinator.says("round opened", times=opened + num_rounds)


def assert_all_agree(swarm: Swarm) -> None:
    run = swarm.status().run
    assert (run.committed_round, run.digests_agree) == (ROUNDS, True)
    for node in swarm.nodes().values():
        assert node.state == status_pb2.NODE_STATE_LEFT
        assert node.heartbeat.outer_round == ROUNDS
        assert node.heartbeat.outer_digest == run.outer_digest


@pytest.mark.nightly
def test_who_stood_still_counts_again_and_a_coordinator_that_did_gives_up_nobody(
    swarm: Swarm,
) -> None:
    invite = swarm.invite("--uses", "2")
    for name in ("awake", "asleep"):
        swarm.join(name, invite)
    awake, asleep = swarm.start_node("awake"), swarm.start_node("asleep")
    swarm.does("training", "awake", "asleep")
    with stopped({swarm.coordinator.process.pid}):
        time.sleep(SLEEP_SECONDS)
    swarm.coordinator.says("heard nobody")
    goes_on(swarm, num_rounds=2)
    assert "node lost" not in swarm.coordinator.log, swarm.coordinator.log

    with stopped(asleep.processes()):
        swarm.coordinator.says("node lost")
        goes_on(swarm, num_rounds=1)
    woken_after = swarm.status().run.committed_round
    for node in (awake, asleep):
        node.ends(node.shared_memory())
    counted = [number for number, nodes in contributors_by_round(swarm).items() if nodes == 2]
    assert max(counted) > woken_after, swarm.coordinator.log
    assert "coordinator away" in asleep.log  # its session had ended meanwhile
    assert "refetch" not in asleep.log, asleep.log  # it holds what the others hold, or caught up
    assert_all_agree(swarm)
