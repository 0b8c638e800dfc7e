"""Daemons as a service manager sees them, on a cloud's machine that goes, and within limits: real processes.

A socket stands in systemd's place, a web server in the cloud's.
"""

import json
import re
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import pytest

from node.machine.limits import hours_of
from protocol.service.unit import units_folder
from tests.fake_metadata import AWS_ACTION, in_seconds, serving
from tests.integration.typed_commands import (
    PATIENCE_SECONDS,
    Swarm,
    atoll,
    done,
    refused,
    typed_here,
    until,
)
from tests.tiny_runs import tiny_text

RUN = tiny_text(
    run={"name": "served", "rounds": 50, "min_nodes": 1},
    inner={"steps": 1_000_000},
    deadlines={"train": 5, "contribute": 20, "commit": 30},
)


class Listening:
    """Notes what a daemon says."""

    def __init__(self, told: socket.socket) -> None:
        self._told = told
        told.settimeout(PATIENCE_SECONDS)

    def until(self, line: str) -> list[str]:
        """What comes, to the message with this line; fails when it does not come."""
        heard: list[str] = []
        give_up_at = time.monotonic() + PATIENCE_SECONDS
        while line not in heard:
            assert time.monotonic() < give_up_at, heard
            heard += self._told.recv(4096).decode().split("\n")
        return heard


@contextmanager
def listening(monkeypatch: pytest.MonkeyPatch, name: Path) -> Iterator[Listening]:
    """What is started within it has this manager. A socket that nobody reads holds ten messages, so the
    watchdog's come seldom; the first one comes at once.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(str(name))
        monkeypatch.setenv("NOTIFY_SOCKET", str(name))
        monkeypatch.setenv("WATCHDOG_USEC", "120000000")
        yield Listening(told)


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s")  # short: the name of a socket


def test_a_coordinator_and_a_node_are_ready_live_and_stop(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with listening(monkeypatch, folder / "c") as of_coordinator:
        swarm = Swarm(folder / "swarm", RUN)
        try:
            of_coordinator.until("READY=1")
            with listening(monkeypatch, folder / "n") as of_node:
                swarm.join("alone", swarm.invite())
                node = swarm.start_node("alone")
                before = of_node.until("READY=1")
                assert "WATCHDOG=1" in before
                assert any("looking for the coordinator" in line for line in before)
                node.says("attached")
                swarm.does("training", "alone")
                memory = node.shared_memory()
                node.process.send_signal(signal.SIGTERM)
                assert any("leaving" in line for line in of_node.until("STOPPING=1"))
                node.ends(memory)
            of_coordinator.until("WATCHDOG=1")
            swarm.coordinator.stop(signal.SIGTERM)
            of_coordinator.until("STOPPING=1")
        finally:
            swarm.end()


def test_a_coordinator_serves_though_nobody_can_be_told_and_ends_with_its_terminal(
    folder: Path,
) -> None:
    swarm = Swarm(folder / "swarm", RUN)
    try:
        swarm.coordinator.stop(signal.SIGTERM)
        mute = ("sh", "-c", 'exec env --default-signal=HUP "$0" "$@" > /dev/full')
        told_nobody = swarm.start("coordinator", "start", swarm.home, through=mute)
        told_nobody.says("coordinator ready")  # in its log
        assert swarm.status().run.run_name == "served"
        told_nobody.stop(signal.SIGHUP)
    finally:
        swarm.end()


@pytest.mark.nightly
def test_a_node_whose_machine_is_taken_away_leaves_with_its_work(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = Swarm(folder / "swarm", RUN)
    try:
        swarm.join("spot", swarm.invite())
        with serving() as metadata:
            monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata.address)
            settings = folder / "swarm" / "spot" / "node.toml"
            settings.write_text(settings.read_text().replace('cloud = "auto"', 'cloud = "aws"'))
            node = swarm.start_node("spot")
            swarm.does("training", "spot")
            memory = node.shared_memory()
            action = {"action": "terminate", "time": in_seconds(110)}
            metadata.says[AWS_ACTION] = json.dumps(action)
            node.ends(memory)
        assert "this machine is about to be taken away" in node.log
        assert "AWS is about to terminate this spot machine" in node.log
        assert re.search(r"spot has stopped: .*after the commit of round", node.log), node.log
        assert swarm.nodes()["spot"].committed_tokens > 0
    finally:
        swarm.end()


def test_a_node_beyond_its_hours_stays_a_member_and_trains_nothing(folder: Path) -> None:
    swarm = Swarm(folder / "swarm", RUN)
    try:
        home = swarm.join("nightly", swarm.invite())
        hour = datetime.now().hour
        hours = f"{(hour + 2) % 24}:00-{(hour + 3) % 24}:00"
        settings = home / "node.toml"
        settings.write_text(settings.read_text().replace('hours = ""', f'hours = "{hours}"'))
        node = swarm.start_node("nightly")
        node.says("paused by its owner")
        swarm.does(f"waiting for its owner: its hours are {hours_of(hours)[0]}", "nightly")
        assert swarm.nodes()["nightly"].inner_steps == 0
        node.stop(signal.SIGTERM)
    finally:
        swarm.end()


@pytest.mark.nightly
def test_who_joins_is_told_what_the_run_is_takes_and_brings(folder: Path) -> None:
    swarm = Swarm(folder / "swarm", RUN)
    try:
        invite = swarm.invite("--uses", "3")

        def joined(name: str) -> list[str]:
            home = swarm.folder / name
            return done(atoll("join", invite, "--dir", home, "--name", name)).splitlines()

        first = joined("first")
        assert [line.partition(":")[0] for line in first[1:]] == [
            *("this machine", "the run", "it reads", "it takes", "a day, as members here do"),
            *("limits that you may set", "next"),
        ]
        assert "round 0 of 50, 0 members now" in first[2]
        assert first[3].startswith("it reads: ")
        assert first[4].endswith(" of disk, in time 99.1 MB more for commits and logs")
        assert "no member trains on cpu now; bytes are not known before" in first[5]
        node = swarm.start_node("first")
        until(lambda: swarm.status().run.committed_round > 0, "a round")
        swarm.does("training", "first")
        told = ("the run reads", "loading torch", "trains here")
        assert sorted(told, key=node.log.find) == list(told) and told[0] in node.log
        assert "on=cpu precision=fp32" in node.log
        assert first[3].removeprefix("it reads: ") in node.log
        second = joined("second")
        assert re.search(
            r"a day, as members here do: about \S+ tokens; about \S+ \S+ each way", second[5]
        )
        swarm.coordinator.stop(signal.SIGTERM)
    finally:
        swarm.end()


def test_services_are_printed_installed_and_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = Swarm(folder / "swarm", RUN)
    try:
        home = swarm.join("alone", swarm.invite())
        settings = str(folder / "settings")
        shown = done(
            atoll("node", "install-service", "--print", "--dir", home, XDG_CONFIG_HOME=settings)
        )
        assert f"node start --dir {home}\n" in shown and not Path(settings).exists()
        said = done(atoll("node", "install-service", "--dir", home, XDG_CONFIG_HOME=settings))
        monkeypatch.setenv("XDG_CONFIG_HOME", settings)
        unit = units_folder(is_system=False) / "atoll-node-alone.service"
        assert unit.read_text() == shown and str(unit) in said
        done(typed_here("coordinator", "install-service", swarm.home, XDG_CONFIG_HOME=settings))
        assert (unit.parent / "atoll-coordinator-served.service").is_file()
        refused(typed_here("helper", "install-service", "--dir", home), 77, "a node's folder")
        of_node = typed_here("coordinator", "install-service", home)
        refused(of_node, 66, "not a coordinator's folder")
    finally:
        swarm.end()
