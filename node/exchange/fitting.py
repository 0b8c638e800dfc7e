"""Whether a payload is what its slice must have: told by its header, before the body is read."""

from node.exchange.codecs.codec import Codec
from node.exchange.transport.transport import TransferRefusedError
from protocol.payload import PayloadHeader
from protocol.rounds import Slice, SliceOutcome


def check_fits(header: PayloadHeader, part: Slice | SliceOutcome, codec: Codec) -> None:
    """Refuses a payload whose elements, codec or size are not the slice's."""
    place = place_of(header)
    if (header.start, header.num_elements) != (part.start, part.num_elements):
        raise TransferRefusedError(
            f"{place} holds elements {part.start}+{part.num_elements}, "
            f"not {header.start}+{header.num_elements}"
        )
    if header.codec != codec.name:
        raise TransferRefusedError(
            f"a {header.kind_name} of {place} comes in {codec.name}, not {header.codec}"
        )
    if not codec.admits(header.body_bytes, header.num_elements):
        raise TransferRefusedError(f"{place} has no body of {header.body_bytes} bytes")


def place_of(header: PayloadHeader) -> str:
    """Which slice a payload is of, in words."""
    return f"slice {header.slice_index} of round {header.round}"
