"""Faults for real processes: a signal within milliseconds of a log line that says where a round is.

    with FollowedLogs() as logs:
        faults = Faults(logs)
        faults.kill(node).when(round=7, phase="reducing").then_restart(after_seconds=1)
        faults.stop(node).when(round=9, phase="training").for_seconds(5)
        faults.kill(coordinator).when(round=3, phase="committed").then_restart(after_seconds=0)

Nodes and coordinators tell their phases with `--log-json` and `$ATOLL_LOG=debug`. A node passes
training, contributing, reducing, handing out, holding, applying and adopting, and catching up when
it was away; a coordinator opened, exchanging, committed and settled. The signal comes a few
milliseconds after the line, so a shorter phase may be over by then; what a process does between two
of its own instructions is for tests within one process.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

from lab.processes.logs import Entry, FollowedLogs

STRIKE_AGAIN_SECONDS = 0.25
"""When a fault that came by time found nothing to strike; one at a phase waits for the next one."""


class Victim(Protocol):
    """A process of the swarm, and what came of it, as faults need it."""

    @property
    def name(self) -> str: ...
    @property
    def has_ended(self) -> bool: ...
    def kill(self) -> bool: ...
    def kill_rank(self) -> bool: ...
    def kill_p2pd(self) -> bool: ...
    def stop(self) -> bool: ...
    def go_on(self) -> None: ...
    def start(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Fired:
    """When a fault happened."""

    at: float  # wall clock, as in the logs
    round: int | None  # None for a fault that came by time
    phase: str | None


class Fault:
    """One fault: armed by `when` or `after`, it happens once."""

    def __init__(
        self, *, kind: str, victim: Victim, strike: Callable[[], bool], clock: Callable[[], float]
    ) -> None:
        self.kind = kind
        self.victim = victim
        self.fired: Fired | None = None
        self.is_over = False
        self._strike = strike
        self._clock = clock
        self._round: int | None = None
        self._phase: str | None = None
        self._due_at: float | None = None
        self._stopped_seconds: float | None = None
        self._pause_seconds: float | None = None
        self._ended_at: float | None = None
        self._fired_at = 0.0

    def __str__(self) -> str:
        where = "" if self._phase is None else f" at {self._phase} of round {self._round}"
        return f"{self.kind} {self.victim.name}{where}"

    def when(self, *, round: int, phase: str) -> Self:
        """Happens when the victim says that it is in this phase of this round, or of a later one."""
        self._round = round
        self._phase = phase
        return self

    def after(self, seconds: float) -> Self:
        """Happens so long after now, wherever the round is."""
        self._due_at = self._clock() + seconds
        return self

    def for_seconds(self, seconds: float) -> Self:
        """How long a stopped machine stands still."""
        self._stopped_seconds = seconds
        self.is_over = False  # should it have happened between the two calls
        return self

    def then_restart(self, *, after_seconds: float) -> Self:
        """Starts the victim again in its folder, so long after it has ended, however it ended."""
        self._pause_seconds = after_seconds
        self.is_over = False  # should it have happened between the two calls
        return self

    def hear(self, entry: Entry) -> None:
        """Takes a line of the victim's log."""
        if (
            self.fired is None
            and self._phase is not None
            and self._round is not None
            and entry.get("event") == "phase"
            and entry["phase"] == self._phase
            and entry["round"] >= self._round
        ):
            self._fire(entry["round"], self._phase)

    def tick(self) -> None:
        """Does what is due by time."""
        now = self._clock()
        if self.is_over:
            return
        if self.fired is None:
            if self._due_at is not None and now >= self._due_at:
                self._fire(None, None)
        elif self._stopped_seconds is not None:
            if now >= self._fired_at + self._stopped_seconds:
                self.victim.go_on()
                self.is_over = True
        elif self._pause_seconds is not None:
            self._restart_when_due(now, self._pause_seconds)
        else:
            self.is_over = True

    def _fire(self, round: int | None, phase: str | None) -> None:
        now = self._clock()
        # Nothing to strike may be a rank that is just starting, or a node that is away.
        if not self._strike():
            if self._due_at is not None:
                self._due_at = now + STRIKE_AGAIN_SECONDS
            return
        self._fired_at = now
        self.fired = Fired(at=time.time(), round=round, phase=phase)

    def _restart_when_due(self, now: float, pause_seconds: float) -> None:
        if self._ended_at is None and self.victim.has_ended:
            self._ended_at = now
        if self._ended_at is not None and now >= self._ended_at + pause_seconds:
            self.victim.start()
            self.is_over = True


class Faults:
    """The faults of one swarm. Made with its logs, which carry them out."""

    def __init__(self, logs: FollowedLogs, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        logs.listen(self._hear)
        logs.tick(self._tick)

    def kill(self, victim: Victim) -> Fault:
        """SIGKILL for the process itself; what came of it has to end by itself."""
        return self._add("kill", victim, victim.kill)

    def kill_rank(self, victim: Victim) -> Fault:
        """SIGKILL for one of a node's ranks."""
        return self._add("kill a rank of", victim, victim.kill_rank)

    def kill_p2pd(self, victim: Victim) -> Fault:
        """SIGKILL for a node's libp2p daemon; the node ends by itself."""
        return self._add("kill p2pd of", victim, victim.kill_p2pd)

    def stop(self, victim: Victim) -> Fault:
        """SIGSTOP for all processes of a node, as when a machine stalls; say for how long."""
        return self._add("stop", victim, victim.stop)

    @property
    def all(self) -> tuple[Fault, ...]:
        """All faults so far, in the order in which they were made."""
        with self._lock:
            return tuple(self._faults)

    @property
    def left(self) -> tuple[Fault, ...]:
        """Those that have not happened, or whose victim is not started again."""
        return tuple(fault for fault in self.all if not fault.is_over)

    def _add(self, kind: str, victim: Victim, strike: Callable[[], bool]) -> Fault:
        fault = Fault(kind=kind, victim=victim, strike=strike, clock=self._clock)
        with self._lock:
            self._faults.append(fault)
        return fault

    def _hear(self, name: str, entry: Entry) -> None:
        for fault in self.all:
            if fault.victim.name == name:
                fault.hear(entry)

    def _tick(self) -> None:
        for fault in self.all:
            fault.tick()
