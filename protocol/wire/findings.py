"""What a member reports of another one's work: what it has found, signed, or what the other has signed.

protocol.trust.evidence makes proof of it.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from google.protobuf.message import Message as WireMessage

from protocol.trust.identity import Identity, forgery_of, node_id_of
from protocol.v1 import session_pb2 as pb
from protocol.wire import convert
from protocol.wire.rounds import Digest, NodeId

SignedT = TypeVar("SignedT", bound="Finding")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding(ABC):
    """What a member has found out about another one's work, with its signature once it has signed it."""

    MESSAGE: ClassVar[type[WireMessage]]
    TAG: ClassVar[bytes]  # what is signed begins with it, so that kinds are told apart
    UNSIGNED: ClassVar[Mapping[str, Any]] = MappingProxyType({"signature": b""})

    run_digest: bytes = b""
    round: int = 0
    signer_key: bytes = b""
    signature: bytes = b""

    def encode(self) -> bytes:
        """Its bytes, as they are signed and kept."""
        return convert.to_wire(self, self.MESSAGE).SerializeToString(deterministic=True)

    @property
    def statement(self) -> bytes:
        """What is signed: all but the signature, after the tag of its kind."""
        return self.TAG + replace(self, **self.UNSIGNED).encode()

    @property
    @abstractmethod
    def subject(self) -> str:
        """What it is about, in words."""

    def signed(self: SignedT, by: Identity, *, run_digest: bytes, round: int) -> SignedT:
        """The same, found in a round of a run, with a signature."""
        told = replace(self, run_digest=run_digest, round=round, signer_key=by.public_key)
        return replace(told, signature=by.sign(told.statement))

    @property
    def signer_id(self) -> NodeId:
        """Who has signed it, if the signature holds."""
        return node_id_of(self.signer_key)

    def forgery(self, node_id: NodeId) -> str:
        """Why a node has not found this, in a sentence; empty where it has signed that it did."""
        return forgery_of(
            self.subject,
            node_id=node_id,
            public_key=self.signer_key,
            statement=self.statement,
            signature=self.signature,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited(Finding):
    """What came of an audit. `found` is the result's `digest` where the same came out, bit for bit.

    Else it is a digest of what did, the same for all who find the same; or empty where inputs did not come.
    """

    MESSAGE = pb.AuditedReport
    TAG = b"atoll finding 1\n"

    slice_index: int
    digest: Digest
    found: bytes
    why: str = ""

    @property
    def subject(self) -> str:
        """See Finding."""
        return f"the finding on slice {self.slice_index} of round {self.round}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotChecked(Finding):
    """How much more of its lease than of other samples a member's contribution has learned.

    `gap` is in nats per token; `score` is standard normal where nothing more was learned.
    """

    MESSAGE = pb.SpotCheckedReport
    TAG = b"atoll spot check 1\n"

    contributor_id: NodeId
    num_samples: int  # of either
    gap: float
    score: float

    @property
    def subject(self) -> str:
        """See Finding."""
        return f"the spot check of {self.contributor_id} in round {self.round}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRefused(Finding):
    """A result does not decode as its `header`, which its reducer has signed, says that it does.

    Every member that gets the same bytes finds the same. The header is not signed again, and no part of
    evidence.
    """

    MESSAGE = pb.ResultRefusedReport
    TAG = b"atoll refused result 1\n"
    UNSIGNED = MappingProxyType({"signature": b"", "header": b""})

    slice_index: int
    digest: Digest  # of the header: what a commit would name
    header: bytes = b""

    @property
    def subject(self) -> str:
        """See Finding."""
        return f"the refusal of the result of slice {self.slice_index} of round {self.round}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EquivocationSeen:
    """Two signed headers of one process for one slot, as protocol.trust.evidence reads them."""

    one: bytes
    other: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOutSeen:
    """A result lacks the node's contribution, which its reducer has given a receipt for."""

    receipt: bytes  # as protocol.trust.receipts reads it
