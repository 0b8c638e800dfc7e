"""TLS 1.3 between two members that know each other's key: for streams that a third one carries.

Each makes a certificate of the Ed25519 key that the roster has of it, and signs it with that key. Either is
given the other's certificate by whom it does not trust, looks whether the key in it is the right one, and
then takes that certificate alone. So whoever is between reads nothing, changes nothing and speaks for nobody.
"""

import os
import ssl
from dataclasses import dataclass, field
from typing import Self

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from protocol.errors import CertificateRefusedError
from protocol.trust.identity import Identity
from protocol.trust.pki import VALID_FROM, VALID_UNTIL

MOST_CERTIFICATE_BYTES = 1024
"""Ours have about 300."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTls:
    """One member's certificate, and what it makes of the others'."""

    certificate: bytes  # DER
    _chain_pem: bytes = field(repr=False)  # with the private key

    @classmethod
    def of(cls, identity: Identity) -> Self:
        """Holds for ever: a certificate is believed for the key in it, as long as the roster has that."""
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, identity.node_id)])
        made = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(identity.private_key.public_key())
            .serial_number(1)
            .not_valid_before(VALID_FROM)
            .not_valid_after(VALID_UNTIL)
            .sign(identity.private_key, None)
        )
        key_pem = identity.private_key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        return cls(
            certificate=made.public_bytes(serialization.Encoding.DER),
            _chain_pem=made.public_bytes(serialization.Encoding.PEM) + key_pem,
        )

    def context(
        self, peer_certificate: bytes, peer_key: bytes, *, is_server: bool
    ) -> ssl.SSLContext:
        """Our side of TLS with the member of this key (Ed25519, 32 bytes) and nobody else.

        Raises CertificateRefusedError where the certificate is of another key, or none.
        """
        if _key_in(peer_certificate) != peer_key:
            raise CertificateRefusedError(
                "the certificate that came is not of the key that the roster has of this member"
            )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # no name stands for a member, only its key
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=peer_certificate)
        file = os.memfd_create("key")  # Python takes keys from files only; this one is on no disk
        with os.fdopen(file, "wb") as writer:
            writer.write(self._chain_pem)
            writer.flush()
            context.load_cert_chain(f"/proc/self/fd/{file}")
        return context


def _key_in(certificate: bytes) -> bytes:
    """The Ed25519 key of a certificate, DER; empty where it has none."""
    if len(certificate) > MOST_CERTIFICATE_BYTES:
        return b""
    try:
        key = x509.load_der_x509_certificate(certificate).public_key()
    except (ValueError, x509.InvalidVersion, UnsupportedAlgorithm):
        return b""
    return key.public_bytes_raw() if isinstance(key, Ed25519PublicKey) else b""
