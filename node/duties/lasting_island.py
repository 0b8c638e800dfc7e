"""An island as duties use it: its ranks are started again when they die, and measure between rounds.

So a death costs at most a round's work. Ranks may come up while the node takes part already: until then it
follows rounds and trains nothing. They adopt all parameters before they do anything.

Everything a rank knows but the inner optimizer's state is in the outer state and the text, and that
state is in checkpoints, so a fresh one goes on. What a rank died of may happen again at once: a few
deaths in a short time are an error as before.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import structlog

from node.exchange.exchange import Exchange
from node.exchange.spot_checks import SpotCheckReady, piece_of
from node.heavy import ExchangeTime
from node.island.island import (
    Ability,
    Evaluation,
    InnerReport,
    InnerWork,
    Island,
    Progress,
    both,
    rest_of,
)
from node.island.ranks.faults import (
    LoopGoneError,
    LostPieceError,
    OriginAwayError,
    RankDiedError,
    RankHungError,
)
from node.outer_state import Vector
from protocol.wire.findings import SpotChecked
from protocol.wire.messages import Evaluated, EvaluationAsked, Report, Wrote
from protocol.wire.rounds import AUDIT_ROUNDS, LEAST_CHECKED, MOST_SOURCES, CorpusSummary, NodeId

log = structlog.get_logger()

MOST_DEATHS = 3
"""So many deaths within DEATHS_SECONDS end the node, or so many hangs without a round between them."""

DEATHS_SECONDS = 300.0


class Writer(Protocol):
    """Has the model of the global parameters write on from the run's prompts."""

    async def write(self, on_copied: Callable[[], None]) -> Wrote:
        """What it wrote, or why it did not. The parameters may move once `on_copied` was called."""


STARTING = Ability(trains=False, evaluates=False, waits_for="its ranks, which are starting")
"""Of an island whose ranks are not up."""


def paused(why: str) -> Ability:
    """Of an island whose owner lets it train nothing now."""
    return Ability(trains=False, evaluates=False, waits_for=f"its owner: {why}")


class LastingIsland:
    """An island with one call for each thing that the daemon does with it."""

    def __init__(
        self,
        island: Island,
        exchange_time: ExchangeTime | None = None,
        *,
        why_paused: Callable[[], str] = lambda: "",
        writer: Writer | None = None,
    ) -> None:
        """`why_paused` tells why the node's owner lets it train nothing now; empty where it may.

        `writer` has the model write beside the ranks; None: nothing here can.
        """
        self._island = island
        self._writer = writer
        self._why_paused = why_paused
        self._exchange_time = exchange_time or ExchangeTime()
        self._deaths: list[float] = []  # when, on the loop's clock
        self._num_hangs = 0  # since a round was trained
        self._is_halted = False
        self._is_cut_short = False
        self.is_restarting = False
        self.is_without_tokens = False  # what they are fetched from was away when ranks wanted some
        self.has_progress = False  # ranks hold something that is not in the global parameters
        self.compute_seconds = 0.0  # in inner steps, since the start
        self._done: InnerReport | None = None  # what the ranks hold of the round being trained
        self._has_restarted = False  # since they published or adopted
        self._up = asyncio.Event()
        self._is_fresh = False  # up, and has adopted nothing yet

    @property
    def ability(self) -> Ability:
        """What can be asked of the island now."""
        if not self._up.is_set():
            return STARTING
        why = self._why_paused()
        return paused(why) if why else self._island.ability

    async def start(self) -> CorpusSummary:
        """Brings the ranks up. One that dies now is an error: there is nothing yet to go on with.

        Call `come_up` then: other calls may be made before both, and do nothing.
        """
        return await self._island.start()

    def come_up(self) -> None:
        """The ranks are there, and what they train on is told. They adopt before they train."""
        self._is_fresh = self._has_restarted = True
        self._up.set()

    async def stop(self, why: str = "") -> None:
        """Ends the ranks; a loop is told `why`."""
        await self._island.stop(why)

    def halt(self) -> None:
        """Ends training for good: what is in progress after its current inner step.

        From here on ranks that die are not replaced.
        """
        self._is_halted = True
        self._island.halt()

    def cut_short(self) -> None:
        """Ends the training in progress after its current inner step, or a restart for it."""
        self._is_cut_short = True
        self._island.halt()

    async def write(self, on_copied: Callable[[], None]) -> Wrote:
        """What the global parameters write, see Writer; ranks go on meanwhile."""
        if self._writer is None:
            return Wrote(why_not="nothing on this node can have a model write")
        return await self._writer.write(on_copied)

    async def adopt(self, fragment: int | None = None, *, is_taken: bool = True) -> None:
        """Ranks take over the global parameters: of a fragment that they published, or of all.

        Of all after ranks were started again: what they hold was not trained from what was published.
        """
        if not self._up.is_set():
            return
        if self._has_restarted:
            fragment = None
        try:
            with self._exchange_time.ranks_at_work():
                await self._island.adopt(fragment, is_taken=is_taken)
        except RankDiedError as death:
            await self._restart(death)
        if fragment is None:
            self.has_progress = False
        self._has_restarted = self._is_fresh = False

    async def train_and_publish(
        self, work: InnerWork, fragment: int, on_progress: Callable[[Progress], None]
    ) -> InnerReport:
        """Trains, and publishes the fragment; the report has 0 tokens when there is nothing to contribute.

        Goes on where `train_ahead` left off. After a death the samples are trained from the first
        one again, in the time that is left.
        """
        clock = asyncio.get_running_loop().time
        began_at = clock()
        ends_at = began_at + work.max_seconds
        self._is_cut_short = False
        if self._is_fresh:
            await self.adopt()
        while True:
            report = await self._train(replace(work, max_seconds=ends_at - clock()), on_progress)
            trained_at = clock()
            if report is not None and report.tokens < 1:
                return report
            if report is not None and await self.publish(fragment):
                self._done, self._has_restarted = None, False
                self._num_hangs = 0
                return replace(report, publish_seconds=clock() - trained_at)
            if clock() >= ends_at:
                return _nothing(work, seconds=clock() - began_at)

    async def train_ahead(self, work: InnerWork, on_progress: Callable[[Progress], None]) -> None:
        """Trains for a round that is not open yet, on top of what was published for the one before.

        When a rank dies it ends, and is not begun again before the next adoption: fresh ranks have
        not what was published.
        """
        self._is_cut_short = False
        if not self._has_restarted:
            await self._train(work, on_progress)

    async def publish(self, fragment: int) -> bool:
        """Publishes a fragment; False when a rank died of it, and with it what it had trained."""
        try:
            with self._exchange_time.ranks_at_work():
                await self._island.publish(fragment)
        except RankDiedError as death:
            await self._restart(death)
            return False
        return True

    async def begin_anew(self, round: int) -> None:
        """Ranks start again without what their inner optimizers learnt after this round; then they adopt."""
        await self._up.wait()  # what they learnt is being read meanwhile
        self.has_progress, self._has_restarted = False, True
        self.forget()
        self.is_restarting = True
        try:
            await self._island.begin_anew(round)
        except RankDiedError as death:
            await self._restart(death)
        finally:
            self.is_restarting = False

    def forget(self) -> None:
        """What was trained ahead is to be trained again: the ranks are about to lose it."""
        self._done = None

    async def _train(
        self, work: InnerWork, on_progress: Callable[[Progress], None]
    ) -> InnerReport | None:
        """What the ranks now hold of the work; None when one died, and with it what they held."""
        done = self._done_of(work)
        rest = work if done is None else rest_of(work, done)
        is_held = self._is_halted or self._is_cut_short or not self._up.is_set()
        if is_held or self._why_paused() or rest.inner_steps < 1:
            return done or _nothing(work, seconds=0.0)
        tell = _from_step(done, on_progress)

        def heard(progress: Progress) -> None:
            self.is_without_tokens = False
            tell(progress)

        try:
            with self._exchange_time.ranks_at_work():
                report = await self._island.train(rest, heard)
        except RankDiedError as death:
            await self._restart(death)
            return None
        if report.inner_steps < 1:  # nobody was there to take one
            return done or report
        self.compute_seconds += report.seconds
        self.has_progress, self.is_without_tokens = True, False
        self._done = report if done is None else both(done, report)
        return self._done

    def _done_of(self, work: InnerWork) -> InnerReport | None:
        if self._done is not None and self._done.round != work.round:
            self._done = None
        return self._done

    async def keep(self, round: int, *, is_last: bool = False) -> None:
        """Lets the inner optimizer's state of this round be set aside for a restart."""
        if not self._up.is_set():
            return
        try:
            await self._island.keep(round, is_last=is_last)
        except RankDiedError as death:
            await self._restart(death)

    async def evaluate(self) -> Evaluation | None:
        """Measures the held-out loss of the global parameters; None where the island does not, or cannot."""
        if not self._up.is_set():
            return None
        while True:
            try:
                return await self._island.evaluate()
            except RankDiedError as death:
                if self._is_halted:
                    raise
                await self._restart(death)
                if isinstance(death, OriginAwayError):  # rounds would wait for this node meanwhile
                    return None

    async def losses_at(self, parameters: Vector, places: Sequence[int]) -> Sequence[float] | None:
        """Losses of single samples at other parameters; None where the island has none."""
        if not self._up.is_set():
            return None
        try:
            return await self._island.losses_at(parameters, places)
        except RankDiedError as death:
            await self._restart(death)
            return None

    async def _restart(self, death: RankDiedError) -> None:
        """New ranks that have adopted the global parameters; none when halted.

        A loop of the contributor's own comes back by itself, however often: it is only waited for where
        it is needed. Raises what ends the node.
        """
        self.has_progress, self._done, self._has_restarted = False, None, True
        if isinstance(death, LoopGoneError):
            return
        self.is_restarting = True
        try:
            while not self._is_halted:
                self._count(death)
                self.is_without_tokens = isinstance(death, OriginAwayError)
                if self.is_without_tokens:
                    log.warning(
                        "tokens cannot be fetched now: the ranks are started again, and try",
                        why=death.what,
                        next_step=death.next_step,
                    )
                else:
                    log.warning("rank died: starting the ranks again", why=death.what)
                await self._island.stop()
                try:
                    await self._island.start()
                    await self._island.adopt()
                except RankDiedError as next_death:
                    death = next_death
                else:
                    log.info("ranks started again")
                    return
        finally:
            self.is_restarting = False

    def _count(self, death: RankDiedError) -> None:
        # node.island.data.supply counts the former for each piece; the latter are of no fault here.
        if isinstance(death, LostPieceError | OriginAwayError):
            return
        now = asyncio.get_running_loop().time()
        self._deaths = [at for at in self._deaths if now - at < DEATHS_SECONDS] + [now]
        # Hangs may be further apart than that, each as long as it took to be noticed.
        self._num_hangs += isinstance(death, RankHungError)
        if max(len(self._deaths), self._num_hangs) >= MOST_DEATHS:
            raise death


def _from_step(
    done: InnerReport | None, on_progress: Callable[[Progress], None]
) -> Callable[[Progress], None]:
    """Counts inner steps from the round's first."""
    before = 0 if done is None else done.inner_steps
    return lambda progress: on_progress(replace(progress, inner_step=before + progress.inner_step))


def _nothing(work: InnerWork, *, seconds: float) -> InnerReport:
    return InnerReport(
        round=work.round, inner_steps=0, samples=0, tokens=0, loss=0.0, seconds=seconds
    )


# What a node measures for all: held-out losses, what members have learned, texts from the run's prompts.
#
# Losses need the ranks, which train nothing meanwhile: whoever asks here has paused them. A model may write
# beside all that.


class Measuring:
    """What is measured is reported; `is_last` says whether a round is the run's last."""

    def __init__(
        self,
        island: LastingIsland,
        exchange: Exchange,
        report: Callable[[int, Report], None],
        *,
        batch: int,
        has_private_data: bool,
        is_last: Callable[[int], bool],
    ) -> None:
        self._island = island
        self._report = report
        self._has_private_data = has_private_data
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
                # What a holder of private data calls their sources is nobody's business.
                by_source=() if self._has_private_data else evaluation.by_source[:MOST_SOURCES],
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
