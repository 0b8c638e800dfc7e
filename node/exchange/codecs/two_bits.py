"""Codes from 0 to 3 in two bits each, four in a byte, the first in the lowest bits; padding is 0."""

import numpy as np

from node.exchange.codecs.codec import Bytes
from node.exchange.codecs.compiled import kernel


def count_bytes(num_codes: int) -> int:
    """Bytes that so many codes take."""
    return (num_codes + 3) // 4


@kernel
def pack_two_bits(codes: Bytes, packed: Bytes) -> None:
    """Writes bytes [n] from codes [4n] or more."""
    fours = codes[: 4 * packed.size].view(np.uint32)  # the first code in the lowest byte
    for i in range(packed.size):
        pairs = np.uint32(fours[i] | fours[i] >> 6)  # the low byte: two codes; the third byte: two
        packed[i] = np.uint8(pairs | pairs >> 12)


@kernel
def unpack_two_bits(packed: Bytes, codes: Bytes) -> None:
    """Writes the codes of bytes [n] into the first 4n."""
    fours = codes[: 4 * packed.size].view(np.uint32)
    for i in range(packed.size):
        byte = np.uint32(packed[i])
        pairs = np.uint32(byte & 0x0F | (byte & 0xF0) << 12)
        fours[i] = np.uint32(pairs & 0x0003_0003 | (pairs & 0x000C_000C) << 6)
