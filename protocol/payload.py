"""Framing of what peers send each other: a header that says everything about a body before it is read.

A payload is a header (atoll.v1.PayloadHeader) and a body. Its digest is BLAKE3 over the header's
bytes; since the header holds the body's digest, it covers the body too. How both travel is the
transport's business (node.exchange.transport).
"""

from dataclasses import dataclass, field

import blake3

from protocol.rounds import Digest, NodeId
from protocol.v1 import transfer_pb2

MAX_HEADER_BYTES = 4096
"""No header is larger; a longer one is refused unread."""

CONTRIBUTION = transfer_pb2.PAYLOAD_KIND_CONTRIBUTION
RESULT = transfer_pb2.PAYLOAD_KIND_RESULT
MANIFEST = transfer_pb2.PAYLOAD_KIND_MANIFEST
CHUNK = transfer_pb2.PAYLOAD_KIND_CHUNK
TOKENS_MANIFEST = transfer_pb2.PAYLOAD_KIND_TOKENS_MANIFEST
PIECE_MAP = transfer_pb2.PAYLOAD_KIND_PIECE_MAP
PIECE = transfer_pb2.PAYLOAD_KIND_PIECE

KIND_NAMES = {
    CONTRIBUTION: "contribution",
    RESULT: "result",
    MANIFEST: "manifest",
    CHUNK: "chunk",
    TOKENS_MANIFEST: "manifest of tokens",
    PIECE_MAP: "piece map",
    PIECE: "piece of tokens",
}
"""What the kinds are called in counts and messages."""


class PayloadError(ValueError):
    """Bytes that are not a payload, or not the one that was announced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadHeader:
    """Everything about a body; see transfer.proto for each field."""

    kind: "transfer_pb2.PayloadKind.ValueType"
    run_digest: Digest
    round: int
    fragment: int
    slice_index: int
    start: int
    num_elements: int
    codec: str
    samples: int
    tokens: int
    sender_id: NodeId
    body_bytes: int
    body_digest: Digest

    @property
    def kind_name(self) -> str:
        """The kind in words."""
        return KIND_NAMES[self.kind]

    def encode(self) -> bytes:
        """The header's bytes, as they are digested and sent."""
        return transfer_pb2.PayloadHeader(
            kind=self.kind,
            run_digest=self.run_digest,
            round=self.round,
            fragment=self.fragment,
            slice_index=self.slice_index,
            start=self.start,
            num_elements=self.num_elements,
            codec=self.codec,
            samples=self.samples,
            tokens=self.tokens,
            sender_id=self.sender_id,
            body_bytes=self.body_bytes,
            body_digest=self.body_digest,
        ).SerializeToString(deterministic=True)

    @classmethod
    def decode(cls, encoded: bytes) -> "PayloadHeader":
        """Reads a header; raises PayloadError when it is none, or not canonical."""
        if len(encoded) > MAX_HEADER_BYTES:
            raise PayloadError(
                f"a header of {len(encoded)} bytes is longer than {MAX_HEADER_BYTES}"
            )
        try:
            wire = transfer_pb2.PayloadHeader.FromString(encoded)
        except Exception as error:  # protobuf's DecodeError has no public base across versions
            raise PayloadError(f"not a payload header: {error}") from error
        if wire.kind not in KIND_NAMES:
            raise PayloadError(f"unknown payload kind {wire.kind}")
        if len(wire.run_digest) != 32 or len(wire.body_digest) != 32:
            raise PayloadError("a payload header's digests have 32 bytes")
        header = cls(
            kind=wire.kind,
            run_digest=Digest(wire.run_digest),
            round=wire.round,
            fragment=wire.fragment,
            slice_index=wire.slice_index,
            start=wire.start,
            num_elements=wire.num_elements,
            codec=wire.codec,
            samples=wire.samples,
            tokens=wire.tokens,
            sender_id=NodeId(wire.sender_id),
            body_bytes=wire.body_bytes,
            body_digest=Digest(wire.body_digest),
        )
        if header.encode() != encoded:
            raise PayloadError(
                "a payload header must be encoded canonically, without unknown fields"
            )
        return header


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """A header and its body. Build with `seal`, or with `verified` from the network or a disk."""

    header: PayloadHeader
    body: bytes = field(repr=False)
    digest: Digest = field(init=False, repr=False)  # what reducers report and commits name

    def __post_init__(self) -> None:
        digest = Digest(blake3.blake3(self.header.encode()).digest())
        object.__setattr__(self, "digest", digest)  # once: each part of a body names it

    @classmethod
    def seal(
        cls,
        *,
        kind: "transfer_pb2.PayloadKind.ValueType",
        run_digest: Digest,
        round: int,  # the design's word
        fragment: int,
        slice_index: int,
        start: int,
        num_elements: int,
        codec: str,
        sender_id: NodeId,
        body: bytes,
        samples: int = 0,
        tokens: int = 0,
    ) -> "Payload":
        """Wraps a body that we encoded; only contributions have samples and tokens."""
        header = PayloadHeader(
            kind=kind,
            run_digest=run_digest,
            round=round,
            fragment=fragment,
            slice_index=slice_index,
            start=start,
            num_elements=num_elements,
            codec=codec,
            samples=samples,
            tokens=tokens,
            sender_id=sender_id,
            body_bytes=len(body),
            body_digest=Digest(blake3.blake3(body).digest()),
        )
        return cls(header=header, body=body)

    @classmethod
    def verified(cls, header: PayloadHeader, body: bytes) -> "Payload":
        """Joins a header and the body that came with it; raises PayloadError unless they match."""
        if len(body) != header.body_bytes:
            raise PayloadError(f"a body of {len(body)} bytes was announced as {header.body_bytes}")
        if blake3.blake3(body).digest() != header.body_digest:
            raise PayloadError(
                f"the body of a {header.kind_name} of round {header.round} is damaged"
            )
        return cls(header=header, body=body)
