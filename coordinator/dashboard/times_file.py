"""When which node did what in rounds that are over: a file beside the database, across starts.

It is for people alone: nothing is decided by it, a backup goes without it, and what a full disk does not
take is only not shown.
"""

import json
from pathlib import Path

import structlog
from pydantic import TypeAdapter, ValidationError

from coordinator.dashboard.timeline import KEPT_ROUNDS, RoundTimes
from protocol.files.rolling import RollingFile, lines_of

MOST_BYTES = 4_000_000
"""Of the file, and of the one before: about as many rounds of 8 nodes as the database keeps whole."""

_log = structlog.get_logger()

_TIMES = TypeAdapter(RoundTimes)


class TimesFile:
    """Takes rounds when they end; `of` reads them again."""

    def __init__(self, path: Path) -> None:
        self._file = RollingFile(path, most_bytes=MOST_BYTES)
        self._is_writable = True

    def add(self, times: RoundTimes) -> None:
        """Keeps a round. That the disk refuses is said once."""
        try:
            self._file.append([_TIMES.dump_json(times).decode()])
            self._is_writable = True
        except OSError as error:
            if self._is_writable:
                _log.warning(
                    "times of rounds are not kept", file=str(self._file.path), why=str(error)
                )
            self._is_writable = False

    def of(self, number: int) -> RoundTimes | None:
        """The latest that is kept of a round; a run that went back has made it twice. For a thread aside."""
        begins = f'{{"number":{number},'
        found = None
        for line in lines_of(self._file.path):
            if line.startswith(begins):
                found = _times_of(line) or found
        return found

    def latest(self) -> list[RoundTimes]:
        """The latest rounds, oldest first: what the page draws after a start."""
        lines = list(lines_of(self._file.path))[-KEPT_ROUNDS:]
        return [times for line in lines if (times := _times_of(line)) is not None]


def _times_of(line: str) -> RoundTimes | None:
    """None for a line that was cut when the machine stopped."""
    try:
        return _TIMES.validate_python(json.loads(line))
    except (ValueError, ValidationError):
        return None
