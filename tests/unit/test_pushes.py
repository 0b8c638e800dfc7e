"""Pushes in the background: repeated until they arrive, and told of once for a peer and a round."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from lab.simulation.memory_transport import MemoryNetwork, MemoryTransport
from node.exchange.codecs.registry import codec_named
from node.exchange.giving import AT_ONCE, TIMES_EXPECTED, Push, Pushes, Turns, turns_of
from node.exchange.peers import Admission, TransferRefusedError, Waits, Want
from node.exchange.round.state import Rules
from protocol.wire.payload import Payload, PayloadHeader, WireCounts
from protocol.wire.rounds import NodeId, PeerAddress, RosterEntry
from protocol.wire.vitals import LinkRates, LinkState
from tests.unit.exchange_scene import RUN, A, B, C, contribution_of, in_virtual_time, plan_for

NUM_SLICES = 64
ROSTER = tuple(
    RosterEntry(
        node_id=member,
        node_name=member,
        address=PeerAddress(public_key=bytes(32), multiaddrs=()),
    )
    for member in (A, B, C)
)


class Taker:
    """A TransferHandler that takes every slice of the rounds it has opened."""

    def __init__(self) -> None:
        self.open_rounds = {1, 2}
        self.taken: list[tuple[int, int]] = []

    def admit(self, sender: NodeId, header: PayloadHeader) -> Admission:
        if header.round not in self.open_rounds:
            raise TransferRefusedError(f"round {header.round} is not open here")
        return Admission(take=self._take)

    async def _take(self, payload: Payload) -> bytes:
        self.taken.append((payload.header.round, payload.header.slice_index))
        return b""

    async def supply(self, sender: NodeId, want: Want) -> Payload | None:
        return None


class Scene:
    """A pushes to B and C; what the two took, and what A logged."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.takers = {B: Taker(), C: Taker()}
        self.pushes: Pushes

    async def begin(self) -> None:
        await self._transport(B, self.takers[B])
        await self._transport(C, self.takers[C])
        self.pushes = Pushes(await self._transport(A, Taker()), Random(0), Waits())

    async def _transport(self, node_id: NodeId, taker: Taker) -> MemoryTransport:
        transport = MemoryTransport(network=self.network, node_id=node_id, counts=WireCounts())
        await transport.start(taker)
        transport.set_roster(ROSTER)
        return transport

    def push(self, peer: NodeId, *, round: int = 1, seconds: float = 20.0) -> None:
        """All slices of a round."""
        for index in range(NUM_SLICES):
            push = Push(
                peer=peer,
                payload=contribution(round, index),
                deadline=asyncio.get_running_loop().time() + seconds,
                is_wanted=lambda: True,
            )
            self.pushes.start(push)


def contribution(round: int, index: int) -> Payload:
    return contribution_of(b"body", sender_id=A, num_elements=1, round=round, index=index)


def told(logs: Sequence[Mapping[str, object]]) -> list[tuple[object, ...]]:
    return [(e["log_level"], e["event"], e["to"], e["round"], e["slices"]) for e in logs]


@in_virtual_time
async def test_a_peer_that_is_away_is_told_of_once_with_the_number_of_its_slices() -> None:
    scene = Scene()
    await scene.begin()
    scene.network.cut(A, B)
    with capture_logs() as logs:
        scene.push(B)
        scene.push(C)
        await asyncio.sleep(15)
        assert told(logs) == [("info", "will send again", B, 1, NUM_SLICES)]
        assert logs[0]["why"] == "b: the link is cut" and logs[0]["what"] == "contribution"
        await asyncio.sleep(15)
    assert told(logs)[1:] == [("warning", "not sent in time", B, 1, NUM_SLICES)]
    assert len(scene.takers[C].taken) == NUM_SLICES and not scene.takers[B].taken


@in_virtual_time
async def test_a_peer_that_comes_back_gets_all_and_nothing_more_is_told() -> None:
    scene = Scene()
    await scene.begin()
    scene.network.cut(A, B)
    with capture_logs() as logs:
        scene.push(B)
        await asyncio.sleep(10)
        scene.network.mend(A, B)
        await asyncio.sleep(15)
    assert told(logs) == [("info", "will send again", B, 1, NUM_SLICES)]
    assert sorted(scene.takers[B].taken) == [(1, index) for index in range(NUM_SLICES)]


@in_virtual_time
async def test_each_peer_and_each_round_is_told_of_by_itself() -> None:
    scene = Scene()
    await scene.begin()
    scene.takers[B].open_rounds = scene.takers[C].open_rounds = {2}
    with capture_logs() as logs:
        scene.push(B)
        scene.push(C)
        await asyncio.sleep(5)
        scene.push(B, round=2)
        await asyncio.sleep(1)
        scene.takers[B].open_rounds = set()
        scene.push(B, round=2)
        await asyncio.sleep(30)
    assert sorted(told(logs)) == [
        ("info", "will send again", B, 1, NUM_SLICES),
        ("info", "will send again", B, 2, NUM_SLICES),
        ("info", "will send again", C, 1, NUM_SLICES),
        ("warning", "not sent in time", B, 1, NUM_SLICES),
        ("warning", "not sent in time", B, 2, NUM_SLICES),
        ("warning", "not sent in time", C, 1, NUM_SLICES),
    ]
    assert logs[0]["why"] == "round 1 is not open here"


@in_virtual_time
async def test_what_is_not_wanted_any_more_is_neither_repeated_nor_told_of() -> None:
    scene = Scene()
    await scene.begin()
    scene.network.cut(A, B)
    wanted = {(1, 0)}
    with capture_logs() as logs:
        push = Push(
            peer=B, payload=contribution(1, 0), deadline=20.0, is_wanted=lambda: bool(wanted)
        )
        scene.pushes.start(push)
        await asyncio.sleep(0.1)  # it has failed, and would be sent again
        wanted.clear()
        scene.network.mend(A, B)
        await asyncio.sleep(30)
    assert not logs and not scene.takers[B].taken


NUM_CONTRIBUTORS, MOST_AT_ONCE = 100, 10


class CrowdedTaker(Taker):
    """A reducer that takes so many at once, each for a second, and refuses all others."""

    def __init__(self) -> None:
        super().__init__()
        self.num_refused = 0
        self.tries: Counter[float] = Counter()  # when -> how many

    def admit(self, sender: NodeId, header: PayloadHeader) -> Admission:
        self.tries[asyncio.get_running_loop().time()] += 1
        if self._num_admitted == MOST_AT_ONCE:
            self.num_refused += 1
            raise TransferRefusedError("busy")
        self._num_admitted += 1
        return Admission(take=self._take, end=self._end)

    _num_admitted = 0

    async def _take(self, payload: Payload) -> bytes:
        await asyncio.sleep(1.0)
        return await super()._take(payload)

    def _end(self) -> None:
        self._num_admitted -= 1


@in_virtual_time
async def test_a_hundred_that_a_reducer_refuses_do_not_come_back_in_step() -> None:
    network, taker = MemoryNetwork(), CrowdedTaker()
    nodes = [NodeId(f"node-{number}") for number in range(NUM_CONTRIBUTORS)]
    roster = tuple(
        RosterEntry(
            node_id=member,
            node_name=member,
            address=PeerAddress(public_key=bytes(32), multiaddrs=()),
        )
        for member in (B, *nodes)
    )
    reducer = MemoryTransport(network=network, node_id=B, counts=WireCounts())
    await reducer.start(taker)
    reducer.set_roster(roster)
    for node_id in nodes:
        transport = MemoryTransport(network=network, node_id=node_id, counts=WireCounts())
        await transport.start(Taker())
        transport.set_roster(roster)
        push = Push(peer=B, payload=contribution(1, 0), deadline=60.0, is_wanted=lambda: True)
        Pushes(transport, Random(node_id), Waits()).start(push)
    await asyncio.sleep(60)
    assert len(taker.taken) == NUM_CONTRIBUTORS
    assert taker.num_refused >= NUM_CONTRIBUTORS - MOST_AT_ONCE
    first, *others = (taker.tries[at] for at in sorted(taker.tries))
    assert first == NUM_CONTRIBUTORS
    assert max(others) <= 2


class SlowTaker(Taker):
    """Each body takes a second."""

    def __init__(self, begun: list[int]) -> None:
        super().__init__()
        self.begun = begun

    async def _take(self, payload: Payload) -> bytes:
        self.begun.append(payload.header.slice_index)
        await asyncio.sleep(1.0)
        return await super()._take(payload)


async def in_turns(*, cut: bool) -> list[tuple[float, int]]:
    """When which slice begins of ten that go to B and C by turns, where a body takes a second alone."""
    scene, begun = Scene(), list[int]()
    scene.takers = {B: SlowTaker(begun), C: SlowTaker(begun)}
    await scene.begin()
    if cut:
        scene.network.cut(A, B)
    turns, loop = Turns(1.0), asyncio.get_running_loop()
    for index in range(10):
        push = Push(
            peer=B if index % 2 else C,
            payload=contribution(1, index),
            deadline=60.0,
            is_wanted=lambda: True,
            turns=turns,
        )
        scene.pushes.start(push)
    seen: list[tuple[float, int]] = []
    while loop.time() < 30:
        await asyncio.sleep(0.25)
        seen += [(loop.time(), index) for index in begun[len(seen) :]]
    return seen


@in_virtual_time
async def test_a_slow_uplink_carries_few_bodies_at_a_time_in_their_order_whoever_they_are_for() -> (
    None
):
    seen = await in_turns(cut=False)
    assert [index for _, index in seen] == list(range(10))
    assert max(Counter(int(at) for at, _ in seen).values()) == AT_ONCE


@in_virtual_time
async def test_bodies_for_a_peer_that_is_away_keep_nobody_else_from_a_turn() -> None:
    seen = await in_turns(cut=True)
    assert [index for _, index in seen] == [0, 2, 4, 6, 8]
    assert seen[-1][0] <= 5.5


@in_virtual_time
async def test_a_body_that_never_ends_gives_its_turn_away_after_a_while() -> None:
    turns, taken = Turns(1.0), list[float]()

    async def take(seconds: float) -> None:
        async with turns.turn():
            taken.append(asyncio.get_running_loop().time())
            await asyncio.sleep(seconds)

    endless = [asyncio.create_task(take(1e6)) for _ in range(AT_ONCE)]
    others = [asyncio.create_task(take(1.0)) for _ in range(AT_ONCE)]
    await asyncio.gather(*others)
    assert taken == [0.0] * AT_ONCE + [TIMES_EXPECTED] * AT_ONCE
    for task in endless:
        task.cancel()
    await asyncio.gather(*endless, return_exceptions=True)


@pytest.mark.parametrize(
    ("node_id", "body_seconds", "reducers", "takes_turns"),
    [
        (A, 0.5, (B, C), True),
        (B, 0.5, (B, C), False),  # it reduces, so its link is no slower than others'
        (A, 0.5, (B,), False),  # to one peer bodies go in their order anyway
        (A, None, (B, C), False),
        (A, 0.01, (B, C), False),  # two at once would leave its link idle
        (A, 3.0, (B, C), False),  # C would hear nothing for too long while B has its turn
    ],
)
def test_a_node_takes_turns_where_it_is_too_slow_to_reduce_and_its_link_stays_full(
    node_id: NodeId, body_seconds: float | None, reducers: tuple[NodeId, ...], takes_turns: bool
) -> None:
    plan, codec = plan_for(*reducers), codec_named("fp32")
    rules = Rules(node_id=node_id, run_digest=RUN, context=1, uplink=codec, downlink=codec)
    num_bytes = max(codec.most_bytes(part.num_elements) for part in plan.slices)
    rate = num_bytes / body_seconds if body_seconds else None
    transport: Any = SimpleNamespace(
        seen=lambda: LinkState(link_rates=LinkRates(up_bytes_per_second=rate)),
        round_trip_seconds=lambda peer: 0.05,
    )
    assert (turns_of(plan, rules, transport) is not None) is takes_turns
