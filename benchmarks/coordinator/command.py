"""One real coordinator and many simulated nodes: what it stands, and how that grows.

    python -m benchmarks.coordinator --nodes 10 100 1000

The coordinator is a process of its own, as `atoll coordinator start` makes it, with its database on
the disk. The nodes are `benchmarks.coordinator.nodes` in this process: real enrolment, real TLS, a
connection each. For every number of nodes: all attach, go through some rounds without training, and
then send heartbeats as fast as they are answered. Prints a table and appends JSON lines. The nodes
take processor time too: what the coordinator itself takes is in rows of its own.
"""

import asyncio
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.coordinator.nodes import SimulatedNode, Timings
from benchmarks.measurement import Rows, add_results, machine, markdown, parser_of
from coordinator.config import Home, create_home
from coordinator.settings import CoordinatorConfig
from lab.processes.family import atoll_command, atoll_environment, seconds_of
from protocol.run.models import Description, TensorShape
from protocol.run.run_files import DESCRIPTION_FILE, description_file, validated
from protocol.trust.credentials import Credentials
from protocol.trust.enrolment import enrol
from protocol.trust.identity import Identity
from protocol.trust.invite import Invite
from protocol.v1 import operator_pb2
from protocol.v1.operator_pb2_grpc import OperatorServiceStub
from protocol.wire.channel import open_blocking_channel

LOCAL = CoordinatorConfig(
    host="127.0.0.1",
    control_port=0,
    enrolment_port=0,
    advertise="127.0.0.1",
    dashboard="",
    connections_per_address=100_000,  # all nodes are here
)

FLAT = Description(tensors=(TensorShape(name="w", shape=(1 << 28,)),))


def described(folder: Path, text: str) -> str:
    """Gives the run a model of one tensor."""
    spec = validated(tomllib.loads(text), origin="run.toml").model_copy(
        update={"description": FLAT}
    )
    (folder / DESCRIPTION_FILE).write_bytes(description_file(spec))
    return text


"""Of the model that the nodes pretend to train: enough for a slice for each of them."""

AT_ONCE = 32
"""Nodes that enrol or attach at the same time."""

START_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What came of one number of nodes. Seconds, and bytes, unless it says otherwise."""

    num_nodes: int
    num_rounds: int
    enrol_seconds: float  # all of them
    attach_seconds: float
    round_seconds: float  # median: plan to commit, with no training and no transfers
    plan_fan_out_seconds: float  # median over rounds: from the first node that has it to the last
    commit_fan_out_seconds: float
    plan_bytes: int  # to one node
    roster_bytes: int  # to all nodes, in all
    reports_per_second: float
    report_median_seconds: float
    num_repeated: int  # calls with reports that were not answered within their deadline
    coordinator_cpu_seconds_per_round: float
    own_cpu_seconds_per_round: float  # of this process: the simulated nodes
    heartbeats_per_second: float  # flat out
    heartbeat_median_seconds: float  # flat out
    heartbeat_cpu_seconds: float  # of the coordinator, for one
    memory_bytes: int  # of the coordinator, at most
    database_bytes: int  # after all rounds
    database_bytes_per_round: float


def make_home(
    folder: Path,
    *,
    num_nodes: int,
    num_rounds: int,
    config: CoordinatorConfig = LOCAL,
    more: str = "",
) -> Home:
    """A folder for a run of so many rounds that waits for so many nodes; `more` goes into its run file."""
    run = f'[run]\nname = "load"\nrounds = {num_rounds}\nmin_nodes = {num_nodes}\n'
    deadlines = (
        "[deadlines]\ntrain = 3000\ncontribute = 3600\ncommit = 4000\napply = 1000\nlease = 300\n"
    )
    return create_home(
        folder, config=config, text=lambda building: described(building, run + deadlines + more)
    )


class CoordinatorProcess:
    """A coordinator as people start it, in a folder that is made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                atoll_command("coordinator", "start", folder),
                stdout=subprocess.PIPE,
                stderr=log,
                env=atoll_environment({}),
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode()
        if not line.startswith("coordinator ready"):
            raise RuntimeError(f"the coordinator does not start: {(folder / 'log').read_text()}")
        self.home = Home.load(folder)

    def page_port(self) -> int:
        """Where its page is, which the log says a moment after the coordinator is ready."""
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            said = (self.folder / "log").read_text()
            if (link := re.search(r"^page: http://127\.0\.0\.1:(\d+)/", said, re.M)) is not None:
                return int(link[1])
            time.sleep(0.05)
        raise RuntimeError(f"the coordinator has no page: {said}")

    def cpu_seconds(self) -> float:
        """User and system time so far."""
        return seconds_of(self._process.pid)

    def most_memory_bytes(self) -> int:
        """The most that was resident at any time."""
        for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError("the kernel does not say VmHWM")

    def database_bytes(self) -> int:
        """The database with its write-ahead log."""
        return sum(path.stat().st_size for path in self.folder.glob("atoll.db*"))

    def invite(self, uses: int) -> Invite:
        """An invite for so many nodes."""
        with open_blocking_channel(Credentials.load(self.folder)) as channel:
            request = operator_pb2.CreateInviteRequest(max_uses=uses, valid_seconds=3600)
            return Invite.decode(OperatorServiceStub(channel).CreateInvite(request).invite)

    def stop(self) -> None:
        """Ends it as Ctrl-C does."""
        self._process.terminate()
        self._process.wait(timeout=START_SECONDS)


async def measured(
    folder: Path, *, num_nodes: int, num_rounds: int, beat_seconds: float
) -> Measured:
    """Loads a fresh coordinator with so many nodes."""
    make_home(folder, num_nodes=num_nodes, num_rounds=num_rounds)
    coordinator = await asyncio.to_thread(CoordinatorProcess, folder)
    nodes: list[SimulatedNode] = []
    timings = Timings()
    places = asyncio.Semaphore(AT_ONCE)
    invite = await asyncio.to_thread(coordinator.invite, num_nodes)

    async def made(number: int) -> SimulatedNode:
        async with places:
            identity, name = Identity.generate(), f"node-{number}"
            return SimulatedNode(
                identity=identity,
                credentials=await enrol(invite, identity, name),
                name=name,
                timings=timings,
            )

    async def attach(node: SimulatedNode) -> None:
        async with places:
            await node.attach()

    try:
        began_at = time.monotonic()
        nodes = list(await asyncio.gather(*map(made, range(num_nodes))))
        enrolled_at = time.monotonic()
        # The last one opens the first round, for min_nodes is all of them.
        running = [asyncio.create_task(_attach_and_run(node, places)) for node in nodes[:-1]]
        await asyncio.gather(*(node.attached.wait() for node in nodes[:-1]))
        cpu_before, own_before = coordinator.cpu_seconds(), time.process_time()
        await attach(nodes[-1])
        attached_at = time.monotonic()
        running.append(asyncio.create_task(nodes[-1].run()))
        await asyncio.gather(*running)
        finished_at = time.monotonic()
        cpu, own = coordinator.cpu_seconds() - cpu_before, time.process_time() - own_before
        num_reports, report_median = len(timings.reports), statistics.median(timings.reports)
        timings.heartbeats.clear()
        cpu_before, beats_from = coordinator.cpu_seconds(), time.monotonic()
        await asyncio.gather(*(_beat_until(node, beats_from + beat_seconds) for node in nodes))
        beat_cpu = coordinator.cpu_seconds() - cpu_before
        num_beats = len(timings.heartbeats)
        return Measured(
            num_nodes=num_nodes,
            num_rounds=num_rounds,
            enrol_seconds=enrolled_at - began_at,
            attach_seconds=attached_at - enrolled_at,
            round_seconds=statistics.median(
                max(timings.commits[r]) - min(timings.plans[r]) for r in timings.plans
            ),
            plan_fan_out_seconds=_fan_out(timings.plans),
            commit_fan_out_seconds=_fan_out(timings.commits),
            plan_bytes=timings.plan_bytes,
            roster_bytes=timings.roster_bytes,
            reports_per_second=num_reports / (finished_at - attached_at),
            report_median_seconds=report_median,
            num_repeated=timings.num_repeated,
            coordinator_cpu_seconds_per_round=cpu / num_rounds,
            own_cpu_seconds_per_round=own / num_rounds,
            heartbeats_per_second=num_beats / (time.monotonic() - beats_from),
            heartbeat_median_seconds=statistics.median(timings.heartbeats),
            heartbeat_cpu_seconds=beat_cpu / num_beats,
            memory_bytes=coordinator.most_memory_bytes(),
            database_bytes=coordinator.database_bytes(),
            database_bytes_per_round=coordinator.database_bytes() / num_rounds,
        )
    finally:
        await asyncio.gather(*(node.close() for node in nodes))
        await asyncio.to_thread(coordinator.stop)


async def _attach_and_run(node: SimulatedNode, places: asyncio.Semaphore) -> None:
    async with places:
        await node.attach()
    await node.run()


async def _beat_until(node: SimulatedNode, end: float) -> None:
    while time.monotonic() < end:
        await node.beat()


def _fan_out(times: dict[int, list[float]]) -> float:
    return statistics.median(max(when) - min(when) for when in times.values())


Row = tuple[str, Callable[[Measured], str]]
"""What a row of the table shows, and how it is said."""


def table(results: list[Measured]) -> str:
    """One column for each number of nodes."""
    rows: list[Row] = [
        ("nodes", lambda m: f"{m.num_nodes}"),
        ("attach all, s", lambda m: f"{m.attach_seconds:.1f}"),
        ("a round without training, s", lambda m: f"{m.round_seconds:.2f}"),
        ("plan at all nodes after, s", lambda m: f"{m.plan_fan_out_seconds:.3f}"),
        ("commit at all nodes after, s", lambda m: f"{m.commit_fan_out_seconds:.3f}"),
        ("bytes of a plan", lambda m: f"{m.plan_bytes}"),
        ("calls with reports/s", lambda m: f"{m.reports_per_second:.0f}"),
        ("calls that had to be repeated", lambda m: f"{m.num_repeated}"),
        ("coordinator CPU, s per round", lambda m: f"{m.coordinator_cpu_seconds_per_round:.2f}"),
        (
            "the same for each node, ms",
            lambda m: f"{1e3 * m.coordinator_cpu_seconds_per_round / m.num_nodes:.1f}",
        ),
        ("simulated nodes' CPU, s per round", lambda m: f"{m.own_cpu_seconds_per_round:.2f}"),
        ("heartbeats/s, flat out", lambda m: f"{m.heartbeats_per_second:.0f}"),
        ("CPU of a heartbeat, ms", lambda m: f"{1e3 * m.heartbeat_cpu_seconds:.2f}"),
        ("memory, MB", lambda m: f"{m.memory_bytes / 1e6:.0f}"),
        ("memory for each node, MB", lambda m: f"{m.memory_bytes / 1e6 / m.num_nodes:.2f}"),
        ("database, kB per round", lambda m: f"{m.database_bytes_per_round / 1e3:.0f}"),
    ]
    (first, say_first), *others = rows
    columns = [first, *(say_first(result) for result in results)]
    return markdown(columns, [[name, *(say(result) for result in results)] for name, say in others])


def main() -> None:
    """See the module's docstring."""
    parser = parser_of(__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--beat-seconds", type=float, default=5.0)
    add_results(parser)
    options = parser.parse_args()
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    results, rows = [], Rows(options.results, about=machine(), is_printed=False)
    for num_nodes in options.nodes:
        with tempfile.TemporaryDirectory(prefix="atoll-load-") as folder:
            result = asyncio.run(
                measured(
                    Path(folder) / "home",
                    num_nodes=num_nodes,
                    num_rounds=options.rounds,
                    beat_seconds=options.beat_seconds,
                )
            )
        results.append(result)
        print(f"{num_nodes} nodes: a round in {result.round_seconds:.2f} s", file=sys.stderr)
        rows.add(asdict(result))
    print(table(results))
