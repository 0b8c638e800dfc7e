"""Processor time of a process with all that came of it, and of the whole machine. Linux only.

What a figure says of links is worth something only where the processor hardly counted, so it stands
beside the figure.
"""

import os
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_IDLE = slice(3, 5)  # idle, and waiting for disks
_TIMES = slice(0, 8)  # guests' time, which follows, is in user's already


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorTime:
    """Seconds of all cores together, since processes and machine began."""

    ours: float
    """Of processes that live; who has ended meanwhile is missing."""
    machine: float

    def __sub__(self, earlier: "ProcessorTime") -> "ProcessorTime":
        return ProcessorTime(ours=self.ours - earlier.ours, machine=self.machine - earlier.machine)


def processor_time(root: int) -> ProcessorTime:
    """Now; `root` is the process whose children, and theirs, are ours."""
    ticks_per_second = os.sysconf("SC_CLK_TCK")
    stats = {
        process_id: stat
        for process_id, stat in ((f.name, _stat_of(f)) for f in _PROC.iterdir())
        if stat is not None
    }
    return ProcessorTime(
        ours=ticks_of_tree(stats, root) / ticks_per_second,
        machine=ticks_of_machine((_PROC / "stat").read_text()) / ticks_per_second,
    )


def seconds_of(process_id: int, *, with_ended: bool = False) -> float:
    """Of one process, and of the children that have ended and that it has waited for, if asked."""
    fields = _fields((_PROC / str(process_id) / "stat").read_text())
    return sum(map(int, fields[11 : 15 if with_ended else 13])) / os.sysconf("SC_CLK_TCK")


def ticks_of_machine(stat: str) -> int:
    """All but idle ones, from the text of /proc/stat."""
    ticks = [int(number) for number in stat.split("\n", 1)[0].split()[1:]]
    return sum(ticks[_TIMES]) - sum(ticks[_IDLE])


def ticks_of_tree(stats: dict[str, str], root: int) -> int:
    """Of a process and all below it, from the texts of /proc/*/stat by process."""
    fields = {int(name): _fields(text) for name, text in stats.items()}
    children: dict[int, list[int]] = {}
    for process_id, (_, parent, *_) in fields.items():
        children.setdefault(int(parent), []).append(process_id)
    ticks, found = 0, [root]
    while found:
        process_id = found.pop()
        ticks += sum(map(int, fields[process_id][11:13])) if process_id in fields else 0
        found += children.get(process_id, [])
    return ticks


def _fields(stat: str) -> list[str]:
    """After the name, which may have spaces and brackets in it."""
    return stat.rpartition(")")[2].split()


def _stat_of(folder: Path) -> str | None:
    if not folder.name.isdecimal():
        return None
    try:
        return (folder / "stat").read_text()
    except OSError:
        return None  # it has ended meanwhile
