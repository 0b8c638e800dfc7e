"""Real processes in a network lab where nobody reaches everybody: members carry for each other, unread."""

import signal
from collections.abc import Iterator
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from lab.network.lab import NetworkLab
from lab.network.links import Link
from lab.network.router import NatKind
from tests.integration.lab_swarm import COORDINATOR, asked, started, swarm_in, until
from tests.integration.typed_commands import Swarm, atoll, done
from tests.tiny_runs import tiny_text

SYMMETRIC, STRICT, LEFT, RIGHT = NODES = ("symmetric", "strict", "left", "right")
RUN = tiny_text(
    run={"name": "apart", "rounds": 1000, "min_nodes": 3},
    inner={"steps": 1_000_000},  # rounds end at their deadline
    deadlines={"train": 2, "contribute": 8, "commit": 14, "lease": 10},
)
ACCESS = Link(up_bits_per_second=20e6, down_bits_per_second=100e6, delay_seconds=0.02)

pytestmark = pytest.mark.usefixtures("may_make_network_labs")


@pytest.fixture
def lab() -> Iterator[NetworkLab]:
    """Two homes whose routers let no hole be punched, and two open hosts whose providers do not peer."""
    with NetworkLab(
        dict.fromkeys((COORDINATOR, *NODES), ACCESS),
        routers={SYMMETRIC: ["symmetric"], STRICT: ["port restricted"]},
    ) as lab:
        yield lab.cut(LEFT, RIGHT)


@pytest.fixture
def swarm(lab: NetworkLab, tmp_path: Path) -> Iterator[Swarm]:
    with swarm_in(lab, tmp_path / "swarm", RUN) as swarm:
        yield swarm


def whole_rounds(lab: NetworkLab, swarm: Swarm, *, of: int, after: int = 0) -> list[dict[str, Any]]:
    """Closed rounds that took the work of so many nodes in each slice."""
    return [
        closed
        for closed in asked(lab, swarm, "rounds")
        if closed["round"] > after
        and closed["num_contributors"] == closed["num_participants"] == of
        and closed["num_committed_slices"] == closed["num_slices"]
    ]


def carriers(lab: NetworkLab, swarm: Swarm) -> dict[str, str]:
    """Who carries for a pair, by names, as its ends say."""
    nodes = asked(lab, swarm, "nodes")
    names = {node["node_id"]: node["node_name"] for node in nodes}
    return {
        " ".join(sorted((node["node_name"], names[told["node_id"]]))): names[told["through_id"]]
        for node in nodes
        for told in (node["heartbeat"] or {}).get("through", ())
    }


def carried_bytes(lab: NetworkLab, swarm: Swarm, name: str) -> int:
    (node,) = (n for n in asked(lab, swarm, "nodes") if n["node_name"] == name)
    return sum(
        int(count["sent_bytes"])
        for count in node["heartbeat"]["wire"]
        if count["kind"] == "carried"
    )


@pytest.mark.nightly
def test_where_nobody_reaches_everybody_members_carry_and_every_slice_has_everybodys_work(
    lab: NetworkLab, swarm: Swarm
) -> None:
    running = started(lab, swarm, NODES)
    until(lambda: len(whole_rounds(lab, swarm, of=4)) > 1)
    told = until(lambda: len(found := carriers(lab, swarm)) == 2 and found)
    assert told["strict symmetric"] in (LEFT, RIGHT)
    assert told["left right"] in (SYMMETRIC, STRICT)
    for one, other in ((SYMMETRIC, STRICT), (LEFT, RIGHT)):
        assert lab.traffic(one, other).delivered_packets == 0
        assert lab.traffic(other, one).delivered_packets == 0
    for name in told.values():
        assert until(partial(carried_bytes, lab, swarm, name)) > 10_000
    between = told["strict symmetric"]
    with lab.inside(COORDINATOR):
        shown = " ".join(done(atoll("nodes", "show", SYMMETRIC, "--dir", swarm.home)).split())
    assert f"strict through {between}" in shown

    last = asked(lab, swarm, "status")["run"]["committed_round"]
    running[between].process.send_signal(signal.SIGKILL)
    running[between].process.wait()
    until(lambda: asked(lab, swarm, "status")["run"]["committed_round"] > last)
    until(lambda: whole_rounds(lab, swarm, of=3, after=last))
    assert asked(lab, swarm, "status")["run"]["digests_agree"]


OPEN = "open"
HOMES: dict[str, NatKind] = {
    **dict.fromkeys(("far", "away"), "symmetric"),
    **dict.fromkeys(("near", "next", "last"), "port restricted"),
}
SIX = tiny_text(
    run={"name": "homes", "rounds": 1000, "min_nodes": 6},
    inner={"steps": 1_000_000},
    deadlines={"train": 4, "contribute": 16, "commit": 24, "lease": 15},
)


@pytest.mark.nightly
def test_two_symmetric_routers_three_port_restricted_ones_and_an_open_host_lose_nobodys_work(
    tmp_path: Path,
) -> None:
    """The open host alone reaches all, and weighs too little to reduce all."""
    names = (*HOMES, OPEN)
    routers = {name: [kind] for name, kind in HOMES.items()}
    with (
        NetworkLab(dict.fromkeys((COORDINATOR, *names), ACCESS), routers=routers) as lab,
        swarm_in(lab, tmp_path / "swarm", SIX) as swarm,
    ):
        started(lab, swarm, names)
        until(lambda: len(whole_rounds(lab, swarm, of=6)) > 2)
        told = carriers(lab, swarm)
        assert set(told.values()) == {OPEN}
        assert carried_bytes(lab, swarm, OPEN) > 100_000
        for one, other in combinations(HOMES, 2):
            is_punched = "symmetric" not in (HOMES[one], HOMES[other])
            assert (lab.traffic(one, other).delivered_bytes > 0) == is_punched
