"""What coordinator and nodes tell each other about a run, as values, and how each looks on the wire.

The coordinator sends messages down a session's stream; a node answers with reports about its part in
a round. Both sides act on these values: the coordinator's core makes messages and takes reports in, and
the node's duties do the reverse.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from blake3 import blake3
from google.protobuf.message import Message as WireMessage

from protocol.errors import BadDataError, ProtocolMismatchError
from protocol.trust.identity import Identity, is_signed_by, node_id_of
from protocol.trust.rulings import Ruling, SignedRuling, ruling_from_json
from protocol.v1 import ruling_pb2
from protocol.v1 import session_pb2 as pb
from protocol.wire import convert
from protocol.wire.rounds import (
    WHOLE,
    Commit,
    ContributionDigest,
    Contributor,
    Digest,
    NodeId,
    Plan,
    RosterEntry,
)
from protocol.wire.wire_count import WireTotals

T = TypeVar("T")
WireT = TypeVar("WireT", bound=WireMessage)


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

    Who is told of itself hands in what it has trained, before the others are told.
    """

    round: int
    node_ids: tuple[NodeId, ...]


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
    reduced: "Reduced"


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
    | SliceTakenOver
    | ResultOffered
    | AuditAsked
    | CommitsWanted
    | EvaluationAsked
    | RefetchAsked
    | RunFinished
    | RulingsTold
)
"""What the coordinator tells a node."""


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
class Reduced:
    """A slice's result is encoded; digest None: nothing arrived to reduce.

    `contributions` says of each contributor, in their order, which bytes came of it, and `factors` how
    much of them is in the mean, in 65,536ths; empty: all of each. `header` is the result's, signed, and says
    its `norm`; it is empty where nobody needs it.

    The rest is what an auditor needs beside the contributions: who was `late`, of whom how many rounds in a
    row were `missed`, and the digests of the error that was added to the mean and of that which is left
    of it; empty where there is none, or nobody audits. Where somebody does, the header holds the digest of
    all this: so the reducer has signed it with its result, and a false one is evidence.
    """

    slice_index: int
    digest: Digest | None
    contributors: tuple[Contributor, ...]
    contributions: tuple[ContributionDigest, ...]
    factors: tuple[int, ...] = ()
    norm: float = 0.0
    header: bytes = b""
    late: tuple[NodeId, ...] = ()
    missed: tuple[tuple[NodeId, int], ...] = ()
    error_before: bytes = b""
    error_after: bytes = b""

    @property
    def statement_digest(self) -> Digest:
        """BLAKE3 of the whole report but the result and its header, with contributors by their ids."""
        factors = self.factors or (WHOLE,) * len(self.contributors)
        told = zip(self.contributors, self.contributions, factors, strict=True)
        in_order = [*zip(*sorted(told, key=lambda each: each[0].node_id), strict=True)] or [()] * 3
        contributors, contributions, factors = map(tuple, in_order)
        whole = replace(
            self,
            digest=None,
            header=b"",
            contributors=contributors,
            contributions=contributions,
            factors=factors,
            late=tuple(sorted(self.late)),
        )
        wire = pb.ReducedReport()
        _reduced_to_wire(whole, wire)
        return Digest(blake3(wire.SerializeToString(deterministic=True)).digest())


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The node holds a slice's result."""

    slice_index: int
    digest: Digest


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrote:
    """What the state's model wrote, a text for each of the run's prompts; or why it did not."""

    texts: tuple[str, ...] = ()
    why_not: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draining:
    """The node leaves after this round: it reduces nothing more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EquivocationSeen:
    """Two signed headers of one process for one slot, as protocol.trust.equivocation reads them."""

    one: bytes
    other: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited:
    """What came of an audit. `found` is the result's `digest` where the same came out, bit for bit.

    Else it is a digest of what did, the same for all who find the same; or empty where inputs did not come.
    """

    slice_index: int
    digest: Digest
    found: bytes
    why: str = ""
    run_digest: bytes = b""  # this and what follows come with the auditor's signature
    round: int = 0
    auditor_key: bytes = b""
    signature: bytes = b""

    @property
    def statement(self) -> bytes:
        """What its auditor signs: all but the signature."""
        wire = pb.AuditedReport()
        _audited_to_wire(replace(self, signature=b""), wire)
        return _FINDING_TAG + wire.SerializeToString(deterministic=True)

    def signed(self, by: Identity, *, run_digest: bytes, round: int) -> "Audited":
        """What an auditor has found in a round of a run, with its signature."""
        told = replace(self, run_digest=run_digest, round=round, auditor_key=by.public_key)
        return replace(told, signature=by.sign(told.statement))

    @property
    def auditor_id(self) -> NodeId:
        """Who has signed it, if the signature holds."""
        return node_id_of(self.auditor_key)

    def forgery(self, auditor_id: NodeId) -> str:
        """Why a node has not found this, in a sentence; empty where it has signed that it did."""
        what = f"the finding on slice {self.slice_index} of round {self.round}"
        if self.auditor_id != auditor_id:
            return f"{what} is signed with another key than that of {auditor_id}"
        if not is_signed_by(self.auditor_key, self.statement, self.signature):
            return f"{what} has a signature that is not {auditor_id}'s"
        return ""


_FINDING_TAG = b"atoll finding 1\n"
"""What an auditor signs begins with this, so that no signature can be taken for one of another kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOutSeen:
    """A result lacks the node's contribution, which its reducer has given a receipt for."""

    receipt: bytes  # as protocol.trust.receipts reads it


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
)
"""What a node tells the coordinator about its part in a round."""


def message_to_wire(message: Message) -> pb.SubscribeResponse:
    """One message of a session's stream."""
    wire = pb.SubscribeResponse()
    match message:
        case RosterTold(members=members):
            wire.roster.CopyFrom(convert.roster_to_wire(members))
        case RosterChanged(joined=joined, gone=gone):
            wire.roster_change.joined.extend(map(convert.roster_entry_to_wire, joined))
            wire.roster_change.gone_ids.extend(gone)
        case RoundOpened(plan=plan):
            wire.plan.CopyFrom(convert.plan_to_wire(plan))
        case RoundCommitted(commit=commit):
            wire.commit.CopyFrom(convert.commit_to_wire(commit))
        case ParticipantsDeparted(round=number, node_ids=node_ids):
            wire.departed.CopyFrom(pb.Departed(round=number, node_ids=node_ids))
        case ParticipantsIdle(round=number, node_ids=node_ids):
            wire.idle.CopyFrom(pb.Idle(round=number, node_ids=node_ids))
        case SliceTakenOver():
            wire.takeover.round = message.round
            wire.takeover.slice_index = message.slice_index
            wire.takeover.reducer_id = message.reducer_id
            wire.takeover.attempt = message.attempt
            wire.takeover.contribute_seconds = message.contribute_seconds
        case ResultOffered():
            wire.result_offered.round = message.round
            wire.result_offered.slice_index = message.slice_index
            wire.result_offered.digest = message.digest
            wire.result_offered.holder_ids.extend(message.holder_ids)
        case AuditAsked():
            wire.audit.round = message.round
            wire.audit.reducer_id = message.reducer_id
            wire.audit.attempt = message.attempt
            wire.audit.seconds = message.seconds
            _reduced_to_wire(message.reduced, wire.audit.reduced)
        case CommitsWanted(after_round=after_round):
            wire.commits_wanted.CopyFrom(pb.CommitsWanted(after_round=after_round))
        case EvaluationAsked(round=number, writes=writes):
            wire.evaluate.CopyFrom(pb.Evaluate(round=number, writes=writes))
        case RefetchAsked(round=number, outer_digest=digest, reason=reason):
            refetch = pb.Refetch(round=number, outer_digest=digest, reason=reason)
            wire.refetch.CopyFrom(refetch)
        case RunFinished(round=number, outer_digest=digest, reason=reason):
            finished = pb.Finished(round=number, outer_digest=digest, reason=reason)
            wire.finished.CopyFrom(finished)
        case RulingsTold(rulings=rulings, signatures=signatures):
            signed = zip(rulings, signatures, strict=True)
            wire.rulings.CopyFrom(
                rulings_to_wire(SignedRuling(ruling=r, signature=s) for r, s in signed)
            )
    return wire


def message_from_wire(wire: pb.SubscribeResponse) -> Message:
    """One message of a session's stream; raises ProtocolMismatchError for one that is not known here."""
    match wire.WhichOneof("event"):
        case "roster":
            members = map(convert.roster_entry_from_wire, wire.roster.members)
            return RosterTold(members=tuple(members))
        case "roster_change":
            joined = map(convert.roster_entry_from_wire, wire.roster_change.joined)
            gone = map(NodeId, wire.roster_change.gone_ids)
            return RosterChanged(joined=tuple(joined), gone=tuple(gone))
        case "plan":
            return RoundOpened(plan=convert.plan_from_wire(wire.plan))
        case "commit":
            return RoundCommitted(commit=convert.commit_from_wire(wire.commit))
        case "departed":
            node_ids = tuple(map(NodeId, wire.departed.node_ids))
            return ParticipantsDeparted(round=wire.departed.round, node_ids=node_ids)
        case "idle":
            node_ids = tuple(map(NodeId, wire.idle.node_ids))
            return ParticipantsIdle(round=wire.idle.round, node_ids=node_ids)
        case "takeover":
            return SliceTakenOver(
                round=wire.takeover.round,
                slice_index=wire.takeover.slice_index,
                reducer_id=NodeId(wire.takeover.reducer_id),
                attempt=wire.takeover.attempt,
                contribute_seconds=wire.takeover.contribute_seconds,
            )
        case "result_offered":
            return ResultOffered(
                round=wire.result_offered.round,
                slice_index=wire.result_offered.slice_index,
                digest=convert.digest_from_wire(wire.result_offered.digest, of="a result"),
                holder_ids=tuple(map(NodeId, wire.result_offered.holder_ids)),
            )
        case "audit":
            told = wire.audit.reduced
            most = len(told.contributors) + len(told.late_ids) + len(told.missed)
            return AuditAsked(
                round=wire.audit.round,
                reducer_id=NodeId(wire.audit.reducer_id),
                attempt=wire.audit.attempt,
                seconds=wire.audit.seconds,
                reduced=_reduced_from_wire(wire.audit.reduced, most_contributors=most),
            )
        case "commits_wanted":
            return CommitsWanted(after_round=wire.commits_wanted.after_round)
        case "evaluate":
            return EvaluationAsked(round=wire.evaluate.round, writes=wire.evaluate.writes)
        case "refetch":
            return RefetchAsked(
                round=wire.refetch.round,
                outer_digest=Digest(wire.refetch.outer_digest),
                reason=wire.refetch.reason,
            )
        case "finished":
            return RunFinished(
                round=wire.finished.round,
                outer_digest=Digest(wire.finished.outer_digest),
                reason=wire.finished.reason,
            )
        case "rulings":
            signed = rulings_from_wire(wire.rulings)
            return RulingsTold(
                rulings=tuple(one.ruling for one in signed),
                signatures=tuple(one.signature for one in signed),
            )
        case unknown:
            raise ProtocolMismatchError(
                f"the coordinator sent a message that this version does not know ({unknown})",
                next_step="install the coordinator's version of Atoll: 'atoll --version'",
            )


def rulings_to_wire(signed: Iterable[SignedRuling]) -> ruling_pb2.Rulings:
    """Signed rulings."""
    return ruling_pb2.Rulings(
        rulings=[
            ruling_pb2.Ruling(ruling_json=one.ruling.canonical_json(), signature=one.signature)
            for one in signed
        ]
    )


def rulings_from_wire(wire: ruling_pb2.Rulings) -> tuple[SignedRuling, ...]:
    """Signed rulings; raises BadDataError for one that cannot be read. Checks no signature."""
    return tuple(
        SignedRuling(ruling=ruling_from_json(one.ruling_json), signature=one.signature)
        for one in wire.rulings
    )


def report_to_wire(round: int, report: Report) -> pb.Report:
    """One report about a round."""
    wire = pb.Report(round=round)
    match report:
        case Trained():
            wire.trained.inner_steps = report.inner_steps
            wire.trained.samples = report.samples
            wire.trained.tokens = report.tokens
            wire.trained.loss = report.loss
            wire.trained.seconds = report.seconds
        case Reduced():
            _reduced_to_wire(report, wire.reduced)
        case Held():
            wire.held.slice_index = report.slice_index
            wire.held.digest = report.digest
        case Applied():
            wire.applied.outer_digest = report.outer_digest
            wire.applied.incarnation = report.incarnation
            wire.applied.wire.extend(convert.wire_counts_to_wire(report.wire))
        case Evaluated():
            wire.evaluated.held_out_loss = report.held_out_loss
            wire.evaluated.tokens = report.tokens
            if report.metric is not None:
                wire.evaluated.metric = report.metric
        case Wrote(texts=texts, why_not=why_not):
            wire.wrote.CopyFrom(pb.WroteReport(texts=texts, why_not=why_not))
        case Draining():
            wire.draining.SetInParent()
        case EquivocationSeen(one=one, other=other):
            wire.equivocation.CopyFrom(pb.EquivocationReport(one=one, other=other))
        case Audited():
            _audited_to_wire(report, wire.audited)
        case LeftOutSeen(receipt=receipt):
            wire.left_out.receipt = receipt
    return wire


def report_from_wire(wire: pb.Report, *, most_contributors: int) -> Report:
    """One report about a round, whose number the caller reads; raises BadDataError for an unknown one.

    More contributors than can be of that round's plan are not looked at: the result has none then.
    """
    match wire.WhichOneof("report"):
        case "trained":
            return Trained(
                inner_steps=wire.trained.inner_steps,
                samples=wire.trained.samples,
                tokens=wire.trained.tokens,
                loss=wire.trained.loss,
                seconds=wire.trained.seconds,
            )
        case "reduced":
            return _reduced_from_wire(wire.reduced, most_contributors=most_contributors)
        case "held":
            digest = convert.digest_from_wire(wire.held.digest, of="a result")
            return Held(slice_index=wire.held.slice_index, digest=digest)
        case "applied":
            digest = convert.digest_from_wire(wire.applied.outer_digest, of="the outer state")
            return Applied(
                outer_digest=digest,
                incarnation=wire.applied.incarnation,
                wire=convert.wire_counts_from_wire(wire.applied.wire),
            )
        case "evaluated":
            has_metric = wire.evaluated.HasField("metric")
            return Evaluated(
                held_out_loss=wire.evaluated.held_out_loss,
                tokens=wire.evaluated.tokens,
                metric=wire.evaluated.metric if has_metric else None,
            )
        case "wrote":
            return Wrote(texts=tuple(wire.wrote.texts), why_not=wire.wrote.why_not)
        case "draining":
            return Draining()
        case "equivocation":
            return EquivocationSeen(one=wire.equivocation.one, other=wire.equivocation.other)
        case "audited":
            return _audited_from_wire(wire.audited)
        case "left_out":
            return LeftOutSeen(receipt=wire.left_out.receipt)
        case _:
            raise BadDataError(
                "the report is of no kind that this coordinator knows",
                next_step="use the same version of Atoll on both sides",
            )


def reduced_to_bytes(report: Reduced) -> bytes:
    """A reducer's report as it is kept for evidence."""
    wire = pb.ReducedReport()
    _reduced_to_wire(report, wire)
    return wire.SerializeToString(deterministic=True)


def reduced_from_bytes(kept: bytes) -> Reduced:
    """A report that was kept; raises BadDataError for what is none."""
    wire = _read(pb.ReducedReport, kept, of="a reducer's report")
    most = len(wire.contributors) + len(wire.late_ids) + len(wire.missed)
    return _reduced_from_wire(wire, most_contributors=most)


def audited_to_bytes(report: Audited) -> bytes:
    """An auditor's finding as it is kept for evidence."""
    wire = pb.AuditedReport()
    _audited_to_wire(report, wire)
    return wire.SerializeToString(deterministic=True)


def audited_from_bytes(kept: bytes) -> Audited:
    """A finding that was kept; raises BadDataError for what is none."""
    return _audited_from_wire(_read(pb.AuditedReport, kept, of="an auditor's finding"))


def _read(kind: type[WireT], kept: bytes, *, of: str) -> WireT:
    try:
        return kind.FromString(kept)
    except Exception as error:  # protobuf's DecodeError has no public base across versions
        raise BadDataError(f"{of} cannot be read: {error}") from error


def _audited_to_wire(report: Audited, wire: pb.AuditedReport) -> None:
    wire.slice_index = report.slice_index
    wire.digest = report.digest
    wire.found = report.found
    wire.why = report.why
    wire.run_digest = report.run_digest
    wire.round = report.round
    wire.auditor_key = report.auditor_key
    wire.signature = report.signature


def _audited_from_wire(wire: pb.AuditedReport) -> Audited:
    return Audited(
        slice_index=wire.slice_index,
        digest=convert.digest_from_wire(wire.digest, of="a result"),
        found=convert.optional_digest_from_wire(wire.found, of="a result") or b"",
        why=wire.why,
        run_digest=wire.run_digest,
        round=wire.round,
        auditor_key=wire.auditor_key,
        signature=wire.signature,
    )


def _reduced_to_wire(report: Reduced, wire: pb.ReducedReport) -> None:
    wire.slice_index = report.slice_index
    wire.digest = convert.optional_digest_to_wire(report.digest)
    contributors = convert.contributors_to_wire(
        report.contributors, report.contributions, report.factors
    )
    wire.contributors.extend(contributors)
    wire.header = report.header
    wire.late_ids.extend(report.late)
    wire.missed.update(report.missed)
    wire.error_before = report.error_before
    wire.error_after = report.error_after


def _reduced_from_wire(wire: pb.ReducedReport, *, most_contributors: int) -> Reduced:
    """More of anything than a plan has participants is not looked at."""

    def of_plan(told: Sequence[T]) -> Sequence[T]:
        return told if len(told) <= most_contributors else ()

    contributors, contributions, factors = convert.contributors_from_wire(
        of_plan(wire.contributors)
    )
    missed = sorted((NodeId(n), rounds) for n, rounds in wire.missed.items())
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
        missed=tuple(of_plan(missed)),
        error_before=before,
        error_after=after,
    )
