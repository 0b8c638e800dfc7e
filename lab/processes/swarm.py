"""A swarm of real processes, by the commands that people type; for faults and figures.

All run where the caller is, which is this machine's loopback, or inside a host of the network laboratory.

Every member keeps its folder and its log over all its lives. Logs are JSON with every phase, and
are followed while they grow. This process uses no gRPC: what it wants to know it reads in the logs,
or asks with a command.
"""

import contextlib
import json
import re
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lab.processes.family import MARK, Family, atoll_command, atoll_environment, maps_of
from lab.processes.logs import Entry, FollowedLogs

COMMAND_SECONDS = 120.0
"""For a command that takes a second on a machine with nothing else to do."""

POLL_SECONDS = 0.05
LEFTOVER_SECONDS = 20.0
"""What came of a killed process may take so long to see that it is alone, and to end."""

LAST_LINES = 12
"""Of each log that a failure shows."""

_READY = re.compile(r"coordinator ready: control \S+:(\d+), enrolment \S+:(\d+)")
COORDINATOR = "coordinator"


class CommandFailedError(Exception):
    """A command ended with an error; the text is what it said."""


class Member:
    """The coordinator or a node: its folder, its log, and the process that lives in them now."""

    def __init__(
        self, *, name: str, home: Path, arguments: Sequence[str | Path], log: Path, temporary: Path
    ) -> None:
        self.name = name
        self.home = home
        self.log = log
        self.num_starts = 0
        self.exit_codes: list[int] = []  # of its lives so far; minus the signal's number
        self.shared_memory: set[Path] = set()  # blocks that any of its killed lives had
        self._arguments = list(arguments)
        self._temporary = temporary
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._families: list[Family] = []

    def start(self, *more_arguments: str) -> None:
        """Starts it, unless it runs."""
        with self._lock:
            if not self._has_ended():
                return
            mark = uuid.uuid4().hex
            with self.log.open("ab") as log:
                if self.num_starts:
                    log.write(b"\n")  # a killed process may have left half a line
                    log.flush()
                self._process = subprocess.Popen(
                    atoll_command(*self._arguments, *more_arguments),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    env=atoll_environment(
                        {MARK: mark, "TMPDIR": str(self._temporary), "ATOLL_LOG": "debug"}
                    ),
                )
            self._families.append(Family(mark))
            self.num_starts += 1

    @property
    def has_ended(self) -> bool:
        """Whether no process of it runs: it was never started, or has ended."""
        with self._lock:
            return self._has_ended()

    def _has_ended(self) -> bool:
        if self._process is not None and (code := self._process.poll()) is not None:
            self.exit_codes.append(code)
            self._process = None
        return self._process is None

    def kill(self) -> bool:
        """SIGKILL, for the process that was started; False when none runs."""
        return self.send(signal.SIGKILL)

    def send(self, number: signal.Signals) -> bool:
        """Signals the process that was started; False when none runs."""
        with self._lock:
            if self._has_ended():
                return False
            assert self._process is not None
            if number == signal.SIGKILL:
                self._note_shared_memory(self._process.pid)
            self._process.send_signal(number)  # unreaped until _has_ended: it is nobody else's
            return True

    def _note_shared_memory(self, process_id: int) -> None:
        self.shared_memory |= {
            Path(name) for name in re.findall(r"/dev/shm/atoll-held-\w+", maps_of(process_id))
        }

    def kill_rank(self) -> bool:
        """SIGKILL for its last rank."""
        return any(self._family.send(rank, signal.SIGKILL) for rank in self.ranks()[-1:])

    def kill_p2pd(self) -> bool:
        """SIGKILL for its libp2p daemon."""
        found = self._family.p2pd()
        return found is not None and self._family.send(found, signal.SIGKILL)

    def ranks(self) -> list[int]:
        """Its training processes."""
        return self._family.ranks() if self._families else []

    def open_ranks(self) -> tuple[int, ...]:
        """Descriptors of its training processes; whoever asks closes them."""
        opened = (self._family.open(rank) for rank in self.ranks())
        return tuple(descriptor for descriptor in opened if descriptor is not None)

    def stop(self) -> bool:
        """SIGSTOP for all its processes, the main one first."""
        if not self.send(signal.SIGSTOP):
            return False
        self._family.send_all(signal.SIGSTOP)
        return True

    def go_on(self) -> None:
        """SIGCONT for all its processes."""
        self._family.send_all(signal.SIGCONT)

    @property
    def _family(self) -> Family:
        return self._families[-1]

    def leftovers(self) -> set[int]:
        """Processes of its lives that have ended."""
        past = self._families if self.has_ended else self._families[:-1]
        return {process_id for family in past for process_id in family.members()}

    def end(self) -> None:
        """Ends whatever is left of it."""
        with self._lock:
            for family in self._families:
                family.end()
            if self._process is not None:
                self._process.kill()
                self._process.wait()


class RealSwarm:
    """A coordinator and nodes. Leaving the `with` block ends all of it."""

    def __init__(self, folder: Path, run_text: str, *, host: str = "127.0.0.1") -> None:
        """`host` is the coordinator's address."""
        self.folder = folder
        self.logs = FollowedLogs()
        self.nodes: dict[str, Member] = {}
        self._stack = contextlib.ExitStack()
        # Not below `folder`: a Unix socket's name has at most 107 bytes.
        temporary = self._stack.enter_context(
            tempfile.TemporaryDirectory(prefix="atoll-", ignore_cleanup_errors=True)
        )
        self._temporary = Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        run_file = folder / "run.toml"
        run_file.write_text(run_text, encoding="utf-8")
        home = folder / COORDINATOR
        ports = ("--host", host, "--port", "0", "--enrolment-port", "0")
        self.run_command("coordinator", "init", home, "--run", run_file, *ports)
        self.coordinator = self._member(
            COORDINATOR, home, ("coordinator", "start", home, "--log-json")
        )

    def __enter__(self) -> Self:
        self._stack.enter_context(self.logs)
        self._stack.callback(self._end)
        try:
            self._start_coordinator()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def _end(self) -> None:
        for member in self.members:
            member.end()

    def _start_coordinator(self) -> None:
        """Starts it, and writes its ports into its command: it comes back where nodes look for it."""
        self.coordinator.start()
        self.until(lambda: self._ports() is not None, "the coordinator to be ready")
        ports = self._ports()
        assert ports is not None
        self.coordinator._arguments += ["--port", ports[0], "--enrolment-port", ports[1]]

    def _ports(self) -> tuple[str, str] | None:
        for entry in self.logs.said_by(COORDINATOR):
            if ready := _READY.search(str(entry.get("text", ""))):
                return ready[1], ready[2]
        return None

    def _member(self, name: str, home: Path, arguments: Sequence[str | Path]) -> Member:
        log = self.folder / f"{name}.jsonl"
        member = Member(
            name=name, home=home, arguments=arguments, log=log, temporary=self._temporary
        )
        self.logs.follow(name, log)
        return member

    @property
    def members(self) -> tuple[Member, ...]:
        """The coordinator and all nodes."""
        return (self.coordinator, *self.nodes.values())

    def join(self, *names: str, role: str = "node", options: Sequence[str] = ()) -> list[Member]:
        """Lets these join by one invite, with such options; they do not run yet."""
        uses = str(len(names))
        asked = ("invite", "create", "--uses", uses, "--role", role)
        invite = self.run_command(*asked, "--dir", self.coordinator.home).split()[-1]
        for name in names:
            folder = self.folder / name
            self.run_command("join", "--dir", folder, "--name", name, *options, ATOLL_INVITE=invite)
            arguments = (role, "start", "--dir", folder, "--name", name, "--log-json")
            self.nodes[name] = self._member(name, folder, arguments)
        return [self.nodes[name] for name in names]

    def run_command(self, *arguments: str | Path, **environment: str) -> str:
        """Runs a command to its end; raises CommandFailedError."""
        ran = subprocess.run(
            atoll_command(*arguments),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            env=atoll_environment(environment),
        )
        if ran.returncode:
            raise CommandFailedError(
                f"atoll {arguments[0]} ended with {ran.returncode}: {ran.stderr}"
            )
        return ran.stdout

    def asked(self, command: str, *options: str) -> Any:
        """What `atoll COMMAND --json` answers."""
        return json.loads(
            self.run_command(command, *options, "--json", "--dir", self.coordinator.home)
        )

    def entries(self, name: str, event: str) -> list[Entry]:
        """The lines of one event in a member's log."""
        return [entry for entry in self.logs.said_by(name) if entry.get("event") == event]

    @property
    def committed_round(self) -> int:
        """The newest round whose commit the coordinator has told of."""
        rounds = [entry["round"] for entry in self.entries(COORDINATOR, "round committed")]
        return max(rounds, default=0)

    @property
    def is_finished(self) -> bool:
        """Whether the coordinator, or a node, has told that the run is over."""
        return any(self.entries(member.name, "run finished") for member in self.members)

    def until(self, is_done: Callable[[], bool], what: str, *, seconds: float = 120.0) -> None:
        """Waits; raises TimeoutError, with the ends of all logs, when it takes too long."""
        give_up_at = time.monotonic() + seconds
        while not is_done():
            self.logs.check()
            if time.monotonic() >= give_up_at:
                raise TimeoutError(f"no end of waiting for {what}\n{self.last_words()}")
            time.sleep(POLL_SECONDS)

    def last_words(self) -> str:
        """The ends of all logs."""
        return "\n".join(
            f"-- {member.name}, started {member.num_starts} times, exits {member.exit_codes}\n"
            + "\n".join(member.log.read_text(errors="replace").splitlines()[-LAST_LINES:])
            for member in self.members
        )

    def left_nothing(self) -> list[str]:
        """Waits until what killed processes left has ended; returns what has not, in words."""
        give_up_at = time.monotonic() + LEFTOVER_SECONDS
        while True:
            left = [
                *(f"process {p} of {m.name}" for m in self.members for p in m.leftovers()),
                *(f"{b} of {m.name}" for m in self.members for b in m.shared_memory if b.exists()),
            ]
            if not left or time.monotonic() >= give_up_at:
                return left
            time.sleep(POLL_SECONDS)
