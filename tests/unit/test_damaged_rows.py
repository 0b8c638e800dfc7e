"""A database in which the disk changed something: the same run, or a sentence; never another value."""

import random
import sqlite3
from pathlib import Path

import pytest

from coordinator.database import AFTER_DAMAGE, DATABASE_NAME, DamagedError, put, row_of
from coordinator.invite_rows import Invite
from coordinator.store import Store
from coordinator.swarm.transition import initial_state
from protocol.errors import BadDataError, ConfigError, ExitCode
from tests.unit.swarm_scene import digest_of
from tests.unit.test_store import RULES, RUN, SECRET, TWO_ROUNDS, A, B, play

NUM_FLIPS = 150
HEADER_BYTES = 100


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Of a run with members, invites, closed rounds and one in flight."""
    folder = tmp_path_factory.mktemp("whole")
    store = Store.open(folder)
    store.invites.add(
        Invite(invite_id="inv", secret_hash=SECRET, max_uses=2, expires_utc_seconds=1e9, host="h")
    )
    for node_id in (A, B):
        store.invites.redeem(
            "inv", SECRET, node_id=node_id, node_name="n", public_key=b"k" * 32, now=0.0
        )
        store.invites.record_certificate("inv", node_id, 7)
    play(store, initial_state(RULES, RUN), TWO_ROUNDS)
    store.close()
    return (folder / DATABASE_NAME).read_bytes()


def all_of(folder: Path) -> object:
    """All that can be asked of a store."""
    store = Store.open(folder)
    try:
        store.check()
        return (
            *(store.load(RULES, RUN), store.saved_now, store.invites.records()),
            *(store.invites.member(A) is not None, store.invites.member(B) is not None),
            *(store.latest_rounds(9), store.latest_figures(9), store.commits_after(0)),
        )
    finally:
        store.close()


def test_a_flipped_byte_changes_nothing_or_is_said(database: bytes, tmp_path: Path) -> None:
    (tmp_path / DATABASE_NAME).write_bytes(database)
    whole = all_of(tmp_path)
    drawn = random.Random(7)
    num_said = 0
    for number in range(NUM_FLIPS):
        at = drawn.randrange(len(database) if number % 5 else HEADER_BYTES)
        flipped = bytearray(database)
        flipped[at] ^= drawn.choice((0xFF, 1 << drawn.randrange(8)))
        (tmp_path / DATABASE_NAME).write_bytes(flipped)
        try:
            assert all_of(tmp_path) == whole, f"byte {at}"
        except (BadDataError, ConfigError) as error:
            num_said += 1
            assert AFTER_DAMAGE in str(error)
            assert len(str(error)) < 600
    assert NUM_FLIPS / 10 < num_said < NUM_FLIPS


@pytest.mark.parametrize(
    ("table", "change"),
    [
        ("members", "member = replace(member, 'node-a', 'node-x')"),
        ("clock", "saved_now = saved_now + 1"),
        ("swarm", "state = replace(state, 'token_clock\":3', 'token_clock\":4')"),
        ("ledger", "ledger = replace(ledger, 'frontiers\":{', 'frontiers\":{\"1\":1,')"),
        ("held_out", "loss = loss - 1"),
        ("closed_rounds", "round = 9 WHERE round = 1"),
        ("commits", "outer_digest = base_digest"),
        ("figures", "round = 9 WHERE round = 1"),
        ("invites", "max_uses = max_uses + 1"),
        ("invites", "is_revoked = 1 - is_revoked"),
        ("enrolled", "public_key = zeroblob(32)"),
        ("round_parts", "part = zeroblob(4) WHERE kind = 'held'"),
        ("open_round", "round = zeroblob(4)"),
    ],
)
def test_a_value_that_was_changed_behind_its_digest_is_said_with_what_to_do(
    database: bytes, tmp_path: Path, table: str, change: str
) -> None:
    (tmp_path / DATABASE_NAME).write_bytes(database)
    connection = sqlite3.connect(tmp_path / DATABASE_NAME)
    changed = connection.execute(f"UPDATE {table} SET {change}").rowcount
    connection.commit()
    connection.close()
    assert changed
    with pytest.raises(BadDataError, match=rf"{DATABASE_NAME} is damaged: row .* of table {table}"):
        all_of(tmp_path)


def test_a_page_that_has_lost_a_row_is_said(database: bytes, tmp_path: Path) -> None:
    (tmp_path / DATABASE_NAME).write_bytes(database)
    connection = sqlite3.connect(tmp_path / DATABASE_NAME)
    (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
    (root,) = connection.execute(
        "SELECT rootpage FROM sqlite_master WHERE name = 'members'"
    ).fetchone()
    connection.close()
    flipped = bytearray(database)
    num_cells_at = (root - 1) * page_bytes + 3  # two bytes of a page's header, big-endian
    assert flipped[num_cells_at : num_cells_at + 2] == b"\0\2"  # A and B
    flipped[num_cells_at + 1] = 1
    (tmp_path / DATABASE_NAME).write_bytes(flipped)
    with pytest.raises(BadDataError, match="is damaged"):
        all_of(tmp_path)


@pytest.mark.parametrize("table", ["swarm", "ledger"])
def test_a_database_without_the_only_row_of_a_table_is_no_new_run(
    database: bytes, tmp_path: Path, table: str
) -> None:
    (tmp_path / DATABASE_NAME).write_bytes(database)
    connection = sqlite3.connect(tmp_path / DATABASE_NAME)
    connection.execute(f"DELETE FROM {table}")
    connection.commit()
    connection.close()
    with pytest.raises(BadDataError, match=f"the {table}'s own row is missing") as damaged:
        Store.open(tmp_path).load(RULES, RUN)
    assert damaged.value.exit_code is ExitCode.BAD_DATA


def test_a_digest_is_of_the_table_and_of_every_value_with_its_type() -> None:
    connection = sqlite3.connect(":memory:")
    for table in ("one", "other"):
        connection.execute(f"CREATE TABLE {table} (key PRIMARY KEY, value, digest)")
    put(connection, "one", [("a", 1), ("b", b"x"), ("c", 1.5), ("d", "")])
    assert row_of(connection, "one", "WHERE key = 'c'") == ("c", 1.5)
    assert row_of(connection, "one", "WHERE key = 'z'") is None
    connection.execute("INSERT INTO other SELECT * FROM one")
    with pytest.raises(DamagedError, match="row a of table other"):
        row_of(connection, "other")
    for change in ("'1'", "1.0", "NULL", "2", f"x'{digest_of('').hex()}'"):
        connection.execute(f"UPDATE one SET value = {change} WHERE key = 'a'")
        with pytest.raises(DamagedError, match="row a of table one"):
            row_of(connection, "one")
