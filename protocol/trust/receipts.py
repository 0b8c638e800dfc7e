"""What a node's process signs in a round: payloads, findings, and receipts for contributions that it takes.

A reducer's report on a slice names all contributions that it took, those too that screening left out. The
report is signed with the result, by its digest in the result's header. So who holds a receipt, and is not
named, has both signatures of the reducer: one of them is a lie. A receipt holds for one process of the
reducer, one plan and one takeover of the slice, for whatever begins anew there may honestly have lost what
it took.

A process never signs two different things for one slot. Two would be taken for a lie
(protocol.trust.evidence). A process may come to a slot twice: a plan that was broken off is opened again,
and what is owed is another amount by then. It stays silent the second time, and goes on owing what it would
have contributed. As a reducer it has lost what it took by then: it signs no result without a contribution
that it has given a receipt for. Where it has signed one before, it gives no receipt for what that is made
without.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from protocol.errors import BadDataError
from protocol.trust.identity import Identity, is_signed_by, node_id_of
from protocol.v1 import transfer_pb2
from protocol.wire.findings import SignedT
from protocol.wire.messages import Reduced
from protocol.wire.payload import RESULT, Payload, PayloadError, PayloadHeader, Slot
from protocol.wire.rounds import (
    ContributionDigest,
    Digest,
    NodeId,
    contribution_digest,
    same_fields,
)

MAX_RECEIPT_BYTES = 1024
"""No receipt is larger; a longer one is refused unread."""

_TAG = b"atoll receipt 1\n"
"""What is signed begins with this, so that no signature can be taken for one of another kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """A reducer has taken a contribution; see transfer.proto for each field."""

    run_digest: Digest
    round: int
    plan_opened_at: float
    base_digest: bytes
    slice_index: int
    attempt: int
    contributor_id: NodeId
    body_digest: Digest
    process_id: int
    reducer_key: bytes = b""
    signature: bytes = b""

    @classmethod
    def of(cls, contribution: PayloadHeader, *, attempt: int, process_id: int) -> Self:
        """For a contribution, not signed yet. `attempt` counts the slice's takeovers until now."""
        return cls(
            run_digest=contribution.run_digest,
            round=contribution.round,
            plan_opened_at=contribution.plan_opened_at,
            base_digest=contribution.base_digest,
            slice_index=contribution.slice_index,
            attempt=attempt,
            contributor_id=contribution.sender_id,
            body_digest=contribution.body_digest,
            process_id=process_id,
        )

    @property
    def reducer_id(self) -> NodeId:
        """Who has signed it, if the signature holds."""
        return node_id_of(self.reducer_key)

    @property
    def unsigned(self) -> Self:
        """What it says, whoever says it."""
        return replace(self, reducer_key=b"", signature=b"")

    @property
    def statement(self) -> bytes:
        """What is signed: all but the signature."""
        return _TAG + replace(self, signature=b"").encode()

    def signed(self, by: Identity) -> Self:
        """With its reducer's signature. Signing again gives the same bytes."""
        receipt = replace(self, reducer_key=by.public_key)
        return replace(receipt, signature=by.sign(receipt.statement))

    def forgery(self) -> str:
        """Why nobody has signed it, in a sentence; empty where `reducer_id` has."""
        if not is_signed_by(self.reducer_key, self.statement, self.signature):
            return f"a receipt for slice {self.slice_index} of round {self.round} has no right signature"
        return ""

    def encode(self) -> bytes:
        """Its bytes, as they are signed and sent."""
        wire = transfer_pb2.Receipt(**same_fields(self, Receipt))
        return wire.SerializeToString(deterministic=True)

    @classmethod
    def decode(cls, encoded: bytes) -> Self:
        """Reads a receipt; raises BadDataError for what is none, or is not canonical."""
        if len(encoded) > MAX_RECEIPT_BYTES:
            raise BadDataError(
                f"a receipt of {len(encoded)} bytes is longer than {MAX_RECEIPT_BYTES}"
            )
        try:
            wire = transfer_pb2.Receipt.FromString(encoded)
        except Exception as error:  # protobuf's DecodeError has no public base across versions
            raise BadDataError(f"not a receipt: {error}") from error
        receipt = cls(**same_fields(wire, cls))
        if receipt.encode() != encoded:
            raise BadDataError("a receipt must be encoded canonically, without unknown fields")
        return receipt


@dataclass(frozen=True, slots=True, kw_only=True)
class Omission:
    """Whom a reducer has left out of its result, against its own receipt."""

    round: int
    slice_index: int
    reducer_id: NodeId
    contributor_id: NodeId
    result: Digest  # that the contribution is not in

    @property
    def reason(self) -> str:
        """The same words whoever shows it."""
        return (
            f"it signed a receipt for the contribution of {self.contributor_id} to slice "
            f"{self.slice_index} of round {self.round}, and left it out of the report that it signed"
        )


def omission_in(receipt: bytes, told: Reduced, *, run_digest: Digest) -> Omission:
    """What a receipt and a reducer's report prove. Raises BadDataError where they prove nothing."""
    shown = Receipt.decode(receipt)
    place = f"slice {shown.slice_index} of round {shown.round}"
    if shown.run_digest != run_digest:
        raise BadDataError("the receipt is of another run")
    if why := shown.forgery():
        raise BadDataError(f"what is shown is no receipt: {why}")
    try:
        header = PayloadHeader.decode(told.header)
    except PayloadError as error:
        raise BadDataError(f"the report on {place} has no header of a result: {error}") from error
    if why := header.forgery():
        raise BadDataError(f"the report on {place} proves nothing: {why}")
    of_receipt = (RESULT, shown.reducer_id, shown.process_id, shown.attempt, *_plan_of(shown))
    of_result = (
        header.kind,
        header.sender_id,
        header.process_id,
        header.attempt,
        *_plan_of(header),
    )
    if of_receipt != of_result:
        raise BadDataError(
            f"the receipt for {place} is not of the process, the plan or the takeover of its result"
        )
    if not header.report_digest or header.report_digest != told.statement_digest:
        raise BadDataError(f"the report on {place} is not the one that is signed with its result")
    named = zip(told.contributors, told.contributions, strict=True)
    taken = shown.contributor_id, contribution_digest(shown.body_digest)
    if any((contributor.node_id, digest) == taken for contributor, digest in named):
        raise BadDataError(f"the report on {place} names the contribution of the receipt")
    return Omission(
        round=shown.round,
        slice_index=shown.slice_index,
        reducer_id=shown.reducer_id,
        contributor_id=shown.contributor_id,
        result=header.digest,
    )


def _plan_of(told: Receipt | PayloadHeader) -> tuple[object, ...]:
    return told.run_digest, told.round, told.plan_opened_at, told.base_digest, told.slice_index


KEPT_ROUNDS = 64
"""What was signed for older rounds is forgotten: no plan of theirs is opened again."""


KEPT_PLANS = 4
"""What was taken by older plans is forgotten: none of them is opened again in this process."""

Taken = set[tuple[NodeId, ContributionDigest]]
"""Contributors to one slice, and what was taken of them."""

ByPlan = dict[tuple[int, float, bytes], dict[tuple[int, int], Taken]]
"""By plan, and then by slice and takeover."""


class AlreadySignedError(Exception):
    """What this process has signed before would contradict what it is to sign now."""


class PayloadSigner:
    """The signature of one process. `process_id` is what it announces when it attaches."""

    def __init__(self, identity: Identity) -> None:
        self.process_id = 0
        self._identity = identity
        self._signed: dict[Slot, bytes] = {}
        self._newest_round = 0
        self._taken: ByPlan = {}  # what it has given receipts for
        self._made: ByPlan = {}  # what its signed results are made of

    def receipt(self, contribution: PayloadHeader, *, attempt: int) -> Receipt | None:
        """For a contribution that was taken after so many takeovers of its slice.

        None where a result without it is signed: with that the receipt would prove a lie.
        """
        plan = contribution.round, contribution.plan_opened_at, contribution.base_digest
        place = contribution.slice_index, attempt
        taken = contribution.sender_id, contribution_digest(contribution.body_digest)
        made = self._made.get(plan, {}).get(place)
        if made is not None and taken not in made:
            return None
        _of_plan(self._taken, plan).setdefault(place, set()).add(taken)
        receipt = Receipt.of(contribution, attempt=attempt, process_id=self.process_id)
        return receipt.signed(self._identity)

    def signed_result(
        self, result: Payload, contributions: Mapping[NodeId, ContributionDigest]
    ) -> Payload:
        """A result that is made of these; raises AlreadySignedError where one is missing."""
        header = result.header
        plan = header.round, header.plan_opened_at, header.base_digest
        place = header.slice_index, header.attempt
        taken = self._taken.get(plan, {}).get(place, set())
        if lost := sorted(taken - set(contributions.items())):
            raise AlreadySignedError(
                f"this process has given receipts for {len(lost)} contributions to slice "
                f"{header.slice_index} of round {header.round} that it does not have any more"
            )
        signed = self.signed(result)
        _of_plan(self._made, plan)[place] = set(contributions.items())
        return signed

    def signed_finding(self, finding: SignedT, *, run_digest: Digest, round: int) -> SignedT:
        """What this node has found out about another one's work, with its signature."""
        return finding.signed(self._identity, run_digest=run_digest, round=round)

    def signed(self, payload: Payload) -> Payload:
        """The payload with its maker's process and signature; raises AlreadySignedError."""
        header = replace(payload.header, process_id=self.process_id).signed(self._identity)
        before = self._signed.setdefault(header.slot, header.statement)
        if before != header.statement:
            raise AlreadySignedError(
                f"this process has signed another {header.kind_name} of slice {header.slice_index} of "
                f"round {header.round}"
            )
        if header.round > self._newest_round:
            self._newest_round, oldest = header.round, header.round - KEPT_ROUNDS
            self._signed = {s: told for s, told in self._signed.items() if s.round >= oldest}
        return Payload(header=header, body=payload.body)


def _of_plan(kept: ByPlan, plan: tuple[int, float, bytes]) -> dict[tuple[int, int], Taken]:
    """What is kept of a plan, which is the newest where it is new."""
    if plan not in kept and len(kept) == KEPT_PLANS:
        del kept[next(iter(kept))]
    return kept.setdefault(plan, {})
