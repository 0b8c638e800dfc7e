"""Documents of the files that people have, a part of a file at a time.

Plain text, JSON lines, Parquet, and the Arrow files that Hugging Face's datasets saves to the disk.

A part can be read without what comes before it, so that processes share a large file. What is cut
where depends on the files alone. A document is one file of text, one line of JSON or one row of a
table; text files longer than `document_bytes` are several documents, cut at ends of lines.
"""

import codecs
import glob
import gzip
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, NoReturn, cast

from node.island.data.extras import needs_package
from protocol.errors import BadDataError, NoInputError
from protocol.files.durable import expanded

DOCUMENT_BYTES = 1 << 20
DOCUMENT_BYTES_OF_LITTLE_TEXT = 64 << 10
LITTLE_TEXT_BYTES = 64 << 20
"""Less text than this is cut into smaller documents, so that some of them are held out."""

LONGEST_LINE_BYTES = 1 << 16
"""How far behind its place a cut in plain text looks for the end of a line."""

_SOME_OF_A_FOLDER = "name the others: 'folder/**/*.txt', in quotes, takes all such below a folder"

Kind = Literal["text", "jsonl", "parquet", "arrow"]

_KINDS: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
BESIDE_TOKENS = (".idx", ".index", ".metadata", ".loss")
"""What lies beside files of tokens and is read with them."""

_AS_RECORDS = "write a record a row, as pandas' to_json(…, orient='records', lines=True) does"
_REFUSED = {
    ".json": (
        "one JSON value",
        "write a record a line, and name it .jsonl; of a list of records jq -c '.[]' makes that",
    ),
    ".csv": ("a table", _AS_RECORDS),
    ".tsv": ("a table", _AS_RECORDS),
    ".zst": ("compressed", "unpack it with 'zstd -d', or compress it with gzip"),
    ".xz": ("compressed", "unpack it with 'unxz', or compress it with gzip"),
    ".bz2": ("compressed", "unpack it with 'bunzip2', or compress it with gzip"),
    ".zip": ("an archive", "unpack it, and name the folder"),
    ".tar": ("an archive", "unpack it, and name the folder"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Bytes of a file, or row groups or record batches of a table, that one process reads."""

    path: Path
    kind: Kind
    start: int
    stop: int
    num_bytes: int  # on the disk: what progress counts
    document_bytes: int = DOCUMENT_BYTES  # of plain text; start is a multiple of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A text, or a conversation as a list of {"role": …, "content": …}.

    `given` is what its chat template is given beside that, such as tools.
    """

    text: bytes
    messages: tuple[dict[str, Any], ...] = ()
    given: dict[str, Any] = field(default_factory=dict)
    where: str = field(default="", compare=False)  # the file, and the byte that it begins at


def input_files(patterns: Iterable[str], *, but_for: Sequence[str] = ()) -> list[Path]:
    """Files that paths, folders and globs name, each once: all below a folder, sorted.

    What `but_for` names as well is left out: a file that is held out is not trained on.
    Raises NoInputError for what matches nothing.
    """
    found: dict[Path, Path] = {}
    for pattern in patterns:
        path = expanded(pattern)
        if path.is_file():
            matches = [path]
        elif path.is_dir():
            matches, _ = _data_within(path)
        else:
            matches = [Path(each) for each in sorted(glob.glob(str(path), recursive=True))]  # noqa: PTH207 - Path.glob takes no absolute patterns
        files = [each for each in matches if each.is_file()]
        if not files:
            raise NoInputError(
                f"{pattern} names no file",
                next_step="correct the path; 'folder/**/*.txt', in quotes, takes all below a folder",
            )
        for each in files:
            found.setdefault(each.resolve(), each)
    for each in input_files(but_for) if but_for else ():
        found.pop(each.resolve(), None)
    if but_for and not found:
        raise NoInputError(
            f"all that is to be trained on is held out: {' '.join(but_for)}",
            next_step="hold other files out, or a share, as --held-out 0.01",
        )
    return list(found.values())


def passed_over(patterns: Iterable[str]) -> Iterator[str]:
    """For each folder of which not all files are read a sentence with how many, and one of the others."""
    for folder in filter(Path.is_dir, map(expanded, patterns)):
        taken, others = _data_within(folder)
        if others:
            kinds = " and ".join(sorted({_suffix_of(each) for each in taken}))
            yield (
                f"{folder}: {len(taken):,} of {len(taken) + len(others):,} files are read, as {kinds}; to "
                f"read others, such as {others[0].relative_to(folder)}, name them apart"
            )


def _data_within(folder: Path) -> tuple[list[Path], list[Path]]:
    """All files below a folder, and the others where some are of a kind made for data: then those alone."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(each.parent.name for each in folder.glob("*/state.json"))
        raise NoInputError(
            f"{folder} holds several splits: {', '.join(splits)}",
            next_step=f"name one, as {folder / splits[0] if splits else folder}; --held-out takes another",
        )
    if (folder / "state.json").is_file():  # datasets' save_to_disk
        named = json.loads((folder / "state.json").read_bytes())["_data_files"]
        return [folder / each["filename"] for each in named], []
    files = sorted(_files_below(folder))
    of_kinds = [each for each in files if _suffix_of(each) in _MADE_FOR_DATA]
    others = [each for each in files if each.suffix not in {*_MADE_FOR_DATA, *BESIDE_TOKENS, ".md"}]
    for each in of_kinds or files:
        if not each.exists():
            raise NoInputError(
                f"{each} is a link to {each.readlink()}, which is not there",
                next_step=f"fetch that file, or remove the link; {_SOME_OF_A_FOLDER}",
            )
    return (of_kinds, others) if of_kinds else (files, [])


def _files_below(folder: Path) -> Iterator[Path]:
    """All that are not hidden, also in folders that are linked to; each once, as links may go round."""
    seen = set[Path]()

    def cannot_be_read(error: OSError) -> NoReturn:
        raise NoInputError(
            f"{error.filename} cannot be read: {error.strerror}",
            next_step="allow this user to read it, or name what else is to be read apart",
        ) from error

    for place, names, files in os.walk(folder, followlinks=True, onerror=cannot_be_read):
        real = Path(place).resolve()
        if real in seen:
            names.clear()
            continue
        seen.add(real)
        names[:] = sorted(name for name in names if not name.startswith("."))
        found = (Path(place, name) for name in files if not name.startswith("."))
        yield from (each for each in found if each.is_file() or each.is_symlink())


_MADE_FOR_DATA = frozenset({*_KINDS, ".bin", ".ds"})


def _suffix_of(path: Path) -> str:
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    return suffix.lower()


def parts_of(path: Path, part_bytes: int, *, document_bytes: int = DOCUMENT_BYTES) -> list[Part]:
    """A file in parts of about so many bytes. Raises BadDataError for what holds no documents."""
    kind = _kind_of(path)
    size = path.stat().st_size
    if kind == "parquet":
        return _row_groups(path, part_bytes)
    if kind == "arrow":
        return _record_batches(path, part_bytes)
    _check_encoding(path)
    if path.suffix == ".gz":  # no reading from the middle
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
    elif part.kind == "parquet":
        yield from _rows(part, field)
    else:
        yield from _arrow_rows(part, field)


def _kind_of(path: Path) -> Kind:
    suffix = _suffix_of(path)
    if suffix in _REFUSED:
        what, next_step = _REFUSED[suffix]
        raise BadDataError(
            f"{path} cannot be read: it is {what}",
            next_step=f"{next_step}. To leave it out, {_SOME_OF_A_FOLDER}",
        )
    return _KINDS.get(suffix, "text")


def _check_encoding(path: Path) -> None:
    """Raises BadDataError for what says at its beginning that it is no UTF-8."""
    with _opened(path) as file:
        try:
            begins = file.read(4)
        except (OSError, EOFError) as error:  # gzip.BadGzipFile is an OSError
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
                next_step=f"name files of text, .jsonl or .parquet; {_SOME_OF_A_FOLDER}",
            )


def _opened(path: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def _texts(part: Part) -> Iterator[Document]:
    """Documents from cut to cut; both ends of a part are cuts."""
    try:
        with _opened(part.path) as file:
            if part.path.suffix == ".gz":
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
    except (EOFError, gzip.BadGzipFile) as error:
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
        where = f"{path}, byte {start} of what is unpacked"
        yield Document(text=_without_mark(text, start), where=where)
        start += len(text)


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
            is_whole = part.path.suffix == ".gz"
            while (is_whole or place < part.stop) and (line := file.readline()):
                if line.strip():
                    yield _document_of(
                        _record_of(line, part.path, place), field, f"{part.path}, byte {place}"
                    )
                place += len(line)
    except (EOFError, gzip.BadGzipFile) as error:
        raise _not_whole(part.path, error) from error


def _record_of(line: bytes, path: Path, place: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
        if isinstance(record, dict):
            return record
        why = f"a {type(record).__name__}, no object"
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


def _encoded(text: str, place: str) -> bytes:
    """Raises BadDataError for half of a character, which JSON can write, and no text can hold."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        near = text[max(0, error.start - 20) : error.start]
        raise BadDataError(
            f"{place}: after {near!r} stands \\u{ord(text[error.start]):04x}, which is half of a character: "
            "JSON writes those beyond \\uffff as two halves, and the other one is not there",
            next_step="write both, as \\ud83d\\ude00, or remove that half: a text that was cut may end in it",
        ) from error


def _document_of(record: dict[str, Any], field: str, place: str) -> Document:
    """A record's text, or its conversation. Raises BadDataError for one that has neither.

    One with nothing in its place has an empty text.
    """
    if isinstance(text := record.get(field), str):
        return Document(text=_encoded(text, place), where=place)
    messages = record.get("messages")
    own = text if messages is None else messages
    if (own is None and record.keys() & {field, "messages"}) or messages == []:
        return Document(text=b"", where=place)
    if isinstance(messages, list) and all(_is_turn(each) for each in messages):
        _check_weights(messages, place)
        given = _given_of(record, place)
        whole = {"messages": messages, **given} if given else messages
        return Document(
            text=_encoded(json.dumps(whole, sort_keys=True, ensure_ascii=False), place),
            messages=tuple(messages),
            given=given,
            where=place,
        )
    if isinstance(text, bytes):
        raise BadDataError(
            f"{place}: {field!r} is a column of bytes, and text is one of strings",
            next_step="write it as strings, as pandas' df[column].str.decode('utf-8') makes them, or name "
            "the column that has the text with --field COLUMN",
        )
    kind = f"a {type(text).__name__}" if text is not None else "no text"
    raise BadDataError(
        f"{place}: the record has {kind} in {field!r}, and no conversation in 'messages'; its keys "
        f"are {', '.join(map(repr, record)) or 'none'}",
        next_step="name the key that has the text with --field KEY; questions and answers are written as "
        "'messages', a list of {'role': …, 'content': …}",
    )


def _is_turn(message: object) -> bool:
    if not isinstance(message, dict) or "role" not in message:
        return False
    return bool(message.keys() & {"content", "tool_calls"})


WEIGHT = "weight"
"""Of an answer: with 0 it is not learned, as OpenAI's and Mistral's formats have it."""


def _check_weights(messages: list[dict[str, Any]], place: str) -> None:
    for message in messages:
        weight = message.get(WEIGHT)
        if weight is not None and weight not in (0, 1):
            raise BadDataError(
                f"{place}: a message has {WEIGHT!r} {weight!r}, and an answer is learned whole or not at all",
                next_step="write 0 for one that is not to be learned; without a weight it is",
            )


TOOLS, TEMPLATE_ARGUMENTS = "tools", "chat_template_kwargs"
"""Keys beside 'messages' that a conversation is written out by, as trl and transformers know them."""


def _given_of(record: dict[str, Any], place: str) -> dict[str, Any]:
    """What a record gives its chat template beside the messages; both may be JSON within a string.

    Columns of tables often are that, as tools have no one schema.
    """
    found: dict[str, Any] = {}
    for key, kind in ((TEMPLATE_ARGUMENTS, dict), (TOOLS, list)):
        value = record.get(key)
        if isinstance(value, str):
            try:
                value = json.loads(value) if value.strip() else None
            except ValueError as error:
                raise BadDataError(
                    f"{place}: {key!r} is no JSON: {error}", next_step="correct that record"
                ) from error
        if not value:
            continue
        if not isinstance(value, kind):
            raise BadDataError(
                f"{place}: {key!r} is a {type(value).__name__}, and not a {kind.__name__}",
                next_step="write 'tools' as a list of JSON schemas, and what else the chat template takes as "
                "an object in 'chat_template_kwargs'",
            )
        found |= value if kind is dict else {key: value}
    return found


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


def _stream_of(path: Path) -> Iterator[Any]:
    """Record batches of a file that datasets wrote; mapped, so one that is passed over costs nothing."""
    arrow = needs_package("pyarrow", what=f"{path} is an Arrow file")
    try:
        with arrow.memory_map(str(path)) as mapped, arrow.ipc.open_stream(mapped) as stream:
            yield from stream
    except (OSError, ValueError) as error:
        raise _not_whole(path, error) from error


def _arrow_rows(part: Part, field: str) -> Iterator[Document]:
    for batch in itertools.islice(_stream_of(part.path), part.start, part.stop):
        columns = _columns_of(batch.schema.names, field, part.path)
        for start in range(0, batch.num_rows, 256):
            for record in batch.slice(start, 256).select(columns).to_pylist():
                yield _document_of(_without_nulls(record), field, str(part.path))


def _columns_of(names: Sequence[str], field: str, path: Path) -> list[str]:
    """Columns that documents are made of; raises BadDataError where none has a text or a conversation."""
    if field in names or "messages" in names:
        wanted = dict.fromkeys((field, "messages", TEMPLATE_ARGUMENTS, TOOLS))
        return [each for each in wanted if each in names]
    raise BadDataError(
        f"{path}: no column {field!r}, and no 'messages'; there are {', '.join(sorted(names)) or 'none'}",
        next_step="name the column that has the text with --field COLUMN",
    )


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
            columns = _columns_of(file.schema_arrow.names, field, part.path)
            groups = list(range(part.start, part.stop))
            for batch in file.iter_batches(
                256, row_groups=groups, columns=columns, use_threads=False
            ):
                for record in batch.to_pylist():
                    yield _document_of(_without_nulls(record), field, str(part.path))
    except (OSError, ValueError) as error:
        raise _not_whole(part.path, error) from error


def _not_whole(path: Path, error: Exception) -> BadDataError:
    return BadDataError(f"{path} is damaged: {error}", next_step="fetch that file again")
