"""Signed codes from -7 to 7 in four bits: code + 8, the first of two in the low bits of a byte.

The nibble 0 is no code. It is the padding of an odd end, and demanded there.
"""

import numpy as np
import numpy.typing as npt

from node.exchange.codecs.codec import Bytes
from node.exchange.codecs.compiled import kernel

Codes = npt.NDArray[np.int8]


def count_bytes(num_codes: int) -> int:
    """Bytes that so many codes take."""
    return (num_codes + 1) // 2


@kernel
def pack_nibbles(codes: Codes, packed: Bytes) -> None:
    """Writes codes [2n] as bytes [n]."""
    pairs = codes.view(np.uint16)  # the first code in the low byte
    for i in range(packed.size):
        pair = np.uint16(pairs[i] & 0x0F0F ^ 0x0808)  # adds 8 without a carry
        packed[i] = np.uint8(pair | pair >> 4)


@kernel
def unpack_nibbles(packed: Bytes, codes: Codes) -> bool:
    """Writes the codes [2n] of bytes [n]; returns whether all of them are codes."""
    pairs = codes.view(np.uint16)
    num_wrong = np.uint16(0)
    for i in range(packed.size):
        byte = np.uint16(packed[i])
        num_wrong += np.uint16((byte & 15 == 0) | (byte < 16))
        pairs[i] = np.uint16(byte & 15 | byte >> 4 << 8)
    for i in range(codes.size):
        codes[i] -= np.int8(8)
    return bool(num_wrong == 0)
