"""Whether the bytes that nodes count are the bytes that the network carries, over a whole run.

    python -m benchmarks.wire [--rounds 6] [--nodes 3] [--mtu 1500] [--hidden-size 64]

A coordinator and its nodes run as processes of their own, started by the commands that people type,
in a network namespace that has nothing else in it. There every byte on loopback is sent once, by a
node or by the coordinator: what nodes count as sent, and what they count as received from the
coordinator, must add up to what the interface says. Joining is over before the measurement begins,
and nobody asks for the status until it has ended. Prints a table and, last, JSON; exits with 1 when
the sum is more than a tenth off. Needs the right to make a network namespace.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measurement import machine, parser_of
from lab.network.namespace import enter, loopback_counters
from lab.processes.family import nothing_left
from node.demo.children import Child, Children
from node.exchange.transport.rates.traffic import CONNECTION_BYTES
from protocol.terminal import console
from protocol.terminal.node_words import by_name
from protocol.terminal.query import StatusLink
from protocol.trust.invite import INVITE
from protocol.v1 import status_pb2 as pb

TOLERANCE = 0.1

RUN_FILE = """\
[run]
name = "wire"
rounds = {rounds}
min_nodes = {num_nodes}

[model]
hidden_size = {hidden_size}
num_heads = 4
num_kv_heads = 2
ffn_size = {ffn_size}
context = 64

[inner]
steps = 4
batch = 4

[evaluation]
every_rounds = 2
samples = 16
"""

_COMMAND_SECONDS = 60.0
_RUN_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A run as its nodes counted it in their last heartbeats, and as the interface did."""

    nodes: Sequence[pb.NodeStatus]
    interface_bytes: int
    interface_packets: int
    seconds: float

    @property
    def sent_bytes(self) -> int:
        """By all nodes, to peers and to the coordinator."""
        return sum(count.sent_bytes for node in self.nodes for count in node.heartbeat.wire)

    @property
    def coordinator_bytes(self) -> int:
        """What nodes received from the coordinator: control that no node counts as sent.

        Each end of a connection between nodes counts its opening in both directions. What it
        received then is what its peer sent: it is taken out here.
        """
        received = sum(
            count.received_bytes
            for node in self.nodes
            for count in node.heartbeat.wire
            if count.kind == "control"
        )
        num_ends = len(self.nodes) * (len(self.nodes) - 1)
        return received - num_ends * CONNECTION_BYTES

    @property
    def counted_bytes(self) -> int:
        """By all nodes, each byte once."""
        return self.sent_bytes + self.coordinator_bytes

    @property
    def ratio(self) -> float:
        """Counted over what the interface saw."""
        return self.counted_bytes / self.interface_bytes


def atoll(*arguments: str | Path) -> list[str]:
    """A command as people type it."""
    return [sys.executable, "-P", "-m", "protocol.terminal.cli", *map(str, arguments)]


def measure(folder: Path, *, run_file: str, num_nodes: int) -> Measured:
    """Runs a swarm from the first attach to the last goodbye. Raises AtollError when it fails."""
    (folder / "run.toml").write_text(run_file)
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
    }
    with Children(logs=folder, environment=environment, working_folder=folder) as children:
        start_coordinator(children, folder / "coordinator", folder / "run.toml")
        homes = [folder / f"node-{number}" for number in range(1, num_nodes + 1)]
        join(children, folder / "coordinator", homes)
        bytes_before, packets_before = settled_counters(children)
        began = time.monotonic()
        nodes = [children.start(home.name, atoll("node", "start", "--dir", home)) for home in homes]
        children.wait_for(nodes, seconds=_RUN_SECONDS, what="training")
        bytes_after, packets_after = settled_counters(children)
        with StatusLink(folder / "coordinator") as link:
            status = link.status()
        return Measured(
            nodes=by_name(status.nodes),
            interface_bytes=bytes_after - bytes_before,
            interface_packets=packets_after - packets_before,
            seconds=time.monotonic() - began,
        )


def start_coordinator(children: Children, home: Path, run_file: Path) -> None:
    """Sets one up and waits until it listens."""
    ports = ("--port", "0", "--enrolment-port", "0")
    set_up = atoll("coordinator", "init", home, "--run", run_file, "--host", "127.0.0.1", *ports)
    children.wait_for(
        [children.start("coordinator-init", set_up)],
        seconds=_COMMAND_SECONDS,
        what="setting up the coordinator",
    )
    coordinator = children.start("coordinator", atoll("coordinator", "start", home))
    children.wait_until(
        lambda: "coordinator ready" in coordinator.log_text(),
        seconds=_COMMAND_SECONDS,
        what="starting the coordinator",
    )


def join(children: Children, coordinator: Path, homes: Sequence[Path]) -> None:
    """Lets all nodes join by one invite."""

    def done(child: Child) -> Child:
        children.wait_for([child], seconds=_COMMAND_SECONDS, what=child.name)
        return child

    make = atoll("invite", "create", "--uses", str(len(homes)), "--dir", coordinator)
    printed = done(children.start("invite", make)).log_text()
    invite = INVITE.first_in(printed)
    assert invite is not None, printed
    for home in homes:
        command = atoll("join", invite, "--dir", home, "--name", home.name)
        done(children.start(f"{home.name}-join", command))


def settled_counters(children: Children) -> tuple[int, int]:
    """The interface's counters once nothing moves any more."""
    before = loopback_counters()
    while True:
        children.watch_for(0.5)
        now = loopback_counters()
        if now == before:
            return now
        before = now


def print_table(measured: Measured) -> None:
    """Who counted how much of which kind, and how it compares."""
    rows = [
        (
            node.node_name,
            count.kind,
            console.bytes_in_words(count.sent_bytes),
            console.bytes_in_words(count.received_bytes),
        )
        for node in measured.nodes
        for count in node.heartbeat.wire
    ]
    columns = ("node", "kind", "sent", "received")
    console.terminal().print(console.table(columns, rows, right=("sent", "received")))
    print(f"sent by nodes               {measured.sent_bytes:>12,} bytes")
    print(f"sent by the coordinator     {measured.coordinator_bytes:>12,} bytes")
    print(f"counted in all              {measured.counted_bytes:>12,} bytes")
    print(
        f"seen by the interface       {measured.interface_bytes:>12,} bytes "
        f"in {measured.interface_packets:,} packets, {measured.seconds:.0f} s"
    )
    print(f"counted / seen              {measured.ratio:>12.3f}")


def main() -> int:
    """Enters a namespace, measures there, prints; returns the exit code."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=6, help="rounds to train (default 6)")
    parser.add_argument("--nodes", type=int, default=3, help="nodes in the swarm (default 3)")
    parser.add_argument(
        "--mtu", type=int, default=1500, help="of loopback; 65536 leaves it as it is (default 1500)"
    )
    parser.add_argument(
        "--hidden-size", type=int, default=64, help="width of the model (default 64)"
    )
    chosen = parser.parse_args()
    enter(mtu=chosen.mtu)
    with nothing_left(), tempfile.TemporaryDirectory(prefix="atoll-wire-") as folder:
        measured = measure(
            Path(folder),
            run_file=RUN_FILE.format(
                rounds=chosen.rounds,
                num_nodes=chosen.nodes,
                hidden_size=chosen.hidden_size,
                ffn_size=3 * chosen.hidden_size,
            ),
            num_nodes=chosen.nodes,
        )
    print_table(measured)
    result = {
        **machine(),
        **vars(chosen),
        "counted_bytes": measured.counted_bytes,
        "interface_bytes": measured.interface_bytes,
        "ratio": round(measured.ratio, 4),
        "nodes": {
            node.node_name: {
                count.kind: (count.sent_bytes, count.received_bytes)
                for count in node.heartbeat.wire
            }
            for node in measured.nodes
        },
    }
    print(json.dumps(result))
    return int(abs(measured.ratio - 1) > TOLERANCE)
