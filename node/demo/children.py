"""The processes that the demo starts: watched, and stopped whatever happens. It touches no others.

Each child leads a session of its own, so that Ctrl-C of the terminal reaches only the demo. A child
that has ended is kept unreaped until `stop`: as long as it is, the kernel gives its process id and
group to nobody else, and a signal cannot reach a stranger.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from protocol.errors import AtollError, ExitCode, SystemRefusedError, TemporaryError

STOP_SECONDS = 10.0
"""How long a child may take to end after SIGTERM."""

_POLL_SECONDS = 0.1
_LEFTOVER_SECONDS = 0.5
"""How long the processes of a crashed child have to clean up, shared memory above all."""
_TAIL_LINES = 12


class ChildDiedError(AtollError):
    """A child ended that should not have. Its exit code becomes ours."""

    def __init__(self, child: "Child", code: int) -> None:
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        elif code == 0:
            how = "ended before its work was done"
        else:
            how = f"ended with exit code {code}"
        tail = child.log_tail()
        ending = f"; its log ends with\n{tail}" if tail else "; its log is empty"
        super().__init__(f"{child.name} {how}{ending}", next_step=f"read {child.log}")
        if code < 0:
            self.exit_code = ExitCode.SYSTEM  # nobody but the machine's owner or its kernel does it
        elif code in set(ExitCode) - {ExitCode.OK}:
            self.exit_code = ExitCode(code)


class Child:
    """One process that the demo started."""

    def __init__(self, *, name: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.name = name
        self.log = log
        self.may_end = False  # whether ending with exit code 0 is what it should do now
        self.pid = process.pid
        self._process = process
        self._code: int | None = None

    def exit_code(self) -> int | None:
        """The exit code, minus the signal's number when one killed it, or None while it runs."""
        if self._code is None:
            # WNOWAIT leaves it unreaped; Popen.poll would reap.
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                is_exit = ended.si_code == os.CLD_EXITED
                self._code = ended.si_status if is_exit else -ended.si_status
        return self._code

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the child alone: it ends its own processes in its own way."""
        os.kill(self.pid, number)

    def kill_session(self) -> None:
        """Kills the child and everything it left behind."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> None:
        """Gives the process id back to the kernel. Nothing may be sent to the child after it."""
        self._process.wait()

    def log_text(self) -> str:
        """All that the child has written so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def log_tail(self) -> str:
        """The last lines it wrote, indented."""
        return "\n".join(f"  | {line}" for line in self.log_text().splitlines()[-_TAIL_LINES:])


class Children:
    """The children by name. Leaving the `with` block stops them all."""

    def __init__(
        self,
        *,
        logs: Path,
        environment: Mapping[str, str],
        working_folder: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        if not hasattr(os, "waitid"):
            raise SystemRefusedError(
                f"Python {sys.version.split()[0]} on {sys.platform} cannot watch processes safely",
                next_step="use Linux, or Python 3.13 or later",
            )
        self._logs = logs
        self._environment = dict(environment)
        self._working_folder = working_folder
        self._clock = clock
        self._pause = pause
        self._children: dict[str, Child] = {}
        self._interrupted_by: signal.Signals | None = None
        self._handlers: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before = signal.getsignal(number)
            if number == signal.SIGHUP and before == signal.SIG_IGN:
                continue  # nohup
            self._handlers[number] = before
            signal.signal(number, self._note_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.stop()
        finally:
            for number, before in self._handlers.items():
                signal.signal(number, before)  # type: ignore[arg-type] # as getsignal gave it

    def _note_signal(self, number: int, _: FrameType | None) -> None:
        # Only a note: an exception raised here could fall between a fork and our knowing of it.
        self._interrupted_by = signal.Signals(number)

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        output: Path | None = None,
        more_environment: Mapping[str, str] | None = None,
    ) -> Child:
        """Starts a process. Its log is `<name>.log`; `output` takes its stdout apart from that."""
        if name in self._children:
            raise ValueError(f"there is a child {name} already")
        log = self._logs / f"{name}.log"
        with contextlib.ExitStack() as files:
            log_file = files.enter_context(log.open("wb"))
            out_file = files.enter_context(output.open("wb")) if output is not None else log_file
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out_file,
                stderr=log_file,
                env=self._environment | dict(more_environment or {}),
                cwd=self._working_folder,
                start_new_session=True,
            )
        child = self._children[name] = Child(name=name, process=process, log=log)
        return child

    def check(self) -> None:
        """Raises KeyboardInterrupt after a signal, ChildDiedError when a child should still run."""
        if self._interrupted_by is not None:
            raise KeyboardInterrupt
        for child in self._children.values():
            code = child.exit_code()
            if code is not None and (code != 0 or not child.may_end):
                raise ChildDiedError(child, code)

    def wait_until(self, is_done: Callable[[], bool], *, seconds: float, what: str) -> None:
        """Waits, watching all children. Raises TemporaryError when `what` takes too long."""
        give_up_at = self._clock() + seconds
        while True:
            self.check()
            if is_done():
                return
            if self._clock() >= give_up_at:
                raise TemporaryError(
                    f"{what} took more than {seconds:.0f} s",
                    next_step=f"read the logs in {self._logs}, or try again on a less busy machine",
                )
            self._pause(_POLL_SECONDS)

    def wait_for(self, children: Sequence[Child], *, seconds: float, what: str) -> None:
        """Waits until these children have ended with exit code 0."""
        for child in children:
            child.may_end = True
        self.wait_until(
            lambda: all(child.exit_code() is not None for child in children),
            seconds=seconds,
            what=what,
        )

    def watch_for(self, seconds: float) -> None:
        """Lets time pass, watching all children."""
        go_on_at = self._clock() + seconds
        while self._clock() < go_on_at:
            self.check()
            self._pause(_POLL_SECONDS)
        self.check()

    def end(self, child: Child) -> None:
        """Asks one child to end, and waits until it has done so with exit code 0."""
        child.may_end = True
        child.signal(signal.SIGTERM)
        self.wait_for([child], seconds=STOP_SECONDS, what=f"stopping {child.name}")

    def stop(self, *, stop_seconds: float = STOP_SECONDS) -> None:
        """Stops all children: SIGTERM, then SIGKILL for those that take too long."""
        has_crashed = any(child.exit_code() for child in self._children.values())
        for child in self._running():
            child.signal(signal.SIGTERM)
        give_up_at = self._clock() + stop_seconds
        while self._running() and self._clock() < give_up_at:
            self._pause(_POLL_SECONDS)
        for child in (late := self._running()):
            child.signal(signal.SIGKILL)
        if late or has_crashed:
            self._pause(_LEFTOVER_SECONDS)
        for child in self._children.values():
            child.kill_session()
            child.reap()
        self._children.clear()

    def _running(self) -> list[Child]:
        return [child for child in self._children.values() if child.exit_code() is None]
