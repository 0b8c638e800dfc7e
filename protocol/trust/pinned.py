"""Servers known by a pin, the digest of their certificate, by whatever name they are dialled.

No authority stands behind them: whoever dials was given the pin, and a secret to be let in by. So do the desk
of an island's leader for its hosts, and a relay for coordinators.
"""

import asyncio
import hashlib
import hmac
import json
import secrets
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Self

from protocol.errors import BadDataError
from protocol.files.durable import read_secret, write_atomically
from protocol.files.leftovers import temporary_directory
from protocol.trust.invite import SECRET_BYTES
from protocol.trust.pki import Authority, new_swarm_id, pin_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedKey:
    """What such a server keeps."""

    certificate_pem: bytes
    key_pem: bytes = field(repr=False)
    secret: bytes = field(repr=False)

    @classmethod
    def of_file(cls, path: Path, *, when_damaged: str) -> Self:
        """Made at the first use, and readable to its owner only.

        Raises BadDataError with the next step `when_damaged`.
        """
        if not path.exists():
            server = Authority.create(new_swarm_id()).issue_server()
            made = {
                "certificate": server.certificate_pem.decode(),
                "key": server.key_pem.decode(),
                "secret": secrets.token_hex(SECRET_BYTES),
            }
            write_atomically(path, json.dumps(made).encode(), mode=0o600)
        try:
            values = json.loads(read_secret(path))
            return cls(
                certificate_pem=values["certificate"].encode(),
                key_pem=values["key"].encode(),
                secret=bytes.fromhex(values["secret"]),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadDataError(f"{path} is damaged", next_step=when_damaged) from error

    @property
    def pin(self) -> bytes:
        """What others know it by."""
        return pin_of(self.certificate_pem)

    def server_context(self) -> ssl.SSLContext:
        """Its side of TLS 1.3."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # Python takes keys from files only.
        with NamedTemporaryFile(prefix="atoll-pinned-", dir=temporary_directory()) as file:
            Path(file.name).write_bytes(self.certificate_pem + self.key_pem)
            context.load_cert_chain(file.name)
        return context


def client_context() -> ssl.SSLContext:
    """The other side, which lets anybody answer: then ask `has_pin`, before a word is said."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def has_pin(writer: asyncio.StreamWriter, pin: bytes) -> bool:
    """Whether the server of a connection has the certificate of this pin."""
    certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    return hmac.compare_digest(hashlib.sha256(certificate).digest(), pin)
