"""The transport within one process: for tests and for the simulator. No threads, no sockets.

It keeps the rules of the real one (rosters on both sides, admission before the body, digests) and
takes the same order of events each time it is run the same way. Bodies are handed over, not copied.
A network may have a pace for each node, or uplinks that carry one payload after the other.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from node.exchange.peers import (
    PIECES_AT_ONCE,
    FalseAnswerError,
    Limits,
    NotHeldError,
    PeerUnreachableError,
    TransferHandler,
    TransferRefusedError,
    Transport,
    Want,
    check_answer,
    do_nothing,
    refusing_on_fault,
    turn_of,
)
from node.exchange.transport.rates.uplink import LinkMeter
from node.exchange.transport.streams import WIRE_KINDS_BY_PAYLOAD
from protocol.wire.payload import Payload, PayloadError, WireCounts
from protocol.wire.rounds import NodeId, RosterEntry, Way
from protocol.wire.vitals import FREE, NO_UPLOAD, LinkRates, LinkState

T = TypeVar("T")


HEARD_SECONDS = 0.25
"""How often some of a payload comes that takes longer."""


class MemoryNetwork:
    """Joins the transports of one process, and can keep two of them apart."""

    def __init__(self) -> None:
        self._running: dict[NodeId, MemoryTransport] = {}
        self._cuts: set[frozenset[NodeId]] = set()
        self._bytes_per_second: dict[NodeId, float] = {}
        self.latency_seconds = 0.0  # of each payload, however small
        self.carry_bytes_per_second = 0.0  # that each node may carry for others

    def slow_down(self, node_id: NodeId, bytes_per_second: float) -> None:
        """Lets each payload that a node sends take its time, from the next one on; 0 is no end."""
        self._bytes_per_second[node_id] = bytes_per_second

    def seconds_for(self, sender: NodeId, num_bytes: int) -> float:
        """How long a payload of a node is on its way."""
        bytes_per_second = self._bytes_per_second.get(sender, math.inf)
        seconds = num_bytes / bytes_per_second if bytes_per_second else math.inf
        return self.latency_seconds + seconds

    def cut(self, one: NodeId, other: NodeId) -> None:
        """Lets nothing pass between two nodes until mended; what is under way breaks off."""
        self._cuts.add(frozenset((one, other)))

    def mend(self, one: NodeId, other: NodeId) -> None:
        """Undoes a cut."""
        self._cuts.discard(frozenset((one, other)))

    def is_cut(self, one: NodeId, other: NodeId) -> bool:
        """Whether nothing passes between the two."""
        return frozenset((one, other)) in self._cuts

    def joins(self, one: NodeId, carrier: NodeId, other: NodeId) -> bool:
        """Whether a node runs that both of two others reach."""
        apart = self.is_cut(one, carrier) or self.is_cut(carrier, other)
        return carrier in self._running and not apart

    def attach(self, transport: "MemoryTransport") -> None:
        """Makes a transport reachable."""
        self._running[transport.node_id] = transport

    def detach(self, transport: "MemoryTransport") -> None:
        """Makes a transport unreachable."""
        if self._running.get(transport.node_id) is transport:
            del self._running[transport.node_id]

    def reach(self, caller: "MemoryTransport", peer: NodeId) -> "MemoryTransport":
        """The peer's transport; raises PeerUnreachableError when nothing gets through."""
        if self._running.get(caller.node_id) is not caller:
            raise PeerUnreachableError("this node's transport is stopped")
        if self.is_cut(caller.node_id, peer) and caller._carrier_to(peer) is None:
            raise PeerUnreachableError(f"{peer}: the link is cut")
        if peer not in self._running:
            raise PeerUnreachableError(f"{peer}: nobody listens")
        return self._running[peer]


class MemoryTransport(Transport):
    """Transport between nodes of one MemoryNetwork. Counts headers and bodies, as sent."""

    def __init__(self, *, network: MemoryNetwork, node_id: NodeId, counts: WireCounts) -> None:
        self.node_id = node_id
        self._network = network
        self._counts = counts
        self._up, self._down = LinkMeter(Limits()), LinkMeter(Limits())
        self._handler: TransferHandler | None = None
        self._member_ids: frozenset[NodeId] = frozenset()
        self._handling: set[asyncio.Task[Any]] = set()
        self._pieces = asyncio.Semaphore(PIECES_AT_ONCE)
        self._ways: dict[tuple[NodeId, NodeId], tuple[NodeId, ...]] = {}

    async def start(self, handler: TransferHandler) -> None:
        """Begins to listen."""
        self._handler = handler
        self._network.attach(self)

    async def stop(self) -> None:
        """Ends all transfers and stops listening; safe to call more than once."""
        self._network.detach(self)
        handling = list(self._handling)
        for task in handling:
            task.cancel()
        if handling:
            await asyncio.wait(handling)

    async def wait_failed(self) -> str:
        """Waits for ever: nothing here can fail."""
        reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await reason

    @property
    def multiaddrs(self) -> tuple[str, ...]:
        """Not an address of libp2p: nobody dials it."""
        return (f"/memory/{self.node_id}",)

    def set_roster(self, members: tuple[RosterEntry, ...]) -> None:
        """Says who is a member now."""
        self._member_ids = frozenset(entry.node_id for entry in members) - {self.node_id}

    def seen(self) -> LinkState:
        """See Transport.seen. Out of reach are members behind a cut: who does not run is no matter of links.

        Nothing is paced here.
        """
        cut = [n for n in sorted(self._member_ids) if self._network.is_cut(self.node_id, n)]
        found = ((peer, self._carrier_to(peer)) for peer in cut)
        return LinkState(
            unreachable=tuple(cut),
            through={peer: carrier for peer, carrier in found if carrier is not None},
            carry_bytes_per_second=self._network.carry_bytes_per_second,
            link_rates=LinkRates(
                up_bytes_per_second=self._up.bytes_per_second,
                down_bytes_per_second=self._down.bytes_per_second,
            ),
            upload_pace=FREE if self._up.num_active else NO_UPLOAD,
        )

    def set_ways(self, ways: tuple[Way, ...]) -> None:
        """See Transport.set_ways. Payloads pass at once through whom both reach, in no time of its link."""
        self._ways = {(way.one, way.other): way.through for way in ways}

    def _carrier_to(self, peer: NodeId) -> NodeId | None:
        """Who of those that are named reaches both, and is there."""
        named = self._ways.get((min(self.node_id, peer), max(self.node_id, peer)), ())
        return next((c for c in named if self._network.joins(self.node_id, c, peer)), None)

    def round_trip_seconds(self, peer: NodeId) -> float:
        """See Transport.round_trip_seconds. Only payloads take time here."""
        return self._network.latency_seconds

    async def push(self, peer: NodeId, payload: Payload, *, timeout_seconds: float) -> bytes:
        """See Transport.push."""
        header = payload.header
        async with _deadline(peer, timeout_seconds):
            callee = await self._ask(peer)
            with refusing_on_fault(self.node_id):
                admission = callee.handler.admit(self.node_id, header)
            try:
                await self._pass(callee, payload)
                try:
                    arrived = Payload.verified(header, payload.body)
                except PayloadError as error:
                    raise TransferRefusedError(str(error)) from error
                return await self._handled_by(callee, admission.take(arrived))
            finally:
                admission.end()

    async def fetch(
        self,
        peer: NodeId,
        want: Want,
        *,
        max_body_bytes: int,
        timeout_seconds: float,
        heard: Callable[[], None] = do_nothing,
    ) -> Payload:
        """See Transport.fetch."""
        async with _deadline(peer, timeout_seconds):
            callee = await self._ask(peer)
            async with turn_of(want, callee._pieces):
                payload = await self._handled_by(callee, callee.handler.supply(self.node_id, want))
                if payload is None:
                    raise NotHeldError("the peer does not hold it")
                check_answer(want, payload.header, max_body_bytes=max_body_bytes)
                await callee._pass(self, payload, heard)
            try:
                return Payload.verified(payload.header, payload.body)
            except PayloadError as error:
                raise FalseAnswerError(str(error)) from error

    @property
    def handler(self) -> TransferHandler:
        """Who answers here; only asked of a transport that is running."""
        assert self._handler is not None
        return self._handler

    async def _ask(self, peer: NodeId) -> "MemoryTransport":
        if peer not in self._member_ids:
            raise PeerUnreachableError(f"{peer} is not on the roster")
        await asyncio.sleep(0)  # others get a turn, as they would on a network
        callee = self._network.reach(self, peer)
        if self.node_id not in callee._member_ids:
            raise TransferRefusedError("you are not on the roster")
        return callee

    async def _pass(
        self,
        receiver: "MemoryTransport",
        payload: Payload,
        heard: Callable[[], None] | None = None,
    ) -> None:
        """Carries a payload to the other side, and counts it at both."""
        num_bytes = len(payload.header.encode()) + len(payload.body)
        clock = asyncio.get_running_loop().time
        meters = (self._up, receiver._down)
        began_at = clock()
        for meter in meters:
            meter.begin(began_at)
        try:
            seconds = self._network.seconds_for(self.node_id, num_bytes)
            if heard is not None and seconds < math.inf:
                await self._trickled(seconds, heard)
            else:
                await asyncio.sleep(seconds)
            self._network.reach(self, receiver.node_id)
            for meter in meters:
                meter.moved(num_bytes, since=began_at, now=clock())
        finally:
            for meter in meters:
                meter.end(clock())
        kind = WIRE_KINDS_BY_PAYLOAD[payload.header.kind]
        self._counts.sent(kind, num_bytes)
        receiver._counts.received(kind, num_bytes)

    async def _trickled(self, seconds: float, heard: Callable[[], None]) -> None:
        """Takes so long, and tells of bytes that come meanwhile, the first after the latency."""
        left = seconds - self._network.latency_seconds
        await asyncio.sleep(seconds - left)
        while left > HEARD_SECONDS:
            heard()
            await asyncio.sleep(HEARD_SECONDS)
            left -= HEARD_SECONDS
        await asyncio.sleep(left)
        heard()

    async def _handled_by(self, callee: "MemoryTransport", work: Awaitable[T]) -> T:
        """Lets the callee work; it goes on when the caller gives up, and ends with the callee."""
        task = asyncio.create_task(_guarded(self.node_id, work))
        callee._handling.add(task)
        task.add_done_callback(callee._handling.discard)
        await asyncio.wait([task])
        if task.cancelled():
            raise PeerUnreachableError(f"{callee.node_id}: stopped in the middle")
        self._network.reach(self, callee.node_id)  # or the answer does not get through
        return task.result()


@asynccontextmanager
async def _deadline(peer: NodeId, timeout_seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(timeout_seconds):
            yield
    except TimeoutError as error:
        raise PeerUnreachableError(f"{peer}: no end within {timeout_seconds:g} s") from error


async def _guarded(sender: NodeId, work: Awaitable[T]) -> T:
    with refusing_on_fault(sender):
        return await work


class QueuedNetwork(MemoryNetwork):
    """Every node's uplink carries so much for all of its payloads together, or what `slow_down` says.

    In swarms of equal nodes downlinks then carry as much and need no queue of their own.
    """

    def __init__(self, *, bytes_per_second: float, latency_seconds: float) -> None:
        super().__init__()
        self.latency_seconds = latency_seconds
        self._bytes_per_second_of_all = bytes_per_second
        self._free_at: dict[NodeId, float] = {}

    def seconds_for(self, sender: NodeId, num_bytes: int) -> float:
        """Until the payload is at the other side: behind all that its sender has sent before."""
        now = asyncio.get_running_loop().time()
        begins = max(now, self._free_at.get(sender, now))
        rate = self._bytes_per_second.get(sender, self._bytes_per_second_of_all)
        self._free_at[sender] = begins + num_bytes / rate
        return self._free_at[sender] + self.latency_seconds - now
