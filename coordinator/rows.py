"""Rows with a digest: what a disk changed by itself is noticed where it is read.

SQLite notices a broken tree, and takes a flipped byte in a value for another value. So the last column
of every table is a digest of the table's name and the values before it.
"""

import sqlite3
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from blake3 import blake3

Value = int | float | str | bytes | None
"""What a column holds. A column of type REAL gives a float back, so it must be given one."""

DIGEST_BYTES = 16
PACKED_FROM = 512
"""Bytes; what is shorter would hardly be smaller."""


class DamagedError(sqlite3.DatabaseError):
    """A row is not what was written."""


def put(connection: sqlite3.Connection, table: str, rows: Iterable[Sequence[Value]]) -> None:
    """Adds rows, or replaces those of the same key."""
    sealed = [(*row, _digest(table, row)) for row in rows]
    if sealed:
        places = ", ".join("?" * len(sealed[0]))
        connection.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({places})", sealed)


def rows_of(
    connection: sqlite3.Connection, table: str, rest: str = "", parameters: Sequence[Value] = ()
) -> Iterator[tuple[Any, ...]]:
    """The rows of a table without their digests; raises DamagedError at one that was changed.

    `rest` is what follows the table's name in the SELECT.
    """
    for *values, digest in connection.execute(f"SELECT * FROM {table} {rest}", parameters):
        if digest != _digest(table, values):
            key = values[0] if values and isinstance(values[0], int | str) else "?"
            raise DamagedError(f"row {key} of table {table} is not what was written")
        yield tuple(values)


def row_of(
    connection: sqlite3.Connection, table: str, rest: str = "", parameters: Sequence[Value] = ()
) -> tuple[Any, ...] | None:
    """The first of those rows; None when there is none."""
    return next(rows_of(connection, table, rest, parameters), None)


def packed(message: bytes) -> bytes:
    """What to write for a message: long ones name the same nodes again and again."""
    return message if len(message) < PACKED_FROM else b"\0" + zlib.compress(message, level=1)


def unpacked(written: bytes) -> bytes:
    """The message that was packed. Messages begin with no zero byte, so one tells what is packed."""
    return zlib.decompress(written[1:]) if written[:1] == b"\0" else written


def _digest(table: str, values: Sequence[object]) -> bytes:
    hasher = blake3(table.encode())
    for value in values:
        kind, raw = _raw(value)
        hasher.update(kind + len(raw).to_bytes(8, "little"))
        hasher.update(raw)
    return hasher.digest(length=DIGEST_BYTES)


def _raw(value: object) -> tuple[bytes, bytes]:
    """The value's type and its bytes; what nobody writes is of a type of its own."""
    match value:
        case bytes():
            return b"b", value
        case str():
            return b"s", value.encode()
        case int():
            return b"i", b"%d" % value
        case float():
            return b"f", struct.pack("<d", value)
        case None:
            return b"n", b""
    return b"?", b""
