"""The coordinator's memory on disk: the swarm's state, closed rounds, invites, enrolled nodes.

What was answered is on the disk. What to remember is the core's decision; nothing is decided here
except whether an invite can be redeemed, because that must be one transaction.
"""

import hmac
import sqlite3
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Self, TypeVar

from pydantic import TypeAdapter

from coordinator.database import Database
from coordinator.round_rows import JSON, load_round, packed, save_round, unpacked
from coordinator.swarm.ledger import Ledger, ledger_of
from coordinator.swarm.state import (
    PRESENT,
    ClosedRound,
    Member,
    Round,
    Rules,
    SwarmState,
    trimmed,
)
from coordinator.swarm.transition import initial_state
from coordinator.unsaved import Change, to_save, without_rows
from protocol.channel import RETRY_CAP_SECONDS
from protocol.errors import ConfigError, NotPermittedError
from protocol.rounds import Assignment, Commit, Digest, NodeId

CLOCK_SAVE_SECONDS = 5.0
"""The clock is written this often when nothing else is: what a crash can add to a deadline."""

_STATE = TypeAdapter(tuple[SwarmState], config=JSON)
_MEMBER = TypeAdapter(tuple[Member], config=JSON)
_CLOSED = TypeAdapter(tuple[ClosedRound], config=JSON)
_LEDGER = TypeAdapter(tuple[Ledger], config=JSON)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class InviteRecord:
    """An invite without its secret. Expiry is wall clock time, UTC seconds."""

    invite_id: str
    max_uses: int
    expires_utc_seconds: float
    is_revoked: bool
    host: str
    node_ids: tuple[NodeId, ...]  # who joined with it


class Store:
    """The one writer. Its methods raise SystemRefusedError when the disk refuses."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._saved_now = 0.0
        self._round_held: Round | None = None  # by the database, in rows of its own
        self._staged: tuple[float, Round | None] = 0.0, None  # these two after the next commit
        self._enrolled: set[NodeId] = set()  # as far as anybody asked; nobody is ever struck off
        with database.reading() as connection:
            row = connection.execute("SELECT saved_now FROM swarm").fetchone()
        if row is not None:
            self._saved_now = row[0]

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Opens or makes the store of a coordinator's folder, for this process alone."""
        return cls(Database.open(directory))

    @classmethod
    def in_memory(cls) -> Self:
        """A store that forgets, for simulations: the same code on a database without a file."""
        return cls(Database.in_memory())

    def close(self) -> None:
        """Lets another coordinator have the folder."""
        self._database.close()

    @property
    def saved_now(self) -> float:
        """The coordinator's time at the latest save: where its clock goes on after a restart."""
        return self._saved_now

    # The swarm's state

    def load(self, rules: Rules, run_digest: Digest) -> SwarmState:
        """The state as last saved, or the initial one. Present members get a fresh lease.

        Raises ConfigError when the database belongs to another run file.
        """
        with self._database.reading() as connection:
            row = connection.execute("SELECT state FROM swarm").fetchone()
            if row is None:
                return initial_state(rules, run_digest)
            (state,) = _STATE.validate_json(row[0])
            members = [
                _MEMBER.validate_json(text)[0]
                for (text,) in connection.execute("SELECT member FROM members ORDER BY node_id")
            ]
            open_round = load_round(connection)
            row = connection.execute("SELECT ledger FROM ledger").fetchone()
            ledger = None if row is None else _LEDGER.validate_json(row[0])[0]
        if state.run_digest != run_digest:
            raise ConfigError(
                f"the database {self._database.path} is of run file {state.run_digest.hex()[:8]}…, "
                f"but run.toml is {run_digest.hex()[:8]}…",
                next_step="put the old run.toml back, or start a new run with "
                "'atoll coordinator init NEWDIR'",
            )
        return replace(
            state,
            rules=rules,
            members={member.node_id: self._with_fresh_lease(member, rules) for member in members},
            open_round=open_round,
            recent=self._recent_rounds(),
            ledger=self._ledger_of(open_round, rules) if ledger is None else ledger,
        )

    def _ledger_of(self, open_round: Round | None, rules: Rules) -> Ledger:
        """The ledger that the rounds of a database add up to which was written without one."""
        leased: tuple[Assignment, ...] = ()
        if open_round is not None and open_round.commit is None:
            leased = open_round.assignments
        with self._database.reading() as connection:
            rows = connection.execute("SELECT closed FROM closed_rounds ORDER BY round")
            closed = (_CLOSED.validate_json(unpacked(text))[0] for (text,) in rows)
            return ledger_of(
                ((done.plan.assignments, done.commit) for done in closed),
                leased,
                batch=rules.batch,
                context=rules.context,
            )

    def _with_fresh_lease(self, member: Member, rules: Rules) -> Member:
        """Leases are not saved, and nobody could renew one while the coordinator was down."""
        if member.state not in PRESENT:
            return member
        # Nodes may be in their longest pause, and a round must not lose its participants by it.
        seconds = rules.lease_seconds + RETRY_CAP_SECONDS
        return replace(member, lease_until=self._saved_now + seconds)

    def save(self, before: SwarmState, *after: SwarmState, now: float) -> None:
        """Makes the steps from `before`, which the database holds, durable at `now`: all or none.

        `after` are the states that they led to, in their order.
        """
        if self.stage(before, *after, now=now):
            self.commit()

    def stage(self, before: SwarmState, *after: SwarmState, now: float) -> bool:
        """All of `save` but the wait for the disk, which is for `commit` if this is true."""
        changes = [Change.between(one, other) for one, other in pairwise(to_save(before, after))]
        is_clock_old = now - self._saved_now >= CLOCK_SAVE_SECONDS
        if not after or not (is_clock_old or any(change.is_any for change in changes)):
            return False
        round_held = self._round_held
        with self._database.staging() as connection:
            for change in changes:
                self._write(connection, change, round_held)
                round_held = change.after.open_round
            if self._saved_now and not any(change.are_scalars_new for change in changes):
                connection.execute("UPDATE swarm SET saved_now = ?", (now,))
            else:
                scalars = _text(_STATE, without_rows(after[-1]))
                connection.execute("INSERT OR REPLACE INTO swarm VALUES (1, ?, ?)", (now, scalars))
        self._staged = now, round_held
        return True

    def commit(self) -> None:
        """Waits until the disk has what was staged; when it raises, nothing has happened.

        The one method that may be called in another thread.
        """
        self._database.commit()
        self._saved_now, self._round_held = self._staged

    @staticmethod
    def _write(connection: sqlite3.Connection, change: Change, held: Round | None) -> None:
        """Writes all that has tables of its own; `held` is the round that they hold."""
        connection.executemany(
            "INSERT OR REPLACE INTO members VALUES (?, ?)",
            [(member.node_id, _text(_MEMBER, member)) for member in change.members],
        )
        connection.executemany(
            "DELETE FROM members WHERE node_id = ?", [(node_id,) for node_id in change.gone]
        )
        if change.is_round_new:
            save_round(connection, held, change.after.open_round)
        if change.is_ledger_new:
            ledger = _text(_LEDGER, change.after.ledger)
            connection.execute("INSERT OR REPLACE INTO ledger VALUES (1, ?)", (ledger,))
        if change.is_taken_back:
            connection.execute(
                "DELETE FROM closed_rounds WHERE round > ?", (change.after.committed_round,)
            )
        connection.executemany(
            "INSERT OR REPLACE INTO closed_rounds VALUES (?, ?)",
            [(closed.commit.round, packed(_text(_CLOSED, closed))) for closed in change.closed],
        )

    def commits_after(self, round_number: int, limit: int = 64) -> tuple[Commit, ...]:
        """The commits of later rounds than this one, oldest first."""
        with self._database.reading() as connection:
            rows = connection.execute(
                "SELECT closed FROM closed_rounds WHERE round > ? ORDER BY round LIMIT ?",
                (round_number, limit),
            )
            return tuple(_CLOSED.validate_json(unpacked(text))[0].commit for (text,) in rows)

    def _recent_rounds(self) -> tuple[ClosedRound, ...]:
        """The newest closed round that is not void, and the void ones after it, oldest first."""
        num_read = 8
        while True:
            closed = self.latest_rounds(num_read)[::-1]
            recent = trimmed(closed)
            if len(recent) < len(closed) or len(closed) < num_read or not recent[0].is_void:
                return recent
            num_read *= 4

    def latest_rounds(self, limit: int) -> tuple[ClosedRound, ...]:
        """The latest closed rounds, newest first."""
        with self._database.reading() as connection:
            rows = connection.execute(
                "SELECT closed FROM closed_rounds ORDER BY round DESC LIMIT ?", (limit,)
            )
            return tuple(_CLOSED.validate_json(unpacked(text))[0] for (text,) in rows)

    # Invites and enrolment

    def add_invite(
        self,
        *,
        invite_id: str,
        secret_hash: bytes,
        max_uses: int,
        expires_utc_seconds: float,
        host: str,
    ) -> None:
        """Remembers a new invite; of its secret only the hash."""
        with self._database.writing() as connection:
            connection.execute(
                "INSERT INTO invites (invite_id, secret_hash, max_uses, expires_utc_seconds, host)"
                " VALUES (?, ?, ?, ?, ?)",
                (invite_id, secret_hash, max_uses, expires_utc_seconds, host),
            )

    def invites(self) -> tuple[InviteRecord, ...]:
        """All invites, newest first."""
        with self._database.reading() as connection:
            rows = connection.execute(
                "SELECT invite_id, max_uses, expires_utc_seconds, is_revoked, host"
                " FROM invites ORDER BY rowid DESC"
            ).fetchall()
            return tuple(
                InviteRecord(
                    invite_id=invite_id,
                    max_uses=max_uses,
                    expires_utc_seconds=expires,
                    is_revoked=bool(is_revoked),
                    host=host,
                    node_ids=_nodes_of(connection, invite_id),
                )
                for invite_id, max_uses, expires, is_revoked, host in rows
            )

    def revoke_invite(self, invite_id: str) -> bool:
        """Makes an invite useless; False when there is none of that name."""
        with self._database.writing() as connection:
            cursor = connection.execute(
                "UPDATE invites SET is_revoked = 1 WHERE invite_id = ?", (invite_id,)
            )
            return cursor.rowcount == 1

    def redeem(
        self,
        invite_id: str,
        secret_hash: bytes,
        *,
        node_id: NodeId,
        node_name: str,
        public_key: bytes,
        now: float,
    ) -> None:
        """Enrols a node at wall clock time `now` (UTC seconds), or raises NotPermittedError.

        A node that has redeemed the invite before may do so again: its first answer may have been
        lost. An unknown invite and a wrong secret read the same, so that names cannot be probed.
        """
        with self._database.writing() as connection:
            row = connection.execute(
                "SELECT secret_hash, max_uses, expires_utc_seconds, is_revoked"
                " FROM invites WHERE invite_id = ?",
                (invite_id,),
            ).fetchone()
            known_hash, max_uses, expires, is_revoked = (
                row if row is not None else (bytes(32), 0, 0.0, False)
            )
            if not hmac.compare_digest(known_hash, secret_hash) or row is None:
                raise _refused(f"{invite_id!r} is not an invite of this swarm")
            if is_revoked:
                raise _refused(f"invite {invite_id} was revoked")
            if now >= expires:
                expired_at = datetime.fromtimestamp(expires, UTC)
                raise _refused(f"invite {invite_id} expired at {expired_at:%Y-%m-%d %H:%M} UTC")
            node_ids = _nodes_of(connection, invite_id)
            if node_id not in node_ids and len(node_ids) >= max_uses:
                raise _refused(
                    f"invite {invite_id} is used up: "
                    f"{len(node_ids)} of {max_uses} nodes joined with it"
                )
            connection.execute(
                "INSERT INTO enrolled (invite_id, node_id, node_name, public_key)"
                " VALUES (?, ?, ?, ?)"
                " ON CONFLICT DO UPDATE SET node_name = excluded.node_name",
                (invite_id, node_id, node_name, public_key),
            )

    def record_certificate(self, invite_id: str, node_id: NodeId, serial: int) -> None:
        """Remembers which certificate an enrolled node got last."""
        with self._database.writing() as connection:
            connection.execute(
                "UPDATE enrolled SET certificate_serial = ? WHERE invite_id = ? AND node_id = ?",
                (f"{serial:x}", invite_id, node_id),
            )

    def is_enrolled(self, node_id: NodeId) -> bool:
        """Whether the node has ever redeemed an invite. Asked at every call."""
        if node_id in self._enrolled:
            return True
        with self._database.reading() as connection:
            row = connection.execute(
                "SELECT 1 FROM enrolled WHERE node_id = ? LIMIT 1", (node_id,)
            ).fetchone()
        if row is not None:
            self._enrolled.add(node_id)
        return row is not None


def _nodes_of(connection: sqlite3.Connection, invite_id: str) -> tuple[NodeId, ...]:
    rows = connection.execute(
        "SELECT node_id FROM enrolled WHERE invite_id = ? ORDER BY node_id", (invite_id,)
    )
    return tuple(NodeId(node_id) for (node_id,) in rows)


def _text(adapter: TypeAdapter[tuple[T]], value: T) -> str:
    return adapter.dump_json((value,)).decode()


def _refused(what: str) -> NotPermittedError:
    return NotPermittedError(
        what, next_step="ask the run owner for a new one: 'atoll invite create'"
    )
