"""Logs of the daemons: one line an event on standard error, for people or, as JSON, for machines."""

import logging
import os
import select
import sys

import structlog


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


def start_logging(*, as_json: bool, **context: str) -> LogStream:
    """Sends structlog, and warnings of libraries, to standard error; `context` stands in every line.

    With `$ATOLL_LOG=debug` also what is worth a line only to who looks for a fault.
    """
    is_debug = os.environ.get("ATOLL_LOG") == "debug"
    stream = LogStream(sys.stderr.fileno())

    def tell_of_lost_lines(
        _logger: object, _method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        if stream.lost_lines:
            event["lost_lines"] = stream.lost_lines
        return event

    structlog.contextvars.bind_contextvars(**context)
    renderers: list[structlog.typing.Processor] = (
        [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer()]
        if as_json
        else [structlog.dev.ConsoleRenderer(colors=stream.isatty(), pad_event_to=28)]
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
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
    return stream
