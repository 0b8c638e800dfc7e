"""Documents of the files that people have, a part of a file at a time.

Plain text, JSON lines and lists, CSV, Parquet, and the Arrow files that Hugging Face's datasets writes.

A part can be read without what comes before it, so that processes share a large file. What is cut
where depends on the files alone. A document is one file of text, one line of JSON or one row of a
table; text files longer than `document_bytes` are several documents, cut at ends of lines.
Which files there are is found in node.island.data.inputs, and what a record says in
node.island.data.records.
"""

import bz2
import codecs
import contextlib
import csv
import gzip
import io
import itertools
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from node.installed import needs_package
from node.island.data.inputs import KINDS, SOME_OF_A_FOLDER, Kind, is_compressed, suffix_of
from node.island.data.records import Document, columns_of, document_of, kind_in_words
from protocol.errors import BadDataError

DOCUMENT_BYTES = 1 << 20
DOCUMENT_BYTES_OF_LITTLE_TEXT = 64 << 10
LITTLE_TEXT_BYTES = 64 << 20
"""Less text than this is cut into smaller documents, so that some of them are held out."""

LONGEST_LINE_BYTES = 1 << 16
"""How far behind its place a cut in plain text looks for the end of a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Bytes of a file, or row groups or record batches of a table, that one process reads."""

    path: Path
    kind: Kind
    start: int
    stop: int
    num_bytes: int  # on the disk: what progress counts
    document_bytes: int = DOCUMENT_BYTES  # of plain text; start is a multiple of it
    repetition: int = 0  # how often it was read before
    share: float = 1.0  # of its documents, by their hash, that are taken
    source: str = ""  # the pattern that says how often it is read


def parts_of(path: Path, part_bytes: int, *, document_bytes: int = DOCUMENT_BYTES) -> list[Part]:
    """A file in parts of about so many bytes. Raises BadDataError for what holds no documents."""
    kind = _kind_of(path)
    size = path.stat().st_size
    if kind == "parquet":
        return _row_groups(path, part_bytes)
    if kind == "arrow":
        return _record_batches(path, part_bytes)
    _check_encoding(path)
    if kind in ("json", "csv") or is_compressed(path):  # no reading from the middle
        return [
            Part(
                path=path,
                kind=kind,
                start=0,
                stop=size,
                num_bytes=size,
                document_bytes=document_bytes,
            )
        ]
    if kind == "text":
        _check_is_text(path)
        part_bytes = max(1, part_bytes // document_bytes) * document_bytes
    return [
        Part(
            path=path,
            kind=kind,
            start=start,
            stop=min(start + part_bytes, size),
            num_bytes=min(part_bytes, size - start),
            document_bytes=document_bytes,
        )
        for start in range(0, size, part_bytes)
    ]


def documents_of(part: Part, *, field: str) -> Iterator[Document]:
    """The documents that begin in a part; `field` has the text of a record."""
    if part.kind == "text":
        yield from _texts(part)
    elif part.kind == "jsonl":
        yield from _lines(part, field)
    elif part.kind == "json":
        yield from _listed(part, field)
    elif part.kind == "csv":
        yield from _table_lines(part, field)
    elif part.kind == "parquet":
        yield from _rows(part, field)
    else:
        yield from _arrow_rows(part, field)


_REFUSED = {
    ".json": (
        "neither a list of records nor a record a line",
        "write a record a line, as jq -c '.data[]' does where 'data' has a list of them",
    ),
    ".zip": ("an archive", "unpack it, and name the folder"),
    ".tar": ("an archive", "unpack it, and name the folder"),
}


def _kind_of(path: Path) -> Kind:
    """By its name, but .json may have a record a line. Raises BadDataError for what holds no documents."""
    suffix = suffix_of(path)
    if suffix == ".json":
        _check_encoding(path)
        if (kind := _kind_of_json(path)) is not None:
            return kind
    if suffix in _REFUSED:
        what, next_step = _REFUSED[suffix]
        raise BadDataError(
            f"{path} cannot be read: it is {what}",
            next_step=f"{next_step}. To leave it out, {SOME_OF_A_FOLDER}",
        )
    return KINDS.get(suffix, "text")


def _kind_of_json(path: Path) -> Kind | None:
    """A list of records, or a record a line as C4 and Dolma have it; None for what is neither."""
    with _opened(path) as file:
        try:
            begins = file.read(len(codecs.BOM_UTF8)).removeprefix(codecs.BOM_UTF8).lstrip()
            while not begins and (more := file.read(1)):
                begins = more.strip()
            if begins.startswith(b"["):  # which may be one line of any length
                return "json"
            if begins.startswith(b"{") and json.loads(begins + file.readline()):
                return "jsonl"
        except (ValueError, RecursionError):
            pass
        except _NOT_UNPACKED as error:
            raise _not_whole(path, error) from error
    return None


def _check_encoding(path: Path) -> None:
    """Raises BadDataError for what says at its beginning that it is no UTF-8."""
    with _opened(path) as file:
        try:
            begins = file.read(4)
        except _NOT_UNPACKED as error:
            raise _not_whole(path, error) from error
    for mark, name in _MARKS.items():
        if begins.startswith(mark):
            raise BadDataError(
                f"{path} is {name}, by its first bytes, and text is read as UTF-8",
                next_step=f"convert it: iconv -f {name} -t UTF-8 FILE > NEWFILE",
            )


_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
"""Longer ones first: that of UTF-16 begins one of UTF-32."""


def _check_is_text(path: Path) -> None:
    with path.open("rb") as file:
        if b"\0" in file.read(LONGEST_LINE_BYTES):
            raise BadDataError(
                f"{path} is no text: it has zero bytes",
                next_step=f"name files of text, .jsonl or .parquet; {SOME_OF_A_FOLDER}",
            )


def _opened(path: Path) -> IO[bytes]:
    opener = _OPENERS.get(path.suffix.lower(), open)
    return cast("IO[bytes]", opener(path, "rb"))


def _zstandard(path: Path, _mode: str) -> IO[bytes]:
    arrow = needs_package("pyarrow", what=f"{path} is compressed with zstd")
    return io.BufferedReader(arrow.input_stream(str(path), compression="zstd"))


_OPENERS: dict[str, Callable[..., Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _zstandard,
}

_NOT_UNPACKED = (EOFError, OSError, lzma.LZMAError, zlib.error)  # gzip.BadGzipFile is an OSError


def _texts(part: Part) -> Iterator[Document]:
    """Documents from cut to cut; both ends of a part are cuts."""
    try:
        with _opened(part.path) as file:
            if is_compressed(part.path):
                yield from _streamed(file, part.document_bytes, part.path)
                return
            start = _cut_from(file, part.start)
            each = part.document_bytes
            for place in range(part.start + each, part.stop + each, each):
                stop = _cut_from(file, place)
                file.seek(start)
                if text := _without_mark(file.read(stop - start), start):
                    yield Document(text=text, where=f"{part.path}, byte {start}")
                start = stop
    except _NOT_UNPACKED as error:
        raise _not_whole(part.path, error) from error


def _cut_from(file: IO[bytes], place: int) -> int:
    """The end of the first line that ends at or behind a place, or else the first whole character."""
    if place == 0:
        return 0
    file.seek(place - 1)
    ahead = file.read(LONGEST_LINE_BYTES)
    if (end := ahead.find(b"\n")) >= 0:
        return place + end
    if len(ahead) < LONGEST_LINE_BYTES:
        return place - 1 + len(ahead) if ahead else place
    inside = next((i for i in range(1, 5) if ahead[i] & 0xC0 != 0x80), 1)
    return place - 1 + inside


def _streamed(file: IO[bytes], document_bytes: int, path: Path) -> Iterator[Document]:
    """As _texts, of what cannot be read from the middle."""
    start = 0
    while text := file.read(document_bytes):
        text += file.readline(LONGEST_LINE_BYTES)
        text += file.read(_missing_bytes(text))
        where = f"{path}, byte {start} of what is unpacked"
        yield Document(text=_without_mark(text, start), where=where)
        start += len(text)


def _missing_bytes(text: bytes) -> int:
    """How many bytes the last character of a text lacks, by the byte that it begins with."""
    for num_there, byte in enumerate(reversed(text[-3:]), start=1):
        if byte >= 0xC0:
            return max(0, 2 + (byte >= 0xE0) + (byte >= 0xF0) - num_there)
        if byte < 0x80:
            return 0
    return 0


def _without_mark(text: bytes, start: int) -> bytes:
    """Text that begins at byte `start` of its file, without the mark that says there that it is UTF-8."""
    return text if start else text.removeprefix(codecs.BOM_UTF8)


def _lines(part: Part, field: str) -> Iterator[Document]:
    """Records of the lines that begin in the part."""
    try:
        with _opened(part.path) as file:
            place = part.start
            if place:
                file.seek(place - 1)
                place += len(file.readline()) - 1  # the line that began before it
            is_whole = is_compressed(part.path)
            while (is_whole or place < part.stop) and (line := file.readline()):
                if line.strip():
                    yield document_of(
                        _record_of(line, part.path, place), field, f"{part.path}, byte {place}"
                    )
                place += len(line)
    except _NOT_UNPACKED as error:
        raise _not_whole(part.path, error) from error


def _record_of(line: bytes, path: Path, place: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
        if isinstance(record, dict):
            return record
        why = f"{kind_in_words(record)}, no object"
    except UnicodeDecodeError as error:
        raise BadDataError(
            f"{path}: the line at byte {place} is not UTF-8: its byte {error.start} is "
            f"{error.object[error.start]:#x}",
            next_step="convert the file, as 'iconv -f ISO-8859-1 -t UTF-8', or remove that line",
        ) from error
    except (ValueError, RecursionError) as error:
        why = str(error)
    raise BadDataError(
        f"{path}: the line at byte {place} is no JSON record: {why}",
        next_step="correct or remove that line",
    )


def _listed(part: Part, field: str) -> Iterator[Document]:
    """Records of one list, of which a little is in memory at a time."""
    number = 0
    try:
        with _opened(part.path) as file, io.TextIOWrapper(file, encoding="utf-8-sig") as text:
            for record in _values_of(_Signs(text)):
                if not isinstance(record, dict):
                    raise ValueError(f"{kind_in_words(record)}, no object")
                yield document_of(record, field, f"{part.path}, record {number}")
                number += 1
    except (ValueError, RecursionError) as error:  # also what is no JSON, or no UTF-8
        raise BadDataError(
            f"{part.path}: record {number} of its list, counted from 0, cannot be read: {error}",
            next_step="correct that record, or write a record a line",
        ) from error
    except _NOT_UNPACKED as error:
        raise _not_whole(part.path, error) from error


def _values_of(signs: "_Signs") -> Iterator[Any]:
    """Values of a list of JSON, one after the other. Raises ValueError where it is none."""
    signs.take()  # the bracket
    sign = "" if signs.next() == "]" else ","
    while sign == ",":
        yield signs.value()
        if (sign := signs.take()) not in (",", "]"):
            raise ValueError(f"a comma or the end of the list is missing before {sign!r}")


class _Signs:
    """Signs of JSON that is read as far as it is needed."""

    def __init__(self, text: IO[str]) -> None:
        self._text = text
        self._held, self._at = "", 0

    def next(self) -> str:
        """The next sign that is no space; empty at the end."""
        while True:
            while self._at < len(self._held) and self._held[self._at].isspace():
                self._at += 1
            if self._at < len(self._held) or not self._read():
                return self._held[self._at : self._at + 1]

    def take(self) -> str:
        """The same, and goes on behind it."""
        sign = self.next()
        self._at += len(sign)
        return sign

    def value(self) -> Any:
        """The next value. Raises JSONDecodeError where there is none."""
        self.next()
        while True:
            try:
                value, self._at = _DECODER.raw_decode(self._held, self._at)
            except json.JSONDecodeError:
                if not self._read():  # it may be whole once more is there
                    raise
            else:
                return value

    def _read(self) -> str:
        """Twice as much at each try, for what is long or damaged."""
        left = self._held[self._at :]
        more = self._text.read(max(READ_AHEAD, len(left)))
        self._held, self._at = left + more, 0
        return more


_DECODER = json.JSONDecoder()
READ_AHEAD = 1 << 20


def _table_lines(part: Part, field: str) -> Iterator[Document]:
    """Rows of a table in text, of which the first has the names; what is quoted may hold ends of lines."""
    csv.field_size_limit(LONGEST_FIELD)
    separators = "\t" if ".tsv" in part.path.suffixes else ",;\t"
    line = 1
    try:
        with (
            _opened(part.path) as file,
            io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text,
        ):
            first = text.readline()
            separator = _separator_of(first, separators, field, part.path)
            rows = csv.reader(itertools.chain([first], text), delimiter=separator, strict=True)
            names = next(rows, [])
            columns_of(names, field, part.path)
            for row in rows:
                if row and len(row) != len(names):
                    fields = "1 field" if len(row) == 1 else f"{len(row)} fields"
                    raise BadDataError(
                        f"{part.path}: the row that ends in line {rows.line_num} has {fields}, and "
                        f"the first line names {len(names)}",
                        next_step="correct that row: a field with a separator or an end of line in it is "
                        "written in quotes",
                    )
                if row:
                    yield document_of(
                        dict(zip(names, row, strict=True)), field, f"{part.path}, line {line + 1}"
                    )
                line = rows.line_num
    except (csv.Error, UnicodeDecodeError) as error:
        raise BadDataError(
            f"{part.path}: what follows line {line} cannot be read: {error}",
            next_step="write the table as UTF-8 with quotes, as pandas' to_csv does",
        ) from error
    except _NOT_UNPACKED as error:
        raise _not_whole(part.path, error) from error


def _separator_of(first: str, separators: str, field: str, path: Path) -> str:
    """By which the first line has the field: spreadsheets of many countries write semicolons."""
    for separator in separators:
        with contextlib.suppress(BadDataError, csv.Error):
            columns_of(next(csv.reader([first], delimiter=separator), []), field, path)
            return separator
    return separators[0]


LONGEST_FIELD = 1 << 30
"""Characters of a field of a table; Python's own limit is 128 Ki."""


def _row_groups(path: Path, part_bytes: int) -> list[Part]:
    """Neighbouring row groups, until they have so many bytes."""
    parquet = needs_package("pyarrow.parquet", what=f"{path} is a Parquet file")
    try:
        metadata = parquet.read_metadata(path)
        sizes = [_compressed_bytes(metadata.row_group(i)) for i in range(metadata.num_row_groups)]
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise _not_whole(path, error) from error
    return _neighbours(path, "parquet", sizes, part_bytes)


def _neighbours(path: Path, kind: Kind, sizes: list[int], part_bytes: int) -> list[Part]:
    parts: list[Part] = []
    start, taken = 0, 0
    for i, size in enumerate(sizes):
        taken += size
        if taken >= part_bytes or i == len(sizes) - 1:
            parts.append(Part(path=path, kind=kind, start=start, stop=i + 1, num_bytes=taken))
            start, taken = i + 1, 0
    return parts


def _record_batches(path: Path, part_bytes: int) -> list[Part]:
    """Neighbouring record batches of an Arrow stream, likewise. Only their headers are read."""
    return _neighbours(path, "arrow", [batch.nbytes for batch in _stream_of(path)], part_bytes)


_ARROW_FILE = b"ARROW1"


def _stream_of(path: Path) -> Iterator[Any]:
    """Record batches of an Arrow file; mapped, so one that is passed over costs nothing."""
    arrow = needs_package("pyarrow", what=f"{path} is an Arrow file")
    try:
        with arrow.memory_map(str(path)) as mapped:
            if mapped.read(len(_ARROW_FILE)) == _ARROW_FILE:  # as polars and Feather write it
                with arrow.ipc.open_file(mapped) as file:
                    yield from map(file.get_batch, range(file.num_record_batches))
                return
            mapped.seek(0)
            with arrow.ipc.open_stream(mapped) as stream:
                yield from stream
    except (OSError, ValueError) as error:
        raise _not_whole(path, error) from error


def _arrow_rows(part: Part, field: str) -> Iterator[Document]:
    for batch in itertools.islice(_stream_of(part.path), part.start, part.stop):
        columns = columns_of(batch.schema.names, field, part.path)
        for start in range(0, batch.num_rows, 256):
            for record in batch.slice(start, 256).select(columns).to_pylist():
                yield document_of(_without_nulls(record), field, str(part.path))


def _without_nulls(record: dict[str, Any]) -> dict[str, Any]:
    """A table's record as JSON would have it: in a table each message has the keys of all, empty or not."""
    return {key: _filled(value) for key, value in record.items()}


def _filled(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _filled(each)
            for key, each in value.items()
            if each is not None or key == "content"
        }
    return [_filled(each) for each in value] if isinstance(value, list) else value


def _compressed_bytes(group: Any) -> int:
    return sum(group.column(i).total_compressed_size for i in range(group.num_columns))


def _rows(part: Part, field: str) -> Iterator[Document]:
    parquet = needs_package("pyarrow.parquet", what=f"{part.path} is a Parquet file")
    try:
        with parquet.ParquetFile(part.path, pre_buffer=False) as file:
            columns = columns_of(file.schema_arrow.names, field, part.path)
            groups = list(range(part.start, part.stop))
            for batch in file.iter_batches(
                256, row_groups=groups, columns=columns, use_threads=False
            ):
                for record in batch.to_pylist():
                    yield document_of(_without_nulls(record), field, str(part.path))
    except (OSError, ValueError) as error:
        raise _not_whole(part.path, error) from error


def _not_whole(path: Path, error: Exception) -> BadDataError:
    if isinstance(error, OSError) and error.errno is not None:
        return BadDataError(
            f"{path} cannot be read: {error.strerror}", next_step="make it a file that you may read"
        )
    return BadDataError(f"{path} is damaged: {error}", next_step="fetch that file again")
