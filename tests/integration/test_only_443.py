"""Real processes in a network lab: an office that lets out TCP 443 alone, or only through its HTTP proxy."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from lab.network.lab import NetworkLab
from lab.network.links import Link
from tests.integration import connect_proxy
from tests.integration.lab_swarm import COORDINATOR, asked, swarm_in
from tests.integration.typed_commands import Running, Swarm, atoll, done, refused, until
from tests.tiny_runs import tiny_text

ROUNDS = 3
RUN = tiny_text(
    run={"name": "office", "rounds": ROUNDS, "min_nodes": 2},
    inner={"steps": 4},
    deadlines={"train": 10, "contribute": 20, "commit": 40},
    evaluation={"every_rounds": ROUNDS},
)
HELPER, PROXY, OFFICES = "helper", "proxy", ("one", "two")
ACCESS = Link(up_bits_per_second=50e6, down_bits_per_second=100e6, delay_seconds=0.01)
WEB_PORT, PROXY_PORT, LOGIN = 443, 3128, "me:se:cret/"

pytestmark = pytest.mark.usefixtures("may_make_network_labs")


@pytest.fixture
def lab() -> Iterator[NetworkLab]:
    with NetworkLab(dict.fromkeys((COORDINATOR, HELPER, PROXY, *OFFICES), ACCESS)) as lab:
        yield lab


@pytest.fixture
def swarm(lab: NetworkLab, tmp_path: Path) -> Iterator[Swarm]:
    with swarm_in(lab, tmp_path / "swarm", RUN) as swarm:
        with lab.inside(COORDINATOR):
            swarm.coordinator.process.terminate()
            swarm.coordinator.process.wait()
            swarm.coordinator = swarm.begin_coordinator("--one-port", str(WEB_PORT))
            swarm.coordinator.says("coordinator ready")
        yield swarm


def started_helper(lab: NetworkLab, swarm: Swarm) -> Running:
    with lab.inside(COORDINATOR):
        invite = swarm.invite("--role", "helper")
    with lab.inside(HELPER):
        home = swarm.join(HELPER, invite)
        helper = swarm.start("helper", "start", "--dir", home, "--port", str(WEB_PORT))
    helper.says("attached")
    return helper


def finished(lab: NetworkLab, swarm: Swarm, running: dict[str, Running]) -> None:
    """All rounds commit whole, with what both nodes have trained."""
    for node in running.values():
        node.ends(set())
        assert "run finished" in node.log
    run, rounds = asked(lab, swarm, "status")["run"], asked(lab, swarm, "rounds")
    assert (run["phase"], run["committed_round"], run["digests_agree"]) == (
        "finished",
        ROUNDS,
        True,
    )
    for closed in rounds:
        assert closed["num_committed_slices"] == closed["num_slices"]
        assert closed["num_contributors"] == closed["num_participants"] == len(OFFICES)


@pytest.mark.nightly
def test_two_offices_that_let_out_443_alone_train_by_a_coordinator_and_a_helper_there(
    lab: NetworkLab, swarm: Swarm
) -> None:
    for name in OFFICES:
        lab.firewall(name, lets_out=WEB_PORT)
    helper = started_helper(lab, swarm)
    with lab.inside(COORDINATOR):
        invite = swarm.invite("--uses", str(len(OFFICES)))
    running = {}
    for name in OFFICES:
        with lab.inside(name):
            swarm.join(name, invite)
            running[name] = swarm.start_node(name)
    finished(lab, swarm, running)
    helper.ends(set())
    assert lab.traffic(*OFFICES).delivered_packets == 0


@pytest.mark.nightly
def test_an_office_with_a_proxy_joins_trains_and_asks_through_it(
    lab: NetworkLab, swarm: Swarm
) -> None:
    behind, other = OFFICES
    for host in (COORDINATOR, HELPER, other):
        lab.cut(behind, host)
    lab.firewall(other, lets_out=WEB_PORT)
    helper = started_helper(lab, swarm)
    with lab.inside(COORDINATOR):
        invite = swarm.invite("--uses", str(len(OFFICES)))
    program = [sys.executable, connect_proxy.__file__, lab.address(PROXY), str(PROXY_PORT)]
    with ExitStack() as stack:
        log = stack.enter_context((swarm.folder / "proxy.log").open("w+b"))
        lab.popen(PROXY, [*program, str(WEB_PORT), LOGIN], stdout=log, stderr=subprocess.STDOUT)
        running = {}
        with lab.inside(behind):
            at = f"{lab.address(PROXY)}:{PROXY_PORT}"
            home = swarm.folder / behind
            join = ("join", invite, "--dir", home, "--name", behind)
            environment = {"https_proxy": f"http://{at}"}
            refused(
                *(atoll(*join, **environment), 69, "no coordinator answers"),
                *("only if it is told to", f"--proxy {at}"),
            )
            refused(
                *(atoll(*join, "--proxy", f"http://me:wrong@{at}"), 69, "407 Proxy Authentication"),
                "--one-port 443",
            )
            refused(atoll(*join, "--proxy", "https://proxy.example"), 64, "spoken to by http")
            done(atoll(*join, "--proxy", "http://me:se%3Acret%2F@" + at))
            assert (home / "link.toml").stat().st_mode & 0o777 == 0o600
            assert "office" in done(atoll("status", "--dir", home))
            running[behind] = swarm.start_node(behind)
            running[behind].says("is dialled through its proxy")
            told = f"{behind} reaches {HELPER} by proxy"
            until(
                lambda: told in " ".join(done(atoll("status", "--dir", home)).split()),
                "the way to the helper",
            )
        with lab.inside(other):
            swarm.join(other, invite)
            running[other] = swarm.start_node(other)
        finished(lab, swarm, running)
        helper.ends(set())
        log.seek(0)
        asked_for = set(log.read().decode().splitlines())
        for host in (COORDINATOR, HELPER):
            assert (
                f"CONNECT {lab.address(host)}:{WEB_PORT}: 200 Connection established" in asked_for
            )
    assert lab.traffic(behind, HELPER).delivered_packets == 0
