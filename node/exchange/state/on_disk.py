"""What a node keeps of its outer state on disk: a snapshot now and then, each round's results between.

A snapshot has 16 bytes a parameter, a round's results half a byte with int4: to write a snapshot after
every round would wear out an SSD in weeks. The results of the rounds since lead from one to the newest
state, to the same bits. What the node owed at a snapshot is then still owed where no round has taken it.
Inner steps that a round did not take are on the disk at once, for they bring a snapshot.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from node.exchange import held_results
from node.exchange.codecs.codec import CodecError
from node.exchange.codecs.registry import codec_named
from node.exchange.held_results import HeldResults
from node.exchange.outer import NotApplicableError, Outer, Position
from node.exchange.reduction import COUNTED_ROUNDS
from node.exchange.state.result_log import ResultLog
from node.exchange.state.sent_log import SentLog
from node.exchange.state.snapshot import (
    KEPT_FILES,
    OpenSnapshot,
    Owed,
    Snapshot,
    SnapshotError,
    SnapshotFolder,
    snapshot_bytes,
)
from node.history import KEPT_BYTES, History
from node.machine.disk import seconds_between
from protocol.errors import AtollError, SystemRefusedError
from protocol.files.durable import make_folder
from protocol.layout import Layout
from protocol.payload import Payload
from protocol.rounds import Commit
from protocol.run_spec import RunSpec

log = structlog.get_logger()

LONGEST_ROUNDS = 1 << 20
"""More lie between snapshots only where rounds take no time at all."""


def rounds_between(*, num_elements: int, rounds: int, seconds: float, result_bytes: int) -> int:
    """Every how many rounds a snapshot is due, by what the latest `rounds` took.

    So that neither snapshots are written too fast nor results take more than half a snapshot. It is a
    power of two, for a joiner can fetch a round's state from all nodes that have a snapshot of it.
    """
    whole = snapshot_bytes(num_elements)
    by_time = seconds_between(whole) * rounds / max(seconds, 1e-9)
    by_bytes = whole / 2 * rounds / max(result_bytes, 1)
    most = int(min(by_time, by_bytes, LONGEST_ROUNDS))
    return 1 << max(0, most.bit_length() - 1)


def most_result_bytes(spec: RunSpec, layout: Layout) -> int:
    """What the results of one round take at most: those of the largest fragment."""
    codec = codec_named(spec.exchange.downlink)
    return max(codec.most_bytes(fragment.num_elements) for fragment in layout.fragments)


class StateOnDisk:
    """One node's folder of snapshots and results. One process at a time may save to it."""

    def __init__(
        self,
        path: Path,
        *,
        history: History,
        sent: SentLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self.snapshots = SnapshotFolder(path)
        self.results = ResultLog(path)
        self.sent = sent or SentLog(None)
        self._history = history
        self._clock = clock
        self._durable: Position | None = None  # where what is on the disk leads
        self._snapshot_round = 0
        self._snapshot_at = clock()
        self._result_bytes = 0  # since the snapshot

    def require_room(self, num_elements: int, result_bytes: int) -> int:
        """Raises SystemRefusedError unless the disk has room for all that `save` will ever need.

        That is the kept snapshots, the one that is written before the oldest is removed, and results
        of `result_bytes` a round at most. Returns how many bytes of it are still free.
        """
        make_folder(self.path)
        one = snapshot_bytes(num_elements)
        results = max(held_results.KEPT_ROUNDS * result_bytes, one + 2 * result_bytes)
        needed = (KEPT_FILES + 1) * one + results
        held = self.snapshots.held_bytes() + self.results.held_bytes()
        disk = os.statvfs(self.path)
        free = disk.f_bavail * disk.f_frsize
        if needed > held + free:
            raise SystemRefusedError(
                f"snapshots of this model need {needed:,} bytes in {self.path}: "
                f"they take {held:,} and {free:,} are free",
                next_step="free some space on that disk, or move the node's folder to another",
            )
        return max(0, needed - held)

    def resume(self, outer: Outer, kept: tuple[Snapshot, Owed | None]) -> None:
        """Takes up a snapshot, and what followed on it as far as results are there. Heavy."""
        outer.restore(*kept)
        self._snapshot_round = outer.round
        for commit in self._history.after(outer.round - COUNTED_ROUNDS, max_bytes=KEPT_BYTES):
            if commit.round <= outer.round:
                outer.count_missed(commit)
        while commits := self._history.after(outer.round, max_bytes=KEPT_BYTES):
            if not all(self._replayed(outer, commit) for commit in commits):
                break
        self._durable = outer.position

    def _replayed(self, outer: Outer, commit: Commit) -> bool:
        results = self._results_of(commit)
        if results is None or not outer.is_base_of(commit):
            return False
        try:
            outer.apply(commit, results)
        except (NotApplicableError, CodecError) as error:
            log.warning("commit not replayed", round=commit.round, why=str(error))
            return False
        self._result_bytes += sum(len(payload.body) for payload in results.values())
        return True

    def _results_of(self, commit: Commit) -> dict[int, Payload] | None:
        """By slice; None unless all are there."""
        outcomes = [outcome for outcome in commit.slices if outcome.digest is not None]
        found = {
            outcome.index: payload
            for outcome in outcomes
            if outcome.digest is not None
            and (payload := self.results.find(commit.round, outcome.index, outcome.digest))
        }
        return found if len(found) == len(outcomes) else None

    def save(self, outer: Outer, held: HeldResults, *, is_last: bool = False) -> None:
        """Makes a state durable: by its round's results, or by a snapshot where one is due. Heavy.

        Nothing may change the state meanwhile. The last time in a process is a snapshot, so that all
        that the node owes stays owed. Raises SystemRefusedError when the disk is full and
        CannotCreateError when the folder cannot be written to; what was durable still is.
        """
        self._history.save()
        if is_last and self._durable is None:
            return  # nothing ever moved
        if outer.position != self._durable:
            leads_here = self._results_saved(outer.position, held)
            if not leads_here or outer.owing.holds_work or self._is_due(outer):
                self.save_whole(outer)
            self._durable = outer.position
        if is_last and (self._snapshot_round != outer.round or outer.owing.holds_work):
            self.save_whole(outer)

    def save_whole(self, outer: Outer) -> None:
        """Writes a snapshot, and drops results that are no longer needed. See `save`."""
        self.snapshots.save(*outer.held())
        outer.owing.note_saved()
        self._durable = outer.position
        self._snapshot_round, self._snapshot_at = outer.round, self._clock()
        self._result_bytes = 0
        oldest_file = self.snapshots.rounds()[-1]
        self.sent.forget_before(oldest_file + 1)
        self.results.forget_before(min(oldest_file, outer.round - held_results.KEPT_ROUNDS) + 1)

    def opened(self, includes: Callable[[int], bool]) -> OpenSnapshot | None:
        """The newest snapshot of such a round that opens, to be served."""
        for round in filter(includes, self.snapshots.rounds()):
            try:
                return self.snapshots.open(round)
            except SnapshotError as error:
                log.warning("a snapshot to be served does not open", round=round, why=str(error))
        return None

    def written_and_opened(self, outer: Outer) -> OpenSnapshot | None:
        """A snapshot of the state as it is, to be served; None where it cannot be written. Heavy."""
        try:
            self.save_whole(outer)
        except AtollError as error:
            log.warning("no snapshot to be served", round=outer.round, why=str(error))
            return None
        return self.opened(lambda round: round == outer.round)

    def _results_saved(self, position: Position, held: HeldResults) -> bool:
        """Writes what came since; whether it leads from what was durable to this position."""
        before = self._durable or Position(position.round - 1, position.digest)
        commits = [
            commit
            for commit in self._history.after(before.round, max_bytes=KEPT_BYTES)
            if commit.round <= position.round
        ]
        leads_here = (
            self._durable is not None
            and [c.round for c in commits] == list(range(before.round + 1, position.round + 1))
            and bool(commits)
            and commits[0].base_digest == before.digest
        )
        for commit in commits:
            payloads = [
                held.find(commit.round, outcome.index, outcome.digest)
                for outcome in commit.slices
                if outcome.digest is not None
            ]
            found = [payload for payload in payloads if payload is not None]
            if len(found) == len(payloads):
                self._result_bytes += self.results.write(commit.round, found)
            else:
                leads_here = False
        return leads_here

    def _is_due(self, outer: Outer) -> bool:
        every = rounds_between(
            num_elements=outer.layout.num_elements,
            rounds=outer.round - self._snapshot_round,
            seconds=self._clock() - self._snapshot_at,
            result_bytes=self._result_bytes,
        )
        return outer.round // every > self._snapshot_round // every
