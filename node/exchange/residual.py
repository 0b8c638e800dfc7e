"""The residual: what this node still owes the swarm."""

from collections.abc import Callable

import numpy as np

from node.exchange.codecs.codec import ONE_THREAD, Codec, Tiles
from node.exchange.codecs.compiled import kernel, read_only
from node.exchange.mean import BlockSums
from node.outer_state import Vector
from protocol.run.run_spec import WANTS_FEEDBACK


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
        """Owes this too for the span [n]: a reducer's error (node.exchange.reducer_error)."""
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
