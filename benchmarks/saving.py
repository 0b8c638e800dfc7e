"""What it takes to keep a node's outer state on disk: a snapshot after every round, or results between.

    python -m benchmarks.saving [--values 4900000 64000000] [--round-seconds 0.6 6] [--rounds 32]
        [--codec ec2] [--folder .] [--output saving.jsonl]

One node goes through rounds of all its values, which are said to begin so many seconds after each other.
After each round its state is saved twice, in turn: as nodes do it, and as a snapshot. Both are durable
when they return. Rounds count from the fourth snapshot on: the first three make new files, which takes
longer than to write over them, as later ones are.
"""

import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measurement import Rows, add_results, machine, parser_of
from benchmarks.outer_arithmetic import RoundsOfOneNode, Stages
from node.exchange.codecs.tiles import Tiles
from node.exchange.held_results import HeldResults
from node.exchange.state.on_disk import StateOnDisk
from node.exchange.state.snapshot import SnapshotFolder
from node.history import History

WAYS = ("as nodes do", "a snapshot a round")


@dataclass
class Cost:
    """Of all saving in one way."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    written: int = 0  # bytes that were given to the system
    longest: float = 0.0

    def add(self, work: Callable[[], object]) -> None:
        """Does it, and counts it."""
        written, began, cpu = _written(), time.perf_counter(), time.thread_time()
        work()
        took = time.perf_counter() - began
        self.seconds += took
        self.longest = max(self.longest, took)
        self.cpu_seconds += time.thread_time() - cpu
        self.written += _written() - written


def _written() -> int:
    lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    return int(dict(line.split(": ") for line in lines)["wchar"])


def measured(
    folder: Path, *, codec: str, values: int, round_seconds: float, rounds: int
) -> dict[str, Cost]:
    """Some rounds of one node in a new folder, which may be removed."""
    node = RoundsOfOneNode(codec=codec, values=values, nodes=2, fragments=1, tiles=Tiles(1))
    history, held, now = History(folder / "history"), HeldResults(), 0.0
    disk = StateOnDisk(folder / "nodes", history=history, clock=lambda: now)
    snapshots = SnapshotFolder(folder / "snapshots")
    snapshots.path.mkdir()
    costs = {way: Cost() for way in WAYS}
    seen: set[int] = set()
    counted = 0
    while counted < rounds:
        if counted == 0:
            costs = {way: Cost() for way in WAYS}
        if len(seen) >= 3:
            counted += 1
        now += round_seconds
        commit, results = node.run(Stages(time.thread_time))
        history.add(commit)
        for payload in results.values():
            held.hold(payload)
        costs[WAYS[0]].add(lambda: disk.save(node.outer, held))
        costs[WAYS[1]].add(lambda: snapshots.save(*node.outer.held()))
        seen.update(disk.snapshots.rounds())
    return costs


def main() -> None:
    """Prints a row for each size and way, and writes the results."""
    parser = parser_of(__doc__)
    parser.add_argument("--values", type=int, nargs="+", default=[4_900_000, 64_000_000])
    parser.add_argument("--round-seconds", type=float, nargs="+", default=[0.6, 6.0])
    parser.add_argument("--rounds", type=int, default=32)
    parser.add_argument("--codec", default="ec2")
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure")
    add_results(parser)
    asked = parser.parse_args()
    results = Rows(asked.results, about=machine(), is_printed=False)
    print("values | seconds a round | saved | MB a round | s a round | s of processor | longest s")
    for values, round_seconds in zip(asked.values, asked.round_seconds, strict=True):
        folder = Path(tempfile.mkdtemp(prefix="saving-", dir=asked.folder))
        try:
            costs = measured(
                folder,
                codec=asked.codec,
                values=values,
                round_seconds=round_seconds,
                rounds=asked.rounds,
            )
        finally:
            shutil.rmtree(folder)
        for way, cost in costs.items():
            row = {
                "values": values,
                "round_seconds": round_seconds,
                "codec": asked.codec,
                "rounds": asked.rounds,
                "saved": way,
                "bytes_a_round": cost.written / asked.rounds,
                "seconds_a_round": cost.seconds / asked.rounds,
                "cpu_seconds_a_round": cost.cpu_seconds / asked.rounds,
                "longest_seconds": cost.longest,
            }
            print(
                f"{values:,} | {round_seconds:g} | {way} | {cost.written / asked.rounds / 1e6:,.1f} | "
                f"{cost.seconds / asked.rounds:.3f} | {cost.cpu_seconds / asked.rounds:.3f} | "
                f"{cost.longest:.3f}",
                flush=True,
            )
            results.add(row)


if __name__ == "__main__":
    main()
