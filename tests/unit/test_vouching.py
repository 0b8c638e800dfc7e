"""Whose signatures a member believes, as keys change: of rulings, of commits, and whose certificates."""

from dataclasses import replace

import pytest

from protocol.errors import BadDataError, ProtocolMismatchError
from protocol.trust.pki import Authority, Issuer, has_issued, make_request, new_swarm_id
from protocol.trust.rulings import (
    CERTIFICATES,
    NUMBER,
    RUN_OWNER,
    Ruling,
    RulingKind,
    RulingVerifier,
    SignedRuling,
    checked_chain,
    digest_of,
)
from protocol.trust.signing import Bundle, CommitSigner
from protocol.wire.rounds import Commit, Digest, NodeId

SWARM = new_swarm_id()
AUTHORITY = Authority.create(SWARM)
FIRST = AUTHORITY.issue_coordinator(1)
SECOND = AUTHORITY.issue_coordinator(2)
SUCCESSOR = Authority.create(SWARM)
HANDED_ON = AUTHORITY.certify_successor(SUCCESSOR.certificate_pem)
THIRD = SUCCESSOR.issue_coordinator(3)
STRANGER = Authority.create(SWARM)

OF_FIRST = FIRST.certificate_pem
OF_SECOND = SECOND.certificate_pem + OF_FIRST
OF_THIRD = THIRD.certificate_pem + OF_SECOND + SUCCESSOR.certificate_pem + HANDED_ON


def verifier(bundle: bytes = OF_FIRST, *, authority: Authority = AUTHORITY) -> RulingVerifier:
    return RulingVerifier.of_authority(authority.certificate_pem, bundle)


def added(
    chain: tuple[SignedRuling, ...],
    by: Issuer,
    kind: RulingKind = RulingKind.PAUSED,
    **fields: object,
) -> tuple[SignedRuling, ...]:
    ruling = Ruling(
        number=len(chain) + 1,
        before=digest_of([one.ruling for one in chain]).hex(),
        kind=kind,
        by=RUN_OWNER,
        unix_seconds=1.0,
        **fields,  # type: ignore[arg-type]
    )
    signer = CommitSigner.of_key(by.key_pem)
    return (*chain, SignedRuling(ruling=ruling, signature=signer.signature_of(ruling.statement)))


def keyed(
    chain: tuple[SignedRuling, ...], by: Issuer, number: int, bundle: bytes, *, from_round: int = 5
) -> tuple[SignedRuling, ...]:
    changes = ((CERTIFICATES, bundle.decode()), (NUMBER, number))
    return added(chain, by, RulingKind.KEYED, changes=changes, from_round=from_round)


def commit_by(signer: Issuer, round: int) -> Commit:
    commit = Commit(round=round, fragment=0, base_digest=Digest(bytes(32)), slices=())
    return CommitSigner.of_key(signer.key_pem).signed(commit)


def test_a_bundle_is_read_by_what_each_certificate_is_for() -> None:
    request_der, _ = make_request()
    leaf = SECOND.issue_node(request_der, NodeId("0" * 32))
    server = AUTHORITY.issue_server().certificate_pem
    found = Bundle.read(
        AUTHORITY.certificate_pem + OF_FIRST + leaf + SECOND.certificate_pem + server
    )
    assert (found.leaf_pem, found.server_pem) == (leaf, server)
    assert found.coordinators_pem == (SECOND.certificate_pem, FIRST.certificate_pem)
    assert found.authorities_pem == (AUTHORITY.certificate_pem,)
    assert found.newest == 2
    for wrong in (b"", b"nonsense", leaf + leaf, leaf * 65, leaf + b" " * (1 << 18)):
        with pytest.raises(ProtocolMismatchError):
            Bundle.read(wrong)


def test_the_key_in_force_signs_and_what_it_replaced_does_not_sign_again() -> None:
    chain = keyed(added((), FIRST), SECOND, 2, OF_SECOND)
    told = checked_chain(added(chain, SECOND), verifier())
    assert told.trust.newest == 2
    with pytest.raises(BadDataError, match="ruling 3 does not bear the signature"):
        checked_chain(added(chain, FIRST), verifier())
    # The coordinator that has the later key may tell the earlier rulings with it.
    assert checked_chain(added(added((), SECOND), FIRST), verifier(OF_SECOND)).trust.newest == 2


@pytest.mark.parametrize(
    ("by", "number", "bundle"),
    [
        (STRANGER.issue_coordinator(2), 2, b""),
        (FIRST, 2, OF_SECOND),  # the old key cannot speak for the new one
        (SECOND, 7, OF_SECOND),
        (THIRD, 3, OF_THIRD.replace(HANDED_ON, b"")),
        (STRANGER.issue_coordinator(2), 2, OF_SECOND),
    ],
)
def test_nobody_changes_the_key_without_the_authority(
    by: Issuer, number: int, bundle: bytes
) -> None:
    chain = keyed(added((), FIRST), by, number, bundle or by.certificate_pem)
    with pytest.raises(BadDataError, match=r"ruling 2 (changes|does not bear)"):
        checked_chain(chain, verifier())


def test_who_was_away_follows_from_authority_to_authority() -> None:
    chain = added(keyed(added((), FIRST), THIRD, 3, OF_THIRD), THIRD)
    told = checked_chain(chain, verifier())
    assert has_issued(told.trust.authority_pem or b"", THIRD.certificate_pem)
    fourth = SUCCESSOR.issue_coordinator(4)
    chain = keyed(chain, fourth, 4, fourth.certificate_pem + OF_THIRD)
    assert checked_chain(chain, told).trust.newest == 4
    # And who joins later believes the new authority alone.
    late = verifier(fourth.certificate_pem + OF_THIRD, authority=SUCCESSOR)
    assert checked_chain(chain, late).trust.newest == 4


def test_a_commit_is_signed_by_the_key_of_its_round_or_a_later_one() -> None:
    rulings = [one.ruling for one in keyed((), SECOND, 2, OF_SECOND, from_round=5)]
    told = verifier(OF_SECOND)
    assert told.has_signed(commit_by(FIRST, 4), rulings)
    assert told.has_signed(commit_by(SECOND, 4), rulings)
    assert told.has_signed(commit_by(SECOND, 5), rulings)
    assert not told.has_signed(commit_by(FIRST, 5), rulings)
    assert not told.has_signed(replace(commit_by(SECOND, 5), round=6), rulings)
    assert not told.has_signed(commit_by(STRANGER, 1), rulings)
