"""The lossless stage of coarse codecs: deflate (RFC 1951) with Huffman codes alone.

Codes of a quantiser are noise with uneven frequencies: there are no repetitions to look for, and two
or more codes share a byte, so that whole bits cost little. docs/decisions.md says how it compares with
zstd and with the entropy; it comes with Python, and its format is fixed for ever.

Streams are written by a kernel (huffman.py), and read by zlib, which has met every kind of malformed
stream. Another encoder may write other bytes; what they mean is the same.
"""

import struct
import zlib

import numpy as np

from node.exchange.codecs.codec import Bytes, CodecError
from node.exchange.codecs.compiled import read_only
from node.exchange.codecs.huffman import huffman_coded

_RAW = -15  # a window of 32 KiB, without zlib's header and checksum: payloads have a digest
_STORED_BLOCK = 65535
_BLOCK_HEAD = 5


def most_stream_bytes(num_bytes: int) -> int:
    """No stream of so many bytes is larger: they can be stored in it as they are."""
    return num_bytes + _BLOCK_HEAD * -(-num_bytes // _STORED_BLOCK)


def deflated(plain: Bytes) -> bytes:
    """A raw deflate stream of these bytes, one at least."""
    stream = huffman_coded(read_only(plain))
    return stream.tobytes() if stream.size <= most_stream_bytes(plain.size) else _stored(plain)


def _stored(plain: Bytes) -> bytes:
    """The stream that stores them (RFC 1951, section 3.2.4), where codes need more."""
    parts = []
    for start in range(0, plain.size, _STORED_BLOCK):
        block = plain[start : start + _STORED_BLOCK]
        is_last = start + block.size == plain.size
        parts.append(struct.pack("<BHH", is_last, block.size, block.size ^ 0xFFFF))
        parts.append(block.tobytes())
    return b"".join(parts)


def inflated(stream: Bytes, *, most_bytes: int, codec: str) -> Bytes:
    """What a stream holds, which must be all of it; raises CodecError for more than `most_bytes`."""
    plain, rest = inflated_head(stream, most_bytes=most_bytes, codec=codec)
    if rest:
        raise CodecError(f"a part of {codec} does not end where it must")
    return plain


def inflated_head(stream: Bytes, *, most_bytes: int, codec: str) -> tuple[Bytes, bytes]:
    """What the stream at the beginning of these bytes holds, and the bytes that follow it.

    Raises CodecError for more than `most_bytes`, or if the stream does not end.
    """
    inflater = zlib.decompressobj(_RAW)
    try:
        plain = inflater.decompress(stream.data, most_bytes + 1)
    except zlib.error as error:
        raise CodecError(f"a part of {codec} is no deflate stream: {error}") from None
    if not inflater.eof or len(plain) > most_bytes:
        raise CodecError(f"a part of {codec} does not end where it must")
    return np.frombuffer(plain, dtype=np.uint8), inflater.unused_data
