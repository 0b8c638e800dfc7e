"""What the core asks the edge to do: deliver these to sessions. All state is in SwarmState."""

from dataclasses import dataclass

from protocol.rounds import Commit, Digest, NodeId, Plan


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
    """The present members changed: every session gets the new roster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPlan:
    """Every participant gets the plan."""

    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class SendCommit:
    """Every session gets the commit."""

    commit: Commit
    is_learned: bool = False  # made before this coordinator's database was copied, or in another


@dataclass(frozen=True, slots=True, kw_only=True)
class SendDeparted:
    """The other participants of the round learn not to wait for these."""

    round: int
    node_ids: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendIdle:
    """The other participants of the round learn not to wait for contributions of these."""

    round: int
    node_ids: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendTakeover:
    """All participants learn that a slice has another reducer."""

    round: int
    slice_index: int
    reducer_id: NodeId
    attempt: int
    contribute_seconds: float  # from its receipt


@dataclass(frozen=True, slots=True, kw_only=True)
class SendResultOffered:
    """All participants learn where to fetch a result that its reducer did not hand out."""

    round: int
    slice_index: int
    digest: Digest
    holder_ids: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AskCommits:
    """One node brings back the commits that its state builds on."""

    node_id: NodeId
    after_round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AskEvaluation:
    """One node measures the held-out loss of the state at this round, before it trains on."""

    node_id: NodeId
    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AskRefetch:
    """One node fetches its outer state anew."""

    node_id: NodeId
    round: int
    outer_digest: Digest
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SendFinished:
    """The run is complete; every session learns it."""

    round: int
    outer_digest: Digest
    reason: str


Action = (
    OpenSession
    | EndSession
    | SendRoster
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
