"""Real processes in a network lab: two nodes at home, each behind a router, and nobody opens a port."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from lab.network.lab import NetworkLab
from lab.network.links import Link
from tests.integration.lab_swarm import COORDINATOR, asked, started
from tests.integration.typed_commands import Swarm
from tests.tiny_runs import tiny_text

FORWARDS, STRICT = "forwards", "strict"
ROUNDS = 5
RUN = tiny_text(
    run={"name": "at-home", "rounds": ROUNDS, "min_nodes": 2},
    inner={"steps": 1_000_000},  # rounds end at their deadline
    deadlines={"train": 2, "contribute": 8, "commit": 14},
    evaluation={"every_rounds": ROUNDS},
)
ACCESS = Link(up_bits_per_second=20e6, down_bits_per_second=100e6, delay_seconds=0.02)

pytestmark = pytest.mark.usefixtures("may_make_network_labs")


@pytest.fixture
def lab() -> Iterator[NetworkLab]:
    with NetworkLab(
        dict.fromkeys((COORDINATOR, FORWARDS, STRICT), ACCESS),
        routers={FORWARDS: ["port restricted"], STRICT: ["symmetric"]},
        mapping=[FORWARDS],
    ) as lab:
        yield lab


def test_a_router_that_forwards_a_port_when_it_is_asked_lets_two_nodes_at_home_train_together(
    lab: NetworkLab, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        with lab.inside(COORDINATOR):
            swarm = Swarm(tmp_path / "swarm", RUN, host=lab.address(COORDINATOR))
        stack.callback(swarm.end)
        running = started(lab, swarm, (FORWARDS, STRICT))
        for node in running.values():
            node.ends(set())
            assert "run finished" in node.log
        assert f"/ip4/{lab.address(FORWARDS)}/tcp/" in running[FORWARDS].log
        assert "addresses have changed" not in running[STRICT].log  # its router forwards nothing
        assert lab.num_mapped(FORWARDS) > 0
        assert lab.traffic(STRICT, FORWARDS).delivered_bytes > 10_000
        run, rounds = (asked(lab, swarm, what) for what in ("status", "rounds"))
        assert run["run"]["digests_agree"]
        last = max(rounds, key=lambda closed: closed["round"])
        assert last["num_contributors"] == last["num_participants"] == 2
        assert last["num_committed_slices"] == last["num_slices"]
