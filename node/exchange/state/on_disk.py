"""What a node keeps of its outer state on disk: a snapshot now and then, each round's results between.

A snapshot has 16 bytes a parameter, a round's results half a byte with int4: to write a snapshot after
every round would wear out an SSD in weeks. The results of the rounds since lead from one to the newest
state, to the same bits. What the node owed at a snapshot is then still owed where no round has taken it.
Inner steps that a round did not take bring a snapshot at once. Nobody waits for one, as long as results
lead to the newest state: rounds go on while it is written.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from node.disk.history import KEPT_BYTES, History, ResultLog, SentLog
from node.disk.round_folder import DiskBudget, Need, Retention
from node.disk.snapshot_folder import KEPT_FILES, OpenSnapshot, SnapshotError, SnapshotFolder
from node.disk.snapshots import Owed, Snapshot, SnapshotWriting, snapshot_bytes
from node.exchange import giving
from node.exchange.codecs.codec import CodecError
from node.exchange.codecs.registry import codec_named
from node.exchange.giving import HeldResults
from node.exchange.outer import NotApplicableError, Outer, Position
from node.exchange.screening import COUNTED_ROUNDS
from node.heavy import Heavy, in_place, tell_unsaved
from protocol.errors import AtollError
from protocol.run.models import Layout
from protocol.run.run_spec import RunSpec
from protocol.wire.payload import Payload
from protocol.wire.rounds import Commit, RoundSpan

log = structlog.get_logger()

LONGEST_ROUNDS = 1 << 20
"""More lie between snapshots only where rounds take no time at all."""

MOST_SPANS = 256
"""Stretches of rounds that a node says it can go back to: those of its newest snapshots."""

RESULTS_SHARE = 0.25
"""Of a snapshot's size: no more results lie between two snapshots. They stay back to the older of two."""


def rounds_between(
    *, num_elements: int, rounds: int, seconds: float, result_bytes: int, apart_seconds: float
) -> int:
    """Every how many rounds a snapshot is due, by what the latest `rounds` took.

    So that neither snapshots come sooner than `apart_seconds` nor results take more than their share. It
    is a power of two, for a joiner can fetch a round's state from all nodes that have a snapshot of it.
    """
    by_time = apart_seconds * rounds / max(seconds, 1e-9)
    by_bytes = RESULTS_SHARE * snapshot_bytes(num_elements) * rounds / max(result_bytes, 1)
    most = int(min(by_time, by_bytes, LONGEST_ROUNDS))
    return 1 << max(0, most.bit_length() - 1)


def most_result_bytes(spec: RunSpec, layout: Layout) -> int:
    """What the results of one round take at most: those of the largest fragment."""
    codec = codec_named(spec.exchange.downlink)
    return max(codec.most_bytes(fragment.num_elements) for fragment in layout.fragments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """What is to be written of one state, which may change again."""

    position: Position
    results: tuple[tuple[int, tuple[Payload, ...]], ...]  # by round
    snapshot: SnapshotWriting | None
    is_awaited: bool  # the snapshot: nothing else leads to this state, or nothing comes after it
    refusal: AtollError | None = None  # of a snapshot that is not needed and has no room


class StateOnDisk:
    """One node's folder of snapshots and results. One process at a time may save to it."""

    def __init__(
        self,
        path: Path,
        *,
        history: History,
        sent: SentLog | None = None,
        budget: DiskBudget | None = None,
        besides_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
        aside: Heavy = in_place,
        retention: Retention = Retention(),  # noqa: B008 - it is frozen
    ) -> None:
        """`besides_bytes` is what else of the node is written as often; `aside` is where snapshots are."""
        self.path = path
        self._retention = retention
        self.snapshots = SnapshotFolder(path, retention=retention)
        self.results = ResultLog(path)
        self.sent = sent or SentLog(None)
        self._history = history
        self._budget = budget or DiskBudget()
        self._besides_bytes = besides_bytes
        self._clock = clock
        self._aside = aside
        self._durable: Position | None = None  # where what is on the disk leads
        self._snapshot_round = 0
        self._snapshot_at = clock()
        self._result_bytes = 0  # since the snapshot
        self._writing: SnapshotWriting | None = None
        self._behind: asyncio.Future[None] | None = None  # it, where nobody waits for it

    def needs(self, num_elements: int, result_bytes: int) -> tuple[Need, ...]:
        """What is ever kept at most, with results of `result_bytes` a round.

        A state that is on its way here has the room of the results that it makes needless.
        """
        one = snapshot_bytes(num_elements)
        since_the_older = int(2 * RESULTS_SHARE * one) + 4 * result_bytes
        return (
            Need(
                what="snapshots",
                path=self.path,
                num_bytes=(KEPT_FILES + self._retention.keep) * one,
                held_bytes=self.snapshots.folder.held_bytes(),
            ),
            Need(
                what="results",
                path=self.path,
                num_bytes=max((giving.KEPT_ROUNDS + 1) * result_bytes, since_the_older),
                held_bytes=self.results.folder.held_bytes(),
            ),
        )

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

    async def save(
        self,
        outer: Outer,
        held: HeldResults,
        *,
        lock: asyncio.Lock,
        heavy: Heavy,
        is_last: bool = False,
    ) -> None:
        """Makes a state durable: by its round's results, or by a snapshot where these do not lead there.

        `lock` is held only until it is known what to write: while it is, nothing changes the state. A
        snapshot that is due is written behind all else, and a failure of that is raised by the next
        save. The last save in a process is a snapshot, so that all that the node owes stays owed. Raises
        SystemRefusedError when the disk is full and CannotCreateError when the folder cannot be written
        to; what was durable still is. Results are written even so where a snapshot alone is refused: they
        take a thirtieth of its room.
        """
        if is_last:
            with suppress(AtollError):  # it is tried once more
                await self.settled()
        elif self._behind is not None and self._behind.done():
            await self.settled()
        async with lock:
            saving = await heavy(partial(self.begin, outer, held, is_last=is_last))
        writing = saving.snapshot
        try:
            await heavy(partial(self.write_results, saving))
        except AtollError as error:
            if writing is not None:
                writing.give_up(error)
                with suppress(AtollError):
                    await heavy(partial(self.write_snapshot, writing, outer))
            raise
        if writing is not None and saving.is_awaited:
            await heavy(partial(self.write_snapshot, writing, outer))
        elif writing is not None:
            write = partial(self.write_snapshot, writing, outer, is_patient=True)
            self._behind = asyncio.ensure_future(self._aside(write))
            self._behind.add_done_callback(tell_unsaved)
        self._durable = saving.position
        if saving.refusal is not None:
            raise saving.refusal

    def is_durable(self, outer: Outer) -> bool:
        """Whether what is on the disk leads to the state."""
        return self._durable == outer.position

    async def settled(self) -> None:
        """Waits for the snapshot that is being written behind all else. Raises as `save`."""
        behind, self._behind = self._behind, None
        if self._writing is not None:
            self._writing.hurry()
        if behind is not None:
            await behind

    def begin(self, outer: Outer, held: HeldResults, *, is_last: bool = False) -> Saving:
        """Finds out what is to be written; nothing may change the state meanwhile. Raises as `save`."""
        self._history.save()
        position, has_moved = outer.position, outer.position != self._durable
        results: tuple[tuple[int, tuple[Payload, ...]], ...] = ()
        leads_here = True
        if is_last and self._durable is None and not outer.round:  # nothing ever moved
            return Saving(position=position, results=(), snapshot=None, is_awaited=False)
        if has_moved:
            results, leads_here = self._results_to(position, held)
            self._result_bytes += sum(len(p.body) for _, payloads in results for p in payloads)
        is_busy = self._writing is not None
        if is_last:
            is_due = self._snapshot_round != outer.round or outer.owing.holds_work
        else:
            is_due = has_moved and not is_busy and (outer.owing.holds_work or self._is_due(outer))
            is_due = is_due and not self._is_postponed(outer)
        snapshot = refusal = None
        if is_due or not leads_here:
            try:
                snapshot = self._begun(outer)
            except AtollError as error:
                if has_moved and not leads_here:
                    raise
                refusal = error
        return Saving(
            position=position,
            results=results,
            snapshot=snapshot,
            is_awaited=is_last or not leads_here,
            refusal=refusal,
        )

    def write_results(self, saving: Saving) -> None:
        """Writes what leads to a state. Heavy; raises as `save`."""
        for round, payloads in saving.results:
            self.results.write(round, payloads)
        self._forget_results(saving.position.round)

    def write_snapshot(
        self, writing: SnapshotWriting, outer: Outer, *, is_patient: bool = False
    ) -> None:
        """Writes what is left of a snapshot, and drops what it makes needless. Heavy; raises as `save`."""
        try:
            writing.write(is_patient=is_patient)
        except AtollError:
            outer.owing.holds_work, self._snapshot_round = True, -1
            raise
        finally:
            if outer.writing is writing:
                outer.writing = None
            if self._writing is writing:
                self._writing = None
        self.sent.forget_before(self.snapshots.rounds()[-1] + 1)
        self._forget_results(writing.round)

    def _forget_results(self, round: int) -> None:
        """Drops what neither this node nor a peer asks for once there is this round."""
        oldest_file = min(self.snapshots.rounds()[:KEPT_FILES], default=-1)
        oldest_asked_for = round - giving.KEPT_ROUNDS
        self.results.folder.forget_before(min(oldest_file, oldest_asked_for) + 1)

    def _is_postponed(self, outer: Outer) -> bool:
        """Whether a snapshot that is due waits for a joiner that reads the older one.

        It would take the room of a third, which the disk or the owner may not have.
        """
        if not self.snapshots.folder.is_served(outer.round):
            return False
        one = snapshot_bytes(outer.layout.num_elements)
        is_postponed = not self._budget.has_beside(self.path, one)
        if is_postponed:
            log.info("a snapshot waits for a joiner to have read the older one", round=outer.round)
        return is_postponed

    def save_whole(self, outer: Outer) -> None:
        """Writes a snapshot at once, for whoever changes nothing meanwhile. Heavy; raises as `save`."""
        self.write_snapshot(self._begun(outer), outer)
        self._durable = outer.position

    def _begun(self, outer: Outer) -> SnapshotWriting:
        """Begins a snapshot. What the next commits change is written first, so that they need not wait."""
        if self._writing is not None:  # two would take the room of three
            self.write_snapshot(self._writing, outer)
        fragments = outer.layout.fragments
        first = (outer.round + 1) % len(fragments)
        order = [fragment.span for fragment in (*fragments[first:], *fragments[:first])]
        writing = self.snapshots.begin(*outer.held(), order=order)
        outer.writing = self._writing = writing
        outer.owing.note_saved()
        self._snapshot_round, self._snapshot_at = outer.round, self._clock()
        self._result_bytes = 0
        return writing

    def reach_back(self, round: int) -> tuple[RoundSpan, ...]:
        """Rounds up to this one to whose states what is on the disk leads, in order. Looks at the folder."""
        have = frozenset(self.results.folder.rounds())
        spans: list[RoundSpan] = []
        for first in sorted(number for number in self.snapshots.rounds() if number <= round):
            last = first
            while last < round and (last + 1 in have or self._is_void(last + 1)):
                last += 1
            if spans and first <= spans[-1].last + 1:
                spans[-1] = RoundSpan(first=spans[-1].first, last=max(last, spans[-1].last))
            else:
                spans.append(RoundSpan(first=first, last=last))
        return tuple(spans[-MOST_SPANS:])

    def _is_void(self, round: int) -> bool:
        commit = self._history.at(round)
        return commit is not None and commit.is_void

    def forget_after(self, round: int) -> None:
        """Drops what is of later rounds, which are undone; of snapshots, where an earlier one is whole."""
        self._history.forget_after(round)
        self.results.folder.drop_after(round)
        if any(number <= round for number in self.snapshots.rounds()):
            self.snapshots.folder.drop_after(round)

    def opened(self, includes: Callable[[int], bool]) -> OpenSnapshot | None:
        """The newest snapshot of such a round that opens, to be served."""
        for round in filter(includes, self.snapshots.rounds()):
            try:
                return self.snapshots.open(round)
            except SnapshotError as error:
                log.warning("a snapshot to be served does not open", round=round, why=str(error))
        return None

    async def served(
        self, includes: Callable[[int], bool], outer: Outer, *, lock: asyncio.Lock, heavy: Heavy
    ) -> OpenSnapshot | None:
        """A state of such a round, written for it where need be; None where there is none now.

        None of a later round than the node's own: it was undone, and its snapshot may still be here.
        """

        def suits(round: int) -> bool:
            return round <= outer.round and includes(round)

        opened = await heavy(partial(self.opened, suits))
        if opened is not None:
            return opened
        writing = self._writing
        try:
            if writing is None or not suits(writing.round):
                if lock.locked():
                    return None  # it is changing; nodes that catch up must not wait for each other
                async with lock:
                    if not includes(outer.round):
                        return None
                    writing = await heavy(partial(self._begun, outer))
            await heavy(partial(self.write_snapshot, writing, outer))
        except AtollError as error:
            log.warning("no snapshot to be served", round=outer.round, why=str(error))
            return None
        return await heavy(partial(self.opened, lambda round: round == writing.round))

    def _results_to(
        self, position: Position, held: HeldResults
    ) -> tuple[tuple[tuple[int, tuple[Payload, ...]], ...], bool]:
        """What came since, by round; whether it leads from what was durable to this position."""
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
        results = []
        for commit in commits:
            payloads = [
                held.find(commit.round, outcome.index, outcome.digest)
                for outcome in commit.slices
                if outcome.digest is not None
            ]
            found = tuple(payload for payload in payloads if payload is not None)
            if len(found) == len(payloads):
                results.append((commit.round, found))
            else:
                leads_here = False
        return tuple(results), leads_here

    def _is_due(self, outer: Outer) -> bool:
        """Whether a snapshot is; those of rounds that are retained come as soon as the disk's pace allows."""
        seconds = self._clock() - self._snapshot_at
        apart_seconds = self._budget.seconds_between(
            snapshot_bytes(outer.layout.num_elements) + self._besides_bytes
        )
        every = rounds_between(
            num_elements=outer.layout.num_elements,
            rounds=outer.round - self._snapshot_round,
            seconds=seconds,
            result_bytes=self._result_bytes,
            apart_seconds=apart_seconds,
        )
        if outer.round // every > self._snapshot_round // every:
            return True
        return self._retention.is_kept(outer.round) and seconds >= apart_seconds
