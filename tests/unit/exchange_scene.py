"""The exchanges of a few nodes in one process and in virtual time; the test is their coordinator."""

import asyncio
import functools
from collections.abc import Callable, Collection, Coroutine
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from lab.simulation.memory_transport import MemoryNetwork, MemoryTransport
from lab.simulation.virtual_time import run_in_virtual_time
from node.disk.history import History, SentLog
from node.disk.snapshots import Owed, Snapshot
from node.exchange.codecs.registry import codec_named
from node.exchange.error_feedback import MOST_OWED, ReducerError, Residual
from node.exchange.exchange import Exchange
from node.exchange.mean import norm_of
from node.exchange.outer import Outer
from node.exchange.outer_optimizer import OuterRules, RateScale, Sgd
from node.exchange.owing import Owing
from node.exchange.peers import Patience
from node.exchange.reduction import Merging, Sender
from node.exchange.round.state import Rules
from node.exchange.state.catch_up import CoordinatorCalls
from node.exchange.state.on_disk import StateOnDisk
from node.exchange.state.sources import StateHere
from node.heavy import in_place
from node.outer_state import Vector, outer_digest
from protocol.run.models import Layout
from protocol.run.run_spec import WANTS_FEEDBACK, ReducerErrorRule
from protocol.wire.messages import Held, Reduced, Report
from protocol.wire.payload import CONTRIBUTION, RESULT, Payload, WireCounts
from protocol.wire.rounds import (
    BLOCK,
    Assignment,
    Commit,
    Contributor,
    Digest,
    NodeId,
    PeerAddress,
    Plan,
    RosterEntry,
    SliceOutcome,
    cut_into_slices,
)

if TYPE_CHECKING:
    from protocol.v1 import transfer_pb2

RUN = Digest(bytes(32))
LAYOUT = Layout.of([("w", (3 * BLOCK,))])
NUM_ELEMENTS = LAYOUT.num_elements
FIRST = outer_digest(*np.zeros((2, NUM_ELEMENTS), dtype=np.float32))
"""Of the state that all begin with."""
TOKENS = 8
"""What a participant is assigned; the context is one token."""
CONTRIBUTE_SECONDS, COMMIT_SECONDS = 20.0, 30.0
A, B, C = (NodeId(name) for name in "abc")


def in_virtual_time(
    test: Callable[..., Coroutine[Any, Any, None]],
) -> Callable[..., None]:
    """Runs an async test on a clock that jumps."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        run_in_virtual_time(test(*arguments, **named))

    return run


def outer_of(
    node_id: NodeId,
    codec: str = "fp32",
    *,
    decay: float = 1.0,
    reducer_error: ReducerErrorRule = "keep",
    layout: Layout = LAYOUT,
    sent: SentLog | None = None,
    most_owed: float = MOST_OWED,
    is_audited: bool = False,
) -> Outer:
    """A fresh replica. Its optimizer just subtracts the mean, so every change can be accounted for."""
    rules = OuterRules(
        uplink=codec_named(codec),
        downlink=codec_named(codec),
        optimizer=Sgd(learning_rate=1.0),
        rate_scale=RateScale(scaling="none", full_round_samples=1),
        residual_decay=decay,
        # tests' values are no gradients of one run
        merging=Merging(is_screened=False, is_audited=is_audited),
    )
    sender = Sender(run_digest=RUN, node_id=node_id)
    parameters = np.zeros(layout.num_elements, dtype=np.float32)
    owing = Owing(
        layout=layout,
        parameters=parameters,
        published=np.zeros(layout.largest_fragment, dtype=np.float32),
        rules=rules,
        residual=Residual(
            layout.num_elements,
            needs_feedback=codec in WANTS_FEEDBACK,
            most_owed=most_owed,
        ),
        reducer_error=ReducerError(rule=reducer_error, num_fragments=len(layout.fragments)),
        sender=sender,
        sent=sent,
    )
    return Outer(owing)


def plan_for(
    *participants: NodeId, round: int = 1, base_digest: Digest = FIRST, **changes: Any
) -> Plan:
    plan = Plan(
        round=round,
        fragment=0,
        base_digest=base_digest,
        assignments=tuple(
            Assignment(node_id=node_id, inner_steps=1, first_sample=0, num_samples=TOKENS)
            for node_id in sorted(participants)
        ),
        slices=cut_into_slices(NUM_ELEMENTS, tuple(sorted(participants))),
        token_clock=0,
        round_tokens=1,
        train_seconds=10.0,
        contribute_seconds=CONTRIBUTE_SECONDS,
        commit_seconds=COMMIT_SECONDS,
        reason="",
    )
    return replace(plan, **changes)


def result_of(values: Vector, *, sender_id: NodeId, round: int = 1, index: int = 0) -> Payload:
    """A result of one of three slices, as fp32."""
    return _sealed(
        values.astype("<f4").tobytes(),
        kind=RESULT,
        sender_id=sender_id,
        round=round,
        index=index,
        start=index * BLOCK,
        num_elements=values.size,
        norm=norm_of(values.astype(np.float32)) if np.isfinite(values).all() else 1.0,
    )


def contribution_of(
    body: bytes,
    *,
    sender_id: NodeId,
    num_elements: int = BLOCK,
    codec: str = "fp32/1",
    tokens: int = TOKENS,
    round: int = 1,
    index: int = 0,
) -> Payload:
    """A contribution to one of several equal slices, encoded already."""
    return _sealed(
        body,
        kind=CONTRIBUTION,
        sender_id=sender_id,
        round=round,
        index=index,
        start=index * num_elements,
        num_elements=num_elements,
        codec=codec,
        tokens=tokens,
    )


def _sealed(
    body: bytes,
    *,
    kind: "transfer_pb2.PayloadKind.ValueType",
    sender_id: NodeId,
    round: int,
    index: int,
    start: int,
    num_elements: int,
    codec: str = "fp32/1",
    tokens: int = 0,
    norm: float = 0.0,
) -> Payload:
    return Payload.seal(
        kind=kind,
        run_digest=RUN,
        round=round,
        fragment=0,
        slice_index=index,
        start=start,
        num_elements=num_elements,
        codec=codec,
        samples=tokens,
        tokens=tokens,
        sender_id=sender_id,
        body=body,
        norm=norm,
        base_digest=FIRST,
    )


def commit_of(outer: Outer, result: Payload, *, fragment: int = 0) -> Commit:
    """One on top of what is held, of one slice, to which its reducer alone has contributed."""
    header = result.header
    outcome = SliceOutcome(
        index=header.slice_index,
        start=header.start,
        num_elements=header.num_elements,
        digest=result.digest,
        contributors=(Contributor(node_id=header.sender_id, samples=1, tokens=1),),
    )
    return Commit(
        round=header.round, fragment=fragment, base_digest=outer.digest, slices=(outcome,)
    )


def rules_of(outer: Outer, node_id: NodeId) -> Rules:
    return Rules(
        node_id=node_id,
        run_digest=RUN,
        context=1,
        uplink=outer.uplink,
        downlink=outer.downlink,
    )


class Node:
    """One node's exchange, what it reports, and what its island would have trained."""

    def __init__(
        self,
        scene: "Scene",
        node_id: NodeId,
        outer: Outer,
        disk: StateOnDisk | None = None,
        history: History | None = None,
    ) -> None:
        self.node_id = node_id
        self.outer = outer
        self.disk = disk
        self.reports: list[tuple[int, Report]] = []
        self.transport = MemoryTransport(
            network=scene.network, node_id=node_id, counts=WireCounts()
        )
        self.patience = Patience(Random(0))
        self.exchange = Exchange(
            rules_of(outer, node_id),
            StateHere(outer=outer, history=history or History(None), disk=disk, heavy=in_place),
            transport=self.transport,
            coordinator=CoordinatorCalls(
                report=lambda round, report: self.reports.append((round, report)),
                list_commits=scene.list_commits,
                bring_back=scene.take_back,
                patience=self.patience,
            ),
            forgery=lambda header: "",  # ids of this scene are no digests of keys
        )

    @property
    def parameters(self) -> Vector:
        return self.outer.snapshot().parameters

    @property
    def residual(self) -> Vector:
        return self.outer.owed().residual

    async def contribute(self, work: Vector | float, *, tokens: int = TOKENS) -> None:
        """As if the island had trained its way to global parameters minus `work`."""
        self.outer.owing._published[:] = self.outer._parameters - np.float32(1) * work
        await self.exchange.contribute(samples=tokens, tokens=tokens)

    async def saved(self) -> None:
        """All that a save writes is on the disk, what is written behind included."""
        await self.exchange.save()
        if self.disk is not None:
            await self.disk.settled()

    async def receive(self, sender: NodeId, payload: Payload) -> None:
        """As a transport does it: the payload is offered, and comes whole."""
        admission = self.exchange.admit(sender, payload.header)
        try:
            await admission.take(payload)
        finally:
            admission.end()

    def reported(self, kind: type[Report], round: int) -> list[Any]:
        return [report for r, report in self.reports if r == round and isinstance(report, kind)]

    def held(self, round: int) -> list[tuple[int, Digest]]:
        """The results that it has reported to hold, by their slices."""
        return [(each.slice_index, each.digest) for each in self.reported(Held, round)]


class Scene:
    """A swarm of exchanges."""

    def __init__(
        self,
        codec: str = "fp32",
        folder: Path | None = None,
        most_owed: float = MOST_OWED,
        is_audited: bool = False,
    ) -> None:
        self.network = MemoryNetwork()
        self.nodes: dict[NodeId, Node] = {}
        self.commits: list[Commit] = []
        self.brought_after: list[int] = []
        self._codec = codec
        self._most_owed = most_owed
        self._is_audited = is_audited
        self._folder = folder

    @classmethod
    async def of(
        cls,
        *node_ids: NodeId,
        codec: str = "fp32",
        folder: Path | None = None,
        most_owed: float = MOST_OWED,
        is_audited: bool = False,
    ) -> "Scene":
        """With a folder each node has a disk there, and goes on from it when it is added again."""
        scene = cls(codec, folder, most_owed, is_audited)
        for node_id in node_ids:
            await scene.add(node_id)
        return scene

    async def add(self, node_id: NodeId, kept: tuple[Snapshot, Owed | None] | None = None) -> Node:
        """Starts a node, or starts it again with what was on its disk."""
        if node_id in self.nodes:
            await self.nodes[node_id].exchange.stop()
            await self.nodes[node_id].transport.stop()
        disk, history = None, None
        if self._folder is not None:
            history = History(self._folder / f"{node_id}-history")
            clock = asyncio.get_running_loop().time
            sent = SentLog(self._folder / f"{node_id}-sent")
            disk = StateOnDisk(self._folder / node_id, history=history, sent=sent, clock=clock)
        outer = outer_of(
            node_id,
            self._codec,
            sent=None if disk is None else disk.sent,
            most_owed=self._most_owed,
            is_audited=self._is_audited,
        )
        if disk is not None:
            on_disk = disk.snapshots.load_newest(RUN, outer.layout_digest)
            if on_disk is not None:
                disk.resume(outer, on_disk)
        if kept is not None:
            outer.restore(*kept)
        node = self.nodes[node_id] = Node(self, node_id, outer, disk, history)
        await node.transport.start(node.exchange)
        address = PeerAddress(public_key=bytes(32), multiaddrs=())
        roster = tuple(
            RosterEntry(node_id=member, node_name=member, address=address) for member in self.nodes
        )
        for member in self.nodes.values():
            member.exchange.set_roster(roster)
        return node

    async def stop(self) -> None:
        for node in self.nodes.values():
            await node.exchange.stop()
            await node.transport.stop()

    async def take_back(self, after_round: int) -> bool:
        """What nodes bring is known here, unless a test says otherwise."""
        self.brought_after.append(after_round)
        return True

    async def list_commits(self, after_round: int) -> tuple[Commit, ...]:
        return tuple(c for c in self.commits if c.round > after_round)[:64]

    async def open_round(self, round: int, *participants: NodeId) -> Plan:
        base = self.commits[-1].outer_digest if self.commits else outer_of(A).digest
        assert base is not None
        plan = plan_for(*participants, round=round, base_digest=base)
        for node_id in participants:
            await self.nodes[node_id].exchange.open_round(plan)
        return plan

    def close_round(self, plan: Plan, *, void: Collection[int] = ()) -> Commit:
        """Commits each slice that two participants hold, or all when fewer, unless it is in `void`."""
        outcomes = []
        for part in plan.slices:
            outcome = SliceOutcome(
                index=part.index, start=part.start, num_elements=part.num_elements, digest=None
            )
            reports = self.nodes[part.reducer_id].reported(Reduced, plan.round)
            reduced = next((r for r in reports if r.slice_index == part.index), None)
            if reduced is not None and reduced.digest is not None and part.index not in void:
                mark = part.index, reduced.digest
                holders = tuple(
                    node_id
                    for node_id in plan.participants
                    if mark in self.nodes[node_id].held(plan.round)
                )
                if len(holders) >= min(2, len(plan.participants)):
                    outcome = replace(
                        outcome,
                        digest=reduced.digest,
                        contributors=reduced.contributors,
                        contributions=reduced.contributions,
                        factors=reduced.factors,
                        norm=reduced.norm,
                        holder_ids=holders,
                    )
            outcomes.append(outcome)
        commit = Commit(
            round=plan.round,
            fragment=0,
            base_digest=plan.base_digest,
            slices=tuple(outcomes),
            assignments=plan.assignments,
        )
        self.commits.append(commit)
        return commit

    def settle(self, node_id: NodeId) -> None:
        """Fixes the newest commit's digest: that of a node which has applied it."""
        outer = self.nodes[node_id].outer
        assert outer.round == self.commits[-1].round
        self.commits[-1] = replace(self.commits[-1], outer_digest=outer.digest)


async def committed_round(scene: Scene, number: int, *participants: NodeId) -> None:
    """A round with these nodes that goes well."""
    plan = await scene.open_round(number, *participants)
    for node_id in participants:
        await scene.nodes[node_id].contribute(float(number))
    await asyncio.sleep(1)
    commit = scene.close_round(plan)
    for node_id in participants:
        await scene.nodes[node_id].exchange.apply(commit)
    scene.settle(participants[0])


async def after_rounds(num_rounds: int, *nodes: NodeId) -> Scene:
    """A swarm of these, in which A and B alone have had so many rounds."""
    scene = await Scene.of(*nodes)
    for number in range(1, num_rounds + 1):
        await committed_round(scene, number, A, B)
    return scene
