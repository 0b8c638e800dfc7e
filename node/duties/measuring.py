"""What a node measures for all: held-out losses, what members have learned, texts from the run's prompts.

Losses need the ranks, which train nothing meanwhile: whoever asks here has paused them. A model may write
beside all that.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import structlog

from node.duties.lasting_island import LastingIsland
from node.exchange.auditing import SpotCheckReady, piece_of
from node.exchange.exchange import Exchange
from protocol.wire.findings import SpotChecked
from protocol.wire.messages import Evaluated, EvaluationAsked, Report, Wrote
from protocol.wire.rounds import AUDIT_ROUNDS, LEAST_CHECKED, NodeId

log = structlog.get_logger()


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
