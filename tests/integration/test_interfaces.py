"""Real processes on hosts with two interfaces: peers are told of the one that leads to them."""

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from lab.network.lab import NetworkLab
from lab.network.links import Link
from lab.network.switch import _ip as ip
from node.kept import kept_model
from tests.fake_metadata import AWS_ACTION, in_seconds, serving
from tests.integration.lab_swarm import COORDINATOR, asked, started, swarm_in
from tests.integration.typed_commands import Swarm, atoll, refused
from tests.tiny_runs import tiny_text

ROUNDS = 3
RUN = tiny_text(
    run={"name": "wires", "rounds": ROUNDS, "min_nodes": 2},
    deadlines={"train": 20, "contribute": 30, "commit": 40},
    evaluation={"every_rounds": ROUNDS},
)
WIRED = {"one": "10.77.0.1", "two": "10.77.0.2"}
"""The addresses of a wire between the two, beside the network in which their coordinator is."""
WIRED6 = {"one": "fd77::1", "two": "fd77::2"}
LASTING_RUN = tiny_text(
    run={"name": "lasting", "rounds": 1000, "min_nodes": 2},
    inner={"steps": 1_000_000},
    deadlines={"train": 2, "contribute": 8, "commit": 14, "lease": 5},
    evaluation={"every_rounds": 1000},
)

pytestmark = pytest.mark.usefixtures("may_make_network_labs")


@pytest.fixture
def lab() -> Iterator[NetworkLab]:
    with NetworkLab(dict.fromkeys((COORDINATOR, *WIRED), Link())) as lab:
        wired(lab, {host: f"{address}/24" for host, address in WIRED.items()})
        yield lab


@pytest.fixture
def swarm(lab: NetworkLab, tmp_path: Path) -> Iterator[Swarm]:
    with swarm_in(lab, tmp_path / "swarm", RUN) as swarm:
        yield swarm


def wired(lab: NetworkLab, addresses: dict[str, str]) -> None:
    """Puts a wire between the two hosts."""
    with lab.inside("one"):
        ip(f"link add wire type veth peer name wire netns {lab.namespace('two')}")
    for host, address in addresses.items():
        with lab.inside(host):
            ip(f"addr add {address} dev wire", "link set wire up")


def sent_bytes(lab: NetworkLab, host: str) -> dict[str, int]:
    """By interface."""
    with lab.inside(host):
        lines = Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]
    return {line.split(":")[0].strip(): int(line.split(":")[1].split()[8]) for line in lines}


def test_by_ipv6_alone_and_a_wire_a_node_that_was_cut_off_comes_back_and_a_spot_machine_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What longer tests hold one by one, by day in one run; and one node counts what its interfaces sent."""
    hosts = (COORDINATOR, *WIRED)
    with ExitStack() as stack:
        lab = NetworkLab(dict.fromkeys(hosts, Link()), families=dict.fromkeys(hosts, "6"))
        stack.enter_context(lab)
        wired(lab, {host: f"{address}/64" for host, address in WIRED6.items()})
        swarm = stack.enter_context(swarm_in(lab, tmp_path / "swarm", LASTING_RUN))
        with lab.inside("two"):
            metadata = stack.enter_context(serving())
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata.address)
        with lab.inside(COORDINATOR):
            invite = swarm.invite("--uses", "2")
        running, before = {}, {}
        for name in WIRED6:
            with lab.inside(name):
                home = swarm.join(name, invite)
                before[name] = sent_bytes(lab, name)
                is_clouds = f'cloud = "{"aws" if name == "two" else "off"}"'
                settings = (home / "node.toml").read_text()
                (home / "node.toml").write_text(settings.replace('cloud = "auto"', is_clouds))
                running[name] = swarm.start_node(name, "--interface", "wire")
        running["two"].says("applied")
        lab.isolate("two")
        swarm.coordinator.says("node lost")
        lab.mend("two")
        swarm.coordinator.says("node attached", times=3)
        num_applied = running["two"].log.count("applied")
        running["two"].says("applied", times=num_applied + 1)
        action = {"action": "terminate", "time": in_seconds(110)}
        metadata.says[AWS_ACTION] = json.dumps(action)
        running["two"].ends(set())
        assert "AWS is about to terminate this spot machine" in running["two"].log
        running["one"].stop(signal.SIGTERM)

        nodes = {node["node_name"]: node for node in asked(lab, swarm, "nodes")}
        told = {name: nodes[name]["address"]["multiaddrs"] for name in WIRED6}
        assert all(
            [each.split("/")[2] for each in told[name]] == [address]
            for name, address in WIRED6.items()
        ), told
        assert not any(
            lab.traffic(*way).delivered_bytes for way in (("one", "two"), ("two", "one"))
        )
        counted = sum(int(kind["sent_bytes"]) for kind in nodes["one"]["heartbeat"]["wire"])
        after = sent_bytes(lab, "one")
        seen = {name: after[name] - before["one"][name] for name in ("tun0", "wire")}
        assert counted == pytest.approx(sum(seen.values()), rel=0.2), seen
        left = kept_model(swarm.folder / "two")
        rounds = {closed["round"]: closed for closed in asked(lab, swarm, "rounds")}
        assert rounds[left.round]["outer_digest"] == left.outer_digest.hex()
        assert max(n for n, one in rounds.items() if one["num_contributors"] == 2) == left.round


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
