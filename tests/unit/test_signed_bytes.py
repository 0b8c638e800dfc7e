"""What members sign, and bytes that are kept with it: golden, for a signature of old must still hold.

Rulings carry this as evidence, and `atoll audit` checks it as long as there is the log.
"""

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protocol.trust.evidence import of_spot_checks, proven_by
from protocol.trust.identity import Identity
from protocol.trust.receipts import Receipt
from protocol.v1 import session_pb2
from protocol.wire.findings import Audited, Finding, LeftOutSeen, ResultRefused, SpotChecked
from protocol.wire.messages import (
    Reduced,
    Report,
    SpotCheckAsked,
    message_from_wire,
    message_to_wire,
    report_from_wire,
    report_to_wire,
)
from protocol.wire.rounds import ContributionDigest, Contributor, Digest, NodeId
from tests.unit.golden.golden_file import golden_bytes, matches_golden
from tests.unit.rulings_scene import quarantine

SIGNER = Identity(private_key=Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
RUN, BASE, BODY = (Digest(bytes([value]) * 32) for value in (0x11, 0x22, 0x33))
MEMBER = NodeId("a" * 32)

RECEIPT = Receipt(
    run_digest=RUN,
    round=7,
    plan_opened_at=12.5,
    base_digest=BASE,
    slice_index=3,
    attempt=1,
    contributor_id=MEMBER,
    body_digest=BODY,
    process_id=77,
).signed(SIGNER)

SPOT_CHECKED = SpotChecked(contributor_id=MEMBER, num_samples=40, gap=0.125, score=-1.5).signed(
    SIGNER, run_digest=RUN, round=7
)

AUDITED = Audited(slice_index=3, digest=BASE, found=BODY).signed(SIGNER, run_digest=RUN, round=7)

REFUSED = ResultRefused(slice_index=3, digest=BASE, header=b"header").signed(
    SIGNER, run_digest=RUN, round=7
)

REDUCED = Reduced(
    slice_index=3,
    digest=BASE,
    contributors=(Contributor(node_id=MEMBER, samples=40, tokens=320),),
    contributions=(ContributionDigest(b"c" * 16),),
    factors=(32768,),
    header=b"header",
    late=(NodeId("b" * 32),),
    missed=((MEMBER, 2),),
    error_before=BODY,
    error_after=RUN,
)


def test_a_receipt_is_these_bytes_and_its_signature_holds() -> None:
    assert matches_golden("receipt-1", RECEIPT.encode())
    read = Receipt.decode(golden_bytes("receipt-1"))
    assert read == RECEIPT and not read.forgery()
    assert matches_golden("receipt-statement-1", RECEIPT.statement)


@pytest.mark.parametrize(
    ("name", "finding"),
    [
        ("spot-check-statement-1", SPOT_CHECKED),
        ("audit-statement-1", AUDITED),
        ("refused-statement-1", REFUSED),
    ],
)
def test_a_finding_signs_these_bytes(name: str, finding: Finding) -> None:
    assert matches_golden(name, finding.statement)
    assert not finding.forgery(SIGNER.node_id)


def test_a_report_is_known_in_its_result_by_this_digest() -> None:
    assert matches_golden("report-digest-1", REDUCED.statement_digest)


@pytest.mark.parametrize(
    ("name", "report"),
    [
        ("spot-checked-wire-1", SPOT_CHECKED),
        ("left-out-wire-1", LeftOutSeen(receipt=RECEIPT.encode())),
        ("audited-wire-1", AUDITED),
        ("reduced-wire-1", REDUCED),
        ("refused-wire-1", REFUSED),
    ],
)
def test_reports_about_others_are_these_bytes(name: str, report: Report) -> None:
    wire = report_to_wire(7, report)
    assert matches_golden(name, wire.SerializeToString(deterministic=True))
    read = session_pb2.Report.FromString(golden_bytes(name))
    assert read.round == 7 and report_from_wire(read, most_contributors=8) == report


def test_an_order_to_check_is_these_bytes() -> None:
    order = SpotCheckAsked(round=7, contributor_id=MEMBER, seed=1 << 62, seconds=2.5)
    assert matches_golden(
        "spot-check-wire-1", message_to_wire(order).SerializeToString(deterministic=True)
    )
    read = session_pb2.SubscribeResponse.FromString(golden_bytes("spot-check-wire-1"))
    assert message_from_wire(read) == order


def test_evidence_that_was_kept_proves_what_it_did() -> None:
    evidence = of_spot_checks([SPOT_CHECKED])
    assert matches_golden("spot-check-evidence-1", "\n".join(evidence).encode())
    kept = tuple(golden_bytes("spot-check-evidence-1").decode().split("\n"))
    ruling = quarantine(MEMBER, kept)
    assert proven_by(ruling, run_digest=RUN) == "1 signed spot checks of one member"
