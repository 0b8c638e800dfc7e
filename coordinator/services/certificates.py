"""Members' certificates: of a day each, issued and renewed by the coordinator's key.

A member renews in its session when half of a certificate's life is over. With one that has ended it does so
on the joining port, where the signature of its identity under a challenge says who it is. Dates are of the
coordinator's clock alone.
"""

import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable

from coordinator.store import Store
from protocol.errors import BadDataError, NotPermittedError
from protocol.trust.identity import PUBLIC_KEY_BYTES, is_signed_by, node_id_of
from protocol.trust.pki import (
    MEMBER_SECONDS,
    Issuer,
    Role,
    Validity,
    renewal_statement,
)
from protocol.trust.rulings import Ruling, refuse_barred
from protocol.v1 import enrolment_pb2 as pb
from protocol.wire.rounds import NodeId

CHALLENGE_SECONDS = 60.0
MAX_REQUEST_BYTES = 4096
SIGNATURE_BYTES = 64
_MOMENT = struct.Struct(">d")


class Certificates:
    """Issues them. `clock` gives seconds, `wall_clock` UTC seconds; `enrolment_port` is told.

    `tail_pem` is what stands behind each: the certificates of the coordinator and its predecessors.
    """

    def __init__(
        self,
        issuer: Issuer,
        tail_pem: bytes,
        store: Store,
        *,
        standing_of: Callable[[NodeId], Ruling | None],
        enrolment_port: int,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._issuer = issuer
        self._tail_pem = tail_pem
        self._store = store
        self._standing_of = standing_of
        self._enrolment_port = enrolment_port
        self._clock = clock
        self._wall_clock = wall_clock
        self._secret = secrets.token_bytes(32)

    @property
    def swarm_id(self) -> str:
        """The swarm that they are of."""
        return self._issuer.swarm_id

    def issue(self, request_der: bytes, node_id: NodeId, *, role: Role) -> bytes:
        """A new member's, with those of the coordinator behind it."""
        leaf_pem = self._issuer.issue_node(
            request_der,
            node_id,
            role=role,
            validity=Validity.of_member(self._wall_clock()),
        )
        return leaf_pem + self._tail_pem

    def challenge(self, request: pb.ChallengeRequest) -> pb.ChallengeResponse:
        """What the holder of a key is to sign. Nothing is kept of it here: it bears our own seal."""
        _check_key(request.public_key)
        moment = _MOMENT.pack(self._clock())
        return pb.ChallengeResponse(challenge=moment + self._seal(moment, request.public_key))

    def renew_by_identity(self, request: pb.RenewRequest) -> pb.RenewResponse:
        """For a caller whose certificate has ended.

        Raises NotPermittedError, ExpelledError for an expelled member, HeldBackError for one in quarantine.
        """
        _check_key(request.public_key)
        moment = request.challenge[: _MOMENT.size]
        seal = self._seal(moment, request.public_key)
        if not hmac.compare_digest(request.challenge, moment + seal):
            raise NotPermittedError(
                "the challenge is not one of this coordinator's", next_step="ask for another one"
            )
        if not 0 <= self._clock() - _MOMENT.unpack(moment)[0] <= CHALLENGE_SECONDS:
            raise NotPermittedError("the challenge is too old", next_step="ask for another one")
        node_id = node_id_of(request.public_key)
        return self._renewed(node_id, request)

    def renew_in_session(self, node_id: NodeId, request: pb.RenewRequest) -> pb.RenewResponse:
        """For a node whose certificate holds: its identity signs all the same."""
        if node_id_of(request.public_key) != node_id:
            raise BadDataError("a node renews its own certificate and nobody else's")
        return self._renewed(node_id, request)

    def _renewed(self, node_id: NodeId, request: pb.RenewRequest) -> pb.RenewResponse:
        member = self._store.enrolled_member(node_id)
        if member is None:
            raise NotPermittedError(
                f"node {node_id} is not enrolled here",
                next_step="ask the run owner for an invite: 'atoll invite create'",
            )
        if len(request.certificate_request) > MAX_REQUEST_BYTES:
            raise BadDataError(
                f"the certificate request has {len(request.certificate_request)} bytes, "
                f"more than {MAX_REQUEST_BYTES}"
            )
        statement = renewal_statement(self.swarm_id, request.challenge, request.certificate_request)
        if len(request.proof) != SIGNATURE_BYTES or not is_signed_by(
            request.public_key, statement, request.proof
        ):
            raise BadDataError("the request is not signed by the node's own key")
        refuse_barred(self._standing_of(node_id))
        return pb.RenewResponse(
            certificate_pem=self.issue(request.certificate_request, node_id, role=member.role),
            renew_in_seconds=MEMBER_SECONDS / 2,
            enrolment_port=self._enrolment_port,
        )

    def _seal(self, moment: bytes, public_key: bytes) -> bytes:
        return hmac.new(self._secret, moment + public_key, hashlib.sha256).digest()


def _check_key(public_key: bytes) -> None:
    if len(public_key) != PUBLIC_KEY_BYTES:
        raise BadDataError(
            f"the public key has {len(public_key)} bytes instead of {PUBLIC_KEY_BYTES}"
        )
