"""What a daemon does one after the other: what of a plan its ranks train and measure, and how long that took.

The coordinator leases the next round's samples with the plan of this one, and ranks train them while the
bytes of this round travel (`Ahead`). Ranks train one thing at a time, so whoever needs them for something
else pauses this first.

A node measures the held-out loss of the state that it holds, and what others have learned (`Measuring`). Both
need the ranks, which train nothing meanwhile: whoever asks here has paused them. A model may write from
the run's prompts beside all that.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import structlog

from node.duties.lasting_island import LastingIsland
from node.exchange.auditing import SpotCheckReady, piece_of
from node.exchange.exchange import Exchange
from node.island.island import InnerReport, InnerWork, Progress
from protocol.wire.messages import (
    Evaluated,
    EvaluationAsked,
    RefetchAsked,
    Report,
    RoundCommitted,
    RunFinished,
    SpotChecked,
    Trained,
    Wrote,
)
from protocol.wire.rounds import (
    AUDIT_ROUNDS,
    BOOK_PLACES,
    LEAST_CHECKED,
    Assignment,
    NodeId,
    Plan,
)
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


class Measuring:
    """What is measured is reported; `is_last` says whether a round is the run's last."""

    def __init__(
        self,
        island: LastingIsland,
        exchange: Exchange,
        report: Callable[[int, Report], None],
        *,
        batch: int,
        is_last: Callable[[int], bool],
    ) -> None:
        self._island = island
        self._report = report
        self._writing = Writing(island, report, is_last=is_last)
        self.checks = Checks(
            gains=partial(exchange.gains, losses_at=island.losses_at),
            report=lambda round, found: report(round, exchange.outer.signed_finding(found, round)),
            batch=batch,
        )

    async def evaluate(self, asked: EvaluationAsked) -> None:
        """Measures the held-out loss of the state that is here, and has it write where that is asked."""
        has_copy = self._writing.begin(asked.round) if asked.writes else None
        evaluation = await self._island.evaluate()
        if has_copy is not None:
            await has_copy.wait()  # from here on the state may move
        if evaluation is None:
            log.warning(
                "not evaluated: there is nothing here to evaluate with now",
                round=asked.round,
                waits_for=self._island.ability.waits_for,
            )
            return
        self._report(
            asked.round,
            Evaluated(
                held_out_loss=evaluation.loss,
                tokens=evaluation.tokens,
                metric=evaluation.metric,
            ),
        )

    async def end(self) -> None:
        """Ends what still writes, with its process."""
        await self._writing.end()


class Checks:
    """Spot checks of other members, a piece at a time, so that nothing that a round wants waits for them.

    The oldest comes first. What is measured of a check when the coordinator forgets it soon is reported.
    """

    def __init__(
        self,
        *,
        gains: Callable[[SpotCheckReady, Sequence[int]], Awaitable[Sequence[float] | None]],
        report: Callable[[int, SpotChecked], None],
        batch: int,
    ) -> None:
        self._gains = gains
        self._report = report
        self._batch = batch  # samples of an inner step
        self._waiting: list[SpotCheckReady] = []
        self._leased: list[float] = []  # gains of the first of them, as far as it was measured
        self._unleased: list[float] = []  # as many

    @property
    def of(self) -> NodeId | None:
        """Whose work is checked now, or next; None for nobody's."""
        return self._waiting[0].asked.contributor_id if self._waiting else None

    def add(self, ready: SpotCheckReady) -> None:
        """Has something checked after all that was added before."""
        self._waiting.append(ready)

    async def go_on(self) -> None:
        """Measures one piece of a check, and reports what is whole by it."""
        ready, done = self._waiting[0], len(self._leased)
        num = len(ready.leased)
        piece = slice(done, done + piece_of(num, self._batch))
        leased, unleased = ready.leased[piece], ready.unleased[piece]
        gains = await self._gains(ready, (*leased, *unleased))
        if gains is None:
            self._leave_out("ranks here do not measure samples")
            return
        if not all(map(math.isfinite, gains)):  # ranks by size would call it less than all others
            self._leave_out("a sample alone has no loss that is a number")
            return
        self._leased += gains[: len(leased)]
        self._unleased += gains[len(leased) :]
        if len(self._leased) == num:
            self._tell()

    def applied(self, round: int) -> None:
        """Ends checks whose findings count no more once one more round is committed."""
        while self._waiting and self._waiting[0].asked.round <= round + 1 - AUDIT_ROUNDS:
            if len(self._leased) >= LEAST_CHECKED:
                self._tell()
            else:
                self._leave_out("this node had no time for it between its rounds")

    def forget_after(self, round: int) -> None:
        """Later rounds are undone: nobody counts what is found of them."""
        while any(late := [ready.asked.round > round for ready in self._waiting]):
            self._drop(late.index(True))

    def _tell(self) -> None:
        ready = self._waiting[0]
        self._report(ready.asked.round, ready.found(self._leased, self._unleased))
        self._drop(0)

    def _leave_out(self, why: str) -> None:
        asked = self._waiting[0].asked
        log.info("not checked", round=asked.round, of=asked.contributor_id, why=why)
        self._drop(0)

    def _drop(self, place: int) -> None:
        del self._waiting[place]
        if place == 0:
            self._leased, self._unleased = [], []


_STILL_WRITING = (
    "an earlier model still writes here; fewer prompt_tokens or rarer evaluations give it time"
)
"""What is told instead of a text."""


class Writing:
    """The model that writes on from the run's prompts while this node goes on.

    One at a time. The run's last model comes before one that still writes, and no other does, or slow ones
    would never end.
    """

    def __init__(
        self,
        island: LastingIsland,
        report: Callable[[int, Wrote], None],
        *,
        is_last: Callable[[int], bool],
    ) -> None:
        self._island = island
        self._report = report
        self._is_last = is_last  # whether a round is the run's last
        self._task: asyncio.Task[None] | None = None
        self._round = 0  # that it writes for

    def begin(self, round: int) -> asyncio.Event:
        """Has the state's model write; the event says that it has a copy, or needs none."""
        has_copy = asyncio.Event()
        if self._task is not None and not self._task.done():
            if round == self._round:  # asked again, after the link to the coordinator broke
                has_copy.set()
                return has_copy
            if not self._is_last(round):
                self._report(round, Wrote(why_not=_STILL_WRITING))
                has_copy.set()
                return has_copy
            self._task.cancel()
            self._report(self._round, Wrote(why_not="the run's last model writes instead"))

        async def write() -> None:
            try:
                self._report(round, await self._island.write(has_copy.set))
            finally:
                has_copy.set()

        self._round, self._task = round, asyncio.ensure_future(write())
        return has_copy

    async def end(self) -> None:
        """Ends it, with its process."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
