"""A receipt and a signed report without the contribution prove that a reducer lies, and nothing else does."""

from dataclasses import replace
from typing import Any

import pytest

from protocol.errors import BadDataError
from protocol.trust.evidence import (
    MOST_CHARACTERS,
    of_equivocation,
    of_findings,
    of_omission,
    proven_by,
)
from protocol.trust.identity import Identity
from protocol.trust.receipts import (
    KEPT_PLANS,
    MAX_RECEIPT_BYTES,
    AlreadySignedError,
    PayloadSigner,
    Receipt,
    omission_in,
)
from protocol.trust.rulings import Ruling
from protocol.wire.findings import Audited
from protocol.wire.messages import Reduced
from protocol.wire.payload import CONTRIBUTION, RESULT, Payload, PayloadHeader
from protocol.wire.rounds import (
    ContributionDigest,
    Contributor,
    Digest,
    NodeId,
    contribution_digest,
)
from tests.unit.payload_scene import sealed
from tests.unit.rulings_scene import quarantine

RUN = Digest(b"r" * 32)
REDUCER, LEFT, TAKEN = Identity.generate(), Identity.generate(), Identity.generate()
PROCESS = 77


def payload(kind: int, by: Identity, body: bytes, **changes: object) -> Payload:
    values: dict[str, object] = {
        "sender_id": by.node_id,
        "run_digest": RUN,
        "round": 7,
        "slice_index": 3,
        "num_elements": 4,
        "base_digest": b"b" * 32,
        "plan_opened_at": 12.5,
        "process_id": PROCESS,
    }
    return sealed(kind, body=body, signer=by, **values | changes)  # type: ignore[arg-type]


def contribution(by: Identity = LEFT, body: bytes = b"work", **changes: object) -> PayloadHeader:
    return payload(CONTRIBUTION, by, body, **{"samples": 1, "tokens": 1, **changes}).header


def receipt(by: Identity = REDUCER, *, attempt: int = 0) -> Receipt:
    return Receipt.of(contribution(), attempt=attempt, process_id=PROCESS).signed(by)


def report(*named: PayloadHeader, factors: tuple[int, ...] = (), **changes: object) -> Reduced:
    """A reducer's report on contributions, as it signs it with its result."""
    told = Reduced(
        slice_index=3,
        digest=None,
        contributors=tuple(Contributor(node_id=h.sender_id, samples=1, tokens=1) for h in named),
        contributions=tuple(contribution_digest(h.body_digest) for h in named),
        factors=factors,
    )
    of = {"report_digest": told.statement_digest, **changes}
    header = payload(RESULT, REDUCER, b"mean", **of).header
    return replace(told, digest=header.digest, header=header.encode())


def test_who_holds_a_receipt_and_is_not_named_proves_that_the_reducer_lies() -> None:
    told = report(contribution(TAKEN))
    found = omission_in(receipt().encode(), told, run_digest=RUN)
    assert (found.reducer_id, found.contributor_id) == (REDUCER.node_id, LEFT.node_id)
    assert (found.round, found.slice_index, found.result) == (7, 3, told.digest)
    assert "signed a receipt" in found.reason


def test_who_is_named_with_another_body_than_was_taken_is_left_out_too() -> None:
    told = report(contribution(LEFT, b"something else"))
    assert omission_in(receipt().encode(), told, run_digest=RUN).contributor_id == LEFT.node_id


@pytest.mark.parametrize("factor", [1 << 16, 1000, 0], ids=["whole", "clipped", "screened out"])
def test_a_contribution_that_the_report_names_is_not_left_out_whatever_became_of_it(
    factor: int,
) -> None:
    told = report(contribution(), contribution(TAKEN), factors=(factor, 1 << 16))
    with pytest.raises(BadDataError, match="names the contribution"):
        omission_in(receipt().encode(), told, run_digest=RUN)


@pytest.mark.parametrize(
    "changes",
    [
        {"process_id": 78},
        {"attempt": 1},
        {"round": 8},
        {"slice_index": 4},
        {"base_digest": b"c" * 32},
        {"plan_opened_at": 13.0},
        {"run_digest": Digest(bytes(32))},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_begins_anew_may_have_lost_what_was_taken_before(changes: dict[str, Any]) -> None:
    with pytest.raises(BadDataError, match="not of the process, the plan or the takeover"):
        omission_in(receipt().encode(), report(contribution(TAKEN), **changes), run_digest=RUN)


def test_nobody_is_accused_with_a_signature_that_is_not_its_own() -> None:
    told = report(contribution(TAKEN))
    theirs = receipt(LEFT)  # who was left out cannot write one itself
    with pytest.raises(BadDataError, match="not of the process"):
        omission_in(theirs.encode(), told, run_digest=RUN)
    forged = replace(theirs, reducer_key=REDUCER.public_key)
    changed = replace(receipt(), body_digest=Digest(bytes(32)))
    for false in (forged, changed, replace(receipt(), signature=b"")):
        with pytest.raises(BadDataError, match="no right signature"):
            omission_in(false.encode(), told, run_digest=RUN)
    header = replace(PayloadHeader.decode(told.header), norm=3.0)
    with pytest.raises(BadDataError, match="proves nothing"):
        omission_in(receipt().encode(), replace(told, header=header.encode()), run_digest=RUN)


def test_a_report_that_was_not_signed_with_the_result_proves_nothing() -> None:
    told = report(contribution(), contribution(TAKEN))
    cut = replace(
        told, contributors=told.contributors[1:], contributions=told.contributions[1:]
    )  # what a coordinator might make of it
    unsigned = report(contribution(TAKEN), report_digest=b"")  # where nobody audits
    for false in (cut, unsigned):
        with pytest.raises(BadDataError, match="not the one that is signed"):
            omission_in(receipt().encode(), false, run_digest=RUN)


def test_what_is_of_another_run_or_unreadable_proves_nothing() -> None:
    told = report(contribution(TAKEN))
    with pytest.raises(BadDataError, match="another run"):
        omission_in(receipt().encode(), told, run_digest=Digest(bytes(32)))
    with pytest.raises(BadDataError, match="not a receipt"):
        omission_in(b"\xff", told, run_digest=RUN)
    with pytest.raises(BadDataError, match="canonically"):
        omission_in(receipt().encode() + b"\xfa\x01\x00", told, run_digest=RUN)
    with pytest.raises(BadDataError, match="longer than"):
        omission_in(bytes(MAX_RECEIPT_BYTES + 1), told, run_digest=RUN)
    with pytest.raises(BadDataError, match="no header"):
        omission_in(receipt().encode(), replace(told, header=b"\xff"), run_digest=RUN)


def named(*headers: PayloadHeader) -> dict[NodeId, ContributionDigest]:
    return {h.sender_id: contribution_digest(h.body_digest) for h in headers}


def result(**changes: object) -> Payload:
    return payload(RESULT, REDUCER, b"mean", **changes)


def test_an_honest_process_signs_no_result_without_what_it_gave_receipts_for() -> None:
    """It lost that when its round was broken off, and is silent rather than a liar."""
    signer = PayloadSigner(REDUCER)
    signer.process_id = PROCESS
    taken = signer.receipt(contribution(), attempt=0)
    assert taken is not None
    assert not taken.forgery() and taken.reducer_id == REDUCER.node_id
    assert signer.receipt(contribution(), attempt=0) == taken, "it is pushed a second time"
    with pytest.raises(AlreadySignedError, match="receipts for 1 contributions to slice 3"):
        signer.signed_result(result(), named(contribution(TAKEN)))
    signer.signed_result(result(), named(contribution(TAKEN), contribution()))
    signer.signed_result(result(attempt=1), {})
    signer.signed_result(result(plan_opened_at=13.0), {})


def test_an_honest_process_gives_no_receipt_for_what_its_signed_result_is_made_without() -> None:
    """Its plan is opened again, and a contribution comes that was too late the first time."""
    signer = PayloadSigner(REDUCER)
    signer.process_id = PROCESS
    signer.signed_result(result(), named(contribution(TAKEN)))
    assert signer.receipt(contribution(), attempt=0) is None
    assert signer.receipt(contribution(TAKEN), attempt=0) is not None, "it is pushed a second time"
    assert signer.receipt(contribution(), attempt=1) is not None
    assert signer.receipt(contribution(plan_opened_at=13.0), attempt=0) is not None


def test_what_was_taken_by_the_latest_plans_is_remembered_and_no_more() -> None:
    signer = PayloadSigner(REDUCER)
    for at in range(KEPT_PLANS + 1):
        signer.receipt(contribution(plan_opened_at=float(at)), attempt=0)
    signer.signed_result(result(plan_opened_at=0.0), {})
    for at in range(1, KEPT_PLANS + 1):
        with pytest.raises(AlreadySignedError):
            signer.signed_result(result(plan_opened_at=float(at)), {})


def ruling(evidence: tuple[str, ...], about: Identity = REDUCER) -> Ruling:
    return quarantine(about.node_id, evidence)


def test_a_ruling_s_evidence_is_checked_by_anybody_and_is_about_whom_it_is_about() -> None:
    evidence = of_omission(receipt().encode(), report(contribution(TAKEN)))
    assert proven_by(ruling(evidence), run_digest=RUN) == "its receipt and its report"
    assert not proven_by(ruling(()), run_digest=RUN)
    with pytest.raises(BadDataError, match="and its evidence about"):
        proven_by(ruling(evidence, about=TAKEN), run_digest=RUN)
    with pytest.raises(BadDataError, match="another run"):
        proven_by(ruling(evidence), run_digest=Digest(bytes(32)))
    innocent = of_omission(receipt().encode(), report(contribution()))
    with pytest.raises(BadDataError, match="names the contribution"):
        proven_by(ruling(innocent), run_digest=RUN)


def test_two_signatures_for_one_slot_are_evidence() -> None:
    pair = [payload(RESULT, REDUCER, body).header.encode() for body in (b"one", b"other")]
    evidence = of_equivocation(*pair)
    assert proven_by(ruling(evidence), run_digest=RUN) == "its two signatures"
    with pytest.raises(BadDataError, match="do not contradict"):
        proven_by(ruling(of_equivocation(pair[0], pair[0])), run_digest=RUN)


def finding(by: Identity, told: Reduced, found: bytes = b"f" * 32) -> Audited:
    assert told.digest is not None
    unsigned = Audited(slice_index=3, digest=told.digest, found=found, why="another")
    return unsigned.signed(by, run_digest=RUN, round=7)


def test_what_auditors_sign_is_evidence_and_a_coordinator_cannot_make_it_up() -> None:
    told = report(contribution())
    assert told.digest is not None
    signed = [finding(LEFT, told), finding(TAKEN, told)]
    words = proven_by(ruling(of_findings(told, signed)), run_digest=RUN)
    assert words == "signed findings of 2 auditors"
    agreeing = finding(REDUCER, told, found=told.digest)
    words = proven_by(ruling(of_findings(told, [*signed, agreeing])), run_digest=RUN)
    assert words == "signed findings of 2 auditors, and of 1 that it is right"
    twice = proven_by(ruling(of_findings(told, [signed[0], signed[0]])), run_digest=RUN)
    assert twice == "signed findings of one auditor"
    changed = replace(signed[0], found=b"g" * 32)
    with pytest.raises(BadDataError, match="signature that is not"):
        proven_by(ruling(of_findings(told, [changed])), run_digest=RUN)
    other = report(contribution(TAKEN))
    with pytest.raises(BadDataError, match="on another result"):
        proven_by(ruling(of_findings(other, signed)), run_digest=RUN)
    with pytest.raises(BadDataError, match="of another run"):
        proven_by(ruling(of_findings(told, signed)), run_digest=Digest(bytes(32)))


def test_evidence_that_is_too_long_or_unsigned_or_unreadable_is_none() -> None:
    told = report(contribution())
    unsigned = Audited(slice_index=3, digest=Digest(bytes(32)), found=b"")
    assert of_findings(told, [unsigned]) == ()
    many = [contribution(TAKEN, b"%d" % n) for n in range(MOST_CHARACTERS // 64)]
    assert of_omission(receipt().encode(), report(*many)) == ()
    for false in (("header zz",), ("hearsay 00",), ("header 00",), ("header 00", "finding 00")):
        with pytest.raises(BadDataError):
            proven_by(ruling(false), run_digest=RUN)
