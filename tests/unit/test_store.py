"""The store: what was saved is there after a crash, and an invite is worth what it says."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator import invite_rows
from coordinator.backup import require_started
from coordinator.database import DATABASE_NAME, NEWS_FILE, rows_of
from coordinator.invite_rows import Invite
from coordinator.store import CLOCK_SAVE_SECONDS, Store
from coordinator.swarm.events import Attached, Detached, Event, HeartbeatSeen, Reported
from coordinator.swarm.state import SwarmState, Written
from coordinator.swarm.transition import initial_state, step
from protocol.errors import (
    BadDataError,
    ConfigError,
    NoInputError,
    NotPermittedError,
    SystemRefusedError,
)
from protocol.trust.pki import Role
from protocol.wire.channel import RETRY_CAP_SECONDS
from protocol.wire.messages import Applied, Evaluated, Held, Reduced, Trained, Wrote
from protocol.wire.rounds import (
    ContributionDigest,
    Contributor,
    CorpusSummary,
    Digest,
    NodeId,
    PeerAddress,
    SourceLoss,
)
from protocol.wire.vitals import LinkRates
from tests.unit.swarm_scene import PLAIN_RULES

RULES = replace(PLAIN_RULES, num_prompts=1)
RUN = Digest(b"\x99" * 32)
A, B = NodeId("a" * 32), NodeId("b" * 32)


def digest(number: int) -> Digest:
    return Digest(bytes([number]) * 32)


def attached(node_id: NodeId) -> Attached:
    return Attached(
        node_id=node_id,
        node_name=f"node-{node_id[0]}",
        address=PeerAddress(public_key=b"\xfe" * 32, multiaddrs=("/ip4/192.0.2.1/tcp/1",)),
        device="cpu",
        num_ranks=1,
        version="0",
        run_digest=RUN,
        layout=RULES.layout,
        codecs=RULES.codecs,
        corpus=CorpusSummary(digest=digest(8), num_samples=100, num_bytes=1000),
        outer_round=0,
        outer_digest=digest(0),
    )


def detached(node_id: NodeId) -> Detached:
    return Detached(node_id=node_id, session_id=2, reason="")


def reports_up_to_commit(number: int) -> list[Event]:
    trained = Trained(inner_steps=5, samples=10, tokens=80, loss=2.5, seconds=1.5)
    contributors = tuple(Contributor(node_id=n, samples=10, tokens=80) for n in (A, B))
    reduced = [
        Reported(
            node_id=node_id,
            round=number,
            report=Reduced(
                slice_index=index,
                digest=digest(20 + index),
                contributors=contributors,
                contributions=(ContributionDigest(bytes(16)), ContributionDigest(bytes([7]) * 16)),
            ),
        )
        for index, node_id in enumerate((A, B))
    ]
    held = [
        Reported(
            node_id=node_id, round=number, report=Held(slice_index=index, digest=digest(20 + index))
        )
        for node_id in (A, B)
        for index in (0, 1)
    ]
    done = [Reported(node_id=n, round=number, report=trained) for n in (A, B)]
    return [*done, *reduced, *held]


def applied(number: int) -> list[Event]:
    return [
        Reported(
            node_id=n,
            round=number,
            report=Applied(
                outer_digest=digest(100 + number), wire={"contribution": (1000 * number, 900)}
            ),
        )
        for n in (A, B)
    ]


def play(store: Store, state: SwarmState, events: list[Event], *, now: float = 1.0) -> SwarmState:
    for event in events:
        after = step(state, event, now).state
        store.save(state, after, now=now)
        state = after
    return state


def with_leases_until(state: SwarmState, time: float) -> SwarmState:
    members = {n: replace(m, lease_until=time) for n, m in state.members.items()}
    return replace(state, members=members)


SOURCES = (
    SourceLoss(source="code", loss=5.0, tokens=32),
    SourceLoss(source="", loss=6.0, tokens=32),
)
TWO_ROUNDS: list[Event] = [
    attached(A),
    HeartbeatSeen(
        node_id=A,
        session_id=1,
        outer_round=0,
        outer_digest=digest(0),
        rates=LinkRates(up_bytes_per_second=1e6),
    ),
    attached(B),
    Reported(node_id=A, round=0, report=Evaluated(held_out_loss=5.5, tokens=64, by_source=SOURCES)),
    Reported(node_id=A, round=0, report=Wrote(texts=("a text",))),
    *reports_up_to_commit(1),
    *applied(1),
    *reports_up_to_commit(2),
]


@pytest.mark.parametrize("num_events", range(len(TWO_ROUNDS) + 1))
def test_every_state_comes_back_whole_after_a_crash(tmp_path: Path, num_events: int) -> None:
    store = Store.open(tmp_path)
    state = play(store, initial_state(RULES, RUN), TWO_ROUNDS[:num_events])
    store.close()
    recovered = Store.open(tmp_path)
    fresh = with_leases_until(state, recovered.saved_now + RULES.lease_seconds + RETRY_CAP_SECONDS)
    assert recovered.load(RULES, RUN) == fresh
    assert recovered.saved_now == (1.0 if num_events else 0.0)


def test_the_played_rounds_reach_every_table() -> None:
    """Keeps the test above honest: a state without rounds would come back whole as well."""
    state = play(Store.in_memory(), initial_state(RULES, RUN), TWO_ROUNDS)
    assert state.open_round is not None and state.open_round.commit is not None
    assert state.last_closed is not None and state.written
    assert [each.by_source for each in state.held_out] == [SOURCES]
    assert state.ledger.committed and state.ledger.frontier()
    assert state.members[A].inner_steps_per_second


def test_the_ledger_is_read_and_not_added_up_again(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    state = play(store, initial_state(RULES, RUN), TWO_ROUNDS)
    store.close()
    connection = sqlite3.connect(tmp_path / DATABASE_NAME)
    connection.execute("DELETE FROM closed_rounds")
    connection.commit()
    connection.close()
    assert Store.open(tmp_path).load(RULES, RUN).ledger == state.ledger


@pytest.mark.parametrize("version", [1, 4])
def test_the_database_of_an_earlier_version_is_refused_as_it_is(
    tmp_path: Path, version: int
) -> None:
    connection = sqlite3.connect(tmp_path / DATABASE_NAME)
    connection.executescript(f"CREATE TABLE swarm (state); PRAGMA user_version = {version};")
    connection.close()
    before = (tmp_path / DATABASE_NAME).read_bytes()[100:]  # behind the header's counters
    with pytest.raises(ConfigError, match=f"has tables of version {version}, and this"):
        Store.open(tmp_path)
    assert (tmp_path / DATABASE_NAME).read_bytes()[100:] == before


def test_a_lease_alone_is_not_written_but_the_clock_is_now_and_then(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    state = play(store, initial_state(RULES, RUN), [attached(A)])
    beat = HeartbeatSeen(node_id=A, session_id=1, outer_round=0, outer_digest=digest(0))
    state = play(store, state, [beat], now=2.0)
    assert state.members[A].lease_until == 17.0
    assert store.saved_now == 1.0
    play(store, state, [beat], now=1.0 + CLOCK_SAVE_SECONDS)
    assert store.saved_now == 6.0


def test_only_present_members_get_a_fresh_lease(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    play(store, initial_state(RULES, RUN), [attached(A), attached(B), detached(B)], now=30.0)
    store.close()
    members = Store.open(tmp_path).load(replace(RULES, lease_seconds=9), RUN).members
    assert (members[A].lease_until, members[B].lease_until) == (39.0 + RETRY_CAP_SECONDS, 45.0)


def test_a_step_that_the_disk_refuses_leaves_the_step_before(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    state = play(store, initial_state(RULES, RUN), TWO_ROUNDS[:4])
    full = store._database._connection
    full.execute(f"PRAGMA max_page_count = {full.execute('PRAGMA page_count').fetchone()[0]}")
    crowd = [replace(attached(A), node_id=NodeId(f"{n:032x}")) for n in range(200)]
    late = state
    with pytest.raises(SystemRefusedError, match="full"):
        for event in crowd:
            after = step(late, event, 2.0).state
            store.save(late, after, now=2.0)
            late = after
    assert len(late.members) > 1, "some must fit, or this is no test of the last step"
    store.close()
    assert Store.open(tmp_path).load(RULES, RUN).members.keys() == late.members.keys()


def test_the_database_of_another_run_file_is_refused(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    play(store, initial_state(RULES, RUN), [attached(A)])
    with pytest.raises(ConfigError, match=r"99999999.*abababab.*atoll init"):
        store.load(RULES, Digest(b"\xab" * 32))


def test_a_folder_has_one_coordinator_at_a_time(tmp_path: Path) -> None:
    first = Store.open(tmp_path)
    with pytest.raises(SystemRefusedError, match="another coordinator"):
        Store.open(tmp_path)
    first.close()
    Store.open(tmp_path).close()


def test_a_database_that_cannot_be_read_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / DATABASE_NAME
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(BadDataError, match="damaged"):
        Store.open(tmp_path)
    assert path.read_bytes() == b"not a database" * 100
    path.unlink()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 999")
    connection.close()
    with pytest.raises(ConfigError, match="version 999"):
        Store.open(tmp_path)


def test_a_database_that_lost_all_its_bytes_is_no_new_run(tmp_path: Path) -> None:
    path = tmp_path / DATABASE_NAME
    path.touch()
    with pytest.raises(BadDataError, match="is empty: 0 bytes") as refusal:
        Store.open(tmp_path)
    assert f"If it was never started, remove {path}" in refusal.value.next_step
    assert path.stat().st_size == 0
    path.unlink()
    Store.open(tmp_path).close()


def test_a_database_that_is_gone_from_a_run_that_had_begun_is_no_new_run_nor_one_that_never_was(
    tmp_path: Path,
) -> None:
    with pytest.raises(NoInputError, match="was never started"):
        require_started(tmp_path)
    (tmp_path / NEWS_FILE).write_text("{}\n")
    for ask in (Store.open, require_started):
        with pytest.raises(BadDataError, match=f"{DATABASE_NAME} is not there") as refusal:
            ask(tmp_path)
        assert "atoll coordinator start BACKUP" in refusal.value.next_step
        assert "atoll node fork" in refusal.value.next_step
    assert not (tmp_path / DATABASE_NAME).exists()
    (tmp_path / NEWS_FILE).unlink()
    Store.open(tmp_path).close()
    (tmp_path / NEWS_FILE).write_text("{}\n")
    require_started(tmp_path)
    Store.open(tmp_path).close()


def test_a_database_that_another_program_writes_in_names_that_as_the_reason(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    other = sqlite3.connect(tmp_path / DATABASE_NAME, isolation_level=None)
    with closing(other):
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(SystemRefusedError, match="another program holds it") as refusal:
            store.invites.add(
                Invite(
                    invite_id="i", secret_hash=b"s", max_uses=1, expires_utc_seconds=1e9, host="h"
                )
            )
        assert "fuser" in refusal.value.next_step
    store.close()


def test_commits_come_oldest_first_and_rounds_newest_first() -> None:
    store = Store.in_memory()
    state = play(store, initial_state(RULES, RUN), [attached(A), attached(B)])
    for number in (1, 2, 3):
        state = play(store, state, [*reports_up_to_commit(number), *applied(number)])
    assert [commit.round for commit in store.commits_after(0, limit=2)] == [1, 2]
    assert [commit.outer_digest for commit in store.commits_after(2)] == [digest(103)]
    assert [closed.commit.round for closed in store.latest_rounds(2)] == [3, 2]


# Invites

SECRET, WRONG = b"s" * 32, b"w" * 32


def invited(*, max_uses: int = 1, expires: float = 1000.0) -> Store:
    store = Store.in_memory()
    store.invites.add(
        Invite(
            invite_id="inv",
            secret_hash=SECRET,
            max_uses=max_uses,
            expires_utc_seconds=expires,
            host="h",
        )
    )
    return store


def redeem(
    store: Store,
    node_id: NodeId,
    *,
    invite_id: str = "inv",
    secret: bytes = SECRET,
    now: float = 0.0,
) -> None:
    store.invites.redeem(
        invite_id, secret, node_id=node_id, node_name="n", public_key=b"k", now=now
    )


def test_an_invite_enrols_as_many_nodes_as_it_says_and_each_as_often_as_it_likes() -> None:
    store = invited(max_uses=2)
    for node_id in (A, B, A, B):
        redeem(store, node_id)
    with pytest.raises(NotPermittedError, match="used up: 2 of 2"):
        redeem(store, NodeId("c" * 32))
    assert store.invites.member(A) is not None and store.invites.member(NodeId("c" * 32)) is None
    assert [invite.node_ids for invite in store.invites.records()] == [(A, B)]


def test_who_joins_is_let_in_without_a_look_at_all_who_joined_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, num_read = invited(max_uses=100), 0

    def counted(*asked: Any) -> Iterator[tuple[Any, ...]]:
        nonlocal num_read
        for row in rows_of(*asked):
            num_read += 1
            yield row

    monkeypatch.setattr(invite_rows, "rows_of", counted)
    took = []
    for number in range(60):
        node_id, num_read = NodeId(f"{number:032x}"), 0
        redeem(store, node_id)
        store.invites.record_certificate("inv", node_id, number)
        took.append(num_read)
    assert len(set(took)) == 1, took
    assert len(store.invites.members()) == 60


def test_who_joined_with_two_invites_is_what_both_make_of_it() -> None:
    store = invited()
    store.invites.add(
        Invite(
            invite_id="helping",
            secret_hash=SECRET,
            max_uses=1,
            expires_utc_seconds=1e9,
            host="h",
            role=Role.HELPER,
        )
    )
    redeem(store, A, invite_id="helping")
    helper = store.invites.member(A)
    assert helper is not None and helper.role is Role.HELPER
    redeem(store, A)
    member = store.invites.member(A)
    assert member is not None and (member.role, member.invite_id) == (Role.NODE, "helping")
    assert [invite.place for invite in store.invites.records()] == [2, 1]


def test_a_wrong_secret_reads_like_an_unknown_invite_and_enrols_nobody() -> None:
    store = invited()
    with pytest.raises(NotPermittedError) as wrong:
        redeem(store, A, secret=WRONG)
    with pytest.raises(NotPermittedError) as unknown:
        redeem(store, A, invite_id="inw")
    with pytest.raises(NotPermittedError, match="is not an invite"):
        redeem(store, A, invite_id="inw", secret=bytes(32))
    assert str(wrong.value).replace("inv'", "inw'") == str(unknown.value)
    assert store.invites.member(A) is None


def test_an_invite_expires_at_its_second() -> None:
    store = invited(max_uses=2, expires=1000.0)
    redeem(store, A, now=999.9)
    with pytest.raises(NotPermittedError, match="expired at 1970-01-01 00:16 UTC"):
        redeem(store, B, now=1000.0)


def test_a_revoked_invite_is_useless_and_its_nodes_stay() -> None:
    store = invited(max_uses=2)
    redeem(store, A)
    assert store.invites.revoke("inv") and not store.invites.revoke("other")
    with pytest.raises(NotPermittedError, match="revoked"):
        redeem(store, B)
    assert store.invites.member(A) is not None


def test_a_database_of_a_release_that_kept_no_texts_is_opened_and_keeps_them(
    tmp_path: Path,
) -> None:
    store = Store.open(tmp_path)
    store.close()
    with sqlite3.connect(tmp_path / DATABASE_NAME) as connection:
        connection.execute("DROP TABLE written")
    store = Store.open(tmp_path)
    before = store.load(RULES, RUN)
    known = Written(round=3, node_id=A, texts=("one\ntwo", "three"))
    after = replace(before, written=(known, replace(known, round=4, texts=(), why_not="full")))
    store.save(before, after, now=1.0)
    store.save(after, replace(after, written=after.written[1:]), now=2.0)
    store.close()
    again = Store.open(tmp_path)
    assert again.load(RULES, RUN).written == after.written[1:]
    again.close()
