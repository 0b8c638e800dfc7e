"""The coordinator's database file: its tables, its transactions, and the lock on its folder.

What the tables mean is coordinator.store's; here they are made and kept whole.
"""

import sqlite3
import threading
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Self

from google.protobuf.message import DecodeError
from pydantic import ValidationError

from protocol.errors import BadDataError, ConfigError, SystemRefusedError
from protocol.files.folder_lock import FolderLock
from protocol.wire.versions import DATABASE

DATABASE_NAME = "atoll.db"

TABLES = """
CREATE TABLE swarm (only_row INTEGER PRIMARY KEY CHECK (only_row = 1), state, digest);
CREATE TABLE run_file (only_row INTEGER PRIMARY KEY CHECK (only_row = 1), tables, digest);
CREATE TABLE clock (only_row INTEGER PRIMARY KEY CHECK (only_row = 1), saved_now, digest);
CREATE TABLE members (node_id PRIMARY KEY, member, digest) WITHOUT ROWID;
CREATE TABLE open_round (only_row INTEGER PRIMARY KEY CHECK (only_row = 1), round, digest);
CREATE TABLE round_parts (
    kind, slice_index, node_id, part, digest, PRIMARY KEY (kind, slice_index, node_id)
) WITHOUT ROWID;
CREATE TABLE ledger (only_row INTEGER PRIMARY KEY CHECK (only_row = 1), ledger, digest);
CREATE TABLE held_out (
    place INTEGER PRIMARY KEY, round, loss, tokens, metric, holders, digest
);
CREATE TABLE closed_rounds (round INTEGER PRIMARY KEY, commit_message, plan, rest, digest);
CREATE TABLE commits (
    round INTEGER PRIMARY KEY, incarnation, base_digest, outer_digest, statement_digest, signature,
    digest
);
CREATE TABLE figures (round INTEGER PRIMARY KEY, summary, digest);
CREATE TABLE invites (
    place INTEGER PRIMARY KEY, invite_id, secret_hash, max_uses, expires_utc_seconds, is_revoked,
    host, label, needs_approval, role, digest
);
CREATE TABLE rulings (number INTEGER PRIMARY KEY, ruling, signature, digest);
CREATE TABLE enrolled (
    invite_id, node_id, node_name, public_key, certificate_serial, digest,
    PRIMARY KEY (invite_id, node_id)
) WITHOUT ROWID;
"""
"""Columns have no type, so that what is read is what was written. protocol.wire.versions has their number."""

ADDED_TABLES = """
CREATE TABLE IF NOT EXISTS written (round INTEGER PRIMARY KEY, node_id, texts, why_not, digest);
"""
"""What releases that open the same files do without."""

_REFUSALS = {
    *(sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN),
    *(sqlite3.SQLITE_PERM, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_INTERRUPT),
    *(sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_NOLFS),
}
"""What SQLite says when the machine refuses. All else that it says is of a file that is not ours."""

_HELD = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
"""What it says after five seconds in which another program writes, or keeps a transaction open."""

AFTER_DAMAGE = (
    "go on from a backup: 'atoll coordinator start BACKUP'; nodes bring back what it lacks. "
    "Without one, start a new run with 'atoll coordinator init NEWDIR'"
)


class Database:
    """SQLite with a write-ahead log and full sync, for the one process that holds the lock.

    A transaction may be committed by another thread than the one that wrote it, because a commit
    waits for the disk. Reading goes over a connection of its own: it neither waits for that nor
    sees what is not committed yet. There is another one for one thread that reads much.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        *,
        path: Path,
        reader: sqlite3.Connection | None = None,
        aside: sqlite3.Connection | None = None,
        lock: FolderLock | None = None,
    ) -> None:
        self.path = path
        self._connection = connection
        self._reader = reader or connection
        self._aside = aside or self._reader
        self._lock = lock
        self._transaction = threading.Lock()  # held from BEGIN to COMMIT or ROLLBACK
        with self._in_our_words():
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            self._make_or_check_tables()
            self._check_pages()

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
            _refuse_empty(path)
            with ExitStack() as opened:
                connection, reader, aside = (
                    opened.enter_context(closing(_connected(path))) for _ in range(3)
                )
                database = cls(connection, path=path, reader=reader, aside=aside, lock=lock)
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
        self._aside.close()
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
    def reading_aside(self) -> Iterator[sqlite3.Connection]:
        """The same for what takes long, in one thread that is not the event loop's."""
        with self._in_our_words():
            yield self._aside

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
        except (
            *(sqlite3.DatabaseError, UnicodeDecodeError),  # the second is of its own messages
            *(zlib.error, DecodeError, ValidationError),
        ) as error:
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
            if code & 0xFF in _HELD:
                raise SystemRefusedError(
                    f"{self.path} cannot be used: another program holds it ({error})",
                    next_step=f"close that program, which 'fuser {self.path}' names, then start again",
                ) from error
            if code & 0xFF in _REFUSALS and code != sqlite3.SQLITE_IOERR_SHORT_READ:
                raise SystemRefusedError(
                    f"{self.path} cannot be used: {error}",
                    next_step="make room on the disk or check the permissions, then start again",
                ) from error
            raise BadDataError(
                f"{self.path} is damaged: {error}", next_step=AFTER_DAMAGE
            ) from error

    def _check_pages(self) -> None:
        """Whether all pages hang together, or rows could be missing without a word."""
        (found,) = self._connection.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(" ".join(found.split()))

    def _make_or_check_tables(self) -> None:
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        if version == 0:
            # It begins in the script, because executescript ends what was begun before it.
            self._connection.executescript(
                f"BEGIN; {TABLES} PRAGMA user_version = {DATABASE.writes}; COMMIT;"
            )
        elif version not in DATABASE.reads:
            known = " and ".join(map(str, sorted(DATABASE.reads)))
            raise ConfigError(
                f"{self.path} has tables of version {version}, and this Atoll reads version {known}",
                next_step=f"{DATABASE.next_step(version)}; if that cannot be, the file is damaged: "
                f"{AFTER_DAMAGE}",
            )
        self._connection.executescript(ADDED_TABLES)


def _refuse_empty(path: Path) -> None:
    """Raises BadDataError for a file that lost its bytes: SQLite would begin a new database in it.

    While SQLite makes one, its log of writes has bytes before the file has.
    """
    log = path.with_name(f"{path.name}-wal")
    if path.is_file() and not path.stat().st_size and not (log.is_file() and log.stat().st_size):
        raise BadDataError(
            f"{path} is empty: 0 bytes, and so all that the run has committed is missing",
            next_step=f"{AFTER_DAMAGE}. If it was never started, remove {path}",
        )


def _connected(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, isolation_level=None, check_same_thread=False)
