"""Types `atoll …` as people do, as processes, and finds everything that a node leaves behind."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from lab.processes.family import MARK, SOURCES, Family, atoll_command, atoll_environment, maps_of
from protocol.terminal import cli, console
from protocol.terminal.query import StatusLink
from protocol.v1 import status_pb2
from tests.integration.small_machine import SmallDisk
from tests.ports import free_port

ROOT = SOURCES
LOCAL = "127.0.0.1"
PATIENCE_SECONDS = (
    120.0  # for anything that takes a few seconds on a machine with nothing else to do
)
STOP_SECONDS = 10.0  # what a node may take to end
LOAD = 0.1
"""What part of the time ranks train here: else those of swarms whose rounds end at their deadline would take
the processors from all other tests."""

_READY = re.compile(r"coordinator ready: control \S+:(\d+), enrolment \S+:(\d+)")

WITHOUT_PRIVILEGES = """
import ctypes, os, sys
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 24, 1, 2
for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Lets a root that runs the tests meet read-only folders as everybody does.

Not a preexec_fn: that forks, and gRPC, which other tests of the process use, aborts the child of a
fork now and then ("epoll_wait error: Bad file descriptor").
"""


_TEMPORARY = tempfile.TemporaryDirectory()
"""Of commands: in a shared one they would tell of what other tests' killed processes have left."""


def _environment(changes: Mapping[str, str]) -> dict[str, str]:
    return atoll_environment({"PYTHONUNBUFFERED": "1"} | dict(changes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Typed:
    """What came of a command."""

    code: int
    out: str
    err: str


def atoll(*arguments: str | Path, stdin: str = "", **environment: str) -> Typed:
    """Runs a command to its end; one that shows a traceback or blames a bug fails the test."""
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_PRIVILEGES, *atoll_command(*arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,  # it kills the command
        env=_environment({"TMPDIR": _TEMPORARY.name} | environment),
    )
    assert "Traceback" not in ran.stderr and "a bug in Atoll" not in ran.stderr, ran.stderr
    return Typed(code=ran.returncode, out=ran.stdout, err=ran.stderr)


def typed_here(*arguments: str | Path, **environment: str) -> Typed:
    """As `atoll`, in this process: for what only leads to what a test is about.

    A process takes half a second to import what the command needs. What comes of another process that the
    command starts is not in the answer.
    """
    kept = {name: text for name, text in os.environ.items() if not name.startswith("ATOLL_")}
    with (
        patch.dict(os.environ, kept | environment, clear=True),
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        with redirect_stdout(out), redirect_stderr(err):
            code = console.run(cli.root, [str(argument) for argument in arguments])
        out.seek(0)
        err.seek(0)
        said, complained = out.read(), err.read()
    assert "a bug in Atoll" not in complained, complained
    return Typed(code=code, out=said, err=complained)


def done(typed: Typed) -> str:
    """The output of a command that went well."""
    assert typed.code == 0, typed.err
    return typed.out


def refused(typed: Typed, code: int, *words: str) -> None:
    """The command ended with this code, one sentence that holds the words, and what to do next."""
    told = typed.err.splitlines()
    assert (typed.code, typed.out) == (code, ""), typed
    assert len(told) == 2 and told[0].startswith("atoll: ") and told[1].startswith("  next: "), told
    for word in words:
        assert word in typed.err, typed.err


def until(is_done: Callable[[], bool], what: str, *, seconds: float = PATIENCE_SECONDS) -> None:
    give_up_at = time.monotonic() + seconds
    while not is_done():
        assert time.monotonic() < give_up_at, f"no end of waiting: {what}"
        time.sleep(0.05)


def rests(home: Path) -> Path:
    """Lets ranks of the node rest between their inner steps."""
    settings = home / "node.toml"
    settings.write_text(settings.read_text().replace("load = 1.0", f"load = {LOAD}"))
    return home


class Running:
    """A command that goes on, in a session and with a folder for temporary files of its own.

    `through` is a program that becomes the command; it sets up what this test needs. Standard error
    goes to `stderr`, if given, instead of the log.
    """

    def __init__(
        self, *arguments: str | Path, through: Sequence[str] = (), stderr: Path | None = None
    ) -> None:
        # Not below pytest's folder: a Unix socket's name has at most 107 bytes.
        self._temporary = tempfile.TemporaryDirectory(prefix="atoll-test-")
        mark = uuid.uuid4().hex
        self._family = Family(mark)
        self._log = Path(self._temporary.name) / "log"
        with self._log.open("wb") as log, (stderr or self._log).open("ab") as errors:
            self.process = subprocess.Popen(
                [*through, *atoll_command(*arguments)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=errors,
                start_new_session=True,
                env=_environment({MARK: mark, "TMPDIR": self._temporary.name}),
            )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def says(self, text: str, *, times: int = 1) -> None:
        """Waits until it has said so, that often."""

        def has_said() -> bool:
            assert self.process.poll() is None, self.log
            return self.log.count(text) >= times

        until(has_said, f"{text!r} in\n{self.log}")

    def kill(self) -> None:
        """The process itself, and what came of it is left alone."""
        self.process.kill()
        self.process.wait()

    def processes(self) -> set[int]:
        """Itself and all that came of it, by what they inherit."""
        return self._family.members()

    def ranks(self) -> list[int]:
        """Its training processes."""
        return self._family.ranks()

    def shared_memory(self) -> set[Path]:
        """The outer state's blocks that it has mapped."""
        mapped = maps_of(self.process.pid)
        return {Path(name) for name in re.findall(r"/dev/shm/atoll-held-\w+", mapped)}

    def has_torch(self) -> bool:
        """Whether the daemon itself has loaded it, which is for the processes of its island."""
        return "libtorch" in maps_of(self.process.pid)

    def loads_torch(self) -> None:
        """Waits until the process that its ranks come from is in the midst of that."""

        def one_does() -> bool:
            return any("libtorch_python" in maps_of(found) for found in self.processes())

        until(one_does, f"an import of torch in\n{self.log}")

    def stop(self, number: signal.Signals, *, is_impatient: bool = False) -> None:
        """Signals it and sees it end well.

        Or all its processes, as terminals and service managers do, and again and again.
        """
        memory = self.shared_memory()
        if not is_impatient:
            self.process.send_signal(number)
        else:

            def signalled_has_ended() -> bool:
                # Unreaped until the last look, so the group is nobody else's.
                os.killpg(self.process.pid, number)
                time.sleep(0.1)
                return self.process.poll() is not None

            until(signalled_has_ended, f"an end of\n{self.log}", seconds=STOP_SECONDS)
        self.ends(memory, seconds=STOP_SECONDS)

    def ends_with(self, code: int, *words: str) -> None:
        """Waits until it has ended by itself with this code, after a sentence with these words."""
        memory = self.shared_memory()
        found = self.process.wait(PATIENCE_SECONDS)
        assert found == code and "Traceback" not in self.log, self.log
        for word in words:
            assert word in self.log, self.log
        self.left_nothing(memory)

    def ends(self, memory: set[Path], *, seconds: float = PATIENCE_SECONDS) -> None:
        """Waits until it has ended with 0, and looks for what it left behind."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"it did not end:\n{self.log}") from error
        self.left_nothing(memory)
        # Python's resource tracker, the last to end, tells of memory that it had to give back.
        assert code == 0 and "Traceback" not in self.log and "leaked" not in self.log, self.log
        left = [path.name for path in Path(self._temporary.name).iterdir()]
        assert not [name for name in left if name.startswith(("atoll-", "pymp-"))], left

    def left_nothing(self, memory: set[Path]) -> None:
        until(lambda: not self.processes(), f"{self.processes()} to end", seconds=STOP_SECONDS)
        assert not [block for block in memory if block.exists()]

    def clean_up(self) -> None:
        """Ends whatever a failed test left of it."""
        self._family.end()
        self.process.wait()
        self._temporary.cleanup()


def _ports_of(host: str) -> tuple[str, ...]:
    """Nobody takes them while a coordinator is down that comes back to them."""
    return ("--host", host, "--port", str(free_port()), "--enrolment-port", str(free_port()))


class Swarm:
    """A coordinator's folder and what is started for it; `end` stops all of it.

    The coordinator's own folder lies on `disk`, if given; `complete` adds what else belongs to it. Files of
    `beside` lie beside the run file that it is made of. Commands that end at once are processes if they are
    to be typed, or on a host of the laboratory, which processes alone are within.
    """

    def __init__(
        self,
        folder: Path,
        run_text: str,
        *,
        host: str = LOCAL,
        disk: SmallDisk | None = None,
        complete: Callable[[Path], object] = lambda _: None,
        init_options: Sequence[str | Path] = (),
        beside: Sequence[Path] = (),
        is_typed: bool = False,
    ) -> None:
        self.folder = folder
        self._type = atoll if is_typed or host != LOCAL else typed_here
        self._disk = disk
        self.home = (disk.path if disk else folder) / "coordinator"
        folder.mkdir()
        run_file = folder / "run.toml"
        run_file.write_text(run_text)
        for file in beside:
            shutil.copy(file, folder)
        made = atoll if is_typed else typed_here  # it dials nobody, so a thread may be on a host
        done(made("init", self.home, "--run", run_file, *_ports_of(host), *init_options))
        complete(self.home)
        self._begin()

    @classmethod
    def made(cls, folder: Path, *options: str | Path, changes: Mapping[str, object]) -> "Swarm":
        """One whose run file 'atoll init' writes; `changes` are keys of it that are then written over."""
        swarm = cls.__new__(cls)
        swarm.folder, swarm._disk, swarm.home = folder, None, folder / "coordinator"
        swarm._type = typed_here
        folder.mkdir()
        done(typed_here("init", swarm.home, *options, *_ports_of(LOCAL)))
        text = (swarm.home / "run.toml").read_text()
        for key, value in changes.items():
            text, number = re.subn(rf"(?m)^{key} = [^#\n]*", f"{key} = {value} ", text, count=1)
            assert number == 1, key
        (swarm.home / "run.toml").write_text(text)
        swarm._begin()
        return swarm

    def _begin(self) -> None:
        self._ports: tuple[str, str] | None = None
        self._running: list[Running] = []
        self._links: dict[Path, StatusLink] = {}  # kept: a handshake costs eight times an answer
        self.coordinator: Running
        self.start_coordinator()

    def start(
        self, *arguments: str | Path, through: Sequence[str] = (), stderr: Path | None = None
    ) -> Running:
        running = Running(*arguments, through=through, stderr=stderr)
        self._running.append(running)
        return running

    def start_coordinator(self, *, stderr: Path | None = None) -> None:
        """Starts it; again on the ports that it had before."""
        fixed = (
            ("--port", self._ports[0], "--enrolment-port", self._ports[1]) if self._ports else ()
        )
        self.coordinator = self.begin_coordinator(*fixed, stderr=stderr)
        self.coordinator.says("coordinator ready")
        ready = _READY.search(self.coordinator.log)
        assert ready is not None
        self._ports = (ready[1], ready[2])

    def begin_coordinator(self, *options: str, stderr: Path | None = None) -> Running:
        """Starts it and does not wait until it is ready."""
        if self._disk is None:
            return self.start("coordinator", "start", self.home, *options, stderr=stderr)
        # Within the disk's namespace, because SQLite does not find its way in from outside.
        home = self._disk.mounted_at / self.home.name
        return self.start("coordinator", "start", home, *options, through=self._disk.through)

    @property
    def control_port(self) -> str:
        assert self._ports is not None
        return self._ports[0]

    def invite(self, *options: str) -> str:
        return done(self._type("invite", "create", "--dir", self.home, *options)).split()[-1]

    def join(self, name: str, invite: str) -> Path:
        home = self.folder / name
        done(self._type("join", invite, "--dir", home, "--name", name))
        return home

    def start_node(self, name: str, *options: str, stderr: Path | None = None) -> Running:
        if "--loop" not in options:  # a program of one's own rests as it likes
            rests(self.folder / name)
        return self.start("node", "start", "--dir", self.folder / name, *options, stderr=stderr)

    def status(self) -> status_pb2.GetStatusResponse:
        return self._links.setdefault(self.home, StatusLink(self.home)).status()

    def nodes(self) -> dict[str, status_pb2.NodeStatus]:
        return {node.node_name: node for node in self.status().nodes}

    def does(self, activity: str, *names: str) -> None:
        """Waits until these nodes are attached and say that they do so."""

        def all_do() -> bool:
            nodes = self.nodes()
            return all(
                name in nodes
                and nodes[name].state == status_pb2.NODE_STATE_READY
                and nodes[name].heartbeat.activity == activity
                for name in names
            )

        until(all_do, f"{names} {activity}; {[running.log for running in self._running]}")

    def end(self) -> None:
        for link in self._links.values():
            link.close()
        for running in self._running:
            running.clean_up()
