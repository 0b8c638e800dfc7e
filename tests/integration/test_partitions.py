"""Swarms of real processes, each in a host of the network lab, some of which never reach each other."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lab.network.lab import NetworkLab
from lab.network.links import Link
from node.kept import kept_model
from tests.integration.lab_swarm import COORDINATOR, asked, started, swarm_in
from tests.integration.typed_commands import Swarm
from tests.tiny_runs import tiny_text

ROUNDS = 7
RUN = tiny_text(
    run={"name": "parted", "rounds": ROUNDS, "min_nodes": 3},
    inner={"steps": 4},
    # A contribution that cannot get through is tried until its deadline.
    deadlines={"train": 5, "contribute": 10, "commit": 40},
    evaluation={"every_rounds": ROUNDS},
)

NODES = ("one", "other", "between")
ACCESS = Link(up_bits_per_second=20e6, down_bits_per_second=100e6, delay_seconds=0.02)
BAD = Link(up_bits_per_second=10e6, down_bits_per_second=50e6, delay_seconds=0.15, loss=0.01)

pytestmark = pytest.mark.usefixtures("may_make_network_labs")


@pytest.fixture
def lab() -> Iterator[NetworkLab]:
    with NetworkLab(dict.fromkeys((COORDINATOR, *NODES), ACCESS)) as lab:
        yield lab


@pytest.fixture
def swarm(lab: NetworkLab, tmp_path: Path) -> Iterator[Swarm]:
    with swarm_in(lab, tmp_path / "swarm", RUN) as swarm:
        yield swarm


def hear_only_on_bad_links(lab: NetworkLab) -> None:
    """One hears the other, and is not heard; 300 ms from host to host, and every hundredth packet lost."""
    for name in NODES:
        lab.set_link(name, BAD)
    lab.cut("one", "other", one_way=True)


def firewall_both(lab: NetworkLab) -> None:
    lab.firewall("one").firewall("other")


@pytest.mark.nightly
@pytest.mark.parametrize("part", [hear_only_on_bad_links, firewall_both])
def test_a_run_finishes_though_two_nodes_never_reach_each_other(
    lab: NetworkLab, swarm: Swarm, part: Callable[[NetworkLab], None]
) -> None:
    part(lab)
    for node in started(lab, swarm, NODES).values():
        node.ends(set())
        assert "run finished" in node.log

    traffic = lab.traffic("one", "other")
    assert traffic.delivered_packets == 0
    assert traffic.dropped_packets > 0  # it was not for want of trying
    run, rounds, nodes = (asked(lab, swarm, what) for what in ("status", "rounds", "nodes"))
    run = run["run"]
    assert (run["phase"], run["committed_round"]) == ("finished", ROUNDS)
    # At first all reduce: what one reduced, the other has from the node between them, and what one
    # owes to the other's slice stays with it. Then they are known not to reach each other, and the
    # node between them reduces everything: nothing is missing any more.
    assert rounds[-1]["num_slices"] == rounds[-1]["num_committed_slices"] == len(NODES)
    assert rounds[0]["num_slices"] == rounds[0]["num_committed_slices"] == 1
    assert rounds[-1]["num_contributors"] < rounds[0]["num_contributors"] == len(NODES)
    by_name = {node["node_name"]: node for node in nodes}
    assert by_name["other"]["node_id"] in by_name["one"]["heartbeat"]["unreachable_ids"]
    assert not by_name["between"]["heartbeat"]["unreachable_ids"]
    assert run["digests_agree"] and run["outer_digest_round"] == ROUNDS
    models = [kept_model(swarm.folder / name) for name in NODES]
    assert {(model.round, model.outer_digest.hex()) for model in models} == {
        (ROUNDS, run["outer_digest"])
    }
    assert all(node["committed_tokens"] > 0 for node in nodes)


@pytest.mark.nightly
def test_a_node_that_falls_out_of_the_network_in_mid_run_is_missed_and_comes_back(
    lab: NetworkLab, swarm: Swarm
) -> None:
    running = started(lab, swarm, NODES)
    running["other"].says("applied", times=2)
    lab.isolate("other")
    swarm.coordinator.says("node lost")
    # The others are enough for a round no longer, and wait for it, as the run file wants.
    lab.mend("other")
    for node in running.values():
        node.ends(set())
        assert "run finished" in node.log
    run, rounds = asked(lab, swarm, "status")["run"], asked(lab, swarm, "rounds")
    assert (run["phase"], run["committed_round"]) == ("finished", ROUNDS)
    assert run["digests_agree"]
    assert rounds[0]["num_contributors"] == len(NODES)
    models = [kept_model(swarm.folder / name) for name in NODES]
    assert {model.outer_digest.hex() for model in models} == {run["outer_digest"]}
