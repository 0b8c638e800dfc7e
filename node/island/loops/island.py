"""The daemon's side of a training loop of the contributor's own: an island whose ranks are its program.

The loop trains, publishes and adopts when it is told to, and comes and goes as its owner likes. While
none is here the node goes on: it applies commits and supplies states, and no plan counts on it.
What a loop had trained and not published when it ended is lost, and the log says how much.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from node.island.data.places import DataPlaces
from node.island.island import Ability, Evaluation, InnerReport, InnerWork, Island, Progress
from node.island.loops.door import SOCKET_FILE, Door, LeasedSamples, Loop, Visitor, refusal_of
from node.island.loops.messages import (
    Done,
    Evaluated,
    Hello,
    Leaving,
    Ready,
    Refuses,
    Samples,
    Stepped,
    Trained,
    Word,
    no_samples,
    refused,
    train,
    welcome,
)
from node.island.ranks.faults import LoopGoneError, TrainingDivergedError
from node.island.ranks.launcher import HangWatch
from node.outer_state import SharedNames
from protocol.errors import AtollError
from protocol.run.models import Layout
from protocol.run.run_spec import RunSpec
from protocol.wire.rounds import CorpusSummary

log = structlog.get_logger()

RETURN_SECONDS = 20.0
"""How long a round waits here for a loop that has just ended: starting one again takes seconds."""

HELLO_SECONDS = 20.0

Answer = Done | Trained | Evaluated


@dataclass(slots=True, kw_only=True)
class _Pending:
    """The order that all ranks are carrying out."""

    number: int
    kind: str
    future: asyncio.Future[list[Answer]]
    work: InnerWork | None = None
    on_progress: Callable[[Progress], None] | None = None
    answers: dict[int, Answer] = field(default_factory=dict)
    told: tuple[float, int] = (0.0, 0)  # when rank 0 told of steps last, and the tokens by then


class LoopIsland(Island):
    """A training loop of the contributor's own. Checkpoints, and its optimizer, are its own business."""

    def __init__(
        self,
        *,
        spec: RunSpec,
        layout: Layout,
        names: SharedNames,
        home: Path,
        data: DataPlaces,
        hang_seconds: float = 0.0,
        return_seconds: float = RETURN_SECONDS,
    ) -> None:
        """`home` is the node's folder; `data` are what `swarm.samples()` numbers."""
        self._spec = spec
        self._layout = layout
        self._samples = LeasedSamples(spec, data)
        self._return_seconds = return_seconds
        self._door = Door(home / SOCKET_FILE, names, self._let_in)
        self._watch = HangWatch(patience_seconds=hang_seconds, on_hang=self._on_hang)
        self._loop: Loop | None = None
        self._pending: _Pending | None = None
        self._number = 0
        self._gone: LoopGoneError | None = None  # to be raised by what is asked next
        self._is_back_soon = False
        self._waiting: asyncio.Future[None] | None = None
        self._telling: set[asyncio.Task[None]] = set()
        self._has_told_counting = False

    @property
    def ability(self) -> Ability:
        """See Island. A loop trains once all its ranks are here."""
        here = self._whole
        if here is None:
            return Ability(trains=False, evaluates=False)
        return Ability(
            evaluates=here.evaluates,
            software=here.software,
            evaluates_by=here.evaluates_by,
        )

    async def start(self) -> CorpusSummary:
        """See Island. Does not wait for a loop: the node can be of use without."""
        await asyncio.to_thread(self._samples.look)
        self._door.open()
        log.info(
            "a training loop may come in: atoll.join(model, optimizer)", at=str(self._door.path)
        )
        return self._samples.summary

    async def stop(self, why: str = "") -> None:
        """See Island. The loop is told that the node ends, and why."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.say({"kind": "goodbye", "is_over": True, "why": why or "the node has stopped"})
            for visitor in loop.visitors.values():
                visitor.close()
        if self._pending is not None and not self._pending.future.done():
            self._pending.future.set_exception(LoopGoneError("the island was stopped"))
        self._gone = None
        await self._door.close()

    async def adopt(self, fragment: int | None = None, *, is_taken: bool = True) -> None:
        """See Island. Without a loop there is nothing to do: one that comes adopts all."""
        self._raise_if_gone()
        loop = self._whole
        if loop is None:
            return
        if loop.is_fresh:
            fragment = None
        await self._carried_out(loop, {"kind": "adopt", "fragment": fragment, "is_taken": is_taken})
        loop.is_fresh = False

    async def train(self, work: InnerWork, on_progress: Callable[[Progress], None]) -> InnerReport:
        """See Island. Without a loop, and when none comes soon, the report has no inner steps."""
        self._raise_if_gone()
        # For work ahead global parameters may change meanwhile: only what has adopted them trains.
        is_ahead = work.max_seconds == float("inf")
        if self._whole is None and not is_ahead and self._is_back_soon:
            await self._wait_for_loop(min(work.max_seconds, self._return_seconds))
        loop = self._whole
        if loop is None or (is_ahead and loop.is_fresh):
            return InnerReport(
                round=work.round, inner_steps=0, samples=0, tokens=0, loss=0.0, seconds=0.0
            )
        if loop.is_fresh:
            await self.adopt()
        try:
            answers = await self._carried_out(
                loop, train(self._spec, work), work=work, on_progress=on_progress
            )
        except asyncio.CancelledError:
            self._halt_rank_0(loop)
            raise
        return self._report_of(work, [a for a in answers if isinstance(a, Trained)])

    def halt(self) -> None:
        """See Island."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
        if self._pending is not None and self._pending.work is not None and self._loop is not None:
            self._halt_rank_0(self._loop)

    async def publish(self, fragment: int) -> None:
        """See Island."""
        self._raise_if_gone()
        loop = self._whole
        if loop is None or loop.is_fresh:
            raise LoopGoneError("there is no training loop to publish what it trained")
        await self._carried_out(loop, {"kind": "publish", "fragment": fragment})

    async def evaluate(self) -> Evaluation | None:
        """See Island. By the loop's own function, where it gave one."""
        self._raise_if_gone()
        loop = self._whole
        if loop is None or not loop.evaluates:
            return None
        answers = await self._carried_out(loop, {"kind": "evaluate"})
        first = answers[0]
        assert isinstance(first, Evaluated)
        return Evaluation(loss=first.loss, tokens=first.tokens, metric=first.metric)

    # The loop's comings and goings

    @property
    def _whole(self) -> Loop | None:
        """The loop, if all its ranks are here and stay."""
        loop = self._loop
        return loop if loop is not None and loop.is_whole and not loop.is_done else None

    async def _let_in(self, visitor: Visitor) -> None:
        """A rank from its hello to its end."""
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                hello = await visitor.hear()
            if not isinstance(hello, Hello) or not self._is_welcome(hello, visitor):
                return
        except (TimeoutError, ValueError) as error:
            log.warning(
                "what came in is no training loop", process=visitor.process_id, why=str(error)
            )
            return
        loop = self._loop
        if loop is None:
            loop = self._loop = Loop(
                group=hello.group, world_size=hello.world_size, evaluates=hello.evaluates
            )
        loop.visitors[hello.rank] = visitor
        why = f"its rank {hello.rank}, process {visitor.process_id}, is gone"
        try:
            visitor.say(
                welcome(
                    self._spec,
                    self._layout,
                    num_samples=self._samples.summary.num_samples,
                )
            )
            while (word := await visitor.hear()) is not None:
                if isinstance(word, Leaving):
                    why = f"it has left: {word.why}"
                    loop.is_done = word.is_done
                    break
                if isinstance(word, Refuses):
                    why = f"its model is not the run's: {word.why}"
                    break
                self._take(loop, hello.rank, word)
        except ValueError as error:
            why = f"its rank {hello.rank} said what makes no sense: {error}"
            # It would say the same again: it ends, and nobody waits for it to come back.
            loop.say(
                refused(
                    f"the node cannot read what rank {hello.rank} of this loop said: {error}",
                    "install the same version of Atoll in both environments, and say to the node nothing but "
                    "what atoll.join and its swarm say",
                )
            )
            loop.is_done = True
        finally:
            if self._loop is loop:
                self._lose(why)

    def _is_welcome(self, hello: Hello, visitor: Visitor) -> bool:
        """Refuses in a sentence whoever is not."""
        refusal = refusal_of(hello, visitor.process_id, self._loop)
        if refusal is None:
            return True
        what, next_step = refusal
        log.warning("a training loop was refused", process=visitor.process_id, why=what)
        visitor.say(refused(what, next_step))
        return False

    def _take(self, loop: Loop, rank: int, word: Word) -> None:
        if self._loop is not loop:
            return
        self._watch.heard()
        match word:
            case Ready():
                loop.software, loop.evaluates_by = word.software, word.evaluates_by
                self._is_ready(loop, rank)
            case Stepped():
                self._stepped(loop, word)
            case Samples():
                self._tell_samples_soon(loop.visitors[rank], word)
            case Done() | Trained() | Evaluated():
                self._answered(loop, rank, word)
            case _:
                raise ValueError(f"{word.kind} is not said here")

    def _is_ready(self, loop: Loop, rank: int) -> None:
        loop.ready.add(rank)
        if not loop.is_whole:
            return
        self._is_back_soon = True
        self._has_told_counting = False
        log.info(
            "a training loop is here",
            ranks=loop.world_size,
            process=loop.visitors[0].process_id,
            evaluates=loop.evaluates,
        )
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _lose(self, why: str) -> None:
        """The loop is no more: its other ranks begin anew, as does what was asked of it."""
        loop, self._loop = self._loop, None
        assert loop is not None
        loop.say({"kind": "goodbye", "is_over": False, "why": why})
        for visitor in loop.visitors.values():
            visitor.close()
        if not loop.is_whole:
            log.info("a training loop did not come in", why=why)
            return
        self._is_back_soon = not loop.is_done
        lost = loop.unpublished_steps
        log.warning("the training loop is gone", why=why, inner_steps_lost=lost)
        self._fail(LoopGoneError(f"the training loop is gone: {why}"))

    def _fail(self, error: AtollError) -> None:
        if self._pending is not None and not self._pending.future.done():
            self._pending.future.set_exception(error)
        elif isinstance(error, LoopGoneError):
            self._gone = error

    def _raise_if_gone(self) -> None:
        gone, self._gone = self._gone, None
        if gone is not None:
            raise gone

    async def _wait_for_loop(self, seconds: float) -> None:
        log.info("waiting for the training loop", at_most_seconds=round(seconds))
        self._waiting = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait((self._waiting,), timeout=max(0.0, seconds))
        finally:
            self._waiting.cancel()
            self._waiting = None
        self._is_back_soon = self._whole is not None

    def _on_hang(self, why: str) -> None:
        if self._loop is not None:
            self._lose(f"it {why}; if its steps take that long, raise hang_seconds in node.toml")

    # Orders and their answers

    async def _carried_out(
        self,
        loop: Loop,
        order: dict[str, Any],
        *,
        work: InnerWork | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> list[Answer]:
        """Gives the order to all ranks; returns their answers in the order of ranks."""
        if self._pending is not None:
            raise RuntimeError(f"{order} was asked for before the last order was answered")
        running = asyncio.get_running_loop()
        self._number += 1
        self._pending = _Pending(
            number=self._number,
            kind=order["kind"],
            future=running.create_future(),
            work=work,
            on_progress=on_progress,
            told=(running.time(), 0),
        )
        loop.say({**order, "number": self._number})
        try:
            with self._watch.over(order["kind"]):
                return await self._pending.future
        finally:
            self._pending = None

    @staticmethod
    def _halt_rank_0(loop: Loop) -> None:
        loop.visitors[0].say({"kind": "halt"})

    def _answered(self, loop: Loop, rank: int, answer: Answer) -> None:
        pending = self._pending
        if pending is None or answer.number != pending.number or pending.future.done():
            return  # the order was cancelled
        pending.answers[rank] = answer
        if isinstance(answer, Trained) and not answer.is_finite:
            assert pending.work is not None
            self._fail(_diverged(pending.work, answer.steps))
        elif len(pending.answers) == loop.world_size:
            # Now, for the loop may be gone before who asked is told: what was published is safe.
            if isinstance(answer, Trained):
                loop.unpublished_steps = answer.steps
            elif pending.kind == "publish":
                loop.unpublished_steps = 0
            pending.future.set_result([pending.answers[r] for r in range(loop.world_size)])

    def _stepped(self, loop: Loop, word: Stepped) -> None:
        pending = self._pending
        if pending is None or pending.work is None or word.number != pending.number:
            return
        loop.unpublished_steps = word.steps
        if not word.is_finite:
            self._fail(_diverged(pending.work, word.steps))
        elif pending.on_progress is not None:
            now = asyncio.get_running_loop().time()
            told_at, tokens = pending.told
            pending.told = (now, word.tokens)
            speed = (word.tokens - tokens) * loop.world_size / max(now - told_at, 1e-6)
            pending.on_progress(
                Progress(
                    round=pending.work.round,
                    inner_step=word.steps,
                    loss=word.loss or 0.0,
                    tokens_per_second=speed,
                )
            )

    def _tell_samples_soon(self, visitor: Visitor, word: Samples) -> None:
        task = asyncio.ensure_future(self._tell_samples(visitor, word))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _tell_samples(self, visitor: Visitor, word: Samples) -> None:
        pending = self._pending
        if pending is None or pending.work is None or word.number != pending.number:
            visitor.say(no_samples("the order to train is over"))
            return
        # In a thread: the data may be on a slow disk, or have to be fetched.
        told = await asyncio.to_thread(
            self._samples.told, pending.work, word.first_step, wants_tokens=word.wants_tokens
        )
        visitor.say(told)

    def _report_of(self, work: InnerWork, answers: list[Trained]) -> InnerReport:
        """What all ranks trained; of a step, no more tokens count than the plan leased for it.

        Its samples are used up, whatever the loop trained instead of them.
        """
        steps = answers[0].steps
        trained = sum(answer.tokens for answer in answers)
        counted = min(trained, steps * self._spec.tokens_per_inner_step)
        is_leased = all(answer.is_leased for answer in answers)
        if not (is_leased or self._has_told_counting):
            self._has_told_counting = True
            log.info(
                "the loop brings data of its own: its tokens weigh, and the leased samples are used up",
                tokens_per_step=trained // max(1, steps),
                counted_per_step=counted // max(1, steps),
            )
        losses = [answer.loss for answer in answers if answer.loss is not None]
        return InnerReport(
            round=work.round,
            inner_steps=steps,
            samples=steps * self._spec.inner.batch,
            tokens=counted,
            loss=sum(losses) / len(losses) if losses else 0.0,
            seconds=max(answer.seconds for answer in answers),
        )


def _diverged(work: InnerWork, steps: int) -> TrainingDivergedError:
    return TrainingDivergedError(
        f"round {work.round}: the training loop's loss is no longer finite at inner step {steps}",
        next_step="lower the learning rate of its optimizer, or look at its data",
    )
