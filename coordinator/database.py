"""The coordinator's database file: tables, transactions, rows with a digest, and what is still to be saved.

What the tables mean is coordinator.store's; here they are made and kept whole.

What a disk changed by itself is noticed where it is read. SQLite notices a broken tree, and takes a flipped
byte in a value for another value. So the last column of every table is a digest of the table's name and the
values before it.

What the database does not hold yet is the difference of two states. Most steps change a member or a round,
and rows are written for these alone.
"""

import resource
import sqlite3
import struct
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Self

from blake3 import blake3
from google.protobuf.message import DecodeError
from pydantic import ValidationError

from coordinator.swarm.ledger import Ledger
from coordinator.swarm.members import Member
from coordinator.swarm.state import ClosedRound, HeldOut, SwarmState, Written
from protocol.errors import BadDataError, ConfigError, SystemRefusedError
from protocol.files.durable import FolderLock
from protocol.run.schedule import ALWAYS_ALIKE
from protocol.terminal.console import bytes_in_words
from protocol.trust.rulings import Ruling
from protocol.wire.rounds import NodeId
from protocol.wire.versions import DATABASE

DATABASE_NAME = "atoll.db"

NEWS_FILE = "news.jsonl"
"""Beside it: what has happened to the swarm, for its page. Who has it has had a database."""

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
CREATE INDEX IF NOT EXISTS enrolled_by_node ON enrolled (node_id);
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
    "Without one, begin a new run: with the weights that a node keeps, 'atoll node fork ROUND --to NEWDIR', "
    "or anew, 'atoll init NEWDIR'"
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
            next_step="stop it, or start a new run with 'atoll init NEWDIR'",
        )
        path = directory / DATABASE_NAME
        try:
            refuse_lost(path)
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
                    next_step=f"{_widest()}make room on the disk or check the permissions, then start again",
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


def refuse_lost(path: Path) -> None:
    """Raises BadDataError for a file that is gone or lost its bytes: SQLite would begin a new database there.

    While SQLite makes one, its log of writes has bytes before the file has.
    """
    news = path.with_name(NEWS_FILE)
    if news.is_file() and not path.exists():
        raise BadDataError(
            f"{path} is not there, and so all that the run has committed is missing: {NEWS_FILE} beside it "
            "tells that it has begun",
            next_step=AFTER_DAMAGE,
        )
    log = path.with_name(f"{path.name}-wal")
    if path.is_file() and not path.stat().st_size and not (log.is_file() and log.stat().st_size):
        raise BadDataError(
            f"{path} is empty: 0 bytes, and so all that the run has committed is missing",
            next_step=f"{AFTER_DAMAGE}. If it was never started, remove {path}",
        )


def _connected(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, isolation_level=None, check_same_thread=False)


Value = int | float | str | bytes | None
"""What a column holds. A column of type REAL gives a float back, so it must be given one."""

DIGEST_BYTES = 16


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


def to_save(before: SwarmState, after: Sequence[SwarmState]) -> list[SwarmState]:
    """The states between which all differences show.

    A state keeps only the latest rounds, so none may be left out that brought one of them or took
    one back. Of the others the last one of a row tells all.
    """
    brought = (
        state
        for state, earlier in zip(after, (before, *after), strict=False)
        if state.recent is not earlier.recent or state is after[-1]
    )
    return [before, *brought]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What of a state has to be written that the database holds as it was before."""

    after: SwarmState
    are_scalars_new: bool
    members: tuple[Member, ...]
    gone: frozenset[NodeId]
    is_round_new: bool
    is_ledger_new: bool
    num_losses_kept: int | None  # of the held-out losses, from the first on; None: no other ones
    written: tuple[Written, ...]
    forgotten: frozenset[int]  # rounds whose texts are not kept any more
    is_taken_back: bool
    closed: tuple[ClosedRound, ...]
    rulings: tuple[Ruling, ...]

    @property
    def is_any(self) -> bool:
        """Whether there is anything to write."""
        are_rows_new = bool(
            self.members
            or self.gone
            or self.closed
            or self.rulings
            or self.written
            or self.forgotten
        )
        is_one_new = self.is_round_new or self.is_ledger_new or self.num_losses_kept is not None
        return self.are_scalars_new or are_rows_new or is_one_new

    @classmethod
    def between(cls, before: SwarmState, after: SwarmState) -> Self:
        """What is new in `after`."""
        members: tuple[Member, ...] = ()
        gone: frozenset[NodeId] = frozenset()
        if after.members is not before.members:
            was = before.members
            members = tuple(
                member
                for node_id, member in after.members.items()
                if was.get(node_id) is not member and not _is_saved_as(was.get(node_id), member)
            )
            gone = frozenset(was.keys() - after.members.keys())
        return cls(
            after=after,
            are_scalars_new=without_rows(after) != without_rows(before),
            members=members,
            gone=gone,
            is_round_new=_is_new(before.open_round, after.open_round),
            is_ledger_new=_is_new(before.ledger, after.ledger),
            num_losses_kept=_num_kept(before.held_out, after.held_out),
            written=tuple(one for one in after.written if one not in before.written)
            if after.written is not before.written
            else (),
            forgotten=frozenset(one.round for one in before.written)
            - frozenset(one.round for one in after.written)
            if after.written is not before.written
            else frozenset(),
            is_taken_back=after.committed_round < before.committed_round,
            closed=_new_rounds(before.recent, after.recent),
            rulings=after.rulings[len(before.rulings) :],
        )


def _num_kept(before: Sequence[HeldOut], after: Sequence[HeldOut]) -> int | None:
    """How many losses are the same ones, in the same places; None when all are."""
    if after is before or after == before:
        return None
    pairs = zip(before, after, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _new_rounds(
    before: tuple[ClosedRound, ...], after: tuple[ClosedRound, ...]
) -> tuple[ClosedRound, ...]:
    """Most are the very same ones, and there may be many void rounds in a row."""
    same = {id(closed) for closed in before}
    return tuple(closed for closed in after if id(closed) not in same and closed not in before)


def _is_new(before: object, after: object) -> bool:
    return after is not before and after != before


def without_rows(state: SwarmState) -> SwarmState:
    """The state without what has tables of its own, or follows from those."""
    return replace(
        state,
        members={},
        open_round=None,
        recent=(),
        earlier=(),
        norms=(),
        rules=replace(state.rules, schedule=ALWAYS_ALIKE),  # as the run file and rulings have it
        audit_secret=b"",  # of the key, which lies elsewhere
        ledger=Ledger(),
        held_out=(),
        written=(),
        rulings=(),
        latest_rulings={},
        rolled_back=(),
        paused=None,
        stopped=None,
    )


def _is_saved_as(before: Member | None, after: Member) -> bool:
    """Whether the database needs no new row; a lease alone is not worth a write."""
    if before is None or before is after:
        return before is after
    return replace(before, lease_until=0.0) == replace(after, lease_until=0.0)


def _widest() -> str:
    """What to do first where files may not grow: SQLite calls that an error of the disk."""
    most_bytes, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if most_bytes == resource.RLIM_INFINITY:
        return ""
    return f"raise 'ulimit -f', by which a file has {bytes_in_words(most_bytes)} at most; "
