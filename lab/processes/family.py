"""Commands as processes, and all that comes of them: found by a mark that children inherit, ended, timed.

A process that we did not start ourselves (a rank, p2pd) is signalled through a descriptor of it, and
only when it bears the mark: its number may be another's by the time that the signal is sent.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

SOURCES = Path(__file__).parents[2]

MARK = "ATOLL_TEST_MARK"

_POLL_SECONDS = 0.02
_TRACKER_SECONDS = 5.0
_KILL_SECONDS = 10.0


def atoll_command(*arguments: str | Path) -> list[str]:
    """A command as people type it."""
    # -P: a folder's own protocol.py or node.py must not stand in for ours.
    return [sys.executable, "-P", "-m", "protocol.terminal.cli", *map(str, arguments)]


def atoll_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """Our own code wherever we run from, one thread for each process, nothing of the caller's Atoll."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("ATOLL_")}
    return kept | {"PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"} | dict(changes)


def maps_of(process_id: int) -> str:
    """What it has mapped into memory; empty when it has ended."""
    try:
        return _of(process_id, "maps").read_text()
    except OSError:
        return ""


def end_all(find: Callable[[], set[int]]) -> None:
    """Kills all that are found, until none are: what they start meanwhile, too.

    Python's resource trackers are left until the others are gone. They give back the shared memory
    of processes that were killed, and then end by themselves; killed with them, they leave it behind
    until the machine restarts.
    """
    began_at = time.monotonic()
    while found := find():
        seconds = time.monotonic() - began_at
        if seconds > _TRACKER_SECONDS + _KILL_SECONDS:
            raise RuntimeError(f"processes {sorted(found)} do not end")
        _kill(found if seconds > _TRACKER_SECONDS else _without_trackers(found), find)
        time.sleep(_POLL_SECONDS)


def _kill(process_ids: set[int], find: Callable[[], set[int]]) -> None:
    """Through descriptors, which are found out about before they are used."""
    with contextlib.ExitStack() as opened:
        descriptors = {}
        for process_id in process_ids:
            with contextlib.suppress(ProcessLookupError):
                descriptor = os.pidfd_open(process_id)
                opened.callback(os.close, descriptor)
                descriptors[process_id] = descriptor
        still_meant = find() if descriptors else set()
        for process_id, descriptor in descriptors.items():
            if process_id in still_meant:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)


class Family:
    """A process and all that came of it, wherever in the tree of processes they are."""

    def __init__(self, mark: str, *, variable: str = MARK) -> None:
        self._mark = f"{variable}={mark}".encode()

    def members(self) -> set[int]:
        """All that live."""
        numbers = (int(f.name) for f in Path("/proc").iterdir() if f.name.isdecimal())
        return {process_id for process_id in numbers if self._bears_mark(process_id)}

    def ranks(self) -> list[int]:
        """Processes that the forkserver forked: both are known by its command line."""
        forked = [found for found in self.members() if "forkserver" in _command_line(found)]
        return sorted(found for found in forked if _parent_of(found) in forked)

    def p2pd(self) -> int | None:
        """The libp2p daemon."""
        named = (p for p in self.members() if _command_line(p).split("\0")[0].endswith("p2pd"))
        return next(named, None)

    def open(self, process_id: int) -> int | None:
        """A descriptor of one of them, which nobody else can come to mean; None when it has ended."""
        try:
            descriptor = os.pidfd_open(process_id)
        except ProcessLookupError:
            return None
        if self._bears_mark(process_id):
            return descriptor
        os.close(descriptor)
        return None

    def send(self, process_id: int, number: signal.Signals) -> bool:
        """Signals one of them; False when it is not there any more."""
        if (descriptor := self.open(process_id)) is None:
            return False
        try:
            signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(descriptor)
        return True

    def send_all(self, number: signal.Signals) -> None:
        """Signals all that live."""
        for process_id in self.members():
            self.send(process_id, number)

    def kill(self) -> None:
        """Kills all that live, without waiting; Python's resource trackers end after them."""
        _kill(_without_trackers(self.members()), self.members)

    def end(self) -> None:
        """Kills all that live, and waits until they have ended."""
        end_all(self.members)

    def _bears_mark(self, process_id: int) -> bool:
        try:
            return self._mark in _of(process_id, "environ").read_bytes().split(b"\0")
        except OSError:
            return False  # it ended meanwhile, or is a stranger's


def _of(process_id: int, name: str) -> Path:
    return Path("/proc") / str(process_id) / name


def _command_line(process_id: int) -> str:
    try:
        return _of(process_id, "cmdline").read_text()
    except OSError:
        return ""


def _without_trackers(process_ids: set[int]) -> set[int]:
    # One without a command line is in the midst of exec, and may become a tracker; or it has ended.
    lines = {process_id: _command_line(process_id) for process_id in process_ids}
    return {
        p for p, line in lines.items() if line and "multiprocessing.resource_tracker" not in line
    }


def _parent_of(process_id: int) -> int:
    try:
        stat = _of(process_id, "stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[1])


# Processor time of a process with all that came of it, and of the whole machine. Linux only.
#
# What a figure says of links is worth something only where the processor hardly counted, so it stands
# beside the figure.


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


# Whatever a benchmark started ends with it, however it dies: what stayed would spoil the next figures.
#
#     if __name__ == "__main__":
#         with nothing_left():
#             main()
#
# A signal ends the benchmark as an error would: `with` blocks take away what they made. For the rest,
# and for a benchmark that was killed, there is a caretaker: a process that waits for the benchmark's end,
# and then ends all that bears its mark.
#
# Not PR_SET_PDEATHSIG: it comes when the *thread* ends that started a child, it needs a preexec_fn, which
# forks and gRPC does not survive that, and it says nothing to a child's children. Not the end of a pipe
# either: any fork keeps that open.


STARTED_BY = "STARTED_BY_BENCHMARK"
"""Not among the variables that begin with ATOLL_, which are kept from what benchmarks start."""


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """For the whole of a benchmark. Needs Linux for the caretaker; elsewhere signals alone are minded."""
    mark = uuid.uuid4().hex
    os.environ.pop(STARTED_BY, None)  # of a benchmark that started us; its caretaker lets ours live
    if sys.platform == "linux":
        subprocess.Popen(
            [sys.executable, "-m", "lab.processes.family", str(os.getpid()), mark],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # who reads ours to its end does not wait for it
            cwd=SOURCES,
            start_new_session=True,  # Ctrl-C, and a signal to all of us, are not for it
        )
    os.environ[STARTED_BY] = mark

    def stop(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)  # who signals again does not want to wait
        # First: some `with` blocks, such as a pool's, wait until what they began has done its work.
        Family(mark, variable=STARTED_BY).kill()
        sys.exit(f"stopped by {signal.Signals(number).name}; everything that was started has ended")

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # in the background, SIGINT too
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, stop)
    yield


def main() -> None:
    """The caretaker's life."""
    benchmark, mark = int(sys.argv[1]), sys.argv[2]
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(benchmark)
        if os.getppid() == benchmark:  # else it has ended, and the number may be another's
            select.select([descriptor], [], [])
    Family(mark, variable=STARTED_BY).end()


if __name__ == "__main__":
    main()
