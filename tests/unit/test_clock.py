"""The coordinator's clock stands still while its process is stopped, and nobody is given up for it."""

import asyncio

import pytest

from coordinator.driver import (
    LONGEST_GAP_SECONDS,
    TICK_SECONDS,
    UNNOTICED_SECONDS,
    Driver,
    LoopClock,
    seconds_since_boot,
)
from coordinator.store import Store
from coordinator.swarm.events import HeartbeatSeen
from coordinator.swarm.members import MemberState
from coordinator.swarm.transition import initial_state
from lab.simulation.virtual_time import run_in_virtual_time
from protocol.wire.channel import RETRY_CAP_SECONDS
from tests.unit.test_driver import RULES, RUN, START, A, B, attach

HOUR = 3600.0
LEASE = RULES.lease_seconds


class Source:
    """A machine's clock that moves when the test says so."""

    def __init__(self) -> None:
        self.seconds = 50_000.0

    def __call__(self) -> float:
        return self.seconds


def running(source: Source, clock: LoopClock, seconds: float) -> None:
    """Lets time pass as it does while the process runs: with a look at the clock at each tick."""
    until = source.seconds + seconds
    while source.seconds < until:
        source.seconds = min(until, source.seconds + TICK_SECONDS)
        clock.now()


def test_time_for_which_the_process_was_stopped_does_not_count() -> None:
    source = Source()
    clock = LoopClock(starts_at=100.0, source=source)
    running(source, clock, 30.0)
    assert clock.now() == pytest.approx(130.0)
    source.seconds += HOUR
    assert clock.now() == pytest.approx(130.0 + TICK_SECONDS)
    running(source, clock, 10.0)
    assert clock.now() == pytest.approx(140.0 + TICK_SECONDS)
    assert clock.take_slept() == pytest.approx(HOUR - TICK_SECONDS)
    assert clock.take_slept() == 0.0


def test_time_in_which_nobody_can_be_heard_does_not_count_and_is_told_when_that_is_over() -> None:
    source, is_deaf = Source(), False
    clock = LoopClock(starts_at=100.0, source=source, hears_nobody=lambda: is_deaf)
    running(source, clock, 30.0)
    is_deaf = True
    running(source, clock, 60.0)
    source.seconds += HOUR
    assert clock.now() == pytest.approx(130.0)
    assert clock.take_slept() == 0.0
    is_deaf = False
    running(source, clock, 10.0)
    assert clock.now() == pytest.approx(140.0)
    assert clock.take_slept() == pytest.approx(60.0 + HOUR)


def test_a_busy_process_is_not_taken_for_a_stopped_one() -> None:
    source = Source()
    clock = LoopClock(starts_at=0.0, source=source)
    for _ in range(100):
        source.seconds += LONGEST_GAP_SECONDS
        clock.now()
    assert clock.now() == pytest.approx(100 * LONGEST_GAP_SECONDS)
    assert clock.take_slept() == 0.0


def test_who_waits_for_nothing_or_for_long_looks_at_the_clock_all_the_same() -> None:
    async def wait() -> tuple[float, float]:
        clock, changed = LoopClock(starts_at=7.0), asyncio.Event()
        for time in (None, 2 * HOUR, None):
            for _ in range(20):
                await clock.wait_until(time, changed)
        return clock.now(), clock.take_slept()

    assert run_in_virtual_time(wait()) == (pytest.approx(7.0 + 60 * TICK_SECONDS), 0.0)


def test_the_clock_of_the_machine_goes_on() -> None:
    first = seconds_since_boot()
    assert 0 < first <= seconds_since_boot()


@pytest.mark.parametrize("is_heard_first", [False, True])
async def test_after_a_sleep_nobody_is_given_up_and_all_may_be_in_their_longest_pause(
    is_heard_first: bool,
) -> None:
    source, slept, has_slept = Source(), [], asyncio.Event()

    def on_slept(seconds: float) -> None:
        slept.append(seconds)
        has_slept.set()

    clock = LoopClock(starts_at=0.0, source=source)
    driver = Driver(
        state=initial_state(RULES, RUN),
        store=Store.in_memory(),
        clock=clock,
        on_slept=on_slept,
    )
    session, _ = await attach(driver, A), await attach(driver, B)
    running(source, clock, LEASE - 2)
    source.seconds += HOUR
    if is_heard_first:  # what waits in the sockets may be read before the clock's turn comes
        await driver.apply(
            HeartbeatSeen(node_id=A, session_id=session, outer_round=0, outer_digest=START)
        )
    else:
        task = asyncio.create_task(driver.run_clock())
        await has_slept.wait()
        await driver.settled()
        task.cancel()
    assert slept == [pytest.approx(HOUR - TICK_SECONDS)]
    longest = clock.now() + LEASE + RETRY_CAP_SECONDS
    assert driver.state.members[B].lease_until == longest
    assert driver.state.members[A].lease_until == (
        clock.now() + LEASE if is_heard_first else longest
    )
    running(source, clock, LEASE + RETRY_CAP_SECONDS)
    await driver.apply(
        HeartbeatSeen(node_id=A, session_id=session, outer_round=0, outer_digest=START)
    )
    states = [member.state for _, member in sorted(driver.state.members.items())]
    assert states == [MemberState.READY, MemberState.LOST]  # who does not come back is given up


async def test_a_sleep_that_no_call_outlasts_lengthens_no_lease() -> None:
    source = Source()
    clock = LoopClock(starts_at=0.0, source=source)
    driver = Driver(state=initial_state(RULES, RUN), store=Store.in_memory(), clock=clock)
    session, _ = await attach(driver, A), await attach(driver, B)
    source.seconds += UNNOTICED_SECONDS
    await driver.apply(
        HeartbeatSeen(node_id=A, session_id=session, outer_round=0, outer_digest=START)
    )
    assert driver.state.members[B].lease_until == LEASE


@pytest.mark.parametrize("num_turns", range(4))
async def test_a_clock_that_is_ended_in_the_moment_of_a_change_ends(num_turns: int) -> None:
    clock, changed = LoopClock(starts_at=0.0), asyncio.Event()
    waiting = asyncio.create_task(clock.wait_until(None, changed))
    await asyncio.sleep(0)
    changed.set()
    for _ in range(num_turns):
        await asyncio.sleep(0)
    if waiting.cancel():  # else it has returned already
        with pytest.raises(asyncio.CancelledError):
            await waiting
