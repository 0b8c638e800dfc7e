"""The lossless stage of coarse codecs: deflate (RFC 1951) with Huffman codes alone.

Codes of a quantiser are noise with uneven frequencies: there are no repetitions to look for, and two
or more codes share a byte, so that whole bits cost little. docs/decisions.md says how it compares with
zstd and with the entropy; it comes with Python, and its format is fixed for ever.

Streams are read by zlib, which has met every kind of malformed stream, and written by a kernel: one
block with dynamic Huffman codes (section 3.2.7). zlib does the same, three times as slowly, and with a new
code for each 32 Ki bytes. What is longer than 15 bits, or 7 for the code of the lengths, is made shorter by
halving frequencies until it fits: hardly ever needed, and then hardly larger. Another encoder may write
other bytes; what they mean is the same.
"""

import struct
import zlib

import numpy as np
import numpy.typing as npt

from node.exchange.codecs.codec import Bytes, CodecError, kernel, read_only

Counts = npt.NDArray[np.int64]

_LITERALS = 257  # bytes, and the end of the block
_LENGTHS = _LITERALS + 1  # and one distance, which is not used: its length is 0
_ORDER = np.array([16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15])
_MOST_BITS, _MOST_LENGTH_BITS = 15, 7
_FINAL_DYNAMIC = 0b101


@kernel
def _count(plain: Bytes, counts: Counts) -> None:
    """How often each byte is there; four tables, so that equal neighbours need not wait."""
    tables = np.zeros((4, 256), dtype=np.uint32)
    fours = plain.size // 4
    for i in range(fours):
        for t in range(4):
            tables[t, plain[4 * i + t]] += np.uint32(1)
    for i in range(4 * fours, plain.size):
        tables[0, plain[i]] += np.uint32(1)
    for b in range(256):
        counts[b] = tables[0, b] + tables[1, b] + tables[2, b] + tables[3, b]
    counts[256] = 1


@kernel
def _sort(keys: Counts) -> None:
    """Shell's sort: for a few hundred keys, and compiled in no time."""
    for gap in (121, 40, 13, 4, 1):
        for i in range(gap, keys.size):
            key, j = keys[i], i
            while j >= gap and keys[j - gap] > key:
                keys[j] = keys[j - gap]
                j -= gap
            keys[j] = key


@kernel
def code_lengths(counts: Counts, most_bits: int, lengths: Counts) -> None:
    """Writes the bits of each symbol's Huffman code, 0 for what is not there; two are there at least."""
    keys = np.empty(counts.size, dtype=np.int64)
    n = 0
    for symbol in range(counts.size):
        if counts[symbol]:
            keys[n] = counts[symbol] << 9 | symbol
            n += 1
    _sort(keys[:n])
    weights = np.empty(2 * n, dtype=np.int64)  # of leaves, in order, and of what they are joined to
    parents = np.zeros(2 * n, dtype=np.int64)
    depths = np.zeros(2 * n, dtype=np.int64)
    halvings = 0
    deepest = most_bits + 1
    while deepest > most_bits:
        for i in range(n):
            weights[i] = max(keys[i] >> 9 + halvings, 1)
        leaf, joined = 0, n
        for new in range(n, 2 * n - 1):  # joins the two lightest: leaves and joined ones both rise
            weight = 0
            for _ in range(2):
                if leaf < n and (joined >= new or weights[leaf] <= weights[joined]):
                    lightest = leaf
                    leaf += 1
                else:
                    lightest = joined
                    joined += 1
                parents[lightest] = new
                weight += weights[lightest]
            weights[new] = weight
        depths[2 * n - 2] = 0
        deepest = 0
        for i in range(2 * n - 3, -1, -1):
            depths[i] = depths[parents[i]] + 1
            deepest = max(deepest, depths[i])
        halvings += 1
    lengths[:] = 0
    for i in range(n):
        lengths[keys[i] & 511] = depths[i]


@kernel
def _codes(lengths: Counts) -> npt.NDArray[np.uint64]:
    """The codes that lengths stand for (RFC 1951, section 3.2.2), first bit lowest."""
    codes = np.zeros(lengths.size, dtype=np.uint64)
    code = 0
    for bits in range(1, _MOST_BITS + 1):
        code <<= 1
        for symbol in range(lengths.size):
            if lengths[symbol] == bits:
                mirrored = 0
                for place in range(bits):
                    mirrored |= (code >> place & 1) << (bits - 1 - place)
                codes[symbol] = mirrored
                code += 1
    return codes


@kernel
def _runs(lengths: Counts, symbols: Counts, extras: Counts) -> int:
    """Writes lengths as symbols 0 to 18 and what repeats hold beside them; returns how many."""
    size = 0
    i = 0
    while i < lengths.size:
        run = 1
        while i + run < lengths.size and lengths[i + run] == lengths[i] and run < 138:
            run += 1
        if lengths[i] == 0 and run >= 3:
            symbols[size] = 17 if run <= 10 else 18
            extras[size] = run - (3 if run <= 10 else 11)
        elif i and lengths[i] == lengths[i - 1] and run >= 3:
            run = min(run, 6)
            symbols[size] = 16
            extras[size] = run - 3
        else:
            run = 1
            symbols[size] = lengths[i]
            extras[size] = 0
        size += 1
        i += run
    return size


@kernel
def _extra_bits(symbol: int) -> int:
    return 2 if symbol == 16 else 3 if symbol == 17 else 7 if symbol == 18 else 0


@kernel
def _put(words: npt.NDArray[np.uint32], at: int, value: int, num_bits: int) -> int:
    """Adds up to 15 bits after `at` bits, in words that were 0; returns the place after them."""
    shifted = np.uint64(value) << np.uint64(at % 32)
    words[at // 32] |= np.uint32(shifted & np.uint64(0xFFFF_FFFF))
    words[at // 32 + 1] |= np.uint32(shifted >> np.uint64(32))
    return at + num_bits


@kernel
def huffman_coded(plain: Bytes) -> Bytes:
    """A complete stream of these bytes, one at least."""
    counts = np.empty(_LITERALS, dtype=np.int64)
    _count(plain, counts)
    lengths = np.zeros(_LENGTHS, dtype=np.int64)
    code_lengths(counts, _MOST_BITS, lengths[:_LITERALS])
    symbols, extras = np.empty(_LENGTHS, dtype=np.int64), np.empty(_LENGTHS, dtype=np.int64)
    num_runs = _runs(lengths, symbols, extras)
    run_counts = np.zeros(19, dtype=np.int64)
    num_bits = 3 + 5 + 5 + 4 + 3 * 19
    for i in range(num_runs):
        run_counts[symbols[i]] += 1
        num_bits += _MOST_LENGTH_BITS + _extra_bits(symbols[i])
    run_lengths = np.zeros(19, dtype=np.int64)
    code_lengths(run_counts, _MOST_LENGTH_BITS, run_lengths)
    run_codes = _codes(run_lengths)
    for symbol in range(_LITERALS):
        num_bits += counts[symbol] * lengths[symbol]
    words = np.zeros(num_bits // 32 + 3, dtype=np.uint32)  # one to write over what is not yet full
    num_lengths = 19
    while run_lengths[_ORDER[num_lengths - 1]] == 0:
        num_lengths -= 1
    at = _put(words, 0, _FINAL_DYNAMIC, 3)
    at = _put(words, at, 0, 5)
    at = _put(words, at, 0, 5)
    at = _put(words, at, num_lengths - 4, 4)
    for i in range(num_lengths):
        at = _put(words, at, run_lengths[_ORDER[i]], 3)
    for i in range(num_runs):
        at = _put(words, at, run_codes[symbols[i]], run_lengths[symbols[i]])
        at = _put(words, at, extras[i], _extra_bits(symbols[i]))
    codes = _codes(lengths[:_LITERALS])
    table = np.empty(256, dtype=np.uint64)  # the code, and its bits above 32
    for byte in range(256):
        table[byte] = codes[byte] | np.uint64(lengths[byte]) << np.uint64(32)
    word = np.int64(at // 32)
    filled, buffer = np.uint64(at % 32), np.uint64(words[word])
    low, thirty_two, one_less = np.uint64(0xFFFF_FFFF), np.uint64(32), np.uint64(31)
    for i in range(plain.size):
        entry = table[plain[i]]
        buffer |= (entry & low) << filled
        filled += entry >> thirty_two
        words[word] = np.uint32(buffer & low)  # written in any case: no branch to guess
        full = filled >> np.uint64(5)
        word += np.int64(full)
        buffer >>= full << np.uint64(5)
        filled &= one_less
    words[word] = np.uint32(buffer & low)
    at = _put(words, int(32 * word + np.int64(filled)), codes[256], lengths[256])
    return words.view(np.uint8)[: (at + 7) // 8]


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
