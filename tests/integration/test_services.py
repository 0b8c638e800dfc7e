"""Daemons as a service manager sees them: real processes, and a socket in systemd's place."""

import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typed_commands import PATIENCE_SECONDS, Swarm, atoll, done, refused

from protocol.service.unit import units_folder
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
    """What is started within it has this manager, with a watchdog of two seconds."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(str(name))
        monkeypatch.setenv("NOTIFY_SOCKET", str(name))
        monkeypatch.setenv("WATCHDOG_USEC", "2000000")
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
                assert any("looking for the coordinator" in line for line in before)
                node.says("attached")
                swarm.does("training", "alone")
                of_node.until("WATCHDOG=1")
                node.stop(signal.SIGTERM)
                assert any("round in flight" in line for line in of_node.until("STOPPING=1"))
            of_coordinator.until("WATCHDOG=1")
            swarm.coordinator.stop(signal.SIGTERM)
            of_coordinator.until("STOPPING=1")
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
        done(atoll("coordinator", "install-service", swarm.home, XDG_CONFIG_HOME=settings))
        assert (unit.parent / "atoll-coordinator-served.service").is_file()
        refused(atoll("helper", "install-service", "--dir", home), 77, "a node's folder")
        refused(atoll("coordinator", "install-service", home), 66, "not a coordinator's folder")
    finally:
        swarm.end()
