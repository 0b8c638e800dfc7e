"""What the encoding of results rounds away: owed by the reducer, since nobody else ever sees it."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import structlog

from node.exchange.codecs.compiled import read_only
from node.exchange.codecs.floats import round_to_bf16
from node.outer_state import Vector
from protocol.run.run_spec import ReducerErrorRule
from protocol.wire.rounds import Digest, SliceOutcome

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Staged:
    """What a result that is not committed yet would leave behind."""

    digest: Digest
    error: Vector = field(repr=False)  # [slice]: the mean as it was encoded − what that decodes to
    share: float  # of this node's contributions in such a mean


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Kept:
    """What is kept of one span. Its values never change: another piece takes its place."""

    values: Vector = field(repr=False)
    round: int  # whose result left it


WAITING_ROUNDS = 16
"""So many rounds of its fragment an error waits for this node to reduce its elements again.

Slices stay with their reducers, so what is older is of a reducer that was here for a while only. It would
go on taking memory in each node that ever reduced it."""


class ReducerError:
    """A reducer's error feedback (Tang et al. 2019, "DoubleSqueeze": Algorithm 1).

    With the rule "keep", for each element that this node reduces,

        summed = mean + kept                 `carried`
        kept   = summed - decoded            `settle`, if that very result was committed; rounded to bf16

    with weight 1: both are changes of the global parameters, whatever tokens stand behind them. Auditors are
    given the error, and its last bits, a thousandth of what the encoding rounds away, are not worth the
    bytes. It is kept by the element's place in the canonical vector, and memory is taken for no others. Where
    a slice has moved to another reducer it waits here until this node reduces the element again, for
    WAITING_ROUNDS of the fragment's rounds; then it is lost, and that is said. With "own" the error goes
    into this node's residual instead (see `settle`), with "drop" nowhere.

    Until a commit is settled all is as it was: a result that was void, taken over or never
    committed leaves no trace.

    Where reducers are audited the coordinator knows what each committed result has left, by its digest. So an
    error goes into the mean of the very slice that it is of; once that is cut otherwise it is lost.
    """

    def __init__(
        self, *, rule: ReducerErrorRule, num_fragments: int = 1, is_audited: bool = False
    ) -> None:
        self.rule = rule
        self._is_audited = is_audited
        self.num_lost_elements = 0  # of this process: where an error was owed and is not any more
        self._waiting_rounds = WAITING_ROUNDS * num_fragments
        self._kept: dict[int, _Kept] = {}  # by the first element, in the canonical vector; disjoint
        self._starts: list[int] = []  # of these, in order
        self._staged: dict[tuple[int, int], _Staged] = {}  # (round, slice index)

    @property
    def values(self) -> Mapping[int, Vector] | None:
        """What is kept: the first element of each span and its values, which never change.

        None where nothing ever is, by the rule.
        """
        if self.rule != "keep":
            return None
        return {start: self._kept[start].values for start in self._starts}

    def carried(self, span: slice) -> Vector | None:
        """What goes into the next mean of these elements [n], to be read; None when nothing does."""
        starts = self._overlapping(span)
        if not starts:
            return None
        whole = self._kept[starts[0]].values
        if (starts[0], whole.size) == (span.start, span.stop - span.start):  # as mostly
            return read_only(whole)
        if self._is_audited:
            return None
        carried = np.zeros(span.stop - span.start, dtype=np.float32)
        for start in starts:
            values = self._kept[start].values
            first, past = max(start, span.start), min(start + values.size, span.stop)
            carried[first - span.start : past - span.start] = values[first - start : past - start]
        return read_only(carried)

    def stage(self, round: int, index: int, digest: Digest, error: Vector, *, share: float) -> None:
        """Remembers what a result leaves behind, until its round's commit is settled.

        `share` is what this node's contribution weighs in the mean, between 0 and 1.
        A later result of the same slice takes its place: only one can be committed.
        """
        if self.rule != "drop":
            self._staged[round, index] = _Staged(digest=digest, error=error, share=share)

    def has_staged(self, round: int) -> bool:
        """Whether a result of this round leaves something behind if it is committed."""
        return any(number == round for number, _ in self._staged)

    def settle(
        self, round: int, outcome: SliceOutcome, span: slice, *, may_be_ours: bool
    ) -> Vector | None:
        """Goes by what became of a slice. Returns what the residual must take on, if anything.

        With "own" that is the error over `share`, so that it counts in full if this node weighs as
        much in the next mean.

        `may_be_ours`: this node may have made the committed result, in an earlier process if it is
        none that was staged. What was kept then is in it; what it left behind nobody knows any more.
        """
        staged = self._staged.pop((round, outcome.index), None)
        if outcome.digest is None:
            return None
        is_ours = staged is not None and staged.digest == outcome.digest
        if self.rule != "keep":
            if staged is None or not is_ours:
                return None
            return np.divide(staged.error, np.float32(staged.share))
        if staged is not None and is_ours:
            cut = self._cut_out(span)
            if self._is_audited and (len(cut) > 1 or any(v.size != staged.error.size for v in cut)):
                self._say_lost(_num_owed(cut), round=round, why="slices are cut otherwise")
            self._keep(span.start, _Kept(values=staged.error, round=round))
        elif may_be_ours:
            lost = _num_owed(self._cut_out(span))
            self._say_lost(
                lost, round=round, why="this node was restarted after it had reduced them"
            )
        else:
            self._let_go_old(span, round)
        return None

    def forget(self, *, up_to_round: int) -> None:
        """Drops what results of these rounds would have left behind: their commits are settled."""
        for key in [key for key in self._staged if key[0] <= up_to_round]:
            del self._staged[key]

    def restore(self, values: Mapping[int, Vector] | None, *, round: int) -> None:
        """Takes up what was kept with another state; None when nothing was."""
        self._staged.clear()
        if self.rule != "keep":
            return
        if values is None:
            self._say_lost(self.num_kept(), round=round, why="the outer state was replaced")
            values = {}
        self._kept = {
            start: _Kept(values=_as_kept(each), round=round) for start, each in values.items()
        }
        self._starts = sorted(self._kept)

    def num_kept(self) -> int:
        """Of how many elements this node, as their reducer, still has to add an error to a mean."""
        return _num_owed(kept.values for kept in self._kept.values())

    def _overlapping(self, span: slice) -> list[int]:
        """The first elements of the pieces that share elements with a span, in order."""
        first = bisect_left(self._starts, span.start)
        if first > 0:
            before = self._starts[first - 1]
            first -= before + self._kept[before].values.size > span.start
        return self._starts[first : bisect_left(self._starts, span.stop)]

    def _keep(self, start: int, kept: _Kept) -> None:
        self._kept[start] = kept
        insort(self._starts, start)

    def _cut_out(self, span: slice) -> list[Vector]:
        """Keeps nothing of a span any more; returns what was kept of it."""
        out: list[Vector] = []
        for start in self._overlapping(span):
            kept = self._kept.pop(start)
            del self._starts[bisect_left(self._starts, start)]
            past = start + kept.values.size
            first, last = max(start, span.start), min(past, span.stop)
            out.append(kept.values[first - start : last - start])
            if self._is_audited:
                out[-1] = kept.values
                continue
            # Copies: a view would keep the memory of the whole piece.
            if start < span.start:
                rest = kept.values[: span.start - start].copy()
                self._keep(start, _Kept(values=rest, round=kept.round))
            if past > span.stop:
                rest = kept.values[span.stop - start :].copy()
                self._keep(span.stop, _Kept(values=rest, round=kept.round))
        return out

    def _let_go_old(self, span: slice, round: int) -> None:
        """Others reduce these elements: what has waited here too long is lost."""
        lost: list[Vector] = []
        for start in self._overlapping(span):
            kept = self._kept[start]
            if round - kept.round > self._waiting_rounds:
                lost += self._cut_out(slice(start, start + kept.values.size))
        self._say_lost(_num_owed(lost), round=round, why="others have reduced them for many rounds")

    def _say_lost(self, num_lost: int, *, round: int, why: str) -> None:
        if num_lost:
            self.num_lost_elements += num_lost
            log.warning(
                "rounding error lost",
                round=round,
                elements=num_lost,
                of_this_process=self.num_lost_elements,
                why=why,
            )


def _as_kept(values: Vector) -> Vector:
    """Values [n] as bf16 holds them: an earlier release has kept more of them on disk."""
    if not np.ascontiguousarray(values, dtype="<f4").view("<u2")[::2].any():
        return values
    values = np.array(values, dtype=np.float32)
    round_to_bf16(values)
    return values


def _num_owed(pieces: Iterable[Vector]) -> int:
    return sum(int(np.count_nonzero(values)) for values in pieces)
