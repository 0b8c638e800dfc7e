"""The image of deploy/Dockerfile, made without a container engine, and what compose.yaml starts of it.

In a root of Debian with nothing else installed, and a network where the coordinator has the name that compose
gives it.
"""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from lab.image import DOCKERFILE, Image, ImageUnavailableError, made_image
from lab.network.lab import NetworkLab
from lab.network.links import Link
from tests.integration.lab_swarm import until

COMPOSE = yaml.safe_load((DOCKERFILE.parent / "compose.yaml").read_text())["services"]
HOSTS = ("coordinator", "node-1", "node-2")
OWNER = 10001  # of the image's volumes

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(1200),
    pytest.mark.usefixtures("may_make_network_labs"),
]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    try:
        return made_image(tmp_path_factory.mktemp("image"))
    except ImageUnavailableError as error:
        pytest.skip(str(error))


class Containers:
    """Services of compose.yaml, each on a host of the lab, with volumes that are folders."""

    def __init__(self, lab: NetworkLab, image: Image, folder: Path) -> None:
        self._lab, self._image, self._folder = lab, image, folder
        self.logs: dict[str, Path] = {}

    def volume(self, name: str) -> Path:
        path = self._folder / name
        if not path.exists():
            path.mkdir()
            os.chown(path, OWNER, OWNER)
        return path

    def started(self, service: str, host: str) -> subprocess.Popen[bytes]:
        """What compose would start: its command in a shell, as the image's user."""
        told = COMPOSE[service]
        volumes = {
            one.split(":")[1] if ":" in one else one: self.volume(
                one.split(":")[0] if ":" in one else f"{host}-data"
            )
            for one in told["volumes"]
        }
        command = self._image.entered(
            told["command"][0], user=told.get("user", self._image.user), volumes=volumes
        )
        self.logs[host] = log = self._folder / f"{host}-{service}.log"
        with log.open("wb") as output, self._lab.inside(host):
            return subprocess.Popen(command, stdout=output, stderr=output)

    def asked(self, host: str, *arguments: str, volumes: Mapping[str, str]) -> str:
        """What a command says that is typed in a container."""
        there = {place: self.volume(name) for place, name in volumes.items()}
        with self._lab.inside(host):
            done = subprocess.run(
                self._image.command(*arguments, volumes=there),
                capture_output=True,
                text=True,
                check=False,
            )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def is_healthy(self, host: str) -> bool:
        command = "exec /opt/atoll/bin/python /opt/atoll/healthy.py"
        with self._lab.inside(host):
            return subprocess.run(self._image.entered(command), check=False).returncode == 0


@pytest.fixture
def containers(image: Image, tmp_path: Path) -> Iterator[Containers]:
    with NetworkLab(dict.fromkeys(HOSTS, Link(delay_seconds=0.005))) as lab:
        names = image.root / "etc" / "hosts"
        names.write_text(f"127.0.0.1 localhost\n{lab.address('coordinator')} coordinator\n")
        yield Containers(lab, image, tmp_path)


def test_the_image_has_what_each_role_needs_and_runs_as_nobody_special(image: Image) -> None:
    said = subprocess.run(image.command("--version"), capture_output=True, text=True, check=True)
    assert said.stdout.startswith("atoll ")
    (user,) = subprocess.run(
        image.entered("id -u", user=image.user), capture_output=True, text=True, check=True
    ).stdout.split()
    assert int(user) == OWNER
    looked = subprocess.run(
        image.command("node", "doctor", "--json"), capture_output=True, text=True, check=False
    )
    wrong = [one for one in json.loads(looked.stdout) if one["verdict"] == "wrong"]
    assert not wrong, wrong


def test_what_compose_starts_trains_together_and_leaves_in_time(containers: Containers) -> None:
    with ExitStack() as stack:

        def start(service: str, host: str) -> subprocess.Popen[bytes]:
            process = containers.started(service, host)
            stack.callback(_end, process)
            return process

        def status() -> Any:
            said = containers.asked(
                "coordinator", "status", "--json", "--dir", "run", volumes={"/data": "run"}
            )
            return json.loads(said)

        coordinator = start("coordinator", "coordinator")
        _wait(lambda: containers.is_healthy("coordinator"), coordinator, containers)
        invite = start("invite", "coordinator")
        assert invite.wait(60) == 0, containers.logs["coordinator"].read_text()
        nodes = [start("node", host) for host in HOSTS[1:]]
        for host, node in zip(HOSTS[1:], nodes, strict=True):
            _wait(lambda host=host: containers.is_healthy(host), node, containers)  # type: ignore[misc]
        until(lambda: status()["run"]["committed_round"] >= 1)
        for node in nodes:  # as 'docker stop' does
            node.send_signal(signal.SIGTERM)
        assert [node.wait(120) for node in nodes] == [0, 0], containers.logs
        assert status()["run"]["digests_agree"]
        coordinator.send_signal(signal.SIGTERM)
        assert coordinator.wait(60) == 0


def _wait(
    is_so: Callable[[], bool], process: subprocess.Popen[bytes], containers: Containers
) -> None:
    def is_so_or_over() -> bool:
        assert process.poll() is None, {h: p.read_text() for h, p in containers.logs.items()}
        return is_so()

    until(is_so_or_over)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
