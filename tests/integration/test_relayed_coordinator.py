"""Real processes in a network lab: a coordinator that nobody can dial, and the relay that carries it."""

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from lab_swarm import (
    COORDINATOR,
    RELAY,
    RELAY_PORT,
    asked,
    relayed_swarm,
    start_relay,
    started,
)
from typed_commands import atoll, done, refused

from coordinator.relay.line import LINE_FILE
from lab.network.lab import NetworkLab
from lab.network.links import Link
from node.kept import kept_model
from tests.tiny_runs import tiny_text

ROUNDS = 7
RUN = tiny_text(
    run={"name": "at-home", "rounds": ROUNDS, "min_nodes": 2},
    inner={"steps": 1_000_000},  # rounds end at their deadline
    deadlines={"train": 2, "contribute": 15, "commit": 30},
    evaluation={"every_rounds": ROUNDS},
)

NODES = ("one", "two")
ACCESS = Link(up_bits_per_second=20e6, down_bits_per_second=100e6, delay_seconds=0.02)

pytestmark = pytest.mark.usefixtures("may_make_network_labs")


@pytest.fixture
def lab() -> Iterator[NetworkLab]:
    with NetworkLab(dict.fromkeys((COORDINATOR, RELAY, *NODES), ACCESS)) as lab:
        lab.firewall(COORDINATOR)
        yield lab


@pytest.mark.nightly
def test_nodes_train_with_a_coordinator_that_only_dials_out_while_its_relay_dies_and_comes_back(
    lab: NetworkLab, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        relay = start_relay(lab, tmp_path / RELAY)
        stack.callback(relay.clean_up)
        line = (tmp_path / RELAY / LINE_FILE).read_text()
        assert f"--through {line.strip()}" in relay.log
        swarm = relayed_swarm(lab, tmp_path / "swarm", RUN, relay_folder=tmp_path / RELAY)
        stack.callback(swarm.end)
        relay.says("a coordinator is here")
        running = started(lab, swarm, NODES)

        for node in running.values():
            node.says("attached")
        swarm.coordinator.says("round opened", times=2)
        relay.process.send_signal(signal.SIGKILL)
        relay.process.wait()
        swarm.coordinator.says("nodes cannot come through the relay")
        with lab.inside("one"):
            refused(
                atoll("status", "--dir", swarm.folder / "one"),
                69,
                f"no coordinator answers at {lab.address(RELAY)}",
            )
        again = start_relay(lab, tmp_path / RELAY)
        stack.callback(again.clean_up)
        assert line.strip() not in again.log, "it is printed once"
        swarm.coordinator.says("round opened", times=3)
        swarm.coordinator.process.send_signal(signal.SIGKILL)
        swarm.coordinator.process.wait()
        with lab.inside(COORDINATOR):
            swarm.start_coordinator()
        for name in NODES:
            with lab.inside(name):
                assert f"through relay {lab.address(RELAY)}:{RELAY_PORT}" in done(
                    atoll("status", "--dir", swarm.folder / name)
                )
        swarm.coordinator.says("round opened", times=2)
        lab.move(COORDINATOR)  # a laptop changes networks; nobody tells the relay
        for node in running.values():
            node.ends(set())
            assert "run finished" in node.log
        again.stop(signal.SIGTERM)

        run, rounds = asked(lab, swarm, "status")["run"], asked(lab, swarm, "rounds")
        assert (run["phase"], run["digests_agree"]) == ("finished", True)
        assert [each["round"] for each in rounds] == list(range(ROUNDS, 0, -1))
        for each in rounds:
            assert each["num_committed_slices"] == each["num_slices"], rounds
            assert each["num_participants"] == len(NODES), rounds
        models = [kept_model(swarm.folder / name) for name in NODES]
        assert {model.outer_digest.hex() for model in models} == {run["outer_digest"]}
        assert not any(
            lab.traffic(*way).delivered_packets
            for name in NODES
            for way in ((COORDINATOR, name), (name, COORDINATOR))
        )
