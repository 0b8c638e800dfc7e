"""What a rank of a loop does in the swarm, in a log file of its node's folder, where `atoll logs` reads it.

The lines are as the node's own: one JSON object each. The node's code for them is not here, for this package
stands alone. A disk that takes no line costs that line, and never the training.
"""

import json
import logging
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

LOGS_FOLDER = "logs"

MOST_BYTES = 8_000_000
"""Of the file; then it becomes the old one, beside it."""

_log = logging.getLogger("atoll")


class LoopLog:
    """Tells Python's logger `atoll` what happens, and writes it to `loop.log`; rank 3's is `loop-3.log`."""

    def __init__(self, folder: Path, *, rank: int) -> None:
        self._node = folder.absolute().name
        self._process = f"loop-{rank}" if rank else "loop"
        self._path = folder / LOGS_FOLDER / f"{self._process}.log"

    def tell(self, level: int, words: str, **facts: object) -> None:
        """One event; `level` is that of the logging module."""
        shown = " ".join(f"{key}={value}" for key, value in facts.items())
        # With the folder's name: a machine may have several nodes, and a terminal their loops.
        _log.log(level, "%s: %s", self._node, f"{words} {shown}".rstrip())
        told = {
            "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "level": logging.getLevelName(level).lower(),
            "process": self._process,
            "event": words,
            **facts,
        }
        with suppress(OSError):
            self._append(json.dumps(told, default=str))

    def _append(self, line: str) -> None:
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        if self._path.exists() and self._path.stat().st_size > MOST_BYTES:
            self._path.replace(self._path.with_name(f"{self._path.name}.old"))
        self._path.touch(mode=0o600)
        with self._path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{line}\n")
