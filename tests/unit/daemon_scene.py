"""A daemon with everything around it faked but its exchange; the test is its coordinator."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Self

from lab.simulation.memory_transport import MemoryNetwork, MemoryTransport
from node.daemon import Counterparts, Daemon, Holdings, NodeFacts
from node.disk.history import History
from node.duties.lasting_island import Writer
from node.exchange.outer import Outer
from node.exchange.state.on_disk import StateOnDisk
from node.heavy import Heavy, Meters, in_place
from node.island.island import ALL, Ability, Evaluation, InnerReport, InnerWork, Island, Progress
from node.island.ranks.faults import LoopGoneError, OriginAwayError, RankDiedError
from node.link.calls import Attachment, CoordinatorLink
from protocol.errors import UnavailableError
from protocol.run.models import Layout
from protocol.run.run_spec import RunSpec
from protocol.trust.rulings import Address
from protocol.wire.messages import Message, Reduced, Report, RoundOpened
from protocol.wire.payload import WireCounts
from protocol.wire.rounds import Commit, CorpusSummary, Digest, Plan, SliceOutcome
from protocol.wire.vitals import Vitals
from tests.unit.exchange_scene import LAYOUT, TOKENS, A, outer_of, plan_for

START_SECONDS = 1.0
TRAIN_SECONDS = 5.0
DEATH_SECONDS = 2.0
"""How long a rank trains before it dies."""


class FakeIsland(Island):
    """An island whose training takes five seconds and moves every parameter by one."""

    def __init__(self, outer: Any) -> None:
        self.outer = outer
        self.calls: list[str] = []
        self.ended = ""  # why it was stopped
        self.works: list[InnerWork] = []
        self.kept: list[tuple[int, bool]] = []  # rounds, and whether it was for the last time
        self.evaluation_seconds = 0.0
        self.start_seconds = START_SECONDS
        self.fault: Exception | None = None
        self.dies_in: list[str] = []  # calls in which a rank dies, each once
        self.is_loop = False  # what dies then is a loop, of which another comes by itself
        self.is_away = False  # what ranks die of is where their tokens are fetched from
        self.able = ALL
        self.is_running = False
        self._is_broken = False
        self._halted = asyncio.Event()

    @property
    def ability(self) -> Ability:
        return self.able

    async def start(self) -> CorpusSummary:
        assert not self.is_running
        self._is_broken = False
        self.is_running = True
        await asyncio.sleep(self.start_seconds)
        if self.fault is not None:
            raise self.fault
        self._live("start")
        return CorpusSummary(digest=Digest(bytes(32)), num_samples=1, num_bytes=1)

    async def stop(self, why: str = "") -> None:
        self.is_running, self.ended = False, why

    async def adopt(self, fragment: int | None = None, *, is_taken: bool = True) -> None:
        self._live("adopt")

    async def train(self, work: InnerWork, on_progress: Callable[[Progress], None]) -> InnerReport:
        self.works.append(work)
        self._halted.clear()
        if "train" in self.dies_in:
            await asyncio.sleep(DEATH_SECONDS)
        self._live("train")
        tokens = TOKENS
        try:
            async with asyncio.timeout(min(TRAIN_SECONDS, work.max_seconds)):
                await self._halted.wait()
            tokens //= 2
        except TimeoutError:
            pass
        return InnerReport(
            round=work.round,
            inner_steps=1,
            samples=tokens,
            tokens=tokens,
            loss=1.0,
            seconds=5.0,
        )

    def halt(self) -> None:
        self._halted.set()

    async def publish(self, fragment: int) -> None:
        self._live("publish")
        self.outer.owing._published[:] = self.outer._parameters - 1

    async def begin_anew(self, round: int) -> None:
        self.calls.append(f"begin anew after {round}")

    async def keep(self, round: int, *, is_last: bool = False) -> None:
        self._die_when_told("keep")
        self.kept.append((round, is_last))

    async def evaluate(self) -> Evaluation:
        self._live("evaluate")
        await asyncio.sleep(self.evaluation_seconds)
        return Evaluation(loss=1.0, tokens=1)

    def _live(self, call: str) -> None:
        """Notes the call, or dies of it; a broken island fails every call, as ranks do."""
        self._die_when_told(call)
        self.calls.append(call)

    def _die_when_told(self, call: str) -> None:
        if call in self.dies_in:
            self.dies_in.remove(call)
            if self.is_loop:
                raise LoopGoneError(f"the loop is gone in {call}")
            self._is_broken = True
        if self._is_broken and self.is_away:
            raise OriginAwayError(f"s3://bucket cannot be fetched in {call}")
        if self._is_broken:
            raise RankDiedError(f"rank 0 on cpu was ended by SIGKILL in {call}")


class FakeLink(CoordinatorLink):
    """The coordinator: the test says its events, and it notes what the node reports."""

    renew = None  # it asks for no certificates
    observers = ()  # nor does it see from where datagrams come
    outside = ()

    def __init__(self) -> None:
        self.committed_round = 0
        self.commits: tuple[Commit, ...] = ()
        self.brought: list[tuple[Commit, ...]] = []
        self.lists_after = 0.0  # listing fails before
        self.num_attached = 0
        self.announced: list[Any] = []
        self.moves: list[Address] = []
        self.called = ""  # what the swarm calls the node
        self.reports: list[tuple[int, Report]] = []
        self.goodbyes: list[str] = []
        self.heartbeats: list[Vitals] = []
        self.events_of_now: asyncio.Queue[Message | Exception] = asyncio.Queue()

    def reconnect(self) -> None:
        pass

    def moves_to(self, address: Address) -> None:
        self.moves.append(address)

    def say(self, *events: Message | Exception) -> None:
        for event in events:
            self.events_of_now.put_nowait(event)

    async def attach(self, announcement: Any, **rulings: Any) -> Attachment:
        self.num_attached += 1
        self.announced.append(announcement)
        return Attachment(
            session_id=self.num_attached,
            heartbeat_seconds=3.0,
            committed_round=self.committed_round,
            node_name=self.called,
        )

    async def heartbeat(self, session_id: int, vitals: Vitals) -> bool:
        self.heartbeats.append(vitals)
        await asyncio.sleep(0)
        return False

    async def report(self, session_id: int, reports: Sequence[tuple[int, Report]]) -> None:
        self.reports += reports

    async def detach(self, session_id: int, reason: str) -> None:
        self.goodbyes.append(reason)
        self.say(UnavailableError("the session has ended"))  # as the coordinator does, at once
        await asyncio.sleep(1)

    async def messages(self, session_id: int, **_: object) -> AsyncIterator[Message]:
        while True:
            event = await self.events_of_now.get()
            if isinstance(event, Exception):
                raise event
            yield event

    async def list_commits(self, after_round: int) -> tuple[Commit, ...]:
        if asyncio.get_running_loop().time() < self.lists_after:
            raise UnavailableError("the coordinator is away")
        return tuple(c for c in self.commits if c.round > after_round)

    async def submit_commits(self, session_id: int, commits: tuple[Commit, ...]) -> int:
        self.brought.append(commits)
        return self.committed_round

    def reported(self, kind: type[Report]) -> list[tuple[int, Any]]:
        return [(n, report) for n, report in self.reports if isinstance(report, kind)]


class Life:
    """A daemon with everything around it."""

    def __init__(
        self,
        *,
        disk: StateOnDisk | None = None,
        history: History | None = None,
        spec: RunSpec | None = None,
        layout: Layout = LAYOUT,
        make_island: Callable[[Outer], Any] = FakeIsland,
        heavy: Heavy = in_place,
        writer: Writer | None = None,
        corpus: CorpusSummary | None = None,
        num_ranks: int = 1,
    ) -> None:
        self.outer = outer_of(A, layout=layout)
        self.island = make_island(self.outer)
        self.link = FakeLink()
        self.transport = MemoryTransport(network=MemoryNetwork(), node_id=A, counts=WireCounts())
        self.running: asyncio.Task[str] | None = None
        self.kept_corpora: list[CorpusSummary] = []
        self.daemon = Daemon(
            holdings=Holdings(
                outer=self.outer,
                disk=disk,
                history=history or History(None),
                corpus=corpus,
                keep_corpus=self.kept_corpora.append,
            ),
            counterparts=Counterparts(
                coordinator=self.link,
                transport=self.transport,
                island=self.island,
                writer=writer,
            ),
            meters=Meters(counts=WireCounts()),
            facts=NodeFacts(
                node_id=A,
                node_name="attic",
                public_key=bytes(32),
                device="cpu",
                num_ranks=num_ranks,
                version="0",
                mesh="shard 2",
                congestion_control="bbr",
            ),
            spec=spec or RunSpec(),
            heavy=heavy,
            rng=random.Random(0),
        )

    async def __aenter__(self) -> Self:
        self.running = asyncio.create_task(self.daemon.run())
        await asyncio.sleep(2)
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self.running is not None
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)

    def plan(self, round: int, **changes: Any) -> Plan:
        return plan_for(A, round=round, base_digest=self.outer.digest, **changes)

    async def opened(self, round: int, *, seconds: float, **changes: Any) -> Plan:
        """The coordinator opens a round, and so many seconds pass."""
        plan = self.plan(round, **changes)
        self.link.say(RoundOpened(plan=plan))
        await asyncio.sleep(seconds)
        return plan

    def commit(self, plan: Plan, *, is_void: bool = False) -> Commit:
        """Commits what this node reduced, as the only participant."""
        ((_, reduced),) = [r for r in self.link.reported(Reduced) if r[0] == plan.round]
        (part,) = plan.slices
        outcome = SliceOutcome(
            index=0,
            start=0,
            num_elements=part.num_elements,
            digest=None if is_void else reduced.digest,
            contributors=() if is_void else reduced.contributors,
            contributions=() if is_void else reduced.contributions,
            holder_ids=() if is_void else (A,),
        )
        commit = Commit(
            round=plan.round,
            fragment=plan.fragment,
            base_digest=plan.base_digest,
            slices=(outcome,),
        )
        self.link.commits = (*self.link.commits, commit)
        return commit
