"""Codes in half a byte or a quarter of one.

Nibbles hold signed codes from -7 to 7: code + 8, the first of two in the low bits of a byte. The nibble 0 is
no code. It is the padding of an odd end, and demanded there. Two bits hold codes from 0 to 3, four in a
byte, the first in the lowest bits; padding is 0.
"""

import numpy as np
import numpy.typing as npt

from node.exchange.codecs.codec import Bytes
from node.exchange.codecs.compiled import kernel

Codes = npt.NDArray[np.int8]


def nibble_bytes(num_codes: int) -> int:
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


def two_bit_bytes(num_codes: int) -> int:
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
