"""Committed results on disk: what leads from a snapshot to the rounds after it, here and at peers.

A file for each round that had any: the magic, then for each slice the size of its payload's header
(unsigned, 32 bits, little-endian), the header, and the body. What a file holds is found and checked
by digests that commits name, so one of a round that was taken back, or a damaged one, holds nothing.
"""

import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import structlog

from protocol.files.durable import make_folder, remove_durably, write_atomically
from protocol.payload import MAX_HEADER_BYTES, Payload, PayloadError, PayloadHeader
from protocol.rounds import Digest

log = structlog.get_logger()

MAGIC = b"atollrs1"  # the last character is the version
_HEADER_BYTES = struct.Struct("<I")
_FILE_NAME = re.compile(r"round-(\d+)\.results")


class ResultLog:
    """The results of one node's latest rounds. Reading and writing are heavy."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, round: int, payloads: Sequence[Payload]) -> int:
        """Keeps a round's results and returns how many bytes they take, durably.

        Files of later rounds go: they are of a history that was left. Raises SystemRefusedError when
        the disk is full and CannotCreateError when the folder cannot be written to.
        """
        make_folder(self.path)
        for unfinished in self.path.glob(".round-*.results.*"):  # of a killed process
            remove_durably(unfinished)
        for later in [number for number in self._rounds() if number > round]:
            remove_durably(self._file_of(later))
        if not payloads:
            return 0
        pieces = [MAGIC]
        for payload in payloads:
            header = payload.header.encode()
            pieces += [_HEADER_BYTES.pack(len(header)), header, payload.body]
        write_atomically(self._file_of(round), *pieces)
        return sum(map(len, pieces))

    def find(self, round: int, slice_index: int, digest: Digest) -> Payload | None:
        """The result of a slice with this digest, if it is there undamaged."""
        try:
            with self._file_of(round).open("rb") as file:
                for header in _headers(file):
                    if header.slice_index == slice_index:
                        payload = Payload.verified(header, file.read(header.body_bytes))
                        return payload if payload.digest == digest else None
        except FileNotFoundError:
            return None
        except (OSError, PayloadError) as error:
            log.warning("results on disk are damaged", round=round, why=str(error))
        return None

    def forget_before(self, round: int) -> None:
        """Drops the results of earlier rounds."""
        for number in self._rounds():
            if number < round:
                remove_durably(self._file_of(number))

    def held_bytes(self) -> int:
        """What the files take."""
        return sum(path.stat().st_size for path in self.path.glob("*.results"))

    def _rounds(self) -> list[int]:
        if not self.path.is_dir():
            return []
        matches = (_FILE_NAME.fullmatch(path.name) for path in self.path.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def _file_of(self, round: int) -> Path:
        return self.path / f"round-{round:08}.results"


def _headers(file: BinaryIO) -> Iterator[PayloadHeader]:
    """The headers of a file; where one is given, its body comes next. Raises PayloadError."""
    if file.read(len(MAGIC)) != MAGIC:
        raise PayloadError(f"results begin with {MAGIC!r}")
    while size := file.read(_HEADER_BYTES.size):
        if len(size) < _HEADER_BYTES.size:
            raise PayloadError("the file was cut off")
        (header_bytes,) = _HEADER_BYTES.unpack(size)
        # One byte more than allowed is refused by its length, whatever the file says.
        header = PayloadHeader.decode(file.read(min(header_bytes, MAX_HEADER_BYTES + 1)))
        begin = file.tell()
        yield header
        file.seek(begin + header.body_bytes)
