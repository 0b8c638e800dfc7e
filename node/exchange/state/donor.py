"""What this node serves of its outer state to peers that join: whole rounds, chunk by chunk.

Joiners need one round for as long as their download takes, while this node goes on to others. So
what is served is a copy: the node's own snapshot file, which stays readable while it is open, also
once the folder has newer ones. It costs no memory, and the outer state is neither locked nor
copied. A node without a folder copies its state into memory, once for all who fetch it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import structlog

from node.exchange.state.manifest import ELEMENT_BYTES, Manifest
from node.exchange.transport.transport import WantChunk, WantManifest
from node.heavy import Heavy
from protocol.wire.payload import CHUNK, MANIFEST, Payload
from protocol.wire.rounds import Digest, NodeId

log = structlog.get_logger()

MOST_COPIES = 2
"""One that is being fetched, and a newer one for who comes later."""

KEPT_SECONDS = 60.0
"""A copy is kept for at least so long after the last request for it, and at most twice as long:
joiners that break off come back."""

LONGEST_SECONDS = 3600.0
"""From then on a newer one may take a copy's place although somebody fetches it still."""


class State(Protocol):
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
    state: State
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
        open_state: Callable[[WantManifest], Awaitable[State | None]],
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
        if oldest is not None and now() - self._copies[oldest].since < LONGEST_SECONDS:
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

    def _manifest_of(self, state: State) -> Manifest | None:
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
            self._timer = loop.call_later(KEPT_SECONDS, self._drop_idle)

    def _drop_idle(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        for round, copy in list(self._copies.items()):
            if loop.time() - copy.asked_at >= KEPT_SECONDS:
                log.info("no longer serving a state, nobody asks for it", round=round)
                del self._copies[round]
        if self._copies:
            self._timer = loop.call_later(KEPT_SECONDS, self._drop_idle)
