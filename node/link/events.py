"""What the coordinator tells a node, as the node's values; read from the wire here."""

from collections.abc import Iterable
from dataclasses import dataclass

from protocol import convert
from protocol.errors import ProtocolMismatchError
from protocol.rounds import Commit, Digest, NodeId, Plan, RosterEntry
from protocol.v1 import session_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class RosterChanged:
    """The members changed."""

    members: tuple[RosterEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOpened:
    """A round opened, with us in it or not."""

    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundCommitted:
    """A round closed."""

    commit: Commit


@dataclass(frozen=True, slots=True, kw_only=True)
class ParticipantsDeparted:
    """Participants of a round are gone."""

    round: int
    node_ids: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParticipantsIdle:
    """Participants of a round have nothing to contribute."""

    round: int
    node_ids: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceTakenOver:
    """A slice has another reducer. `attempt` counts from 1; seconds from its receipt."""

    round: int
    slice_index: int
    reducer_id: NodeId
    attempt: int
    contribute_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultOffered:
    """A result of a gone reducer is to be fetched from its holders."""

    round: int
    slice_index: int
    digest: Digest
    holder_ids: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitsWanted:
    """The coordinator lacks the commits after a round."""

    after_round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationAsked:
    """The coordinator wants the held-out loss of our state."""

    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RefetchAsked:
    """Our state is not the swarm's."""

    round: int
    outer_digest: Digest
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFinished:
    """All rounds are done."""

    round: int
    outer_digest: Digest
    reason: str


Event = (
    RosterChanged
    | RoundOpened
    | RoundCommitted
    | ParticipantsDeparted
    | ParticipantsIdle
    | SliceTakenOver
    | ResultOffered
    | CommitsWanted
    | EvaluationAsked
    | RefetchAsked
    | RunFinished
)


class Members:
    """The members, as one stream tells of them."""

    def __init__(self) -> None:
        self._members: dict[NodeId, RosterEntry] = {}

    def replaced(self, wire: session_pb2.Roster) -> RosterChanged:
        """All of them are told."""
        self._members = {}
        return self._with(wire.members)

    def changed(self, wire: session_pb2.RosterChange) -> RosterChanged:
        """Some came, some went."""
        for node_id in wire.gone_ids:
            self._members.pop(NodeId(node_id), None)
        return self._with(wire.joined)

    def _with(self, joined: Iterable[session_pb2.RosterEntry]) -> RosterChanged:
        for entry in map(convert.roster_entry_from_wire, joined):
            self._members[entry.node_id] = entry
        return RosterChanged(members=tuple(e for _, e in sorted(self._members.items())))


def event_from_wire(message: session_pb2.SubscribeResponse) -> Event:
    """All but rosters; raises ProtocolMismatchError for what this version does not know."""
    match message.WhichOneof("event"):
        case "plan":
            return RoundOpened(plan=convert.plan_from_wire(message.plan))
        case "commit":
            return RoundCommitted(commit=convert.commit_from_wire(message.commit))
        case "departed":
            node_ids = tuple(NodeId(node_id) for node_id in message.departed.node_ids)
            return ParticipantsDeparted(round=message.departed.round, node_ids=node_ids)
        case "idle":
            node_ids = tuple(NodeId(node_id) for node_id in message.idle.node_ids)
            return ParticipantsIdle(round=message.idle.round, node_ids=node_ids)
        case "takeover":
            takeover = message.takeover
            return SliceTakenOver(
                round=takeover.round,
                slice_index=takeover.slice_index,
                reducer_id=NodeId(takeover.reducer_id),
                attempt=takeover.attempt,
                contribute_seconds=takeover.contribute_seconds,
            )
        case "result_offered":
            offered = message.result_offered
            return ResultOffered(
                round=offered.round,
                slice_index=offered.slice_index,
                digest=convert.digest_from_wire(offered.digest, of="a result"),
                holder_ids=tuple(NodeId(node_id) for node_id in offered.holder_ids),
            )
        case "commits_wanted":
            return CommitsWanted(after_round=message.commits_wanted.after_round)
        case "evaluate":
            return EvaluationAsked(round=message.evaluate.round)
        case "refetch":
            refetch = message.refetch
            return RefetchAsked(
                round=refetch.round,
                outer_digest=Digest(refetch.outer_digest),
                reason=refetch.reason,
            )
        case "finished":
            finished = message.finished
            return RunFinished(
                round=finished.round,
                outer_digest=Digest(finished.outer_digest),
                reason=finished.reason,
            )
        case unknown:
            raise ProtocolMismatchError(
                f"the coordinator sent an event that this version does not know ({unknown})",
                next_step="install the coordinator's version of Atoll: 'atoll --version'",
            )
