"""Members' certificates at the coordinator: who gets a new one, when, and how long each holds."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from coordinator.invite_rows import Invite
from coordinator.services.answering import REJOIN_SECONDS, Gate
from coordinator.services.enrolment import CHALLENGE_SECONDS, Certificates
from coordinator.store import Store
from protocol.errors import (
    AtollError,
    BadDataError,
    CertificateRefusedError,
    ExpelledError,
    HeldBackError,
    NotPermittedError,
    TemporaryError,
)
from protocol.trust.identity import Identity
from protocol.trust.invite import hash_of_secret
from protocol.trust.pki import (
    MEMBER_SECONDS,
    Authority,
    Role,
    Validity,
    is_key_of,
    make_request,
    new_swarm_id,
    principal_of,
    renew_in_seconds,
    renewal_statement,
)
from protocol.trust.rulings import RUN_OWNER, Ruling, RulingKind
from protocol.trust.signing import Bundle
from protocol.v1 import enrolment_pb2 as pb
from protocol.wire.rounds import NodeId

NOW = 1.7e9
AUTHORITY = Authority.create(new_swarm_id())
ISSUER = AUTHORITY.issue_coordinator(1)
NODE = Identity.generate()


class Scene:
    """Certificates of one enrolled node, with a clock and a standing that a test sets."""

    def __init__(self, *, role: Role = Role.NODE) -> None:
        self.now = 1000.0
        self.wall = NOW
        self.standing: Ruling | None = None
        self.store = Store.in_memory()
        secret = hash_of_secret(b"s" * 32)
        self.store.invites.add(
            Invite(
                invite_id="inv",
                secret_hash=secret,
                max_uses=1,
                expires_utc_seconds=NOW + 60,
                host="h",
                role=role,
            )
        )
        self.store.invites.redeem(
            "inv",
            secret,
            node_id=NODE.node_id,
            node_name="node-a",
            public_key=NODE.public_key,
            now=NOW,
        )
        self.certificates = Certificates(
            ISSUER,
            ISSUER.certificate_pem,
            self.store,
            standing_of=lambda _: self.standing,
            enrolment_port=7701,
            clock=lambda: self.now,
            wall_clock=lambda: self.wall,
        )

    def challenge(self, identity: Identity = NODE) -> bytes:
        asked = pb.ChallengeRequest(public_key=identity.public_key)
        return self.certificates.challenge(asked).challenge

    def request(
        self, *, identity: Identity = NODE, signer: Identity = NODE, challenge: bytes | None = None
    ) -> pb.RenewRequest:
        challenge = self.challenge() if challenge is None else challenge
        request_der, self.key_pem = make_request()
        statement = renewal_statement(AUTHORITY.swarm_id, challenge, request_der)
        return pb.RenewRequest(
            public_key=identity.public_key,
            certificate_request=request_der,
            challenge=challenge,
            proof=signer.sign(statement),
        )


def ruling(kind: RulingKind) -> Ruling:
    return Ruling(
        number=1,
        before="",
        kind=kind,
        by=RUN_OWNER,
        unix_seconds=NOW,
        node_id=NODE.node_id,
        node_name="node-a",
    )


@pytest.mark.parametrize("role", [Role.NODE, Role.HELPER, Role.VIEWER])
def test_who_signs_the_challenge_gets_a_certificate_of_a_day_for_its_role(
    role: Role,
) -> None:
    scene = Scene(role=role)
    answer = scene.certificates.renew_by_identity(scene.request())
    leaf = Bundle.read(answer.certificate_pem).leaf_pem
    assert (principal_of(leaf).node_id, principal_of(leaf).role) == (NODE.node_id, role)
    assert is_key_of(scene.key_pem, leaf)
    assert renew_in_seconds(leaf, NOW) == answer.renew_in_seconds == MEMBER_SECONDS / 2
    assert answer.enrolment_port == 7701


def spoiled(change: Callable[[pb.RenewRequest], None]) -> Callable[[Scene], pb.RenewRequest]:
    def make(scene: Scene) -> pb.RenewRequest:
        request = scene.request()
        change(request)
        return request

    return make


def too_late(scene: Scene) -> pb.RenewRequest:
    request = scene.request()
    scene.now += CHALLENGE_SECONDS + 1
    return request


def from_before_a_restart(scene: Scene) -> pb.RenewRequest:
    return scene.request(challenge=Scene().challenge())


OTHER = Identity.generate()


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda scene: scene.request(signer=OTHER), BadDataError),
        (lambda scene: scene.request(identity=OTHER, signer=OTHER), NotPermittedError),
        (
            lambda scene: scene.request(
                identity=OTHER, signer=OTHER, challenge=scene.challenge(OTHER)
            ),
            NotPermittedError,
        ),
        (lambda scene: scene.request(challenge=b""), NotPermittedError),
        (too_late, NotPermittedError),
        (from_before_a_restart, NotPermittedError),
        (spoiled(lambda r: setattr(r, "proof", b"")), BadDataError),
        (spoiled(lambda r: setattr(r, "certificate_request", make_request()[0])), BadDataError),
        (spoiled(lambda r: setattr(r, "certificate_request", bytes(5000))), BadDataError),
        (spoiled(lambda r: setattr(r, "public_key", b"short")), BadDataError),
    ],
)
def test_nobody_else_gets_one(
    make: Callable[[Scene], pb.RenewRequest], kind: type[AtollError]
) -> None:
    scene = Scene()
    with pytest.raises(kind):
        scene.certificates.renew_by_identity(make(scene))


def test_the_expelled_and_the_quarantined_get_none_on_either_way() -> None:
    scene = Scene()
    for kind, error in (
        (RulingKind.EXPELLED, ExpelledError),
        (RulingKind.QUARANTINED, HeldBackError),
    ):
        scene.standing = ruling(kind)
        with pytest.raises(error):
            scene.certificates.renew_by_identity(scene.request())
        with pytest.raises(error):
            scene.certificates.renew_in_session(NODE.node_id, scene.request(challenge=b""))
    scene.standing = ruling(RulingKind.READMITTED)
    scene.certificates.renew_in_session(NODE.node_id, scene.request(challenge=b""))


def test_in_a_session_a_node_renews_its_own_certificate_alone() -> None:
    scene = Scene()
    with pytest.raises(BadDataError, match="nobody else's"):
        scene.certificates.renew_in_session(NodeId("0" * 32), scene.request(challenge=b""))
    with pytest.raises(BadDataError, match="not signed"):
        scene.certificates.renew_in_session(
            NODE.node_id, scene.request(signer=OTHER, challenge=b"")
        )


def test_a_certificate_ends_also_on_a_connection_that_was_opened_while_it_held() -> None:
    scene = Scene()
    gate = Gate(
        swarm_id=AUTHORITY.swarm_id,
        store=scene.store,
        standing_of=lambda _: None,
        clock=lambda: scene.now,
        wall_clock=lambda: scene.wall,
    )
    leaf = ISSUER.issue_node(
        make_request()[0], NODE.node_id, validity=Validity.of_member(scene.wall)
    )
    context: Any = SimpleNamespace(
        auth_context=lambda: {"x509_pem_cert": [leaf]}, peer=lambda: "ipv4:192.0.2.1:5"
    )
    for moment in (NOW, NOW - 14 * 3600):  # a clock that kept local time is set back by its zone
        scene.wall = moment
        assert gate.node(context) == NODE.node_id
    for moment in (NOW - 366 * 86400, NOW + MEMBER_SECONDS + 1):
        scene.wall = moment
        with pytest.raises(CertificateRefusedError, match="and not now"):
            gate.node(context)
    assert renew_in_seconds(leaf, NOW + MEMBER_SECONDS) == 1.0


def test_who_joined_after_the_copy_waits_for_members_of_before_and_is_then_told_of_to_both_sides() -> (
    None
):
    scene, asking = Scene(), Identity.generate()
    gate = Gate(
        swarm_id=AUTHORITY.swarm_id,
        store=scene.store,
        standing_of=lambda _: None,
        clock=lambda: scene.now,
        wall_clock=lambda: scene.wall,
    )
    validity = Validity.of_member(scene.wall)
    leaf = ISSUER.issue_node(make_request()[0], asking.node_id, validity=validity)
    context: Any = SimpleNamespace(
        auth_context=lambda: {"x509_pem_cert": [leaf]}, peer=lambda: "ipv4:192.0.2.1:5"
    )
    with pytest.raises(TemporaryError, match="members of before may yet bring back"):
        gate.node(context)
    scene.now += REJOIN_SECONDS
    with capture_logs() as logged:
        for _ in range(2):
            with pytest.raises(NotPermittedError, match="joined after the copy") as refused:
                gate.node(context)
    assert "type 'atoll join' in the same folder" in refused.value.next_step
    (line,) = logged
    assert line["node_id"] == asking.node_id and "atoll invite create" in line["next_step"]


def test_a_certificate_without_an_end_is_renewed_at_once() -> None:
    leaf = AUTHORITY.issue_node(make_request()[0], NODE.node_id)
    assert renew_in_seconds(leaf, NOW) == 1.0
