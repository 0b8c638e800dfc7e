"""Signs what a node's process makes, and never two different things for one slot.

Two would be taken for a lie (protocol.trust.evidence). A process may come to a slot twice: a plan that
was broken off is opened again, and what is owed is another amount by then. It stays silent the second time,
and goes on owing what it would have contributed. As a reducer it has lost what it took by then: it signs no
result without a contribution that it has given a receipt for (protocol.trust.receipts).
"""

from collections.abc import Mapping
from dataclasses import replace

from protocol.trust.identity import Identity
from protocol.trust.receipts import Receipt
from protocol.wire.messages import SignedT
from protocol.wire.payload import Payload, PayloadHeader, Slot
from protocol.wire.rounds import (
    ContributionDigest,
    Digest,
    NodeId,
    contribution_digest,
)

KEPT_ROUNDS = 64
"""What was signed for older rounds is forgotten: no plan of theirs is opened again."""


KEPT_PLANS = 4
"""What was taken by older plans is forgotten: none of them is opened again in this process."""

Taken = set[tuple[NodeId, ContributionDigest]]
"""Contributors to one slice, and what was taken of them."""


class AlreadySignedError(Exception):
    """What this process has signed before would contradict what it is to sign now."""


class PayloadSigner:
    """The signature of one process. `process_id` is what it announces when it attaches."""

    def __init__(self, identity: Identity) -> None:
        self.process_id = 0
        self._identity = identity
        self._signed: dict[Slot, bytes] = {}
        self._newest_round = 0
        # By plan, and then by slice and takeover: what it has given receipts for.
        self._taken: dict[tuple[int, float, bytes], dict[tuple[int, int], Taken]] = {}

    def receipt(self, contribution: PayloadHeader, *, attempt: int) -> Receipt:
        """For a contribution that was taken after so many takeovers of its slice."""
        plan = contribution.round, contribution.plan_opened_at, contribution.base_digest
        if plan not in self._taken and len(self._taken) == KEPT_PLANS:
            del self._taken[next(iter(self._taken))]
        taken = self._taken.setdefault(plan, {})
        of_slice = taken.setdefault((contribution.slice_index, attempt), set())
        of_slice.add((contribution.sender_id, contribution_digest(contribution.body_digest)))
        receipt = Receipt.of(contribution, attempt=attempt, process_id=self.process_id)
        return receipt.signed(self._identity)

    def signed_result(
        self, result: Payload, contributions: Mapping[NodeId, ContributionDigest]
    ) -> Payload:
        """A result that is made of these; raises AlreadySignedError where one is missing."""
        header = result.header
        plan = header.round, header.plan_opened_at, header.base_digest
        taken = self._taken.get(plan, {}).get((header.slice_index, header.attempt), set())
        if lost := sorted(taken - set(contributions.items())):
            raise AlreadySignedError(
                f"this process has given receipts for {len(lost)} contributions to slice "
                f"{header.slice_index} of round {header.round} that it does not have any more"
            )
        return self.signed(result)

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
