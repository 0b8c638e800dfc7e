"""Framing of what peers send each other, with a header that says everything of a body; and counts of bytes.

A payload is a header (atoll.v1.PayloadHeader) and a body. Its digest is BLAKE3 over the header's
bytes; since the header holds the body's digest, it covers the body too. How both travel is the
transport's business (node.exchange.transport).
"""

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Literal, NamedTuple, get_args

import blake3

from protocol.trust.identity import Identity, forgery_of
from protocol.v1 import transfer_pb2
from protocol.wire.rounds import Digest, NodeId

WireKind = Literal["contribution", "result", "snapshot", "data", "control", "carried"]

WireTotals = Mapping[str, tuple[int, int]]
"""Bytes sent and received of each kind."""

WIRE_KINDS: tuple[WireKind, ...] = get_args(WireKind)


def grown(before: WireTotals, after: WireTotals) -> WireTotals:
    """How much later totals exceed earlier ones, in each direction; never less than nothing."""
    return {
        kind: (max(0, sent - had[0]), max(0, received - had[1]))
        for kind, (sent, received) in after.items()
        for had in (before.get(kind, (0, 0)),)
    }


class WireCounts:
    """Counts from the event loop and from threads alike; starts at zero with the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: dict[str, int] = dict.fromkeys(WIRE_KINDS, 0)
        self._received: dict[str, int] = dict.fromkeys(WIRE_KINDS, 0)

    def sent(self, kind: WireKind, num_bytes: int) -> None:
        """Counts bytes that went out."""
        self._add(self._sent, kind, num_bytes)

    def received(self, kind: WireKind, num_bytes: int) -> None:
        """Counts bytes that came in."""
        self._add(self._received, kind, num_bytes)

    def totals(self) -> WireTotals:
        """Bytes sent and received of each kind, all kinds always, as of one instant."""
        with self._lock:
            return {kind: (self._sent[kind], self._received[kind]) for kind in WIRE_KINDS}

    def _add(self, counts: dict[str, int], kind: str, num_bytes: int) -> None:
        if kind not in counts or num_bytes < 0:
            raise ValueError(f"cannot count {num_bytes} bytes of {kind!r}; kinds are {WIRE_KINDS}")
        with self._lock:
            counts[kind] += num_bytes


MAX_HEADER_BYTES = 4096
"""No header is larger; a longer one is refused unread."""

CONTRIBUTION = transfer_pb2.PAYLOAD_KIND_CONTRIBUTION
RESULT = transfer_pb2.PAYLOAD_KIND_RESULT
MANIFEST = transfer_pb2.PAYLOAD_KIND_MANIFEST
CHUNK = transfer_pb2.PAYLOAD_KIND_CHUNK
TOKENS_MANIFEST = transfer_pb2.PAYLOAD_KIND_TOKENS_MANIFEST
PIECE_MAP = transfer_pb2.PAYLOAD_KIND_PIECE_MAP
PIECE = transfer_pb2.PAYLOAD_KIND_PIECE
CHUNK_MAP = transfer_pb2.PAYLOAD_KIND_CHUNK_MAP
REDUCER_ERROR = transfer_pb2.PAYLOAD_KIND_REDUCER_ERROR

KIND_NAMES = {
    CONTRIBUTION: "contribution",
    RESULT: "result",
    MANIFEST: "manifest",
    CHUNK: "chunk",
    CHUNK_MAP: "chunk map",
    TOKENS_MANIFEST: "manifest of tokens",
    PIECE_MAP: "piece map",
    PIECE: "piece of tokens",
    REDUCER_ERROR: "reducer's error",
}
"""What the kinds are called in counts and messages."""


SIGNED = frozenset({CONTRIBUTION, RESULT})
"""Kinds that their maker signs: what a wrong one holds can be shown to others."""

_TAG = b"atoll payload 1\n"
"""What is signed begins with this, so that no signature can be taken for one of another kind."""


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
    norm: float = 0.0
    base_digest: bytes = b""
    attempt: int = 0
    sender_key: bytes = b""
    signature: bytes = b""
    process_id: int = 0
    plan_opened_at: float = 0.0
    report_digest: bytes = b""

    @property
    def kind_name(self) -> str:
        """The kind in words."""
        return KIND_NAMES[self.kind]

    def encode(self) -> bytes:
        """The header's bytes, as they are digested and sent."""
        told = dict(zip(_HEADER_FIELDS, _values_of(self), strict=True))
        return transfer_pb2.PayloadHeader(**told).SerializeToString(deterministic=True)

    @property
    def statement(self) -> bytes:
        """What is signed: the whole header but the signature, and with it the body."""
        return _TAG + replace(self, signature=b"").encode()

    @property
    def digest(self) -> Digest:
        """What names the payload."""
        return Digest(blake3.blake3(self.encode()).digest())

    def signed(self, by: Identity) -> "PayloadHeader":
        """The header with its sender's signature. Signing again gives the same bytes."""
        header = replace(self, sender_key=by.public_key)
        return replace(header, signature=by.sign(header.statement))

    @property
    def slot(self) -> "Slot":
        """For what it was made: an honest process makes one payload for each slot, and signs no other."""
        return Slot(*_slot_of(self))

    def contradicts(self, other: "PayloadHeader") -> bool:
        """Whether only a lie explains both, if both are signed as they must be."""
        is_one_slot = self.kind in SIGNED and self.slot == other.slot
        return is_one_slot and self.statement != other.statement

    def forgery(self) -> str:
        """Why this is no header of its sender's, in a sentence; empty when it is signed as it must be."""
        if self.kind not in SIGNED:
            return ""
        what = f"a {self.kind_name} of slice {self.slice_index} of round {self.round}"
        if not self.signature:
            return f"{what} is not signed"
        return forgery_of(
            what,
            node_id=self.sender_id,
            public_key=self.sender_key,
            statement=self.statement,
            signature=self.signature,
        )

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
        if not 0 <= wire.norm < math.inf:
            raise PayloadError(f"a payload header's norm is {wire.norm}")
        if not math.isfinite(wire.plan_opened_at):
            raise PayloadError(f"a payload header's plan is of {wire.plan_opened_at}")
        header = cls(**dict(zip(_HEADER_FIELDS, _values_of(wire), strict=True)))
        if header.encode() != encoded:
            raise PayloadError(
                "a payload header must be encoded canonically, without unknown fields"
            )
        return header


_HEADER_FIELDS = tuple(each.name for each in fields(PayloadHeader))
"""Those of its message, too."""

_values_of = attrgetter(*_HEADER_FIELDS)


class Slot(NamedTuple):
    """What a contribution or a result is made for, once: another process of its node makes its own."""

    kind: "transfer_pb2.PayloadKind.ValueType"
    run_digest: Digest
    round: int
    plan_opened_at: float
    base_digest: bytes
    slice_index: int
    attempt: int
    sender_id: NodeId
    process_id: int


_slot_of = attrgetter(*Slot._fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """A header and its body. Build with `seal`, or with `verified` from the network or a disk."""

    header: PayloadHeader
    body: bytes = field(repr=False)
    digest: Digest = field(init=False, repr=False)  # what reducers report and commits name

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", self.header.digest)  # once: each part of a body names it

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
        norm: float = 0.0,
        base_digest: bytes = b"",
        attempt: int = 0,
        plan_opened_at: float = 0.0,
        process_id: int = 0,
        report_digest: bytes = b"",
        signer: Identity | None = None,
    ) -> "Payload":
        """Wraps a body that we encoded; only contributions have samples and tokens.

        `signer` signs contributions and results; peers take none without.
        """
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
            norm=norm,
            base_digest=base_digest,
            attempt=attempt,
            plan_opened_at=plan_opened_at,
            process_id=process_id,
            report_digest=report_digest,
        )
        return cls(header=header if signer is None else header.signed(signer), body=body)

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
