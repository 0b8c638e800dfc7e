"""Real processes in a network lab: two nodes that only dial out, and a helper that reduces for them."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.network.lab import NetworkLab
from lab.network.links import Link
from tests.integration.lab_swarm import COORDINATOR, asked, swarm_in
from tests.integration.typed_commands import Running, Swarm, atoll, refused
from tests.tiny_runs import tiny_text

ROUNDS = 3
RUN = tiny_text(
    run={"name": "behind-nat", "rounds": ROUNDS, "min_nodes": 2},
    inner={"steps": 1_000_000},  # rounds end at their deadline, so the helper is killed within one
    deadlines={"train": 2, "contribute": 8, "commit": 14, "lease": 10},
    evaluation={"every_rounds": ROUNDS},
)

HELPER = "helper"
NODES = ("one", "two")
ACCESS = Link(up_bits_per_second=20e6, down_bits_per_second=100e6, delay_seconds=0.02)

pytestmark = pytest.mark.usefixtures("may_make_network_labs")


@pytest.fixture
def lab() -> Iterator[NetworkLab]:
    with NetworkLab(dict.fromkeys((COORDINATOR, HELPER, *NODES), ACCESS)) as lab:
        for name in NODES:
            lab.firewall(name)
        yield lab


@pytest.fixture
def swarm(lab: NetworkLab, tmp_path: Path) -> Iterator[Swarm]:
    with swarm_in(lab, tmp_path / "swarm", RUN) as swarm:
        yield swarm


def start_helper(lab: NetworkLab, swarm: Swarm) -> Running:
    with lab.inside(HELPER):
        return swarm.start("helper", "start", "--dir", swarm.folder / HELPER)


def begun_with_a_helper(lab: NetworkLab, swarm: Swarm) -> Running:
    """The helper is here before the nodes, and the first round is open."""
    with lab.inside(COORDINATOR):
        invite = swarm.invite("--uses", str(len(NODES)))
        vouched = swarm.invite("--role", "helper")
    with lab.inside(HELPER):
        swarm.join(HELPER, vouched)
    helper = start_helper(lab, swarm)
    helper.says("attached")
    for name in NODES:
        with lab.inside(name):
            swarm.join(name, invite)
            swarm.start_node(name)
    swarm.coordinator.says("round opened")
    return helper


def test_nodes_that_nobody_can_dial_train_by_a_helper_which_may_be_killed_in_a_round(
    lab: NetworkLab, swarm: Swarm
) -> None:
    with lab.inside(COORDINATOR):
        invite = swarm.invite("--uses", str(len(NODES)))
        vouched = swarm.invite("--role", "helper")
    with lab.inside(HELPER):
        home = swarm.join(HELPER, vouched)
        refused(atoll("node", "start", "--dir", home), 77, "is a helper's folder, not a node's")
    helper = start_helper(lab, swarm)
    helper.says("attached")
    running = {}
    for name in NODES:
        with lab.inside(name):
            swarm.join(name, invite)
            running[name] = swarm.start_node(name)
    swarm.coordinator.says("round opened", times=2)
    assert not helper.has_torch() and not helper.ranks()
    helper.kill()  # it reduces all of round 2
    again = start_helper(lab, swarm)
    for node in running.values():
        node.ends(set())
        assert "run finished" in node.log
    again.ends(set())

    assert not any(lab.traffic(a, b).delivered_packets for a in NODES for b in NODES if a != b)
    run, rounds, nodes = (asked(lab, swarm, what) for what in ("status", "rounds", "nodes"))
    run = run["run"]
    assert (run["phase"], run["committed_round"], run["digests_agree"]) == (
        "finished",
        ROUNDS,
        True,
    )
    by_round = {closed["round"]: closed for closed in rounds}
    for number in (1, 3):  # nothing of round 2 is lost: it is in the next
        closed = by_round[number]
        assert closed["num_committed_slices"] == closed["num_slices"], number
        assert closed["num_contributors"] == closed["num_participants"] == len(NODES), number
    by_name = {node["node_name"]: node for node in nodes}
    assert by_name[HELPER]["is_helper"] and by_name[HELPER]["committed_tokens"] == 0
    assert sum(node["committed_tokens"] for node in nodes) == run["token_clock"]


@pytest.mark.nightly
def test_a_helper_that_is_stopped_in_its_first_seconds_reduces_its_round_before_it_leaves(
    lab: NetworkLab, swarm: Swarm
) -> None:
    """Nobody knows by then that nodes do not reach each other, and none of them may take over."""
    helper = begun_with_a_helper(lab, swarm)
    assert "do not reach each other" not in swarm.coordinator.log
    helper.process.send_signal(signal.SIGTERM)
    helper.ends(set())
    assert "leaving with the round in flight" in helper.log
    assert "slice taken over" not in swarm.coordinator.log
    first = asked(lab, swarm, "rounds")[-1]
    assert (first["round"], first["num_contributors"]) == (1, len(NODES))
    assert first["num_committed_slices"] == first["num_slices"]


@pytest.mark.nightly
def test_a_helper_that_is_killed_in_its_first_seconds_and_started_again_reduces_the_same_round(
    lab: NetworkLab, tmp_path: Path
) -> None:
    text = RUN.replace("contribute = 8", "contribute = 60").replace("commit = 14", "commit = 90")
    assert text != RUN
    with swarm_in(lab, tmp_path / "swarm", text) as swarm:
        helper = begun_with_a_helper(lab, swarm)
        helper.kill()
        swarm.coordinator.says("slice taken over")  # by a node that the others do not reach
        start_helper(lab, swarm).says("attached")
        swarm.coordinator.says("round committed")
        first = asked(lab, swarm, "rounds")[-1]
        assert (first["round"], first["num_contributors"]) == (1, len(NODES))
        assert first["num_committed_slices"] == first["num_slices"]
