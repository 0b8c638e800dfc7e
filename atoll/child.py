"""A node that a loop starts for itself, given an invite: another program, in its own environment."""

import fcntl
import os
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

from atoll.errors import SwarmError

PROGRAM_VARIABLE = "ATOLL_PROGRAM"
LOG_FILE = "node.log"

_JOIN_SECONDS = 120.0
_END_SECONDS = 60.0  # it contributes what was trained, for as long as its drain_within says
_POLL_SECONDS = 0.2
_TOLD_LINES = 3


class ChildNode:
    """The node's process. It ends when its standard input does: with this program, however that ends."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self._log = log

    @classmethod
    def start(cls, folder: Path, invite: str) -> Self:
        """Joins the swarm, unless the folder has done so already, and starts the node. Raises SwarmError."""
        program = os.environ.get(PROGRAM_VARIABLE) or shutil.which("atoll")
        if program is None:
            raise SwarmError(
                "there is no program 'atoll' on the PATH to start a node with",
                next_step=f"install Atoll, or set ${PROGRAM_VARIABLE} to the program's path",
            )
        # Not ours: a program of another environment must not import what this one has.
        surroundings = {k: v for k, v in os.environ.items() if k not in _OURS}
        if not (folder / "link.toml").is_file():
            joined = subprocess.run(
                [program, "join", "--dir", str(folder)],
                env={**surroundings, "ATOLL_INVITE": invite},  # arguments are seen by all users
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_JOIN_SECONDS,
            )
            if joined.returncode != 0:
                raise SwarmError(f"'atoll join' has failed: {_last_lines(joined.stderr)}")
        _wait_for_folder(folder / "lock")
        log = folder / LOG_FILE
        with log.open("ab") as out:
            process = subprocess.Popen(
                [program, "node", "start", "--dir", str(folder), "--loop", "--until-stdin-closes"],
                env=surroundings,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                start_new_session=True,  # a Ctrl-C is the loop's, which contributes first
            )
        return cls(process, log)

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def why_ended(self) -> SwarmError:
        """What it said last."""
        told = _last_lines(self._log.read_text(errors="replace"))
        return SwarmError(
            f"the node has ended with exit code {self._process.returncode}: {told}",
            next_step=f"see {self._log}",
        )

    def end(self) -> None:
        """Lets it leave with what was trained, and waits for that."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _wait_for_folder(lock: Path) -> None:
    """Waits until the node of a loop before, which was killed, has left with its work."""
    give_up_at = time.monotonic() + _END_SECONDS
    while lock.exists():
        with lock.open("rb") as held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                pass
        if time.monotonic() > give_up_at:
            raise SwarmError(
                f"another node runs in {lock.parent}",
                next_step="stop it, or join it: leave the invite out",
            )
        time.sleep(_POLL_SECONDS)


_OURS = frozenset(
    {"PYTHONPATH", "PYTHONHOME", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}
    | {"MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"}
)
"""Variables of this program that mean another thing, or nothing, to the node."""


def _last_lines(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join(lines[-_TOLD_LINES:]) or "it said nothing"
