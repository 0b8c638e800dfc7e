"""Real processes in a network lab: between two of three nodes large packets vanish, and nobody is told."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.network.lab import NetworkLab
from lab.network.links import Link
from tests.integration.lab_swarm import COORDINATOR, asked, said, started, swarm_in, until
from tests.integration.typed_commands import Swarm
from tests.tiny_runs import tiny_text

ONE, OTHER, BETWEEN = NODES = ("one", "other", "between")
RUN = tiny_text(
    run={"name": "narrow", "rounds": 1000, "min_nodes": 3},
    inner={"steps": 1_000_000},  # rounds end at their deadline
    deadlines={"train": 2, "contribute": 12, "commit": 18},
)
ACCESS = Link(up_bits_per_second=20e6, down_bits_per_second=100e6, delay_seconds=0.02)
LEAST_MTU = 1280

pytestmark = pytest.mark.usefixtures("may_make_network_labs")


@pytest.fixture
def lab() -> Iterator[NetworkLab]:
    with NetworkLab(dict.fromkeys((COORDINATOR, *NODES), ACCESS)) as lab:
        yield lab.narrow(ONE, OTHER, LEAST_MTU)


@pytest.fixture
def swarm(lab: NetworkLab, tmp_path: Path) -> Iterator[Swarm]:
    with swarm_in(lab, tmp_path / "swarm", RUN) as swarm:
        yield swarm


def whole_rounds(lab: NetworkLab, swarm: Swarm, *, after: int) -> list[dict[str, Any]]:
    return [
        closed
        for closed in asked(lab, swarm, "rounds")
        if closed["round"] > after
        and closed["num_contributors"] == closed["num_participants"] == len(NODES)
        and closed["num_committed_slices"] == closed["num_slices"]
    ]


@pytest.mark.nightly
def test_a_path_on_which_large_packets_vanish_is_named_and_the_rounds_go_on_without_it(
    lab: NetworkLab, swarm: Swarm
) -> None:
    running = started(lab, swarm, NODES)
    words = "between one and other only small packets get through"
    until(lambda: words in said(lab, swarm, "nodes"))
    assert "mtu 1280" in said(lab, swarm, "status")
    assert "other only small packets get through" in said(lab, swarm, "nodes", "show", ONE)
    assert "between direct" in said(lab, swarm, "nodes", "show", ONE)
    logs = running[ONE].log + running[OTHER].log
    assert "only small packets get through to a peer" in logs and "mtu 1280" in logs
    assert "only small packets get through" not in running[BETWEEN].log
    assert lab.traffic(ONE, OTHER).lost_packets + lab.traffic(OTHER, ONE).lost_packets > 0
    last = asked(lab, swarm, "status")["run"]["committed_round"]
    until(lambda: whole_rounds(lab, swarm, after=last))
    assert asked(lab, swarm, "status")["run"]["digests_agree"]
