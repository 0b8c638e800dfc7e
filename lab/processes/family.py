"""Commands as processes, and all that comes of them: found by a mark that children inherit.

A process that we did not start ourselves (a rank, p2pd) is signalled through a descriptor of it, and
only when it bears the mark: its number may be another's by the time that the signal is sent.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

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
