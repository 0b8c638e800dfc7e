"""What the encoding of results rounds away: owed by the reducer, since nobody else ever sees it."""

from dataclasses import dataclass, field

import numpy as np
import structlog

from node.outer_state import Vector
from protocol.rounds import Digest, SliceOutcome
from protocol.run_spec import ReducerErrorRule

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Staged:
    """What a result that is not committed yet would leave behind."""

    digest: Digest
    error: Vector = field(repr=False)  # [slice]: the mean as it was encoded − what that decodes to
    share: float  # of this node's contributions in such a mean


class ReducerError:
    """A reducer's error feedback (Tang et al. 2019, "DoubleSqueeze": Algorithm 1).

    With the rule "keep", for each element that this node reduces,

        summed = mean + kept                 `carried`
        kept   = summed - decoded            `settle`, if that very result was committed

    with weight 1: both are changes of the global parameters, whatever tokens stand behind them. The
    error is kept by the element's place in the canonical vector. Where a slice has moved to another
    reducer it waits here until this node reduces the element again. With "own" the error goes into
    this node's residual instead (see `settle`), with "drop" nowhere.

    Until a commit is settled all is as it was: a result that was void, taken over or never
    committed leaves no trace.
    """

    def __init__(self, num_elements: int, *, rule: ReducerErrorRule) -> None:
        self.rule = rule
        self.values: Vector | None = None  # [all elements], canonical order; only with "keep"
        if rule == "keep":
            self.values = np.zeros(num_elements, dtype=np.float32)
        self.num_lost_elements = 0  # of this process: where an error was owed and is not any more
        self._staged: dict[tuple[int, int], _Staged] = {}  # (round, slice index)

    def carried(self, span: slice) -> Vector | None:
        """A copy of what goes into the next mean of these elements; None when nothing does."""
        return None if self.values is None else self.values[span].copy()

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
        if self.values is None:
            if staged is None or not is_ours:
                return None
            return np.divide(staged.error, np.float32(staged.share))
        if staged is not None and is_ours:
            self.values[span] = staged.error
        elif may_be_ours:
            self._lose(span, round=round, why="this node was restarted after it had reduced them")
        return None

    def forget(self, *, up_to_round: int) -> None:
        """Drops what results of these rounds would have left behind: their commits are settled."""
        for key in [key for key in self._staged if key[0] <= up_to_round]:
            del self._staged[key]

    def restore(self, values: Vector | None, *, round: int) -> None:
        """Takes up what was kept with another state; None when nothing was."""
        self._staged.clear()
        if self.values is None:
            return
        if values is None:
            self._lose(slice(None), round=round, why="the outer state was replaced")
        else:
            self.values[:] = values

    def _lose(self, span: slice, *, round: int, why: str) -> None:
        assert self.values is not None
        num_lost = int(np.count_nonzero(self.values[span]))
        self.values[span] = 0
        if num_lost:
            self.num_lost_elements += num_lost
            log.warning(
                "rounding error lost",
                round=round,
                elements=num_lost,
                of_this_process=self.num_lost_elements,
                why=why,
            )
