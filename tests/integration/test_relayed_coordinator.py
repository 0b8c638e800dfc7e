"""Real processes in a network lab: a coordinator that nobody can dial, and the relay that carries it."""

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from coordinator.relay.line import LINE_FILE
from lab.network.lab import NetworkLab
from lab.network.links import Link
from node.kept import kept_model
from tests.integration.lab_swarm import (
    COORDINATOR,
    RELAY,
    RELAY_PORT,
    asked,
    relayed_swarm,
    start_relay,
    started,
)
from tests.integration.typed_commands import atoll, done, refused
from tests.tiny_runs import tiny_text

ROUNDS = 7


def run_of(rounds: int, *, contribute: float = 15, commit: float = 30) -> str:
    return tiny_text(
        run={"name": "at-home", "rounds": rounds, "min_nodes": 2},
        inner={"steps": 1_000_000},  # rounds end at their deadline
        deadlines={"train": 2, "contribute": contribute, "commit": commit},
        evaluation={"every_rounds": rounds},
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
        swarm = relayed_swarm(
            lab, tmp_path / "swarm", run_of(ROUNDS), relay_folder=tmp_path / RELAY
        )
        stack.callback(swarm.end)
        relay.says("a coordinator is here")
        running = started(lab, swarm, NODES)

        for node in running.values():
            node.says("attached")
        swarm.coordinator.says("round opened", times=2)
        relay.kill()
        swarm.coordinator.says("nodes cannot come through the relay")
        with lab.inside("one"):
            typed = atoll("status", "--dir", swarm.folder / "one")
            assert (typed.code, typed.out) == (69, ""), typed
            assert f"no coordinator answers at {lab.address(RELAY)}" in typed.err
            assert "asking members at" in typed.err  # the other node may know more
        again = start_relay(lab, tmp_path / RELAY)
        stack.callback(again.clean_up)
        assert line.strip() not in again.log, "it is printed once"
        swarm.coordinator.says("round opened", times=3)
        swarm.coordinator.kill()
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


@pytest.mark.nightly
def test_one_command_on_a_small_server_is_relay_and_helper_and_the_relay_outlives_the_run(
    lab: NetworkLab, tmp_path: Path
) -> None:
    for name in NODES:
        lab.firewall(name)
    folder, text = tmp_path / RELAY, run_of(14, contribute=8, commit=12)
    with ExitStack() as stack:
        relay = start_relay(lab, folder)
        stack.callback(relay.clean_up)
        swarm = relayed_swarm(lab, tmp_path / "swarm", text, relay_folder=folder)
        stack.callback(swarm.end)
        relay.says("a coordinator is here")
        with lab.inside(COORDINATOR):
            vouched = swarm.invite("--role", "helper")
        with lab.inside(RELAY):
            home = swarm.join("helper", vouched)
            start = ("relay", "start", tmp_path / "other")
            refused(atoll(*start, "--helper", tmp_path), 66, "no swarm joined in")
        relay.stop(signal.SIGTERM)

        relay = start_relay(lab, folder, "--helper", home)
        stack.callback(relay.clean_up)
        swarm.coordinator.says("node attached")
        running = started(lab, swarm, NODES)
        with lab.inside("one"):
            node = ("--helper", swarm.folder / "one")
            refused(atoll(*start, *node), 64, "is a node's folder", "--role helper")
        swarm.coordinator.says("round opened")  # nobody knows yet whom nodes reach
        relay.process.send_signal(signal.SIGTERM)
        relay.ends(set())
        assert "node left" in swarm.coordinator.log  # it said goodbye through the relay
        assert "slice taken over" not in swarm.coordinator.log  # and had reduced its round
        assert "node lost" not in swarm.coordinator.log

        relay = start_relay(lab, folder, "--helper", home)
        stack.callback(relay.clean_up)
        for each in running.values():
            each.ends(set())
            assert "run finished" in each.log
        relay.says("the helper has ended")
        assert "contribution_received=" in relay.log  # by the helper, who reduces
        with lab.inside("one"):
            assert "finished" in done(atoll("status", "--dir", swarm.folder / "one"))
        relay.stop(signal.SIGTERM)
