import stat
from pathlib import Path

import pytest

from protocol.errors import BadDataError, NoInputError
from protocol.trust.identity import Identity, is_signed_by, node_id_of, peer_id_of

# The Ed25519 key of libp2p's peer id specification (its test vectors), and its peer id as p2pd says.
LIBP2P_KEY = bytes.fromhex(
    "080112407e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d"
    "1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
)
PEER_ID = "12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq"
NODE_ID = "89fd4d930ee4a1b7dfbdee92e985e1ea"


def test_a_libp2p_key_file_is_an_identity_and_names_the_same_peer(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    path.write_bytes(LIBP2P_KEY)
    path.chmod(0o600)
    identity = Identity.load(path)
    assert identity.peer_id == PEER_ID == peer_id_of(LIBP2P_KEY[-32:])
    assert identity.node_id == NODE_ID == node_id_of(LIBP2P_KEY[-32:])
    assert identity.libp2p_key() == LIBP2P_KEY


def test_a_saved_identity_is_the_same_when_loaded_and_private(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    identity = Identity.generate()
    identity.save(path)
    assert Identity.load(path).node_id == identity.node_id != Identity.generate().node_id
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["identity.key"]


@pytest.mark.parametrize("place", [0, 10, 50])  # the prefix, the private half, the public half
def test_a_damaged_identity_is_told_from_a_missing_one(tmp_path: Path, place: int) -> None:
    path = tmp_path / "identity.key"
    with pytest.raises(NoInputError, match="atoll join"):
        Identity.load(path)
    damaged = bytearray(LIBP2P_KEY)
    damaged[place] ^= 1
    for content in (bytes(damaged), LIBP2P_KEY[:-1], LIBP2P_KEY + b"\0", b""):
        path.write_bytes(content)
        path.chmod(0o600)
        with pytest.raises(BadDataError, match=f"{path.name}.*backup"):
            Identity.load(path)


def test_a_signature_holds_for_its_key_and_message_only() -> None:
    identity, other = Identity.generate(), Identity.generate()
    signature = identity.sign(b"message")
    assert is_signed_by(identity.public_key, b"message", signature)
    assert not is_signed_by(other.public_key, b"message", signature)
    assert not is_signed_by(identity.public_key, b"another", signature)
    assert not is_signed_by(b"short", b"message", signature)
    assert not is_signed_by(identity.public_key, b"message", b"")
