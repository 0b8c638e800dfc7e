"""What this node gives its peers in a round: results that it holds, and payloads on their way to them.

Results are of the round in flight, and of the latest ones for nodes that missed them. What is pushed is sent
again until it has arrived, or is no longer wanted.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from random import Random

import structlog

from node.exchange.peers import PeerUnreachableError, TransferRefusedError, Transport, Waits
from node.exchange.round.state import Rules
from node.heavy import cancelled
from protocol.wire.payload import Payload, PayloadHeader
from protocol.wire.rounds import Digest, NodeId, Plan

log = structlog.get_logger()

KEPT_ROUNDS = 16
"""Results of this many rounds are kept, for peers that replay."""


class HeldResults:
    """Payloads by round and slice."""

    def __init__(self) -> None:
        self._payloads: dict[tuple[int, int], Payload] = {}

    def hold(self, payload: Payload) -> None:
        """Keeps a result; one that was held for the same slice goes."""
        self._payloads[payload.header.round, payload.header.slice_index] = payload

    def drop(self, round: int, slice_index: int) -> None:
        """Forgets the result of a slice: another node reduces it anew."""
        self._payloads.pop((round, slice_index), None)

    def get(self, round: int, slice_index: int) -> Payload | None:
        """The result of a slice, whatever its digest."""
        return self._payloads.get((round, slice_index))

    def find(self, round: int, slice_index: int, digest: Digest) -> Payload | None:
        """The result of a slice with this digest."""
        payload = self._payloads.get((round, slice_index))
        return payload if payload is not None and payload.digest == digest else None

    def forget_from(self, round: int) -> None:
        """Drops this round and later ones: they are planned anew, and no commit took these results."""
        for key in [key for key in self._payloads if key[0] >= round]:
            del self._payloads[key]

    def forget_before(self, round: int) -> None:
        """Drops earlier rounds."""
        for key in [key for key in self._payloads if key[0] < round]:
            del self._payloads[key]

    def forget_old(self, newest_round: int) -> None:
        """Drops rounds that are too old to be asked for."""
        self.forget_before(newest_round - KEPT_ROUNDS + 1)


@dataclass(slots=True, kw_only=True, eq=False)
class _Lot:
    """All that is under way to one peer for one round: a peer that is away is told of once."""

    what: str
    round: int
    peer: NodeId
    num_slices: int = 0  # that have not arrived
    num_late: int = 0
    is_told: bool = False

    def tell_repetition(self, why: str) -> None:
        if not self.is_told:
            self.is_told = True
            log.info("will send again", **self._fields(self.num_slices), why=why)

    def tell_late(self) -> None:
        if self.num_late:
            log.warning("not sent in time", **self._fields(self.num_late))

    def _fields(self, num_slices: int) -> dict[str, object]:
        return {"what": self.what, "round": self.round, "to": self.peer, "slices": num_slices}


AT_ONCE = 2
"""Bodies of a node with a slow uplink: while one is answered the other fills the link."""

TIMES_EXPECTED = 8.0
"""So many times as long as a body should take it keeps its place: its peer may be gone."""


class Turns:
    """Has a slow uplink carry few bodies at a time, to whichever peers, in the order in which they come.

    Side by side all of them would arrive at the end, and the results of all after that.
    """

    def __init__(self, body_seconds: float) -> None:
        """A body takes so long if it has the uplink to itself."""
        self._patience_seconds = TIMES_EXPECTED * body_seconds
        self._places = asyncio.Semaphore(AT_ONCE)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Waits for a place, and gives it to the next after a while even if it takes longer."""
        await self._places.acquire()
        is_given = False

        def give() -> None:
            nonlocal is_given
            if not is_given:
                is_given = True
                self._places.release()

        timer = asyncio.get_running_loop().call_later(self._patience_seconds, give)
        try:
            yield
        finally:
            timer.cancel()
            give()


def _do_nothing(receipt: bytes) -> None:
    """Where a receipt is not needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """A payload for a peer. Where there are turns its first try waits for one."""

    peer: NodeId
    payload: Payload
    deadline: float  # by the loop's clock
    is_wanted: Callable[[], bool]
    on_received: Callable[[bytes], None] = _do_nothing  # hears of the receipt
    turns: Turns | None = None


class Pushes:
    """Transfers that go on in the background."""

    def __init__(self, transport: Transport, rng: Random, waits: Waits) -> None:
        self._transport = transport
        self._waits = waits
        self._rng = rng  # another one at each node, or their pauses are in step
        self._tasks: dict[asyncio.Task[None], PayloadHeader] = {}  # of what is pushed
        self._lots: dict[tuple[str, int, NodeId], _Lot] = {}

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._tasks

    def start(self, push: Push) -> None:
        """Begins a push that may last until its deadline.

        A refusal is tried again too: the peer may not have heard of the round yet. A push under way
        is not broken off when it is no longer wanted; it is only not repeated.
        """
        task = asyncio.get_running_loop().create_task(self._push_of_lot(push))
        self._tasks[task] = push.payload.header
        task.add_done_callback(self._tasks.pop)

    async def stop(self, *, kind: int | None = None, from_round: int = 0) -> None:
        """Breaks off what is of this kind, or any, and of this round or a later one."""
        tasks = [
            task
            for task, header in self._tasks.items()
            if kind in (None, header.kind) and header.round >= from_round
        ]
        await cancelled(tasks)

    async def _push_of_lot(self, push: Push) -> None:
        header = push.payload.header
        place = (header.kind_name, header.round, push.peer)
        made = _Lot(what=header.kind_name, round=header.round, peer=push.peer)
        lot = self._lots.setdefault(place, made)
        lot.num_slices += 1
        try:
            await self._push(push, lot)
        finally:
            lot.num_slices -= 1
            if not lot.num_slices:
                del self._lots[place]
                lot.tell_late()

    async def _push(self, push: Push, lot: _Lot) -> None:
        retry_seconds, turns = self._waits.first_retry_seconds, push.turns
        clock = asyncio.get_running_loop().time
        while True:
            try:
                async with nullcontext() if turns is None else turns.turn():
                    left = push.deadline - clock()
                    if not push.is_wanted():
                        return
                    if left <= 0:
                        lot.num_late += 1
                        return
                    receipt = await self._transport.push(
                        push.peer, push.payload, timeout_seconds=left
                    )
                push.on_received(receipt)
                return
            except (PeerUnreachableError, TransferRefusedError) as error:
                why = str(error)
            except Exception:
                log.exception("push failed", what=lot.what, round=lot.round, to=lot.peer)
                return
            if not push.is_wanted():
                return
            await asyncio.sleep(min(self._rng.uniform(0.0, retry_seconds), left))
            turns = None  # a peer that is away must not hold up the others again
            if push.is_wanted():
                lot.tell_repetition(why)  # after the pause, when all that fails with it has failed
            retry_seconds = min(2 * retry_seconds, self._waits.last_retry_seconds)


def turns_of(plan: Plan, rules: Rules, transport: Transport) -> Turns | None:
    """How a node contributes whose uplink is too slow to reduce: a few slices at a time.

    None where it reduces, has one peer to send to, or where few bodies would leave its link idle between
    them, and while nobody knows what its link carries. Nor where a reducer would get nothing for so long,
    while others have their turn, that it stops waiting (node.exchange.round.transition).
    """
    reducers = {part.reducer_id for part in plan.slices}
    rate = transport.seen().link_rates.up_bytes_per_second
    if rules.node_id in reducers or len(reducers) < 2 or not rate:
        return None
    body_seconds = max(rules.uplink.most_bytes(part.num_elements) for part in plan.slices) / rate
    if body_seconds < max(transport.round_trip_seconds(peer) for peer in reducers):
        return None
    if body_seconds * (len(reducers) - 1) > rules.waits.grace_seconds:
        return None
    return Turns(body_seconds)
