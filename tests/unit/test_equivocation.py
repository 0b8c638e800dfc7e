"""What proves that a member lies: two things that it signed for one slot, or nonsense that others found."""

from dataclasses import replace
from typing import Any

import pytest

from protocol.errors import BadDataError
from protocol.trust.evidence import equivocation_in, of_nonsense, of_refusals, proven_by
from protocol.trust.identity import Identity
from protocol.trust.receipts import AlreadySignedError, PayloadSigner
from protocol.wire.findings import Audited, ResultRefused
from protocol.wire.messages import Reduced
from protocol.wire.payload import CHUNK, CONTRIBUTION, RESULT, Payload, PayloadHeader
from protocol.wire.rounds import ContributionDigest, Contributor, Digest, NodeId
from tests.unit.payload_scene import sealed
from tests.unit.rulings_scene import quarantine

RUN = Digest(b"r" * 32)
LIAR, OTHER = Identity.generate(), Identity.generate()


def payload(body: bytes, kind: int = CONTRIBUTION, **changes: object) -> Payload:
    values: dict[str, object] = {
        "sender_id": LIAR.node_id,
        "run_digest": RUN,
        "round": 7,
        "slice_index": 3,
        "num_elements": 4,
        "samples": 1,
        "tokens": 1,
        "base_digest": b"b" * 32,
        "plan_opened_at": 12.5,
        "process_id": 77,
    }
    return sealed(kind, body=body, **values | changes)  # type: ignore[arg-type]


def signed(body: bytes, by: Identity = LIAR, **changes: Any) -> PayloadHeader:
    return payload(body, **changes).header.signed(by)


@pytest.mark.parametrize("kind", [CONTRIBUTION, RESULT])
def test_two_signed_things_for_one_slot_prove_a_lie_in_whatever_order_they_are_shown(
    kind: int,
) -> None:
    one, other = signed(b"one", kind=kind).encode(), signed(b"other", kind=kind).encode()
    found = equivocation_in(one, other, run_digest=RUN)
    assert found.node_id == LIAR.node_id
    assert "slice 3 of round 7" in found.reason
    assert equivocation_in(other, one, run_digest=RUN) == found


def test_another_weight_for_the_same_body_is_a_lie_too() -> None:
    one, other = signed(b"same"), signed(b"same", tokens=9)
    assert equivocation_in(one.encode(), other.encode(), run_digest=RUN).node_id == LIAR.node_id


@pytest.mark.parametrize(
    "changes",
    [
        {"process_id": 78},
        {"attempt": 1},
        {"round": 8},
        {"slice_index": 4},
        {"base_digest": b"c" * 32},
        {"plan_opened_at": 13.0},
        {"kind": RESULT},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_was_made_for_different_slots_proves_nothing(changes: dict[str, Any]) -> None:
    with pytest.raises(BadDataError, match="do not contradict"):
        equivocation_in(
            signed(b"one").encode(), signed(b"other", **changes).encode(), run_digest=RUN
        )


def test_one_thing_shown_twice_proves_nothing() -> None:
    with pytest.raises(BadDataError, match="do not contradict"):
        equivocation_in(signed(b"one").encode(), signed(b"one").encode(), run_digest=RUN)


def test_nobody_is_accused_with_a_signature_that_is_not_its_own() -> None:
    forged = signed(b"other", by=OTHER)
    for false in (
        forged,
        replace(forged, sender_key=LIAR.public_key),
        payload(b"other").header,
        replace(signed(b"third"), body_digest=Digest(bytes(32))),
    ):
        with pytest.raises(BadDataError, match="no proof"):
            equivocation_in(signed(b"one").encode(), false.encode(), run_digest=RUN)


def test_what_is_of_another_run_or_unreadable_or_never_signed_proves_nothing() -> None:
    one = signed(b"one").encode()
    with pytest.raises(BadDataError, match="another run"):
        equivocation_in(one, signed(b"other").encode(), run_digest=Digest(bytes(32)))
    with pytest.raises(BadDataError, match="no header"):
        equivocation_in(one, b"\xff", run_digest=RUN)
    chunks = [payload(body, kind=CHUNK).header.encode() for body in (b"one", b"other")]
    with pytest.raises(BadDataError, match="do not contradict"):
        equivocation_in(*chunks, run_digest=RUN)


def test_an_honest_process_never_signs_two_things_for_one_slot() -> None:
    signer = PayloadSigner(LIAR)
    signer.process_id = 5
    first = signer.signed(payload(b"one"))
    assert first.header.process_id == 5 and not first.header.forgery()
    assert signer.signed(payload(b"one")) == first
    with pytest.raises(AlreadySignedError, match="slice 3 of round 7"):
        signer.signed(payload(b"other"))
    signer.signed(payload(b"other", slice_index=4))
    signer.signed(payload(b"other", attempt=1, kind=RESULT))


def test_another_process_of_the_same_node_may_make_another() -> None:
    """It has lost what the one before it held; both are honest."""
    headers = []
    for process_id, body in ((5, b"one"), (6, b"other")):
        signer = PayloadSigner(LIAR)
        signer.process_id = process_id
        headers.append(signer.signed(payload(body)).header)
    assert not headers[0].contradicts(headers[1])


SENDER_KEYS = Identity.generate()
SENDER = SENDER_KEYS.node_id


def report_of_nonsense() -> Reduced:
    """What a reducer reports and signs with its result: that one contribution does not decode."""
    told = Reduced(
        slice_index=3,
        digest=None,
        contributors=(Contributor(node_id=SENDER, samples=1, tokens=1),),
        contributions=(ContributionDigest(b"c" * 16),),
        factors=(0,),
        undecodable=(SENDER,),
    )
    result = signed(b"result", LIAR, kind=RESULT, report_digest=told.statement_digest)
    return replace(told, digest=result.digest, header=result.encode())


def found_alike(told: Reduced, by: Identity, found: bytes | None = None) -> Audited:
    assert told.digest is not None
    finding = Audited(slice_index=3, digest=told.digest, found=found or told.digest)
    return finding.signed(by, run_digest=RUN, round=7)


def test_nonsense_is_proven_by_its_reducers_report_and_by_who_has_made_the_result_again() -> None:
    told, jury = report_of_nonsense(), [Identity.generate() for _ in range(2)]
    evidence = of_nonsense(SENDER, told, [found_alike(told, one) for one in jury])
    proof = proven_by(quarantine(SENDER, evidence), run_digest=RUN)
    assert proof == "its reducer's signed report, and signed findings of 2 auditors"
    assert of_nonsense(SENDER, told, []) == (), "a reducer alone proves nothing"


@pytest.mark.parametrize(
    ("told", "finding", "about", "why"),
    [
        (replace(report_of_nonsense(), undecodable=()), {}, SENDER, "does not say that"),
        (replace(report_of_nonsense(), factors=(5,)), {}, SENDER, "not the one that is signed"),
        (report_of_nonsense(), {"found": b"o" * 32}, SENDER, "says otherwise"),
        (report_of_nonsense(), {}, OTHER.node_id, "does not say that"),
    ],
    ids=["another report", "a changed report", "a finding that differs", "about another"],
)
def test_what_does_not_prove_nonsense_is_refused(
    told: Reduced, finding: dict[str, bytes], about: NodeId, why: str
) -> None:
    evidence = of_nonsense(about, told, [found_alike(told, OTHER, **finding)])
    with pytest.raises(BadDataError, match=why):
        proven_by(quarantine(about, evidence), run_digest=RUN)


def test_nobody_finds_itself_to_send_nonsense() -> None:
    told = report_of_nonsense()
    evidence = of_nonsense(SENDER, told, [found_alike(told, SENDER_KEYS)])
    with pytest.raises(BadDataError, match="finding of the member that it is about"):
        proven_by(quarantine(SENDER, evidence), run_digest=RUN)


def refusal_of(result: PayloadHeader, by: Identity) -> ResultRefused:
    told = ResultRefused(slice_index=3, digest=result.digest, header=result.encode())
    return told.signed(by, run_digest=RUN, round=7)


def test_a_result_that_does_not_decode_is_proven_by_its_signature_and_those_of_who_had_it() -> None:
    result, jury = signed(b"nonsense", kind=RESULT), [Identity.generate() for _ in range(3)]
    evidence = of_refusals(result.encode(), [refusal_of(result, one) for one in jury])
    proof = proven_by(quarantine(LIAR.node_id, evidence), run_digest=RUN)
    assert proof == "its signed result, which 3 members signed that it does not decode"
    assert of_refusals(result.encode(), []) == ()
    many = [refusal_of(result, OTHER)] * 1000
    assert of_refusals(result.encode(), many), "of a thousand members so many that it is kept"


def test_what_does_not_prove_that_a_result_does_not_decode_is_refused() -> None:
    result, other = (signed(body, kind=RESULT) for body in (b"nonsense", b"other"))
    forged = replace(refusal_of(result, OTHER), signer_key=SENDER_KEYS.public_key)
    for header, refusal, why in (
        (result, refusal_of(other, OTHER), "refusal of another result"),
        (result, refusal_of(result, LIAR), "finding of the member that it is about"),
        (result, forged, "a signature that is not"),
        (replace(result, norm=7.0), refusal_of(replace(result, norm=7.0), OTHER), "no proof"),
        (signed(b"nonsense"), refusal_of(signed(b"nonsense"), OTHER), "something else"),
    ):
        evidence = of_refusals(header.encode(), [refusal])
        with pytest.raises(BadDataError, match=why):
            proven_by(quarantine(LIAR.node_id, evidence), run_digest=RUN)
