"""What leads from a snapshot to the newest state: results, what was sent, and what the coordinator signed.

Results are a file for each round that had any: the magic, then for each slice the size of its payload's
header (unsigned, 32 bits, little-endian), the header, and the body. What a file holds is found and checked
by digests that commits name, so one of a round that was taken back, or a damaged one, holds nothing.

The coordinator has signed the commits that led to a node's state, and the rulings. A coordinator that was
restored from an older copy of its database gets from here what it lacks. Both are in memory, and in a file
each of the node's folder: framed messages, each appended behind the others, so that a write that was cut off
costs the last one.

Of two commits of a round the later one counts, and makes all after it void: history was taken back. Rulings
say who may take part, and what amendments have made of the rules; they are written before anything is done by
them.
"""

import os
import struct
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, TypeVar

import structlog
from google.protobuf.message import DecodeError

from node.disk.round_folder import RoundFolder
from protocol.errors import AtollError, BadDataError
from protocol.files.durable import make_folder, refusing, write_atomically
from protocol.run.amendments import in_force, span_of
from protocol.run.run_spec import RunSpec
from protocol.run.schedule import Span
from protocol.trust.rulings import (
    Ruling,
    RulingKind,
    RulingVerifier,
    SignedRuling,
    checked_chain,
    digest_of,
    follows,
    in_words,
    key_number,
    least_key,
    rulings_from_wire,
    rulings_to_wire,
    undoes,
)
from protocol.v1 import round_pb2, ruling_pb2
from protocol.wire import convert
from protocol.wire.payload import MAX_HEADER_BYTES, Payload, PayloadError, PayloadHeader
from protocol.wire.rounds import Commit, ContributionDigest, Digest, Plan
from protocol.wire.versions import RESULTS_MAGIC as MAGIC

log = structlog.get_logger()

T = TypeVar("T")

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


KEPT_BYTES = 64 << 20
"""When the file passes this, the older half of its rounds goes."""

_LENGTH = struct.Struct("<I")


# Commits


class History:
    """Adding is cheap and only remembers; `save` writes what is new.

    A commit is looked through once somebody asks for it: 64 MB of them take five seconds. A damaged one ends
    what is known, as a cut file does.
    """

    def __init__(self, path: Path | None) -> None:
        """Reads the file, if there is one; None keeps everything in memory."""
        self._file = None if path is None else AppendedFile(path)
        self._rounds: list[int] = []  # in order
        self._commits: dict[int, bytes] = {}  # round -> atoll.v1.Commit
        self._incarnations: dict[int, int] = {}
        self._moves_by: Commit | None = None
        self._unsaved: list[bytes] = []
        self._is_cut = False  # of the file some rounds are not wanted any more
        if self._file is not None:
            self._read(self._file)

    def moves_by(self, commit: Commit) -> None:
        """The state is about to move to a commit's round: a heartbeat may tell of it before `add`."""
        self._moves_by = commit

    def add(self, commit: Commit) -> None:
        """Remembers a commit that was applied; drops those that it takes back."""
        self._moves_by = None
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
            max_bytes -= len(self._commits[self._rounds[place]])
            if commits and max_bytes < 0:
                break
            if (commit := self.at(self._rounds[place])) is None:
                break
            commits.append(commit)
        return tuple(commits)

    def at(self, round: int) -> Commit | None:
        """The commit of a round; None where it is not kept, or damaged."""
        if (encoded := self._commits.get(round)) is None:
            return None
        try:
            return convert.commit_from_wire(round_pb2.Commit.FromString(encoded))
        except AtollError as error:
            log.warning("history damaged", round=round, why=str(error))
            return None

    @property
    def commits(self) -> Iterator[Commit]:
        """All that are kept, oldest first."""
        for number in self._rounds:
            if (commit := self.at(number)) is None:
                return
            yield commit

    def incarnation_at(self, round: int) -> int:
        """Of the commit that led to the state at this round; 0 when it is not known."""
        if self._moves_by is not None and self._moves_by.round == round:
            return self._moves_by.incarnation
        return self._incarnations.get(round, 0)

    def forget_after(self, round: int) -> None:
        """Drops the commits of later rounds, which are undone, from the file with the next `save`."""
        self._moves_by = None
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
        for encoded, end in _frames(data):
            try:
                wire = round_pb2.Commit.FromString(encoded)
            except DecodeError:
                break
            self._put(wire.round, wire.incarnation, encoded)
            file.num_bytes = end
        if file.num_bytes < len(data):
            log.warning("history damaged", path=str(file.path), kept_rounds=len(self._rounds))


# Rulings


class KeptRulings:
    """Rulings of one run. Without a `verifier` they are believed: of a coordinator in this process."""

    def __init__(
        self, spec: RunSpec, *, path: Path | None = None, verifier: RulingVerifier | None = None
    ) -> None:
        """Reads the file, if there is one; None keeps everything in memory. Raises BadDataError."""
        self._spec = spec
        self._verifier = verifier
        self._signed: tuple[SignedRuling, ...] = ()
        self.rulings: tuple[Ruling, ...] = ()
        """All of them, in order."""
        self.on_taken: Callable[[tuple[Ruling, ...]], None] = lambda news: None
        """Hears of those that are news."""
        # Validating a run file takes milliseconds, and the same few rounds are asked for again and again.
        self._in_force = lru_cache(maxsize=8)(
            lambda round: in_force(spec, self.rulings, round=round)
        )
        # Of what rulings change.
        self._caches: list[Callable[[], None]] = [self._in_force.cache_clear]
        self._file = None if path is None else AppendedFile(path)
        if self._file is not None:
            self._read(self._file)

    @property
    def number(self) -> int:
        """How many there are."""
        return len(self._signed)

    @property
    def digest(self) -> Digest:
        """Of the latest, and with it of all."""
        return self.digest_at(self.number)

    def digest_at(self, number: int) -> Digest:
        """Of the first so many."""
        return digest_of(self.rulings[:number])

    def after(self, number: int) -> tuple[SignedRuling, ...]:
        """Those of greater numbers."""
        return self._signed[number:]

    def take(self, told: Sequence[SignedRuling]) -> tuple[Ruling, ...]:
        """Keeps what the coordinator tells, durably; returns what is news.

        The coordinator's hold where it has others of the same numbers. Raises BadDataError for one that
        the authority did not sign, or that leaves a gap.
        """
        kept, num_same, verifier = list(self._signed), self.number, self._verifier
        least: int | None = None  # key that may sign what follows those kept
        for signed in told:
            number = signed.ruling.number
            if any(one.ruling == signed.ruling for one in kept[number - 1 : number]):
                continue
            if verifier is not None:
                if least is None or number != len(kept) + 1:
                    least = least_key(one.ruling for one in kept[: number - 1])
                least = max(least, key_number(signed.ruling))
                verifier = verifier.after(signed.ruling)
                verifier.check(signed, least=least)
            del kept[number - 1 :]
            num_same = min(num_same, len(kept))
            if not follows(signed.ruling, kept[-1].ruling if kept else None):
                raise BadDataError(
                    f"ruling {signed.ruling.number} does not follow the {len(kept)} that are known here",
                    next_step="start the node again with 'atoll node start'",
                )
            kept.append(signed)
        for gone in self._signed[num_same:]:
            log.warning("a ruling does not hold: another has its place", what=in_words(gone.ruling))
        in_force(self._spec, (one.ruling for one in kept))  # before it is kept: can it be followed?
        news = tuple(kept[num_same:])
        if self._file is not None and num_same < self.number:
            self._file.replace(_frames_of(kept))
        elif self._file is not None and news:
            self._file.append(_frames_of(news), is_forced=True)
        self._verifier = verifier
        self._keep(kept)
        taken = tuple(signed.ruling for signed in news)
        self.on_taken(taken)
        return taken

    def _keep(self, signed: Sequence[SignedRuling]) -> None:
        self._signed = tuple(signed)
        self.rulings = tuple(each.ruling for each in signed)
        for forget in self._caches:
            forget()

    @property
    def are_amending(self) -> bool:
        """Whether any rule of the run was changed."""
        return any(ruling.kind is RulingKind.AMENDED for ruling in self.rulings)

    def undo(self, round: int, incarnation: int) -> bool:
        """Whether the commit of a round, of this incarnation, is undone."""
        return undoes(self.rulings, round, incarnation)

    def undo_plan(self, plan: Plan) -> bool:
        """Whether the run has gone back behind a plan since it was made."""
        return any(
            ruling.kind is RulingKind.ROLLED_BACK and plan.round >= ruling.from_round
            for ruling in self.rulings[plan.num_rulings :]
        )

    def spec_in(self, round: int) -> RunSpec:
        """The run's rules in a round."""
        return self._in_force(round)

    def made_in(self, make: Callable[[RunSpec], T]) -> Callable[[int], T]:
        """What is made of the run's rules in a round. While they stay as they are, it stays the same."""
        latest: tuple[RunSpec, T] | None = None

        @lru_cache(maxsize=8)
        def made(round: int) -> T:
            nonlocal latest
            spec = self.spec_in(round)
            if latest is None or latest[0] != spec:
                latest = spec, make(spec)
            return latest[1]

        self._caches.append(made.cache_clear)
        return made

    @property
    def in_force(self) -> RunSpec:
        """The run's rules after all rulings: those of the rounds to come."""
        return self._in_force(None)

    @property
    def last_round(self) -> int:
        """Of the run, by all that was amended."""
        return self.in_force.run.rounds

    def check_commit(self, commit: Commit) -> None:
        """Raises BadDataError for a commit that the run's coordinator did not sign."""
        if self._verifier is not None and not self._verifier.has_signed(commit, self.rulings):
            raise BadDataError(
                f"the commit of round {commit.round} does not bear the signature of the run's coordinator",
                next_step="ask the run owner what answers in the coordinator's place",
            )

    def span_in(self, round: int) -> Span:
        """How far the run is where a round begins and ends, by rounds."""
        return span_of(self._spec, self.rulings, round)

    def _read(self, file: AppendedFile) -> None:
        """Takes in whole frames; what follows the first damaged one is left out, and written over."""
        found: list[SignedRuling] = []
        for encoded, end in _frames(file.read()):
            try:
                found += rulings_from_wire(ruling_pb2.Rulings.FromString(encoded))
            except (DecodeError, AtollError):
                break
            file.num_bytes = end
        if self._verifier is not None:
            self._verifier = checked_chain(found, self._verifier)
        self._keep(found)


def _frames_of(rulings: Iterable[SignedRuling]) -> bytes:
    wire = (rulings_to_wire([each]).SerializeToString(deterministic=True) for each in rulings)
    return b"".join(map(_framed, wire))


# Frames


def _framed(encoded: bytes) -> bytes:
    return _LENGTH.pack(len(encoded)) + encoded


def _frames(data: bytes) -> Iterator[tuple[bytes, int]]:
    """What is in each whole frame, and where that ends."""
    at = 0
    while at + _LENGTH.size <= len(data):
        begin = at + _LENGTH.size
        at = begin + _LENGTH.unpack_from(data, at)[0]
        if at > len(data):
            return
        yield data[begin:at], at
