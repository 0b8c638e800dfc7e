"""The residual: what this node still owes the swarm."""

import numpy as np

from node.exchange.codecs.compiled import kernel, read_only
from node.outer_state import Vector


@kernel
def _sum_owed(
    global_parameters: Vector, published: Vector, residual: Vector, accumulated: Vector
) -> None:
    for i in range(accumulated.size):
        accumulated[i] = (global_parameters[i] - published[i]) + residual[i]


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
    they were made; work that no commit took is never decayed. The subtraction is exact for values
    that decoded to zero or to within a factor of two of themselves (Sterbenz), else rounded once.
    So nothing is rounded for codecs that take the nearest of their values, of which the smallest
    above zero stands for no less than half of itself: fp32, int8, int4.
    """

    def __init__(
        self, num_elements: int, *, error_feedback: bool = True, decay: float = 1.0
    ) -> None:
        self._values: Vector = np.zeros(num_elements, dtype=np.float32)
        self._decay = np.float32(decay)
        self._error_feedback = error_feedback

    @property
    def values(self) -> Vector:
        """The whole residual [num_elements], canonical order. No copy: write to it to restore."""
        return self._values

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
        _sum_owed(
            read_only(global_parameters),
            read_only(published),
            read_only(self._values[span]),
            accumulated,
        )
        return accumulated

    def settle_taken(self, span: slice, accumulated: Vector, decoded: Vector) -> None:
        """A commit took the span [n]: what its encoding left out is all that is owed."""
        self._check(span, accumulated, decoded)
        if self._error_feedback:
            left = np.subtract(accumulated, decoded, out=self._values[span])
            if self._decay != 1:
                np.multiply(left, self._decay, out=left)
        else:
            self._values[span] = 0

    def settle_missed(self, span: slice, accumulated: Vector) -> None:
        """No commit took the span [n]: all of it is still owed."""
        self._check(span, accumulated)
        self._values[span] = accumulated

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
