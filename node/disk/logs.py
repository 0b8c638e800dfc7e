"""What leads from a snapshot to the newest state, and what was sent meanwhile: results, and digests.

Results are a file for each round that had any: the magic, then for each slice the size of its payload's
header (unsigned, 32 bits, little-endian), the header, and the body. What a file holds is found and checked
by digests that commits name, so one of a round that was taken back, or a damaged one, holds nothing.
"""

import os
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import structlog

from node.disk.round_folder import RoundFolder
from protocol.errors import AtollError
from protocol.files.durable import make_folder, refusing, write_atomically
from protocol.wire.payload import MAX_HEADER_BYTES, Payload, PayloadError, PayloadHeader
from protocol.wire.rounds import ContributionDigest, Digest
from protocol.wire.versions import RESULTS_MAGIC as MAGIC

log = structlog.get_logger()

_HEADER_BYTES = struct.Struct("<I")


class ResultLog:
    """The results of one node's latest rounds. Reading and writing are heavy."""

    def __init__(self, path: Path) -> None:
        self.folder = RoundFolder(path, suffix=".results")

    def write(self, round: int, payloads: Sequence[Payload]) -> None:
        """Keeps a round's results, durably, and none of later rounds. Raises as RoundFolder.write."""
        pieces: list[bytes] = []
        for payload in payloads:
            header = payload.header.encode()
            pieces += [_HEADER_BYTES.pack(len(header)), header, payload.body]
        if pieces:
            self.folder.write(round, MAGIC, *pieces)
        else:
            self.folder.drop_after(round)

    def find(self, round: int, slice_index: int, digest: Digest) -> Payload | None:
        """The result of a slice with this digest, if it is there undamaged."""
        try:
            with self.folder.path_of(round).open("rb") as file:
                for header in _headers(file):
                    if header.slice_index == slice_index:
                        payload = Payload.verified(header, file.read(header.body_bytes))
                        return payload if payload.digest == digest else None
        except FileNotFoundError:
            return None
        except (OSError, PayloadError) as error:
            log.warning("results on disk are damaged", round=round, why=str(error))
        return None


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


class AppendedFile:
    """Records one behind the other: a write that was cut off costs the last one, and is written over."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_bytes = 0  # of whole records

    def read(self) -> bytes:
        """All that is there; say in `num_bytes` how much of it is whole."""
        return self.path.read_bytes() if self.path.exists() else b""

    def append(self, records: bytes, *, is_forced: bool) -> None:
        """Adds whole records, durably where that is forced. Raises what `refusing` does."""
        make_folder(self.path.parent)
        with refusing(self.path), self.path.open("ab") as file:
            file.truncate(self.num_bytes)  # what an earlier write left half done
            file.write(records)
            file.flush()
            if is_forced:
                os.fsync(file.fileno())
        self.num_bytes += len(records)

    def replace(self, records: bytes) -> None:
        """Has these records instead, durably. Raises as `append`."""
        write_atomically(self.path, records)
        self.num_bytes = len(records)


_RECORD = struct.Struct("<QIQQ16s")

KEPT_ROUNDS = 64
"""Without a folder, where nothing is ever replayed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentSlice:
    """What was sent of one slice."""

    index: int
    start: int
    num_elements: int
    contribution: ContributionDigest


class SentLog:
    """Which contributions this node has sent, by digest: it knows its own where a commit names it.

    A commit may take what a process sent that was killed since, or what was sent by a plan that has
    changed since; and a reducer may name a contributor of which it has nothing. In memory, and in a file
    of the node's folder: one fixed record for each contribution, written before it leaves. It is not
    forced to the disk, so a killed process loses none of it and a power failure may lose the last ones.
    """

    def __init__(self, path: Path | None) -> None:
        """Reads the file, if there is one; None keeps everything in memory."""
        self._file = None if path is None else AppendedFile(path)
        self._sent: dict[int, set[SentSlice]] = {}
        self._lock = threading.Lock()  # a snapshot that is done forgets while a round sends
        if self._file is not None:
            self._read(self._file)

    def knows(self, round: int) -> bool:
        """Whether anything is known to have been sent in a round."""
        return round in self._sent

    def has(self, round: int, sent: SentSlice) -> bool:
        """Whether this very contribution was sent."""
        return sent in self._sent.get(round, ())

    def note(self, round: int, sent: SentSlice) -> None:
        """Remembers what is about to be sent.

        Where it cannot be written, that is said, and only this process knows it: a full disk ends the
        node when the round is over, not before.
        """
        if self.has(round, sent):
            return
        if self._file is None:
            self.forget_before(round - KEPT_ROUNDS)
        with self._lock:
            self._sent.setdefault(round, set()).add(sent)
            if self._file is None:
                return
            try:
                self._file.append(_packed(round, sent), is_forced=False)
            except AtollError as error:
                log.warning("not noted on disk what is sent", round=round, why=str(error))

    def forget_before(self, round: int) -> None:
        """Drops earlier rounds, which nothing leads through any more. Raises as `refusing` does."""
        with self._lock:
            kept = {number: sent for number, sent in self._sent.items() if number >= round}
            if len(kept) == len(self._sent):
                return
            if self._file is not None:
                self._file.replace(
                    b"".join(
                        _packed(number, each) for number, sent in kept.items() for each in sent
                    )
                )
            self._sent = kept

    def _read(self, file: AppendedFile) -> None:
        data = file.read()
        file.num_bytes = len(data) // _RECORD.size * _RECORD.size
        for fields in _RECORD.iter_unpack(data[: file.num_bytes]):
            number, index, start, num_elements, digest = fields
            sent = SentSlice(
                index=index,
                start=start,
                num_elements=num_elements,
                contribution=ContributionDigest(digest),
            )
            self._sent.setdefault(number, set()).add(sent)


def _packed(round: int, sent: SentSlice) -> bytes:
    return _RECORD.pack(round, sent.index, sent.start, sent.num_elements, sent.contribution)
