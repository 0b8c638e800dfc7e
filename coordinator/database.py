"""The coordinator's database file: its tables, its transactions, and the lock on its folder.

What the tables mean is coordinator.store's; here they are made and kept whole.
"""

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from protocol.errors import BadDataError, ConfigError, SystemRefusedError
from protocol.folder_lock import FolderLock

DATABASE_NAME = "atoll.db"

MIGRATIONS: Sequence[str] = (
    """
    CREATE TABLE swarm (
        only_row INTEGER PRIMARY KEY CHECK (only_row = 1),
        saved_now REAL NOT NULL,
        state TEXT NOT NULL
    );
    CREATE TABLE members (node_id TEXT PRIMARY KEY, member TEXT NOT NULL);
    CREATE TABLE open_round (
        only_row INTEGER PRIMARY KEY CHECK (only_row = 1),
        round TEXT NOT NULL
    );
    CREATE TABLE closed_rounds (round INTEGER PRIMARY KEY, closed TEXT NOT NULL);
    CREATE TABLE invites (
        invite_id TEXT PRIMARY KEY,
        secret_hash BLOB NOT NULL,
        max_uses INTEGER NOT NULL,
        expires_utc_seconds REAL NOT NULL,
        is_revoked INTEGER NOT NULL DEFAULT 0,
        host TEXT NOT NULL
    );
    CREATE TABLE enrolled (
        invite_id TEXT NOT NULL REFERENCES invites,
        node_id TEXT NOT NULL,
        node_name TEXT NOT NULL,
        public_key BLOB NOT NULL,
        certificate_serial TEXT NOT NULL DEFAULT '',
        PRIMARY KEY (invite_id, node_id)
    );
    -- Every call of a node asks whether it is enrolled.
    CREATE INDEX enrolled_by_node ON enrolled (node_id);
    """,
    # Without a row the store makes the ledger from the closed rounds.
    """
    CREATE TABLE ledger (
        only_row INTEGER PRIMARY KEY CHECK (only_row = 1),
        ledger TEXT NOT NULL
    );
    """,
    # What `open_round` held of slices and reports; without rows it still holds them itself.
    """
    CREATE TABLE round_parts (
        kind TEXT NOT NULL,
        slice_index INTEGER NOT NULL,
        node_id TEXT NOT NULL,
        part TEXT NOT NULL,
        PRIMARY KEY (kind, slice_index, node_id)
    ) WITHOUT ROWID;
    """,
    # The wait at the end of a run was an evaluation of the final state, and by nobody while there
    # was none. What is not there reads as NULL, and leaves a state as it is.
    """
    UPDATE swarm SET state = json_set(
        state, '$[0].end_waits_until', json_extract(state, '$[0].evaluating.until')
    )
    WHERE json_extract(state, '$[0].evaluating.round')
        = json_extract(state, '$[0].rules.total_rounds');
    UPDATE swarm SET state = json_set(state, '$[0].evaluating', NULL)
    WHERE json_type(state, '$[0].evaluating.node_id') = 'null';
    """,
    # The run file that the state is of; without a row only its digest is known.
    """
    CREATE TABLE IF NOT EXISTS run_file (
        only_row INTEGER PRIMARY KEY CHECK (only_row = 1),
        tables TEXT NOT NULL
    );
    """,
)
"""Each entry brings a database from version i to i + 1. Entries are never changed, only added."""


class Database:
    """SQLite with a write-ahead log and full sync, for the one process that holds the lock.

    A transaction may be committed by another thread than the one that wrote it, because a commit
    waits for the disk. Reading goes over a connection of its own: it neither waits for that nor
    sees what is not committed yet.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        *,
        path: Path,
        reader: sqlite3.Connection | None = None,
        lock: FolderLock | None = None,
    ) -> None:
        self.path = path
        self._connection = connection
        self._reader = reader or connection
        self._lock = lock
        self._transaction = threading.Lock()  # held from BEGIN to COMMIT or ROLLBACK
        with self._in_our_words():
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA foreign_keys = ON")
            self._migrate()

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Opens or makes a folder's database; SystemRefusedError when another process has it."""
        lock = FolderLock.take(
            directory,
            holder="coordinator",
            next_step="stop it, or start a new run with 'atoll coordinator init NEWDIR'",
        )
        path = directory / DATABASE_NAME
        try:
            with ExitStack() as opened:
                connection, reader = (
                    opened.enter_context(closing(_connected(path))) for _ in range(2)
                )
                database = cls(connection, path=path, reader=reader, lock=lock)
                opened.pop_all()
                return database
        except sqlite3.Error as error:
            lock.release()
            raise SystemRefusedError(
                f"{path} cannot be opened: {error}", next_step="check its permissions"
            ) from error
        except BaseException:
            lock.release()
            raise

    @classmethod
    def in_memory(cls) -> Self:
        """A database without a file, which forgets."""
        path = Path(":memory:")
        return cls(_connected(path), path=path)

    def close(self) -> None:
        """Closes the file and lets another process have the folder."""
        self._reader.close()
        self._connection.close()
        if self._lock is not None:
            self._lock.release()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """What is committed. Raises as all here does: see `_in_our_words`."""
        with self._in_our_words():
            yield self._reader

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction: all of it is on the disk afterwards, or nothing when it raises."""
        with self.staging() as connection:
            yield connection
        self.commit()

    @contextmanager
    def staging(self) -> Iterator[sqlite3.Connection]:
        """A transaction that stays open for `commit`; nothing of it is left when this raises."""
        self._transaction.acquire()
        with self._in_our_words():
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                yield self._connection
            except BaseException:
                self._end()
                raise

    def commit(self) -> None:
        """Brings what was staged to the disk: all of it, or nothing when it raises. In any thread."""
        with self._in_our_words():
            try:
                self._connection.execute("COMMIT")
            finally:
                self._end()

    def _end(self) -> None:
        """Lets the next transaction begin, without what is left of this one."""
        try:
            # SQLite ends the transaction by itself after some errors, a full disk among them.
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        finally:
            self._transaction.release()

    @contextmanager
    def _in_our_words(self) -> Iterator[None]:
        """Turns SQLite's errors into ours: SystemRefusedError, or BadDataError when damaged."""
        try:
            yield
        except sqlite3.OperationalError as error:
            raise SystemRefusedError(
                f"{self.path} cannot be used: {error}",
                next_step="make room on the disk or check the permissions, then start again",
            ) from error
        except (sqlite3.DatabaseError, ValidationError) as error:
            raise BadDataError(
                f"{self.path} is damaged: {error}",
                next_step="restore it from a backup, or start a new run with "
                "'atoll coordinator init NEWDIR'",
            ) from error

    def _migrate(self) -> None:
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        if version > len(MIGRATIONS):
            raise ConfigError(
                f"{self.path} is of version {version}, this Atoll knows {len(MIGRATIONS)} at most",
                next_step="install the newer Atoll that wrote it",
            )
        for number, script in enumerate(MIGRATIONS[version:], start=version + 1):
            # One script, because executescript would commit a transaction begun before it.
            self._connection.executescript(
                f"BEGIN; {script}; PRAGMA user_version = {number}; COMMIT;"
            )


def _connected(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, isolation_level=None, check_same_thread=False)
