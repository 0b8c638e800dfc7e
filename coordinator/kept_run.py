"""The run file that a database belongs to, kept in it: so that a changed one is refused by key and value."""

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.database import DATABASE_NAME, Database, put, row_of
from protocol.errors import ConfigError
from protocol.run.amendments import AMENDABLE
from protocol.run.run_spec import RunSpec

MOST_NAMED = 3
"""Changed keys that a refusal names, and the number of the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One key of the run file with its value when the run began, and now; None: left out."""

    table: str
    key: str
    before: object
    after: object

    def __str__(self) -> str:
        return f"[{self.table}] {self.key} was {_value(self.before)} and is {_value(self.after)}"

    @property
    def undone(self) -> str:
        """What to type to have it as it was."""
        if self.before is None:
            return f"remove {self.key} from [{self.table}]"
        return f"write {self.key} = {_value(self.before)} into [{self.table}]"


def changes_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Change]:
    """Keys whose values differ, in the order of the tables."""
    for table in dict.fromkeys((*after, *before)):
        old, new = before.get(table) or {}, after.get(table) or {}
        for key in dict.fromkeys((*new, *old)):
            if old.get(key) != new.get(key):
                yield Change(table=table, key=key, before=old.get(key), after=new.get(key))


def keep_or_compare(database: Database, run: RunSpec, path: Path) -> None:
    """Keeps the run file with the first state of the run; raises ConfigError when it changed since."""
    with database.reading() as connection:
        has_begun = row_of(connection, "swarm") is not None
        row = row_of(connection, "run_file")
    text = run.canonical_json()
    if not has_begun and row != (1, text):
        with database.writing() as connection:
            put(connection, "run_file", [(1, text)])
    if not has_begun or row is None:
        return
    changes = list(changes_between(json.loads(row[1]), json.loads(text)))
    if not changes:
        return
    named = "; ".join(map(str, changes[:MOST_NAMED]))
    more = f"; and {len(changes) - MOST_NAMED} more" if len(changes) > MOST_NAMED else ""
    undone = ", ".join(change.undone for change in changes[:MOST_NAMED])
    keys = [f"{change.table}.{change.key}" for change in changes]
    amend = ""
    is_given = all(change.after is not None for change in changes)
    if is_given and all(key in AMENDABLE for key in keys):
        values = " ".join(
            f"{key}={_value(change.after)}" for key, change in zip(keys, changes, strict=True)
        )
        amend = f", and type 'atoll run amend {values}'"
    raise ConfigError(
        f"{path} has changed since the run began: {named}{more}",
        next_step=f"{undone} of {path}, then start again{amend}; or start a new run with "
        f"'atoll coordinator init NEWDIR --run {path}'",
    )


def may_have_begun(folder: Path) -> bool:
    """Whether a run's file may not change any more; read without the lock, which its coordinator may have.

    Where the database cannot be read, its start says why.
    """
    path = folder / DATABASE_NAME
    if not path.is_file():
        return False
    try:
        with closing(
            sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        ) as connection:
            return connection.execute("SELECT 1 FROM swarm").fetchone() is not None
    except sqlite3.Error:
        return True


def _value(value: object) -> str:
    """As TOML has it."""
    return "left out" if value is None else json.dumps(value)
