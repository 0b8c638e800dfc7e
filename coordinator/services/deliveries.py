"""What the core has to tell a session, as messages on the wire."""

from collections import deque

from coordinator.streams import Delivery, RosterDiffers, RosterNow
from coordinator.swarm.actions import (
    AskCommits,
    AskEvaluation,
    AskRefetch,
    SendCommit,
    SendDeparted,
    SendFinished,
    SendIdle,
    SendPlan,
    SendResultOffered,
    SendTakeover,
)
from protocol import convert
from protocol.signing import CommitSigner, statement_of
from protocol.v1 import session_pb2 as pb


class Messages:
    """Deliveries as messages, each made once: a plan for a thousand nodes names a thousand nodes."""

    KEPT = 8

    def __init__(self, signer: CommitSigner) -> None:
        self._signer = signer
        self._made: deque[tuple[Delivery, pb.SubscribeResponse]] = deque(maxlen=self.KEPT)

    def message(self, delivery: Delivery) -> pb.SubscribeResponse:
        """The message; do not change it."""
        for known, message in self._made:
            if known is delivery:
                return message
        message = delivery_to_wire(delivery, self._signer)
        self._made.appendleft((delivery, message))
        return message


def delivery_to_wire(delivery: Delivery, signer: CommitSigner) -> pb.SubscribeResponse:
    """One event of a session; commits leave with a signature."""
    match delivery:
        case RosterNow(members=members):
            return pb.SubscribeResponse(roster=convert.roster_to_wire(members))
        case RosterDiffers(joined=joined, gone=gone):
            return pb.SubscribeResponse(
                roster_change=pb.RosterChange(
                    joined=map(convert.roster_entry_to_wire, joined), gone_ids=gone
                )
            )
        case SendPlan(plan=plan):
            return pb.SubscribeResponse(plan=convert.plan_to_wire(plan))
        case SendCommit(commit=commit):
            message = convert.commit_to_wire(commit)
            message.signature = signer.signature_of(statement_of(message))
            return pb.SubscribeResponse(commit=message)
        case SendDeparted(round=number, node_ids=node_ids):
            return pb.SubscribeResponse(departed=pb.Departed(round=number, node_ids=node_ids))
        case SendIdle(round=number, node_ids=node_ids):
            return pb.SubscribeResponse(idle=pb.Idle(round=number, node_ids=node_ids))
        case SendTakeover():
            return pb.SubscribeResponse(
                takeover=pb.Takeover(
                    round=delivery.round,
                    slice_index=delivery.slice_index,
                    reducer_id=delivery.reducer_id,
                    attempt=delivery.attempt,
                    contribute_seconds=delivery.contribute_seconds,
                )
            )
        case SendResultOffered():
            return pb.SubscribeResponse(
                result_offered=pb.ResultOffered(
                    round=delivery.round,
                    slice_index=delivery.slice_index,
                    digest=delivery.digest,
                    holder_ids=delivery.holder_ids,
                )
            )
        case AskCommits(after_round=after_round):
            return pb.SubscribeResponse(commits_wanted=pb.CommitsWanted(after_round=after_round))
        case AskEvaluation(round=number):
            return pb.SubscribeResponse(evaluate=pb.Evaluate(round=number))
        case AskRefetch(round=number, outer_digest=digest, reason=reason):
            return pb.SubscribeResponse(
                refetch=pb.Refetch(round=number, outer_digest=digest, reason=reason)
            )
        case SendFinished(round=number, outer_digest=digest, reason=reason):
            return pb.SubscribeResponse(
                finished=pb.Finished(round=number, outer_digest=digest, reason=reason)
            )
