"""Which contributions this node has sent, by digest: so that it knows its own where a commit names it.

A commit may take what a process sent that was killed since, or what was sent by a plan that has changed
since; and a reducer may name a contributor of which it has nothing. In memory, and in a file of the node's
folder: one fixed record for each contribution, written before it leaves. It is not forced to the disk, so a
killed process loses none of it and a power failure may lose the last ones.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

import structlog

from protocol.errors import AtollError
from protocol.files.durable import make_folder, refusing, write_atomically
from protocol.rounds import ContributionDigest

log = structlog.get_logger()

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
    """What was sent in each round, by this process and those before it."""

    def __init__(self, path: Path | None) -> None:
        """Reads the file, if there is one; None keeps everything in memory."""
        self._path = path
        self._sent: dict[int, set[SentSlice]] = {}
        self._file_bytes = 0
        if path is not None and path.exists():
            self._read(path)

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
        self._sent.setdefault(round, set()).add(sent)
        if self._path is None:
            self.forget_before(round - KEPT_ROUNDS)
            return
        record = _packed(round, sent)
        try:
            make_folder(self._path.parent)
            with refusing(self._path), self._path.open("ab") as file:
                file.truncate(self._file_bytes)  # what an earlier write left half done
                file.write(record)
            self._file_bytes += len(record)
        except AtollError as error:
            log.warning("not noted on disk what is sent", round=round, why=str(error))

    def forget_before(self, round: int) -> None:
        """Drops earlier rounds, which nothing leads through any more. Raises as `refusing` does."""
        kept = {number: sent for number, sent in self._sent.items() if number >= round}
        if len(kept) == len(self._sent):
            return
        if self._path is not None:
            data = b"".join(_packed(number, each) for number, sent in kept.items() for each in sent)
            write_atomically(self._path, data)
            self._file_bytes = len(data)
        self._sent = kept

    def _read(self, path: Path) -> None:
        data = path.read_bytes()
        self._file_bytes = len(data) // _RECORD.size * _RECORD.size
        for fields in _RECORD.iter_unpack(data[: self._file_bytes]):
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
