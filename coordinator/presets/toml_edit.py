"""Sets keys in the text of a TOML file that people wrote, and leaves all else as it stands.

It knows tables under headers of their own and one key on a line, which is how run files are written.
Whatever else TOML allows is found by reading the result, and refused.
"""

import json
import re
import tomllib
from collections.abc import Mapping, Set
from typing import Any

Place = tuple[str, str]
"""Table and key."""

_HEADER = re.compile(r"\s*\[\s*(\w+)\s*\]\s*(#.*)?")
_LINE = re.compile(r"""(\s*)(# )?(\w+)\s*=\s*("[^"]*"|'[^']*'|[^\s#"'\[]+)(\s*#.*|\s*)""")


class CannotEditError(ValueError):
    """The text is written in a way that this file does not know."""


def with_values(
    text: str,
    values: Mapping[Place, tuple[str | int | float, str]],
    *,
    retired: Set[Place] = frozenset(),
) -> str:
    """The text with each value in its place, below a comment that says why.

    A key that stands there, or in a comment of its own, changes there; others come right after
    their table's header. Keys in `retired` become comments. Raises CannotEditError.
    """
    before = tomllib.loads(text)
    lines = text.splitlines()
    places = _places(lines)
    missing: dict[str, list[str]] = {}
    for place, (value, why) in values.items():
        written = _written(value)
        comment = f"# chosen: {why}" if why else None
        if place in places:
            number = places[place]
            lines[number] = _changed(lines[number], place[1], written, comment)
        else:
            added = [comment] if comment else []
            missing.setdefault(place[0], []).extend([*added, f"{place[1]} = {written}"])
    for place in retired & places.keys():
        number = places[place]
        lines[number] = f"# settled: {lines[number].lstrip()}"
    edited = "\n".join(_with_added(lines, missing)) + "\n"
    try:
        is_right = tomllib.loads(edited) == _expected(before, values, retired)
    except tomllib.TOMLDecodeError:
        is_right = False  # a key that stood there in a way that we do not know, and now twice
    if not is_right:
        raise CannotEditError("tables need a header on a line of its own, and keys a line each")
    return edited


def _places(lines: list[str]) -> dict[Place, int]:
    """Where each key stands; in a comment only if it stands nowhere else."""
    live: dict[Place, int] = {}
    commented: dict[Place, int] = {}
    table = ""
    for number, line in enumerate(lines):
        if header := _HEADER.fullmatch(line):
            table = header[1]
        elif match := _LINE.fullmatch(line):
            (commented if match[2] else live).setdefault((table, match[3]), number)
    return commented | live


def _changed(line: str, key: str, written: str, comment: str | None) -> str:
    match = _LINE.fullmatch(line)
    assert match is not None
    indent, tail = match[1], match[5].strip()
    changed = f"{indent}{key} = {written}"
    if tail:
        changed = f"{changed.ljust(line.find(tail, match.start(5)) - 1)} {tail}"
    return f"{indent}{comment}\n{changed}" if comment else changed


def _with_added(lines: list[str], missing: Mapping[str, list[str]]) -> list[str]:
    """The lines with new keys below their tables' headers, and new tables at the end."""
    found: set[str] = set()
    result: list[str] = []
    for line in lines:
        result.append(line)
        if (header := _HEADER.fullmatch(line)) and header[1] not in found:
            found.add(header[1])
            result += missing.get(header[1], [])
    for table, added in missing.items():
        if table not in found:
            result += ["", f"[{table}]", *added]
    return result


def _written(value: str | int | float) -> str:
    return json.dumps(value) if isinstance(value, (str, bool)) else repr(value)


def _expected(
    before: Mapping[str, Any],
    values: Mapping[Place, tuple[str | int | float, str]],
    retired: Set[Place],
) -> dict[str, Any]:
    tables = {name: dict(t) if isinstance(t, dict) else t for name, t in before.items()}
    for table, key in retired:
        if isinstance(tables.get(table), dict):
            tables[table].pop(key, None)
    for (table, key), (value, _) in values.items():
        tables.setdefault(table, {})[key] = value
    return tables
