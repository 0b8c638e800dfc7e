"""What can happen to a swarm. Each event is one fact, already authenticated by the edge."""

from dataclasses import dataclass, field

from coordinator.swarm.ledger import Places
from coordinator.swarm.shares import UNKNOWN, Rates
from coordinator.swarm.state import Trained
from protocol.rounds import (
    Commit,
    ContributionDigest,
    Contributor,
    CorpusSummary,
    Digest,
    LayoutSummary,
    NodeId,
    PeerAddress,
)
from protocol.wire_count import WireTotals


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """A process of a node announces itself. Opens a new session; the session before it ends."""

    node_id: NodeId
    node_name: str
    address: PeerAddress
    device: str
    num_ranks: int
    version: str
    run_digest: Digest
    layout: LayoutSummary
    codecs: tuple[str, ...] = ()  # up and down, with their versions
    corpus: CorpusSummary
    outer_round: int
    outer_digest: Digest
    outer_incarnation: int = 0
    process_id: int = 0  # what another process of the node held in memory is gone
    cannot_train: bool = False
    cannot_evaluate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatSeen:
    """A node is alive and tells which outer state it holds, whom it cannot reach, how fast it sends."""

    node_id: NodeId
    session_id: int
    outer_round: int
    outer_digest: Digest
    outer_incarnation: int = 0
    unreachable: tuple[NodeId, ...] = ()
    rates: Rates = UNKNOWN
    cannot_train: bool = False
    cannot_evaluate: bool = False


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
class TrainingDone:
    """A participant has taken its inner steps."""

    node_id: NodeId
    round: int
    trained: Trained


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceReduced:
    """A reducer has encoded a result, or had nothing to reduce (digest None).

    `contributions` says of each contributor, in their order, which bytes are in the mean.
    """

    node_id: NodeId
    round: int
    slice_index: int
    digest: Digest | None
    contributors: tuple[Contributor, ...]
    contributions: tuple[ContributionDigest, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultHeld:
    """A node holds a slice's result."""

    node_id: NodeId
    round: int
    slice_index: int
    digest: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitApplied:
    """A node has the state at this round, with this digest, and tells what crossed its network."""

    node_id: NodeId
    round: int
    outer_digest: Digest
    incarnation: int = 0
    wire: WireTotals = field(default_factory=dict)  # since its process started


@dataclass(frozen=True, slots=True, kw_only=True)
class Draining:
    """A node leaves after the round in flight."""

    node_id: NodeId


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
class Evaluated:
    """A node has measured the held-out loss of the state at a round."""

    node_id: NodeId
    round: int
    held_out_loss: float
    tokens: int
    metric: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryTold:
    """A node has brought back all the commits that it keeps."""

    node_id: NodeId


Report = TrainingDone | SliceReduced | ResultHeld | CommitApplied | Evaluated | Draining
"""What nodes say of their part in a round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """Several reports of one node, taken in together before anything is decided by them."""

    events: tuple[Report, ...]


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
    | TrainingDone
    | SliceReduced
    | ResultHeld
    | CommitApplied
    | Evaluated
    | Draining
    | BaseLearned
    | CommitLearned
    | HistoryTold
    | Reported
    | Started
    | Ticked
    | Woke
)
