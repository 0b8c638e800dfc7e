"""Real processes on hosts with two interfaces: peers are told of the one that leads to them."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab_swarm import COORDINATOR, asked, started, swarm_in
from typed_commands import Swarm, atoll, refused

from lab.network.lab import NetworkLab
from lab.network.links import Link
from lab.network.switch import _ip as ip
from tests.tiny_runs import tiny_text

ROUNDS = 3
RUN = tiny_text(
    run={"name": "wires", "rounds": ROUNDS, "min_nodes": 2},
    deadlines={"train": 20, "contribute": 30, "commit": 40},
    evaluation={"every_rounds": ROUNDS},
)
WIRED = {"one": "10.77.0.1", "two": "10.77.0.2"}
"""The addresses of a wire between the two, beside the network in which their coordinator is."""

pytestmark = pytest.mark.usefixtures("may_make_network_labs")


@pytest.fixture
def lab() -> Iterator[NetworkLab]:
    with NetworkLab(dict.fromkeys((COORDINATOR, *WIRED), Link())) as lab:
        with lab.inside("one"):
            ip(f"link add wire type veth peer name wire netns {lab.namespace('two')}")
        for host, address in WIRED.items():
            with lab.inside(host):
                ip(f"addr add {address}/24 dev wire", "link set wire up")
        yield lab


@pytest.fixture
def swarm(lab: NetworkLab, tmp_path: Path) -> Iterator[Swarm]:
    with swarm_in(lab, tmp_path / "swarm", RUN) as swarm:
        yield swarm


@pytest.mark.nightly
def test_peers_are_told_of_the_named_interface_and_bodies_take_it(
    lab: NetworkLab, swarm: Swarm
) -> None:
    running = started(lab, swarm, WIRED, options=("--interface", "wire"))
    for node in running.values():
        node.says("attached")
    told = {node["node_name"]: node["address"]["multiaddrs"] for node in asked(lab, swarm, "nodes")}
    for name, address in WIRED.items():
        assert [each.split("/")[2] for each in told[name]] == [address]
    for node in running.values():
        node.ends(set())
        assert "run finished" in node.log
    for way in (("one", "two"), ("two", "one")):
        assert lab.traffic(*way).delivered_bytes == 0


@pytest.mark.nightly
def test_the_address_by_which_the_coordinator_is_reached_comes_first_and_the_doctor_says_so(
    lab: NetworkLab, swarm: Swarm
) -> None:
    running = started(lab, swarm, WIRED)
    running["one"].says("attached")
    (one,) = (node for node in asked(lab, swarm, "nodes") if node["node_name"] == "one")
    hosts = [each.split("/")[2] for each in one["address"]["multiaddrs"]]
    assert hosts == [lab.address("one"), WIRED["one"]]
    home = swarm.folder / "one"
    with lab.inside("one"):
        findings = json.loads(atoll("node", "doctor", "--json", "--dir", home).out)
        (found,) = (each for each in findings if each["about"] == "addresses")
        assert found["what"].startswith(f"peers are told {lab.address('one')} of ")
        assert f"by which the coordinator is reached; {WIRED['one']} of wire" in found["what"]
        start = ("node", "start", "--dir", home)
        refused(atoll(*start, "--interface", "eth9"), 71, "'eth9'", f"wire ({WIRED['one']})")
        both = ("--interface", "wire", "--announce", "home.example.org")
        refused(atoll(*start, *both), 78, "'wire'", "home.example.org")
    for node in running.values():
        node.ends(set())
