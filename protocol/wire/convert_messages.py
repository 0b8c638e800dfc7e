"""Messages and reports as they travel in a session: one conversion each way.

A kind that the other side does not know is refused, never passed over in silence.
"""

import math
from collections.abc import Iterable

from protocol.errors import BadDataError, ProtocolMismatchError
from protocol.trust.rulings import SignedRuling, ruling_from_json
from protocol.v1 import ruling_pb2
from protocol.v1 import session_pb2 as pb
from protocol.wire import convert
from protocol.wire.messages import (
    Applied,
    AuditAsked,
    Audited,
    CommitsWanted,
    Draining,
    EquivocationSeen,
    Evaluated,
    EvaluationAsked,
    Held,
    LeftOutSeen,
    Message,
    ParticipantsDeparted,
    ParticipantsIdle,
    PunchAsked,
    Reduced,
    RefetchAsked,
    Report,
    ResultOffered,
    ResultRefused,
    RosterChanged,
    RosterTold,
    RoundCommitted,
    RoundOpened,
    RulingsTold,
    RunFinished,
    SliceTakenOver,
    SpotCheckAsked,
    SpotChecked,
    Trained,
    Wrote,
    audited_from_wire,
    audited_to_wire,
    reduced_from_wire,
    reduced_to_wire,
    result_refused_from_wire,
    result_refused_to_wire,
    spot_checked_from_wire,
    spot_checked_to_wire,
)
from protocol.wire.rounds import (
    Digest,
    NodeId,
)


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
        case SpotCheckAsked():
            wire.spot_check.round = message.round
            wire.spot_check.contributor_id = message.contributor_id
            wire.spot_check.seed = message.seed
            wire.spot_check.seconds = message.seconds
        case AuditAsked():
            wire.audit.round = message.round
            wire.audit.reducer_id = message.reducer_id
            wire.audit.attempt = message.attempt
            wire.audit.seconds = message.seconds
            reduced_to_wire(message.reduced, wire.audit.reduced)
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
        case PunchAsked(node_id=node_id, multiaddr=multiaddr):
            wire.punch.CopyFrom(pb.Punch(node_id=node_id, multiaddr=multiaddr))
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
        case "spot_check":
            return SpotCheckAsked(
                round=wire.spot_check.round,
                contributor_id=NodeId(wire.spot_check.contributor_id),
                seed=wire.spot_check.seed,
                seconds=wire.spot_check.seconds,
            )
        case "audit":
            told = wire.audit.reduced
            most = len(told.contributors) + len(told.late_ids) + len(told.missed)
            return AuditAsked(
                round=wire.audit.round,
                reducer_id=NodeId(wire.audit.reducer_id),
                attempt=wire.audit.attempt,
                seconds=wire.audit.seconds,
                reduced=reduced_from_wire(wire.audit.reduced, most_contributors=most),
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
        case "punch":
            return PunchAsked(node_id=NodeId(wire.punch.node_id), multiaddr=wire.punch.multiaddr)
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
            reduced_to_wire(report, wire.reduced)
        case Held():
            wire.held.slice_index = report.slice_index
            wire.held.digest = report.digest
            if report.agreement is not None:
                wire.held.agreement = report.agreement
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
        case SpotChecked():
            spot_checked_to_wire(report, wire.spot_checked)
        case Audited():
            audited_to_wire(report, wire.audited)
        case LeftOutSeen(receipt=receipt):
            wire.left_out.receipt = receipt
        case ResultRefused():
            result_refused_to_wire(report, wire.result_refused)
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
            return reduced_from_wire(wire.reduced, most_contributors=most_contributors)
        case "held":
            digest = convert.digest_from_wire(wire.held.digest, of="a result")
            told = wire.held.agreement if wire.held.HasField("agreement") else math.nan
            agreement = told if math.isfinite(told) else None
            return Held(slice_index=wire.held.slice_index, digest=digest, agreement=agreement)
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
        case "spot_checked":
            return spot_checked_from_wire(wire.spot_checked)
        case "audited":
            return audited_from_wire(wire.audited)
        case "left_out":
            return LeftOutSeen(receipt=wire.left_out.receipt)
        case "result_refused":
            return result_refused_from_wire(wire.result_refused)
        case _:
            raise BadDataError(
                "the report is of no kind that this coordinator knows",
                next_step="use the same version of Atoll on both sides",
            )
