"""What ranks write to standard error, on its way to that of the daemon and to a log file of its own.

Tracebacks, and what torch and native code print, have no form that could be kept as events. Ranks write
into a file, which nobody can close under them and which never makes them wait; the daemon passes on what it
finds there.
"""

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from protocol.files.durable import refusing
from protocol.terminal.logging import LOGS_FOLDER, LogFile, LogStream

PASS_ON_SECONDS = 0.3
MOST_BYTES = 1_000_000
"""Of the file; it begins anew when that much has been passed on."""


class RankOutput:
    """Passes on what ranks write to `path`, until `close`: as it is to `show`, line by line to `keep`."""

    def __init__(
        self, path: Path, *, show: Callable[[str], object], keep: Callable[[str], None]
    ) -> None:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        self.descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC, 0o600)
        self._show = show
        self._keep = keep
        self._offset = 0
        self._rest = b""
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._pass_on, name="rank-output", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Passes on what is left; ranks must have ended."""
        self._is_closed.set()
        self._thread.join()
        self._take()
        if self._rest:
            self._keep(self._rest.decode(errors="replace"))
        os.close(self.descriptor)

    def _pass_on(self) -> None:
        while not self._is_closed.wait(PASS_ON_SECONDS):
            self._take()

    def _take(self) -> None:
        while data := os.pread(self.descriptor, 1 << 16, self._offset):
            self._offset += len(data)
            self._show(data.decode(errors="replace"))
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in filter(None, lines):
                self._keep(line.decode(errors="replace"))
        if self._offset > MOST_BYTES:
            # What a rank writes between the read and this is lost; it goes on at the beginning.
            os.ftruncate(self.descriptor, 0)
            self._offset = 0


def rank_output(folder: Path, name: str) -> RankOutput:
    """Passes it on to standard error, and to `ranks.log` of the folder with the node's name."""
    kept = LogFile(folder, "ranks")
    with refusing(folder / LOGS_FOLDER):
        return RankOutput(
            folder / LOGS_FOLDER / "ranks.txt",
            show=LogStream(sys.stderr.fileno()).write,
            keep=lambda line: kept.keep({"level": "warning", "event": line, "node": name}),
        )
