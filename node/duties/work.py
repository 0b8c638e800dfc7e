"""What a daemon does one after the other, and what of a plan its ranks train.

The coordinator leases the next round's samples with the plan of this one, and ranks train them while the
bytes of this round travel (`Ahead`). Ranks train one thing at a time, so whoever needs them for something
else pauses this first. All else here is pure.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from node.duties.lasting_island import LastingIsland
from node.exchange.spot_checks import SpotCheckReady
from node.island.island import InnerReport, InnerWork, Progress
from protocol.wire.messages import (
    EvaluationAsked,
    RefetchAsked,
    RoundCommitted,
    RunFinished,
    Trained,
)
from protocol.wire.rounds import (
    BOOK_PLACES,
    Assignment,
    NodeId,
    Plan,
)

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class CatchUpNeeded:
    """The session learned of a committed round that we do not hold."""

    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReceived:
    """A plan's durations count from here, however long it waits for its turn."""

    plan: Plan
    at: float

    def plan_at(self, now: float) -> Plan:
        """The plan after it has waited until `now`."""
        seconds = now - self.at
        return replace(
            self.plan,
            train_seconds=max(0.0, self.plan.train_seconds - seconds),
            contribute_seconds=max(0.0, self.plan.contribute_seconds - seconds),
            commit_seconds=max(0.0, self.plan.commit_seconds - seconds),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AheadFailed:
    """Training ahead has ended with an error, which pausing it raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlansOver:
    """A helper that leaves has waited long enough for a plan that was on its way to it."""


Work = (
    PlanReceived
    | RoundCommitted
    | EvaluationAsked
    | RefetchAsked
    | RunFinished
    | CatchUpNeeded
    | AheadFailed
    | PlansOver
    | SpotCheckReady
)


def work_of(plan: Plan, assignment: Assignment) -> InnerWork:
    """The round's own inner steps."""
    return InnerWork(
        round=plan.round,
        inner_steps=assignment.inner_steps,
        first_sample=assignment.first_sample % BOOK_PLACES,
        num_samples=assignment.num_samples,
        token_clock=plan.token_clock,
        round_tokens=plan.round_tokens,
        max_seconds=plan.train_seconds,
        num_participants=plan.num_training,
    )


def work_ahead_of(plan: Plan, node_id: NodeId) -> InnerWork | None:
    """What the plan leases the node for the round after it; until that is planned, it has no end.

    It counts on a next plan that gets as far as this one: the run's rounds are closed one by one
    whatever becomes of them, so a schedule on rounds is exact, and one on tokens a forecast.
    """
    assignment = plan.ahead_of(node_id)
    if assignment is None:
        return None
    return replace(
        work_of(plan, assignment),
        round=plan.round + 1,
        token_clock=plan.token_clock + plan.round_tokens,
        max_seconds=math.inf,
    )


def counted(report: InnerReport, assignment: Assignment) -> InnerReport:
    """No more than was asked: a plan may ask less than was trained ahead, and reports are checked.

    Of the tokens an even part, as nobody keeps those of each step.
    """
    if report.inner_steps <= assignment.inner_steps:
        return report
    steps = assignment.inner_steps
    return replace(
        report,
        inner_steps=steps,
        samples=report.samples // report.inner_steps * steps,
        tokens=-(-report.tokens * steps // report.inner_steps),  # rounded up: there is work
    )


def trained_of(report: InnerReport) -> Trained:
    """What the coordinator is told of it."""
    return Trained(
        inner_steps=report.inner_steps,
        samples=report.samples,
        tokens=report.tokens,
        loss=report.loss,
        seconds=report.seconds,
    )


def progress_of(report: InnerReport) -> Progress:
    """How far training came, by its report."""
    return Progress(
        round=report.round,
        inner_step=report.inner_steps,
        loss=report.loss,
        tokens_per_second=report.tokens / max(report.seconds, 1e-3),
    )


def counted_anew(trained: Trained, assignment: Assignment, *, context: int) -> Trained:
    """No more than another plan of the same round asks, which may be for other samples."""
    samples = min(trained.samples, assignment.num_samples)
    return replace(
        trained,
        inner_steps=min(trained.inner_steps, assignment.inner_steps),
        samples=samples,
        tokens=min(trained.tokens, samples * context),
    )


class Ahead:
    """One stint at a time, in the background. What it trained is in the ranks when it is paused."""

    def __init__(
        self,
        island: LastingIsland,
        on_progress: Callable[[Progress], None],
        on_fault: Callable[[], None],
    ) -> None:
        self._island = island
        self._on_progress = on_progress
        self._on_fault = on_fault  # then `pause` raises it
        self._work: InnerWork | None = None
        self._stint: asyncio.Task[None] | None = None

    @property
    def round(self) -> int | None:
        """The round whose samples are leased already."""
        return None if self._work is None else self._work.round

    @property
    def is_training(self) -> bool:
        """Whether inner steps are being taken now."""
        return self._stint is not None and not self._stint.done()

    def lease(self, work: InnerWork | None) -> None:
        """What may be trained from the next `resume` on; None for nothing."""
        self._work = work

    async def resume(self) -> None:
        """Goes on where it was paused, if there is anything leased."""
        if self._work is None or self._stint is not None:
            return
        self._stint = asyncio.ensure_future(self._island.train_ahead(self._work, self._on_progress))
        self._stint.add_done_callback(self._tell_fault)
        await asyncio.sleep(0)  # it has begun: one that has not cannot be cut short

    async def pause(self) -> None:
        """Waits for the inner step in progress; then the ranks are free. Raises what went wrong."""
        if self._stint is None:
            return
        if not self._stint.done():
            self._island.cut_short()
        try:
            await self._stint
        finally:
            self._stint = None

    def cancel(self) -> None:
        """Ends it without waiting: the node ends."""
        self._work = None
        if self._stint is not None:
            self._stint.cancel()

    def _tell_fault(self, stint: asyncio.Task[None]) -> None:
        if not stint.cancelled() and stint.exception() is not None:
            self._on_fault()
