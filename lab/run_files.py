"""Run files made of tables: their TOML, and a model for swarms that are not there for its loss."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TINY_MODEL: Mapping[str, Any] = {
    "hidden_size": 32,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "ffn_size": 64,
    "context": 32,
}


def toml_of(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Tables of plain values as TOML."""
    lines: list[str] = []
    for table, keys in tables.items():
        lines.append(f"[{table}]")
        lines += [f"{key} = {_value(value)}" for key, value in keys.items()]
    return "\n".join([*lines, ""])


def _value(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str() | Path():
            return json.dumps(str(value))
        case list() | tuple():
            return f"[{', '.join(map(_value, value))}]"
        case int() | float():
            return repr(value)
    raise TypeError(f"{value!r} has no place in a run file made of tables")
