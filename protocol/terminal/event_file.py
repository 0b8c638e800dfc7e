"""TensorBoard's event files, as far as numbers need it: records of one message each, appended.

Format: tensorflow/core/lib/io/record_writer.h (length, its checksum, data, its checksum; CRC-32C,
masked) and tensorflow/core/util/event.proto. Written here because the packages that do it ask for numpy or
for TensorBoard itself, and none lets one cut a file back to where it was whole.
"""

import os
import struct
from collections.abc import Mapping
from pathlib import Path

_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5  # wire types of protocol buffers
_POLYNOMIAL = 0x82F63B78  # Castagnoli's, reflected
_MASK_DELTA = 0xA282EAD8
_SESSION_START = 1
_DT_STRING = 7  # tensorflow/core/framework/types.proto

VERSION = "brain.Event:2"


def _table() -> tuple[int, ...]:
    entries = []
    for entry in range(256):
        for _ in range(8):
            entry = entry >> 1 ^ (_POLYNOMIAL if entry & 1 else 0)
        entries.append(entry)
    return tuple(entries)


_CRC_TABLE = _table()


def crc32c(data: bytes) -> int:
    """The checksum of Castagnoli (RFC 3720, appendix B.4)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF)


def record_of(event: bytes) -> bytes:
    """An event as it stands in a file."""
    length = struct.pack("<Q", len(event))
    return length + _masked(length) + event + _masked(event)


def _varint(number: int) -> bytes:
    digits = bytearray()
    while number > 0x7F:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*digits, number])


def _field(number: int, kind: int, content: bytes) -> bytes:
    length = _varint(len(content)) if kind == _BYTES else b""
    return _varint(number << 3 | kind) + length + content


def _event(at: float, step: int, what: bytes) -> bytes:
    return _field(1, _DOUBLE, struct.pack("<d", at)) + _field(2, _VARINT, _varint(step)) + what


def scalars_event(at: float, step: int, values: Mapping[str, float]) -> bytes:
    """Numbers of one step, by their tags; `at` in seconds since 1970."""
    summary = b"".join(
        _field(
            1,
            _BYTES,
            _field(1, _BYTES, tag.encode()) + _field(2, _FLOAT, struct.pack("<f", value)),
        )
        for tag, value in values.items()
    )
    return _event(at, step, _field(5, _BYTES, summary))


def texts_event(at: float, step: int, texts: Mapping[str, str]) -> bytes:
    """Texts of one step, by their tags, for TensorBoard's text plugin.

    That reads Markdown, so each line is indented: a block of code, in which nothing is markup.
    """
    metadata = _field(1, _BYTES, _field(1, _BYTES, b"text"))
    shape = _field(2, _BYTES, _field(2, _BYTES, _field(1, _VARINT, _varint(1))))
    summary = b"".join(
        _field(
            1,
            _BYTES,
            _field(1, _BYTES, tag.encode())
            + _field(
                8,
                _BYTES,
                _field(1, _VARINT, _varint(_DT_STRING)) + shape + _field(8, _BYTES, block),
            )
            + _field(9, _BYTES, metadata),
        )
        for tag, text in texts.items()
        for block in ["\n".join(f"    {line}" for line in text.split("\n")).encode()]
    )
    return _event(at, step, _field(5, _BYTES, summary))


def rewind_event(at: float, step: int) -> bytes:
    """Tells TensorBoard that steps from this one on are made again: it drops those before."""
    return _event(at, step, _field(7, _BYTES, _field(1, _VARINT, _varint(_SESSION_START))))


class EventFile:
    """Appends events; `size` is how far the file is whole and on the disk. Raises OSError."""

    def __init__(self, path: Path, *, size: int, at: float) -> None:
        """Opens or makes the file, and cuts off what lies beyond `size`: it was not finished."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("r+b" if path.exists() else "w+b")
        self._file.truncate(size)
        self._file.seek(0, os.SEEK_END)
        self.size = self._file.tell()
        if not self.size:
            self.append(
                [_field(1, _DOUBLE, struct.pack("<d", at)) + _field(3, _BYTES, VERSION.encode())]
            )

    def append(self, events: "list[bytes]") -> None:
        """Writes events, and returns when they are on the disk."""
        self._file.write(b"".join(map(record_of, events)))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.size = self._file.tell()

    def close(self) -> None:
        """Ends it."""
        self._file.close()
