"""The inner learning rate, by how far the run has come: the same on all nodes, also late ones."""

import math
from dataclasses import dataclass
from typing import Self

from node.island.island import InnerWork
from protocol.run.run_spec import InnerSection, RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How far a run has come at one inner step of one node."""

    progress: float  # 0 at the run's first inner step, 1 where its schedule ends
    tokens: float  # on the swarm's token clock

    @classmethod
    def of(cls, spec: RunSpec, work: InnerWork, step: float) -> Self:
        """The middle of the inner step `step` of this work, counted from 0.

        A round closes once for all nodes, whoever is here and whatever it commits: so progress is
        closed rounds of `[run] rounds`, and in a round the part of the node's own inner steps. With
        `[inner] total_tokens` it is the token clock's part of those. In their middle, neither the first
        inner step nor the last has the rate of a schedule's end, which may be 0.
        """
        steps = work.steps_before + work.inner_steps
        part = (work.steps_before + step + 0.5) / steps
        tokens = work.token_clock + part * work.round_tokens
        if spec.inner.total_tokens is not None:
            progress = tokens / spec.inner.total_tokens
        elif work.progress_begin is not None:  # amendments have changed the number of rounds
            progress = work.progress_begin + part * (work.progress_end - work.progress_begin)
        else:
            before = spec.beginning.progress
            progress = before + (1 - before) * ((work.round - 1 + part) / spec.run.rounds)
        return cls(progress=min(1.0, progress), tokens=tokens)


WARM_UP = 0.1
"""The part of a run that warms up where the run file does not say."""


def share_of_peak(
    inner: InnerSection, at: Position, *, final_fraction: float | None = None
) -> float:
    """What part of its peak a learning rate has there.

    Rises linearly over `warmup_tokens`, or a tenth of the run. Then it stays ("constant"), or falls
    to `final_fraction` at the end of the run and stays there: along a half cosine ("cosine": SGDR,
    Loshchilov and Hutter, 2017), along a line ("linear"), or along a line over the last
    `decay_fraction` only ("wsd", warm-up, stable, decay: MiniCPM, Hu et al., 2024, section 4; a line
    as in Hägele et al., 2024, "Scaling Laws and Compute-Optimal Training Beyond Fixed Training
    Durations"). `final_fraction` is the run file's, unless it was amended.

    `warmup_tokens` without `total_tokens` are no known part of a run: then the fall counts from its
    begin, and the rate is the lower of the two.
    """
    warm_up = WARM_UP
    risen = at.progress / WARM_UP
    if inner.warmup_tokens is not None:
        warm_up = inner.warmup_tokens / inner.total_tokens if inner.total_tokens else 0.0
        risen = at.tokens / inner.warmup_tokens if inner.warmup_tokens else 1.0
    last = inner.final_fraction if final_fraction is None else final_fraction
    return min(1.0, risen, _fallen(inner, at.progress, warm_up, last))


def _fallen(inner: InnerSection, progress: float, warm_up: float, last: float) -> float:
    """The part of its peak that is left where a warm-up ends at `warm_up`; 1 before that."""
    if inner.schedule == "constant":
        return 1.0
    begin = warm_up if inner.schedule != "wsd" else max(warm_up, 1 - inner.decay_share)
    done = max(0.0, progress - begin) / (1 - begin) if begin < 1 else 0.0
    if progress >= 1:
        done = 1.0  # also when the warm-up takes all
    left = 0.5 * (1 + math.cos(math.pi * done)) if inner.schedule == "cosine" else 1 - done
    return last + (1 - last) * left


def rewarming_steps(spec: RunSpec) -> int:
    """Inner steps over which learning rates rise when moments begin at zero in the midst of a run.

    2 / (1 - beta2), the rule of Ma and Yarats, 2021, "On the adequacy of untuned warmup for adaptive
    optimization", section 5: so long the second moment is a mean of too few gradients, and steps are
    too large. A round's steps at most: a restart should not cost more than one.
    """
    return min(spec.node_steps, round(2 / (1 - spec.inner.beta2)))


class Rewarming:
    """The rise of learning rates after a start with zero moments, unless the run itself begins."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._is_decided = False
        self.steps_left = 0

    def begin(self, token_clock: int) -> None:
        """Before inner steps of a round. Where the clock is at 0 the run's own warm-up is what there is."""
        if not self._is_decided and token_clock > 0:
            self.steps_left = self._num_steps
        self._is_decided = True

    def go_on(self, steps_left: int) -> None:
        """The moments are not zero: only what an earlier rise had left is to be done."""
        self.steps_left = min(steps_left, self._num_steps)
        self._is_decided = True

    def share(self) -> float:
        """What the learning rates of the next inner step are multiplied by."""
        return (self._num_steps - self.steps_left + 1) / (self._num_steps + 1)

    def stepped(self) -> None:
        """An inner step was taken."""
        self.steps_left = max(0, self.steps_left - 1)


def scale_of_rates(spec: RunSpec, num_participants: int) -> float:
    """What learning rates are multiplied by in a round with so many participants.

    `learning_rate` is meant for `min_nodes`. The swarm's batch grows with every node, as each has
    the whole `batch`. "linear" follows it (Goyal et al., 2017, "Accurate, large minibatch SGD",
    section 2.1), "sqrt" its root, which suits Adam (Malladi et al., 2022, "On the SDEs and scaling
    rules for adaptive gradient algorithms"). By participants, not by ranks, so all nodes of a round
    agree, whatever their meshes.
    """
    ratio = num_participants / spec.run.min_nodes
    match spec.inner.scaling:
        case "none":
            return 1.0
        case "linear":
            return ratio
        case "sqrt":
            return math.sqrt(ratio)
