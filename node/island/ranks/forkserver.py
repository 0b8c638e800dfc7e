"""The process that ranks are forked from, its start, a fork, its end, and what ranks write to standard error.

It has torch loaded already, so a rank begins at once. Forking the daemon itself is unsafe once gRPC
or CUDA runs.
"""

import contextlib
import multiprocessing
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any

from node.island.ranks.commands import Halt, Order, RankSetup, Reply
from protocol.errors import SystemRefusedError
from protocol.files.durable import refusing, user_cache
from protocol.files.leftovers import TemporaryFolder
from protocol.terminal.logging import LOGS_FOLDER, LogFile, LogStream

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess


_context = multiprocessing.get_context("forkserver")

_standard_error = 2
"""What its standard error is, and that of ranks; it may have to be started again much later."""

_with_compiler = True

_COMPILED = "TORCHINDUCTOR_CACHE_DIR"

_folder: TemporaryFolder | None = None
"""Where its socket is, marked as a living process's: Python's own is never removed after a kill."""


def prepare_forkserver(
    *, standard_error: int | None = None, with_compiler: bool | None = None
) -> None:
    """Starts it; it imports torch while the daemon goes on.

    Returns at once; raises SystemRefusedError where its socket has no place, or has been removed. It is a
    fresh Python, so it holds nothing of the daemon's threads and gRPC. What a call gives holds for later ones
    too, as it may have to be started again: `standard_error` is a descriptor that ranks write to instead of
    ours; `with_compiler`, at first True, says whether it imports torch's compiler, which takes a second, and
    which several ranks that need it would else import each.
    """
    global _standard_error, _with_compiler, _folder  # as long as the process, like the forkserver itself
    config = _config_of_multiprocessing()
    if _folder is None and config.get("tempdir") is None:
        _folder = TemporaryFolder("fork", has_sockets=True)
        config["tempdir"] = str(_folder.path)
    if standard_error is not None:
        _standard_error = standard_error
    if with_compiler is not None:
        _with_compiler = with_compiler
    # Ranks of two nodes on one machine have more threads than it has cores. OpenMP's threads spin
    # while they wait, which made them about twenty times slower; ranks inherit this from the forkserver.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Tracing an inner step (measuring.local_communication) would write to standard error each time.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    # CUPTI stays attached after a trace otherwise, and every kernel pays for it. Not measured.
    os.environ.setdefault("TEARDOWN_CUPTI", "1")
    # torch would keep what it compiles, and run it, under a name in /tmp that others on the machine may take.
    if _COMPILED not in os.environ:
        # Its import makes the folder, and fails where that cannot be. Without a cache it goes with our own.
        os.environ[_COMPILED] = str((user_cache() or Path(config["tempdir"])) / "compiled-layers")
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        # Sizes of what is gathered and recomputed differ: fixed segments fall to pieces. Not measured.
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    compiler = ["torch._dynamo"] if _with_compiler else []
    _context.set_forkserver_preload(["node.island.ranks.preload", *compiler])
    resource_tracker.ensure_running()  # the forkserver would, and unblock the signal in between
    # A Ctrl-C at the terminal is the daemon's alone. The forkserver says so itself, but only once
    # it has imported torch; until then it would end with a traceback.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    own = os.dup(2)
    try:
        os.dup2(_standard_error, 2)
        forkserver.ensure_running()
    finally:
        os.dup2(own, 2)
        os.close(own)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    server: Any = forkserver._forkserver
    if not Path(server._forkserver_address).exists():
        raise SystemRefusedError(
            f"the socket by which ranks are started, {server._forkserver_address}, is gone: something "
            "clears that folder",
            next_step="start the node again, and have what clears it leave atoll-held-* there",
        )


def _config_of_multiprocessing() -> dict[str, Any]:
    """Of this process. A private name: nothing else says where the forkserver's socket is to be."""
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    return config


def fork_rank(setup: RankSetup) -> "tuple[BaseProcess, Connection[Order | Halt, Reply]]":
    """Starts a rank; returns it, and our end of its pipe.

    Waits for the forkserver, which may still be importing torch.
    """
    ours, theirs = _context.Pipe()
    process = _context.Process(
        target=_live, args=(theirs, setup), name=f"atoll-rank-{setup.rank}", daemon=True
    )
    try:
        process.start()
    except ConnectionError:
        # The kernel has killed it, mostly beside a rank, and it still ends. The next start reaps it.
        server: Any = forkserver._forkserver
        os.waitid(os.P_PID, server._forkserver_pid, os.WEXITED | os.WNOWAIT)
        prepare_forkserver()
        process.start()
    theirs.close()  # else we would never see its end close
    return process, ours


def end_forkserver() -> None:
    """Ends it, if it runs; ranks must have ended.

    It would end by itself after us, but not before it has imported torch. Private names, because
    Python offers no other way; its own test suite uses them.
    """
    server: Any = forkserver._forkserver
    if server._forkserver_pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(server._forkserver_pid, signal.SIGKILL)
    with contextlib.suppress(FileNotFoundError):  # something has cleared the temporary directory
        server._stop()
    global _standard_error, _with_compiler, _folder
    if _folder is not None:
        if Path(os.environ.get(_COMPILED, "")).is_relative_to(_folder.path):
            del os.environ[_COMPILED]
        _config_of_multiprocessing()["tempdir"] = None
        _folder.remove()
        _folder = None
    _standard_error = 2
    _with_compiler = True


def _live(connection: "Connection[Reply, Order | Halt]", setup: RankSetup) -> None:
    """What a rank's process runs; a name here, so that the daemon need not import torch for it."""
    from node.island.ranks.preload import begin_collecting
    from node.island.ranks.rank import run_rank

    begin_collecting()
    run_rank(connection, setup)


# What ranks write to standard error, on its way to that of the daemon and to a log file of its own.
#
# Tracebacks, and what torch and native code print, have no form that could be kept as events. Ranks write
# into a file, which nobody can close under them and which never makes them wait; the daemon passes on what
# it finds there.


PASS_ON_SECONDS = 0.3
MOST_BYTES = 1_000_000
"""Of the file; it begins anew when that much has been passed on."""

MOST_LINE_BYTES = 1 << 16
"""What is longer is kept in pieces: a program may print for ever without ending a line."""


_DUMP = b"Fatal Python error: "
"""Begins what Python's faulthandler writes of each thread of a process that a signal ends."""

_OF_A_DUMP = re.compile(
    rb'(Current t|T)hread 0x|  (File "|\.\.\.|<|Garbage)|Extension modules: |\n'
)


class RankOutput:
    """Passes on what ranks write to `path`, until `close`: as it is to `show`, line by line to `keep`.

    Dumps of faults are kept and not shown: they would push away the sentence that helps.
    """

    def __init__(
        self, path: Path, *, show: Callable[[str], object], keep: Callable[[str], None]
    ) -> None:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        self.descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC, 0o600)
        self._show = show
        self._keep = keep
        self._offset = 0
        self._rest = b""
        self._is_in_dump = False
        self._held = b""  # of a dump's line, until it is whole
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._pass_on, name="rank-output", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Passes on what is left; ranks must have ended."""
        self._is_closed.set()
        self._thread.join()
        self._take()
        self._show(self._held.decode(errors="replace"))
        if line := _shown(self._rest):
            self._keep(line.decode(errors="replace"))
        os.close(self.descriptor)

    def _pass_on(self) -> None:
        while not self._is_closed.wait(PASS_ON_SECONDS):
            self._take()

    def _take(self) -> None:
        while data := os.pread(self.descriptor, 1 << 16, self._offset):
            self._offset += len(data)
            self._show(self._without_dumps(data).decode(errors="replace"))
            *lines, rest = (self._rest + data).split(b"\n")
            self._rest = _overwritten(rest)
            if len(self._rest) > MOST_LINE_BYTES:
                lines.append(self._rest)
                self._rest = b""
            for line in filter(None, map(_shown, lines)):
                self._keep(line.decode(errors="replace"))
        if self._offset > MOST_BYTES:
            # What a rank writes between the read and this is lost; it goes on at the beginning.
            os.ftruncate(self.descriptor, 0)
            self._offset = 0

    def _without_dumps(self, data: bytes) -> bytes:
        shown = []
        lines = (self._held + data).splitlines(keepends=True)
        self._held = b""
        for line in lines:
            before, begin, rest = line.partition(_DUMP)
            if begin:
                shown.append(before)
                line = begin + rest
            if (begin or self._is_in_dump) and not line.endswith(b"\n"):
                self._held = line
                break
            self._is_in_dump = bool(begin or (self._is_in_dump and _OF_A_DUMP.match(line)))
            if not self._is_in_dump:
                shown.append(line)
        return b"".join(shown)


def _overwritten(line: bytes) -> bytes:
    """What of a line counts: a progress bar goes back to its beginning, and may never end it."""
    return line[line.rstrip(b"\r").rfind(b"\r") + 1 :]


def _shown(line: bytes) -> bytes:
    return _overwritten(line).rstrip(b"\r")


def rank_output(folder: Path, name: str) -> RankOutput:
    """Passes it on to standard error, and to `ranks.log` of the folder with the node's name."""
    kept = LogFile(folder, "ranks")
    with refusing(folder / LOGS_FOLDER):
        return RankOutput(
            folder / LOGS_FOLDER / "ranks.txt",
            show=LogStream(sys.stderr.fileno()).write,
            keep=lambda line: kept.keep({"level": "warning", "event": line, "node": name}),
        )
