"""Swarms of real processes whose members are hosts of the network laboratory."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coordinator.relay.line import LINE_FILE, Carriage
from lab.network.lab import NetworkLab
from tests.integration.typed_commands import Running, Swarm, atoll, done

COORDINATOR = "coordinator"
"""The host that it runs on."""

RELAY = "relay"
"""The host of a relay for it, where there is one."""

RELAY_PORT = "7720"

PATIENCE_SECONDS = 150.0
"""On a busy machine."""


@contextmanager
def swarm_in(lab: NetworkLab, folder: Path, run_text: str) -> Iterator[Swarm]:
    """A swarm whose coordinator runs on its host."""
    with lab.inside(COORDINATOR):
        swarm = Swarm(folder, run_text, host=lab.address(COORDINATOR))
    try:
        yield swarm
    finally:
        swarm.end()


def start_relay(lab: NetworkLab, folder: Path, *options: str | Path) -> Running:
    """A relay on its host, that is ready."""
    with lab.inside(RELAY):
        relay = Running(
            *("relay", "start", folder, "--port", RELAY_PORT, "--advertise", lab.address(RELAY)),
            *("--ports", "1024-65535", "--max-rate", "20mbit", *options),
        )
    relay.says("relay ready")
    return relay


def relayed_swarm(lab: NetworkLab, folder: Path, run_text: str, *, relay_folder: Path) -> Swarm:
    """A swarm whose coordinator is reached through the relay of that folder; to be ended."""
    line = (relay_folder / LINE_FILE).read_text()
    with lab.inside(COORDINATOR):
        return Swarm(
            folder, run_text, host="0.0.0.0", complete=lambda home: Carriage.chosen(home, line)
        )


def asked(lab: NetworkLab, swarm: Swarm, command: str) -> Any:
    """What a query says, typed beside the coordinator."""
    with lab.inside(COORDINATOR):
        return json.loads(done(atoll(command, "--json", "--dir", swarm.home)))


def said(lab: NetworkLab, swarm: Swarm, *command: str) -> str:
    """What a query tells people, on one line."""
    with lab.inside(COORDINATOR):
        return " ".join(done(atoll(*command, "--dir", swarm.home)).split())


def started(
    lab: NetworkLab, swarm: Swarm, names: Iterable[str], *, options: Sequence[str] = ()
) -> dict[str, Running]:
    """Nodes that have joined, each started on the host of its name."""
    names = tuple(names)
    with lab.inside(COORDINATOR):
        invite = swarm.invite("--uses", str(len(names)))
    running = {}
    for name in names:
        with lab.inside(name):
            swarm.join(name, invite)
            running[name] = swarm.start_node(name, *options)
    return running


def until(is_so: Callable[[], Any]) -> Any:
    """What is asked for, once it is true of the swarm."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (found := is_so()):
        assert time.monotonic() < deadline, "it did not come to be so"
        time.sleep(1)
    return found
