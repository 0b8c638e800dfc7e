"""Messages and reports as they travel in a session: one conversion each way.

A kind that the other side does not know is refused, never passed over in silence.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from protocol.errors import BadDataError, ProtocolMismatchError
from protocol.trust.rulings import SignedRuling, ruling_from_json
from protocol.v1 import round_pb2, ruling_pb2
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
    reduced_from_wire,
    reduced_to_wire,
)
from protocol.wire.rounds import NodeId, Plan

_MESSAGES: Mapping[str, type[Message]] = {
    "roster": RosterTold,
    "roster_change": RosterChanged,
    "departed": ParticipantsDeparted,
    "idle": ParticipantsIdle,
    "takeover": SliceTakenOver,
    "result_offered": ResultOffered,
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
        case AuditAsked():
            wire = pb.SubscribeResponse()
            wire.audit.round = message.round
            wire.audit.reducer_id = message.reducer_id
            wire.audit.attempt = message.attempt
            wire.audit.seconds = message.seconds
            reduced_to_wire(message.reduced, wire.audit.reduced)
            return wire
        case RulingsTold(rulings=rulings, signatures=signatures):
            signed = zip(rulings, signatures, strict=True)
            told = rulings_to_wire(SignedRuling(ruling=r, signature=s) for r, s in signed)
            return pb.SubscribeResponse(rulings=told)
    fields: dict[str, Any] = {_MESSAGE_NAMES[type(message)]: convert.fields_to_wire(message)}
    return pb.SubscribeResponse(**fields)


def message_from_wire(wire: pb.SubscribeResponse) -> Message:
    """One message of a session's stream; raises ProtocolMismatchError for one that is not known here."""
    match wire.WhichOneof("event"):
        case "plan":
            return RoundOpened(plan=convert.from_wire(wire.plan, Plan))
        case "commit":
            return RoundCommitted(commit=convert.commit_from_wire(wire.commit))
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
        case "rulings":
            signed = rulings_from_wire(wire.rulings)
            return RulingsTold(
                rulings=tuple(one.ruling for one in signed),
                signatures=tuple(one.signature for one in signed),
            )
        case str(name) if name in _MESSAGES:
            return convert.from_wire(getattr(wire, name), _MESSAGES[name])
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
}
_REPORT_NAMES = {kind: name for name, kind in _REPORTS.items()}


def report_to_wire(round: int, report: Report) -> pb.Report:
    """One report about a round."""
    if isinstance(report, Reduced):
        wire = pb.Report(round=round)
        reduced_to_wire(report, wire.reduced)
        return wire
    fields: dict[str, Any] = {_REPORT_NAMES[type(report)]: convert.fields_to_wire(report)}
    return pb.Report(round=round, **fields)


def report_from_wire(wire: pb.Report, *, most_contributors: int) -> Report:
    """One report about a round, whose number the caller reads; raises BadDataError for an unknown one.

    More contributors than can be of that round's plan are not looked at: the result has none then.
    """
    match wire.WhichOneof("report"):
        case "reduced":
            return reduced_from_wire(wire.reduced, most_contributors=most_contributors)
        case str(name) if name in _REPORTS:
            return _checked(convert.from_wire(getattr(wire, name), _REPORTS[name]))
        case _:
            raise BadDataError(
                "the report is of no kind that this coordinator knows",
                next_step="use the same version of Atoll on both sides",
            )


def _checked(report: Report) -> Report:
    match report:
        case Held(agreement=float(told)) if not math.isfinite(told):
            return replace(report, agreement=None)
        case Audited(found=found):
            convert.optional_digest_from_wire(found, of="what an auditor found")
    return report
