"""How the owner of a node stops or pauses it: Ctrl-C, SIGTERM, a closed terminal, or another command.

The first signal drains the node when it has a round in flight; the second one, or the first when
there is nothing to finish, lets it leave at once: it says goodbye and ends what it started. Later
ones are ignored: they would break that off, and leave ranks or p2pd behind. A cloud that takes the machine
away drains it too, for as long as the machine has.
"""

import asyncio
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Self

import structlog

from node.config import SETTINGS_FILE, load_settings, require_node_folder
from node.machine.notices import Leaving
from protocol.errors import SystemRefusedError, UsageError
from protocol.files.durable import FolderLock, remove_durably, write_atomically
from protocol.service.notify import NOBODY, ServiceManager, stop_signals

log = structlog.get_logger()

GOODBYE_SECONDS = 20.0
"""How long a node that leaves at once may take to end what it started."""

ENDING_SECONDS = 90.0
"""The same with the last snapshot of a large model: what a service manager should grant beside a drain."""


class NotSavedError(SystemRefusedError):
    """The node has left, and the disk has not taken what it held last: no end in good order."""


class StopSignals:
    """Within its `with`, signals end the task that made it, and `is_asked` tells that they did.

    Afterwards they do nothing any more, for the process ends.
    """

    def __init__(self, manager: ServiceManager = NOBODY) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.is_asked = False
        self._is_signalled = False
        self._is_ending = False
        self._drain: Callable[[float], bool] | None = None
        self._drain_seconds = 0.0
        self._task = task
        self.manager = manager
        self._numbers = stop_signals()

    def __enter__(self) -> Self:
        for number in self._numbers:
            asyncio.get_running_loop().add_signal_handler(number, self._stop)
        return self

    def __exit__(self, *_: object) -> None:
        for number in self._numbers:
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)

    def heed_stdin(self) -> None:
        """The end of standard input stops the node like a signal."""
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), self._read_stdin)

    def _read_stdin(self) -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            self._stop()

    @contextmanager
    def blocking(self) -> Iterator[None]:
        """For imports that take seconds, during which the event loop hears of no signal.

        Raises CancelledError in the midst of them, so nothing in the block may need winding up.
        """
        before = {number: signal.signal(number, self._break_off) for number in self._numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self.is_asked:  # raised where Python drops exceptions: in a destructor, say
            raise asyncio.CancelledError

    @contextmanager
    def draining(self, drain: Callable[[float], bool], *, seconds: float) -> Iterator[None]:
        """Within it, signals are passed on to `drain`, with the seconds that it may take.

        With `seconds` first, with 0 after that. Where it returns False, the task is cancelled.
        """
        self._drain, self._drain_seconds = drain, seconds
        try:
            yield
        finally:
            self._drain = None
            self._is_ending = self._is_ending or self.is_asked

    def _stop(self) -> None:
        if self._is_ending:
            return
        is_first, self._is_signalled = not self._is_signalled, True
        if is_first and self.is_asked:
            # The machine that a notice was of is shut down, and its time is what is being used.
            log.info("leaving already; ask again to leave at once")
            return
        self._leave(self._drain_seconds if is_first else 0.0)

    def leave(self, leaving: Leaving) -> None:
        """The machine is about to be taken away. Nothing new to one that is leaving."""
        if self._is_ending or self.is_asked:
            return
        log.warning("this machine is about to be taken away", why=leaving.reason)
        self._leave(leaving.within_seconds)

    def _leave(self, within_seconds: float) -> None:
        is_first, self.is_asked = not self.is_asked, True
        if self._drain is not None and self._drain(within_seconds):
            if is_first:
                log.info(
                    "leaving with the round in flight, once it is audited; ask again to leave at once",
                    within_seconds=within_seconds,
                )
                self.manager.stopping(
                    "leaving with the round in flight",
                    within_seconds=within_seconds + ENDING_SECONDS,
                )
            return
        self._is_ending = True
        log.info("stopping")
        self.manager.stopping("leaving", within_seconds=ENDING_SECONDS)
        self._task.cancel()

    def _break_off(self, _number: int, _frame: FrameType | None) -> None:
        if not self.is_asked:
            self.is_asked = self._is_signalled = self._is_ending = True
            raise asyncio.CancelledError  # and not a word: it may have come in the midst of one


# What the owner of a node asks of it from another process: to leave with its work, or to train nothing.
#
# A paused node stays a member and applies commits. A file in its folder says so, so it stays paused over
# restarts; a running node looks for it.


PAUSED_FILE = "paused"

LOOK_SECONDS = 1.0
"""How often a running node looks."""


def drain_node(folder: Path, *, within_seconds: float, say: Callable[[str], None]) -> None:
    """Signals the folder's node and waits until it has ended. Raises AtollError.

    The node's own limit holds as well (drain_within in node.toml), so `within_seconds` only shortens it. When
    it has not ended within the limit it is signalled again, and leaves at once.
    """
    require_node_folder(folder)
    process_id = FolderLock.holder_of(folder)
    try:
        process = -1 if process_id is None else os.pidfd_open(process_id)
    except ProcessLookupError:
        process = -1
    # Looked at again: from here on the handle is that of the very process that holds the folder.
    if process_id is None or process < 0 or FolderLock.holder_of(folder) != process_id:
        raise SystemRefusedError(
            f"no node runs in {folder}, so there is nothing to drain",
            next_step="'ps' shows what runs; choose another folder with --dir DIR",
        )
    try:
        say(f"draining the node in {folder} (process {process_id}), {within_seconds:g} s at most")
        own_seconds = load_settings(folder).drain_within
        if own_seconds < within_seconds:
            say(
                f"its own limit is {own_seconds:g} s (drain_within in {folder / SETTINGS_FILE}, unless "
                "it was started with --drain-within): it may leave sooner than asked"
            )
        if _ends(process, signal.SIGTERM, within_seconds):
            return
        say("out of time: it leaves at once")
        if not _ends(process, signal.SIGTERM, GOODBYE_SECONDS):
            raise SystemRefusedError(
                f"the node in {folder} (process {process_id}) does not end",
                next_step=f"see its log, or 'kill -KILL {process_id}'",
            )
    finally:
        os.close(process)


def _ends(process: int, number: signal.Signals, seconds: float) -> bool:
    """Signals the process behind a pidfd; whether it ends within so long."""
    try:
        signal.pidfd_send_signal(process, number)
    except ProcessLookupError:
        return True
    ended, _, _ = select.select([process], [], [], seconds)
    return bool(ended)


def is_paused(folder: Path) -> bool:
    """Whether the owner of the folder's node has paused it."""
    return (folder / PAUSED_FILE).exists()


def why_paused(folder: Path) -> str:
    """Why the owner lets it train nothing, with what ends that; empty where it may train."""
    return "'atoll node resume'" if is_paused(folder) else ""


def pause_node(folder: Path, *, say: Callable[[str], None]) -> None:
    """Pauses it, now or when it starts. Raises UsageError when it is."""
    require_node_folder(folder)
    if is_paused(folder):
        raise UsageError(
            f"the node in {folder} is paused already", next_step="'atoll node resume' ends that"
        )
    write_atomically(folder / PAUSED_FILE, b"")
    if FolderLock.holder_of(folder) is None:
        say(f"no node runs in {folder} now: it is paused when it starts")
    else:
        say("it ends its inner step, contributes what it has, and trains nothing from then on")


def resume_node(folder: Path, *, say: Callable[[str], None]) -> None:
    """Lets it train again. Raises UsageError when it is not paused."""
    require_node_folder(folder)
    if not is_paused(folder):
        raise UsageError(
            f"the node in {folder} is not paused", next_step="'atoll status' shows what it does"
        )
    remove_durably(folder / PAUSED_FILE)
    say("it trains again from the next round on")
