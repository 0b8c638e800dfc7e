"""Real processes: the coordinator moves to another address in mid-run, and nodes follow."""

import json
import shutil
import signal
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.network.lab import NetworkLab
from lab.network.links import Link
from node.kept import kept_model
from protocol.trust.invite import Invite
from tests.integration.lab_swarm import COORDINATOR, started, swarm_in
from tests.integration.typed_commands import Swarm, atoll, done, refused, until
from tests.ports import free_port
from tests.tiny_runs import tiny_text

ROUNDS = 1000  # it is stopped before
RUN = tiny_text(
    run={"name": "moved", "rounds": ROUNDS, "min_nodes": 2},
    inner={"steps": 1_000_000},
    deadlines={"train": 2, "contribute": 8, "commit": 14},
    evaluation={"every_rounds": ROUNDS},
)
NODES = ("one", "two")


@pytest.mark.nightly
def test_an_old_invite_finds_the_coordinator_by_a_helper_that_it_names_when_the_old_machine_is_gone(
    swarm: Swarm,
) -> None:
    swarm.join("early", swarm.invite())  # it names nobody: the helper is not here yet
    watcher = swarm.join("early watcher", swarm.invite("--role", "viewer"))
    helper_home = swarm.join("helper", swarm.invite("--role", "helper"))
    helper = swarm.start("helper", "start", "--dir", helper_home)
    helper.says("attached")
    invite, viewer = swarm.invite(), swarm.invite("--role", "viewer")
    assert [member.host for member in Invite.decode(invite).members] == ["127.0.0.1"]
    # Two that will be off while it moves. The one has met the helper, the other was told of it.
    met = swarm.start_node("early")
    until(lambda: "members" in link_of(swarm, "early"), "the folder to name the helper")
    met.stop(signal.SIGTERM)
    swarm.join("laptop", swarm.invite("--role", "viewer"))
    control, enrolment = str(free_port()), str(free_port())
    move = ("run", "move", "127.0.0.1", "--port", control, "--enrolment-port", enrolment)
    done(atoll(*move, "--dir", swarm.home))
    helper.says("the coordinator will move")
    swarm.coordinator.process.terminate()
    swarm.coordinator.process.wait()
    late = swarm.folder / "late"
    nowhere = (
        "no coordinator answers",
        "nor anywhere that the members named in the invite know of",
    )
    refused(atoll("join", invite, "--dir", late), 69, *nowhere)
    typed = atoll("status", "--dir", swarm.folder / "laptop")
    assert typed.code == 69 and "asking members at 127.0.0.1" in typed.err
    assert typed.out == "" and "p2pd" not in typed.err
    refused(
        *(atoll("status", "--dir", watcher), 69, "no coordinator answers"),
        *("names nobody who knows where to", f"host in {watcher / 'link.toml'}"),
    )
    there = swarm.folder / "elsewhere"
    shutil.move(swarm.home, there)
    moved = swarm.start(
        "coordinator", "start", there, "--port", control, "--enrolment-port", enrolment
    )
    moved.says("coordinator ready")
    for name, line in (("late", invite), ("watcher", viewer)):
        said = done(atoll("join", line, "--dir", swarm.folder / name))
        assert "the coordinator has moved: a member that the invite names knew where to" in said
        assert link_of(swarm, name)["control_port"] == int(control)
    typed = atoll("status", "--dir", swarm.folder / "laptop")
    assert "moved" in done(typed)  # the run's name
    assert f"the coordinator has moved to 127.0.0.1:{control}" in typed.err
    assert link_of(swarm, "laptop")["control_port"] == int(control)
    assert atoll("status", "--dir", swarm.folder / "laptop").err == ""
    met = swarm.start_node("early", "--no-wait")
    met.says("asking members where the coordinator is")
    met.says("the coordinator has moved")
    met.says("attached")
    assert link_of(swarm, "early")["control_port"] == int(control)
    met.stop(signal.SIGTERM)
    helper.stop(signal.SIGTERM)
    refused(atoll("join", invite, "--dir", swarm.folder / "last"), 69, *nowhere)


def link_of(swarm: Swarm, name: str) -> dict[str, object]:
    return tomllib.loads((swarm.folder / name / "link.toml").read_text())


@pytest.mark.nightly
def test_nodes_find_a_coordinator_at_the_address_that_it_was_said_to_move_to(swarm: Swarm) -> None:
    invite = swarm.invite("--uses", "3")
    running = {}
    for name in NODES:
        swarm.join(name, invite)
        running[name] = swarm.start_node(name)
    swarm.coordinator.says("round opened", times=2)

    control, enrolment = str(free_port()), str(free_port())
    move = ("run", "move", "127.0.0.1", "--port", control, "--enrolment-port", enrolment)
    done(atoll(*move, "--reason", "a larger machine", "--dir", swarm.home))
    refused(atoll(*move, "--dir", swarm.home), 64, "told already", f"127.0.0.1, port {control}")
    for node in running.values():
        node.says("the coordinator will move")
        node.says("applied", times=2)  # it is still here, and the run goes on
    assert link_of(swarm, "one")["elsewhere"] == {
        "host": "127.0.0.1",
        "control_port": int(control),
        "enrolment_port": int(enrolment),
    }
    running["two"].process.kill()  # it is away while the coordinator moves
    running["two"].process.wait()
    swarm.coordinator.process.terminate()
    swarm.coordinator.process.wait()
    there = swarm.folder / "elsewhere"
    shutil.copytree(swarm.home, there)
    moved = swarm.start(
        "coordinator", "start", there, "--port", control, "--enrolment-port", enrolment
    )
    moved.says("coordinator ready")
    old = swarm.start(
        *("coordinator", "forward", swarm.home, "--port", swarm.control_port),
        *("--enrolment-port", str(Invite.decode(invite).port)),
    )
    old.says("forwarding ready")
    swarm.join("three", invite)  # it names the old address
    old.stop(signal.SIGTERM)
    running["one"].says("the coordinator has moved")
    running["two"] = swarm.start_node("two")
    running["two"].says("the coordinator has moved")
    moved.says("round committed")
    done(atoll("run", "stop", "--dir", there))
    for node in running.values():
        node.ends(set())
        assert "run finished" in node.log

    for name in NODES:
        link = link_of(swarm, name)
        assert (link["control_port"], link["enrolment_port"]) == (int(control), int(enrolment))
        assert "elsewhere" not in link
    status = json.loads(done(atoll("status", "--json", "--dir", swarm.folder / "one")))["run"]
    assert status["phase"] == "finished" and 2 < status["committed_round"] < ROUNDS
    models = [kept_model(swarm.folder / name) for name in NODES]
    assert {model.outer_digest.hex() for model in models} == {status["outer_digest"]}


@pytest.mark.nightly
def test_an_older_copy_at_the_address_that_was_told_learns_what_it_lacks_and_who_joined_since_goes_on(
    swarm: Swarm,
) -> None:
    vouched, invite = swarm.invite("--role", "helper"), swarm.invite("--uses", "3")
    helper_home = swarm.join("helper", vouched)
    helper = swarm.start("helper", "start", "--dir", helper_home)
    helper.says("attached")
    running = {}
    for name in NODES:
        swarm.join(name, invite)
        running[name] = swarm.start_node(name)
    swarm.coordinator.says("round committed", times=2)
    older = swarm.invite()  # it names the helper
    copy = swarm.folder / "copy"
    done(atoll("coordinator", "backup", swarm.home, copy))
    swarm.join("three", invite)
    running["three"] = swarm.start_node("three")
    running["three"].says("applied")
    control, enrolment = str(free_port()), str(free_port())
    ports = ("--port", control, "--enrolment-port", enrolment)
    done(atoll("run", "move", "127.0.0.1", *ports, "--dir", swarm.home))
    for node in running.values():
        node.says("the coordinator will move")
    swarm.coordinator.kill()

    moved = swarm.start("coordinator", "start", copy, *ports)
    moved.says("coordinator ready")
    for node in running.values():
        node.says("the coordinator has moved")
    moved.says("the coordinator moves to 127.0.0.1")  # a ruling that came back
    moved.says("readmitted: it joined after the copy")
    moved.says("round learned")
    moved.says("all slices are committed")
    applied = running["three"].log.count("applied")
    running["three"].says("applied", times=applied + 2)
    assert "state replaced" not in running["three"].log
    said = done(atoll("join", older, "--dir", swarm.folder / "late"))
    assert "the coordinator has moved: a member that the invite names knew where to" in said
    status = json.loads(done(atoll("status", "--json", "--dir", copy)))["run"]
    assert status["digests_agree"]


ELSEWHERE = "elsewhere"


@pytest.fixture
def lab() -> Iterator[NetworkLab]:
    with NetworkLab(dict.fromkeys((COORDINATOR, ELSEWHERE, *NODES), Link())) as lab:
        yield lab


@pytest.mark.nightly
@pytest.mark.usefixtures("may_make_network_labs")
def test_a_running_node_that_was_cut_off_while_the_coordinator_moved_is_told_by_a_member(
    lab: NetworkLab, tmp_path: Path
) -> None:
    with swarm_in(lab, tmp_path / "swarm", RUN) as swarm:
        running = started(lab, swarm, NODES)
        swarm.coordinator.says("round committed")
        lab.cut("one", COORDINATOR)
        ports = ("--port", "7700", "--enrolment-port", "7701")
        with lab.inside(COORDINATOR):
            done(atoll("run", "move", lab.address(ELSEWHERE), *ports, "--dir", swarm.home))
        running["two"].says("the coordinator will move")
        swarm.coordinator.process.terminate()
        swarm.coordinator.process.wait()
        there = swarm.folder / ELSEWHERE
        shutil.move(swarm.home, there)
        with lab.inside(ELSEWHERE):
            host = ("--host", lab.address(ELSEWHERE))
            moved = swarm.start("coordinator", "start", there, *host, *ports)
        moved.says("coordinator ready")
        running["two"].says("the coordinator has moved")
        assert "the coordinator will move" not in running["one"].log
        running["one"].says("asking members where the coordinator is")
        running["one"].says("the coordinator has moved")
        assert link_of(swarm, "one")["host"] == lab.address(ELSEWHERE)
        moved.says("round committed", times=2)  # which takes both
        for node in running.values():
            assert node.process.poll() is None
