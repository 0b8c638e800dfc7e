"""Payloads that this node has for its peers: results that it holds, and what is on its way to them.

Results are of the round in flight, and of the latest ones for nodes that missed them. What is pushed is sent
again until it has arrived, or is no longer wanted.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import structlog

from node.exchange.limits import Waits
from node.exchange.transport.transport import (
    PeerUnreachableError,
    TransferRefusedError,
    Transport,
)
from protocol.wire.payload import Payload, PayloadHeader
from protocol.wire.rounds import Digest, NodeId

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


log = structlog.get_logger()


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

    def start(
        self, peer: NodeId, payload: Payload, *, deadline: float, is_wanted: Callable[[], bool]
    ) -> None:
        """Begins a push that may last until the deadline, by the loop's clock.

        A refusal is tried again too: the peer may not have heard of the round yet. A push under way
        is not broken off when it is no longer wanted; it is only not repeated.
        """
        push = self._push_of_lot(peer, payload, deadline, is_wanted)
        task = asyncio.get_running_loop().create_task(push)
        self._tasks[task] = payload.header
        task.add_done_callback(self._tasks.pop)

    async def stop(self, *, kind: int | None = None, from_round: int = 0) -> None:
        """Breaks off what is of this kind, or any, and of this round or a later one."""
        tasks = [
            task
            for task, header in self._tasks.items()
            if kind in (None, header.kind) and header.round >= from_round
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _push_of_lot(
        self, peer: NodeId, payload: Payload, deadline: float, is_wanted: Callable[[], bool]
    ) -> None:
        what, round_number = payload.header.kind_name, payload.header.round
        place = (what, round_number, peer)
        lot = self._lots.setdefault(place, _Lot(what=what, round=round_number, peer=peer))
        lot.num_slices += 1
        try:
            await self._push(lot, payload, deadline, is_wanted)
        finally:
            lot.num_slices -= 1
            if not lot.num_slices:
                del self._lots[place]
                lot.tell_late()

    async def _push(
        self, lot: _Lot, payload: Payload, deadline: float, is_wanted: Callable[[], bool]
    ) -> None:
        retry_seconds = self._waits.first_retry_seconds
        while is_wanted():
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                lot.num_late += 1
                return
            try:
                await self._transport.push(lot.peer, payload, timeout_seconds=left)
                return
            except (PeerUnreachableError, TransferRefusedError) as error:
                why = str(error)
            except Exception:
                log.exception("push failed", what=lot.what, round=lot.round, to=lot.peer)
                return
            if not is_wanted():
                return
            await asyncio.sleep(min(self._rng.uniform(0.0, retry_seconds), left))
            if is_wanted():
                lot.tell_repetition(why)  # after the pause, when all that fails with it has failed
            retry_seconds = min(2 * retry_seconds, self._waits.last_retry_seconds)
