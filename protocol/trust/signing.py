"""The coordinator's signature under commits, and whom members believe: keys that their authority certified.

Commits are signed so that nodes can bring them back to a coordinator that lost them.

A bundle is PEM: a member's own certificate, the one of the coordinator's ports, those of the coordinators
that there were, and those of authorities, each of a later one signed by the one before. Dates count nowhere
here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from protocol.errors import ProtocolMismatchError
from protocol.trust.pki import COORDINATOR_ORGANISATION, has_issued, signing_key_of
from protocol.v1 import round_pb2
from protocol.wire.convert import commit_to_wire
from protocol.wire.rounds import Commit, Digest

_TAG = b"atoll commit 4\n"
"""What is signed begins with this, so that no signature can be taken for one of another kind."""


def commit_statement(commit: Commit) -> bytes:
    """What is signed of a commit: all but the outer digest, which nodes agree on afterwards."""
    return statement_of(commit_to_wire(commit))


def statement_of(message: round_pb2.Commit) -> bytes:
    """The same of a commit that is a message already."""
    unsigned = round_pb2.Commit()
    unsigned.CopyFrom(message)
    unsigned.ClearField("outer_digest")
    unsigned.ClearField("signature")
    return _TAG + unsigned.SerializeToString(deterministic=True)


class CommitSigner:
    """Signs with the coordinator's key (protocol.trust.pki.Issuer)."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    @classmethod
    def of_key(cls, key_pem: bytes) -> "CommitSigner":
        """Reads a coordinator's private key; raises BadDataError for what is none."""
        return cls(signing_key_of(key_pem))

    @property
    def public_key(self) -> Ed25519PublicKey:
        """What checks its signatures."""
        return self._key.public_key()

    def signed(self, commit: Commit) -> Commit:
        """The commit with its signature. Signing again gives the same bytes."""
        return replace(commit, signature=self.signature_of(commit_statement(commit)))

    def signature_of(self, statement: bytes) -> bytes:
        """The signature under what `commit_statement` or `statement_of` gives."""
        return self._key.sign(statement)

    def audit_secret(self, run_digest: Digest) -> bytes:
        """What a run's audits are drawn by: known to nobody who does not have the key."""
        return self._key.sign(b"atoll audits 1\n" + run_digest)

    def has_signed(self, commit: Commit) -> bool:
        """Whether the commit bears this key's signature, unchanged; those of keys before are not asked."""
        try:
            self._key.public_key().verify(commit.signature, commit_statement(commit))
        except InvalidSignature:
            return False
        return True


MOST_CERTIFICATES = 64
"""In a bundle: a run changes its keys some times, not thousands of times."""

MOST_BUNDLE_BYTES = 1 << 17


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """The certificates of a PEM file or message, by what they are for."""

    leaf_pem: bytes = b""  # who the holder is
    server_pem: bytes = b""  # the one that answers at the coordinator's ports
    coordinators_pem: tuple[bytes, ...] = ()  # the newest first
    authorities_pem: tuple[bytes, ...] = ()

    @classmethod
    def read(cls, pem: bytes) -> "Bundle":
        """Raises ProtocolMismatchError for what holds no certificates, or two for the same."""
        try:
            if len(pem) > MOST_BUNDLE_BYTES:
                raise ProtocolMismatchError(f"{len(pem):,} bytes are too many for certificates")
            certificates = x509.load_pem_x509_certificates(pem)
        except ValueError as error:
            raise ProtocolMismatchError("not certificates, or cut off") from error
        if pem.count(b"-----BEGIN ") != len(certificates):  # x509 leaves a torn one out, silently
            raise ProtocolMismatchError(f"cut off behind {len(certificates)} certificates")
        if len(certificates) > MOST_CERTIFICATES:
            raise ProtocolMismatchError(f"{len(certificates)} certificates are too many")
        leaves: list[bytes] = []
        servers: list[bytes] = []
        coordinators: list[tuple[int, bytes]] = []
        authorities: list[bytes] = []
        for certificate in certificates:
            text = certificate.public_bytes(Encoding.PEM)
            if not _is_issuer(certificate):
                (servers if _is_server(certificate) else leaves).append(text)
            elif _number_of(certificate):
                coordinators.append((_number_of(certificate), text))
            else:
                authorities.append(text)
        if len(leaves) > 1 or len(servers) > 1:
            raise ProtocolMismatchError("certificates of several members are in one file")
        return cls(
            leaf_pem=b"".join(leaves),
            server_pem=b"".join(servers),
            coordinators_pem=tuple(text for _, text in sorted(coordinators, reverse=True)),
            authorities_pem=tuple(authorities),
        )

    @property
    def newest(self) -> int:
        """The number of the newest coordinator; 0 where the authority itself is the coordinator."""
        return number_of(self.coordinators_pem[0]) if self.coordinators_pem else 0


def first_of(pem: bytes) -> bytes:
    """The first certificate of a file: of former ones behind it nobody is to make use by mistake.

    Raises ProtocolMismatchError for what holds none.
    """
    try:
        return x509.load_pem_x509_certificate(pem).public_bytes(Encoding.PEM)
    except ValueError as error:
        raise ProtocolMismatchError("not a certificate, or cut off") from error


def number_of(coordinator_pem: bytes) -> int:
    """Of a coordinator's certificate, from 1; 0 for any other."""
    return _number_of(x509.load_pem_x509_certificate(coordinator_pem))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """Keys that sign for a run's coordinators, by their numbers; number 0 is the authority's own.

    A later one may sign whatever an earlier one could. `authority_pem` is the authority that vouches, None
    where nobody is to change keys.
    """

    keys: Mapping[int, Ed25519PublicKey]
    authority_pem: bytes | None = field(default=None, repr=False)

    @classmethod
    def of_authority(cls, authority_pem: bytes, bundle: bytes = b"") -> "Trust":
        """Reads an authority's certificate, and what it vouches for in a bundle."""
        trust = cls(keys={0: _key_of(authority_pem)}, authority_pem=authority_pem)
        return trust.taking(bundle) if bundle and Bundle.read(bundle).newest else trust

    @property
    def newest(self) -> int:
        """The number of the newest key."""
        return max(self.keys)

    def taking(self, bundle: bytes) -> "Trust":
        """With the coordinators of a bundle, for the newest of which the authority vouches.

        That one vouches for those before it. Raises ProtocolMismatchError where the authority does not.
        """
        found = Bundle.read(bundle)
        authority = self._authority_over(found)
        keys = {number_of(pem): _key_of(pem) for pem in found.coordinators_pem}
        # Those that were known stay what they were.
        return Trust(keys={**keys, **self.keys}, authority_pem=authority)

    def _authority_over(self, bundle: Bundle) -> bytes:
        """The certificate of the authority that certified the newest coordinator: ours or a successor."""
        if self.authority_pem is None or not bundle.coordinators_pem:
            raise ProtocolMismatchError("nobody vouches for the coordinator's key")
        coordinator = bundle.coordinators_pem[0]
        known, reached = [self.authority_pem], {_raw(self.authority_pem)}
        for authority in known:  # which grows
            if has_issued(authority, coordinator):
                return authority
            for successor in bundle.authorities_pem:
                if _raw(successor) not in reached and has_issued(authority, successor):
                    reached.add(_raw(successor))
                    known.append(successor)
        raise ProtocolMismatchError(
            "the coordinator's key is not certified by the run's authority",
            next_step="ask the run owner for a new invite: 'atoll invite create'",
        )

    def has_signed(self, statement: bytes, signature: bytes, *, least: int = 0) -> bool:
        """Whether the signature is by one of the keys, of a number that is not less."""
        return any(
            _is_by(key, statement, signature)
            for number, key in sorted(self.keys.items(), reverse=True)
            if number >= least
        )


def _is_by(key: Ed25519PublicKey, statement: bytes, signature: bytes) -> bool:
    try:
        key.verify(signature, statement)
    except InvalidSignature:
        return False
    return True


def _key_of(certificate_pem: bytes) -> Ed25519PublicKey:
    try:
        key = x509.load_pem_x509_certificate(certificate_pem).public_key()
    except ValueError as error:
        raise ProtocolMismatchError("not a certificate, or cut off") from error
    if not isinstance(key, Ed25519PublicKey):
        raise ProtocolMismatchError("the key of an authority or a coordinator is not Ed25519")
    return key


def _raw(certificate_pem: bytes) -> bytes:
    return _key_of(certificate_pem).public_bytes_raw()


def _is_issuer(certificate: x509.Certificate) -> bool:
    try:
        return bool(certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca)
    except x509.ExtensionNotFound:
        return False


def _is_server(certificate: x509.Certificate) -> bool:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return False
    return bool(names.get_values_for_type(x509.DNSName))


def _number_of(certificate: x509.Certificate) -> int:
    """By its name, which its authority has signed."""

    def text(oid: x509.ObjectIdentifier) -> str:
        found = certificate.subject.get_attributes_for_oid(oid)
        return str(found[0].value) if found else ""

    number = text(NameOID.COMMON_NAME)
    is_coordinator = text(NameOID.ORGANIZATION_NAME) == COORDINATOR_ORGANISATION
    return int(number) if is_coordinator and number.isascii() and number.isdecimal() else 0
