"""What sessions are told, from what holds when one begins to listen; and how nodes were when last heard.

When something is told is the driver's; how it looks on the wire is protocol.wire.messages'.
"""

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass

from coordinator.swarm.agreement import commits_wanted, may_bring_commits, refetch_of
from coordinator.swarm.audit import lacking, order_of, pending_audits
from coordinator.swarm.end import finished_of
from coordinator.swarm.events import EndSession, OpenSession, SendRoster, Tell
from coordinator.swarm.members import Member, MemberState
from coordinator.swarm.membership import roster_of
from coordinator.swarm.rounds import plan_of
from coordinator.swarm.spot_checks import orders_for
from coordinator.swarm.start import time_of_round
from coordinator.swarm.state import Round, SwarmState, Writing, is_present
from coordinator.swarm.takeover import offer_of, takeover_of
from protocol.errors import AtollError, SessionEndedError
from protocol.v1.session_pb2 import HeartbeatRequest
from protocol.wire.channel import DEADLINE_SECONDS, RETRY_CAP_SECONDS
from protocol.wire.messages import (
    EvaluationAsked,
    Message,
    ParticipantsDeparted,
    ParticipantsIdle,
    RosterChanged,
    RosterTold,
    RoundCommitted,
    RoundOpened,
    TrainingEnded,
)
from protocol.wire.rounds import NodeId

COPY_SECONDS = DEADLINE_SECONDS + RETRY_CAP_SECONDS
"""A process that waits to attach asks at least this often."""


MAX_UNREAD = 1000
"""Messages that may wait in a session; a node that reads slower than this is better off anew."""

FEW_SESSIONS = 64
ROSTER_SECONDS = 0.25
"""With more sessions than few, the roster's changes are told this often unless something follows that
builds on them: a thousand nodes that attach one after the other are a million messages otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """When a node was last heard, in coordinator time, and its latest heartbeat."""

    at: float
    heartbeat: HeartbeatRequest | None


class Telemetry:
    """The latest heartbeat of each node."""

    def __init__(self) -> None:
        self._heard: dict[NodeId, Heard] = {}
        self._copies: dict[NodeId, float] = {}  # when another process of a node was refused last

    def attached(self, node_id: NodeId, *, now: float) -> None:
        """The node attached: what it said before may be of another process."""
        self._copies.pop(node_id, None)
        self._heard[node_id] = Heard(at=now, heartbeat=None)

    def copy_refused(self, node_id: NodeId, *, now: float) -> bool:
        """Another process of the node asked to attach; returns whether that is news."""
        is_news = not self.has_waiting_copy(node_id, now=now)
        self._copies[node_id] = now
        return is_news

    def has_waiting_copy(self, node_id: NodeId, *, now: float) -> bool:
        """Whether one has asked so lately that it still waits, for all that is known."""
        return node_id in self._copies and now - self._copies[node_id] < COPY_SECONDS

    def heard(self, node_id: NodeId, *, now: float) -> None:
        """The node called, with something else than a heartbeat."""
        before = self._heard.get(node_id)
        self._heard[node_id] = Heard(at=now, heartbeat=None if before is None else before.heartbeat)

    def heartbeat(self, node_id: NodeId, heartbeat: HeartbeatRequest, *, now: float) -> None:
        """The node sent a heartbeat."""
        self._heard[node_id] = Heard(at=now, heartbeat=heartbeat)

    def keep_only(self, node_ids: Collection[NodeId]) -> None:
        """Forgets nodes that are no members any more."""
        if len(self._heard) > len(node_ids):
            self._heard = {n: heard for n, heard in self._heard.items() if n in node_ids}

    def of(self, node_id: NodeId) -> Heard | None:
        """What is known of a node; None when it has not called since this coordinator started."""
        return self._heard.get(node_id)


class Stream:
    """What one session has yet to be told."""

    def __init__(self, *, node_id: NodeId, session_id: int) -> None:
        self.node_id = node_id
        self.session_id = session_id
        self._unread: asyncio.Queue[Message | AtollError] = asyncio.Queue()

    async def next(self) -> Message:
        """Waits for the next message; raises SessionEndedError, or another reason, at the end."""
        item = await self._unread.get()
        if isinstance(item, AtollError):
            self._unread.put_nowait(item)  # an ended stream stays ended
            raise item
        return item

    @property
    def num_unread(self) -> int:
        """Messages that wait."""
        return self._unread.qsize()

    def put(self, message: Message) -> None:
        """Adds a message."""
        self._unread.put_nowait(message)

    def end(self, error: AtollError) -> None:
        """Ends the stream at once; what was not read is void."""
        while not self._unread.empty():
            self._unread.get_nowait()
        self._unread.put_nowait(error)


class Streams:
    """The streams of all sessions, and which of them is told what.

    The roster is told before what is said of its members; of several changes, as it is after all of them.
    """

    def __init__(self, state: Callable[[], SwarmState]) -> None:
        """`state` is the latest that is durable."""
        self._state = state
        self._of: dict[NodeId, Stream] = {}
        self._roster_told: SwarmState | None = None  # whose roster they know, once it has changed
        self._roster_now: RosterTold | None = None  # that roster, once a stream has begun with it
        self._roster_timer: asyncio.TimerHandle | None = None  # until the next change may be told
        self._is_ending = False

    @property
    def is_any(self) -> bool:
        """Whether anybody reads what is told."""
        return bool(self._of)

    def open(self, member: Member, session_id: int, now: float) -> Stream:
        """A stream that begins with what holds now. An earlier stream of the node ends."""
        node_id = member.node_id
        self._end(node_id, "its events are read by a newer call")
        stream = Stream(node_id=node_id, session_id=session_id)
        if self._roster_now is None:  # the one that the others know, for changes are told to all
            self._roster_now = RosterTold(members=roster_of(self._roster_told or self._state()))
        stream.put(self._roster_now)
        for message in what_holds_for(self._state(), member, now):
            stream.put(message)
        self._of[node_id] = stream
        return stream

    def close(self, stream: Stream) -> None:
        """Forgets a stream that nobody reads any more."""
        if self._of.get(stream.node_id) is stream:
            del self._of[stream.node_id]

    def is_current(self, stream: Stream) -> bool:
        """Whether no newer stream has taken its place, and this coordinator goes on."""
        return self._of.get(stream.node_id) is stream and not self._is_ending

    def end_all(self, error: AtollError) -> None:
        """Ends every stream, because the coordinator stops."""
        self._is_ending = True
        for stream in self._of.values():
            stream.end(error)
        self._of.clear()

    def deliver(
        self, action: OpenSession | EndSession | SendRoster | Tell, *, before: SwarmState
    ) -> None:
        """Does what a step asks for; `before` is the state that it began with."""
        match action:
            case OpenSession(node_id=node_id):
                self._end(node_id, "the node attached anew")
            case EndSession(node_id=node_id, reason=reason):
                self._end(node_id, reason)
            case SendRoster():
                self._roster_told = self._roster_told or before
                if self._roster_timer is None:
                    self._tell_roster()
            case Tell(message=message, to=to):
                node_ids = tuple(self._of) if to is None else to
                self._tell_roster()  # what is said of members comes after their names
                self._put(message, node_ids)

    def _tell_roster(self) -> None:
        """Tells all sessions what has changed in the roster, if anything has."""
        before, self._roster_told = self._roster_told, None
        if before is None:
            return
        self._roster_now = None
        was = {entry.node_id: entry for entry in roster_of(before)}
        now = {entry.node_id: entry for entry in roster_of(self._state())}
        change = RosterChanged(
            joined=tuple(entry for node_id, entry in now.items() if was.get(node_id) != entry),
            gone=tuple(node_id for node_id in was if node_id not in now),
        )
        if not change.joined and not change.gone:
            return
        self._put(change, tuple(self._of))
        if len(self._of) > FEW_SESSIONS and self._roster_timer is None:
            loop = asyncio.get_running_loop()
            self._roster_timer = loop.call_later(ROSTER_SECONDS, self._roster_may_be_told)

    def _roster_may_be_told(self) -> None:
        self._roster_timer = None
        self._tell_roster()

    def _put(self, message: Message, node_ids: tuple[NodeId, ...]) -> None:
        for node_id in node_ids:
            stream = self._of.get(node_id)
            if stream is None:
                continue  # not subscribed: it is told what holds when it subscribes
            if stream.num_unread >= MAX_UNREAD:
                self._end(node_id, f"{MAX_UNREAD} messages wait unread")
            else:
                stream.put(message)

    def _end(self, node_id: NodeId, reason: str) -> None:
        stream = self._of.pop(node_id, None)
        if stream is not None:
            what = f"session {stream.session_id} of node {node_id} has ended: {reason}"
            stream.end(SessionEndedError(what, next_step="attach again"))


def what_holds_for(state: SwarmState, member: Member, now: float) -> list[Message]:
    """What a session has to know that subscribes now, after whatever it missed; all but the roster."""
    held: list[Message] = []
    if state.is_finished and state.outer_digest is not None:
        held.append(finished_of(state))
    elif (open_round := state.open_round) is not None:
        participants = tuple(assignment.node_id for assignment in open_round.assignments)
        if open_round.commit is not None:
            held.append(RoundCommitted(commit=open_round.commit))
        elif member.node_id in participants:
            held.append(RoundOpened(plan=plan_of(open_round, time_of_round(state, now))))
            held.extend(_news_of(state, open_round, time_of_round(state, now)))
    if state.evaluating is not None and member.node_id in state.evaluating.node_ids:
        number = state.evaluating.round
        writes = Writing(node_id=member.node_id, round=number) in state.writing
        held.append(EvaluationAsked(round=number, writes=writes))
    held.extend(
        order_of(audit, time_of_round(state, now))
        for audit in pending_audits(state)
        if member.node_id in lacking(audit)
    )
    held.extend(orders_for(state, member.node_id))
    if may_bring_commits(state, member) and member.state is not MemberState.DIVERGED:
        held.append(commits_wanted(state))
    if member.state is MemberState.DIVERGED:  # its state cannot become the swarm's by commits
        reason = f"the state it holds at round {member.outer_round} is not the swarm's"
        held.extend(filter(None, (refetch_of(state, reason),)))
    return held


def _news_of(state: SwarmState, current: Round, now: float) -> list[Message]:
    """What happened to the round since its plan was sent."""
    news: list[Message] = []
    participants = tuple(assignment.node_id for assignment in current.assignments)
    if departed := tuple(n for n in participants if not is_present(state, n)):
        news.append(ParticipantsDeparted(round=current.number, node_ids=departed))
    if idle := tuple(n for n, trained in current.trained.items() if trained.tokens == 0):
        news.append(ParticipantsIdle(round=current.number, node_ids=idle))
    if current.has_trained:
        news.append(TrainingEnded(round=current.number))
    for progress in current.slices:
        if progress.attempt:
            news.append(takeover_of(current.number, progress, now))
        if progress.is_offered and progress.digest is not None:
            news.append(offer_of(state, current, progress))
    return news
