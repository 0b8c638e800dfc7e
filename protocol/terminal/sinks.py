"""The tools that `atoll track` writes to, each behind the same three calls.

TensorBoard's file and OpenTelemetry's requests are made here; Weights & Biases and trackio make their own.
"""

import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

import click
from google.protobuf.message import DecodeError

from protocol.errors import BadDataError, UnavailableError, UsageError
from protocol.wire.versions import release

if TYPE_CHECKING:
    from protocol.v1 import status_pb2 as pb


MODULES = {"opentelemetry": "opentelemetry.proto.collector.trace.v1.trace_service_pb2"}
"""What a tool's package has to have in it, where it is not the tool's own name."""

OF_THE_RUN_ALONE: Mapping[str, Mapping[str, object]] = {
    "trackio": {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False},
    "wandb": {
        "settings": {
            "console": "off",
            "disable_code": True,
            "disable_git": True,
            "x_disable_meta": True,
            "x_disable_stats": True,
            "x_save_requirements": False,
        }
    },
}
"""Both would also tell of this machine, which need not have to do with the run."""

EVENTS_PREFIX = "events.out.tfevents.atoll."
"""TensorBoard finds files that have its first words in their names."""

DEFAULT_ENDPOINT = "http://localhost:4318"
"""Where receivers of OpenTelemetry listen on their own machine."""

TRACES_PATH = "/v1/traces"

HEADERS_VARIABLE = "OTEL_EXPORTER_OTLP_HEADERS"
"""As OpenTelemetry's own exporters have it: "name=value,name=value", with %-escapes."""

ANSWER_SECONDS = 20.0

MOST_SPANS = 2000
"""In one request."""

BUSY = frozenset({408, 429, 502, 503, 504})
"""What HTTP says where one is to ask again later."""


class ReceiverAwayError(UnavailableError):
    """A tool cannot take anything now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Numbers of one round, by their tags."""

    round: int
    at: float  # seconds since 1970 when it closed; of rounds before the command looked, about
    values: Mapping[str, float]
    texts: Mapping[str, str] = field(default_factory=dict)  # what its model wrote, by prompts
    told: "pb.GetRoundResponse | None" = None  # when each node did what, for tools that show it


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What was written so far, of which run and for which tool."""

    swarm_id: str
    tool: str
    round: int = 0
    held_out_round: int = -1
    text_round: int = 0
    incarnation: int = 0  # of that round: how often history had been taken back
    size: int = 0  # of the event file


class Sink(Protocol):
    """A tool that takes rows."""

    wants_times: bool
    """Whether it shows when each node did what."""

    def put(self, rows: Sequence[Row], save: Callable[[int], None]) -> None:
        """Takes rows, and calls `save` once: with the size of its file, or 0."""

    def rewind(self, round_number: int, at: float) -> None:
        """Later rounds than this one are made again."""

    def close(self) -> None:
        """Writes what waits."""


class TensorBoard:
    """An event file. A row is in it when the note says so: what is beyond is cut off at the next start."""

    wants_times = False

    def __init__(self, out: Path, note: Note, *, at: float) -> None:
        path = out / f"{EVENTS_PREFIX}{note.swarm_id[:12]}"
        self._file = EventFile(path, size=note.size, at=at)

    def put(self, rows: Sequence[Row], save: Callable[[int], None]) -> None:
        """Writes them to the disk, and then the note."""
        self._file.append(
            [
                *(scalars_event(row.at, row.round, row.values) for row in rows if row.values),
                *(texts_event(row.at, row.round, row.texts) for row in rows if row.texts),
            ]
        )
        save(self._file.size)

    def rewind(self, round_number: int, at: float) -> None:
        """Lets TensorBoard drop what is later."""
        self._file.append([rewind_event(at, round_number + 1)])

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class Logger:
    """Weights & Biases or trackio: what `log` was given they write by themselves, a moment later.

    So the note comes first: one that is killed in between lacks a row, and has none twice. `as_table` makes
    what the tool shows as a table of columns and rows.
    """

    wants_times = False

    def __init__(
        self,
        log: Callable[[dict[str, object], int], object],
        finish: Callable[[], object],
        as_table: Callable[[list[str], list[list[object]]], object],
    ) -> None:
        self._log = log
        self._finish = finish
        self._as_table = as_table

    def put(self, rows: Sequence[Row], save: Callable[[int], None]) -> None:
        """Writes the note, and hands them over."""
        save(0)
        for row in rows:
            told: dict[str, object] = dict(row.values)
            if row.texts:
                texts = [[row.round, tag, text] for tag, text in row.texts.items()]
                told["texts"] = self._as_table(["round", "prompt", "text"], texts)
            if told:
                self._log({**told, "round": row.round}, row.round)

    def rewind(self, round_number: int, at: float) -> None:
        """Both keep what was logged before, and show it with what is made again."""

    def close(self) -> None:
        """Waits until all is written."""
        self._finish()


class Traces:
    """A receiver of OpenTelemetry's spans by HTTP; `post` sends a body, and returns the answer's.

    The note comes last, so that no round is lost while the receiver is away. What is sent again has the
    same ids.
    """

    wants_times = True

    def __init__(
        self,
        post: Callable[[bytes], bytes],
        *,
        swarm_id: str,
        run_name: str,
        warn: Callable[[str], None],
    ) -> None:
        self._post = post
        self._swarm_id = swarm_id
        self._run_name = run_name
        self._warn = warn
        self._version = release()

    def put(self, rows: Sequence[Row], save: Callable[[int], None]) -> None:
        """Sends rounds, some at a time; raises UnavailableError where one is not taken."""
        from protocol.terminal.spans import refused_by, request_of, spans_of

        spans = [
            span
            for row in rows
            if row.told is not None
            for span in spans_of(
                row.told, swarm_id=self._swarm_id, run_name=self._run_name, closed_at=row.at
            )
        ]
        for first in range(0, len(spans), MOST_SPANS):
            part = spans[first : first + MOST_SPANS]
            answer = self._post(request_of(part, run_name=self._run_name, version=self._version))
            try:
                num_refused, why = refused_by(answer)
            except DecodeError as error:
                raise BadDataError(
                    f"what answers is no receiver of OpenTelemetry: {answer[:40]!r}",
                    next_step="check --endpoint",
                ) from error
            if num_refused or why:
                self._warn(f"the receiver has not taken {num_refused} of {len(part)} spans: {why}")
        save(0)

    def rewind(self, round_number: int, at: float) -> None:
        """Rounds that are made again are traces of their own."""

    def close(self) -> None:
        """Nothing waits."""


def open_sink(note: Note, out: Path, run_name: str, *, at: float, endpoint: str = "") -> Sink:
    """The tool that the note names; raises UsageError when it is not installed."""
    if note.tool == "tensorboard":
        return TensorBoard(out, note, at=at)
    module = required(note.tool, out)
    name = f"{run_name}-{note.swarm_id[:12]}"
    if note.tool == "opentelemetry":
        return Traces(
            poster_of(endpoint),
            swarm_id=note.swarm_id,
            run_name=run_name,
            warn=lambda words: click.echo(words, err=True),
        )
    if note.tool == "trackio":
        run = module.init(
            project=run_name, name=name, resume="allow", **OF_THE_RUN_ALONE["trackio"]
        )
        return Logger(
            lambda values, step: run.log(values, step=step),
            module.finish,
            lambda columns, rows: module.Table(columns=columns, data=rows),
        )
    # Without this it would ask for a login, which a command that runs for weeks cannot wait for.
    mode = os.environ.get("WANDB_MODE", "offline")
    run = module.init(
        **OF_THE_RUN_ALONE["wandb"],
        project=run_name,
        name=name,
        id=note.swarm_id,
        dir=out,
        mode=mode,
        resume="allow",
    )
    run.define_metric("round")
    run.define_metric("*", step_metric="round")  # held-out losses come later than their rounds
    return Logger(
        lambda values, step: run.log(values),
        run.finish,
        lambda columns, rows: module.Table(columns=columns, data=rows),
    )


def required(tool: str, out: Path) -> Any:
    """The tool's module; raises UsageError when it is not installed."""
    os.environ.setdefault("TRACKIO_DIR", str(out.absolute()))  # it is read at the import
    module = MODULES.get(tool, tool)
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # something that the package itself asks for
        raise UsageError(
            f"--to {tool} needs the package {tool}, which is not installed",
            next_step=f"pip install 'atoll[{tool}]'",
        ) from error


def poster_of(endpoint: str) -> Callable[[bytes], bytes]:
    """Sends a request to a receiver of OTLP by HTTP; raises UsageError for what is no address of one.

    It raises ReceiverAwayError where the receiver is to be asked again later, and UsageError where it
    refuses.
    """
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(
            f"{endpoint!r} is not the address of a receiver",
            next_step=f"give one as --endpoint {DEFAULT_ENDPOINT}",
        )
    url = endpoint.rstrip("/")
    url = url if url.endswith(TRACES_PATH) else url + TRACES_PATH
    headers = {"Content-Type": "application/x-protobuf", **_headers()}
    opener = build_opener(_NoRedirects)

    def post(body: bytes) -> bytes:
        request = Request(url, data=body, headers=headers, method="POST")
        try:
            with opener.open(request, timeout=ANSWER_SECONDS) as answer:
                read: bytes = answer.read()
                return read
        except HTTPError as error:
            what = f"the receiver at {url} answers {error.code} {error.reason}"
            if error.code in BUSY:
                raise ReceiverAwayError(what) from error
            raise UsageError(
                what, next_step=f"check --endpoint, and ${HEADERS_VARIABLE} where it wants a key"
            ) from error
        except (URLError, OSError) as error:
            why = error.reason if isinstance(error, URLError) else error
            raise ReceiverAwayError(f"no receiver answers at {url}: {why}") from error

    return post


class _NoRedirects(HTTPRedirectHandler):
    """A request that is sent elsewhere would become one without a body, and be lost."""

    def redirect_request(self, *_: object) -> None:
        return None


def _headers() -> dict[str, str]:
    pairs = [part.partition("=") for part in os.environ.get(HEADERS_VARIABLE, "").split(",")]
    return {unquote(name.strip()): unquote(value.strip()) for name, _, value in pairs if name}


# TensorBoard's event files, as far as numbers need it: records of one message each, appended.
#
# Format: tensorflow/core/lib/io/record_writer.h (length, its checksum, data, its checksum; CRC-32C,
# masked) and tensorflow/core/util/event.proto. Written here because the packages that do it ask for numpy or
# for TensorBoard itself, and none lets one cut a file back to where it was whole.


_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5  # wire types of protocol buffers
_POLYNOMIAL = 0x82F63B78  # Castagnoli's, reflected
_MASK_DELTA = 0xA282EAD8
_SESSION_START = 1
_DT_STRING = 7  # tensorflow/core/framework/types.proto

VERSION = "brain.Event:2"


def _table() -> tuple[int, ...]:
    entries = []
    for entry in range(256):
        for _ in range(8):
            entry = entry >> 1 ^ (_POLYNOMIAL if entry & 1 else 0)
        entries.append(entry)
    return tuple(entries)


_CRC_TABLE = _table()


def crc32c(data: bytes) -> int:
    """The checksum of Castagnoli (RFC 3720, appendix B.4)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF)


def record_of(event: bytes) -> bytes:
    """An event as it stands in a file."""
    length = struct.pack("<Q", len(event))
    return length + _masked(length) + event + _masked(event)


def _varint(number: int) -> bytes:
    digits = bytearray()
    while number > 0x7F:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*digits, number])


def _field(number: int, kind: int, content: bytes) -> bytes:
    length = _varint(len(content)) if kind == _BYTES else b""
    return _varint(number << 3 | kind) + length + content


def _event(at: float, step: int, what: bytes) -> bytes:
    return _field(1, _DOUBLE, struct.pack("<d", at)) + _field(2, _VARINT, _varint(step)) + what


def scalars_event(at: float, step: int, values: Mapping[str, float]) -> bytes:
    """Numbers of one step, by their tags; `at` in seconds since 1970."""
    summary = b"".join(
        _field(
            1,
            _BYTES,
            _field(1, _BYTES, tag.encode()) + _field(2, _FLOAT, struct.pack("<f", value)),
        )
        for tag, value in values.items()
    )
    return _event(at, step, _field(5, _BYTES, summary))


def texts_event(at: float, step: int, texts: Mapping[str, str]) -> bytes:
    """Texts of one step, by their tags, for TensorBoard's text plugin.

    That reads Markdown, so each line is indented: a block of code, in which nothing is markup.
    """
    metadata = _field(1, _BYTES, _field(1, _BYTES, b"text"))
    shape = _field(2, _BYTES, _field(2, _BYTES, _field(1, _VARINT, _varint(1))))
    summary = b"".join(
        _field(
            1,
            _BYTES,
            _field(1, _BYTES, tag.encode())
            + _field(
                8,
                _BYTES,
                _field(1, _VARINT, _varint(_DT_STRING)) + shape + _field(8, _BYTES, block),
            )
            + _field(9, _BYTES, metadata),
        )
        for tag, text in texts.items()
        for block in ["\n".join(f"    {line}" for line in text.split("\n")).encode()]
    )
    return _event(at, step, _field(5, _BYTES, summary))


def rewind_event(at: float, step: int) -> bytes:
    """Tells TensorBoard that steps from this one on are made again: it drops those before."""
    return _event(at, step, _field(7, _BYTES, _field(1, _VARINT, _varint(_SESSION_START))))


class EventFile:
    """Appends events; `size` is how far the file is whole and on the disk. Raises OSError."""

    def __init__(self, path: Path, *, size: int, at: float) -> None:
        """Opens or makes the file, and cuts off what lies beyond `size`: it was not finished."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("r+b" if path.exists() else "w+b")
        self._file.truncate(size)
        self._file.seek(0, os.SEEK_END)
        self.size = self._file.tell()
        if not self.size:
            self.append(
                [_field(1, _DOUBLE, struct.pack("<d", at)) + _field(3, _BYTES, VERSION.encode())]
            )

    def append(self, events: "list[bytes]") -> None:
        """Writes events, and returns when they are on the disk."""
        self._file.write(b"".join(map(record_of, events)))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.size = self._file.tell()

    def close(self) -> None:
        """Ends it."""
        self._file.close()
