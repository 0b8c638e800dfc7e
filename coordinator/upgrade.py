"""Brings databases of version 4 to version 5, in which rows have digests and commits are messages.

Closed rounds were JSON, one row each for ever, and held-out losses lay in the swarm's own row.
"""

import sqlite3
import zlib
from dataclasses import replace

from pydantic import TypeAdapter

from coordinator.closed_rows import save_closed
from coordinator.round_rows import JSON, joined, save_round
from coordinator.rows import put
from coordinator.swarm.state import ClosedRound, Round, SwarmState

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
CREATE TABLE held_out (place INTEGER PRIMARY KEY, round, loss, tokens, digest);
CREATE TABLE closed_rounds (round INTEGER PRIMARY KEY, commit_message, plan, rest, digest);
CREATE TABLE commits (
    round INTEGER PRIMARY KEY, incarnation, base_digest, outer_digest, statement_digest, signature,
    digest
);
CREATE TABLE figures (round INTEGER PRIMARY KEY, summary, digest);
CREATE TABLE invites (
    place INTEGER PRIMARY KEY, invite_id, secret_hash, max_uses, expires_utc_seconds, is_revoked,
    host, digest
);
CREATE TABLE enrolled (
    invite_id, node_id, node_name, public_key, certificate_serial, digest,
    PRIMARY KEY (invite_id, node_id)
) WITHOUT ROWID;
"""
"""Of version 5. Columns have no type, so that what is read is what was written."""

_OLD = (
    *("swarm", "members", "open_round", "round_parts", "ledger", "closed_rounds"),
    *("invites", "enrolled"),
)

_STATE = TypeAdapter(tuple[SwarmState], config=JSON)
_CLOSED = TypeAdapter(tuple[ClosedRound], config=JSON)
_ROUND = TypeAdapter(tuple[Round], config=JSON)


def to_version_5(connection: sqlite3.Connection) -> None:
    """Writes all rows anew. No signatures: the coordinator signs these commits when it is asked."""
    connection.execute("DROP INDEX enrolled_by_node")
    for table in _OLD:
        connection.execute(f"ALTER TABLE {table} RENAME TO old_{table}")
    for statement in TABLES.split(";"):
        connection.execute(statement)
    row = connection.execute("SELECT saved_now, state FROM old_swarm").fetchone()
    if row is not None:
        _convert_run(connection, *row)
    invites = connection.execute(
        "SELECT rowid, invite_id, secret_hash, max_uses, expires_utc_seconds, is_revoked, host"
        " FROM old_invites"
    )
    put(connection, "invites", invites)
    enrolled = connection.execute(
        "SELECT invite_id, node_id, node_name, public_key, certificate_serial FROM old_enrolled"
    )
    put(connection, "enrolled", enrolled)
    for table in reversed(_OLD):
        connection.execute(f"DROP TABLE old_{table}")


def _convert_run(connection: sqlite3.Connection, saved_now: float, text: str) -> None:
    (state,) = _STATE.validate_json(text)
    put(connection, "clock", [(1, saved_now)])
    put(connection, "swarm", [(1, _STATE.dump_json((replace(state, held_out=()),)).decode())])
    losses = ((h.round, float(h.loss), h.tokens) for h in state.held_out)
    put(connection, "held_out", [(place, *loss) for place, loss in enumerate(losses)])
    put(connection, "members", connection.execute("SELECT node_id, member FROM old_members"))
    put(connection, "ledger", connection.execute("SELECT only_row, ledger FROM old_ledger"))
    for (written,) in connection.execute("SELECT closed FROM old_closed_rounds"):
        (closed,) = _CLOSED.validate_json(_text_of(written))
        save_closed(connection, state, closed, None)
    head = connection.execute("SELECT round FROM old_open_round").fetchone()
    if head is not None:
        (current,) = _ROUND.validate_json(_text_of(head[0]))
        parts = {
            (kind, index, node_id): _text_of(part).encode()
            for kind, index, node_id, part in connection.execute("SELECT * FROM old_round_parts")
        }
        save_round(connection, None, joined(current, parts) if parts else current)


def _text_of(written: str | bytes) -> str:
    """The JSON or words of a row; long ones were deflated."""
    return written if isinstance(written, str) else zlib.decompress(written).decode()
