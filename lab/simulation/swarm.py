"""A whole swarm in one process and in virtual time: the real coordinator core and store, the real nodes.

Only the edges differ from `atoll coordinator start` and `atoll node start`: calls go to the
coordinator's desks without gRPC (every message is still serialised), payloads go through the
in-memory transport, and the islands train in place, one after the other. So it is deterministic:
the same run file gives the same digests.
"""

import asyncio
import itertools
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.message import Message

from coordinator.invite_rows import Invite
from coordinator.swarm.explain import explain
from coordinator.swarm.state import HeldOut, SwarmState
from lab.simulation.coordinator import DeskStub, Outage, SimulatedCoordinator, new_folder
from lab.simulation.inline_island import InlineIsland
from lab.simulation.memory_transport import MemoryNetwork, MemoryTransport
from lab.simulation.meshed_island import MeshedIsland
from lab.simulation.virtual_time import run_in_virtual_time
from node.daemon import Counterparts, Daemon, Holdings, NodeFacts
from node.disk.history import History, KeptRulings
from node.disk.round_folder import Retention
from node.disk.snapshots import SnapshotWriting
from node.exchange.giving import HeldResults
from node.exchange.outer import Outer
from node.exchange.outer_optimizer import outer_rules_of
from node.exchange.state.on_disk import Saving, StateOnDisk
from node.heavy import Meters, in_place
from node.island.data.dataset import Dataset
from node.island.data.opening import open_dataset
from node.island.data.places import DataPlaces
from node.island.island import InnerReport, InnerWork, Progress, RanklessIsland
from node.island.models.first_weights import initial_parameters
from node.island.parallel.mesh_shape import PLAIN, LocalTraining, MeshShape
from node.link.calls import CoordinatorLink
from node.outer_state import Vector
from protocol.errors import AtollError
from protocol.run.models import layout_of
from protocol.run.run_spec import RunSpec
from protocol.trust.identity import Identity
from protocol.trust.pki import Role
from protocol.wire.payload import WireCounts
from protocol.wire.rounds import PASSES_OF_TRAINING, Commit, Digest, NodeId

Wire = TypeVar("Wire", bound=Message)


OnPublished = Callable[[Vector, Vector], None]
"""Is given a fragment's global parameters [n] and what its island has published of it [n], to change it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """When a simulated node comes, how fast it is, and how it goes. Virtual seconds."""

    starts_at: float = 0.0
    seconds_per_inner_step: float = 0.0
    absences: tuple[tuple[float, float | None], ...] = ()
    """When its process is killed, in the middle of whatever it does, and when it is started again,
    with what its disk holds; None for never."""
    mesh: MeshShape | None = None
    """Of ranks in processes of their own, which take no virtual time; None trains in this one."""
    local: LocalTraining = PLAIN
    """Its machine's own choices."""
    retention: Retention = Retention()  # noqa: RUF009 - it is frozen
    """Which snapshots it keeps beside the newest two."""
    corpus: Dataset | None = None
    """Its own data, where they are private, or what a liar trains on."""
    on_published: OnPublished | None = None
    """What a liar makes of what it has trained: see OnPublished."""
    says: Callable[[Message], Message] | None = None
    """What a liar makes of each message to the coordinator."""
    trained_share: float = 1.0
    """Of the inner steps that it says it has taken, those that it takes."""
    is_liar: bool = False
    """Whether it may end by an error, and the run go on."""
    is_helper: bool = False
    """Whether it has no ranks."""
    invite: str = ""
    """By which it joins, and all others that say the same; empty: it is let in without."""
    lies: "Callable[[SimulatedNode], None] | None" = None
    """What a liar replaces of itself, once each of its processes is made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """What came of a run."""

    final: SwarmState
    commits: tuple[Commit, ...]
    begins: tuple[float, ...]  # when each round of the commits was opened, virtual seconds
    digests: dict[NodeId, Digest]  # of the outer state of every node that lived to the end
    parameters: Vector
    bytes_sent: dict[NodeId, int]
    seconds: float  # virtual
    compute_seconds: dict[NodeId, float]  # of each node: virtual seconds in inner steps
    num_audits: int = 0  # that members were asked for

    @property
    def held_out(self) -> tuple[HeldOut, ...]:
        """The held-out losses, oldest first."""
        return self.final.held_out


class PacedIsland(InlineIsland):
    """An island whose inner steps take virtual time."""

    def __init__(
        self,
        *,
        seconds_per_inner_step: float,
        on_published: OnPublished | None = None,
        trained_share: float = 1.0,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self.seconds_per_inner_step = seconds_per_inner_step
        self._on_published = on_published
        self._trained_share = trained_share
        self.compute_seconds = 0.0
        self._halted = asyncio.Event()

    async def train(
        self,
        work: InnerWork,
        on_progress: Callable[[Progress], None],
        is_halted: Callable[[], bool] = lambda: False,
    ) -> InnerReport:
        """Lets the time of as many inner steps as fit pass, or of fewer when halted; then trains them.

        Without a pace the report says 0 s, which is no measurement: the plans stay equal.
        """
        pace = self.seconds_per_inner_step
        steps = work.inner_steps
        if pace:
            steps = max(1, int(min(steps, work.max_seconds / pace)))  # as real islands do
            steps = await self._steps_before_halt(steps, pace)
        taken = itertools.count(1)  # asked after each inner step
        really = max(1, int(self._trained_share * steps))
        report = await super().train(
            work, on_progress, lambda: next(taken) == really or is_halted()
        )
        if self._trained_share < 1:
            samples = report.samples // report.inner_steps * steps
            tokens = report.tokens // report.inner_steps * steps
            report = replace(report, inner_steps=steps, samples=samples, tokens=tokens)
        self.compute_seconds += pace * report.inner_steps
        return replace(report, seconds=pace * report.inner_steps)

    async def losses_at(self, parameters: Vector, places: Sequence[int]) -> Sequence[float]:
        """See Island. A pass without gradients takes a third of what its sample takes to train."""
        batch = self._spec.inner.batch
        await asyncio.sleep(
            self.seconds_per_inner_step * len(places) / (PASSES_OF_TRAINING * batch)
        )
        return await super().losses_at(parameters, places)

    def halt(self) -> None:
        """See Island."""
        self._halted.set()

    async def publish(self, fragment: int) -> None:
        """See Island."""
        await super().publish(fragment)
        if self._on_published is not None:
            span = layout_of(self._spec).fragments[fragment].span
            size = span.stop - span.start
            self._on_published(self._parameters[span], self._published[:size])

    async def _steps_before_halt(self, steps: int, pace: float) -> int:
        clock = asyncio.get_running_loop().time
        began_at = clock()
        self._halted.clear()
        try:
            async with asyncio.timeout(pace * steps):
                await self._halted.wait()
        except TimeoutError:
            return steps
        steps = max(1, math.ceil((clock() - began_at) / pace))
        await asyncio.sleep(began_at + pace * steps - clock())
        return steps


def identity_of(place: int) -> Identity:
    """A fixed identity for the node at a place, so that repeated simulations are equal."""
    return Identity(private_key=Ed25519PrivateKey.from_private_bytes(bytes([place + 1]) * 32))


class RunStuckError(Exception):
    """The run is not over in time; says what its coordinator waits for."""


Script = Callable[[MemoryNetwork, "Sequence[SimulatedNode]"], Awaitable[None]]
"""Does something to links and nodes while the swarm runs."""


def simulate(
    spec: RunSpec,
    *,
    lives: Sequence[Life],
    corpus: Dataset | None = None,
    script: Script | None = None,
    outage: Outage | Sequence[Outage] | None = None,
    disks: Path | None = None,
    network: MemoryNetwork | None = None,
    within_seconds: float | None = None,
) -> SimulatedRun:
    """Runs a swarm to its end and returns what came of it.

    There is one node for each life. Whoever dies and returns needs `disks`, an empty folder. Without
    a `network` transfers take no time. A run that is not over `within_seconds` of virtual time raises
    RunStuckError: nodes that wait for ever would never come to an end here.
    """
    network = network or MemoryNetwork()
    return run_in_virtual_time(
        _simulate(spec, lives, corpus, script, outage, disks, network, within_seconds)
    )


async def _simulate(
    spec: RunSpec,
    lives: Sequence[Life],
    corpus: Dataset | None,
    script: Script | None,
    outage: Outage | Sequence[Outage] | None,
    disks: Path | None,
    network: MemoryNetwork,
    within_seconds: float | None,
) -> SimulatedRun:
    if corpus is None:
        corpus = lives[0].corpus or open_dataset(
            spec, DataPlaces(folder=Path.cwd(), may_read=(Path("/"),))
        )
    coordinator = SimulatedCoordinator(spec, None if disks is None else disks / "coordinator")
    nodes = [
        SimulatedNode(spec, place, life, coordinator, network, corpus, disks)
        for place, life in enumerate(lives)
    ]
    background: list[asyncio.Future[None]] = []
    if outage is not None:
        outages = (outage,) if isinstance(outage, Outage) else tuple(outage)
        background.append(asyncio.ensure_future(coordinator.suffer(outages)))
    if script is not None:
        script_run = script(network, nodes)
        background.append(asyncio.ensure_future(script_run))
    try:
        try:
            async with asyncio.timeout(within_seconds):
                lived = await asyncio.gather(*(n.live() for n in nodes))
        except TimeoutError:
            driver = coordinator.driver
            reason = explain(driver.state, driver.clock.now())
            raise RunStuckError(f"not over after {within_seconds:g} s: {reason}") from None
        survivors = [node for node in lived if node is not None]
        commits = coordinator.store.commits_after(0, limit=1 << 30)
        return SimulatedRun(
            final=coordinator.driver.state,
            commits=commits,
            begins=tuple(coordinator.begins[commit.round] for commit in commits),
            digests={node.node_id: node.outer.digest for node in survivors},
            parameters=survivors[0].parameters,
            bytes_sent={
                node.node_id: sum(sent for sent, _ in node.counts.totals().values())
                for node in nodes
            },
            seconds=asyncio.get_running_loop().time(),
            compute_seconds={node.node_id: node.compute_seconds for node in nodes},
            num_audits=coordinator.num_audits,
        )
    finally:
        for task in background:
            task.cancel()
        for fault in await asyncio.gather(*background, return_exceptions=True):
            if isinstance(fault, Exception):
                raise fault
        await coordinator.end()


class MortalDisk(StateOnDisk):
    """One whose process can be killed: from then on it writes nothing more."""

    is_cut = False

    def begin(self, outer: Outer, held: HeldResults, *, is_last: bool = False) -> Saving:
        if self.is_cut:
            return Saving(position=outer.position, results=(), snapshot=None, is_awaited=False)
        return super().begin(outer, held, is_last=is_last)

    def write_results(self, saving: Saving) -> None:
        if not self.is_cut:
            super().write_results(saving)

    def write_snapshot(
        self, writing: SnapshotWriting, outer: Outer, *, is_patient: bool = False
    ) -> None:
        if not self.is_cut:
            super().write_snapshot(writing, outer, is_patient=is_patient)


class SimulatedNode:
    """One simulated node with its own vectors, and its own disk if there is a folder for it."""

    def __init__(
        self,
        spec: RunSpec,
        place: int,
        life: Life,
        coordinator: SimulatedCoordinator,
        network: MemoryNetwork,
        corpus: Dataset,
        disks: Path | None,
    ) -> None:
        self._spec = spec
        self._place = place
        self._life = life
        self._coordinator = self.coordinator = coordinator
        self._network = network
        self._corpus = life.corpus or corpus
        self._disk = None if disks is None else new_folder(disks / f"node-{place + 1}")
        self._has_left = False
        self._num_processes = 0
        self._identity = identity_of(place)
        self.node_id = self._identity.node_id
        self.counts = WireCounts()
        if life.invite or life.is_helper:
            self._join(life.invite or f"for-{self.node_id}")
        self._begin()

    @property
    def identity(self) -> Identity:
        """Its keys, with which a liar signs what it likes."""
        return self._identity

    @property
    def transport(self) -> MemoryTransport:
        """Its own, of the process that there is now."""
        return self._transport

    def _join(self, invite_id: str) -> None:
        """Redeems an invite, which is made for the first that does."""
        secret_hash, store = bytes(32), self._coordinator.store
        if not store.invites.has(invite_id, secret_hash):
            store.invites.add(
                Invite(
                    invite_id=invite_id,
                    secret_hash=secret_hash,
                    max_uses=1 << 16,
                    expires_utc_seconds=math.inf,
                    host="",
                    role=Role.HELPER if self._life.is_helper else Role.NODE,
                )
            )
        store.invites.redeem(
            invite_id,
            secret_hash,
            node_id=self.node_id,
            node_name=f"node-{self._place + 1}",
            public_key=self._identity.public_key,
            now=0.0,
        )

    def _begin(self) -> None:
        """A new process: all that is left of an earlier one is on the disk."""
        self._num_processes += 1
        spec = self._spec
        layout = layout_of(spec)
        self.parameters = initial_parameters(spec)
        published = self.parameters[: layout.largest_fragment].copy()
        self.outer = Outer.of_run(
            spec,
            layout=layout,
            parameters=self.parameters,
            published=published,
            node_id=self.node_id,
            identity=self._identity,
        )
        rulings = KeptRulings(
            spec,
            path=None if self._disk is None else self._disk / "rulings",
            verifier=self._coordinator.verifier,
        )
        self.outer.go_by(rulings.made_in(outer_rules_of))
        history = History(None if self._disk is None else self._disk / "history")
        disk: MortalDisk | None = None
        if self._disk is not None:
            clock = asyncio.get_running_loop().time
            disk = MortalDisk(
                self._disk / "snapshots",
                history=history,
                clock=clock,
                retention=self._life.retention,
            )
            kept = disk.snapshots.load_newest(spec.digest(), layout.summary().digest)
            if kept is not None:
                disk.resume(self.outer, kept)
        self._state_on_disk = disk
        self._stub = DeskStub(self._coordinator, self.node_id, says=self._life.says)
        self._transport = MemoryTransport(
            network=self._network, node_id=self.node_id, counts=self.counts
        )
        self._island = self._new_island(published)
        self._daemon = Daemon(
            holdings=Holdings(
                outer=self.outer,
                disk=disk,
                history=history,
                rulings=rulings,
                first_state=partial(initial_parameters, spec),
            ),
            counterparts=Counterparts(
                coordinator=CoordinatorLink(self._stub),
                transport=self._transport,
                island=self._island,
            ),
            meters=Meters(counts=self.counts),
            facts=NodeFacts(
                node_id=self.node_id,
                node_name=f"node-{self._place + 1}",
                public_key=self._identity.public_key,
                device="cpu",
                num_ranks=self._num_ranks,
                version="simulated",
            ),
            spec=spec,
            heavy=in_place,
            rng=random.Random(f"{self._place}, process {self._num_processes}"),
        )
        if self._life.lies is not None:
            self._life.lies(self)

    @property
    def _num_ranks(self) -> int:
        if self._life.is_helper:
            return 0
        return 1 if self._life.mesh is None else self._life.mesh.num_ranks

    def _new_island(self, published: Vector) -> PacedIsland | MeshedIsland | RanklessIsland:
        if self._life.is_helper:
            return RanklessIsland()
        if self._life.mesh is None:
            return PacedIsland(
                seconds_per_inner_step=self._life.seconds_per_inner_step,
                on_published=self._life.on_published,
                trained_share=self._life.trained_share,
                spec=self._spec,
                parameters=self.parameters,
                published=published,
                folder=Path.cwd(),
                corpus=self._corpus,
                clock=asyncio.get_running_loop().time,
                local=self._life.local,
            )
        assert self._life.seconds_per_inner_step == 0, "a mesh takes no virtual time"
        return MeshedIsland(
            spec=self._spec,
            shape=self._life.mesh,
            parameters=self.parameters,
            published=published,
            folder=Path.cwd(),
        )

    @property
    def compute_seconds(self) -> float:
        """Virtual seconds in inner steps since the process began."""
        return 0.0 if isinstance(self._island, RanklessIsland) else self._island.compute_seconds

    def drain(self, within_seconds: float) -> None:
        """Lets it leave with its work; a round must be in flight."""
        assert self._daemon.drain(within_seconds), "nothing is in flight"
        self._has_left = True

    def lose_coordinator(self, *, is_away: bool = True) -> None:
        """Its calls reach no coordinator until it is found again: `is_away=False`."""
        self._stub.is_cut = is_away

    def change_pace(self, seconds_per_inner_step: float) -> None:
        """Trains faster or slower from the next round on."""
        assert isinstance(self._island, PacedIsland)
        self._island.seconds_per_inner_step = seconds_per_inner_step

    async def live(self) -> "SimulatedNode | None":
        """Runs the node; returns it when it lives to the end of the run."""
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(self._life.starts_at)
        for dies_at, returns_at in self._life.absences:
            running = asyncio.ensure_future(self._daemon.run())
            await asyncio.wait((running,), timeout=dies_at - clock())
            if running.done():  # the run was over before
                return await self._survives(running)
            await self._die(running)
            if returns_at is None:
                return None
            await asyncio.sleep(returns_at - clock())
            self._begin()
        return await self._survives(self._daemon.run())

    async def _survives(self, running: Awaitable[str]) -> "SimulatedNode | None":
        """Itself, unless it has left; nor a liar whose own checks, or the swarm's, have ended it."""
        try:
            await running
        except AtollError:
            if self._life.is_liar:
                return None
            raise
        return None if self._has_left else self

    async def _die(self, running: asyncio.Future[str]) -> None:
        self._stub.is_cut = True
        if self._state_on_disk is not None:
            self._state_on_disk.is_cut = True
        self._network.detach(self._transport)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
