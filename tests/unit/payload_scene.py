"""Payloads for tests: of the first slice of the first round, unless told otherwise."""

from typing import Any

from protocol.trust.identity import Identity
from protocol.wire.payload import RESULT, Payload, PayloadHeader
from protocol.wire.rounds import Digest, NodeId, Slice


def sealed(
    kind: int,
    sender_id: NodeId,
    *,
    body: bytes = b"body",
    signer: Identity | None = None,
    **fields: Any,
) -> Payload:
    """With these fields of PayloadHeader; signed where there is a signer."""
    plain = {
        "run_digest": Digest(bytes(32)),
        "round": 1,
        "fragment": 0,
        "slice_index": 0,
        "start": 0,
        "num_elements": 1,
        "codec": "fp32/1",
    }
    fields = {**plain, **fields}
    return Payload.seal(kind=kind, sender_id=sender_id, body=body, signer=signer, **fields)  # type: ignore[arg-type]  # an enum's value


def header_of_result(part: Slice, *, body_digest: Digest, **fields: Any) -> PayloadHeader:
    """Of a body that is not here, by the slice's reducer."""
    plain = {"fragment": 0, "codec": "int4/1", "samples": 0, "tokens": 0, "body_bytes": 9}
    return PayloadHeader(
        kind=RESULT,
        slice_index=part.index,
        start=part.start,
        num_elements=part.num_elements,
        sender_id=part.reducer_id,
        body_digest=body_digest,
        **{**plain, **fields},
    )
