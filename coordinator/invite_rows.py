"""Invites and who joined with them, on disk."""

import hmac
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from datetime import UTC, datetime
from typing import Any

from coordinator.database import Database, put, rows_of
from protocol.errors import NotPermittedError
from protocol.trust.pki import Role
from protocol.wire.rounds import NodeId

MOST_FIRST = (Role.NODE, Role.HELPER, Role.VIEWER)
"""Who has joined with several invites is the first of these that it is by any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnrolledMember:
    """Who has redeemed an invite, or several: any of them may spare it the approval."""

    node_id: NodeId
    node_name: str
    invite_id: str
    needs_approval: bool
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Invite:
    """One row: of the secret only the hash."""

    place: int = 0  # in the order in which they were made; 0: it is not kept yet
    invite_id: str
    secret_hash: bytes
    max_uses: int
    expires_utc_seconds: float  # of wall clock time
    is_revoked: bool = False
    host: str
    label: str = ""
    needs_approval: bool = False
    role: Role = Role.NODE  # of who joins with it


@dataclass(frozen=True, slots=True, kw_only=True)
class InviteRecord(Invite):
    """An invite and who joined with it."""

    node_ids: tuple[NodeId, ...]
    node_names: tuple[str, ...]  # what they call themselves


@dataclass(frozen=True, slots=True, kw_only=True)
class Enrolled:
    """One node that joined with one invite. It stays for ever: an invite's uses are counted by it."""

    invite_id: str
    node_id: NodeId
    node_name: str
    public_key: bytes  # empty: a ruling brought its joining back
    certificate_serial: str = ""  # of its latest certificate, in hexadecimal digits


class Invites:
    """All invites of the run, and all who joined. Of who joined memory has a copy: each call asks for it."""

    def __init__(self, database: Database) -> None:
        self._database = database
        with database.reading() as connection:
            _records(connection)  # what cannot be read is found at the start
            self._members = _members(connection)

    def add(self, invite: Invite) -> None:
        """Remembers a new invite."""
        with self._database.writing() as connection:
            (latest,) = connection.execute("SELECT MAX(place) FROM invites").fetchone()
            place = 1 + (latest or 0)
            _put(connection, "invites", replace(invite, place=place))

    def records(self) -> tuple[InviteRecord, ...]:
        """All invites, newest first."""
        with self._database.reading() as connection:
            return _records(connection)

    def revoke(self, invite_id: str) -> bool:
        """Makes an invite useless; False when there is none of that name."""
        with self._database.writing() as connection:
            invite = _invite(connection, invite_id)
            if invite is not None:
                _put(connection, "invites", replace(invite, is_revoked=True))
            return invite is not None

    def has(self, invite_id: str, secret_hash: bytes) -> bool:
        """Whether there is such an invite with this secret, of use or not; either takes equally long."""
        with self._database.reading() as connection:
            return _with_secret(connection, invite_id, secret_hash) is not None

    def redeem(
        self,
        invite_id: str,
        secret_hash: bytes,
        *,
        node_id: NodeId,
        node_name: str,
        public_key: bytes,
        now: float,
    ) -> Invite:
        """Enrols a node at wall clock time `now` (UTC seconds), or raises NotPermittedError.

        A node that has redeemed the invite before may do so again: its first answer may have been lost. An
        unknown invite and a wrong secret read the same, so that names cannot be probed.
        """
        with self._database.writing() as connection:
            invite = _with_secret(connection, invite_id, secret_hash)
            if invite is None:
                raise _refused(f"{invite_id!r} is not an invite of this swarm")
            if invite.is_revoked:
                raise _refused(f"invite {invite_id} was revoked")
            if now >= invite.expires_utc_seconds:
                expired_at = datetime.fromtimestamp(invite.expires_utc_seconds, UTC)
                raise _refused(f"invite {invite_id} expired at {expired_at:%Y-%m-%d %H:%M} UTC")
            before = _enrolled_by(connection, invite_id, node_id)
            if before is None and (uses := _uses_of(connection, invite_id)) >= invite.max_uses:
                raise _refused(
                    f"invite {invite_id} is used up: {uses} of {invite.max_uses} nodes joined with it"
                )
            joined = Enrolled(
                invite_id=invite_id,
                node_id=node_id,
                node_name=node_name,
                public_key=public_key if before is None else before.public_key,
                certificate_serial="" if before is None else before.certificate_serial,
            )
            _put(connection, "enrolled", joined)
            members = _members(connection, node_id)
        # Only now, when it is on the disk; a new one, for others read this on a thread of their own.
        self._members = {**self._members, **members}
        return invite

    def readmit(self, invite_id: str, *, node_id: NodeId, node_name: str) -> bool:
        """Enrols who has redeemed an invite after this database was copied, as a ruling says.

        Returns False, and changes nothing, where the invite is not known here: nobody can say then what its
        members may do. Its expiry and its uses were looked at when it was redeemed.
        """
        with self._database.writing() as connection:
            is_known = _invite(connection, invite_id) is not None
            if is_known and _enrolled_by(connection, invite_id, node_id) is None:
                joined = Enrolled(
                    invite_id=invite_id, node_id=node_id, node_name=node_name, public_key=b""
                )
                _put(connection, "enrolled", joined)
            members = _members(connection, node_id)
        self._members = {**self._members, **members}
        return is_known

    def record_certificate(self, invite_id: str, node_id: NodeId, serial: int) -> None:
        """Remembers which certificate an enrolled node got last."""
        with self._database.writing() as connection:
            if (one := _enrolled_by(connection, invite_id, node_id)) is not None:
                _put(connection, "enrolled", replace(one, certificate_serial=f"{serial:x}"))

    def members(self) -> tuple[EnrolledMember, ...]:
        """All who have ever redeemed an invite, in the order of their ids."""
        return tuple(member for _, member in sorted(self._members.items()))

    def member(self, node_id: NodeId) -> EnrolledMember | None:
        """What is known of who has redeemed an invite; None of one that never did, as in a simulation."""
        return self._members.get(node_id)


def _records(connection: sqlite3.Connection) -> tuple[InviteRecord, ...]:
    joined: dict[str, list[Enrolled]] = {}
    for one in enrolled(connection):  # in the order of node ids
        joined.setdefault(one.invite_id, []).append(one)
    return tuple(
        InviteRecord(
            **asdict(invite),
            node_ids=tuple(one.node_id for one in joined.get(invite.invite_id, ())),
            node_names=tuple(one.node_name for one in joined.get(invite.invite_id, ())),
        )
        for invite in reversed(list(_invites(connection)))
    )


def _members(
    connection: sqlite3.Connection, node_id: NodeId | None = None
) -> dict[NodeId, EnrolledMember]:
    """All who joined, or that one alone: whoever joins is not to wait for a look at all others."""
    if node_id is None:
        joined, invites = list(enrolled(connection)), list(_invites(connection))
    else:
        joined = list(enrolled(connection, "WHERE node_id = ?", (node_id,)))
        invites = [made for one in joined if (made := _invite(connection, one.invite_id))]
    by_id = {invite.invite_id: invite for invite in invites}
    found: dict[NodeId, EnrolledMember] = {}
    for one in joined:
        invite, before = by_id[one.invite_id], found.get(one.node_id)
        roles = [invite.role] if before is None else [invite.role, before.role]
        needs_approval = invite.needs_approval and (before is None or before.needs_approval)
        found[one.node_id] = EnrolledMember(
            node_id=one.node_id,
            node_name=one.node_name,
            # Of several the one whose name comes first, whatever was redeemed when.
            invite_id=min(one.invite_id, one.invite_id if before is None else before.invite_id),
            needs_approval=needs_approval,
            role=min(roles, key=MOST_FIRST.index),
        )
    return found


def enrolled(
    connection: sqlite3.Connection, rest: str = "", parameters: Sequence[str] = ()
) -> Iterator[Enrolled]:
    """Who joined, by invites and then node ids; `rest` is what follows the table's name in the SELECT."""
    order = "ORDER BY invite_id, node_id"
    for row in list(rows_of(connection, "enrolled", f"{rest} {order}", parameters)):
        yield Enrolled(**_named(Enrolled, row))


def _enrolled_by(
    connection: sqlite3.Connection, invite_id: str, node_id: NodeId
) -> Enrolled | None:
    both = "WHERE invite_id = ? AND node_id = ?"
    return next(enrolled(connection, both, (invite_id, node_id)), None)


def _uses_of(connection: sqlite3.Connection, invite_id: str) -> int:
    counted = connection.execute("SELECT COUNT(*) FROM enrolled WHERE invite_id = ?", (invite_id,))
    return int(counted.fetchone()[0])


def _invites(
    connection: sqlite3.Connection, rest: str = "", parameters: Sequence[str] = ()
) -> Iterator[Invite]:
    """Them in the order in which they were made; `rest` as above."""
    for row in rows_of(connection, "invites", f"{rest} ORDER BY place", parameters):
        told = _named(Invite, row)
        flags = {name: bool(told[name]) for name in ("is_revoked", "needs_approval")}
        yield Invite(**(told | flags | {"role": Role(told["role"])}))


def _named(kind: type[Invite | Enrolled], row: Sequence[Any]) -> dict[str, Any]:
    """A table's columns are the fields of its record, in their order."""
    return dict(zip((field.name for field in fields(kind)), row, strict=True))


def _invite(connection: sqlite3.Connection, invite_id: str) -> Invite | None:
    return next(_invites(connection, "WHERE invite_id = ?", (invite_id,)), None)


def _with_secret(
    connection: sqlite3.Connection, invite_id: str, secret_hash: bytes
) -> Invite | None:
    invite = _invite(connection, invite_id)
    known_hash = bytes(32) if invite is None else invite.secret_hash
    return invite if hmac.compare_digest(known_hash, secret_hash) else None


def _put(connection: sqlite3.Connection, table: str, record: Invite | Enrolled) -> None:
    put(connection, table, [astuple(record)])


def _refused(what: str) -> NotPermittedError:
    return NotPermittedError(
        what, next_step="ask the run owner for a new one: 'atoll invite create'"
    )
