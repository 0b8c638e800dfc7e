"""Proof that a member lies: two contributions, or two results, that one process signed for one slot.

A reducer takes one contribution of each node, and a slice has one result; whoever signs two tells different
members different things. The proof needs no word of who brings it: both signatures are the liar's own.
"""

from dataclasses import dataclass

from protocol.errors import BadDataError
from protocol.wire.payload import PayloadError, PayloadHeader
from protocol.wire.rounds import Digest, NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivocation:
    """Who has lied, and how; the same words whoever brings the proof, and in whichever order."""

    node_id: NodeId
    reason: str


def equivocation_in(one: bytes, other: bytes, *, run_digest: Digest) -> Equivocation:
    """What two encoded headers prove. Raises BadDataError, with what is missing, where they prove nothing."""
    try:
        headers = [PayloadHeader.decode(encoded) for encoded in (one, other)]
    except PayloadError as error:
        raise BadDataError(f"what is shown of a lie is no header: {error}") from error
    first, second = sorted(headers, key=lambda header: header.digest)
    if first.run_digest != run_digest:
        raise BadDataError("what is shown of a lie is of another run")
    if not first.contradicts(second):
        raise BadDataError(
            f"a {first.kind_name} and a {second.kind_name} of {first.sender_id} and {second.sender_id} "
            "do not contradict each other"
        )
    for header in (first, second):
        if why := header.forgery():
            raise BadDataError(f"what is shown of a lie is no proof: {why}")
    digests = " and ".join(f"{header.digest.hex()[:12]}…" for header in (first, second))
    return Equivocation(
        node_id=first.sender_id,
        reason=(
            f"it signed two different {first.kind_name}s to slice {first.slice_index} of round "
            f"{first.round}: {digests}"
        ),
    )
