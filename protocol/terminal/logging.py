"""Logs of the daemons: one line an event on standard error, for people or, as JSON, for machines.

And one JSON object a line in the folder's own log files, whatever becomes of standard error; what reads
those is protocol.terminal.logs.
"""

import json
import logging
import math
import os
import select
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import structlog

from protocol.errors import AtollError, SystemRefusedError
from protocol.files.durable import as_typed, user_beside_root
from protocol.files.rolling import RollingFile

LOGS_FOLDER = "logs"
"""In the folder of a node or a coordinator."""

MOST_BYTES = 8_000_000
"""Of a process's log file, and of the one before."""

KEPT_KEYS = ("at", "level", "process", "event")
"""What each line of a log file has; all else are facts of the event."""


FIGURES = ("wire", "utilisation")
"""Events that are a round's figures: the longest lines, and of use to people as a sample."""

FIGURES_SECONDS = 10.0
"""How often people are shown them at most: in rounds of 2 s they would be most of 50 MB a day."""


class SparseFigures:
    """Leaves out of what people read the figures of most short rounds; the next ones say of how many."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._shown_at: dict[str, float] = {}
        self._left_out: Counter[str] = Counter()

    def __call__(
        self, _logger: object, _method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        """A processor of structlog. Raises DropEvent for what is left out."""
        name = event["event"]
        if name not in FIGURES:
            return event
        now = self._clock()
        if now - self._shown_at.get(name, -math.inf) < FIGURES_SECONDS:
            self._left_out[name] += 1
            raise structlog.DropEvent
        self._shown_at[name] = now
        if left_out := self._left_out.pop(name, 0):
            event["rounds_left_out"] = left_out
        return event


WHO = ("node", "nodes", "sender", "to", "peer", "reducer", "what", "verdict")
"""Facts that tell two warnings of a round apart; others, such as figures and slices, are new in each."""

QUIET_ROUNDS = 32
"""After so many rounds without it a warning is news again."""

MOST_REMEMBERED = 1024
"""Warnings: members may have any number of names."""


class SparseWarnings:
    """Of a warning that comes round after round people are shown the first, second, fourth, eighth … time.

    Each that is shown says how many were left out since. Of another node it is another warning.
    """

    def __init__(self) -> None:
        # How often, and in which round last.
        self._seen: dict[tuple[str, ...], tuple[int, int]] = {}

    def __call__(
        self, _logger: object, method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        """A processor of structlog. Raises DropEvent for what is left out."""
        number = event.get("round")
        if method != "warning" or not isinstance(number, int):
            return event
        key = (event["event"], *(str(event.get(name, "")) for name in WHO))
        num, last = self._seen.pop(key, (0, number))
        num = num + 1 if abs(number - last) <= QUIET_ROUNDS else 1
        self._seen[key] = num, number
        if len(self._seen) > MOST_REMEMBERED:
            del self._seen[next(iter(self._seen))]
        if num & (num - 1):
            raise structlog.DropEvent
        if left_out := max(0, num // 2 - 1):
            event["left_out"] = event.get("left_out", 0) + left_out
        return event


MOST_WARNINGS = 60
"""Alike, in as many seconds: what strangers and members may cause is not to fill a disk, or push all else
out of the log files."""

MOST_LINES = 20 * MOST_WARNINGS
"""Of other lines alike in that time: what a member causes has a bound, and rounds of 50 ms are all told."""


class SparseLines:
    """Leaves out what is said again and again, warnings sooner; the next line shown says of how many."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # By text, and how many may be shown.
        self._shown_at: dict[tuple[str, int], deque[float]] = {}
        self._left_out: Counter[str] = Counter()

    def __call__(
        self, _logger: object, method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        """A processor of structlog. Raises DropEvent for what is left out."""
        if method == "debug":
            return event
        most = MOST_WARNINGS if method in ("warning", "error") else MOST_LINES
        name, now = event["event"], self._clock()
        shown_at = self._shown_at.setdefault((name, most), deque(maxlen=most))
        if len(shown_at) == most and now - shown_at[0] < MOST_WARNINGS:
            self._left_out[name] += 1
            raise structlog.DropEvent
        shown_at.append(now)
        if left_out := self._left_out.pop(name, 0):
            event["left_out"] = left_out
        return event


class LogStream:
    """A log file that cannot hold up or end who writes to it.

    Lines that it does not take are lost: its disk is full, its reader has gone or reads no more.
    `lost_lines` counts them until one is taken again. Unbuffered, so that a line is never tried
    again in the wrong place, nor at the end of the process.
    """

    def __init__(self, descriptor: int) -> None:
        self.lost_lines = 0
        self._descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    def write(self, text: str) -> int:
        """Writes what it can, at once."""
        data = text.encode(errors="backslashreplace")
        try:
            while data and self._is_ready():
                # A pipe that is ready takes so much without blocking.
                data = data[os.write(self._descriptor, data[: select.PIPE_BUF]) :]
        except OSError:
            pass
        self.lost_lines = self.lost_lines + 1 if data else 0
        return len(text)

    def flush(self) -> None:
        """Nothing waits."""

    def isatty(self) -> bool:
        """Whether a person watches."""
        return os.isatty(self._descriptor)

    def _is_ready(self) -> bool:
        return any(event & select.POLLOUT for _, event in self._poll.poll(0))


class LogFile(logging.Handler):
    """A process's log in its folder: takes events of structlog and warnings of libraries.

    A disk that takes no line costs that line; `refusal` says why until one is taken again.
    """

    def __init__(self, folder: Path, process: str) -> None:
        super().__init__()
        self.refusal = ""
        self._process = process
        self._file = RollingFile(folder / LOGS_FOLDER / f"{process}.log", most_bytes=MOST_BYTES)

    def keep(self, event: Mapping[str, object]) -> None:
        """Writes one event: its `level`, its `event` in words, and its facts."""
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        told = {"at": at, "level": "info", **event, "process": self._process}
        try:
            self._file.path.parent.mkdir(mode=0o700, exist_ok=True)
            self._file.append([json.dumps({**told, "at": at}, default=str)])
            self.refusal = ""
        except OSError as error:
            self.refusal = f"{self._file.path}: {error.strerror or error}"

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps a warning of a library."""
        words = f"{record.name}: {record.getMessage()}"
        self.keep({"level": record.levelname.lower(), "event": words})


@contextmanager
def keeping_the_end(folder: Path, process: str) -> Iterator[None]:
    """Keeps in a process's log file by what error it ends; the terminal shows that by itself."""
    try:
        yield
    except Exception as error:
        told = {"level": "error", "event": f"ended: {error}"}
        if not isinstance(error, AtollError):
            told["exception"] = traceback.format_exc()
        LogFile(folder, process).keep(told)
        if isinstance(error, BrokenPipeError):
            # Click takes it for a reader of standard output that has gone, and ends with 1 without a word.
            raise SystemRefusedError(
                f"a process that this one talks to has gone: {error}",
                next_step="start it again; 'atoll logs' has where that was",
            ) from error
        raise


_every_line: dict[str, str] = {}  # not a variable of a context: tasks have copies of those


def call_in_every_line(node: str) -> None:
    """Gives the node of this process another name in its lines, where those have one."""
    if "node" in _every_line:
        _every_line["node"] = node


def _with_what_every_line_says(
    _logger: object, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    return {**_every_line, **event}


def start_logging(
    *, as_json: bool, folder: Path | None = None, process: str = "", **context: str
) -> LogStream:
    """Sends structlog, and warnings of libraries, to standard error; `context` stands in every line.

    With a `folder`, also to the log file there of `process`, which is its name. That file has all figures of
    short rounds, of which people are then shown some.

    With `$ATOLL_LOG=debug` also what is worth a line only to who looks for a fault.
    """
    is_debug = os.environ.get("ATOLL_LOG") == "debug"
    # Of its own: a number that somebody closes is soon another file's, as that of shared memory.
    stream = LogStream(os.dup(sys.stderr.fileno()))
    kept = None if folder is None else LogFile(folder, process)

    def tell_of_lost_lines(
        _logger: object, _method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        if stream.lost_lines:
            event["lost_lines"] = stream.lost_lines
        return event

    def keep(
        _logger: object, _method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        if kept is not None:
            was_refused = kept.refusal
            kept.keep(structlog.processors.format_exc_info(None, "", dict(event)))
            if kept.refusal and not was_refused:  # once: a full disk is full for every line
                event["not_in_log_file"] = kept.refusal
        return event

    _every_line.update(context)
    is_sparse = not (as_json or is_debug) and kept is not None
    sparse: list[structlog.typing.Processor] = (
        [SparseFigures(), SparseWarnings()] if is_sparse else []
    )
    renderers: list[structlog.typing.Processor] = (
        [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer()]
        if as_json
        else [structlog.dev.ConsoleRenderer(colors=stream.isatty(), pad_event_to=28)]
    )
    structlog.configure(
        processors=[
            _with_what_every_line_says,
            structlog.processors.add_log_level,
            SparseLines(),
            keep,
            *sparse,
            structlog.processors.TimeStamper(fmt="iso" if as_json else "%H:%M:%S", utc=as_json),
            tell_of_lost_lines,
            *renderers,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.DEBUG if is_debug else logging.INFO
        ),
        # One write a line: lines of ranks, which share the file, stay whole.
        logger_factory=structlog.WriteLoggerFactory(stream),  # type: ignore[arg-type] # a TextIO as far as it is used
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(
        level=logging.WARNING, stream=stream, format="%(levelname)s %(name)s: %(message)s"
    )
    if kept is not None:
        logging.getLogger().addHandler(kept)
    if folder is not None and (user := user_beside_root(folder)):
        structlog.get_logger().warning(
            "this is root, in the folder of another user",
            folder=str(folder),
            user=user,
            next_step=f"stop it, type 'chown -R {user} {as_typed(folder)}', and start it as {user}, for whom "
            "what root leaves there is out of reach",
        )
    return stream
