"""What it takes to keep a node's outer state on disk: time, what waits for it, and bytes a parameter.

    python -m benchmarks.saving [--values 16000000 64000000] [--fragments 1 8] [--round-seconds 2]
        [--rounds 32] [--codec int4] [--folder .] [--results saving.jsonl]

One node goes through rounds as fast as it can; each is said to begin so many seconds after the one before,
and that decides how often a snapshot is due. Rounds go on while a snapshot is written. Printed are bytes
written in a round; the longest time for which a save holds the exchange's lock, and for which a commit waits
for what it changes to be written; what a snapshot takes that nothing goes on beside; and the most that lay
on the disk, results and what is unfinished included. Checkpoints of the inner optimizer (two of 8 bytes a
parameter, or less) are not in it.
"""

import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.measurement import Rows, add_results, machine, parser_of
from benchmarks.outer_arithmetic import RoundsOfOneNode, Stages
from node.disk.history import History
from node.exchange.codecs.codec import Tiles
from node.exchange.giving import HeldResults
from node.exchange.state.on_disk import Saving, StateOnDisk
from node.heavy import in_thread


@dataclass
class Longest:
    """The longest that one of several calls took."""

    seconds: float = 0.0

    def of(self, work: Callable[..., object]) -> Callable[..., object]:
        """The same, and timed."""

        def timed(*given: object, **named: object) -> object:
            began = time.perf_counter()
            try:
                return work(*given, **named)
            finally:
                self.seconds = max(self.seconds, time.perf_counter() - began)

        return timed


class TimedDisk(StateOnDisk):
    """As a node's; it knows for how long it keeps the state from changing."""

    longest_begin = 0.0

    def begin(self, outer: object, held: object, *, is_last: bool = False) -> Saving:
        began = time.perf_counter()
        saving = super().begin(outer, held, is_last=is_last)  # type: ignore[arg-type]
        if saving.results:  # the first save of a process has none to lead from
            self.longest_begin = max(self.longest_begin, time.perf_counter() - began)
        return saving


def _written() -> int:
    lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    return int(dict(line.split(": ") for line in lines)["wchar"])


def _held(folder: Path) -> int:
    sizes = []
    for path in folder.rglob("*"):
        try:
            sizes.append(path.stat().st_size if path.is_file() else 0)
        except FileNotFoundError:  # it has just got its name
            continue
    return sum(sizes)


async def measured(
    folder: Path, *, codec: str, values: int, fragments: int, round_seconds: float, rounds: int
) -> dict[str, float]:
    """Some rounds of one node in a new folder, which may be removed."""
    node = RoundsOfOneNode(
        codec=codec, values=values // fragments, nodes=2, fragments=fragments, tiles=Tiles(1)
    )
    num_elements = node.outer.layout.num_elements
    history, held, now = History(folder / "history"), HeldResults(), 0.0
    disk = TimedDisk(
        folder / "snapshots",
        history=history,
        besides_bytes=8 * num_elements,
        clock=lambda: now,
        aside=in_thread,
    )
    lock, waits, most = asyncio.Lock(), Longest(), 0
    node.outer._before_change = waits.of(node.outer._before_change)  # type: ignore[method-assign, assignment]
    await disk.save(node.outer, held, lock=lock, heavy=in_thread)
    began, written = time.perf_counter(), _written()
    for _ in range(rounds):
        now += round_seconds
        async with lock:
            commit, results = await in_thread(partial(node.run, Stages(time.thread_time)))
            history.add(commit)
        for payload in results.values():
            held.hold(payload)
        await disk.save(node.outer, held, lock=lock, heavy=in_thread)
        held.forget_before(node.outer.round - 1)
        most = max(most, _held(folder))
    await disk.settled()
    seconds, num_bytes = time.perf_counter() - began, _written() - written
    alone = time.perf_counter()
    await in_thread(partial(disk.save_whole, node.outer))
    return {
        "seconds": seconds,
        "bytes_a_round": num_bytes / rounds,
        "longest_lock_seconds": disk.longest_begin,
        "longest_wait_of_a_commit_seconds": waits.seconds,
        "snapshot_alone_seconds": time.perf_counter() - alone,
        "bytes_a_parameter": max(most, _held(folder)) / num_elements,
    }


def main() -> None:
    """Prints a row for each size and number of fragments, and writes the results."""
    parser = parser_of(__doc__)
    parser.add_argument("--values", type=int, nargs="+", default=[16_000_000, 64_000_000])
    parser.add_argument("--fragments", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--round-seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=32)
    parser.add_argument("--codec", default="int4")
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure")
    add_results(parser)
    asked = parser.parse_args()
    rows = Rows(asked.results, about=machine(), is_printed=False)
    print("values | fragments | MB a round | lock s | commit waits s | alone s | bytes a parameter")
    for values in asked.values:
        for fragments in asked.fragments:
            folder = Path(tempfile.mkdtemp(prefix="saving-", dir=asked.folder))
            setting = {
                "codec": asked.codec,
                "values": values,
                "fragments": fragments,
                "round_seconds": asked.round_seconds,
                "rounds": asked.rounds,
            }
            try:
                found = asyncio.run(measured(folder, **setting))
            finally:
                shutil.rmtree(folder)
            rows.add(setting | found)
            print(
                f"{values:,} | {fragments} | {found['bytes_a_round'] / 1e6:,.1f} | "
                f"{found['longest_lock_seconds']:.3f} | "
                f"{found['longest_wait_of_a_commit_seconds']:.3f} | "
                f"{found['snapshot_alone_seconds']:.3f} | {found['bytes_a_parameter']:.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
