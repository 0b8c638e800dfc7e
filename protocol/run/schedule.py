"""The inner learning rate, by how far the run has come: the same on all nodes, also late ones.

Nodes train by it. The coordinator bounds by it how much longer a round's results may be than those before.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Self

from protocol.run.run_spec import InnerSection, RunSpec
from protocol.trust.rulings import Scalar


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """How far a schedule on rounds is where a round begins and where it ends; 1 is the run's end."""

    begin: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How far a run has come at one inner step of one node."""

    progress: float  # 0 at the run's first inner step, 1 where its schedule ends
    tokens: float  # on the swarm's token clock

    @classmethod
    def at(
        cls, inner: InnerSection, part: float, *, span: Span, token_clock: float, round_tokens: int
    ) -> Self:
        """Where `part` of a round's inner steps is done.

        A round closes once for all nodes, whoever is here and whatever it commits: so progress is
        closed rounds of `[run] rounds`, and in a round the part of the node's own inner steps. With
        `[inner] total_tokens` it is the token clock's part of those.
        """
        tokens = token_clock + part * round_tokens
        if inner.total_tokens is not None:
            progress = tokens / inner.total_tokens
        else:
            progress = span.begin + part * (span.end - span.begin)
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


NUM_POINTS = 16
"""A mean learning rate is taken from so many places."""

FLAT = InnerSection(schedule="constant", warmup_tokens=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """What holds from a round on, until the next term."""

    from_round: int = 1
    first_round: int = 1  # where the number of rounds was set
    first_progress: float = 0.0  # how far the run was there
    last_round: int = 1  # where the schedule ends
    inner: InnerSection = FLAT

    def progress_at(self, round: int) -> float:
        """Where `round` begins. What is left of the run is even over the rounds that are left."""
        if round > self.last_round:
            return 1.0
        done = (round - self.first_round) / (self.last_round + 1 - self.first_round)
        return self.first_progress + (1 - self.first_progress) * done


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsTaken:
    """The inner steps of a round."""

    round: int
    token_clock: int  # where the round begins
    round_tokens: int
    asked: Sequence[int]  # of each node that trains
    part: float = 1.0  # of these, that was taken before the deadline


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The learning rates of all rounds, by the run file and its amendments."""

    terms: tuple[Term, ...] = (Term(),)  # in order
    min_nodes: int = 1

    @classmethod
    def of(cls, spec: RunSpec) -> Self:
        """That of the run file."""
        before, last = spec.beginning.progress, spec.run.rounds
        term = Term(first_progress=before, last_round=last, inner=spec.inner)
        return cls(terms=(term,), min_nodes=spec.run.min_nodes)

    def amended(self, from_round: int, changes: Mapping[str, Scalar]) -> Self:
        """With what an amendment that is later than all others says of it.

        Where the number of rounds changes the schedule goes on from where it is, without a jump.
        """
        term = self.terms[-1]
        inner = {key: changes[f"inner.{key}"] for key in _AMENDED if f"inner.{key}" in changes}
        term = replace(term, from_round=from_round, inner=term.inner.model_copy(update=inner))
        if "run.rounds" in changes:
            done, last = term.progress_at(from_round), int(changes["run.rounds"])
            term = replace(term, first_round=from_round, first_progress=done, last_round=last)
        return replace(self, terms=(*self.terms, term))

    @property
    def ends_at_tokens(self) -> int | None:
        """Of the token clock, where the run file says it; None: it ends with the run's rounds."""
        return self.terms[-1].inner.total_tokens

    def span_of(self, round: int) -> Span:
        """How far the run is in a round, by its number of rounds."""
        term = self._term_in(round)
        return Span(begin=term.progress_at(round), end=term.progress_at(round + 1))

    def scale_of(self, num_participants: int) -> float:
        """What learning rates are multiplied by in a round with so many participants.

        `learning_rate` is meant for `min_nodes`. The swarm's batch grows with every node, as each has
        the whole `batch`. "linear" follows it (Goyal et al., 2017, "Accurate, large minibatch SGD",
        section 2.1), "sqrt" its root, which suits Adam (Malladi et al., 2022, "On the SDEs and scaling
        rules for adaptive gradient algorithms"). By participants, not by ranks, so all nodes of a round
        agree, whatever their meshes.
        """
        ratio = num_participants / self.min_nodes
        match self.terms[0].inner.scaling:
            case "none":
                return 1.0
            case "linear":
                return ratio
            case "sqrt":
                return math.sqrt(ratio)

    def stride(self, taken: StepsTaken, *, num_rounds: int = 1) -> float:
        """How far a round's inner steps lead at most, as their mean: the sum of their learning rates.

        The unit is the run file's peak. A node counts by its steps, as it does in a mean. With `num_rounds`
        it is how far that many lead, if those before had the same steps and tokens. 0: there are none.
        """
        if not taken.asked:
            return 0.0
        points = max(1, NUM_POINTS // num_rounds)
        rate = fmean(
            self._rate(taken, taken.part * (point + 0.5) / points, earlier)
            for earlier in range(num_rounds)
            for point in range(points)
        )
        steps = sum(count**2 for count in taken.asked) / sum(taken.asked)
        return self.scale_of(len(taken.asked)) * rate * num_rounds * taken.part * steps

    def _rate(self, taken: StepsTaken, part: float, earlier: int) -> float:
        round, first = taken.round - earlier, self.terms[0].inner
        inner = self._term_in(round).inner
        at = Position.at(
            inner,
            part,
            span=self.span_of(round),
            token_clock=max(0, taken.token_clock - earlier * taken.round_tokens),
            round_tokens=taken.round_tokens,
        )
        rates = [inner.learning_rate / first.learning_rate]
        if inner.optimizer == "muon":
            rates.append(inner.muon_peak_rate / first.muon_peak_rate)
        return max(rates) * share_of_peak(inner, at)

    def _term_in(self, round: int) -> Term:
        """The first holds before it, too."""
        begun = (term for term in reversed(self.terms) if term.from_round <= round)
        return next(begun, self.terms[0])


ALWAYS_ALIKE = Schedule()
"""The peak in all rounds."""

_AMENDED = ("learning_rate", "muon_learning_rate", "final_fraction")
