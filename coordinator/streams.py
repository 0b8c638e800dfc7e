"""What sessions are told, from what holds when one begins to listen; and how nodes were when last heard.

Who is told what of a step is the driver's; how it looks on the wire is protocol.wire.messages'.
"""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

from coordinator.swarm.audit import lacking, order_of, pending_audits
from coordinator.swarm.committed import commits_wanted, may_bring_commits, refetch_of
from coordinator.swarm.members import Member, MemberState
from coordinator.swarm.rounds import offer_of, plan_of
from coordinator.swarm.spot_checks import orders_for
from coordinator.swarm.start import finished_of, time_of_round
from coordinator.swarm.state import Round, SwarmState, Writing
from coordinator.swarm.takeover import takeover_of
from coordinator.swarm.turn import is_present
from protocol.errors import AtollError
from protocol.v1.session_pb2 import HeartbeatRequest
from protocol.wire.channel import DEADLINE_SECONDS, RETRY_CAP_SECONDS
from protocol.wire.messages import (
    EvaluationAsked,
    Message,
    ParticipantsDeparted,
    ParticipantsIdle,
    RoundCommitted,
    RoundOpened,
    TrainingEnded,
)
from protocol.wire.rounds import NodeId

COPY_SECONDS = DEADLINE_SECONDS + RETRY_CAP_SECONDS
"""A process that waits to attach asks at least this often."""


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
