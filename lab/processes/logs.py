"""JSON logs of running processes, read as they grow: whoever listens hears a line within milliseconds."""

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

POLL_SECONDS = 0.005

Entry = Mapping[str, Any]
"""One line of a log: what structlog wrote. A line that is no JSON has only `text`."""

Listener = Callable[[str, Entry], None]
"""Called with the name of the log and the line."""


def entry_of(line: str) -> Entry:
    """A line as it is meant."""
    try:
        entry = json.loads(line)
    except json.JSONDecodeError:
        entry = None
    return entry if isinstance(entry, dict) else {"text": line}


class GrowingLog:
    """One file, read from where the last look ended. A line counts when it is whole."""

    def __init__(self, path: Path) -> None:
        path.touch()
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._at = 0
        self._rest = b""

    def new_entries(self) -> list[Entry]:
        """What has been written since the last look."""
        entries: list[Entry] = []
        while chunk := os.pread(self._descriptor, 1 << 16, self._at):
            self._at += len(chunk)
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            entries += [entry_of(line.decode(errors="replace")) for line in lines if line]
        return entries

    def close(self) -> None:
        """Gives the file back."""
        os.close(self._descriptor)


class FollowedLogs:
    """Follows logs in a thread of its own, and keeps all that they said."""

    def __init__(self) -> None:
        self._entries: dict[str, list[Entry]] = {}
        self._logs: list[tuple[str, GrowingLog]] = []
        self._listeners: list[Listener] = []
        self._tickers: list[Callable[[], None]] = []
        self._error: BaseException | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="followed logs", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join()
        for _, log in self._logs:
            log.close()
        if error is None:
            self.check()

    def follow(self, name: str, path: Path) -> None:
        """Reads this file too from now on."""
        self._entries[name] = []
        self._logs.append((name, GrowingLog(path)))

    def said_by(self, name: str) -> list[Entry]:
        """All that this log has said so far, for any thread: a copy."""
        # tuple() of a list that another thread appends to crashes Python 3.11. It may collect garbage in
        # the middle, a finalizer lets the other thread in, the list moves, and freed memory is copied.
        return list(self._entries[name])

    def listen(self, listener: Listener) -> None:
        """Calls it with every line, in the thread that reads: it must not take long."""
        self._listeners.append(listener)

    def tick(self, ticker: Callable[[], None]) -> None:
        """Calls it after every look at the logs."""
        self._tickers.append(ticker)

    def check(self) -> None:
        """Raises what went wrong in the thread."""
        if self._error is not None:
            raise self._error

    def look(self) -> None:
        """Looks once at all logs."""
        for name, log in self._logs:
            for entry in log.new_entries():
                self._entries[name].append(entry)
                for listener in self._listeners:
                    listener(name, entry)
        for ticker in self._tickers:
            ticker()

    def _follow(self) -> None:
        try:
            while not self._is_over.is_set():
                self.look()
                time.sleep(POLL_SECONDS)
            self.look()
        except BaseException as error:  # told by check, in the thread that asks
            self._error = error
