"""An island whose tokens may have to come from peers: it is asked to train what is here.

The ranks know nothing of it. A round's work is cut where the next piece is still on its way; where
nobody gives that piece, the round ends for this node with what it has trained, and no plan counts on
the node until the piece comes.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog

from node.heavy import cancelled
from node.island.data.manifest import Piece
from node.island.data.supply import Needs, TokenSource, TokenSupply
from node.island.island import Ability, Evaluation, InnerReport, InnerWork, Island, Progress, both
from node.island.ranks.faults import LostPieceError
from node.outer_state import Vector
from protocol.run.run_spec import RunSpec
from protocol.wire.rounds import CorpusSummary, Digest

log = structlog.get_logger()

EVALUATE_SECONDS = 60.0
"""How long an evaluation waits for held-out pieces, the first time."""


class SuppliedIsland:
    """An island and its supply of tokens; implements Island."""

    def __init__(
        self, *, island: Island, supply: TokenSupply, spec: RunSpec, compiles: bool
    ) -> None:
        """`compiles` says that ranks read samples as soon as they are started."""
        self._island = island
        self._supply = supply
        self._spec = spec
        self._compiles = compiles
        self._is_up = False
        self._is_fresh = False  # the ranks have adopted nothing yet
        self._halted = asyncio.Event()

    @property
    def ability(self) -> Ability:
        """See Island. Without tokens to train on no plan counts on it."""
        if not self._is_up:
            return Ability(trains=False, evaluates=False, waits_for="the run's tokens")
        able = self._island.ability
        if self._supply.lacks:
            return replace(able, trains=False, waits_for="the run's tokens")
        return able

    @property
    def waiting_for(self) -> str:
        """What of the tokens is to come, for people."""
        return self._supply.waiting_for

    async def start(self) -> CorpusSummary:
        """See Island. Without a manifest there is nothing to start yet: `supplied_by` does it then."""
        while self._is_up or (
            await self._supply.has_manifest() and not await self._missing_at_start()
        ):
            if (summary := await self._started()) is not None:
                self._is_up = True
                return summary
        assert self._spec.data.digest is not None
        digest = Digest(bytes.fromhex(self._spec.data.digest))
        return CorpusSummary(digest=digest, num_samples=0, num_bytes=0)

    async def _started(self) -> CorpusSummary | None:
        """Starts the ranks; None where they met a piece that is to come again."""
        if self._is_up:  # they were, and their first pieces may be lost since
            await self._first_pieces()
        try:
            return await self._island.start()
        except LostPieceError as lost:
            await self._island.stop()
            await self._supply.lose(lost)
            return None

    async def supplied_by(
        self, source: TokenSource, on_up: Callable[[CorpusSummary], None]
    ) -> None:
        """Has tokens come until it is cancelled; starts the ranks if that had to wait for them."""
        await self._supply.fetch_manifest(source)
        tasks = [
            asyncio.ensure_future(work)
            for work in (
                self._start_late(on_up),
                self._supply.run(source),  # never ends by itself
                self._supply.fetch_tokenizer(source),
            )
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            await cancelled(tasks)

    async def _start_late(self, on_up: Callable[[CorpusSummary], None]) -> None:
        if self._is_up:
            return
        while True:
            await self._first_pieces()
            if (summary := await self._started()) is not None:
                break
        self._is_up = self._is_fresh = True
        log.info("the run's tokens are here as far as they are needed: ranks started")
        on_up(summary)

    async def _first_pieces(self) -> None:
        """Waits for what ranks read as soon as they are started."""
        while missing := await self._missing_at_start():
            self._supply.changed.clear()
            self._supply.want(missing)
            await self._supply.changed.wait()

    async def _missing_at_start(self) -> list[Piece]:
        if not self._compiles:
            return []
        return await self._supply.missing(await self._supply.first_needs())

    async def stop(self, why: str = "") -> None:
        """See Island."""
        await self._island.stop(why)

    async def adopt(self, fragment: int | None = None, *, is_taken: bool = True) -> None:
        """See Island. Ranks that were started late adopt all."""
        if not self._is_up:
            return
        await self._island.adopt(None if self._is_fresh else fragment, is_taken=is_taken)
        self._is_fresh = False

    async def train(self, work: InnerWork, on_progress: Callable[[Progress], None]) -> InnerReport:
        """See Island. The report has as many inner steps as there were tokens for."""
        self._halted.clear()
        clock = asyncio.get_running_loop().time
        began_at = clock()
        ends_at = began_at + work.max_seconds
        is_ahead = work.max_seconds == float("inf")
        done = InnerReport(
            round=work.round, inner_steps=0, samples=0, tokens=0, loss=0.0, seconds=0.0
        )
        if not self._is_up or (is_ahead and self._is_fresh):
            return done
        if self._is_fresh:
            await self.adopt()
        if self._supply.has_all:
            return await self._train(work, on_progress)
        batch = self._spec.inner.batch
        num_steps = min(work.inner_steps, work.num_samples // batch)
        needs: Needs = ()
        while done.inner_steps < num_steps and not self._halted.is_set() and clock() < ends_at:
            first = done.inner_steps
            needs = needs or await self._supply.needs_of(work, first)
            num_ready = await self._ready(needs, ends_at)
            if num_ready == 0 or self._halted.is_set():
                break
            part = replace(
                work,
                inner_steps=num_ready,
                first_sample=work.first_sample + first * batch,
                num_samples=num_ready * batch,
                steps_before=work.steps_before + first,
                max_seconds=ends_at - clock(),
            )
            report = await self._train(part, _from_step(first, on_progress))
            if report.inner_steps:
                done = both(done, report) if done.inner_steps else report
            if report.inner_steps < num_ready:
                break
            needs = needs[num_ready:]
        return replace(done, seconds=clock() - began_at)

    async def _train(self, work: InnerWork, on_progress: Callable[[Progress], None]) -> InnerReport:
        """Raises LostPieceError, and the piece comes again once ranks are asked for what needs it."""
        try:
            return await self._island.train(work, on_progress)
        except LostPieceError as lost:
            await self._supply.lose(lost)
            raise

    async def _ready(self, needs: Needs, ends_at: float) -> int:
        """Steps that can be taken now; waits for the first, and returns 0 where that is in vain."""
        while True:
            self._supply.changed.clear()
            num_ready = await self._supply.arrange(needs)
            if num_ready or self._supply.lacks_any(needs[0]):
                return num_ready
            if not await self._changed(ends_at):
                return 0

    async def _changed(self, until: float) -> bool:
        """Waits until something has come, or nobody gives it; False when halted, or at that time."""
        waits = [
            asyncio.ensure_future(self._supply.changed.wait()),
            asyncio.ensure_future(self._halted.wait()),
        ]
        left = until - asyncio.get_running_loop().time()
        try:
            await asyncio.wait(
                waits,
                timeout=None if left == float("inf") else max(0.0, left),
                return_when=asyncio.FIRST_COMPLETED,
            )
            return waits[0].done() and not waits[1].done()
        finally:
            for wait in waits:
                wait.cancel()

    def halt(self) -> None:
        """See Island."""
        self._halted.set()
        self._island.halt()

    async def publish(self, fragment: int) -> None:
        """See Island."""
        await self._island.publish(fragment)

    async def keep(self, round: int, *, is_last: bool = False) -> None:
        """See Island."""
        await self._island.keep(round, is_last=is_last)

    async def begin_anew(self, round: int) -> None:
        """See Island."""
        if self._is_up:
            await self._island.begin_anew(round)

    async def losses_at(self, parameters: Vector, places: Sequence[int]) -> None:
        """See Island. Not where samples must come first from peers: another member is drawn next time."""
        return

    async def evaluate(self) -> Evaluation | None:
        """See Island. None where the held-out tokens do not come in time. Raises LostPieceError."""
        if not self._is_up:
            return None
        self._halted.clear()
        until = asyncio.get_running_loop().time() + EVALUATE_SECONDS
        needs = await self._supply.held_out_needs()
        wanted = self._supply.wanted
        while missing := await self._supply.missing(needs):
            self._supply.changed.clear()
            self._supply.want([*missing, *wanted])
            if self._supply.lacks_any(missing) or not await self._changed(until):
                self._supply.want(wanted)
                return None
        try:
            return await self._island.evaluate()
        except LostPieceError as lost:
            await self._supply.lose(lost)
            raise


def _from_step(first: int, on_progress: Callable[[Progress], None]) -> Callable[[Progress], None]:
    """Counts inner steps from the work's first."""
    return lambda progress: on_progress(replace(progress, inner_step=first + progress.inner_step))
