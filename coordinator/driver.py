"""Where events meet the core: one step, made durable, then delivered to the sessions.

Nothing is awaited between a step and its save, and everything runs on one event loop; so steps are
serial without a lock, and no answer or action leaves before what caused it is on the disk.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from coordinator.clock import Clock
from coordinator.store import Store
from coordinator.swarm.actions import (
    Action,
    AskCommits,
    AskEvaluation,
    AskRefetch,
    EndSession,
    OpenSession,
    SendCommit,
    SendDeparted,
    SendFinished,
    SendIdle,
    SendPlan,
    SendResultOffered,
    SendRoster,
    SendTakeover,
)
from coordinator.swarm.events import Event, StreamBroken, Ticked, Woke
from coordinator.swarm.explain import explain
from coordinator.swarm.membership import require_session, roster_of
from coordinator.swarm.rounds import holders_of, plan_of
from coordinator.swarm.state import (
    Member,
    MemberState,
    Round,
    RoundPhase,
    SwarmState,
    last_sure_round,
)
from coordinator.swarm.takeover import takeover_of
from coordinator.swarm.transition import Transition, next_deadline, step
from coordinator.swarm.turn import is_present
from protocol.channel import DEADLINE_SECONDS, RETRY_CAP_SECONDS
from protocol.errors import AtollError, SessionEndedError
from protocol.rounds import NodeId, RosterEntry

MAX_UNREAD = 1000
"""Deliveries that may wait in a session; a node that reads slower than this is better off anew."""


UNNOTICED_SECONDS = DEADLINE_SECONDS / 2
"""A coordinator that was stopped for less has answered all calls in time: no node has left it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RosterNow:
    """The present members, in the order of their node ids."""

    members: tuple[RosterEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RosterDiffers:
    """What changed in the roster: a thousand nodes are not told of all others when one joins."""

    joined: tuple[RosterEntry, ...]
    gone: tuple[NodeId, ...]


Delivery = (
    RosterNow
    | RosterDiffers
    | SendPlan
    | SendCommit
    | SendDeparted
    | SendIdle
    | SendTakeover
    | SendResultOffered
    | AskCommits
    | AskEvaluation
    | AskRefetch
    | SendFinished
)


class Stream:
    """What one session has yet to be told."""

    def __init__(self, *, node_id: NodeId, session_id: int) -> None:
        self.node_id = node_id
        self.session_id = session_id
        self._unread: asyncio.Queue[Delivery | AtollError] = asyncio.Queue()

    async def next(self) -> Delivery:
        """Waits for the next delivery; raises SessionEndedError, or another reason, at the end."""
        item = await self._unread.get()
        if isinstance(item, AtollError):
            self._unread.put_nowait(item)  # an ended stream stays ended
            raise item
        return item

    @property
    def num_unread(self) -> int:
        """Deliveries that wait."""
        return self._unread.qsize()

    def put(self, delivery: Delivery) -> None:
        """Adds a delivery."""
        self._unread.put_nowait(delivery)

    def end(self, error: AtollError) -> None:
        """Ends the stream at once; what was not read is void."""
        while not self._unread.empty():
            self._unread.get_nowait()
        self._unread.put_nowait(error)


class Driver:
    """Holds the state and the sessions' streams.

    `watch` is told of every transition after it is durable, with the state before, and `on_slept`
    of seconds for which this process was stopped; for the log.
    """

    def __init__(
        self,
        *,
        state: SwarmState,
        store: Store,
        clock: Clock,
        watch: Callable[[SwarmState, Transition], None] | None = None,
        on_slept: Callable[[float], None] | None = None,
    ) -> None:
        self.store = store
        self.clock = clock
        self._state = state
        self._watch = watch
        self._on_slept = on_slept
        self._slept = 0.0  # seconds that the core has yet to be told of
        self._streams: dict[NodeId, Stream] = {}
        self._changed = asyncio.Event()
        self.is_keeping_time = False
        """Whether deadlines are kept: while `run_clock` runs."""
        self._is_ending = False
        self._patient_until = 0.0  # broken streams are no sign of a death before

    @property
    def state(self) -> SwarmState:
        """The state, as durable."""
        return self._state

    def apply(self, event: Event) -> Transition:
        """Takes one step.

        Raises what the core refuses with, or SystemRefusedError when the disk does; in both cases
        nothing has happened.
        """
        self._wake()
        return self._take(event)

    def _wake(self) -> None:
        """Gives the nodes time to come back when this process was stopped for long."""
        slept = self.clock.take_slept()
        if slept and self._on_slept is not None:
            self._on_slept(slept)
        self._slept += slept
        if self._slept > UNNOTICED_SECONDS:
            self._take(Woke(pause_seconds=RETRY_CAP_SECONDS))
            self._patient_until = self.clock.now() + DEADLINE_SECONDS + RETRY_CAP_SECONDS
        self._slept = 0.0

    def _take(self, event: Event) -> Transition:
        before = self._state
        now = self.clock.now()
        transition = step(before, event, now)
        self.store.save(before, transition.state, now=now)
        self._state = transition.state
        for action in transition.actions:
            self._deliver(action, before)
        if self._watch is not None:
            self._watch(before, transition)
        self._changed.set()
        return transition

    async def run_clock(self) -> None:
        """Applies Ticked whenever time alone can change something; ends only by an error."""
        self.is_keeping_time = True
        try:
            await self._keep_time()
        finally:
            self.is_keeping_time = False

    async def _keep_time(self) -> None:
        while True:
            self._changed.clear()
            await self.clock.wait_until(next_deadline(self._state), self._changed)
            self._wake()
            deadline = next_deadline(self._state)
            if deadline is not None and deadline <= self.clock.now():
                self.apply(Ticked())

    def session_of(self, node_id: NodeId, session_id: int) -> Member:
        """The member, if this is its session; raises SessionEndedError otherwise."""
        return require_session(self._state, node_id, session_id)

    def subscribe(self, node_id: NodeId, session_id: int) -> Stream:
        """A stream that begins with what holds now. An earlier stream of the node ends."""
        member = self.session_of(node_id, session_id)
        self._end(node_id, "its events are read by a newer call")
        stream = Stream(node_id=node_id, session_id=session_id)
        for delivery in self._what_holds_for(member):
            stream.put(delivery)
        self._streams[node_id] = stream
        return stream

    def unsubscribe(self, stream: Stream) -> None:
        """Forgets a stream that nobody reads any more."""
        if self._streams.get(stream.node_id) is stream:
            del self._streams[stream.node_id]

    def stream_broken(self, stream: Stream) -> None:
        """Takes note that a stream's reader is gone, if no newer one has taken its place.

        Not when we were stopped for long: then nodes that live have ended their streams too.
        """
        if self._streams.get(stream.node_id) is not stream or self._is_ending:
            return
        self._wake()
        if self.clock.now() >= self._patient_until:
            self.apply(StreamBroken(node_id=stream.node_id, session_id=stream.session_id))

    def end_all(self, error: AtollError) -> None:
        """Ends every stream, because the coordinator stops."""
        self._is_ending = True
        for stream in self._streams.values():
            stream.end(error)
        self._streams.clear()

    def _what_holds_for(self, member: Member) -> list[Delivery]:
        """What a session has to know that subscribes now, after whatever it missed."""
        state, now = self._state, self.clock.now()
        held: list[Delivery] = [self._roster()]
        if state.is_finished and state.outer_digest is not None:
            finished = SendFinished(
                round=state.committed_round,
                outer_digest=state.outer_digest,
                reason=explain(state, self.clock.now()),
            )
            held.append(finished)
        elif (open_round := state.open_round) is not None:
            participants = tuple(assignment.node_id for assignment in open_round.assignments)
            if open_round.commit is not None:
                held.append(SendCommit(commit=open_round.commit))
            elif member.node_id in participants:
                held.append(SendPlan(plan=plan_of(open_round, now)))
                held.extend(self._news_of(open_round, now))
        if state.evaluating is not None and state.evaluating.node_id == member.node_id:
            held.append(AskEvaluation(node_id=member.node_id, round=state.evaluating.round))
        if member.outer_round > state.committed_round:
            held.append(AskCommits(node_id=member.node_id, after_round=last_sure_round(state)))
        if (refetch := self._refetch_due(member)) is not None:
            held.append(refetch)
        return held

    def _news_of(self, current: Round, now: float) -> list[Delivery]:
        """What happened to the round since its plan was sent."""
        news: list[Delivery] = []
        participants = tuple(assignment.node_id for assignment in current.assignments)
        if departed := tuple(n for n in participants if not is_present(self._state, n)):
            news.append(SendDeparted(round=current.number, node_ids=departed))
        if idle := tuple(n for n, trained in current.trained.items() if trained.tokens == 0):
            news.append(SendIdle(round=current.number, node_ids=idle))
        for progress in current.slices:
            if progress.attempt:
                news.append(takeover_of(current.number, progress, now))
            if progress.is_offered and progress.digest is not None:
                offered = SendResultOffered(
                    round=current.number,
                    slice_index=progress.slice.index,
                    digest=progress.digest,
                    holder_ids=holders_of(self._state, current, progress),
                )
                news.append(offered)
        return news

    def _refetch_due(self, member: Member) -> AskRefetch | None:
        """What a member must fetch whose state cannot become the swarm's by replaying commits."""
        state = self._state
        if member.state is not MemberState.DIVERGED:
            return None
        reason = f"the state it holds at round {member.outer_round} is not the swarm's"
        if state.outer_digest is not None:
            return AskRefetch(
                node_id=member.node_id,
                round=state.committed_round,
                outer_digest=state.outer_digest,
                reason=reason,
            )
        if state.open_round is not None and state.open_round.phase is RoundPhase.APPLYING:
            # The nodes have yet to agree on the newest state; the one it builds on is certain.
            return AskRefetch(
                node_id=member.node_id,
                round=state.open_round.number - 1,
                outer_digest=state.open_round.base_digest,
                reason=reason,
            )
        return None

    def _roster(self) -> RosterNow:
        return RosterNow(members=roster_of(self._state))

    def _deliver(self, action: Action, before: SwarmState) -> None:
        match action:
            case OpenSession(node_id=node_id):
                self._end(node_id, "the node attached anew")
            case EndSession(node_id=node_id, reason=reason):
                self._end(node_id, reason)
            case SendRoster():
                self._send_roster_change(before)
            case SendPlan(plan=plan):
                self._send(action, plan.participants)
            case SendCommit() | SendFinished():
                self._send(action, tuple(self._streams))
            case SendDeparted(node_ids=concerned) | SendIdle(node_ids=concerned):
                participants = self._participants(action.round, before)
                self._send(action, tuple(n for n in participants if n not in concerned))
            case SendTakeover() | SendResultOffered():
                self._send(action, self._participants(action.round, before))
            case (
                AskEvaluation(node_id=node_id)
                | AskRefetch(node_id=node_id)
                | AskCommits(node_id=node_id)
            ):
                self._send(action, (node_id,))

    def _send_roster_change(self, before: SwarmState) -> None:
        was = {entry.node_id: entry for entry in roster_of(before)}
        now = {entry.node_id: entry for entry in roster_of(self._state)}
        change = RosterDiffers(
            joined=tuple(entry for node_id, entry in now.items() if was.get(node_id) != entry),
            gone=tuple(node_id for node_id in was if node_id not in now),
        )
        if change.joined or change.gone:
            self._send(change, tuple(self._streams))

    def _participants(self, number: int, before: SwarmState) -> tuple[NodeId, ...]:
        """Who takes part in a round that was in flight before the step or is after it."""
        participants = (
            assignment.node_id
            for state in (before, self._state)
            if state.open_round is not None and state.open_round.number == number
            for assignment in state.open_round.assignments
        )
        return tuple(dict.fromkeys(participants))

    def _send(self, delivery: Delivery, node_ids: tuple[NodeId, ...]) -> None:
        for node_id in node_ids:
            stream = self._streams.get(node_id)
            if stream is None:
                continue  # not subscribed: it is told what holds when it subscribes
            if stream.num_unread >= MAX_UNREAD:
                self._end(node_id, f"{MAX_UNREAD} events wait unread")
            else:
                stream.put(delivery)

    def _end(self, node_id: NodeId, reason: str) -> None:
        stream = self._streams.pop(node_id, None)
        if stream is not None:
            what = f"session {stream.session_id} of node {node_id} has ended: {reason}"
            stream.end(SessionEndedError(what, next_step="attach again"))
