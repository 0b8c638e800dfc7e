"""Signs what a node's process makes, and never two different things for one slot.

Two would be taken for a lie (protocol.trust.evidence). A process may come to a slot twice: a plan that
was broken off is opened again, and what is owed is another amount by then. It stays silent the second time,
and goes on owing what it would have contributed. As a reducer it has lost what it took by then: it signs no
result without a contribution that it has given a receipt for (protocol.trust.receipts). Where it has signed
one before, it gives no receipt for what that is made without.
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
