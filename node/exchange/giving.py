"""What this node gives its peers: results that it holds, payloads on their way to them, and its outer state.

Results are of the round in flight, and of the latest ones for nodes that missed them. What is pushed is sent
again until it has arrived, or is no longer wanted.

Whole rounds of the outer state are served, chunk by chunk. Joiners need one round for as long as their
download takes, while this node goes on to others. So what is served is a copy: the node's own snapshot file,
which stays readable while it is open, also once the folder has newer ones. It costs no memory, and the outer
state is neither locked nor copied. A node without a folder copies its state into memory, once for all who
fetch it.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Protocol

import structlog

from node.exchange.peers import (
    PeerUnreachableError,
    TransferRefusedError,
    Transport,
    Waits,
    WantChunk,
    WantManifest,
)
from node.exchange.state.chunks import ELEMENT_BYTES, Manifest
from node.heavy import Heavy, cancelled
from protocol.wire.payload import CHUNK, MANIFEST, Payload, PayloadHeader
from protocol.wire.rounds import Digest, NodeId

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


MOST_COPIES = 2
"""One that is being fetched, and a newer one for who comes later."""

COPY_KEPT_SECONDS = 60.0
"""A copy is kept for at least so long after the last request for it, and at most twice as long:
joiners that break off come back."""

COPY_LONGEST_SECONDS = 3600.0
"""From then on a newer one may take a copy's place although somebody fetches it still."""


class ServedState(Protocol):
    """The outer state of one round, which does not change: node.disk.snapshots has two."""

    @property
    def round(self) -> int:
        """Its round."""

    def outer_digest(self) -> Digest:
        """What its digest ought to be. Heavy."""

    def read(self, start: int, stop: int) -> bytes:
        """Some of its bytes: the parameters', then the momentum's. Heavy."""


@dataclass(slots=True, kw_only=True)
class _Copy:
    state: ServedState
    manifest: Manifest
    since: float
    asked_at: float


class Donor:
    """Answers requests for manifests and chunks.

    `open_state` gives the newest state of a range of rounds, or None when there is none now;
    who begins to fetch a copy of a round before `oldest_round` may find no results to replay after it.
    """

    def __init__(
        self,
        *,
        node_id: NodeId,
        run_digest: Digest,
        layout_digest: Digest,
        num_elements: int,
        oldest_round: Callable[[], int],
        open_state: Callable[[WantManifest], Awaitable[ServedState | None]],
        heavy: Heavy,
    ) -> None:
        self._run_digest = run_digest
        self._layout_digest = layout_digest
        self._num_elements = num_elements
        self._oldest_round = oldest_round
        self._open_state = open_state
        self._heavy = heavy
        self._seal = partial(
            Payload.seal,
            run_digest=run_digest,
            fragment=0,
            codec="fp32/1",
            tokens=0,
            sender_id=node_id,
        )
        self._copies: dict[int, _Copy] = {}  # by round
        self._opening = asyncio.Lock()  # whoever asks at the same time gets the same copy
        self._timer: asyncio.TimerHandle | None = None

    async def manifest(self, want: WantManifest) -> Payload | None:
        """The manifest of what is served, or is served from now on; None when neither."""
        async with self._opening:
            copy = self._suiting(want) or await self._opened(want)
        if copy is None:
            return None
        self._note_request(copy)
        manifest = copy.manifest
        return self._seal(
            kind=MANIFEST,
            round=manifest.round,
            slice_index=0,
            start=0,
            num_elements=self._num_elements,
            body=manifest.to_body(),
        )

    async def chunk(self, want: WantChunk) -> Payload | None:
        """A chunk of a state that is served, or None when it is not that of this round."""
        copy = self._copies.get(want.round)
        if copy is None or want.digest not in copy.manifest.chunk_digests[want.index :][:1]:
            return None
        self._note_request(copy)
        return await self._heavy(partial(self._sealed_chunk, copy, want.index))

    def drop(self) -> None:
        """Serves nothing any more, until somebody asks for a manifest."""
        self._copies.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _suiting(self, want: WantManifest) -> _Copy | None:
        """The newest copy that is asked for. By its very round one may be had however old it is."""
        oldest = self._oldest_round()
        rounds = [
            round
            for round in self._copies
            if want.includes(round) and (round >= oldest or want.newest_round == round)
        ]
        return self._copies[max(rounds)] if rounds else None

    async def _opened(self, want: WantManifest) -> _Copy | None:
        """A new copy, if there is a place for one and the node has what is asked for."""
        now = asyncio.get_running_loop().time
        oldest = min(self._copies, default=None)
        if len(self._copies) < MOST_COPIES:
            oldest = None
        if oldest is not None and now() - self._copies[oldest].since < COPY_LONGEST_SECONDS:
            return None
        state = await self._open_state(want)
        if state is None:
            return None
        manifest = await self._heavy(partial(self._manifest_of, state))
        if manifest is None:
            log.warning("a snapshot to be served is damaged", round=state.round)
            return None
        if oldest is not None:
            self._copies.pop(oldest, None)
        log.info("serving a state", round=state.round, chunks=len(manifest.chunk_digests))
        copy = _Copy(state=state, manifest=manifest, since=now(), asked_at=now())
        self._copies[state.round] = copy
        return copy

    def _manifest_of(self, state: ServedState) -> Manifest | None:
        manifest = Manifest.of(
            state.read,
            round=state.round,
            num_elements=self._num_elements,
            run_digest=self._run_digest,
            layout_digest=self._layout_digest,
        )
        return manifest if manifest.outer_digest == state.outer_digest() else None

    def _sealed_chunk(self, copy: _Copy, index: int) -> Payload:
        start, stop = copy.manifest.span(index)
        return self._seal(
            kind=CHUNK,
            round=copy.manifest.round,
            slice_index=index,
            start=start // ELEMENT_BYTES,
            num_elements=(stop - start) // ELEMENT_BYTES,
            body=copy.state.read(start, stop),
        )

    def _note_request(self, copy: _Copy) -> None:
        loop = asyncio.get_running_loop()
        copy.asked_at = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(COPY_KEPT_SECONDS, self._drop_idle)

    def _drop_idle(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        for round, copy in list(self._copies.items()):
            if loop.time() - copy.asked_at >= COPY_KEPT_SECONDS:
                log.info("no longer serving a state, nobody asks for it", round=round)
                del self._copies[round]
        if self._copies:
            self._timer = loop.call_later(COPY_KEPT_SECONDS, self._drop_idle)
