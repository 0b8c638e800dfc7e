"""What a daemon does one after the other: what of a plan its ranks train, how long that took, and until when.

The coordinator leases the next round's samples with the plan of this one, and ranks train them while the
bytes of this round travel (`Ahead`). Ranks train one thing at a time, so whoever needs them for something
else pauses this first. The disk follows while they train on (`Saves`), and all of it has an end: the
node's (`Drain`) or the run's (`RunEnd`).
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import structlog

from node.disk.history import KeptRulings
from node.duties.lasting_island import LastingIsland
from node.exchange.exchange import Exchange
from node.exchange.spot_checks import SpotCheckReady
from node.heavy import tell_unsaved
from node.island.island import InnerReport, InnerWork, Progress
from node.link.session import Session
from protocol.errors import IncompleteError
from protocol.run.run_spec import RunSpec
from protocol.wire.messages import (
    Draining,
    EvaluationAsked,
    RefetchAsked,
    RoundCommitted,
    RunFinished,
    Trained,
)
from protocol.wire.rounds import BOOK_PLACES, Assignment, NodeId, Plan, same_fields
from protocol.wire.vitals import Utilisation

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


def by_rules(work: InnerWork, rulings: KeptRulings, first: RunSpec) -> InnerWork:
    """The work by the rules of its round, where amendments have changed the first ones."""
    if not rulings.are_amending:
        return work
    rules, span = rulings.spec_in(work.round), rulings.span_in(work.round)
    was, inner = first.inner, rules.inner
    return replace(
        work,
        progress_begin=span.begin,
        progress_end=span.end,
        rate_factor=inner.learning_rate / was.learning_rate,
        muon_rate_factor=inner.muon_peak_rate / was.muon_peak_rate,
        final_fraction=inner.final_fraction,
        num_rounds=rules.run.rounds,
    )


def counted(report: InnerReport, assignment: Assignment) -> InnerReport:
    """No more than was asked: a plan may ask less than was trained ahead, and reports are checked.

    An even part of the tokens counts, as nobody keeps those of each step.
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
    return Trained(**same_fields(report, Trained))


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


class RoundTimes:
    """Adds up one round after the other."""

    def __init__(self) -> None:
        self._began_at: float | None = None
        self._computed_at_begin = 0.0
        self._exchanged_at_begin = 0.0
        self._report: InnerReport | None = None
        self._adopt_seconds = 0.0

    def begin(self, now: float, *, exchange_seconds: float) -> None:
        """The node is in a plan; the time runs from here unless it does already."""
        if self._began_at is None:
            self._began_at, self._exchanged_at_begin = now, exchange_seconds

    def trained(self, report: InnerReport) -> None:
        """It has trained and published."""
        self._report = report

    def adopted(self, seconds: float) -> None:
        """Its ranks have adopted the new parameters, which took so long."""
        self._adopt_seconds += seconds

    def end(
        self, round: int, now: float, *, compute_seconds: float, exchange_seconds: float
    ) -> Utilisation | None:
        """The round is over for this node and the next begins; None when it did not train.

        `compute_seconds` are those of all inner steps since the node started: with overlap a part of
        a round is trained before the round before has ended. `exchange_seconds` likewise.
        """
        began_at, report, adopt_seconds = self._began_at, self._report, self._adopt_seconds
        computed, self._computed_at_begin = (
            compute_seconds - self._computed_at_begin,
            compute_seconds,
        )
        exchanged, self._exchanged_at_begin = (
            exchange_seconds - self._exchanged_at_begin,
            exchange_seconds,
        )
        self._began_at, self._report, self._adopt_seconds = now, None, 0.0
        if report is None or report.tokens < 1 or began_at is None or report.round != round:
            return None
        flops_per_second = report.flops / report.seconds if report.seconds > 0 else 0.0
        peak = report.peak_flops_per_second
        seconds = max(now - began_at, 1e-9)
        parts = (computed, report.publish_seconds, adopt_seconds, exchanged)
        inner_steps, publish, adopt, exchange = (part / seconds for part in parts)
        communication = _communication_of(report, inner_steps)
        return Utilisation(
            round=round,
            tokens_per_second=report.tokens / report.seconds if report.seconds > 0 else 0.0,
            flops_per_second=flops_per_second,
            # Above 1 the peak was measured while something else had the device: it says nothing.
            mfu=flops_per_second / peak if peak and flops_per_second <= peak else None,
            peak_flops_per_second=peak,
            is_peak_measured=report.is_peak_measured,
            compute_share=inner_steps - (communication or 0.0),
            local_communication_share=communication,
            publish_share=publish,
            adopt_share=adopt,
            exchange_share=exchange,
            waiting_share=max(0.0, 1 - inner_steps - publish - adopt - exchange),
            peak_memory_bytes=report.peak_memory_bytes,
        )


def log_fields_of(made: Utilisation) -> dict[str, int | str]:
    """What a node made of a round, for its log."""
    return {
        "round": made.round,
        "tokens_per_second": round(made.tokens_per_second),
        "gflops": f"{made.flops_per_second / 1e9:.2f}",
        "mfu": "unknown" if made.mfu is None else f"{made.mfu:.1%}",
        "peak": _peak_in_words(made),
        "compute": f"{made.compute_share:.1%}",
        "local_communication": _communication_in_words(made),
        "publish": f"{made.publish_share:.1%}",
        "adopt": f"{made.adopt_share:.1%}",
        "exchange": f"{made.exchange_share:.1%}",
        "waiting": f"{made.waiting_share:.1%}",
        "peak_memory_mb": made.peak_memory_bytes // 1_000_000,
    }


def _communication_in_words(made: Utilisation) -> str:
    share = made.local_communication_share
    return "not measured" if share is None else f"{share:.1%}"


def _peak_in_words(made: Utilisation) -> str:
    if made.peak_flops_per_second is None:
        return "unknown"
    origin = "measured here" if made.is_peak_measured else "by the vendor"
    return f"{made.peak_flops_per_second / 1e9:.1f} GFLOP/s, {origin}"


def _communication_of(report: InnerReport, inner_steps: float) -> float | None:
    """Part of the share of inner steps that waited for the island's own ranks; as in the report."""
    if report.communication_seconds is None:
        return None
    if report.seconds <= 0:
        return 0.0
    return inner_steps * min(1.0, report.communication_seconds / report.seconds)


class Saves:
    """Has the disk follow the outer state while ranks train on, one state after the other."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._saving: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Makes the state durable that is here now, after the one before. Raises as `done`."""
        await self.done()
        self._saving = asyncio.ensure_future(self._exchange.save())
        self._saving.add_done_callback(tell_unsaved)

    async def done(self) -> None:
        """Waits for the disk; raises what it refused with."""
        saving, self._saving = self._saving, None
        if saving is not None:
            await saving

    async def raise_refusal(self) -> None:
        """Raises what the disk has refused with, if it has."""
        if self._saving is not None and self._saving.done():
            await self.done()

    async def before_commit_of(self, plan: Plan) -> None:
        """Lets the disk have the state that this round builds on, before the round can be committed.

        So a crash loses one committed round at most, which can be taken back if nobody else has it.
        A disk that refuses ends the node only after the round (`raise_refusal`), so that its work counts:
        others hold the result. Alone it ends now. Else the run would have two rounds that nobody holds, and
        only one can be taken back.
        """
        if self._saving is not None:
            await asyncio.wait((self._saving,))
            if len(plan.participants) == 1 and not self._exchange.is_durable:
                await self.done()

    async def at_end(self) -> None:
        """Makes durable all that is owed, once nothing moves the state any more."""
        await self.done()
        await self._exchange.save(is_last=True)


ANSWER_SECONDS = 5.0
"""For the coordinator to hear that a helper leaves."""

ON_ITS_WAY_SECONDS = 1.0
"""A plan comes by the stream of messages, and may be overtaken by an answer."""


class Drain:
    """How a node leaves: it ends the rounds that count on it, and begins nothing new.

    `on_over` hears when none can come any more.
    """

    def __init__(self, session: Session, on_over: Callable[[], None]) -> None:
        self.is_begun = False
        self.asked_round = 0  # whose plan asks us to reduce alone, and waits for its turn
        self._session = session
        self._on_over = on_over
        self._awaited: asyncio.Task[None] | None = None  # such a plan, while a helper leaves

    @property
    def awaits_plan(self) -> bool:
        """Whether a plan that counts on this node may be on its way."""
        return self._awaited is not None and not self._awaited.done()

    @property
    def has_refused(self) -> bool:
        """Whether no new plan counts on this node any more."""
        return self.is_begun and not self.awaits_plan

    def counts_on_us(self, round: int) -> bool:
        """Whether a later round than this one does, or may."""
        return self.asked_round > round or self.awaits_plan

    def begin(self, round: int, *, has_to_finish: bool) -> None:
        """Tells the coordinator, as of the last `round` that this node knows.

        A node with no round to finish waits some seconds for a plan that was sent before that was heard.
        """
        self.is_begun = True
        self._session.report(max(round, self.asked_round), Draining())
        if not has_to_finish:
            self._awaited = asyncio.create_task(self._await_plan(), name="a plan on its way")

    async def _await_plan(self) -> None:
        """Once the coordinator has answered, no further plan counts on this node; one may be on its way."""
        await self._session.flush(timeout_seconds=ANSWER_SECONDS)
        await asyncio.sleep(ON_ITS_WAY_SECONDS)
        asyncio.get_running_loop().call_soon(self._on_over)  # when this task is done

    def cancel(self) -> None:
        """The run has ended."""
        if self._awaited is not None:
            self._awaited.cancel()


FINISH_SECONDS = 120.0
"""How long a node that is behind when the run is finished waits for somebody with the final state."""


class RunEnd:
    """What the coordinator has told of the run's end. From then on all work has a limit.

    For nobody may be left to supply what a commit lacks.
    """

    def __init__(self) -> None:
        self.told: RunFinished | None = None
        self.missed: RunFinished | None = None
        """The end that this node has not come to in time."""
        self._limit: asyncio.Timeout | None = None

    def hear(self, finished: RunFinished) -> None:
        """The run is finished. What is told again changes nothing."""
        if finished != self.told:
            self.told = finished
            self._begin_limit()

    def go_on(self, last_round: int) -> None:
        """The run has rounds up to this one: an end before is none any more."""
        if self.told is not None and self.told.round < last_round:
            log.info("the run goes on: it was extended", from_round=self.told.round + 1)
            self.forget()

    def forget(self) -> None:
        """The run goes on."""
        self.told = None
        if self._limit is not None:
            self._limit.reschedule(None)

    @asynccontextmanager
    async def limiting(self) -> AsyncIterator[None]:
        """Raises TimeoutError within when the time is over, and notes what is missed then."""
        try:
            async with asyncio.timeout(None) as self._limit:
                self._begin_limit()
                yield
        except TimeoutError:
            if self._limit is not None and self._limit.expired():
                self.missed = self.told
            raise
        finally:
            self._limit = None

    def _begin_limit(self) -> None:
        if self.told is not None and self._limit is not None:
            self._limit.reschedule(asyncio.get_running_loop().time() + FINISH_SECONDS)


def incomplete(finished: RunFinished, held_round: int) -> IncompleteError:
    """What ends a node that does not come to the run's final state."""
    held = f"round {held_round} of {finished.round}"
    if held_round == finished.round:
        held = f"another state of round {finished.round} than the swarm"
    return IncompleteError(
        f"the run is over ({finished.reason}), and nobody supplies its final state: "
        f"this node holds {held}",
        next_step="start it again with 'atoll node start' while a node that has the state runs, "
        "or export the model there",
    )
