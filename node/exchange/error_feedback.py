"""Error feedback: the residual that a node owes the swarm, and the error that a reducer's encoding leaves.

The residual is what no commit has taken yet of a node's pseudo-gradients. The reducer's error is what the
encoding of a result rounds away: the reducer owes it, since nobody else ever sees it.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import structlog

from node.exchange.codecs.codec import ONE_THREAD, Codec, Tiles, kernel, read_only
from node.exchange.mean import BlockSums
from node.outer_state import Vector
from protocol.run.run_spec import WANTS_FEEDBACK, ReducerErrorRule
from protocol.wire.rounds import Digest, SliceOutcome

log = structlog.get_logger()


@kernel
def _sum_owed(
    global_parameters: Vector, published: Vector, residual: Vector, accumulated: Vector
) -> None:
    for i in range(accumulated.size):
        accumulated[i] = (global_parameters[i] - published[i]) + residual[i]


@kernel
def _keep_the_rest(
    global_parameters: Vector,
    published: Vector,
    decoded: Vector,
    decay: np.float32,
    residual: Vector,
) -> None:
    for i in range(residual.size):
        accumulated = (global_parameters[i] - published[i]) + residual[i]
        residual[i] = (accumulated - decoded[i]) * decay


MOST_OWED = 2.0
"""So many rounds' pseudo-gradients may be owed, by their norm, beside those of the round itself.

One node of three came late for 8 and for 30 rounds (benchmarks.learning.late_node): with all of it owed the
held-out loss jumped by 0.08 and 0.4 when it landed, with 3 by 0.03, with 2 not at all. Two keeps whole what
two rounds in a row missed."""


class Residual:
    """The part of a node's pseudo-gradients that no commit has taken yet.

    docs/concepts.md, promise 2: a pseudo-gradient is either in a commit or still here. In each round, and
    for each slice by itself,

        accumulated = (global parameters - published) + residual      `owed`
        residual    = (accumulated - decoded) * decay                 `settle_taken`
        residual    = accumulated                                     `settle_missed`

    `accumulated` is what gets encoded, `decoded` what the contribution's bytes decode to. A slice
    is taken when its commit names this node as a contributor; it is missed when it is void, came
    too late or was left out, and then counts in the next round. Until one of the two is called the
    residual is as it was, so a crash in the middle of a round loses that round's work only.

    What stays of a taken slice is error feedback (Seide et al. 2014, "1-Bit Stochastic Gradient
    Descent", section 3). Without it (`error_feedback=False`) encoding errors are dropped, but
    missed work is kept all the same. `decay` forgets old errors, which sparse codecs send long after
    they were made; work that no commit took is never decayed.

    Work of many rounds that lands at once harms the model: each of them was meant for other weights.
    So no more than MOST_OWED rounds of it are kept, measured by the norm of the latest pseudo-gradient
    (`limit`, `settle_missed`); what exceeds that is let go, as one factor over what is owed. Coarse
    codecs that need error feedback owe several pseudo-gradients at all times (topk64: 8 to 14), which
    is no late work: there a round that is missed lets what is owed grow to the bound, and no more.

    The subtraction is exact for values
    that decoded to zero or to within a factor of two of themselves (Sterbenz), else rounded once.
    So nothing is rounded for codecs that take the nearest of their values, of which the smallest
    above zero stands for no less than half of itself: fp32, int8, int4.
    """

    def __init__(
        self,
        num_elements: int,
        *,
        error_feedback: bool = True,
        decay: float = 1.0,
        needs_feedback: bool = False,
        most_owed: float = MOST_OWED,
        tiles: Tiles = ONE_THREAD,
    ) -> None:
        """`needs_feedback`: what the uplink's encoding leaves out is itself several pseudo-gradients."""
        self._values: Vector = np.zeros(num_elements, dtype=np.float32)
        self.decay = decay
        """Of the errors of commits to come; amendments change it."""
        self._error_feedback = error_feedback
        self._needs_feedback = needs_feedback
        self._tiles = tiles
        self.most_owed = most_owed  # rounds

    @property
    def values(self) -> Vector:
        """The whole residual [num_elements], canonical order. No copy: write to it to restore."""
        return self._values

    def goes_by(self, uplink: Codec) -> bool:
        """Contributions are encoded with this from now on; returns whether it leaves out less by far."""
        was = self._needs_feedback
        self._needs_feedback = uplink.name.partition("/")[0] in WANTS_FEEDBACK
        return was and not self._needs_feedback

    def owed(
        self,
        span: slice,
        global_parameters: Vector,
        published: Vector,
        *,
        out: Vector | None = None,
    ) -> Vector:
        """`accumulated` of a span of the canonical vector; all vectors hold only that span [n].

        It is formed in `out`, or in new memory.
        """
        self._check(span, global_parameters, published)
        accumulated = np.empty_like(published) if out is None else out
        values = self._values[span]

        def add(first: int, past: int) -> None:
            _sum_owed(
                read_only(global_parameters[first:past]),
                read_only(published[first:past]),
                read_only(values[first:past]),
                accumulated[first:past],
            )

        self._tiles.each_run(accumulated.size, add)
        return accumulated

    def limit(
        self, span: slice, global_parameters: Vector, published: Vector, *, share: float = 1.0
    ) -> float:
        """Lets go what is owed of a span [n] beyond MOST_OWED rounds; returns how many rounds that is.

        Call it before `owed`, where late work is owed. `share` is the part of the round's inner steps
        that was trained: so a round that was cut short bounds no more than a whole one. Where nothing
        was learned there is nothing to measure by, and all stays.
        """
        self._check(span, global_parameters, published)
        if self._needs_feedback:
            return 0.0
        values = self._values[span]
        whole = self._norm(global_parameters, less=published) / share
        return self._let_go(values, self._norm(values), self.most_owed, whole)

    def _norm(self, values: Vector, less: Vector | None = None) -> float:
        """Of a vector, or of its difference from another one; tile by tile, so that no third is made."""
        squares = BlockSums(values.size)

        def take(first: int, past: int, scratch: Vector) -> None:
            tile = values[first:past]
            if less is not None:
                tile = np.subtract(tile, less[first:past], out=scratch[: past - first])
            squares.take(first, tile)

        self._tiles.each_tile(values.size, take)
        return squares.norm()

    def _let_go(self, values: Vector, norm: float, most: float, whole: float) -> float:
        """Makes values [n] with this norm no longer than so many times `whole`."""
        if whole == 0 or not norm > most * whole:
            return 0.0
        np.multiply(values, np.float32(most * whole / norm), out=values)
        return norm / whole - most

    def settle_taken(self, span: slice, accumulated: Vector, decoded: Vector) -> None:
        """A commit took the span [n]: what its encoding left out is all that is owed."""
        self._check(span, accumulated, decoded)
        if self._error_feedback:
            left = np.subtract(accumulated, decoded, out=self._values[span])
            if self.decay != 1:
                np.multiply(left, np.float32(self.decay), out=left)
        else:
            self._values[span] = 0

    def settling_taken(
        self, span: slice, global_parameters: Vector, published: Vector
    ) -> Callable[[int, Vector], None]:
        """Settles a span [n] that a commit took, tile by tile: `owed` and `settle_taken` in one pass.

        It is called with the first element of each tile within the span, and what was sent of it.
        """
        self._check(span, global_parameters, published)
        values = self._values[span]
        before, trained = read_only(global_parameters), read_only(published)
        decay = np.float32(self.decay)

        def settle(start: int, sent: Vector) -> None:
            end = start + sent.size
            if not self._error_feedback:
                values[start:end] = 0
                return
            _keep_the_rest(
                before[start:end],
                trained[start:end],
                read_only(sent),
                decay,
                values[start:end],
            )

        return settle

    def settle_missed(self, span: slice, accumulated: Vector, *, share: float = 1.0) -> float:
        """No commit took the span [n]: all of it is still owed, within MOST_OWED.

        Returns how many rounds of it are let go. `share` is as in `limit`.
        """
        self._check(span, accumulated)
        values = self._values[span]
        if not self._needs_feedback:  # then `limit` has been at what was owed before
            values[:] = accumulated
            return 0.0
        whole, before = self._norm(accumulated, less=values) / share, self._norm(values)
        values[:] = accumulated
        most = self.most_owed if whole == 0 else max(self.most_owed, before / whole)
        return self._let_go(values, self._norm(values), most, whole)

    def add(self, span: slice, error: Vector) -> None:
        """Owes this too for the span [n]: a reducer's error (`ReducerError`)."""
        self._check(span, error)
        values = self._values[span]
        np.add(values, error, out=values)

    def _check(self, span: slice, *vectors: Vector) -> None:
        # Assigning to a slice would broadcast a single element, and a slice past the end is short.
        start, stop = span.start or 0, self._values.size if span.stop is None else span.stop
        if span.step is not None or not 0 <= start <= stop <= self._values.size:
            raise ValueError(f"{span} does not lie in a residual of {self._values.size} elements")
        for vector in vectors:
            if vector.shape != (stop - start,) or vector.dtype != np.float32:
                raise ValueError(
                    f"{vector.dtype} of shape {vector.shape} for {stop - start} elements of {span}"
                )


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
        self._kept = {start: _Kept(values=each, round=round) for start, each in values.items()}
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


def _num_owed(pieces: Iterable[Vector]) -> int:
    return sum(int(np.count_nonzero(values)) for values in pieces)
