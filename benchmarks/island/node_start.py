"""What a node's start costs: processor time until it is attached, and the memory that its daemon holds then.

    python -m benchmarks.island.node_start [--repeats 5] [--busy] [--against FOLDER] [--results FILE]

Real nodes on loopback whose run waits for a second one, so that none trains. With `--busy` another node
trains all the while in rounds of two seconds, the one that is measured is killed each time and not
stopped, and it is measured too when the first round with its work is over. Codecs are compiled
before: the first start of each tree is not counted. `--against` is another checkout of Atoll; the two
start in turns, and ratios are this one over that one. Times of the wall are those of a machine that
may have other work; the processor's time hardly depends on it.
"""

import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.island.speed import Spread
from benchmarks.measurement import Rows, add_results, machine, parser_of
from lab.processes.family import MARK, SOURCES, Family, atoll_command, atoll_environment, seconds_of
from lab.processes.swarm import RealSwarm

RUN = """
[run]
name = "start"
min_nodes = 2
"""

BUSY_RUN = """
[run]
name = "back"
rounds = 10000
min_nodes = 1
[inner]
steps = 1000000
[deadlines]
train = 2
contribute = 8
commit = 14
[evaluation]
every_rounds = 10000
"""

STOP_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of a node."""

    seconds: float
    cpu_seconds: float  # of all processes that it started
    daemon_cpu_seconds: float
    daemon_bytes: int  # proportional: pages that others share count in part
    all_bytes: int  # likewise, of all its processes
    trained_seconds: float = 0.0  # until a round with its work is over; 0: nobody trains


def cpu_seconds(process_id: int) -> float:
    """Of a process and of those that it has waited for."""
    return seconds_of(process_id, with_ended=True)


def proportional_bytes(process_id: int) -> int:
    """Its part of the memory that it has mapped."""
    for line in Path(f"/proc/{process_id}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return 1024 * int(line.split()[1])
    raise ValueError(f"process {process_id} tells no Pss")


def started(swarm: RealSwarm, name: str, tree: Path, *, is_busy: bool) -> Start:
    """Starts a node with the code of a tree, and ends it once it is attached, or has taken part."""
    mark = f"start-{time.monotonic_ns()}"
    home = swarm.folder / name
    log = swarm.folder / f"{mark}.log"
    began_at = time.perf_counter()
    with log.open("wb") as out:
        process = subprocess.Popen(
            atoll_command("node", "start", "--dir", home, "--name", name),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            cwd=swarm.folder,
            env=atoll_environment({MARK: mark, "PYTHONPATH": str(tree)}),
        )
    family = Family(mark)
    try:
        swarm.until(lambda: " attached" in log.read_text(), f"a node of {tree} to be attached")
        seconds = time.perf_counter() - began_at
        members = family.members()
        trained_seconds = 0.0
        if is_busy:  # a node says how it used its devices after each round that it has trained for
            swarm.until(lambda: " utilisation" in log.read_text(), f"work of a node of {tree}")
            trained_seconds = time.perf_counter() - began_at
        return Start(
            trained_seconds=trained_seconds,
            seconds=seconds,
            cpu_seconds=sum(map(cpu_seconds, members)),
            daemon_cpu_seconds=cpu_seconds(process.pid),
            daemon_bytes=proportional_bytes(process.pid),
            all_bytes=sum(map(proportional_bytes, members)),
        )
    finally:
        process.send_signal(signal.SIGKILL if is_busy else signal.SIGTERM)
        process.wait(STOP_SECONDS)
        family.send_all(signal.SIGKILL)


def compared(trees: list[Path], *, repeats: int, is_busy: bool) -> Iterator[list[Start]]:
    """Starts of each tree in turns; the first round of them is not there."""
    run = BUSY_RUN if is_busy else RUN
    with tempfile.TemporaryDirectory() as folder, RealSwarm(Path(folder), run) as swarm:
        if is_busy:
            swarm.join("busy")[0].start()
            swarm.until(lambda: swarm.committed_round > 0, "the first round")
        names = [f"tree{place}" for place in range(len(trees))]
        swarm.join(*names)
        for number in range(repeats + 1):
            places = range(len(trees)) if number % 2 else reversed(range(len(trees)))
            starts = {
                place: started(swarm, names[place], trees[place], is_busy=is_busy)
                for place in places
            }
            if number:
                yield [starts[place] for place in sorted(starts)]


def main() -> None:
    """Measures, prints, and writes the raw figures where it is told to."""
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--busy", action="store_true", help="beside a node that trains")
    parser.add_argument("--against", type=Path, help="another checkout of Atoll")
    add_results(parser)
    chosen = parser.parse_args()
    trees = [SOURCES] + ([chosen.against.resolve()] if chosen.against else [])
    rows = list(compared(trees, repeats=chosen.repeats, is_busy=chosen.busy))
    for place, tree in enumerate(("this tree", "the other")[: len(trees)]):
        print(f"{tree}:")
        for key, unit, scale in FIGURES if chosen.busy else FIGURES[1:]:
            values = [getattr(row[place], key) / scale for row in rows]
            ratios = [getattr(row[0], key) / getattr(row[-1], key) for row in rows]
            ratio = f"; this over the other {Spread.of(ratios)}" if place == 1 else ""
            print(f"  {key}: {statistics.median(values):.2f} {unit}{ratio}")
    results = Rows(chosen.results, about=machine(), is_printed=False)
    for row in rows:
        results.add({"starts": [asdict(start) for start in row]})


FIGURES = (
    ("trained_seconds", "s", 1.0),
    ("seconds", "s", 1.0),
    ("cpu_seconds", "s", 1.0),
    ("daemon_cpu_seconds", "s", 1.0),
    ("daemon_bytes", "MB", 1e6),
    ("all_bytes", "MB", 1e6),
)

if __name__ == "__main__":
    main()
