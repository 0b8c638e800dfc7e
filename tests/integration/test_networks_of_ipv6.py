"""Real processes in a network lab that has IPv6 alone, or beside IPv4, and packets of 1,280 bytes."""

from contextlib import ExitStack
from pathlib import Path

import pytest
from lab_swarm import COORDINATOR, asked, started
from typed_commands import Swarm

from lab.network.lab import NetworkLab
from lab.network.links import Link
from node.kept import kept_model
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


def trained(lab: NetworkLab, folder: Path, *, host: str) -> None:
    with ExitStack() as stack:
        with lab.inside(COORDINATOR):
            swarm = Swarm(folder, RUN, host=host)
        stack.callback(swarm.end)
        running = started(lab, swarm, NODES)
        for node in running.values():
            node.ends(set())
            assert "run finished" in node.log
        run = asked(lab, swarm, "status")["run"]
        assert (run["phase"], run["digests_agree"]) == ("finished", True)
        models = [kept_model(swarm.folder / name) for name in NODES]
        assert {model.outer_digest.hex() for model in models} == {run["outer_digest"]}


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
