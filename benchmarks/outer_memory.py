"""Bytes a parameter that a daemon's outer state takes in memory, and the slope over several sizes.

    python -m benchmarks.outer_memory [--millions 16 64 128] [--fragments 1 8] [--nodes 2] [--codec int4]
        [--restarted] [--output outer-memory.jsonl]

Each setting is a process of its own: vectors in shared memory as a daemon has them, and rounds of every
fragment through `benchmarks.outer_arithmetic`. Held is what the system counts for the process between two
rounds, most is the largest that it counted in the rounds; both less what a process of a small model takes.
`--restarted`: the process begins with a snapshot from its disk, as after a restart.
"""

import argparse
import gc
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.outer_arithmetic import RoundsOfOneNode, Stages
from node.disk.snapshot_folder import SnapshotFolder
from node.exchange.codecs.codec import ONE_THREAD
from node.machine.hardware import keep_freed_memory
from protocol.files.leftovers import TemporaryFolder

MILLION = 1 << 20
SMALL = 1 << 20
"""Elements of a model that takes next to nothing: the process and its libraries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One process."""

    codec: str
    elements: int
    fragments: int
    nodes: int
    restarted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes of a process, shared memory included."""

    between: int  # rounds
    most: int  # in them


def held_by(setting: Setting) -> Held:
    """Lives through two rounds of each fragment in this process, and asks the system."""
    keep_freed_memory()  # as a node does
    rounds = RoundsOfOneNode(
        codec=setting.codec,
        values=setting.elements // setting.fragments,
        nodes=setting.nodes,
        fragments=setting.fragments,
        tiles=ONE_THREAD,
    )
    stages = Stages(lambda: 0.0)
    if setting.restarted:
        rounds.run(stages)
        temporary = TemporaryFolder("benchmark")
        folder = SnapshotFolder(temporary.path)
        folder.save(*rounds.outer.held())
        kept = folder.load_newest(rounds.run_digest, rounds.outer.layout_digest)
        assert kept is not None
        rounds.outer.restore(*kept)
        del kept
        temporary.remove()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # what was most so far does not count
    for _ in range(2 * setting.fragments):
        rounds.run(stages)
    gc.collect()
    words = dict(
        line.split(":")
        for line in Path("/proc/self/status").read_text().splitlines()
        if ":" in line
    )
    return Held(
        between=1024 * int(words["VmRSS"].split()[0]), most=1024 * int(words["VmHWM"].split()[0])
    )


def measured(setting: Setting) -> Held:
    """The same in a fresh process."""
    told = subprocess.run(
        [sys.executable, "-m", "benchmarks.outer_memory", "--alone", json.dumps(asdict(setting))],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return Held(**json.loads(told.splitlines()[-1]))


def main() -> None:
    """Prints a row for each size, and the slope over all sizes, for each number of fragments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--fragments", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--codec", default="int4")
    parser.add_argument("--restarted", action="store_true")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--alone", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.alone:
        print(json.dumps(asdict(held_by(Setting(**json.loads(asked.alone))))))
        return
    print("fragments | million parameters | bytes held a parameter | at most")
    for fragments in asked.fragments:
        found: list[tuple[int, Held]] = []
        for elements in (SMALL, *(MILLION * millions for millions in asked.millions)):
            setting = Setting(
                codec=asked.codec,
                elements=elements,
                fragments=fragments,
                nodes=asked.nodes,
                restarted=asked.restarted,
            )
            held = measured(setting)
            if asked.output is not None:
                with asked.output.open("a") as file:
                    file.write(json.dumps({**asdict(setting), **asdict(held)}) + "\n")
            found.append((elements, held))
            if len(found) > 1:
                _say(fragments, f"{elements // MILLION}", found[0], found[-1])
        if len(found) > 2:
            _say(fragments, "slope", found[1], found[-1])


def _say(fragments: int, what: str, less: tuple[int, Held], more: tuple[int, Held]) -> None:
    elements = more[0] - less[0]
    between = (more[1].between - less[1].between) / elements
    most = (more[1].most - less[1].most) / elements
    print(f"{fragments} | {what} | {between:.2f} | {most:.2f}", flush=True)


if __name__ == "__main__":
    main()
