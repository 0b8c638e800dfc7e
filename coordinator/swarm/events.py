"""What can happen to a swarm, what its core asks the edge to do about it, and a step of it in the making.

Each event is one fact, already authenticated by the edge. All state is in SwarmState; actions only say what
follows from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from coordinator.swarm.ledger import Places
from coordinator.swarm.members import Condition, Conviction, Member
from coordinator.swarm.state import (
    Alarm,
    ClosedRound,
    Round,
    Rules,
    SeenNorms,
    SliceProgress,
    SwarmState,
    members_of,
)
from protocol.trust.receipts import Omission
from protocol.trust.rulings import Decision, Ruling
from protocol.wire.findings import ResultRefused
from protocol.wire.messages import Message, Report
from protocol.wire.payload import PayloadHeader
from protocol.wire.rounds import Commit, Digest, NodeId
from protocol.wire.vitals import UNMEASURED, Announcement, LinkRates


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached(Announcement):
    """A process of a node announces itself. Opens a new session; the session before it ends."""

    node_id: NodeId
    invite_id: str = ""  # that the node joined with
    is_helper: bool = False  # by its certificate


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatSeen(Condition):
    """A node is alive and tells which outer state it holds, whom it cannot reach, how fast it sends."""

    node_id: NodeId
    session_id: int
    outer_round: int
    outer_digest: Digest
    outer_incarnation: int = 0
    rates: LinkRates = UNMEASURED
    outside: tuple[str, ...] = ()  # multiaddresses by IPv4 that its router shows to those that look


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesSkipped:
    """The run owner takes samples out; the pieces are whole inner steps."""

    pieces: tuple[Places, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamBroken:
    """A session's stream of events broke at the node's end: its process may be gone."""

    node_id: NodeId
    session_id: int
    may_be_ours: bool = False  # we were stopped for a while, and nodes that live end their streams


@dataclass(frozen=True, slots=True, kw_only=True)
class Detached:
    """A node says goodbye."""

    node_id: NodeId
    session_id: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """A node says something about its part in a round."""

    node_id: NodeId
    round: int
    report: Report


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOutProven:
    """A reducer has left out what it gave a receipt for; the edge has checked both of its signatures."""

    omission: Omission
    evidence: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusalSeen:
    """A participant has signed that a result does not decode; the edge has checked both signatures."""

    node_id: NodeId
    refused: ResultRefused  # with the result's header
    result: PayloadHeader  # the same header, read


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedTogether:
    """Several reports of one node, taken in together before anything is decided by them."""

    reports: tuple[Reported, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseLearned:
    """Of two signed commits in a row the later one builds on this state: nodes had agreed on it."""

    after: Commit
    digest: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitLearned:
    """A signed commit was brought back by a node: an older copy of the database lacks it."""

    commit: Commit
    node_id: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryTold:
    """A node has brought back all the commits that it keeps."""

    node_id: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class Undone:
    """What the database knows of going back to the state after a round."""

    commits: tuple[Commit, ...]  # of all later rounds, oldest first
    recent: tuple[ClosedRound, ...]  # as SwarmState.recent was after the round
    norms: tuple[SeenNorms, ...]  # likewise


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruled(Decision):
    """Something is decided about nodes or the run; the core numbers it.

    `from_round` is 0 where the core says which; `incarnation` is 0 unless a going back is ruled anew.
    """

    rules: Rules | None = None  # with an amendment
    undone: Undone | None = None  # where the run goes back


@dataclass(frozen=True, slots=True, kw_only=True)
class RulingsLearned:
    """Signed rulings were brought back by a node. `rules` are those of the run after all of them."""

    rulings: tuple[Ruling, ...]  # each follows the one before, and the first those that are known
    rules: Rules
    undone: Mapping[int, Undone] = field(default_factory=dict)  # by the round that is gone back to


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The coordinator goes on from its database, which may be an old copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticked:
    """Time has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Woke:
    """The coordinator could hear nobody for a while; nodes pause so long between their tries."""

    pause_seconds: float


Event = (
    Attached
    | HeartbeatSeen
    | SamplesSkipped
    | StreamBroken
    | Detached
    | Reported
    | ReportedTogether
    | LeftOutProven
    | RefusalSeen
    | BaseLearned
    | CommitLearned
    | HistoryTold
    | Ruled
    | RulingsLearned
    | Started
    | Ticked
    | Woke
)


# Actions


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSession:
    """Answers an attach: this session now speaks for the node; streams of older ones end."""

    node_id: NodeId
    session_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndSession:
    """The node is lost or has left: its stream ends."""

    node_id: NodeId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SendRoster:
    """The present members changed: every session is told how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """A message to the sessions of these nodes, or of all."""

    message: Message
    to: tuple[NodeId, ...] | None = None  # None: all
    is_learned: bool = False  # a commit that was made before the database was copied, or in another


@dataclass(frozen=True, slots=True, kw_only=True)
class GoBack:
    """The run is to go back by itself, or to pause: the edge makes the ruling, which needs the database."""

    alarm: Alarm


@dataclass(frozen=True, slots=True, kw_only=True)
class WithdrawalAsked:
    """Nobody could follow a going back: the edge makes the ruling that withdraws it."""

    withdrawn: Ruling
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineAsked:
    """A member is convicted: the edge makes the ruling, which needs a date and a signature."""

    conviction: Conviction


RulingAsked = GoBack | WithdrawalAsked | QuarantineAsked

Action = OpenSession | EndSession | SendRoster | Tell | RulingAsked


@dataclass(slots=True, kw_only=True)
class Turn:
    """A step in the making: the state so far, and the actions that it asks for.

    A step passes through several decisions, each of which sees what the ones before changed. They share a
    Turn, which never leaves the step, so `step` stays a function. `state` is replaced, never changed in
    place.
    """

    state: SwarmState
    now: float
    actions: list[Action] = field(default_factory=list)
    has_new_state: bool = False  # a committed state that nobody was asked to evaluate

    @property
    def current(self) -> Round:
        """The round in flight, where there is one."""
        assert self.state.open_round is not None
        return self.state.open_round

    def act(self, action: Action) -> None:
        """Asks the edge for something, after everything asked before."""
        self.actions.append(action)

    def put_member(self, member: Member) -> None:
        """Adds a member or replaces it."""
        if self.state.members.get(member.node_id) != member:
            members = members_of(self.state).with_member(member)
            self.state = replace(self.state, members=members)

    def put_round(self, current: Round | None) -> None:
        """Replaces the round in flight."""
        if self.state.open_round != current:
            self.state = replace(self.state, open_round=current)

    def put_slice(self, current: Round, progress: SliceProgress) -> None:
        """Replaces a slice of the round in flight, which is otherwise as it is given."""
        index = progress.slice.index
        slices = (*current.slices[:index], progress, *current.slices[index + 1 :])
        self.put_round(replace(current, slices=slices))
