"""A desk of the coordinator, and a node that comes to it."""

from typing import Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.driver import Driver, LoopClock
from coordinator.rules import rules_of
from coordinator.services.session import SessionDesk
from coordinator.store import Store
from coordinator.streams import Telemetry
from protocol.run.models import layout_of
from protocol.run.run_spec import RunSpec
from protocol.trust.identity import Identity
from protocol.trust.signing import CommitSigner
from protocol.v1 import session_pb2
from protocol.wire import convert
from protocol.wire.rounds import Digest
from protocol.wire.versions import MERGE


class HasBytes(Protocol):
    def SerializeToString(self) -> bytes: ...  # noqa: N802 (as generated code calls it)


NODE = Identity.generate()
DIGEST = Digest(b"d" * 32)
SIGNER = CommitSigner(Ed25519PrivateKey.generate())


def new_desk() -> tuple[SessionDesk, Driver]:
    store = Store.in_memory()
    state = store.load(rules_of(RunSpec()), RunSpec().digest())
    driver = Driver(state=state, store=store, clock=LoopClock(starts_at=0.0))
    return SessionDesk(driver, Telemetry(), RunSpec(), SIGNER), driver


def attach_request() -> session_pb2.AttachRequest:
    return session_pb2.AttachRequest(
        node_name="node-a",
        address=session_pb2.PeerAddress(public_key=NODE.public_key, multiaddrs=["/ip4/::1"]),
        run_digest=RunSpec().digest(),
        layout=convert.to_wire(layout_of(RunSpec()).summary(), session_pb2.LayoutSummary),
        codecs=["int4/1", "int4/1"],
        corpus=session_pb2.CorpusSummary(digest=DIGEST, num_samples=1, num_bytes=1),
        outer_digest=DIGEST,
        device="cpu",
        num_ranks=1,
        merge_version=MERGE,
    )


def with_unknown_field(message: HasBytes, num_bytes: int) -> bytes:
    """The message as a newer or a hostile node would send it: field 1000 holds so many bytes."""
    length, digits = num_bytes, bytearray()
    while length > 127:
        digits.append(length & 127 | 128)
        length >>= 7
    return message.SerializeToString() + b"\xc2\x3e" + bytes([*digits, length]) + bytes(num_bytes)
