"""What coordinator and nodes tell each other about a run, as values; and how these travel.

The coordinator sends messages down a session's stream; a node answers with reports about its part in
a round. Both sides act on these values: the coordinator's core makes messages and takes reports in, and
the node's duties do the reverse. What a node reports of another one's work is in findings.py. There is one
conversion each way, by the fields of most. A later release says which of its new kinds may be passed over
(`optional`): then the log has their names. Others are refused.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from blake3 import blake3

from protocol.errors import ProtocolMismatchError
from protocol.trust.rulings import Ruling, SignedRuling, rulings_from_wire, rulings_to_wire
from protocol.v1 import round_pb2
from protocol.v1 import session_pb2 as pb
from protocol.wire import convert
from protocol.wire.findings import (
    Audited,
    EquivocationSeen,
    LeftOutSeen,
    ResultRefused,
    SpotChecked,
)
from protocol.wire.payload import WireTotals
from protocol.wire.rounds import (
    WHOLE,
    Commit,
    Digest,
    NodeId,
    Plan,
    Result,
    RosterEntry,
    SourceLoss,
)
from protocol.wire.vitals import SHORT_WORDS, words_for_people

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RosterTold:
    """The present members, in the order of their ids: what a stream begins with."""

    members: tuple[RosterEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RosterChanged:
    """What changed in the roster: a thousand nodes are not told of all others when one joins."""

    joined: tuple[RosterEntry, ...]
    gone: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOpened:
    """A round opened, with the node in it or not."""

    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundCommitted:
    """A round closed."""

    commit: Commit


@dataclass(frozen=True, slots=True, kw_only=True)
class ParticipantsDeparted:
    """Participants of a round are gone: the others do not wait for them."""

    round: int
    node_ids: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParticipantsIdle:
    """Participants of a round have nothing to contribute: the others do not wait for it.

    A node that is told of itself hands in what it has trained, before the others are told.
    """

    round: int
    node_ids: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingEnded:
    """All participants of a round that are waited for have trained."""

    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceTakenOver:
    """A slice has another reducer. `attempt` counts from 1; the seconds from when it is received."""

    round: int
    slice_index: int
    reducer_id: NodeId
    attempt: int
    contribute_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultOffered:
    """A result that its reducer did not hand out is to be fetched from its holders."""

    round: int
    slice_index: int
    digest: Digest
    holder_ids: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditAsked:
    """A participant makes a slice's result again from what its reducer says that it has made it of."""

    round: int
    reducer_id: NodeId
    attempt: int  # takeovers of the slice
    seconds: float  # from when it is received; then an answer comes too late
    reduced: "Reduced" = field(
        metadata=convert.converted_by(
            lambda report: reduced_to_wire(report), lambda wire: reduced_from_wire(wire)
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotCheckAsked:
    """A participant of a committed round measures how much more a member has learned of its lease."""

    round: int
    contributor_id: NodeId
    seed: int  # draws the samples
    seconds: float  # from when it is received; then an answer comes too late


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitsWanted:
    """The coordinator lacks the commits after a round, which the node's state builds on."""

    after_round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationAsked:
    """The node is to measure the held-out loss of the state at a round, before it trains on.

    With `writes` the state's model also writes on from the run's prompts.
    """

    round: int
    writes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RefetchAsked:
    """The node's outer state is not the swarm's: it fetches this one."""

    round: int
    outer_digest: Digest
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFinished:
    """All rounds are done."""

    round: int
    outer_digest: Digest
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PunchAsked:
    """A member that does not reach this node dials it now by QUIC, and this node is to dial it.

    Each of the two dials opens its own router for the other one.
    """

    node_id: NodeId
    multiaddr: str  # of QUIC, as the coordinator sees the member's router


@dataclass(frozen=True, slots=True, kw_only=True)
class RulingsTold:
    """Rulings that the node may lack, in the order of their numbers.

    The coordinator's core makes them without `signatures`; they have as many on the wire.
    """

    rulings: tuple[Ruling, ...]
    signatures: tuple[bytes, ...] = ()


Message = (
    RosterTold
    | RosterChanged
    | RoundOpened
    | RoundCommitted
    | ParticipantsDeparted
    | ParticipantsIdle
    | TrainingEnded
    | SliceTakenOver
    | ResultOffered
    | AuditAsked
    | SpotCheckAsked
    | CommitsWanted
    | EvaluationAsked
    | RefetchAsked
    | RunFinished
    | PunchAsked
    | RulingsTold
)
"""What the coordinator tells a node."""

RoundNews = ParticipantsDeparted | ParticipantsIdle | TrainingEnded | SliceTakenOver | ResultOffered
"""What it says of a round between its plan and its commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The node's inner steps are done. They used up `samples`; contributions will weigh `tokens`.

    With 0 tokens none follow. See protocol.wire.rounds.Contributor.
    """

    inner_steps: int
    samples: int
    tokens: int
    loss: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced(Result):
    """A slice's result is encoded; digest None: nothing arrived to reduce.

    `header` is the result's, signed; it is empty where nobody needs it.

    The rest is what an auditor needs beside the contributions: who was `late`, of whom how many rounds in a
    row were `missed`, and the digests of the error that was added to the mean and of that which is left
    of it; empty where there is none, or nobody audits. So it is with contributors whose bodies are
    `undecodable`, in the order of their ids. Where somebody audits, the header holds the digest of all this:
    so the reducer has signed it with its result, and a false one is evidence.
    """

    slice_index: int
    header: bytes = b""
    late: tuple[NodeId, ...] = ()
    missed: tuple[tuple[NodeId, int], ...] = ()
    error_before: bytes = b""
    error_after: bytes = b""
    undecodable: tuple[NodeId, ...] = ()

    @property
    def statement_digest(self) -> Digest:
        """BLAKE3 of the whole report but the result and its header, with contributors by their ids."""
        late = tuple(sorted(self.late))
        whole = replace(self.in_order, digest=None, header=b"", late=late)
        body = reduced_to_wire(whole).SerializeToString(deterministic=True)
        return Digest(blake3(body).digest())

    @property
    def in_order(self) -> "Reduced":
        """The same in the order in which a result is made: by node ids."""
        factors = self.factors or (WHOLE,) * len(self.contributors)
        told = zip(self.contributors, self.contributions, factors, strict=True)
        in_order = [*zip(*sorted(told, key=lambda each: each[0].node_id), strict=True)] or [()] * 3
        contributors, contributions, factors = map(tuple, in_order)
        return replace(
            self,
            contributors=contributors,
            contributions=contributions,
            factors=factors if self.factors else (),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The node holds a slice's result.

    `agreement` says how far that leads where the node's own contribution does (node.exchange.mean.agreement);
    None where it has made none.
    """

    slice_index: int
    digest: Digest
    agreement: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """The commit is applied; the digest is of the outer state after it.

    `wire` is what the process has sent and received so far, by kind.
    """

    outer_digest: Digest
    incarnation: int = 0
    wire: WireTotals = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The held-out loss of the state is measured."""

    held_out_loss: float
    tokens: int
    metric: float | None = None
    by_source: tuple[SourceLoss, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrote:
    """What the state's model wrote, a text for each of the run's prompts; or why it did not."""

    texts: tuple[str, ...] = ()
    why_not: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draining:
    """The node leaves after this round: it reduces nothing more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultsSilent:
    """Results of which nothing comes to the node, though most others are there: all that there are now."""

    slice_indexes: tuple[int, ...]


Report = (
    Trained
    | Reduced
    | Held
    | Applied
    | Evaluated
    | Wrote
    | Draining
    | EquivocationSeen
    | Audited
    | LeftOutSeen
    | SpotChecked
    | ResultRefused
    | ResultsSilent
)
"""What a node tells the coordinator about its part in a round."""


def reduced_to_wire(report: Reduced) -> pb.ReducedReport:
    """A reducer's report; the digest in the header of its result is of its bytes."""
    return pb.ReducedReport(
        slice_index=report.slice_index,
        digest=convert.optional_digest_to_wire(report.digest),
        contributors=convert.contributors_to_wire(
            report.contributors, report.contributions, report.factors
        ),
        header=report.header,
        late_ids=report.late,
        missed=dict(report.missed),
        error_before=report.error_before,
        error_after=report.error_after,
        undecodable_ids=report.undecodable,
    )


def reduced_from_wire(wire: pb.ReducedReport, *, most_contributors: float = math.inf) -> Reduced:
    """A reducer's report; more of anything than a plan has participants is not looked at."""

    def of_plan(told: Sequence[T]) -> Sequence[T]:
        return told if len(told) <= most_contributors else ()

    contributors, contributions, factors = convert.contributors_from_wire(
        of_plan(wire.contributors)
    )
    missed = wire.missed.items() if len(wire.missed) <= most_contributors else ()
    before, after = (
        convert.optional_digest_from_wire(told, of="a reducer's error") or b""
        for told in (wire.error_before, wire.error_after)
    )
    return Reduced(
        slice_index=wire.slice_index,
        digest=convert.optional_digest_from_wire(wire.digest, of="a result"),
        contributors=contributors,
        contributions=contributions,
        factors=factors,
        header=wire.header,
        late=tuple(map(NodeId, of_plan(wire.late_ids))),
        missed=tuple(sorted((NodeId(n), rounds) for n, rounds in missed)),
        error_before=before,
        error_after=after,
        undecodable=tuple(map(NodeId, of_plan(wire.undecodable_ids))),
    )


_MESSAGES: Mapping[str, type[Message]] = {
    "roster": RosterTold,
    "roster_change": RosterChanged,
    "departed": ParticipantsDeparted,
    "idle": ParticipantsIdle,
    "training_ended": TrainingEnded,
    "takeover": SliceTakenOver,
    "result_offered": ResultOffered,
    "audit": AuditAsked,
    "spot_check": SpotCheckAsked,
    "commits_wanted": CommitsWanted,
    "evaluate": EvaluationAsked,
    "refetch": RefetchAsked,
    "finished": RunFinished,
    "punch": PunchAsked,
}
_MESSAGE_NAMES = {kind: name for name, kind in _MESSAGES.items()}


def message_to_wire(message: Message) -> pb.SubscribeResponse:
    """One message of a session's stream."""
    match message:
        case RoundOpened(plan=plan):
            return pb.SubscribeResponse(plan=convert.to_wire(plan, round_pb2.Plan))
        case RoundCommitted(commit=commit):
            return pb.SubscribeResponse(commit=convert.commit_to_wire(commit))
        case RulingsTold(rulings=rulings, signatures=signatures):
            signed = zip(rulings, signatures, strict=True)
            told = rulings_to_wire(SignedRuling(ruling=r, signature=s) for r, s in signed)
            return pb.SubscribeResponse(rulings=told)
    fields: dict[str, Any] = {_MESSAGE_NAMES[type(message)]: convert.fields_to_wire(message)}
    return pb.SubscribeResponse(**fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedOver:
    """What a later release tells, and this one may pass over."""

    name: str

    def is_new_among(self, told: set[str]) -> bool:
        """Whether the log is to have it; it is among those told then."""
        is_new = self.name not in told and len(told) < MOST_PASSED_OVER
        if is_new:
            told.add(self.name)
        return is_new


MOST_PASSED_OVER = 16
"""Kinds that a log has, each once: the other side may name as many as it likes."""


def _unknown(optional: str, refusal: str, *, behind: str) -> PassedOver:
    """What is passed over. Raises ProtocolMismatchError where its sender does not say that it may be."""
    if optional:
        return PassedOver(name=words_for_people(optional, most=SHORT_WORDS))
    raise ProtocolMismatchError(
        refusal, next_step=f"install a later release of Atoll for {behind}: 'atoll --version'"
    )


def message_from_wire(wire: pb.SubscribeResponse) -> Message | PassedOver:
    """One message of a session's stream; raises ProtocolMismatchError for one that must be known."""
    match wire.WhichOneof("event"):
        case "plan":
            return RoundOpened(plan=convert.from_wire(wire.plan, Plan))
        case "commit":
            return RoundCommitted(commit=convert.commit_from_wire(wire.commit))
        case "rulings":
            signed = rulings_from_wire(wire.rulings)
            return RulingsTold(
                rulings=tuple(one.ruling for one in signed),
                signatures=tuple(one.signature for one in signed),
            )
        case str(name) if name in _MESSAGES:
            return convert.from_wire(getattr(wire, name), _MESSAGES[name])
        case _:
            what = "the coordinator tells what this node's release does not know and must follow"
            return _unknown(wire.optional, what, behind="this node")


_REPORTS: Mapping[str, type[Report]] = {
    "trained": Trained,
    "held": Held,
    "applied": Applied,
    "evaluated": Evaluated,
    "wrote": Wrote,
    "draining": Draining,
    "equivocation": EquivocationSeen,
    "spot_checked": SpotChecked,
    "audited": Audited,
    "left_out": LeftOutSeen,
    "result_refused": ResultRefused,
    "results_silent": ResultsSilent,
}
_REPORT_NAMES = {kind: name for name, kind in _REPORTS.items()}


def report_to_wire(round: int, report: Report) -> pb.Report:
    """One report about a round."""
    if isinstance(report, Reduced):
        return pb.Report(round=round, reduced=reduced_to_wire(report))
    fields: dict[str, Any] = {_REPORT_NAMES[type(report)]: convert.fields_to_wire(report)}
    return pb.Report(round=round, **fields)


def report_from_wire(wire: pb.Report, *, most_contributors: int) -> Report | PassedOver:
    """One report about a round, whose number the caller reads.

    Raises ProtocolMismatchError for one that must be known and is not.

    More contributors than can be of that round's plan are not looked at: the result has none then.
    """
    match wire.WhichOneof("report"):
        case "reduced":
            return reduced_from_wire(wire.reduced, most_contributors=most_contributors)
        case str(name) if name in _REPORTS:
            return _checked(convert.from_wire(getattr(wire, name), _REPORTS[name]))
        case _:
            what = "the node reports what the coordinator's release does not know and must act on"
            return _unknown(wire.optional, what, behind="the coordinator")


def _checked(report: Report) -> Report:
    match report:
        case Held(agreement=float(told)) if not math.isfinite(told):
            return replace(report, agreement=None)
        case Audited(found=found):
            convert.optional_digest_from_wire(found, of="what an auditor found")
    return report
