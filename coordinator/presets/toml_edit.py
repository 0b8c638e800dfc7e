"""Sets keys in the text of a TOML file that people wrote, and leaves all else as it stands.

It knows one key on a line, below the header of its table or, above all headers, with the table's name
before it (exchange.preset = "auto"), which is how run files are written. Whatever else TOML allows is
found by reading the result, and refused.
"""

import json
import re
import tomllib
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

Place = tuple[str, str]
"""Table and key."""

Value = str | int | float | list[str]

_HEADER = re.compile(r"\s*\[\s*(\w+)\s*\]\s*(#.*)?")
_LINE = re.compile(
    r"""(\s*)(# )?(?:(\w+)\s*\.\s*)?(\w+)\s*=\s*("[^"]*"|'[^']*'|\[[^\]]*\]|[^\s#"'\[]+)(\s*#.*|\s*)"""
)


class CannotEditError(ValueError):
    """The text is written in a way that this file does not know."""


def with_values(
    text: str,
    values: Mapping[Place, tuple[Value, str]],
    *,
    retired: Set[Place] = frozenset(),
) -> str:
    """The text with each value in its place, below a comment that says why.

    A key that stands there, or in a comment of its own, changes there; others come right after
    their table's header, or the first key that names the table. Keys in `retired` become comments.
    Raises CannotEditError.
    """
    before = tomllib.loads(text)
    lines = text.splitlines()
    places, begins = _places(lines)
    missing: dict[str, list[str]] = {}
    for place, (value, why) in values.items():
        written = _written(value)
        comment = f"# chosen: {why}" if why else None
        if place in places:
            number = places[place]
            lines[number] = _changed(lines[number], written, comment)
        else:
            added = [comment] if comment else []
            prefix = begins[place[0]].prefix if place[0] in begins else ""
            missing.setdefault(place[0], []).extend([*added, f"{prefix}{place[1]} = {written}"])
    for place in retired & places.keys():
        number = places[place]
        lines[number] = f"# settled: {lines[number].lstrip()}"
    edited = "\n".join(_with_added(lines, missing, begins)) + "\n"
    try:
        is_right = tomllib.loads(edited) == _expected(before, values, retired)
    except tomllib.TOMLDecodeError:
        is_right = False  # a key that stood there in a way that we do not know, and now twice
    if not is_right:
        raise CannotEditError(
            "keys need a line each, below a line with the name of their table, as [exchange]"
        )
    return edited


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begin:
    """Where a table begins, and what stands before its keys there."""

    line: int
    prefix: str  # empty below a header


def _places(lines: list[str]) -> tuple[dict[Place, int], dict[str, _Begin]]:
    """Where each key stands, in a comment only if it stands nowhere else; and where tables begin."""
    live: dict[Place, int] = {}
    commented: dict[Place, int] = {}
    begins: dict[str, _Begin] = {}
    header_above = ""
    for number, line in enumerate(lines):
        if header := _HEADER.fullmatch(line):
            header_above = header[1]
            begins.setdefault(header_above, _Begin(line=number, prefix=""))
        elif match := _LINE.fullmatch(line):
            table, key = match[3] or header_above, match[4]
            if match[3] and header_above:
                continue  # of a table within that table
            if match[3] and not match[2]:
                begins.setdefault(table, _Begin(line=number, prefix=f"{table}."))
            (commented if match[2] else live).setdefault((table, key), number)
    return commented | live, begins


def _changed(line: str, written: str, comment: str | None) -> str:
    match = _LINE.fullmatch(line)
    assert match is not None
    indent, tail = match[1], match[6].strip()
    prefix = f"{match[3]}." if match[3] else ""
    changed = f"{indent}{prefix}{match[4]} = {written}"
    if tail:
        changed = f"{changed.ljust(line.find(tail, match.start(6)) - 1)} {tail}"
    return f"{indent}{comment}\n{changed}" if comment else changed


def _with_added(
    lines: list[str], missing: Mapping[str, list[str]], begins: Mapping[str, _Begin]
) -> list[str]:
    """The lines with new keys where their tables begin, and new tables at the end."""
    after = {begins[table].line: added for table, added in missing.items() if table in begins}
    result: list[str] = []
    for number, line in enumerate(lines):
        result += [line, *after.get(number, [])]
    for table, added in missing.items():
        if table not in begins:
            result += ["", f"[{table}]", *added]
    return result


def _written(value: Value) -> str:
    return repr(value) if type(value) in (int, float) else json.dumps(value)


def _expected(
    before: Mapping[str, Any],
    values: Mapping[Place, tuple[Value, str]],
    retired: Set[Place],
) -> dict[str, Any]:
    tables = {name: dict(t) if isinstance(t, dict) else t for name, t in before.items()}
    for table, key in retired:
        if isinstance(tables.get(table), dict):
            tables[table].pop(key, None)
    for (table, key), (value, _) in values.items():
        tables.setdefault(table, {})[key] = value
    return tables
