"""Where events and time meet the core: stepped together, durable by one commit, then told and answered.

Events that arrive while a commit is on its way to the disk wait for the next one and share it: the
disk is waited for once for many calls, and the event loop does not wait with them. One batch is on
its way at a time, so steps are serial without a lock, and no answer or action leaves before what
caused it is on the disk: not even a refusal, which may rest on a step that nobody has seen yet.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from coordinator.store import Store
from coordinator.streams import Stream, Streams
from coordinator.swarm.events import (
    Event,
    GoBack,
    QuarantineAsked,
    RulingAsked,
    Started,
    StreamBroken,
    Ticked,
    WithdrawalAsked,
    Woke,
)
from coordinator.swarm.members import Member
from coordinator.swarm.membership import require_session
from coordinator.swarm.state import SwarmState
from coordinator.swarm.transition import Transition, next_deadline, step
from protocol.errors import AtollError, SystemRefusedError
from protocol.wire.channel import DEADLINE_SECONDS, RETRY_CAP_SECONDS
from protocol.wire.rounds import NodeId

UNNOTICED_SECONDS = DEADLINE_SECONDS / 2
"""A coordinator that was stopped for less has answered all calls in time: no node has left it."""

MOST_IN_A_BATCH = 128
"""Events that share a commit at most: nothing else is read or sent while they are stepped."""

T = TypeVar("T")

Session = tuple[NodeId, int]
"""A node and the number of its session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """An event on its way into a batch, and where its caller waits."""

    event: Event
    session: Session | None  # must be the node's when the event is stepped
    answer: asyncio.Future[Transition]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Taken:
    """A step of a batch."""

    asked: _Asked | None  # None: the driver's own
    before: SwarmState
    transition: Transition


class Driver:
    """Holds the state and the sessions' streams.

    `watch` is told of every transition after it is durable, with the state before, and `on_slept`
    of seconds for which this process was stopped; for the log. `writer` is a thread that waits for
    the disk, and `reader` one that reads much of it; without them the event loop does.
    """

    def __init__(
        self,
        *,
        state: SwarmState,
        store: Store,
        clock: "Clock",
        watch: Callable[[SwarmState, Transition], None] | None = None,
        on_slept: Callable[[float], None] | None = None,
        writer: Executor | None = None,
        reader: Executor | None = None,
    ) -> None:
        self.store = store
        self.clock = clock
        self._state = state
        self._watch = watch
        self._on_slept = on_slept
        self._writer = writer
        self._reader = reader
        self._writing = asyncio.Lock()  # held from the first row of a transaction to its commit
        self._refused: SystemRefusedError | None = None  # by the disk; then time is over
        self._waiting: deque[_Asked] = deque()
        self._batches: asyncio.Task[None] | None = None  # takes what waits, as long as any does
        self._slept = 0.0  # seconds that the core has yet to be told of
        self.on_ruling_asked: Callable[[RulingAsked], None] = lambda asked: None
        """Hears what the core wants to be ruled: who makes rulings sets it."""
        self.on_write: Callable[[float], None] = lambda seconds: None
        """Hears after how long each change was durable."""
        self._streams = Streams(lambda: self._state)
        self._changed = asyncio.Event()
        self.is_keeping_time = False
        """Whether deadlines are kept: while `run_clock` runs."""
        self._has_begun = not state.members  # a run that goes on begins with Started
        self.may_be_cut_off: Callable[[], bool] = lambda: False
        """Whether our side of the network is down: nodes whose streams break may well live."""
        self._patient_until = 0.0  # broken streams are no sign of a death before

    @property
    def state(self) -> SwarmState:
        """The state, as durable."""
        return self._state

    async def apply(self, event: Event, *, session: Session | None = None) -> Transition:
        """Takes one step, in the order in which calls begin; returns once it is durable.

        `session` is whose event it is, if only its current session may tell it: whether it is that
        shows when the step is taken. Raises SessionEndedError when it is not, what the core refuses
        with, or SystemRefusedError when the disk does; in all cases nothing has happened.
        """
        return await self._ask(event, session)

    def _ask(self, event: Event, session: Session | None = None) -> asyncio.Future[Transition]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Transition] = loop.create_future()
        self._waiting.append(_Asked(event=event, session=session, answer=answer))
        if self._batches is None:
            self._batches = loop.create_task(self._take_batches())
        return answer

    async def settled(self) -> None:
        """Waits until nothing is on its way to the disk."""
        if self._batches is not None:
            await self._batches
        async with self._writing:
            pass

    async def _take_batches(self) -> None:
        try:
            while self._waiting:
                await self._take_batch()
        finally:
            self._batches = None

    async def _take_batch(self) -> None:
        """Steps what waits, saves it with one commit, and then tells and answers."""
        num_asked = min(len(self._waiting), MOST_IN_A_BATCH)
        batch = [self._waiting.popleft() for _ in range(num_asked)]
        now = self.clock.now()
        is_patient = self._note_sleep() > UNNOTICED_SECONDS
        taken: list[_Taken] = []
        refused: list[tuple[_Asked, Exception]] = []
        state = self._state
        if not self._has_begun:
            started = step(state, Started(), now)
            taken.append(_Taken(asked=None, before=state, transition=started))
            state = started.state
        if is_patient:  # before all else, or who could not be heard would be given up
            woke = step(state, Woke(pause_seconds=RETRY_CAP_SECONDS), now)
            taken.append(_Taken(asked=None, before=state, transition=woke))
            state = woke.state
        for asked in batch:
            if asked.answer.done():  # its caller has gone
                continue
            try:
                if asked.session is not None:
                    require_session(state, *asked.session)
                transition = step(state, asked.event, now)
            except Exception as error:  # of this event alone
                refused.append((asked, error))
            else:
                taken.append(_Taken(asked=asked, before=state, transition=transition))
                state = transition.state
        try:
            await self._save(*(one.transition.state for one in taken), now=now)
        except Exception as error:
            for asked in batch:  # nothing has happened, to none of them
                _refuse(asked, error)
            return
        self._has_begun = True
        if is_patient:
            self._patient_until = now + DEADLINE_SECONDS + RETRY_CAP_SECONDS
        self._slept = 0.0
        self._state = state
        try:
            self._tell(taken)
        finally:
            for one in taken:
                if one.asked is not None and not one.asked.answer.done():
                    one.asked.answer.set_result(one.transition)
            for asked, refusal in refused:
                _refuse(asked, refusal)
        self._changed.set()

    async def _save(self, *after: SwarmState, now: float) -> None:
        if changes := self.store.news(self._state, *after, now=now):
            async with self._on_disk():
                self.store.stage(changes, now=now)
                await _in_thread(self._writer, self.store.commit)

    async def write(self, change: Callable[[], T]) -> T:
        """Makes another change to the database, between two batches, and returns when it is durable.

        A caller that goes away does not end it: the next change must not begin before.
        """
        task = asyncio.ensure_future(self._written(change))
        task.add_done_callback(_look_away)
        return await asyncio.shield(task)

    async def _written(self, change: Callable[[], T]) -> T:
        async with self._on_disk():
            return await _in_thread(self._writer, change)

    async def aside(self, read: Callable[[], T]) -> T:
        """Reads much, while heartbeats go on."""
        return await _in_thread(self._reader, read)

    @asynccontextmanager
    async def _on_disk(self) -> AsyncIterator[None]:
        """One change at a time. The first that the disk refuses ends the time of this coordinator.

        It could tell nobody of anything any more, and whoever watches it can make room.
        """
        async with self._writing:
            began_at = self.clock.now()
            try:
                yield
                self.on_write(self.clock.now() - began_at)
            except SystemRefusedError as error:
                self._refused = error
                self._changed.set()
                raise

    def _note_sleep(self) -> float:
        """Seconds for which this process was stopped and that the core has yet to be told of."""
        slept = self.clock.take_slept()
        if slept and self._on_slept is not None:
            self._on_slept(slept)
        self._slept += slept
        return self._slept

    async def run_clock(self) -> None:
        """Applies Ticked whenever time alone can change something.

        Ends only by an error: its own, or the disk's, which refused a change.
        """
        self.is_keeping_time = True
        try:
            await self._keep_time()
        finally:
            self.is_keeping_time = False

    async def _keep_time(self) -> None:
        if not self._has_begun:
            await self.apply(Ticked())
        while True:
            self._changed.clear()
            if self._refused is not None:
                raise self._refused
            await self.clock.wait_until(next_deadline(self._state), self._changed)
            deadline = next_deadline(self._state)
            is_due = deadline is not None and deadline <= self.clock.now()
            if self._note_sleep() > UNNOTICED_SECONDS or is_due:
                await self.apply(Ticked())

    def session_of(self, node_id: NodeId, session_id: int) -> Member:
        """The member, if this is its session; raises SessionEndedError otherwise."""
        return require_session(self._state, node_id, session_id)

    def subscribe(self, node_id: NodeId, session_id: int) -> Stream:
        """A stream that begins with what holds now. An earlier stream of the node ends."""
        member = self.session_of(node_id, session_id)
        return self._streams.open(member, session_id, self.clock.now())

    def unsubscribe(self, stream: Stream) -> None:
        """Forgets a stream that nobody reads any more."""
        self._streams.close(stream)

    def stream_broken(self, stream: Stream) -> None:
        """Takes note that a stream's reader is gone, if no newer one has taken its place.

        When we were stopped for long, nodes that live have ended their streams too. What
        becomes of the note is nobody's to wait for: on a full disk the lease will end the session.
        """
        if not self._streams.is_current(stream):
            return
        has_slept = self._note_sleep() > UNNOTICED_SECONDS
        broken = StreamBroken(
            node_id=stream.node_id,
            session_id=stream.session_id,
            may_be_ours=has_slept
            or self.may_be_cut_off()
            or self.clock.now() < self._patient_until,
        )
        self._ask(broken).add_done_callback(_look_away)

    @property
    def has_streams(self) -> bool:
        """Whether anybody reads what it tells."""
        return self._streams.is_any

    def end_all(self, error: AtollError) -> None:
        """Ends every stream, because the coordinator stops."""
        self._streams.end_all(error)

    def _tell(self, taken: list[_Taken]) -> None:
        """Tells the sessions of the steps of a batch, each in its turn."""
        for one in taken:
            for action in one.transition.actions:
                match action:
                    case GoBack() | WithdrawalAsked() | QuarantineAsked():
                        self.on_ruling_asked(action)
                    case _:
                        self._streams.deliver(action, before=one.before)
            if self._watch is not None:
                self._watch(one.before, one.transition)


def _refuse(asked: _Asked, error: Exception) -> None:
    if not asked.answer.done():
        asked.answer.set_exception(error)


async def _in_thread(executor: Executor | None, work: Callable[[], T]) -> T:
    if executor is None:
        return work()
    return await asyncio.get_running_loop().run_in_executor(executor, work)


def _look_away(answer: asyncio.Future[Any]) -> None:
    """Nobody waits for the answer; asyncio would log an error that nobody has looked at."""
    if not answer.cancelled():
        answer.exception()


# The coordinator's time: seconds for which this process ran, so that nobody pays for its sleep.
#
# One that was stopped (a suspended laptop, a paused virtual machine, SIGSTOP) could hear nobody meanwhile. If
# that time counted, every lease would be over when it wakes. Likewise where a relay carries it that is away.

TICK_SECONDS = 1.0
"""The clock is looked at this often, whether or not anything is due: gaps are measured by it."""

LONGEST_GAP_SECONDS = 3.0
"""Between two looks at the clock; what is longer was a sleep, and counts as one tick."""

SHORTEST_SLEEP_SECONDS = 0.01
"""Bounds the clock's rate, should a tick at a deadline leave that deadline standing."""


class Clock(Protocol):
    """The coordinator's time, in seconds."""

    def now(self) -> float:
        """The time now; never goes back."""
        ...

    def take_slept(self) -> float:
        """Seconds that did not count since this was last asked."""
        ...

    async def wait_until(self, time: float | None, changed: asyncio.Event) -> None:
        """Returns at that time or earlier, and as soon as `changed` is set."""
        ...


def seconds_since_boot() -> float:
    """A clock that goes on while the machine is suspended, where there is one."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # Linux only
    return time.clock_gettime(clock)


class LoopClock:
    """Goes on from `starts_at` with `source`, and stands still while nobody could look at it.

    `source` is the event loop's time unless given; on a virtual-time loop as well. Gaps are seen
    as long as somebody waits in `wait_until`, as `Driver.run_clock` always does. Nor does time count while
    `hears_nobody`.
    """

    def __init__(
        self,
        *,
        starts_at: float,
        source: Callable[[], float] | None = None,
        hears_nobody: Callable[[], bool] = lambda: False,
    ) -> None:
        self._hears_nobody = hears_nobody
        self._source = source or asyncio.get_running_loop().time
        self._looked_at = self._source()
        self._offset = starts_at - self._looked_at
        self._slept = 0.0
        self._unheard = 0.0  # slept as well, and told once somebody may be heard again

    def now(self) -> float:
        """The time now."""
        looked_at = self._source()
        gap = looked_at - self._looked_at
        counted = gap if gap <= LONGEST_GAP_SECONDS else TICK_SECONDS
        if self._hears_nobody():
            self._unheard += gap
            self._offset -= gap
        else:
            self._slept += gap - counted + self._unheard
            self._offset -= gap - counted
            self._unheard = 0.0
        self._looked_at = looked_at
        return self._offset + looked_at

    def take_slept(self) -> float:
        """Seconds that did not count since this was last asked."""
        self.now()
        slept, self._slept = self._slept, 0.0
        return slept

    async def wait_until(self, time: float | None, changed: asyncio.Event) -> None:
        """Returns at that time or after a tick, and as soon as `changed` is set."""
        left = TICK_SECONDS if time is None else min(time - self.now(), TICK_SECONDS)
        # Not wait_for: in Python 3.11 it forgets a cancellation that comes with the change itself,
        # and a coordinator told to stop while its nodes leave would wait for its clock for ever.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(left, SHORTEST_SLEEP_SECONDS)):
                await changed.wait()
        self.now()
