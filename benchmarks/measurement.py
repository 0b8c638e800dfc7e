"""What all benchmarks share: their arguments, the machine, and rows of figures as lines of JSON.

    parser = parser_of(__doc__)
    add_results(parser)
    chosen = parser.parse_args()
    rows = Rows(chosen.results, about=machine())
    rows.add({"seconds": 1.2})

Tables are `protocol.terminal.console.table`'s for people, and `markdown` for pages. Figures are drawn by
`benchmarks.figures`.
"""

import argparse
import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Row = dict[str, Any]


def parser_of(says: str | None, *, prog: str | None = None) -> argparse.ArgumentParser:
    """A parser that prints a module's docstring as it stands."""
    return argparse.ArgumentParser(
        prog=prog, description=says, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_results(parser: argparse.ArgumentParser, default: Path | None = None) -> None:
    """Adds `--results FILE`. Files are appended to: what was measured before stays."""
    parser.add_argument(
        *("--results", "--output", "--out"),
        type=Path,
        metavar="FILE",
        default=default,
        help="lines of JSON are added to it" + (f" (default {default})" if default else ""),
    )


def machine() -> Row:
    """What figures depend on: system, cores that this process may use, and how busy it was."""
    return {
        "machine": f"{platform.system()} on {platform.machine()}",
        "processor": platform.processor() or "unknown",
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }


class Rows:
    """Figures as they come: each row is written at once, so that a benchmark that is cut loses none."""

    def __init__(
        self, file: Path | None, *, about: Mapping[str, Any] | None = None, is_printed: bool = True
    ) -> None:
        """`about` goes into each line, before its own figures; `file` None: they are only printed."""
        self._file = file
        self._about = dict(about or {})
        self._is_printed = is_printed
        self.rows: list[Row] = []
        """Those of this process."""

    def add(self, row: Mapping[str, Any]) -> Row:
        """Notes a row, and returns it with what the machine is."""
        whole = self._about | dict(row)
        self.rows.append(whole)
        line = json.dumps(whole)
        if self._is_printed:
            print(line, flush=True)
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        return whole


def read_rows(*files: Path) -> list[Row]:
    """All rows of some files, in their order; none of one that is not there yet."""
    there = [file for file in files if file.exists()]
    return [json.loads(line) for file in there for line in file.read_text().splitlines()]


Asked = TypeVar("Asked", bound="DataclassInstance")


def asked_by(kind: type[Asked], row: Row) -> Asked:
    """The try, a frozen dataclass, whose line of results this is; JSON has lists for its tuples.

    Fields that have come since have their default in older lines.
    """
    values = {each.name: row[each.name] for each in fields(kind) if each.name in row}
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def run_missing(
    tries: Iterable[Asked], known: dict[Asked, float], results: Rows, run: Callable[[Asked], float]
) -> None:
    """Runs what is not known yet, and notes each loss as it comes."""
    for each in tries:
        if each not in known:
            known[each] = run(each)
            results.add(asdict(each) | {"loss": known[each]})


def markdown(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table for a page; all columns but the first are figures, on the right."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
