"""What the outer state of one round consists of, chunk by chunk: small enough to be agreed upon.

The state's bytes are those that its outer digest covers: the global parameters, then the momentum,
as little-endian fp32. They are cut into chunks of one fixed size; the last may be shorter. All
honest nodes at a round hold the same state, so they write the same manifest to the bit.

Body of a payload: the magic, the round, the number of elements n and the size of a chunk in bytes
(unsigned 64 bits each), the run digest, the layout digest and the outer digest (32 bytes each), then
the BLAKE3 of each chunk. Everything is little-endian.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass, field

import blake3

from node.outer_state import PIECE_ELEMENTS, digest_of_pieces
from protocol.wire.rounds import Digest
from protocol.wire.versions import MANIFEST_MAGIC as MAGIC

HEADER = struct.Struct("<8sQQQ32s32s32s")
DIGEST_BYTES = 32
ELEMENT_BYTES = 4

CHUNK_BYTES = 2 << 20
"""Fixed in the protocol: nodes that cut differently could not help one another.

Large against the round trips that a stream costs, as far as a few of them under way can hide those,
and small against the state: a break costs no more than what is under way.
"""


class ManifestError(ValueError):
    """Bytes that are no manifest, or not one of this run's states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The chunks of the outer state after `round`'s commit. Equal states have equal manifests."""

    round: int
    num_elements: int
    run_digest: Digest
    layout_digest: Digest
    outer_digest: Digest
    chunk_digests: tuple[Digest, ...] = field(repr=False)

    @staticmethod
    def num_chunks(num_elements: int) -> int:
        """How many chunks a state of so many elements has."""
        return -(-2 * ELEMENT_BYTES * num_elements // CHUNK_BYTES)

    @classmethod
    def body_bytes(cls, num_elements: int) -> int:
        """Exact size of a body."""
        return HEADER.size + DIGEST_BYTES * cls.num_chunks(num_elements)

    @property
    def state_bytes(self) -> int:
        """Size of the state."""
        return 2 * ELEMENT_BYTES * self.num_elements

    def span(self, index: int) -> tuple[int, int]:
        """Where a chunk begins and ends in the state's bytes."""
        start = index * CHUNK_BYTES
        return start, min(start + CHUNK_BYTES, self.state_bytes)

    @classmethod
    def of(
        cls,
        read: Callable[[int, int], bytes],
        *,
        round: int,
        num_elements: int,
        run_digest: Digest,
        layout_digest: Digest,
    ) -> "Manifest":
        """Reads a whole state, a chunk at a time, and digests it: heavy."""
        pieces: list[bytes] = []
        chunk_digests: list[Digest] = []
        state_bytes = 2 * ELEMENT_BYTES * num_elements
        piece_bytes = ELEMENT_BYTES * PIECE_ELEMENTS
        for start in range(0, state_bytes, piece_bytes):
            piece = read(start, min(start + piece_bytes, state_bytes))
            pieces.append(blake3.blake3(piece).digest())
            for chunk in range(0, len(piece), CHUNK_BYTES):  # none lies in two pieces
                of_chunk = blake3.blake3(piece[chunk : chunk + CHUNK_BYTES])
                chunk_digests.append(Digest(of_chunk.digest()))
        return cls(
            round=round,
            num_elements=num_elements,
            run_digest=run_digest,
            layout_digest=layout_digest,
            outer_digest=digest_of_pieces(pieces),
            chunk_digests=tuple(chunk_digests),
        )

    def to_body(self) -> bytes:
        """The manifest as a payload's body."""
        header = HEADER.pack(
            MAGIC,
            self.round,
            self.num_elements,
            CHUNK_BYTES,
            self.run_digest,
            self.layout_digest,
            self.outer_digest,
        )
        return b"".join((header, *self.chunk_digests))

    @classmethod
    def from_body(cls, body: bytes) -> "Manifest":
        """Reads a body; raises ManifestError when it is none.

        Whether the state is the swarm's is for the caller to find out.
        """
        if len(body) < HEADER.size:
            raise ManifestError(f"{len(body)} bytes are too few for a manifest")
        magic, round_, num_elements, chunk_bytes, run, layout, outer = HEADER.unpack_from(body)
        if magic != MAGIC:
            raise ManifestError(f"a manifest begins with {MAGIC!r}, not {magic!r}")
        if chunk_bytes != CHUNK_BYTES:
            raise ManifestError(f"chunks have {CHUNK_BYTES} bytes, not {chunk_bytes}")
        if num_elements < 1 or len(body) != cls.body_bytes(num_elements):
            raise ManifestError(
                f"a manifest of {num_elements} elements has {cls.body_bytes(num_elements)} bytes, "
                f"not {len(body)}"
            )
        digests = body[HEADER.size :]
        return cls(
            round=round_,
            num_elements=num_elements,
            run_digest=Digest(run),
            layout_digest=Digest(layout),
            outer_digest=Digest(outer),
            chunk_digests=tuple(
                Digest(digests[start : start + DIGEST_BYTES])
                for start in range(0, len(digests), DIGEST_BYTES)
            ),
        )
