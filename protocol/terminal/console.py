"""How commands and people speak: errors, exit codes, numbers in words, tables, JSON, and values as typed.

rich is imported inside functions: commands that print plain lines start without it.
"""

import codecs
import contextlib
import errno
import io
import ipaddress
import json
import os
import re
import sys
import traceback
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

from protocol.errors import NEXT_STEP_FOR_REFUSAL, AtollError, ExitCode, NoInputError, UsageError
from protocol.trust.armour import masked

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


DEBUG_VARIABLE = "ATOLL_DEBUG"
"""Set to 1, it adds the traceback to every error."""

_REFUSALS_OF_FILES = (errno.EACCES, errno.EPERM)
"""What is a refusal only where a file is named: else a call of ours may be wrong."""


def run(command: click.Command, arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; every error ends as a sentence on stderr.

    `arguments` default to those of the process.
    """
    try:
        code = command.main(args=arguments, prog_name="atoll", standalone_mode=False)
        return code if isinstance(code, int) else ExitCode.OK
    except AtollError as error:
        return refuse(error)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return ExitCode.USAGE
    except click.exceptions.NoSuchCommand as error:
        from protocol.terminal.lazy_group import no_such_command

        assert error.ctx is not None, "click names the group"
        return refuse(no_such_command(error.ctx, error.command_name))
    except click.FileError as error:
        _complain(error.format_message())
        return ExitCode.NO_INPUT
    except click.ClickException as error:
        if (refused := _glob_without_quotes(error)) is not None:
            return refuse(refused)
        _complain(_as_sentence(error.format_message()), _next_step_for_usage(error))
        return ExitCode.USAGE
    except (click.Abort, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    except SystemExit as end:  # click and rich end so when the reader of a pipe has gone
        return end.code if isinstance(end.code, int) else ExitCode.INTERNAL
    except Exception as error:
        return _blame(error)


def write_what_can_be_written() -> None:
    """Lets standard output show "?" for a character that its coding has not, instead of failing.

    That of a locale such as de_DE.ISO-8859-1 has no lines or bars. Names of files that are no UTF-8 go out
    as they are.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape" if _is_utf_8(sys.stdout) else "replace")


def _is_utf_8(stream: TextIO) -> bool:
    return codecs.lookup(stream.encoding or "ascii").name == "utf-8"


def refuse(error: AtollError) -> int:
    """Says what a person can act on; returns its exit code."""
    _complain(error.what, error.next_step)
    return error.exit_code


def _glob_without_quotes(error: click.ClickException) -> UsageError | None:
    """What to say where an option takes one path, and the shell has made several of a glob."""
    _, is_of_extra, rest = error.message.partition("unexpected extra argument")
    extra = rest.partition("(")[2].removesuffix(")").split()
    files = [path for path in map(Path, extra) if path.is_file()]
    if not is_of_extra or len(files) < 2:
        return None
    first = files[0]
    return UsageError(
        f"{first} and {len(files) - 1:,} more files stand where no path belongs: an option takes one, and "
        "the shell makes many of a glob",
        next_step=f"write the glob in quotes, as '{first.with_name(f'*{first.suffix}')}'",
    )


def _next_step_for_usage(error: click.ClickException) -> str:
    """What to type instead: some commands take their folder as --dir DIR, some as DIR."""
    context: click.Context | None = getattr(error, "ctx", None)
    if context is None:
        return "'atoll --help' lists what it takes"
    names = {option for each in context.command.params for option in each.opts}
    if (
        isinstance(error, click.NoSuchOption)
        and error.option_name == "--dir"
        and "directory" in names
    ):
        return f"name the folder alone: '{context.command_path} DIR'"
    if "unexpected extra argument" in error.message and "--dir" in names:
        return f"name the folder with --dir: '{context.command_path} --dir DIR'"
    return f"'{context.command_path} --help' lists what it takes"


def _blame(error: Exception) -> int:
    """Says whether the machine has refused, or else that it is a bug; returns the exit code."""
    if said := _unmapped(error):
        _abandon_if_unwritable(sys.stdout)
        _complain(
            f"the machine refuses to map a library into memory: {said}",
            f"{NEXT_STEP_FOR_REFUSAL[errno.ENOMEM]}; or, where the disk of Atoll's environment is mounted "
            "with noexec, move it to another",
        )
        return ExitCode.SYSTEM
    match error:
        case OSError() if error.filename or error.errno not in _REFUSALS_OF_FILES:
            number, what = error.errno, error.strerror
        case MemoryError():
            number, what = errno.ENOMEM, os.strerror(errno.ENOMEM)
        case RuntimeError() if str(error) == "can't start new thread":  # Python's words for EAGAIN
            number, what = errno.EAGAIN, str(error)
        case _:
            return _blame_a_bug(error)
    if number not in NEXT_STEP_FOR_REFUSAL:
        return _blame_a_bug(error)
    _abandon_if_unwritable(sys.stdout)
    named = error.filename if isinstance(error, OSError) else None
    where = f"{named}: " if named else ""
    next_step = NEXT_STEP_FOR_REFUSAL[number]
    if number in _REFUSALS_OF_FILES and isinstance(named, str):
        with contextlib.suppress(ImportError):  # Windows has not what it takes
            from protocol.files.durable import whose_it_is

            next_step = whose_it_is(Path(named)) or next_step
    _complain(f"the machine refuses: {where}{what}", next_step)
    return ExitCode.SYSTEM


def _unmapped(error: BaseException | None) -> str:
    """What the loader said where an import failed for want of memory; packages have words of their own."""
    while error is not None:
        if "failed to map segment from shared object" in str(error):
            return str(error)
        error = error.__cause__ or error.__context__
    return ""


def _blame_a_bug(error: Exception) -> int:
    """The last line of defence: a bug must still read as a sentence and carry its exit code."""
    words = f"{type(error).__name__}: {error}".rstrip(": ")
    _complain(f"a bug in Atoll: {words}; run again with {DEBUG_VARIABLE}=1 for the traceback")
    return ExitCode.INTERNAL


def _complain(what: str, next_step: str = "") -> None:
    """Writes an error, coloured on a terminal, with the traceback when debugging, and without secrets."""
    if os.environ.get(DEBUG_VARIABLE, "") not in ("", "0"):
        with contextlib.suppress(OSError):
            traceback.print_exc()
    styled = is_coloured(sys.stderr)
    name = click.style("atoll:", fg="red", bold=True) if styled else "atoll:"
    what, next_step = map(masked, (what, next_step))
    try:
        click.echo(f"{name} {what}", err=True, color=styled)
        if next_step:
            label = click.style("  next:", bold=True) if styled else "  next:"
            click.echo(f"{label} {next_step}", err=True, color=styled)
    except OSError:  # nobody can be told, but the exit code still can
        _abandon_if_unwritable(sys.stderr)


def say(
    words: str, *, err: bool = False, or_else: Callable[[str], object] = lambda _: None
) -> None:
    """Says a daemon's line on standard output or error, which may be a full disk or a closed terminal.

    No daemon ends for that: `or_else` gets the line, and later ones go nowhere.
    """
    try:
        click.echo(words, err=err)
    except OSError:
        _abandon_if_unwritable(sys.stderr if err else sys.stdout)
        or_else(f"{words}\n")


def _abandon_if_unwritable(stream: TextIO) -> None:
    """Lets a stream that takes nothing any more lead nowhere.

    Python would try once more at its end, and then exit with 120 whatever our code is.
    """
    try:
        stream.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _as_sentence(text: str) -> str:
    """Turns click's 'No such option: --x.' into what reads well after 'atoll:', in one line."""
    text = " ".join(text.split())
    for said, meant in _PLAINER.items():
        text = text.replace(said, meant)
    return (text[:1].lower() + text[1:]).removesuffix(".")


_PLAINER = {
    "is not a valid integer range": "is not a whole number",
    "is not a valid integer": "is not a whole number",
    "is not a valid float range": "is not a number",
    "is not a valid float": "is not a number",
}
"""What click says of a number that is none."""


def is_coloured(stream: TextIO) -> bool:
    """Whether a stream is a terminal whose user did not set NO_COLOR (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def printable(text: str, *, most: int) -> str:
    """Text of somebody else's as it may be shown: cut, and without what would steer a terminal or reader.

    Line ends and tabs stay. What turns the direction of writing goes, for it can show other words than
    are there.
    """
    shown = "".join(
        char
        if char in "\n\t" or (char not in _TURNS and unicodedata.category(char) not in _UNSHOWN)
        else "\ufffd"
        for char in text[:most]
    )
    return shown + ("…" if len(text) > most else "")


_UNSHOWN = ("Cc", "Cs", "Co", "Cn", "Zl", "Zp")
_TURNS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def bytes_in_words(num_bytes: float) -> str:
    """Decimal units with three digits or so: '12.3 MB'."""
    return _scaled(num_bytes, (" B", " kB", " MB", " GB", " TB", " PB"))


def count_in_words(count: float) -> str:
    """Tokens, parameters, tokens per second: '980', '12.3k', '1.5M'."""
    return _scaled(count, ("", "k", "M", "G", "T", "P"))


def _scaled(value: float, units: Sequence[str]) -> str:
    if abs(value) < 999.5:
        return f"{value:.0f}{units[0]}"
    power = 1
    # 999.95 of a unit would print as 1000.0 of it.
    while abs(value) / 1000**power >= 999.95 and power < len(units) - 1:
        power += 1
    return f"{value / 1000**power:.1f}{units[power]}"


def seconds_in_words(seconds: float) -> str:
    """A duration in its two largest units: '0.4 s', '42 s', '3 min 5 s', '2 h 10 min'."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def age_in_words(seconds: float) -> str:
    """How long ago something was: 'now' below two seconds, then '42 s ago'."""
    return "now" if seconds < 2 else f"{seconds_in_words(seconds)} ago"


def digest_in_words(digest: bytes) -> str:
    """The first 12 hex digits, enough to tell two states apart; '-' when there is none."""
    return digest.hex()[:12] or "-"


def terminal() -> "Console":
    """A rich console on stdout; it honours NO_COLOR, and knows whether it is a terminal.

    What goes into a file or a pipe is not folded at the 80 columns that rich assumes there.
    """
    from rich.console import Console

    width = None if sys.stdout.isatty() or os.environ.get("COLUMNS") else 200
    return Console(highlight=False, markup=False, emoji=False, width=width)


def table(
    columns: Iterable[str], rows: Iterable[Sequence[str]], *, right: Iterable[str] = ()
) -> "Table":
    """A borderless table; the columns named in `right` hold numbers and are aligned right.

    In a narrow terminal cells are folded, but not those of the first column: people copy names from there.
    """
    from rich.table import Table
    from rich.text import Text

    numeric = set(right)
    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for place, column in enumerate(columns):
        drawn.add_column(
            column,
            justify="right" if column in numeric else "left",
            overflow="fold",
            no_wrap=place == 0,
        )
    for row in rows:
        drawn.add_row(*(Text(cell) for cell in row))
    return drawn


def fitting(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    spare: Sequence[str],
    width: int | None,
    gap: int = 2,
) -> tuple[list[str], list[list[str]], list[str]]:
    """What of a table fits a width: columns, rows, and the columns left out.

    `spare` names columns that can go, the first to go first. None for the width keeps all.
    """
    widest = {
        column: max(len(column), *(len(row[i]) for row in rows)) if rows else len(column)
        for i, column in enumerate(columns)
    }
    left_out: list[str] = []
    for column in spare:
        kept = [name for name in columns if name not in left_out]
        if width is None or sum(widest[name] + gap for name in kept) - gap <= width:
            break
        left_out.append(column)
    places = [i for i, column in enumerate(columns) if column not in left_out]
    return [columns[i] for i in places], [[row[i] for i in places] for row in rows], left_out


def left_out_in_words(columns: Sequence[str], left_out: Sequence[str]) -> str:
    """What is said below a table that `fitting` has taken columns from."""
    names = ", ".join(name for name in columns if name in left_out)
    return f"left out: {names}; --json shows all"


def print_json(value: Mapping[str, object] | Sequence[object]) -> None:
    """Prints a value as indented JSON with its keys in the given order."""
    is_ascii = not _is_utf_8(sys.stdout)  # escapes say what a "?" would hide
    click.echo(json.dumps(value, indent=2, ensure_ascii=is_ascii, allow_nan=False))


# Values as people type them: rates (10mbit, 1.25MB/s), links, spans of time (30, 90s, 24h), HOST:PORT.


_RATE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) ?([kKmMgG]?)(?:(bit)(?:/s)?|B/s)")
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}

_LINK = re.compile(rf"({_RATE.pattern})(?: ?/ ?({_RATE.pattern}))?")


def bits_per_second_of(rate: str) -> float | None:
    """Bits a second; None for what is no rate. "10mb" is none, for it may mean either."""
    match = _RATE.fullmatch(rate)
    if match is None:
        return None
    number, prefix, bit = match.groups()
    return float(number) * _PREFIXES[prefix.lower()] * (1 if bit else 8)


def directions_of(link: str) -> tuple[float, float] | None:
    """Bits a second down and up of "100mbit/20mbit", or of "100mbit" for both; None: no link."""
    match = _LINK.fullmatch(link.strip())
    if match is None:
        return None
    down = bits_per_second_of(match[1])
    up = bits_per_second_of(match[5]) if match[5] else down
    assert down is not None and up is not None
    return down, up


def rate_in_words(bits_per_second: float) -> str:
    """As it would be typed: "100mbit"."""
    for prefix, factor in (("g", 1e9), ("m", 1e6), ("k", 1e3)):
        if bits_per_second >= factor:
            return f"{bits_per_second / factor:.4g}{prefix}bit"
    return f"{bits_per_second:.4g}bit"


class PathAtHome(click.Path):
    """A path as it is typed, in which ~ is the home folder also where shells leave it: --dir=~/my-node.

    Else a folder of the name ~ is made in the current one, and nobody finds what is in it.
    """

    def convert(
        self,
        value: "str | os.PathLike[str]",
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> "str | bytes | os.PathLike[str]":
        """Raises NoInputError for a user that there is not, or what is another's; see click.Path."""
        # Which other systems than Linux cannot import.
        from protocol.files.durable import expanded, whose_it_is

        path = Path(value)
        if str(path).startswith("~"):
            path = expanded(path)
        if self.readable and os.path.lexists(path) and not os.access(path, os.R_OK | os.F_OK):
            with contextlib.suppress(FileNotFoundError):  # a link that leads nowhere is no refusal
                path.stat()
                raise NoInputError(
                    f"{path} cannot be read: {os.strerror(errno.EACCES)}",
                    next_step=whose_it_is(path) or NEXT_STEP_FOR_REFUSAL[errno.EACCES],
                )
        return super().convert(str(path), param, ctx)


_UNIT_SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def as_seconds(
    _context: click.Context, _parameter: click.Parameter, text: str | None
) -> float | None:
    """A click callback: seconds from a number with a unit; a bare number is seconds.

    Raises click.BadParameter.
    """
    if text is None:
        return None
    seconds = seconds_of(text)
    if seconds is None:
        raise click.BadParameter(f"{text!r} is not a time span such as 30, 90s or 5m")
    return seconds


def seconds_of(text: str) -> float | None:
    """Seconds of a number with a unit, or without one; None for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|[smhd]?)", text.strip())
    return float(match[1]) * _UNIT_SECONDS[match[2]] if match else None


_LARGEST_PORT = 65535


def web_address_of(text: str) -> tuple[str, int]:
    """Host and port of "127.0.0.1:8080", "[::1]:8080" or "8080", which is on loopback.

    Raises ValueError with what is wrong.
    """
    host, separator, port = text.rpartition(":")
    if not separator:
        host = "127.0.0.1"
    is_bracketed = host.startswith("[") and host.endswith("]")
    is_whole = is_bracketed or ":" not in host
    host = host[1:-1] if is_bracketed else host
    if not host or not is_whole or not port.isascii() or not port.isdigit():
        raise ValueError("not HOST:PORT, such as 127.0.0.1:8080")
    if int(port) > _LARGEST_PORT:
        raise ValueError(f"port {port} is above {_LARGEST_PORT}")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches that address."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
