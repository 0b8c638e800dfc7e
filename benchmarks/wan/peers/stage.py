"""Where a contender trains: hosts of the network lab, and the processes that it starts in them."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.wan.peers.order import Order
from lab.network.lab import NetworkLab
from lab.network.switch import DEVICE
from lab.processes.family import SOURCES
from protocol.errors import SystemRefusedError

MIDDLE = "middle"
"""The host of a coordinator or a lighthouse. Contenders without one leave it idle."""

START_SECONDS = 180.0
_END_SECONDS = 15.0
_TAIL_CHARACTERS = 1500


class ContenderFailedError(SystemRefusedError):
    """A process of a contender ended, or did not begin; the text has its last words."""


class Stage:
    """One contender's processes. Leaving the `with` block ends them, by their ids."""

    def __init__(self, lab: NetworkLab, orders: Sequence[Order], folder: Path) -> None:
        self.lab = lab
        self.orders = tuple(orders)
        self.folder = folder
        self.order_files = [order.write() for order in orders]
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Stage":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started.values():
            if process.poll() is None:
                process.terminate()
        give_up_at = time.monotonic() + _END_SECONDS
        for process in self._started.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, give_up_at - time.monotonic()))
            if process.poll() is None:
                process.kill()
                process.wait()

    def nodes(self) -> list[tuple[str, Order, Path]]:
        """Host, order and the order's file of each node."""
        names = [host for host in self.lab.hosts if host != MIDDLE]
        return list(zip(names, self.orders, self.order_files, strict=True))

    def start(
        self, host: str, name: str, command: Sequence[str | Path], **more_environment: str
    ) -> None:
        """Starts a process in a host; what it prints goes to a file of its name."""
        with (self.folder / f"{name}.log").open("wb") as log:
            self._started[name] = subprocess.Popen(
                self.lab.command(host, list(map(str, command))),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=self._environment(more_environment),
            )

    def run(self, host: str, command: Sequence[str | Path], **more_environment: str) -> str:
        """Runs a command in a host to its end; returns what it printed."""
        ran = subprocess.run(
            self.lab.command(host, list(map(str, command))),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
            cwd=self.folder,
            env=self._environment(more_environment),
        )
        if ran.returncode:
            raise ContenderFailedError(f"{' '.join(map(str, command))}: {ran.stderr[-600:]}")
        return ran.stdout

    def module(self, name: str, *arguments: str | Path) -> list[str | Path]:
        """The command that runs one of our modules."""
        return [sys.executable, "-P", "-m", name, *arguments]

    def until(self, is_done: Callable[[], bool], what: str) -> None:
        """Waits for a start. Raises ContenderFailedError when something ends or takes too long."""
        give_up_at = time.monotonic() + START_SECONDS
        while not is_done():
            self.check()
            if time.monotonic() > give_up_at:
                raise ContenderFailedError(f"no end of waiting for {what}: {self.last_words()}")
            time.sleep(0.1)

    def check(self) -> None:
        """Raises ContenderFailedError when a process has ended: none does so by itself."""
        for name, process in self._started.items():
            if process.poll() is not None:
                raise ContenderFailedError(
                    f"{name} ended with {process.returncode}: {self._log_tail(name)}"
                )

    def last_words(self) -> str:
        """The ends of all logs."""
        return "\n".join(f"-- {name}: {self._log_tail(name)}" for name in self._started)

    def process_id(self, name: str) -> int:
        """Of a process that was started, or of what it runs in the host's namespace."""
        return self._started[name].pid

    def log_text(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def said(self, rank: int) -> list[dict[str, Any]]:
        """What a node has said so far."""
        *lines, _ = self.orders[rank].log.read_text().split("\n")
        return [json.loads(line) for line in lines]

    def _log_tail(self, name: str) -> str:
        return self.log_text(name)[-_TAIL_CHARACTERS:]

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("ATOLL_")}
        # What is on the caller's path stays there: peers may be installed beside our own packages.
        path = os.pathsep.join([str(SOURCES), *filter(None, [kept.get("PYTHONPATH")])])
        return kept | {
            "PYTHONPATH": path,
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "GLOO_SOCKET_IFNAME": DEVICE,
            "TP_SOCKET_IFNAME": DEVICE,
            **more,
        }
