"""A node's identity: one Ed25519 key that names it to the coordinator and to its libp2p peers.

The key file holds exactly the bytes that libp2p reads as an identity, so that one file serves both.
"""

from dataclasses import dataclass, field
from pathlib import Path

import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from protocol.errors import BadDataError, NoInputError
from protocol.files.durable import read_secret, whose_it_is, write_atomically
from protocol.wire.rounds import NodeId

PUBLIC_KEY_BYTES = 32

# libp2p's protobuf: field 1 (type) = Ed25519, field 2 (data) = 64 or 32 bytes.
_PRIVATE_PREFIX = bytes.fromhex("08011240")
_PUBLIC_PREFIX = bytes.fromhex("08011220")
_IDENTITY_MULTIHASH = bytes.fromhex("0024")  # "hash": the 36 bytes themselves

_BASE58_DIGITS = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


def _base58(data: bytes) -> str:
    """Base58 as Bitcoin and libp2p write it: each leading zero byte is a '1'."""
    number, text = int.from_bytes(data), ""
    while number:
        number, digit = divmod(number, 58)
        text = _BASE58_DIGITS[digit] + text
    return "1" * (len(data) - len(data.lstrip(b"\0"))) + text


def node_id_of(public_key: bytes) -> NodeId:
    """The node's id: the first 32 hex digits of the BLAKE3 of its public key."""
    return NodeId(blake3.blake3(public_key).hexdigest()[:32])


def peer_id_of(public_key: bytes) -> str:
    """The libp2p PeerID of an Ed25519 public key (32 bytes)."""
    return _base58(_IDENTITY_MULTIHASH + _PUBLIC_PREFIX + public_key)


def is_signed_by(public_key: bytes, message: bytes, signature: bytes) -> bool:
    """Whether the signature is the key's; bytes that are no key or no signature give False."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def forgery_of(
    what: str, *, node_id: NodeId, public_key: bytes, statement: bytes, signature: bytes
) -> str:
    """Why a node has not signed this, in a sentence; empty where it has.

    A node's id is the digest of its key, so no roster is asked: also who has left can be believed.
    """
    if node_id_of(public_key) != node_id:
        return f"{what} is signed with another key than that of {node_id}"
    if not is_signed_by(public_key, statement, signature):
        return f"{what} has a signature that is not {node_id}'s"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """An Ed25519 key pair. Make one with `generate` or `load`."""

    private_key: Ed25519PrivateKey = field(repr=False)
    public_key: bytes = field(init=False, repr=False, compare=False)  # 32 bytes
    node_id: NodeId = field(init=False, compare=False)  # what the swarm calls this node

    def __post_init__(self) -> None:
        public_key = self.private_key.public_key().public_bytes_raw()
        object.__setattr__(self, "public_key", public_key)
        object.__setattr__(self, "node_id", node_id_of(public_key))

    @classmethod
    def generate(cls) -> "Identity":
        """A fresh identity from the system's random numbers."""
        return cls(private_key=Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: Path) -> "Identity":
        """Reads an identity.

        Raises NoInputError when it is missing, BadDataError when damaged, NotPermittedError when others may
        read it.
        """
        try:
            content = read_secret(path)
        except FileNotFoundError as error:
            raise NoInputError(
                f"no identity at {path}", next_step="join a swarm with 'atoll join INVITE'"
            ) from error
        except OSError as error:
            raise NoInputError(
                f"cannot read {path}: {error.strerror or error}",
                next_step=whose_it_is(path) or "run as the user who joined the swarm",
            ) from error
        seed = content[len(_PRIVATE_PREFIX) : len(_PRIVATE_PREFIX) + 32]
        if len(seed) == 32:
            identity = cls(private_key=Ed25519PrivateKey.from_private_bytes(seed))
            # Covers the prefix, the length, and whether the public half belongs to the private one.
            if identity.libp2p_key() == content:
                return identity
        raise BadDataError(
            f"{path} ({len(content)} bytes) is not an identity, or is damaged",
            next_step="restore it from a backup; without it join again: 'atoll join INVITE --dir NEWDIR'",
        )

    def save(self, path: Path) -> None:
        """Writes the identity, readable by its owner only; the folder must exist."""
        write_atomically(path, self.libp2p_key(), mode=0o600)

    @property
    def peer_id(self) -> str:
        """What libp2p calls this node."""
        return peer_id_of(self.public_key)

    def sign(self, message: bytes) -> bytes:
        """An Ed25519 signature, 64 bytes."""
        return self.private_key.sign(message)

    def libp2p_key(self) -> bytes:
        """The bytes of a libp2p identity file, 68 of them; they hold the private key."""
        return _PRIVATE_PREFIX + self.private_key.private_bytes_raw() + self.public_key
