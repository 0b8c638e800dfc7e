"""`atoll logs`: the log files of all processes of a folder as one, in the order of time.

A coordinator and a node's daemon write them (protocol.terminal.logging), and keep what ranks say.
"""

import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click

from protocol.errors import NoInputError, UsageError
from protocol.files.rolling import old_of
from protocol.terminal.console import PathAtHome
from protocol.terminal.logging import KEPT_KEYS, LOGS_FOLDER
from protocol.trust.credentials import find_home

LOOK_SECONDS = 0.3
"""Between two looks at files that are followed."""

LEVELS = ("debug", "info", "warning", "error", "critical")

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

_COLOURS = {"warning": "yellow", "error": "red", "critical": "red", "debug": "bright_black"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a log."""

    at: str  # ISO 8601 in UTC, which sorts by time
    who: str
    text: str  # as it stands in the file
    told: Mapping[str, object]


def line_of(text: str, folder_name: str) -> Line | None:
    """A line of a file; None for one that was cut, or is not ours."""
    try:
        told = json.loads(text)
    except ValueError:
        return None
    if not isinstance(told, dict) or not all(isinstance(told.get(key), str) for key in KEPT_KEYS):
        return None
    node = told.get("node")
    name = node if isinstance(node, str) else folder_name
    process = told["process"]
    who = (
        process if process == "coordinator" else name if process == "node" else f"{name} {process}"
    )
    return Line(at=told["at"], who=who, text=text, told=told)


class Tail:
    """Reads what is added to a log file, also over the moment when a new one takes its name."""

    def __init__(self, path: Path, *, folder_name: str) -> None:
        self._path = path
        self._folder_name = folder_name
        self._inode = 0
        self._offset = 0
        self._rest = b""  # a line without its end

    def read(self) -> Iterator[Line]:
        """What was added since the last call; at first all, with what the file before holds."""
        inode, data = _read(self._path, self._offset)
        if not inode:
            return  # between its becoming the old one and the first line of the new one
        if inode != self._inode:
            # What we have read a part of is the old one now: its rest comes first.
            old_inode, rest = _read(old_of(self._path), self._offset)
            if self._inode in (0, old_inode):
                yield from self._lines(rest)
            inode, data = _read(self._path, 0)
            self._offset, self._rest = 0, b""
        self._inode = inode
        self._offset += len(data)
        yield from self._lines(data)

    def _lines(self, data: bytes) -> Iterator[Line]:
        *whole, self._rest = (self._rest + data).split(b"\n")
        for text in whole:
            line = line_of(text.decode(errors="replace"), self._folder_name)
            if line is not None:
                yield line


def _read(path: Path, offset: int) -> tuple[int, bytes]:
    """The file's inode and what it holds from there on; 0 and nothing where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return os.fstat(file.fileno()).st_ino, file.read()
    except FileNotFoundError:
        return 0, b""


class Logs:
    """All log files of a folder, and of the folders in it: a demo's has one for each node."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tails: dict[Path, Tail] = {}

    def read(self) -> list[Line]:
        """What there is to read that was not read yet, in the order of time."""
        for path in self._paths():
            if path not in self._tails:
                self._tails[path] = Tail(path, folder_name=path.parents[1].name)
        found = (line for tail in self._tails.values() for line in tail.read())
        return sorted(found, key=lambda line: line.at)  # of one instant as each process wrote them

    @property
    def are_any(self) -> bool:
        """Whether there is a log file."""
        return bool(self._tails)

    def _paths(self) -> list[Path]:
        found = [
            path
            for pattern in (f"{LOGS_FOLDER}/*.log", f"*/{LOGS_FOLDER}/*.log")
            for path in sorted(self._directory.glob(pattern))
        ]
        return [path for path in found if _is_ours(path)]


def _is_ours(path: Path) -> bool:
    """Whether it holds events as JSON: a demo keeps what its processes print in files named likewise."""
    try:
        with path.open("rb") as file:
            return file.read(1) == b"{"
    except FileNotFoundError:  # it becomes the old one just now
        return False


def since_of(text: str, *, now: datetime) -> str:
    """The beginning that `--since` asks for: "10m" ago, or an instant. Raises UsageError."""
    if match := re.fullmatch(r"(\d+)([smhd])", text):
        begin = now - timedelta(seconds=int(match[1]) * _UNITS[match[2]])
    else:
        try:
            begin = datetime.fromisoformat(text).astimezone(UTC)
        except ValueError:
            raise UsageError(
                f"--since {text!r} is no time",
                next_step="give how long ago (30s, 10m, 2h, 1d) or when (2030-01-31T12:00)",
            ) from None
    return begin.isoformat(timespec="milliseconds")


def shown(line: Line) -> str:
    """A line for people, in this machine's time."""
    at = datetime.fromisoformat(line.at).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    said = KEPT_KEYS if line.told["process"] == "coordinator" else (*KEPT_KEYS, "node")
    facts = {key: value for key, value in line.told.items() if key not in said}
    trace = facts.pop("exception", "")
    told = " ".join(f"{key}={_in_words(value)}" for key, value in facts.items())
    level = str(line.told["level"])
    mark = click.style(level.ljust(7), fg=_COLOURS.get(level))
    words = f"{at} {click.style(line.who, bold=True)} {mark} {line.told['event']}"
    return "".join((words, f"  {told}" if told else "", f"\n{trace}" if trace else ""))


def _in_words(value: object) -> str:
    if isinstance(value, str):
        return value if value and " " not in value else json.dumps(value, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False)


def is_wanted(line: Line, *, begin: str, least_level: str) -> bool:
    """Whether it is late and grave enough."""
    level = str(line.told["level"])
    rank = LEVELS.index(level) if level in LEVELS else len(LEVELS)
    return line.at >= begin and rank >= LEVELS.index(least_level)


@click.command()
@click.argument("folder", metavar="[DIR]", type=PathAtHome(path_type=Path), required=False)
@click.option(
    "--dir", "directory", metavar="DIR", type=PathAtHome(path_type=Path), help="The same."
)
@click.option("-f", "--follow", "is_following", is_flag=True, help="Show new lines until Ctrl-C.")
@click.option("--since", help="Only what is as new: 30s, 10m, 2h, 1d, or 2030-01-31T12:00.")
@click.option(
    "--level", type=click.Choice(LEVELS), default="debug", help="Only what is as grave, or graver."
)
@click.option("--lines", type=click.IntRange(min=0), help="Only the latest so many.")
@click.option("--json", "is_json", is_flag=True, help="Print the JSON lines of the files.")
def logs(
    folder: Path | None,
    directory: Path | None,
    is_following: bool,
    since: str | None,
    level: str,
    lines: int | None,
    is_json: bool,
) -> None:
    """Show the logs of all processes of a folder, in the order of time.

    DIR is the folder of a node or a coordinator, or one that holds several, as of a demo. By default it
    is the one that other commands take.

    \b
    Examples:
      atoll logs --since 10m --level warning
      atoll logs -f my-run
    """
    if None not in (folder, directory):
        raise UsageError(
            f"{folder} and --dir {directory} both name a folder", next_step="leave one of them out"
        )
    home = find_home(folder or directory)
    begin = since_of(since, now=datetime.now(UTC)) if since else ""
    files = Logs(home)

    def show(found: Iterable[Line]) -> None:
        for line in found:
            if is_wanted(line, begin=begin, least_level=level):
                click.echo(line.text if is_json else shown(line))

    found = [line for line in files.read() if is_wanted(line, begin=begin, least_level=level)]
    if not files.are_any:
        raise NoInputError(
            f"there are no logs in {home}: nothing was started there",
            next_step="give the folder of a node or a coordinator: 'atoll logs DIR'",
        )
    show(found if lines is None else found[max(0, len(found) - lines) :])
    while is_following:
        try:
            time.sleep(LOOK_SECONDS)
            show(files.read())
        except KeyboardInterrupt:
            return  # the way to end it, hence exit code 0
