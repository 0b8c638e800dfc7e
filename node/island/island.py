"""What the daemon asks of an island, whatever its ranks and mesh.

Three islands implement it: node.island.ranks.launcher runs one process for each rank; node.island.loops
leaves training to a program of the contributor's own; lab.simulation.inline_island trains in the calling
process, for tests and simulation.

That of a helper has no ranks, no data, nothing to train: it reduces what others contribute.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from node.outer_state import Vector
from protocol.run.run_spec import ExchangeSection, RunSpec
from protocol.run.schedule import Position, Schedule, Span
from protocol.wire.rounds import CorpusSummary, Digest, SourceLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerWork:
    """What the island trains in one round."""

    round: int
    inner_steps: int
    first_sample: int  # place in the run's sample order
    num_samples: int
    token_clock: int  # the swarm's, where the round begins
    round_tokens: int  # how far the token clock gets in the round
    max_seconds: float  # stop after this long, with whatever is done
    num_participants: int  # of the round: what [inner] scaling goes by
    steps_before: int = 0  # inner steps of the same round that the ranks have taken already
    progress_begin: float | None = None  # of the run where the round begins; None: by [run] rounds
    progress_end: float = 0.0
    rate_factor: float = 1.0  # what amendments multiply the run file's learning rate by
    muon_rate_factor: float = 1.0
    final_fraction: float | None = None  # of the peak, at the end; None: the run file's
    num_rounds: int | None = None  # of the run, as amended; None: the run file's

    def position(self, spec: RunSpec, step: float) -> Position:
        """Where the run's schedule is in the middle of the inner step `step`, counted from 0.

        There, neither the first inner step nor the last has the rate of a schedule's end, which may be 0.
        """
        part = (self.steps_before + step + 0.5) / (self.steps_before + self.inner_steps)
        if self.progress_begin is None:
            span = Schedule.of(spec).span_of(self.round)
        else:  # amendments have changed the number of rounds
            span = Span(begin=self.progress_begin, end=self.progress_end)
        return Position.at(
            spec.inner,
            part,
            span=span,
            token_clock=self.token_clock,
            round_tokens=self.round_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far training has come, sent every so many inner steps."""

    round: int
    inner_step: int
    loss: float  # nats per token, mean since the last progress
    tokens_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerReport:
    """What the island has trained."""

    round: int
    inner_steps: int
    samples: int  # used up of those leased: what the ledger counts
    tokens: int  # of their targets those that count: what the work weighs; 0: there is none
    loss: float  # nats per token, mean over the round
    seconds: float
    flops: float = 0.0  # of all places in the samples, by node.island.measuring
    peak_flops_per_second: float | None = None  # of the island's devices; None: not known
    is_peak_measured: bool = False  # by matrix products, for no table names the devices
    peak_memory_bytes: int = 0  # of the rank that took most
    publish_seconds: float = 0.0  # afterwards
    communication_seconds: float | None = None  # of `seconds`, exposed; None: not measured
    skipped_steps: int = 0  # of the inner steps: their gradients did not fit into fp16


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Held-out loss of the global parameters."""

    loss: float  # nats per token
    tokens: int
    metric: float | None = None  # one of the run's own, where its function has one
    by_source: tuple[SourceLoss, ...] = ()  # where the data have several


@dataclass(frozen=True, slots=True, kw_only=True)
class Ability:
    """What an island can be asked for now."""

    trains: bool = True
    evaluates: bool = True
    waits_for: str = "a training loop"  # where it does not train
    software: str = ""  # of a loop, by which others see whether it computes as theirs do
    evaluates_by: str = ""  # a digest of a loop's function for that, by which losses are told apart


ALL = Ability()


class Island(Protocol):
    """The local ranks. Calls are made one at a time, in the order of a round; `halt` at any time."""

    @property
    def ability(self) -> Ability:
        """What the coordinator may count on; of the node's own ranks, all."""
        return ALL

    async def start(self) -> CorpusSummary:
        """Brings the ranks up: processes, model, data. Raises AtollError with what is wrong."""

    async def stop(self, why: str = "") -> None:
        """Ends the ranks; safe to call at any time, more than once. A loop is told `why`."""

    async def adopt(self, fragment: int | None = None, *, is_taken: bool = True) -> None:
        """Ranks take over the global parameters in shared memory.

        Of a fragment that they have published, as [exchange] overlap says: all other fragments
        stay. `is_taken` tells whether the swarm took what was published. Without a fragment, of the
        whole model, and nothing local stays.
        """

    async def train(self, work: InnerWork, on_progress: Callable[[Progress], None]) -> InnerReport:
        """Takes inner steps; returns early at `work.max_seconds`."""

    def halt(self) -> None:
        """Lets the training in progress end after its current inner step, with its report."""

    async def publish(self, fragment: int) -> None:
        """Ranks copy their local parameters of the fragment into shared memory, over those of another."""

    async def keep(self, round: int, *, is_last: bool = False) -> None:
        """The island has trained this round, and may set its inner optimizer's state aside.

        It reaches the disk while the ranks go on; before this returns when it is the last time.
        """
        return

    async def begin_anew(self, round: int) -> None:
        """Later rounds are undone: ranks start again with no inner optimizer's state of those.

        They have the newest that was set aside after this round or before, or begin at zero. A loop of
        the contributor's own goes on, and its optimizer is its own business.
        """
        return

    async def evaluate(self) -> Evaluation | None:
        """Measures the held-out loss of the global parameters; the ranks' own weights stay.

        None where the island does not evaluate.
        """
        return None

    async def losses_at(self, parameters: Vector, places: Sequence[int]) -> Sequence[float] | None:
        """Losses [places] of single samples at other parameters [all elements], in nats per token.

        By their places in the sample order; the ranks' own weights stay. None where the island does not.
        """
        return None


def rebases(exchange: ExchangeSection, *, is_taken: bool) -> bool:
    """Whether a fragment is adopted by what lies between it and what was published.

    Blending leaves a part of what was published in the local weights. Where that was not taken all of
    it is still owed, and would count twice: then only what was trained since is kept.
    """
    return exchange.overlap == "keep" or (exchange.overlap == "blend" and not is_taken)


def rest_of(work: InnerWork, done: InnerReport) -> InnerWork:
    """What is left of a round's work; no inner steps when nothing is."""
    steps = min(done.inner_steps, work.inner_steps)
    num_samples = work.num_samples // work.inner_steps * steps
    return replace(
        work,
        inner_steps=work.inner_steps - steps,
        first_sample=work.first_sample + num_samples,
        num_samples=work.num_samples - num_samples,
        steps_before=work.steps_before + steps,
    )


def both(first: InnerReport, second: InnerReport) -> InnerReport:
    """One report of two parts of a round's training."""
    steps = first.inner_steps + second.inner_steps
    loss_sum = first.loss * first.inner_steps + second.loss * second.inner_steps
    return replace(
        second,
        inner_steps=steps,
        samples=first.samples + second.samples,
        tokens=first.tokens + second.tokens,
        loss=loss_sum / steps,
        seconds=first.seconds + second.seconds,
        flops=first.flops + second.flops,
        peak_memory_bytes=max(first.peak_memory_bytes, second.peak_memory_bytes),
        skipped_steps=first.skipped_steps + second.skipped_steps,
        communication_seconds=_sum_if_known(
            first.communication_seconds, second.communication_seconds
        ),
    )


def _sum_if_known(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first + second


HELPS = Ability(trains=False, evaluates=False, waits_for="the next plan")

NO_DATA = CorpusSummary(digest=Digest(bytes(32)), num_samples=0, num_bytes=0)


class RanklessIsland(Island):
    """The island of a member that plans ask for no inner steps."""

    @property
    def ability(self) -> Ability:
        """Nothing: so no plan waits for its contribution, and nobody asks it for a held-out loss."""
        return HELPS

    async def start(self) -> CorpusSummary:
        """Nothing to bring up."""
        return NO_DATA

    async def stop(self, why: str = "") -> None:
        """Nothing to end."""

    async def adopt(self, fragment: int | None = None, *, is_taken: bool = True) -> None:
        """Nobody takes the global parameters over."""

    async def train(self, work: InnerWork, on_progress: Callable[[Progress], None]) -> InnerReport:
        """Raises: a plan that asks a helper to train is not one of ours."""
        raise RuntimeError(f"round {work.round} asks a helper for {work.inner_steps} inner steps")

    def halt(self) -> None:
        """Nothing is in progress."""

    async def publish(self, fragment: int) -> None:
        """Raises: nothing was trained."""
        raise RuntimeError(f"a helper has nothing of fragment {fragment} to publish")
