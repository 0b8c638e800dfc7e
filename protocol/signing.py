"""The coordinator's signature under commits, so that nodes can bring them back to one that lost them."""

from dataclasses import replace

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protocol.convert import commit_to_wire
from protocol.rounds import Commit

_TAG = b"atoll commit 3\n"
"""What is signed begins with this, so that no signature can be taken for one of another kind."""


def commit_statement(commit: Commit) -> bytes:
    """What is signed of a commit: all but the outer digest, which nodes agree on afterwards."""
    unsigned = replace(commit, outer_digest=None, signature=b"")
    return _TAG + commit_to_wire(unsigned).SerializeToString(deterministic=True)


class CommitSigner:
    """Signs with the key of the swarm's authority, which only the coordinator has."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    @classmethod
    def of_authority(cls, key_pem: bytes) -> "CommitSigner":
        """Reads an authority's private key (protocol.pki.Authority)."""
        key = serialization.load_pem_private_key(key_pem, password=None)
        assert isinstance(key, Ed25519PrivateKey)
        return cls(key)

    def signed(self, commit: Commit) -> Commit:
        """The commit with its signature. Signing again gives the same bytes."""
        return replace(commit, signature=self._key.sign(commit_statement(commit)))

    def has_signed(self, commit: Commit) -> bool:
        """Whether the commit is one of ours, unchanged."""
        try:
            self._key.public_key().verify(commit.signature, commit_statement(commit))
        except InvalidSignature:
            return False
        return True
