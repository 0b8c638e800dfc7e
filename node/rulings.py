"""The run's rulings as a node keeps them: who may take part, and what amendments have made of the rules.

A coordinator that was restored from an older copy of its database gets from here what it lacks. In
memory, and in a file of the node's folder, written before anything is done by them.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import structlog
from google.protobuf.message import DecodeError

from node.disk.logs import AppendedFile
from protocol.errors import AtollError, BadDataError
from protocol.run.amendments import Span, in_force, span_of
from protocol.run.run_spec import RunSpec
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
    undoes,
)
from protocol.v1 import ruling_pb2
from protocol.wire.convert_messages import rulings_from_wire, rulings_to_wire
from protocol.wire.rounds import Commit, Digest, Plan

log = structlog.get_logger()

_LENGTH = struct.Struct("<I")


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
        # Validating a run file takes milliseconds, and the same few rounds are asked for again and again.
        self._in_force = lru_cache(maxsize=8)(
            lambda round: in_force(spec, self.rulings, round=round)
        )
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
            self._file.replace(b"".join(map(_framed, kept)))
        elif self._file is not None and news:
            self._file.append(b"".join(map(_framed, news)), is_forced=True)
        self._verifier = verifier
        self._keep(kept)
        return tuple(signed.ruling for signed in news)

    def _keep(self, signed: Sequence[SignedRuling]) -> None:
        self._signed = tuple(signed)
        self.rulings = tuple(each.ruling for each in signed)
        self._in_force.cache_clear()

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
        data, at = file.read(), 0
        found: list[SignedRuling] = []
        while at + _LENGTH.size <= len(data):
            end = at + _LENGTH.size + _LENGTH.unpack_from(data, at)[0]
            if end > len(data):
                break
            try:
                wire = ruling_pb2.Rulings.FromString(data[at + _LENGTH.size : end])
                found += rulings_from_wire(wire)
            except (DecodeError, AtollError):
                break
            at = end
        if self._verifier is not None:
            self._verifier = checked_chain(found, self._verifier)
        self._keep(found)
        file.num_bytes = at


def _framed(signed: SignedRuling) -> bytes:
    encoded = rulings_to_wire([signed]).SerializeToString(deterministic=True)
    return _LENGTH.pack(len(encoded)) + encoded
