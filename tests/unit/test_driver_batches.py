"""The driver's batches: one commit for calls that come together, and the same as one by one."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.driver import MOST_IN_A_BATCH, Driver
from coordinator.store import Store
from coordinator.streams import FEW_SESSIONS
from coordinator.swarm.events import Detached, Event, HeartbeatSeen, Reported, ReportedTogether
from coordinator.swarm.members import MemberState
from coordinator.swarm.membership import roster_of
from coordinator.swarm.state import SwarmState
from coordinator.swarm.transition import initial_state, step
from protocol.errors import ProtocolMismatchError, SessionEndedError, SystemRefusedError
from protocol.wire.messages import Held, RosterChanged, RosterTold, RoundCommitted, RoundOpened
from protocol.wire.rounds import NodeId
from tests.unit import test_store as played
from tests.unit.swarm_scene import of_kind
from tests.unit.test_driver import END, RULES, RUN, START, A, B, HandClock, attach, unread

if TYPE_CHECKING:
    from coordinator.streams import Stream

MANY = [NodeId(f"{number:032}") for number in range(3 * MOST_IN_A_BATCH)]


class CountingStore(Store):
    """Counts what the disk is waited for."""

    num_commits = 0
    is_full = False

    def commit(self) -> None:
        self.num_commits += 1
        if self.is_full:
            self._database._end()
            raise SystemRefusedError("the disk is full")
        super().commit()


class SlowStore(CountingStore):
    """A disk that takes until the test lets it; for a driver with a thread that waits for it."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.is_free = threading.Event()
        self.is_free.set()

    def commit(self) -> None:
        self.is_free.wait(timeout=60)  # a test that fails must end all the same
        super().commit()


@pytest.fixture
def writer() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(max_workers=1) as executor:
        yield executor


def driver_of(store: Store, writer: ThreadPoolExecutor | None = None) -> Driver:
    return Driver(state=store.load(RULES, RUN), store=store, clock=HandClock(), writer=writer)


async def turns_of_the_loop(number: int = 20) -> None:
    """Lets everything happen that waits for nothing but its turn."""
    for _ in range(number):
        await asyncio.sleep(0)


async def test_calls_that_come_together_share_a_commit() -> None:
    store = CountingStore.in_memory()
    driver = driver_of(store)
    await asyncio.gather(*(attach(driver, node_id) for node_id in MANY[:MOST_IN_A_BATCH]))
    assert store.num_commits == 1
    assert len(store.load(RULES, RUN).members) == MOST_IN_A_BATCH


async def test_a_batch_is_bounded() -> None:
    store = CountingStore.in_memory()
    driver = driver_of(store)
    await asyncio.gather(*(attach(driver, node_id) for node_id in MANY))
    assert store.num_commits == len(MANY) / MOST_IN_A_BATCH
    assert len(store.load(RULES, RUN).members) == len(MANY)


async def test_heartbeats_that_change_nothing_wait_for_no_disk() -> None:
    store = CountingStore.in_memory()
    driver = driver_of(store)
    session_a, session_b = await attach(driver, A), await attach(driver, B)
    before = store.num_commits
    beats = [
        HeartbeatSeen(node_id=node_id, session_id=session_id, outer_round=0, outer_digest=START)
        for node_id, session_id in ((A, session_a), (B, session_b))
    ]
    await asyncio.gather(*map(driver.apply, 20 * beats))
    assert store.num_commits == before


async def test_heartbeats_are_answered_while_an_enrolment_waits_for_the_disk_or_a_page_is_read(
    writer: ThreadPoolExecutor,
) -> None:
    store = Store.in_memory()
    with ThreadPoolExecutor(max_workers=1) as reader:
        driver = Driver(
            state=store.load(RULES, RUN),
            store=store,
            clock=HandClock(),
            writer=writer,
            reader=reader,
        )
        session_id = await attach(driver, A)
        beat = HeartbeatSeen(node_id=A, session_id=session_id, outer_round=0, outer_digest=START)
        for begin in (driver.write, driver.aside):
            is_free = threading.Event()
            busy = asyncio.create_task(begin(partial(is_free.wait, 60)))
            await turns_of_the_loop()
            beats = asyncio.create_task(driver.apply(beat))
            await turns_of_the_loop()
            assert beats.done() and not busy.done()
            is_free.set()
            assert await busy, "it was let go by the test and not by its own patience"


async def test_a_change_waits_for_the_one_before_it_even_when_its_caller_has_gone(
    writer: ThreadPoolExecutor,
) -> None:
    store = Store.in_memory()
    driver = driver_of(store, writer)
    is_free, ended = threading.Event(), list[str]()

    def slow() -> None:
        is_free.wait(timeout=60)
        ended.append("first")

    first = asyncio.create_task(driver.write(slow))
    await turns_of_the_loop()
    first.cancel()
    await turns_of_the_loop()
    assert driver._writing.locked(), "or the loop itself would wait for the transaction's end"
    second = asyncio.create_task(attach(driver, A))
    await turns_of_the_loop()
    assert first.cancelled() and not second.done()
    is_free.set()
    await second
    assert ended == ["first"] and A in driver.state.members


async def test_who_comes_while_the_disk_is_busy_shares_the_next_commit(
    writer: ThreadPoolExecutor,
) -> None:
    store = SlowStore.in_memory()
    driver = driver_of(store, writer)
    store.is_free.clear()
    first = asyncio.create_task(attach(driver, A))
    await turns_of_the_loop()
    others = [asyncio.create_task(attach(driver, node_id)) for node_id in MANY[:9]]
    await turns_of_the_loop()
    assert not driver.state.members, "what is not on the disk is shown to nobody"
    assert not any(call.done() for call in (first, *others))
    store.is_free.set()
    await asyncio.gather(first, *others)
    assert store.num_commits == 2
    assert len(driver.state.members) == 10


async def test_a_stream_that_begins_while_the_disk_is_busy_misses_nothing_and_hears_nothing_twice(
    writer: ThreadPoolExecutor,
) -> None:
    store = SlowStore.in_memory()
    driver = driver_of(store, writer)
    session_a = await attach(driver, A)
    store.is_free.clear()
    joining = asyncio.create_task(attach(driver, B))  # opens round 1
    await turns_of_the_loop()
    stream = driver.subscribe(A, session_a)
    (roster,) = (told for told in unread(stream) if isinstance(told, RosterTold))
    assert [member.node_id for member in roster.members] == [A]
    store.is_free.set()
    await joining
    news = unread(stream)
    assert [type(told) for told in news].count(RoundOpened) == 1
    (change,) = (told for told in news if isinstance(told, RosterChanged))
    assert [member.node_id for member in change.joined] == [B]


async def test_a_refusal_waits_for_the_commit_that_it_rests_on(writer: ThreadPoolExecutor) -> None:
    store = SlowStore.in_memory()
    driver = driver_of(store, writer)
    session_a = await attach(driver, A)
    store.is_free.clear()
    busy = asyncio.create_task(attach(driver, B))
    await turns_of_the_loop()
    leaves = asyncio.create_task(
        driver.apply(Detached(node_id=A, session_id=session_a, reason="done"))
    )
    beat = HeartbeatSeen(node_id=A, session_id=session_a, outer_round=0, outer_digest=START)
    refused = asyncio.create_task(driver.apply(beat))
    await turns_of_the_loop()
    store.is_free.set()
    await busy
    await leaves
    with pytest.raises(SessionEndedError):
        await refused
    assert driver.state.members[A].state is MemberState.LEFT


async def test_a_refusal_is_not_told_when_what_it_rests_on_is_lost() -> None:
    store = CountingStore.in_memory()
    driver = driver_of(store)
    session_a = await attach(driver, A)
    store.is_full = True
    beat = HeartbeatSeen(node_id=A, session_id=session_a, outer_round=0, outer_digest=START)
    results = await asyncio.gather(
        driver.apply(Detached(node_id=A, session_id=session_a, reason="")),
        driver.apply(beat),  # in an ended session, as it seems
        return_exceptions=True,
    )
    assert [type(result) for result in results] == [SystemRefusedError, SystemRefusedError]
    store.is_full = False
    await driver.apply(beat)
    assert driver.state.members[A].state is MemberState.READY


async def test_a_report_of_a_session_that_ends_in_the_same_batch_is_refused() -> None:
    driver = driver_of(CountingStore.in_memory())
    session_a, _ = await attach(driver, A), await attach(driver, B)
    assert driver.state.open_round is not None
    held = Reported(node_id=A, round=1, report=Held(slice_index=0, digest=END))
    _, refused = await asyncio.gather(
        attach(driver, A),
        driver.apply(ReportedTogether(reports=(held,)), session=(A, session_a)),
        return_exceptions=True,
    )
    assert isinstance(refused, SessionEndedError)
    assert driver.state.open_round is not None and A not in driver.state.open_round.held


async def test_what_the_core_refuses_one_call_leaves_the_others_of_its_batch_alone() -> None:
    store = CountingStore.in_memory()
    driver = driver_of(store)
    stranger = replace(played.attached(B), run_digest=END)
    results = await asyncio.gather(
        attach(driver, A), driver.apply(stranger), attach(driver, MANY[0]), return_exceptions=True
    )
    assert [type(result) for result in results] == [int, ProtocolMismatchError, int]
    assert set(driver.state.members) == {A, MANY[0]}
    assert store.num_commits == 1


async def test_a_call_that_is_given_up_before_its_turn_changes_nothing(
    writer: ThreadPoolExecutor,
) -> None:
    store = SlowStore.in_memory()
    driver = driver_of(store, writer)
    store.is_free.clear()
    busy = asyncio.create_task(attach(driver, A))
    await turns_of_the_loop()
    given_up = asyncio.create_task(attach(driver, B))
    await turns_of_the_loop()
    given_up.cancel()
    store.is_free.set()
    await busy
    await driver.settled()
    assert set(driver.state.members) == {A}


BATCHES = st.lists(st.integers(1, len(played.TWO_ROUNDS)), max_size=len(played.TWO_ROUNDS))


def cut(events: list[Event], sizes: list[int]) -> list[list[Event]]:
    """The events in batches of these sizes, and the rest in one."""
    batches, at = [], 0
    for size in (*sizes, len(events)):
        batches.append(events[at : at + size])
        at += size
    return [batch for batch in batches if batch]


@given(sizes=BATCHES)
def test_a_batch_comes_to_the_same_as_its_events_one_by_one(sizes: list[int]) -> None:
    async def told(
        batches: list[list[Event]],
    ) -> tuple[SwarmState, SwarmState, list[Any], object]:
        store = Store.in_memory()
        driver = Driver(
            state=initial_state(played.RULES, played.RUN), store=store, clock=HandClock()
        )
        commits: list[Any] = []
        for batch in batches:
            results = await asyncio.gather(*map(driver.apply, batch))
            commits += [a for one in results for a in one.actions]
        return driver.state, store.load(played.RULES, played.RUN), commits, store.latest_rounds(99)

    one_by_one = asyncio.run(told([[event] for event in played.TWO_ROUNDS]))
    assert of_kind(one_by_one[2], RoundCommitted)
    assert asyncio.run(told(cut(played.TWO_ROUNDS, sizes))) == one_by_one


def test_all_rounds_that_close_in_one_batch_are_kept() -> None:
    """The state remembers the latest ones only, so those in between must not be left out."""
    before = initial_state(replace(played.RULES, total_rounds=9), played.RUN)
    events: list[Event] = [played.attached(A), played.attached(B)]
    for number in range(1, 6):
        events += [*played.reports_up_to_commit(number), *played.applied(number)]
    states = [before]
    for event in events:
        states.append(step(states[-1], event, 1.0).state)
    assert (states[-1].committed_round, len(states[-1].recent)) == (5, 1)
    store = Store.in_memory()
    store.save(*states, now=1.0)
    closed = store.latest_rounds(99)
    assert [one.commit.round for one in closed] == [5, 4, 3, 2, 1]
    assert all(one.commit.outer_digest is not None for one in closed)


@given(
    is_batched=st.booleans(),
    turns=st.lists(st.tuples(st.sampled_from(MANY[:5]), st.sampled_from("jlst")), max_size=30),
)
def test_every_stream_knows_the_roster_once_it_may_be_told(
    is_batched: bool, turns: list[tuple[NodeId, str]]
) -> None:
    """Join, leave, subscribe, time: however changes gather in between, and whenever one began."""

    async def play() -> None:
        driver = driver_of(Store.in_memory())
        asked: dict[NodeId, asyncio.Task[int]] = {}
        known: dict[Stream, set[NodeId]] = {}
        for node_id, turn in turns:
            session = asked[node_id].result() if node_id in asked else 0
            if turn == "j":
                asked[node_id] = asyncio.create_task(attach(driver, node_id))
            elif turn == "l" and node_id in asked:
                del asked[node_id]
                await driver.apply(Detached(node_id=node_id, session_id=session, reason=""))
            elif turn == "s" and node_id in asked:
                known[driver.subscribe(node_id, session)] = set()
            elif turn == "t":
                driver._streams._roster_may_be_told()
            await turns_of_the_loop(1 if is_batched else 20)
            await driver.settled()
        driver._streams._roster_may_be_told()
        roster = {entry.node_id for entry in roster_of(driver.state)}
        for stream, members in known.items():
            if not driver._streams.is_current(stream):
                continue
            for place, told in enumerate(unread(stream)):
                if isinstance(told, RosterTold):
                    members.clear()
                    members.update(entry.node_id for entry in told.members)
                elif isinstance(told, RosterChanged):
                    members.difference_update(told.gone)
                    members.update(entry.node_id for entry in told.joined)
                elif (
                    isinstance(told, RoundOpened) and place > 1
                ):  # that of before may name who left
                    assert members >= set(told.plan.participants)
            assert members == roster

    with mock.patch.multiple("coordinator.streams", FEW_SESSIONS=1, ROSTER_SECONDS=3600.0):
        asyncio.run(play())


@mock.patch("coordinator.streams.ROSTER_SECONDS", 3600.0)  # however slow this machine is
async def test_many_sessions_are_not_told_of_each_node_that_joins() -> None:
    driver = driver_of(Store.in_memory())
    sessions = [await attach(driver, node_id) for node_id in MANY[: FEW_SESSIONS + 1]]
    streams = [driver.subscribe(n, s) for n, s in zip(MANY, sessions, strict=False)]
    for stream in streams:
        unread(stream)
    for node_id in MANY[FEW_SESSIONS + 1 :][:10]:
        await attach(driver, node_id)
    driver._streams._roster_may_be_told()
    changes = [told for told in unread(streams[0]) if isinstance(told, RosterChanged)]
    assert [len(change.joined) for change in changes] == [1, 9]
