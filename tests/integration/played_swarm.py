"""A swarm that is played: real coordinator, real TLS, and nodes that take their part in rounds in seconds.

What they train is made up; each may be late, fall silent, or send contributions that are left out.
"""

import asyncio
import contextlib
import math
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from blake3 import blake3

from coordinator.config import Home
from protocol.v1 import round_pb2, session_pb2
from tests.integration.coordinator_scene import START, FakeNode, invite_from, joined

WHOLE = 1 << 16
BEAT_SECONDS = 0.5


@dataclass(kw_only=True)
class Played:
    """What is known to all nodes of one play."""

    train_seconds: float
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    trained: dict[int, set[str]] = field(default_factory=dict)
    reduced: dict[int, int] = field(default_factory=dict)
    base: dict[int, bytes] = field(default_factory=dict)  # the state that each round builds on
    news: asyncio.Condition = field(default_factory=asyncio.Condition)
    writes: str = ""  # of the model, after the first prompt
    left_out: set[str] = field(default_factory=set)  # ids of nodes whose contributions are refused


class PlayedNode:
    """Takes part until it is stopped."""

    def __init__(self, node: FakeNode, play: Played) -> None:
        self.node, self.play = node, play
        self.pace = 1.0  # seconds that it takes, in usual ones
        self._round, self._digest = 0, START
        self._doing, self._waits, self._step = "waiting", "", 0
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        if self.play.base:
            newest = max(self.play.base)
            self._round, self._digest = newest - 1, self.play.base[newest]
        await self.node.attach(outer_round=self._round, outer_digest=self._digest)
        self.node.subscribe()
        self._tasks = [asyncio.create_task(each) for each in (self._beat(), self._follow())]

    async def die(self) -> None:
        """Falls silent at once."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.node.close()

    async def _beat(self) -> None:
        while True:
            loss = 1.4 + 4 * math.exp(-self._round / 6)
            await self.node.session.Heartbeat(
                session_pb2.HeartbeatRequest(
                    session_id=self.node.session_id,
                    outer_round=self._round,
                    outer_digest=self._digest,
                    activity=self._doing,
                    waiting_for=self._waits,
                    inner_step=self._step,
                    loss=loss + 0.02 * self.play.rng.random(),
                    tokens_per_second=12_000 / self.pace,
                    mesh="1 rank",
                    utilisation=session_pb2.Utilisation(
                        round=self._round,
                        compute_share=0.71,
                        exchange_share=0.12,
                        publish_share=0.01,
                        adopt_share=0.02,
                        waiting_share=0.14,
                        peak_memory_bytes=2_100_000_000,
                    ),
                    wire=[self._wire(self._round)],
                    link_rates=session_pb2.LinkRates(
                        up_bytes_per_second=2.5e6, down_bytes_per_second=9e6
                    ),
                )
            )
            await asyncio.sleep(BEAT_SECONDS)

    def _wire(self, rounds: int) -> session_pb2.WireCount:
        sent = 180_000 * (rounds + 1)
        return session_pb2.WireCount(kind="result", sent_bytes=sent, received_bytes=sent)

    async def _follow(self) -> None:
        plan: round_pb2.Plan | None = None
        part: asyncio.Task[None] | None = None
        async for event in self.node.events:
            kind = event.WhichOneof("event")
            if kind == "plan":
                plan = event.plan
                self.play.base[plan.round] = plan.base_digest
                if any(a.node_id == self.node.node_id for a in plan.assignments):
                    part = asyncio.create_task(self._take_part(plan))
                    self._tasks.append(part)
            elif kind == "commit":
                if part is not None and plan is not None and plan.round <= event.commit.round:
                    part.cancel()
                await self._apply(event.commit)
            elif kind == "evaluate":
                loss = 1.5 + 4 * math.exp(-self._round / 6)
                evaluated = session_pb2.EvaluatedReport(held_out_loss=loss, tokens=64)
                await self.node.report(event.evaluate.round, evaluated=evaluated)
                if event.evaluate.writes:
                    wrote = session_pb2.WroteReport(texts=[self.play.writes, "and a second text"])
                    await self.node.report(event.evaluate.round, wrote=wrote)
            elif kind == "finished":
                self._doing, self._waits = "finished", ""

    async def _take_part(self, plan: round_pb2.Plan) -> None:
        play, seconds = self.play, self.play.train_seconds * self.pace
        asked = next(a for a in plan.assignments if a.node_id == self.node.node_id)
        self._doing, self._waits = "training", ""
        for step in range(4):
            self._step = asked.inner_steps * (step + 1) // 4
            await asyncio.sleep(seconds / 4 * (0.9 + 0.2 * play.rng.random()))
        trained = session_pb2.TrainedReport(
            inner_steps=asked.inner_steps,
            samples=8 * asked.inner_steps,
            tokens=1000,
            loss=1.4 + 4 * math.exp(-plan.round / 6),
            seconds=seconds,
        )
        await self.node.report(plan.round, trained=trained)
        async with play.news:
            play.trained.setdefault(plan.round, set()).add(self.node.node_id)
            play.news.notify_all()
        self._doing, self._waits = "contributing", "contributions of the others"
        everybody = {a.node_id for a in plan.assignments}
        with contextlib.suppress(TimeoutError):  # then without those that are late
            async with asyncio.timeout(3 * play.train_seconds), play.news:
                await play.news.wait_for(lambda: everybody <= play.trained[plan.round])
        await asyncio.sleep(0.15 * play.train_seconds)
        await self._reduce(plan, play.trained[plan.round] & everybody)
        async with play.news:
            await play.news.wait_for(lambda: play.reduced.get(plan.round, 0) >= len(plan.slices))
        await asyncio.sleep(0.1 * play.train_seconds * (1 + play.rng.random()))
        await self.node.held(plan)
        self._doing, self._waits = "waiting", "the commit"

    async def _reduce(self, plan: round_pb2.Plan, present: set[str]) -> None:
        mine = [p for p in plan.slices if p.reducer_id == self.node.node_id]
        if not mine:
            return
        refused = self.play.left_out
        only = [a for a in plan.assignments if a.node_id in present]
        told = round_pb2.Plan()
        told.CopyFrom(plan)
        del told.assignments[:]
        told.assignments.extend(only)
        await self.node.reduced(told, cut={a.node_id: WHOLE for a in only if a.node_id in refused})
        async with self.play.news:
            self.play.reduced[plan.round] = self.play.reduced.get(plan.round, 0) + len(mine)
            self.play.news.notify_all()

    async def _apply(self, commit: round_pb2.Commit) -> None:
        self._doing, self._waits = "applying", ""
        await asyncio.sleep(0.1 * self.play.train_seconds)
        self._round = commit.round
        if any(part.digest for part in commit.slices):
            self._digest = blake3(f"state {commit.round}".encode()).digest()
        applied = session_pb2.AppliedReport(
            outer_digest=self._digest, wire=[self._wire(commit.round)]
        )
        await self.node.report(commit.round, applied=applied)
        self._doing = "waiting"


@asynccontextmanager
async def played(
    home: Home, names: Sequence[str], play: Played
) -> AsyncIterator[dict[str, PlayedNode]]:
    """Nodes of these names, attached and taking part."""
    invite, _ = await invite_from(home, uses=len(names) + 4)
    nodes = {name: PlayedNode(await joined(invite, name), play) for name in names}
    try:
        for node in nodes.values():
            await node.start()
        yield nodes
    finally:
        for node in nodes.values():
            with contextlib.suppress(Exception):
                await node.die()
