"""Members' certificates: for an invite, or for one that ends. All that strangers can reach is here.

A certificate is of a day, issued and renewed by the coordinator's key. A member renews in its session when
half of that is over. With one that has ended it does so on the joining port, where the signature of its
identity under a challenge says who it is. Dates are of the coordinator's clock alone.
"""

import hashlib
import hmac
import secrets
import struct
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast
from urllib.parse import unquote

from cryptography import x509

from coordinator.services import checks
from coordinator.services.answering import Write, for_all, service
from coordinator.services.ruling import Rulings
from coordinator.store import Store
from protocol.errors import (
    AtollError,
    BadDataError,
    ExpelledError,
    NotPermittedError,
    TemporaryError,
)
from protocol.trust.identity import PUBLIC_KEY_BYTES, is_signed_by, node_id_of
from protocol.trust.invite import SECRET_BYTES, hash_of_secret
from protocol.trust.pki import (
    MEMBER_SECONDS,
    Issuer,
    Role,
    Validity,
    enrolment_statement,
    renewal_statement,
)
from protocol.trust.rulings import Ruling, refuse_barred
from protocol.v1 import enrolment_pb2 as pb
from protocol.v1.enrolment_pb2_grpc import EnrolmentServiceServicer
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
        member = self._store.invites.member(node_id)
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


MAX_FAILURES = 10
FAILURE_SECONDS = 60.0
"""From one host, so many failed attempts are answered in this time, then none until it is over.

Who knows an invite's secret is answered all the same: many people may share an address."""

MAX_LOGGED = 60
"""Lines about refused strangers, from all hosts, in as many seconds."""

MAX_AT_ONCE = 32
"""Enrolments whose requests are here and that wait for the disk; strangers ask for no more of it.

gRPC's own bound counts calls whose bodies never come, so that four connections would keep everybody out."""

MAX_HOSTS = 10_000
"""Hosts whose failures are remembered; the one that failed longest ago is forgotten first."""


class Failures:
    """Counts failed attempts by host, over the last FAILURE_SECONDS."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._times: OrderedDict[str, deque[float]] = OrderedDict()

    def check(self, host: str) -> None:
        """Raises TemporaryError while the host has failed too often."""
        times = self._times.get(host)
        if times is None or len(times) < MAX_FAILURES:
            return
        wait_seconds = times[0] + FAILURE_SECONDS - self._clock()
        if wait_seconds > 0:
            raise TemporaryError(
                f"{MAX_FAILURES} attempts to join from {host} have failed within a minute",
                next_step=f"check the invite and try again in {wait_seconds:.0f} s",
            )

    def add(self, host: str) -> None:
        """Remembers a failure."""
        self._times.setdefault(host, deque(maxlen=MAX_FAILURES)).append(self._clock())
        self._times.move_to_end(host)
        if len(self._times) > MAX_HOSTS:
            self._times.popitem(last=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlEndpoint:
    """Where a machine goes with its certificate: a run's port, and the authority of who answers there."""

    run_name: str
    port: int
    authority_pem: bytes


class EnrolmentDesk:
    """Answers machines that hold an invite. `clock` gives seconds, `wall_clock` UTC seconds.

    `write` makes a change to the database when it is its turn, while heartbeats go on.
    """

    def __init__(
        self,
        store: Store,
        certificates: Certificates,
        rulings: Rulings,
        *,
        leads_to: ControlEndpoint,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        write: Write,
    ) -> None:
        self._store = store
        self._certificates = certificates
        self._rulings = rulings
        self._leads_to = leads_to
        self._wall_clock = wall_clock
        self._write = write
        self._failures = Failures(clock)
        self._num_waiting = 0

    async def enrol(self, host: str, request: pb.EnrolRequest) -> pb.EnrolResponse:
        """Enrols a node that calls from `host`.

        Raises NotPermittedError for an invite that does not hold or an expelled key, BadDataError for a
        request that cannot be right, TemporaryError for a host that keeps trying.
        """
        is_known = self._store.invites.has(request.invite_id, hash_of_secret(request.invite_secret))
        if not is_known:
            self._failures.check(host)
        try:
            statement = _checked(request)
            if not is_signed_by(request.public_key, statement, request.proof):
                raise BadDataError("the request is not signed by the node's own key")
            refuse_barred(self._rulings.standing_of(node_id_of(request.public_key)))
            answer = await self._written(lambda: self._enrol(host, request, is_known=is_known))
            await self._rulings.note_joined(
                answer.node_id, node_name=request.node_name, invite_id=request.invite_id
            )
            return answer
        except (NotPermittedError, BadDataError):
            self._failures.add(host)
            raise

    async def _written(self, enrol: Callable[[], pb.EnrolResponse]) -> pb.EnrolResponse:
        if self._num_waiting >= MAX_AT_ONCE:
            raise TemporaryError(
                f"{MAX_AT_ONCE} others join at this moment", next_step="try again in a few seconds"
            )
        self._num_waiting += 1
        try:
            return await self._write(enrol)
        finally:
            self._num_waiting -= 1

    def challenge(self, request: pb.ChallengeRequest) -> pb.ChallengeResponse:
        """See Certificates.challenge."""
        return self._certificates.challenge(request)

    def renew(self, host: str, request: pb.RenewRequest) -> pb.RenewResponse:
        """A new certificate for a member that calls from `host`; see Certificates.renew_by_identity."""
        try:
            return self._certificates.renew_by_identity(request)
        except ExpelledError:
            raise
        except (NotPermittedError, BadDataError):
            # Only now: members may share an address with a stranger that keeps trying.
            self._failures.check(host)
            self._failures.add(host)
            raise

    def _enrol(self, host: str, request: pb.EnrolRequest, *, is_known: bool) -> pb.EnrolResponse:
        if not is_known:
            self._failures.check(host)  # once more: others of this host had their turn meanwhile
        node_id = node_id_of(request.public_key)
        invite = self._store.invites.redeem(
            request.invite_id,
            hash_of_secret(request.invite_secret),
            node_id=node_id,
            node_name=request.node_name,
            public_key=request.public_key,
            now=self._wall_clock(),
        )
        # Only now, when it is on the disk that the node is one of ours.
        certificate_pem = self._certificates.issue(
            request.certificate_request, node_id, role=Role(invite.role)
        )
        serial = x509.load_pem_x509_certificate(certificate_pem).serial_number
        self._store.invites.record_certificate(request.invite_id, node_id, serial)
        return pb.EnrolResponse(
            swarm_id=self._certificates.swarm_id,
            node_id=node_id,
            control_port=self._leads_to.port,
            certificate_pem=certificate_pem,
            authority_pem=self._leads_to.authority_pem,
            run_name=self._leads_to.run_name,
        )


def _checked(request: pb.EnrolRequest) -> bytes:
    """What the node signed; raises BadDataError for a request whose parts cannot be right."""
    checks.name(request.invite_id, of="the invite's name")
    checks.name(request.node_name, of="the node's name")
    for value, num_bytes, what in (
        (request.invite_secret, SECRET_BYTES, "invite's secret"),
        (request.public_key, PUBLIC_KEY_BYTES, "public key"),
        (request.proof, SIGNATURE_BYTES, "proof"),
    ):
        if len(value) != num_bytes:
            raise BadDataError(f"the {what} has {len(value)} bytes instead of {num_bytes}")
    if len(request.certificate_request) > MAX_REQUEST_BYTES:
        raise BadDataError(
            f"the certificate request has {len(request.certificate_request)} bytes, "
            f"more than {MAX_REQUEST_BYTES}"
        )
    return enrolment_statement(request.invite_id, request.certificate_request)


def host_of(peer: str) -> str:
    """The host in gRPC's name of a peer: "ipv4:192.0.2.1:5432", "ipv6:%5B2001:db8::1%5D:5432"."""
    return unquote(peer).partition(":")[2].rpartition(":")[0] or peer


def enrolment_service(
    desk: EnrolmentDesk,
    *,
    on_refused: Callable[[str, AtollError], None],
    clock: Callable[[], float],
) -> EnrolmentServiceServicer:
    """The desk on gRPC, for anybody. `on_refused` is told of refusals, for the log.

    Not of all: whoever keeps trying is not to fill a disk with lines.
    """
    logged: deque[float] = deque(maxlen=MAX_LOGGED)  # when

    def tell(host: str, error: AtollError) -> None:
        is_full = len(logged) == MAX_LOGGED and clock() - logged[0] < MAX_LOGGED
        if not is_full and not isinstance(error, TemporaryError):  # its ten attempts were told
            logged.append(clock())
            on_refused(host, error)

    async def enrol(host: str, request: pb.EnrolRequest) -> pb.EnrolResponse:
        try:
            return await desk.enrol(host, request)
        except AtollError as error:
            tell(host, error)
            raise

    def renew(host: str, request: pb.RenewRequest) -> pb.RenewResponse:
        try:
            return desk.renew(host, request)
        except AtollError as error:
            tell(host, error)
            raise

    calls = service(
        lambda context: host_of(context.peer()),
        Enrol=enrol,
        Challenge=for_all(desk.challenge),
        Renew=renew,
    )
    return cast("EnrolmentServiceServicer", calls)
