"""The commits that led to a node's outer state, with the coordinator's signature under each.

A coordinator that was restored from an older copy of its database gets from here what it lacks. In
memory, and in a file of the node's folder: framed messages, each appended behind the others, so
that a write that was cut off costs the last one. Of two commits of a round the later one counts,
and makes all after it void: history was taken back.
"""

import struct
from bisect import bisect_right
from pathlib import Path

import structlog
from google.protobuf.message import DecodeError

from node.disk.logs import AppendedFile
from protocol.errors import AtollError
from protocol.v1 import round_pb2
from protocol.wire import convert
from protocol.wire.rounds import Commit

log = structlog.get_logger()

KEPT_BYTES = 64 << 20
"""When the file passes this, the older half of its rounds goes."""

_LENGTH = struct.Struct("<I")


class History:
    """Adding is cheap and only remembers; `save` writes what is new."""

    def __init__(self, path: Path | None) -> None:
        """Reads the file, if there is one; None keeps everything in memory."""
        self._file = None if path is None else AppendedFile(path)
        self._rounds: list[int] = []  # in order
        self._commits: dict[int, bytes] = {}  # round -> atoll.v1.Commit
        self._incarnations: dict[int, int] = {}
        self._unsaved: list[bytes] = []
        self._is_cut = False  # of the file some rounds are not wanted any more
        if self._file is not None:
            self._read(self._file)

    def add(self, commit: Commit) -> None:
        """Remembers a commit that was applied; drops those that it takes back."""
        encoded = convert.commit_to_wire(commit).SerializeToString(deterministic=True)
        if self._commits.get(commit.round) == encoded:
            return
        self._put(commit.round, commit.incarnation, encoded)
        if self._file is not None:
            self._unsaved.append(encoded)

    def after(self, round: int, *, max_bytes: int) -> tuple[Commit, ...]:
        """The commits of later rounds, oldest first: as many as fit, but one in any case."""
        commits: list[Commit] = []
        for place in range(bisect_right(self._rounds, round), len(self._rounds)):
            encoded = self._commits[self._rounds[place]]
            max_bytes -= len(encoded)
            if commits and max_bytes < 0:
                break
            commits.append(convert.commit_from_wire(round_pb2.Commit.FromString(encoded)))
        return tuple(commits)

    def at(self, round: int) -> Commit | None:
        """The commit of a round; None where it is not kept."""
        encoded = self._commits.get(round)
        if encoded is None:
            return None
        return convert.commit_from_wire(round_pb2.Commit.FromString(encoded))

    def incarnation_at(self, round: int) -> int:
        """Of the commit that led to the state at this round; 0 when it is not known."""
        return self._incarnations.get(round, 0)

    def forget_after(self, round: int) -> None:
        """Drops the commits of later rounds, which are undone, from the file with the next `save`."""
        if not self._rounds or self._rounds[-1] <= round:
            return
        while self._rounds and self._rounds[-1] > round:
            self._drop(self._rounds.pop())
        self._unsaved = []
        self._is_cut = self._file is not None

    def is_known(self, round: int) -> bool:
        """Whether the commit of a round is kept."""
        return round in self._commits

    def save(self) -> None:
        """Makes what was added durable. Raises what protocol.files.durable.refusing does.

        What a disk refused is written the next time, with what was added since.
        """
        if self._file is None:
            return
        if self._is_cut:
            self._file.replace(b"".join(_framed(self._commits[number]) for number in self._rounds))
            self._unsaved, self._is_cut = [], False
        if not self._unsaved:
            return
        num_unsaved = len(self._unsaved)
        frames = b"".join(map(_framed, self._unsaved[:num_unsaved]))
        if self._file.num_bytes + len(frames) > KEPT_BYTES:
            older = self._rounds[: len(self._rounds) // 2]
            rounds = self._rounds[len(older) :]
            self._file.replace(b"".join(_framed(self._commits[number]) for number in rounds))
            for number in older:
                self._drop(number)
            self._rounds = self._rounds[len(older) :]
        else:
            self._file.append(frames, is_forced=True)
        del self._unsaved[:num_unsaved]

    def _put(self, number: int, incarnation: int, encoded: bytes) -> None:
        while self._rounds and self._rounds[-1] >= number:
            self._drop(self._rounds.pop())
        self._rounds.append(number)
        self._commits[number] = encoded
        self._incarnations[number] = incarnation

    def _drop(self, number: int) -> None:
        del self._commits[number]
        del self._incarnations[number]

    def _read(self, file: AppendedFile) -> None:
        """Takes in whole frames; what follows the first damaged one is left out, and overwritten."""
        data = file.read()
        at = 0
        while at + _LENGTH.size <= len(data):
            end = at + _LENGTH.size + _LENGTH.unpack_from(data, at)[0]
            encoded = data[at + _LENGTH.size : end]
            if end > len(data):
                break
            try:
                commit = convert.commit_from_wire(round_pb2.Commit.FromString(encoded))
            except (DecodeError, AtollError):
                break
            self._put(commit.round, commit.incarnation, encoded)
            at = end
        file.num_bytes = at
        if at < len(data):
            log.warning("history damaged", path=str(file.path), kept_rounds=len(self._rounds))


def _framed(encoded: bytes) -> bytes:
    return _LENGTH.pack(len(encoded)) + encoded
