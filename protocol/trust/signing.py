"""The coordinator's signature under commits, so that nodes can bring them back to one that lost them."""

from dataclasses import replace

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from protocol.trust.pki import signing_key_of
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
