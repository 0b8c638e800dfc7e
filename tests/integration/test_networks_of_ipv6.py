"""Real processes in a network lab that has IPv6 alone, or beside IPv4, and packets of 1,280 bytes."""

import json
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from lab.network.lab import NetworkLab
from lab.network.links import Link
from node.kept import kept_model
from tests.integration.lab_swarm import COORDINATOR, asked, started
from tests.integration.typed_commands import Swarm, atoll, done, refused
from tests.tiny_runs import tiny_text

ROUNDS = 3
RUN = tiny_text(
    run={"name": "sixes", "rounds": ROUNDS, "min_nodes": 2},
    deadlines={"train": 20, "contribute": 30, "commit": 40},
    evaluation={"every_rounds": ROUNDS},
)
NODES = ("one", "two")
LEAST_MTU = 1280
"""Of IPv6, and usual in tunnels and mobile networks."""

pytestmark = pytest.mark.usefixtures("may_make_network_labs")


def trained(lab: NetworkLab, folder: Path, *, host: str, invite_host: str = "") -> None:
    options = ("--advertise", invite_host) if invite_host else ()
    with ExitStack() as stack:
        with lab.inside(COORDINATOR):
            swarm = Swarm(folder, RUN, host=host, init_options=options)
        stack.callback(swarm.end)
        running = started(lab, swarm, NODES)
        for node in running.values():
            node.ends(set())
            assert "run finished" in node.log
        run = asked(lab, swarm, "status")["run"]
        assert (run["phase"], run["digests_agree"]) == ("finished", True)
        models = [kept_model(swarm.folder / name) for name in NODES]
        assert {model.outer_digest.hex() for model in models} == {run["outer_digest"]}


@pytest.mark.nightly
def test_nodes_of_both_kinds_of_address_and_of_one_reach_each_other_by_that(tmp_path: Path) -> None:
    families = {COORDINATOR: "46", "one": "46", "two": "6"}
    with NetworkLab(dict.fromkeys(families, Link()), families=families) as lab:
        trained(lab, tmp_path / "swarm", host="0.0.0.0", invite_host=lab.address6(COORDINATOR))
        for way in (NODES, NODES[::-1]):
            assert lab.traffic(*way).delivered_bytes > 10_000


def test_who_cannot_reach_a_coordinator_by_its_kind_of_address_or_size_of_packets_is_told_so(
    tmp_path: Path,
) -> None:
    families = {COORDINATOR: "6", "four": "4", "tunnel": "6"}
    links = dict.fromkeys(families, Link()) | {"tunnel": Link(largest_packet_bytes=LEAST_MTU)}
    with NetworkLab(links, families=families) as lab, ExitStack() as stack:
        with lab.inside(COORDINATOR):
            swarm = Swarm(tmp_path / "swarm", RUN, host=lab.address(COORDINATOR))
            stack.callback(swarm.end)
            invite = swarm.invite()
        home = tmp_path / "node"
        with lab.inside("four"):
            refused(
                atoll("join", invite, "--dir", home), 69, "Network is unreachable", "without IPv6"
            )
        with lab.inside("tunnel"):
            lost = atoll("join", invite, "--dir", home)
            refused(lost, 69, "larger packets get lost on the way", "mtu 1280")
            subprocess.run(["ip", "link", "set", "tun0", "mtu", str(LEAST_MTU)], check=True)
            done(atoll("join", invite, "--dir", home))
            public = ["ip", "addr", "add", "2600::5/128", "dev", "tun0"]
            subprocess.run(public, check=True)
            findings = json.loads(done(atoll("node", "doctor", "--json", "--dir", home)))
        said = {each["about"]: each["what"] for each in findings}
        assert "router" not in said  # there is none that translates IPv6
        assert "2600::5 is this machine's own, and IPv4 is not to be had here" in said["network"]


@pytest.mark.nightly
def test_a_swarm_trains_where_there_is_ipv6_alone_and_no_packet_is_larger_than_1280_bytes(
    tmp_path: Path,
) -> None:
    hosts = (COORDINATOR, *NODES)
    with NetworkLab(
        dict.fromkeys(hosts, Link()), families=dict.fromkeys(hosts, "6"), mtu=LEAST_MTU
    ) as lab:
        trained(lab, tmp_path / "swarm", host=lab.address(COORDINATOR))
        for way in (NODES, NODES[::-1]):
            assert lab.traffic(*way).delivered_bytes > 10_000
