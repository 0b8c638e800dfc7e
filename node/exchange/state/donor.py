"""What is given of outer states: whole ones, and what has come of the one that is on its way here.

Whole rounds are served. Joiners need one round for as long as their download takes, while this node goes on
to others. So what is served is a copy: the node's own snapshot file, which stays readable while it is open,
also once the folder has newer ones. It costs no memory, and the outer state is neither locked nor copied. A
node without a folder copies its state into memory, once for all who fetch it.

A node that fetches a state gives on what it has of it, so that who holds all of it need not give each chunk
to everybody. Peers ask for the map of its chunks first (spreading.py).
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from node.exchange.giving import log
from node.exchange.peers import WantChunk, WantChunkMap, WantManifest
from node.exchange.state.chunks import ELEMENT_BYTES, Arriving, Manifest, map_of
from node.heavy import Heavy
from protocol.wire.payload import CHUNK, CHUNK_MAP, MANIFEST, Payload
from protocol.wire.rounds import Digest, NodeId

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
        arriving: Callable[[], Arriving | None],
        heavy: Heavy,
    ) -> None:
        self._run_digest = run_digest
        self._layout_digest = layout_digest
        self._num_elements = num_elements
        self._oldest_round = oldest_round
        self._open_state = open_state
        self._arriving = arriving
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
        self._num_drops = 0
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
        """A chunk of a state that is served or on its way here; None where that does not have it."""
        copy = self._copies.get(want.round)
        if copy is None or not copy.manifest.has_chunk(want.index, want.digest):
            return await self._arrived(want)
        self._note_request(copy)
        return await self._heavy(partial(self._sealed_copy, copy, want.index))

    async def chunk_map(self, want: WantChunkMap) -> Payload | None:
        """Which chunks it has of a state that it serves or fetches; nothing is opened for the question."""
        copy, arriving = self._copies.get(want.round), self._arriving()
        if copy is not None and copy.manifest.outer_digest == want.outer_digest:
            manifest = copy.manifest
            body = map_of(len(manifest.chunk_digests), set())
        elif arriving is not None and arriving.manifest.is_of(want.round, want.outer_digest):
            manifest = arriving.manifest
            body = arriving.chunk_map()
        else:
            return None
        return self._seal(
            kind=CHUNK_MAP,
            round=manifest.round,
            slice_index=0,
            start=0,
            num_elements=self._num_elements,
            body=body,
        )

    def drop(self) -> None:
        """Serves nothing any more, nor what is being opened now, until somebody asks for a manifest."""
        self._num_drops += 1
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
        num_drops = self._num_drops
        state = await self._open_state(want)
        if state is None:
            return None
        manifest = await self._heavy(partial(self._manifest_of, state))
        if self._num_drops != num_drops:
            return None  # of a round that is undone meanwhile; whoever asks will ask again
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

    async def _arrived(self, want: WantChunk) -> Payload | None:
        """A chunk of what is on its way here: see Arriving.get."""
        arriving = self._arriving()
        if arriving is None or arriving.manifest.round != want.round:
            return None
        if not arriving.manifest.has_chunk(want.index, want.digest):
            return None
        chunk = await self._heavy(partial(arriving.get, want.index))
        if chunk is None:
            return None
        return await self._heavy(partial(self._sealed_chunk, arriving.manifest, want.index, chunk))

    def _sealed_copy(self, copy: _Copy, index: int) -> Payload:
        chunk = copy.state.read(*copy.manifest.span(index))
        return self._sealed_chunk(copy.manifest, index, chunk)

    def _sealed_chunk(self, manifest: Manifest, index: int, chunk: bytes) -> Payload:
        start, stop = manifest.span(index)
        return self._seal(
            kind=CHUNK,
            round=manifest.round,
            slice_index=index,
            start=start // ELEMENT_BYTES,
            num_elements=(stop - start) // ELEMENT_BYTES,
            body=chunk,
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
