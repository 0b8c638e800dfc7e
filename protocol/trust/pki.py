"""The swarm's certificates: an authority certifies coordinators' keys and servers, a coordinator its members.

Every certificate names its swarm and its role in a URI (atoll://SWARM/node/NODE, …/helper/NODE,
…/viewer/VIEWER, …/operator, …/coordinator), and only that URI says who a caller is. The authority's key is
Ed25519; leaves are P-256, because grpcio fails the handshake with an Ed25519 leaf.
"""

import re
import secrets
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from functools import lru_cache
from hashlib import sha256
from typing import NamedTuple, Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from protocol.errors import BadDataError, CertificateRefusedError, ProtocolMismatchError
from protocol.wire.rounds import NodeId

VALID_FROM = datetime(1970, 1, 1, tzinfo=UTC)
VALID_UNTIL = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
"""Of all that nodes check, whatever their clocks show: a machine may have none, and start at the first of
these. The second is how certificates say that they have no end (RFC 5280, section 4.1.2.5). These
certificates end by rotation, members' by their dates, which the coordinator's clock alone decides on."""

MEMBER_SECONDS = 24 * 3600.0
"""How long a member's certificate holds; it is renewed when half of that is over."""

AT_ONCE_SECONDS = 1.0
"""Until a certificate is renewed that has no end: 0 would say that there is none."""

EARLY_SECONDS = 24 * 3600.0
"""Before its making it holds as well, for the coordinator's clock may be set back: one that keeps local time
is hours off until the network sets it. No longer: made while it is years ahead, one would hold for years."""

_SWARM_ID = re.compile(r"[0-9a-f]{32}")
_NODE_ID = re.compile(r"[0-9a-f]{32}")
_PRINCIPAL_URI = re.compile(
    r"atoll://(?P<swarm>[0-9a-f]{32})/(?P<role>operator|coordinator|node|helper|viewer)(?:/(?P<node>[0-9a-f]{32}))?"
)


class Role(StrEnum):
    """What a certificate's holder is to the swarm."""

    NODE = "node"
    HELPER = "helper"  # a member without ranks
    VIEWER = "viewer"
    OPERATOR = "operator"
    COORDINATOR = "coordinator"


COORDINATOR_ORGANISATION = "Atoll coordinator"
"""In the names of coordinators' certificates, beside their numbers."""

JOINING = frozenset({Role.NODE, Role.HELPER, Role.VIEWER})
"""Who joins by an invite, with a key of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Who a certificate speaks for. `node_id` is there for those who join by an invite, and only for them."""

    swarm_id: str
    role: Role
    node_id: NodeId | None = None

    @property
    def uri(self) -> str:
        """How it stands in the certificate."""
        place = f"atoll://{self.swarm_id}/{self.role}"
        return place if self.node_id is None else f"{place}/{self.node_id}"


class Validity(NamedTuple):
    """From when until when a certificate holds."""

    not_before: datetime
    not_after: datetime

    @classmethod
    def of_member(cls, now: float) -> Self:
        """Of a member's certificate that is made now, in UTC seconds."""
        return cls(_moment(now - EARLY_SECONDS), _moment(now + MEMBER_SECONDS))


ENDLESS = Validity(VALID_FROM, VALID_UNTIL)


def _moment(unix_seconds: float) -> datetime:
    return datetime.fromtimestamp(unix_seconds, UTC).replace(microsecond=0)


def validity_of(certificate_pem: bytes) -> Validity:
    """When a certificate holds."""
    certificate = _certificate(certificate_pem)
    return Validity(certificate.not_valid_before_utc, certificate.not_valid_after_utc)


@lru_cache(maxsize=4096)
def _dates_of(certificate_pem: bytes) -> Validity:
    """A node shows the same certificate at every call."""
    return validity_of(certificate_pem)


def refuse_ended(certificate_pem: bytes, now: float) -> None:
    """Raises CertificateRefusedError for a certificate that does not hold now, in UTC seconds.

    TLS looks at dates when a connection begins, and a connection may last for months.
    """
    validity = _dates_of(certificate_pem)
    if not validity.not_before.timestamp() <= now <= validity.not_after.timestamp():
        raise CertificateRefusedError(
            f"the caller's certificate holds from {validity.not_before:%Y-%m-%d %H:%M} to "
            f"{validity.not_after:%Y-%m-%d %H:%M} UTC, and not now",
            next_step="start the node again with 'atoll node start': it gets a new one",
        )


def renew_in_seconds(certificate_pem: bytes, now: float) -> float:
    """When half of a certificate's life is over; at once for one that has no end."""
    _, end = _dates_of(certificate_pem)
    if end >= VALID_UNTIL:
        return AT_ONCE_SECONDS
    return max(AT_ONCE_SECONDS, end.timestamp() - MEMBER_SECONDS / 2 - now)


class IssuedCertificate(NamedTuple):
    """A certificate with the private key that was made for it."""

    certificate_pem: bytes
    key_pem: bytes


class CertificateRequest(NamedTuple):
    """A PKCS#10 request with the private key that was made for it, which never travels."""

    request_der: bytes
    key_pem: bytes


def new_swarm_id() -> str:
    """A fresh swarm id: 16 random bytes as hex."""
    return secrets.token_hex(16)


_OF_COORDINATORS = ".atoll.invalid"
_FOR_JOINING = "join."


def server_name(swarm_id: str) -> str:
    """The name in a swarm's server certificate.

    Clients expect this name whatever host they dial, so that coordinators may move between hosts
    and another swarm's coordinator is never taken for ours. It can never be registered (RFC 6761).
    """
    return f"{swarm_id}{_OF_COORDINATORS}"


def pin_of(certificate_pem: bytes) -> bytes:
    """What an invite says about the server's certificate: SHA-256 of its DER bytes."""
    return sha256(_certificate(certificate_pem).public_bytes(serialization.Encoding.DER)).digest()


def joining_name(swarm_id: str) -> str:
    """The other name in that certificate, by which who joins is told from members on a port for both."""
    return f"{_FOR_JOINING}{server_name(swarm_id)}"


def name_in(certificate_pem: bytes) -> str:
    """The name of a server certificate, which members must expect."""
    names = _alternative_names(certificate_pem).get_values_for_type(x509.DNSName)
    if len(names) != 2 or names[1] != f"{_FOR_JOINING}{names[0]}":
        raise ProtocolMismatchError(f"a coordinator's certificate has its name, not {names}")
    return names[0]


def joining_name_in(certificate_pem: bytes) -> str:
    """The name of a server certificate that machines which join ask for."""
    return f"{_FOR_JOINING}{name_in(certificate_pem)}"


def is_coordinators(certificate_pem: bytes) -> bool:
    """Whether a certificate says that it is of a coordinator, of whatever swarm. Anybody can make one."""
    try:
        return name_in(certificate_pem).endswith(_OF_COORDINATORS)
    except (ProtocolMismatchError, ValueError):  # many names, or none; or it cannot be read
        return False


def principal_of(certificate_pem: bytes) -> Principal:
    """Who a certificate speaks for; raises ProtocolMismatchError when it is not one of Atoll's.

    Says nothing about who signed it: TLS has verified that, or `has_issued` does.
    """
    uris = _alternative_names(certificate_pem).get_values_for_type(x509.UniformResourceIdentifier)
    match = _PRINCIPAL_URI.fullmatch(uris[0]) if len(uris) == 1 else None
    if match is None or (match["role"] in JOINING) != (match["node"] is not None):
        raise ProtocolMismatchError(
            f"a certificate speaks for {', '.join(uris) or 'nobody'}, not for a member of a swarm",
            next_step="join the swarm with 'atoll join INVITE'",
        )
    return Principal(
        swarm_id=match["swarm"],
        role=Role(match["role"]),
        node_id=NodeId(match["node"]) if match["node"] else None,
    )


def has_issued(authority_pem: bytes, certificate_pem: bytes) -> bool:
    """Whether the authority signed the certificate; says nothing about dates."""
    try:
        _certificate(certificate_pem).verify_directly_issued_by(_certificate(authority_pem))
    except (ValueError, TypeError, InvalidSignature):  # other issuer, other key type, forged
        return False
    return True


def is_key_of(key_pem: bytes, certificate_pem: bytes) -> bool:
    """Whether the private key belongs to the certificate."""
    try:
        key = serialization.load_pem_private_key(key_pem, password=None)
    except (ValueError, TypeError):
        return False
    return key.public_key() == _certificate(certificate_pem).public_key()


def enrolment_statement(invite_id: str, request_der: bytes) -> bytes:
    """What a node signs with its identity to show that identity and request belong together."""
    name = invite_id.encode()
    return b"atoll/1 enrolment\0" + len(name).to_bytes(4) + name + sha256(request_der).digest()


def renewal_statement(swarm_id: str, challenge: bytes, request_der: bytes) -> bytes:
    """What a member signs with its identity to get a new certificate. In a session no challenge is needed."""
    size = len(challenge).to_bytes(4)
    return (
        b"atoll/1 renewal\0" + swarm_id.encode() + size + challenge + sha256(request_der).digest()
    )


def make_request(key_pem: bytes | None = None) -> CertificateRequest:
    """A P-256 key, fresh where none is given, and the request for its certificate.

    The request names nobody: the issuer takes nothing but the public key from it.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    if key_pem is not None:
        given = serialization.load_pem_private_key(key_pem, password=None)
        assert isinstance(given, ec.EllipticCurvePrivateKey)  # a member's, which this function made
        key = given
    request = x509.CertificateSigningRequestBuilder(subject_name=x509.Name([]))
    signed = request.sign(key, hashes.SHA256())
    return CertificateRequest(signed.public_bytes(serialization.Encoding.DER), _private_pem(key))


@dataclass(frozen=True, slots=True, kw_only=True)
class Issuer:
    """A certificate with the key that it is for, which may sign others: the authority, or a coordinator."""

    certificate_pem: bytes
    key_pem: bytes = field(repr=False)

    @property
    def swarm_id(self) -> str:
        """The swarm whose certificates it issues."""
        return swarm_of(self.certificate_pem)

    def issue_operator(self) -> IssuedCertificate:
        """A run owner's certificate, with a fresh key."""
        return self._issue_with_key(Role.OPERATOR)

    def issue_node(
        self,
        request_der: bytes,
        node_id: NodeId,
        *,
        role: Role = Role.NODE,
        validity: Validity = ENDLESS,
    ) -> bytes:
        """The certificate of one who joins, PEM. Takes the public key from the request and nothing else.

        The caller has checked that whoever sent the request is `node_id` (`enrolment_statement`).
        Raises BadDataError for a request that is not signed by its own P-256 key.
        """
        if not _NODE_ID.fullmatch(node_id):
            raise ValueError(f"{node_id!r} is not a node id")
        try:
            request = x509.load_der_x509_csr(request_der)
            key = request.public_key()
            is_signed = request.is_signature_valid
        except (ValueError, x509.InvalidVersion, UnsupportedAlgorithm) as error:
            raise BadDataError(f"not a certificate request: {error}") from error
        if not is_signed:
            raise BadDataError("the certificate request is not signed by its own key")
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(
            key.curve, ec.SECP256R1
        ):
            raise BadDataError("the certificate request is for a key that is not P-256")
        principal = Principal(swarm_id=self.swarm_id, role=role, node_id=node_id)
        return self._issue(key, principal, validity)

    def _issue_with_key(self, role: Role) -> IssuedCertificate:
        key = ec.generate_private_key(ec.SECP256R1())
        principal = Principal(swarm_id=self.swarm_id, role=role)
        certificate = self._issue(key.public_key(), principal, ENDLESS)
        return IssuedCertificate(certificate, _private_pem(key))

    def _issue(
        self, key: ec.EllipticCurvePublicKey, principal: Principal, validity: Validity
    ) -> bytes:
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(principal.uri)]
        usage = ExtendedKeyUsageOID.CLIENT_AUTH
        if principal.role is Role.COORDINATOR:
            names.append(x509.DNSName(server_name(principal.swarm_id)))
            names.append(x509.DNSName(joining_name(principal.swarm_id)))
            usage = ExtendedKeyUsageOID.SERVER_AUTH
        builder = (
            self._begun(key, _name("Atoll member", principal.role), validity)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
        )
        return self._signed(builder)

    def _begun(
        self,
        key: ec.EllipticCurvePublicKey | Ed25519PublicKey,
        subject: x509.Name,
        validity: Validity,
    ) -> x509.CertificateBuilder:
        """What certificates of all kinds have."""
        return (
            x509.CertificateBuilder(
                subject_name=subject, issuer_name=_certificate(self.certificate_pem).subject
            )
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(validity.not_before)
            .not_valid_after(validity.not_after)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        )

    def _signed(self, builder: x509.CertificateBuilder) -> bytes:
        signing_key = signing_key_of(self.key_pem)
        whose = x509.AuthorityKeyIdentifier.from_issuer_public_key(signing_key.public_key())
        return _pem(builder.add_extension(whose, critical=False).sign(signing_key, None))

    def _certifying(self, key: Ed25519PublicKey, subject: x509.Name, *names: str) -> bytes:
        """A certificate for a key that may sign certificates of leaves."""
        builder = (
            self._begun(key, subject, ENDLESS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
        )
        if names:
            uris = [x509.UniformResourceIdentifier(name) for name in names]
            builder = builder.add_extension(x509.SubjectAlternativeName(uris), critical=False)
        return self._signed(builder)


class Authority(Issuer):
    """A swarm's authority. Its key is needed when a run is made and when keys are changed, and then only."""

    @classmethod
    def create(cls, swarm_id: str) -> Self:
        """A new authority for the swarm."""
        if not _SWARM_ID.fullmatch(swarm_id):
            raise ValueError(f"{swarm_id!r} is not a swarm id; new_swarm_id() makes one")
        key = Ed25519PrivateKey.generate()
        name = _name("Atoll swarm", swarm_id)
        certificate = (
            x509.CertificateBuilder(subject_name=name, issuer_name=name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(VALID_FROM)
            .not_valid_after(VALID_UNTIL)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
            .sign(key, None)
        )
        return cls(certificate_pem=_pem(certificate), key_pem=_private_pem(key))

    def issue_server(self) -> IssuedCertificate:
        """The certificate of the coordinator's ports, with a fresh key."""
        return self._issue_with_key(Role.COORDINATOR)

    def issue_coordinator(self, number: int) -> Issuer:
        """The key that signs commits and rulings and issues members' certificates; the first is number 1."""
        key = Ed25519PrivateKey.generate()
        certificate = self._coordinator(key.public_key(), number)
        return Issuer(certificate_pem=certificate, key_pem=_private_pem(key))

    def _coordinator(self, key: Ed25519PublicKey, number: int) -> bytes:
        uri = Principal(swarm_id=self.swarm_id, role=Role.COORDINATOR).uri
        return self._certifying(key, _name(COORDINATOR_ORGANISATION, str(number)), uri)

    def certify_successor(self, successor_pem: bytes) -> bytes:
        """What lets those who believe this authority believe the one of that certificate."""
        successor = _certificate(successor_pem)
        key = successor.public_key()
        assert isinstance(key, Ed25519PublicKey)  # an authority's, and `create` makes no other
        return self._certifying(key, successor.subject)


def signing_key_of(key_pem: bytes) -> Ed25519PrivateKey:
    """An authority's or a coordinator's private key; raises BadDataError for what is none."""
    try:
        key = serialization.load_pem_private_key(key_pem, password=None)
    except (ValueError, TypeError) as error:
        raise BadDataError("not a private key, or cut off") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise BadDataError("the key that is to sign is not Ed25519")
    return key


def swarm_of(certificate_pem: bytes) -> str:
    """The swarm of an authority's or a coordinator's certificate."""
    names = _certificate(certificate_pem).subject
    if _text(names, NameOID.ORGANIZATION_NAME) == COORDINATOR_ORGANISATION:
        return principal_of(certificate_pem).swarm_id
    return _text(names, NameOID.COMMON_NAME)


def _text(name: x509.Name, oid: x509.ObjectIdentifier) -> str:
    found = name.get_attributes_for_oid(oid)
    return str(found[0].value) if found else ""


def _certificate(certificate_pem: bytes) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(certificate_pem)
    except ValueError as error:
        raise ProtocolMismatchError("not a certificate, or cut off") from error


def _alternative_names(certificate_pem: bytes) -> x509.SubjectAlternativeName:
    extensions = _certificate(certificate_pem).extensions
    try:
        return extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return x509.SubjectAlternativeName([])


def _name(organisation: str, common_name: str) -> x509.Name:
    """Coordinators' and the authority's are read (`swarm_of`); members' are for people who print them."""
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, organisation),
            x509.NameAttribute(NameOID.COMMON_NAME, common_name),
        ]
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private_pem(key: Ed25519PrivateKey | ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
