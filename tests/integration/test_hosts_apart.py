"""An island of two hosts with a network between them, as people start it."""

import signal
from collections.abc import Callable, Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

import pytest

from lab.network.lab import NetworkLab
from lab.network.links import Link
from tests.integration.typed_commands import Running, atoll, done, until
from tests.tiny_runs import tiny_text

pytestmark = pytest.mark.usefixtures("may_make_network_labs")

RUN = tiny_text(
    run={"name": "apart", "rounds": 1000, "min_nodes": 1},  # more rounds than the test waits for
    # Rounds end at their deadline: none is over before the test has seen it.
    inner={"steps": 1_000_000},
    exchange={"overlap": "keep"},
    deadlines={"train": 2, "contribute": 20, "commit": 30},
    evaluation={"every_rounds": 1000},
)

LISTENS = "0A"  # the kernel's word for it

Start = Callable[..., Running]


@pytest.fixture
def lab() -> Iterator[NetworkLab]:
    with NetworkLab({"leads": Link(), "follows": Link()}) as lab:
        yield lab


@pytest.fixture
def start(lab: NetworkLab) -> Iterator[Start]:
    """Starts a command on a host."""
    started: list[Running] = []

    def start(host: str, *arguments: str | Path) -> Running:
        started.append(Running(*arguments, through=lab.command(host, [])))
        return started[-1]

    yield start
    for running in started:
        running.clean_up()


def listened_on(running: Running) -> set[IPv4Address | IPv6Address]:
    """Addresses with open ports on the host where a command runs."""
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{running.process.pid}/net/{table}").read_text().splitlines()[1:]
    ]
    return {address_of(row[1].partition(":")[0]) for row in rows if row[3] == LISTENS}


def address_of(digits: str) -> IPv4Address | IPv6Address:
    """As the kernel writes them: words of 32 bits, the last byte first."""
    words = (bytes.fromhex(digits[i : i + 8])[::-1] for i in range(0, len(digits), 8))
    address = ip_address(b"".join(words))
    return getattr(address, "ipv4_mapped", None) or address


@pytest.mark.timeout(900)  # a coordinator, a node of two hosts, and one of them again
@pytest.mark.nightly
def test_hosts_with_a_network_between_them_train_one_model_and_one_may_come_back(
    lab: NetworkLab, start: Start, tmp_path: Path
) -> None:
    home, member = tmp_path / "coordinator", tmp_path / "member"
    (tmp_path / "run.toml").write_text(RUN)
    ports = ("--host", "127.0.0.1", "--port", "0", "--enrolment-port", "0")
    with lab.inside("leads"):
        done(atoll("coordinator", "init", home, "--run", tmp_path / "run.toml", *ports))
        coordinator = start("leads", "coordinator", "start", home)
        coordinator.says("coordinator ready")
        invite = done(atoll("invite", "create", "--dir", home)).split()[-1]
        done(atoll("join", invite, "--dir", member, "--name", "member"))

    mesh = ("--hosts", "2", "--shard", "2", "--device", "cpu")
    own = lab.address("leads")
    leader = start("leads", "node", "start", "--dir", member, *mesh, "--island-listen", f"{own}:0")
    leader.says("hosts may follow")
    parts = tmp_path / "parts"
    follow = ("node", "follow", member / "island.token", "--device", "cpu", "--checkpoints", parts)
    follower = start("follows", *follow, "--name", "follows")
    coordinator.says("round opened", times=2)
    loopback, theirs = ip_address("127.0.0.1"), ip_address(lab.address("follows"))
    assert listened_on(leader) == {loopback, ip_address(own)}
    assert listened_on(follower) == {theirs}  # its rank, for the leader's
    assert lab.num_strays() == 0
    for part in (member / "inner" / "round-1", parts / "round-1"):
        until(part.exists, f"a part of a checkpoint in {leader.log}")

    follower.process.kill()
    leader.says("rank died")
    again = start("follows", *follow)
    again.says("inner optimizer goes on from its checkpoint")
    leader.says("ranks started again")
    memory, memory_of_again = leader.shared_memory(), again.shared_memory()
    leader.process.send_signal(signal.SIGTERM)
    leader.ends(memory)
    again.ends(memory_of_again)
    assert "the leader has ended" in again.log
    assert "re-warm-up" not in leader.log + follower.log + again.log
    logged = done(atoll("logs", parts))
    assert "inner optimizer goes on from its checkpoint" in logged and "follows" in logged
    assert logged.count("follower") >= 2
