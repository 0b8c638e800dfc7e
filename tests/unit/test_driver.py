"""The driver: durable before told, told once, and told what holds when a session subscribes."""

import asyncio
from dataclasses import replace

import pytest

from coordinator.driver import Driver, LoopClock
from coordinator.store import Store
from coordinator.streams import MAX_UNREAD, Stream
from coordinator.swarm.events import Attached, Detached, HeartbeatSeen, Reported
from coordinator.swarm.members import MemberState
from coordinator.swarm.transition import initial_state
from protocol.errors import SessionEndedError, SystemRefusedError
from protocol.wire.messages import (
    Applied,
    Evaluated,
    EvaluationAsked,
    Message,
    ParticipantsDeparted,
    Reduced,
    RefetchAsked,
    RosterChanged,
    RosterTold,
    RoundCommitted,
    RoundOpened,
    RunFinished,
)
from protocol.wire.rounds import (
    ContributionDigest,
    Contributor,
    CorpusSummary,
    Digest,
    NodeId,
    PeerAddress,
)
from tests.unit.swarm_scene import PLAIN_RULES

LAYOUT = replace(PLAIN_RULES.layout, fragment_elements=(256,))
RULES = replace(PLAIN_RULES, total_rounds=1, layout=LAYOUT)
RUN = Digest(b"\x99" * 32)
START, END = Digest(b"\0" * 32), Digest(b"\1" * 32)
A, B = NodeId("a" * 32), NodeId("b" * 32)


class HandClock:
    """Time that moves when the test says so, and jumps to what run_clock waits for."""

    def __init__(self) -> None:
        self.time = 0.0
        self.slept = 0.0
        self.is_idle = asyncio.Event()

    def now(self) -> float:
        return self.time

    def take_slept(self) -> float:
        slept, self.slept = self.slept, 0.0
        return slept

    async def wait_until(self, time: float | None, changed: asyncio.Event) -> None:
        if time is None:
            self.is_idle.set()
            await changed.wait()
        else:
            self.time = time
            await asyncio.sleep(0)


class FullStore(Store):
    """A store whose disk is full, from when it is told."""

    is_full = False

    def commit(self) -> None:
        if self.is_full:
            self._database._end()
            raise SystemRefusedError("the disk is full")
        super().commit()


def new_driver(store: Store | None = None) -> Driver:
    return Driver(
        state=initial_state(RULES, RUN), store=store or Store.in_memory(), clock=HandClock()
    )


def move_time(driver: Driver, to: float) -> None:
    assert isinstance(driver.clock, HandClock)
    driver.clock.time = to


async def attach(driver: Driver, node_id: NodeId, *, outer: tuple[int, Digest] = (0, START)) -> int:
    await driver.apply(
        Attached(
            node_id=node_id,
            node_name=f"node-{node_id[0]}",
            address=PeerAddress(public_key=b"k" * 32, multiaddrs=()),
            device="cpu",
            num_ranks=1,
            version="0",
            run_digest=RUN,
            layout=RULES.layout,
            codecs=RULES.codecs,
            corpus=CorpusSummary(digest=START, num_samples=100, num_bytes=1000),
            outer_round=outer[0],
            outer_digest=outer[1],
        )
    )
    return driver.state.members[node_id].session_id


def unread(stream: Stream) -> list[Message]:
    """Everything that waits in a stream that has not ended; never blocks."""
    deliveries = []
    while stream.num_unread:
        coroutine = stream.next()
        with pytest.raises(StopIteration) as result:
            coroutine.send(None)
        deliveries.append(result.value.value)
    return deliveries


def kinds(stream: Stream) -> list[type]:
    return [type(delivery) for delivery in unread(stream)]


async def opened() -> tuple[Driver, int, int]:
    """A driver whose round 1 is open, with the sessions of A and B. A was asked to evaluate."""
    driver = new_driver()
    return driver, await attach(driver, A), await attach(driver, B)


async def void(driver: Driver) -> None:
    """Brings round 1 to its commit: there was nothing to reduce, so it is void."""
    await driver.apply(
        Reported(
            node_id=A,
            round=1,
            report=Reduced(slice_index=0, digest=None, contributors=(), contributions=()),
        )
    )


async def test_nothing_is_told_and_nothing_changes_before_it_is_durable() -> None:
    store = FullStore.in_memory()
    driver = new_driver(store)
    stream = driver.subscribe(A, await attach(driver, A))
    unread(stream)
    before = driver.state
    store.is_full = True
    with pytest.raises(SystemRefusedError, match="disk is full"):
        await attach(driver, B)
    assert driver.state is before
    assert kinds(stream) == []
    store.is_full = False
    await attach(driver, B)
    assert kinds(stream) == [RosterChanged, RoundOpened, EvaluationAsked]


async def test_a_plan_goes_to_its_participants_and_a_roster_to_everyone() -> None:
    driver, session_a, session_b = await opened()
    to_a, to_b = driver.subscribe(A, session_a), driver.subscribe(B, session_b)
    unread(to_a), unread(to_b)
    newcomer = NodeId("c" * 32)
    to_c = driver.subscribe(newcomer, await attach(driver, newcomer))
    (change,) = unread(to_a)
    assert isinstance(change, RosterChanged)
    assert ([m.node_id for m in change.joined], change.gone) == ([newcomer], ())
    assert unread(to_b)[0] is change, "it is made once for all"
    assert kinds(to_c) == [RosterTold]
    await driver.apply(Detached(node_id=B, session_id=session_b, reason=""))
    change, _ = to_a_told = unread(to_a)
    assert list(map(type, to_a_told)) == [RosterChanged, ParticipantsDeparted]
    assert isinstance(change, RosterChanged) and (change.joined, change.gone) == ((), (B,))
    assert kinds(to_c) == [RosterChanged]


async def test_a_participant_that_subscribes_late_gets_the_plan_with_the_time_that_is_left() -> (
    None
):
    driver, session_a, session_b = await opened()
    await driver.apply(Detached(node_id=B, session_id=session_b, reason=""))
    move_time(driver, 10.0)
    roster, plan, departed, evaluation = unread(driver.subscribe(A, session_a))
    assert isinstance(roster, RosterTold) and [m.node_id for m in roster.members] == [A]
    assert isinstance(plan, RoundOpened)
    assert (plan.plan.train_seconds, plan.plan.commit_seconds) == (50.0, 70.0)
    assert departed == ParticipantsDeparted(round=1, node_ids=(B,))
    assert evaluation == EvaluationAsked(round=0)


async def test_who_subscribes_while_a_round_is_applied_gets_its_commit() -> None:
    driver, session_a, session_b = await opened()
    share = (Contributor(node_id=A, samples=10, tokens=80),)
    await driver.apply(
        Reported(
            node_id=A,
            round=1,
            report=Reduced(
                slice_index=0,
                digest=END,
                contributors=share,
                contributions=(ContributionDigest(bytes(16)),),
            ),
        )
    )
    await driver.apply(Detached(node_id=B, session_id=session_b, reason=""))
    newcomer = NodeId("c" * 32)
    for node_id, session_id in ((A, session_a), (newcomer, await attach(driver, newcomer))):
        _, told, *_ = unread(driver.subscribe(node_id, session_id))
        assert isinstance(told, RoundCommitted)
        assert (told.commit.round, told.commit.slices[0].digest) == (1, END)


async def test_who_subscribes_after_the_end_is_told_of_it() -> None:
    driver, session_a, _ = await opened()
    await void(driver)
    for node_id in (A, B):
        await driver.apply(Reported(node_id=node_id, round=1, report=Applied(outer_digest=START)))
    evaluating = driver.state.evaluating
    assert evaluating is not None and evaluating.round == 1
    (evaluator,) = evaluating.node_ids
    await driver.apply(
        Reported(node_id=evaluator, round=1, report=Evaluated(held_out_loss=1.0, tokens=8))
    )
    roster, finished = unread(driver.subscribe(A, session_a))
    assert isinstance(roster, RosterTold)
    assert isinstance(finished, RunFinished) and finished.outer_digest == START


async def test_a_diverged_node_is_told_to_refetch_whenever_it_subscribes() -> None:
    driver, session_a, _ = await opened()
    await driver.apply(
        HeartbeatSeen(node_id=A, session_id=session_a, outer_round=0, outer_digest=END)
    )
    assert driver.state.members[A].state is MemberState.DIVERGED
    for _ in range(2):
        *_, refetch = unread(driver.subscribe(A, session_a))
        assert isinstance(refetch, RefetchAsked)
        assert (refetch.round, refetch.outer_digest) == (0, START)


async def test_a_newer_subscription_and_a_newer_session_end_the_older_stream_for_good() -> None:
    driver, session_a, _ = await opened()
    first = driver.subscribe(A, session_a)
    second = driver.subscribe(A, session_a)
    newer_session = await attach(driver, A)
    for ended in (first, second, first):
        with pytest.raises(SessionEndedError, match=f"session {session_a} "):
            await ended.next()
    driver.unsubscribe(second)
    third = driver.subscribe(A, newer_session)
    driver.unsubscribe(second)
    unread(third)
    await attach(driver, NodeId("c" * 32))
    assert kinds(third) == [RosterChanged], "an ended stream must not take the newer one with it"
    with pytest.raises(SessionEndedError):
        driver.subscribe(A, session_a)


async def test_a_session_that_does_not_read_ends_and_the_others_go_on() -> None:
    driver, session_a, session_b = await opened()
    slow, quick = driver.subscribe(A, session_a), driver.subscribe(B, session_b)
    newcomer = NodeId("c" * 32)
    for _ in range(MAX_UNREAD // 2):
        session_c = await attach(driver, newcomer)
        await driver.apply(Detached(node_id=newcomer, session_id=session_c, reason=""))
        unread(quick)
    await attach(driver, newcomer)
    assert kinds(quick) == [RosterChanged]
    with pytest.raises(SessionEndedError, match="unread"):
        await slow.next()


async def test_the_clock_gives_up_the_silent_and_then_waits_for_events() -> None:
    driver = new_driver()
    await attach(driver, A)
    clock = driver.clock
    assert isinstance(clock, HandClock)
    task = asyncio.create_task(driver.run_clock())
    await clock.is_idle.wait()
    assert driver.state.members[A].state is MemberState.LOST
    assert clock.time == RULES.lease_seconds
    await attach(driver, A)
    clock.is_idle.clear()
    await clock.is_idle.wait()
    assert driver.state.members[A].state is MemberState.LOST
    assert clock.time == 2 * RULES.lease_seconds
    task.cancel()


async def test_a_clock_that_cannot_save_fails_loudly() -> None:
    store = FullStore.in_memory()
    driver = new_driver(store)
    await attach(driver, A)
    store.is_full = True
    with pytest.raises(SystemRefusedError):
        await driver.run_clock()


async def test_the_first_change_that_the_disk_refuses_ends_the_clock_without_a_deadline() -> None:
    for is_event in (True, False):
        store = FullStore(Store.in_memory()._database)
        driver = new_driver(store)
        clock = asyncio.create_task(driver.run_clock())
        await asyncio.sleep(0)  # it waits for something to happen, and no deadline is set
        store.is_full = True
        with pytest.raises(SystemRefusedError):
            if is_event:
                await attach(driver, A)
            else:
                await driver.write(refused)
        with pytest.raises(SystemRefusedError, match="the disk is full"):
            await clock
        assert not driver.is_keeping_time


def refused() -> None:
    raise SystemRefusedError("the disk is full")


async def test_how_long_a_change_took_is_told_by_a_clock_that_stands_still_in_a_stopped_process() -> (
    None
):
    """Else a coordinator that was stopped for a minute would find fault with its disk."""
    driver = new_driver()
    heard: list[float] = []
    driver.on_write = heard.append
    clock = driver.clock
    assert isinstance(clock, HandClock)

    def takes_seconds() -> None:
        clock.time += 4.0

    await driver.write(takes_seconds)
    await driver.write(lambda: None)
    assert heard == [4.0, 0.0]


async def test_a_change_that_the_disk_takes_waits_for_the_batch_before_it_and_outlives_its_caller() -> (
    None
):
    driver = new_driver()
    done: list[str] = []
    task = asyncio.create_task(driver.write(lambda: done.append("change")))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await driver.settled()
    assert done == ["change"]


async def test_the_loops_clock_goes_on_from_where_it_was_saved() -> None:
    clock = LoopClock(starts_at=1000.0)
    changed = asyncio.Event()
    assert 1000.0 <= clock.now() < 1010.0
    await clock.wait_until(1000.02, changed)
    assert clock.now() >= 1000.02
    changed.set()
    await clock.wait_until(None, changed)
    await clock.wait_until(5000.0, changed)
    assert clock.now() < 1100.0


async def test_a_recovered_driver_goes_on_where_the_one_before_died() -> None:
    driver, session_a, _ = await opened()
    state = driver.store.load(RULES, RUN)
    recovered = Driver(state=state, store=driver.store, clock=HandClock())
    assert replace(recovered.state, members={}) == replace(driver.state, members={})
    assert kinds(recovered.subscribe(A, session_a)) == [RosterTold, RoundOpened, EvaluationAsked]
