"""Real processes in a network lab: nodes at home whose routers map no port, and holes that they punch."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from lab.network.lab import NetworkLab
from lab.network.links import Link
from lab.network.router import NatKind
from tests.integration.lab_swarm import (
    COORDINATOR,
    RELAY,
    asked,
    relayed_swarm,
    said,
    start_relay,
    started,
    swarm_in,
    until,
)
from tests.integration.typed_commands import Running, Swarm
from tests.tiny_runs import tiny_text

ONE, OTHER, HELPER = "one", "other", "helper"
RUN = tiny_text(
    run={"name": "at-home", "rounds": 1000, "min_nodes": 2},
    inner={"steps": 1_000_000},  # rounds end at their deadline
    deadlines={"train": 2, "contribute": 8, "commit": 14},
)
ACCESS = Link(up_bits_per_second=20e6, down_bits_per_second=100e6, delay_seconds=0.02)

pytestmark = pytest.mark.usefixtures("may_make_network_labs")


@contextmanager
def at_home(
    one: NatKind, other: NatKind, folder: Path, *, has_helper: bool = False, has_ipv6: bool = False
) -> Iterator[tuple[NetworkLab, Swarm, dict[str, Running]]]:
    """Two nodes that train, each behind a router of its kind, and outside the coordinator, and a helper."""
    with (
        NetworkLab(
            dict.fromkeys((COORDINATOR, ONE, OTHER, HELPER), ACCESS),
            routers={ONE: [one], OTHER: [other]},
            families=dict.fromkeys((ONE, OTHER), "46") if has_ipv6 else None,
        ) as lab,
        swarm_in(lab, folder / "swarm", RUN) as swarm,
    ):
        if has_helper:
            _start_helper(lab, swarm)
        yield lab, swarm, started(lab, swarm, (ONE, OTHER))


def _start_helper(lab: NetworkLab, swarm: Swarm) -> None:
    with lab.inside(COORDINATOR):
        invite = swarm.invite("--role", "helper")
    with lab.inside(HELPER):
        swarm.join(HELPER, invite)
        swarm.start("helper", "start", "--dir", swarm.folder / HELPER).says("attached")


def punched(lab: NetworkLab, swarm: Swarm) -> dict[str, list[str]]:
    """By the names of nodes: whom they reach through a hole."""
    nodes = asked(lab, swarm, "nodes")
    names = {node["node_id"]: node["node_name"] for node in nodes}
    return {
        node["node_name"]: [names[o] for o in (node["heartbeat"] or {}).get("punched_ids", ())]
        for node in nodes
    }


def whole_rounds(lab: NetworkLab, swarm: Swarm, *, after: int) -> list[dict[str, Any]]:
    """Closed rounds that took the work of both nodes, whole."""
    return [
        closed
        for closed in asked(lab, swarm, "rounds")
        if closed["round"] > after
        and closed["num_contributors"] == 2
        and closed["num_committed_slices"] == closed["num_slices"]
    ]


@pytest.mark.nightly
def test_two_nodes_behind_port_restricted_routers_train_together_and_punch_again_what_is_forgotten(
    tmp_path: Path,
) -> None:
    with at_home("port restricted", "port restricted", tmp_path) as (lab, swarm, nodes):
        both = {ONE: [OTHER], OTHER: [ONE]}
        until(lambda: punched(lab, swarm) == both)
        assert "one and other reach each other, punched" in said(lab, swarm, "nodes")
        assert "other punched" in said(lab, swarm, "nodes", "show", ONE)
        last = max(closed["round"] for closed in until(lambda: whole_rounds(lab, swarm, after=0)))
        before = lab.traffic(ONE, OTHER).delivered_bytes
        until(lambda: len(whole_rounds(lab, swarm, after=last)) > 1)
        assert lab.traffic(ONE, OTHER).delivered_bytes > before  # past everybody else
        assert lab.traffic(OTHER, ONE).delivered_bytes > 10_000

        lab.forget_conversations(ONE)  # its router starts anew: packets come from another port
        nodes[ONE].says("puts it elsewhere: holes are punched anew")
        for node in nodes.values():
            node.says("a hole is punched", times=2)
        until(lambda: punched(lab, swarm) == both)
        last = asked(lab, swarm, "status")["run"]["committed_round"]
        until(lambda: whole_rounds(lab, swarm, after=last))
        assert asked(lab, swarm, "status")["run"]["digests_agree"]


@pytest.mark.nightly
def test_what_no_hole_can_be_punched_in_goes_through_a_helper_and_is_told(tmp_path: Path) -> None:
    with at_home("symmetric", "port restricted", tmp_path, has_helper=True) as (lab, swarm, nodes):
        through = "one, other reach each other through helper"
        until(lambda: through in said(lab, swarm, "nodes"))
        nodes[ONE].says("no hole was punched", times=2)  # after a while it is tried once more
        assert "other through helper" in said(lab, swarm, "nodes", "show", ONE)
        symmetric = {n["node_name"]: n["has_symmetric_router"] for n in asked(lab, swarm, "nodes")}
        assert symmetric == {ONE: True, OTHER: False, HELPER: False}
        last = asked(lab, swarm, "status")["run"]["committed_round"]
        until(lambda: whole_rounds(lab, swarm, after=last))  # the failed tries cost none
        assert punched(lab, swarm) == {ONE: [], OTHER: [], HELPER: []}
        assert lab.traffic(ONE, OTHER).delivered_packets == 0
        assert lab.traffic(ONE, HELPER).delivered_bytes > 10_000


@pytest.mark.nightly
def test_nodes_behind_symmetric_routers_train_together_where_both_have_ipv6(tmp_path: Path) -> None:
    with at_home("symmetric", "symmetric", tmp_path, has_ipv6=True) as (lab, swarm, _):
        until(lambda: punched(lab, swarm) == {ONE: [OTHER], OTHER: [ONE]})
        last = asked(lab, swarm, "status")["run"]["committed_round"]
        until(lambda: whole_rounds(lab, swarm, after=last))
        assert lab.traffic(ONE, OTHER).delivered_bytes > 10_000
        assert asked(lab, swarm, "status")["run"]["digests_agree"]


@pytest.mark.nightly
def test_nodes_at_home_punch_holes_though_the_coordinator_is_at_home_as_well(
    tmp_path: Path,
) -> None:
    with ExitStack() as stack:
        lab = stack.enter_context(
            NetworkLab(
                dict.fromkeys((COORDINATOR, RELAY, ONE, OTHER), ACCESS),
                routers={ONE: ["port restricted"], OTHER: ["port restricted"]},
            )
        )
        lab.firewall(COORDINATOR)
        stack.callback(start_relay(lab, tmp_path / RELAY).clean_up)
        swarm = relayed_swarm(lab, tmp_path / "swarm", RUN, relay_folder=tmp_path / RELAY)
        stack.callback(swarm.end)
        started(lab, swarm, (ONE, OTHER))
        until(lambda: punched(lab, swarm) == {ONE: [OTHER], OTHER: [ONE]})
        last = asked(lab, swarm, "status")["run"]["committed_round"]
        until(lambda: whole_rounds(lab, swarm, after=last))
        assert lab.traffic(ONE, OTHER).delivered_bytes > 10_000  # and nothing of it by the relay
        assert not lab.traffic(COORDINATOR, ONE).delivered_packets
