"""How the outer state comes here: which manifest is believed, and from whom its chunks are fetched.

A manifest proves that its chunks make the state whose outer digest it names, and is believed when that
digest is the swarm's. Of several states the one that most donors give is taken. Each chunk is checked on
arrival, and whoever gave something false is not asked for a while. So a donor that lies or dies costs time,
never correctness.

Others may fetch the same state. They are asked which chunks they have, again and again, and for those
(spreading.py); they ask this node as well, which gives what it has (donor.py). What has begun to come goes on
between them also when nobody is left who holds all of it.
"""

import asyncio
from asyncio import FIRST_COMPLETED
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import structlog

from node.disk.snapshots import Snapshot
from node.exchange.fetching import Donors, Outcome, fetch_pieces
from node.exchange.peers import (
    FalseAnswerError,
    NotHeldError,
    PeerUnreachableError,
    TransferRefusedError,
    Want,
    WantChunk,
    WantChunkMap,
    WantManifest,
    do_nothing,
)
from node.exchange.state.chunks import Arrivals, Arriving, Manifest, ManifestError, read_map
from node.exchange.state.spreading import MOST_OTHERS, ChunkMap, Spreading
from node.heavy import Heavy, cancelled
from protocol.terminal.console import bytes_in_words, seconds_in_words
from protocol.wire.payload import Payload
from protocol.wire.rounds import Digest, NodeId

log = structlog.get_logger()

ENOUGH_DONORS = 4
"""No more are looked for: a few fill our link, and more would cost each of them."""

MOST_ASKED = 4 * ENOUGH_DONORS
"""For a manifest at once, silent ones included: each reads its whole state to answer."""

LOOKED_AT_BESIDE = 4
"""So many peers at least that are not known to fetch the state are asked for a map each time."""

MAP_SECONDS = 5.0
"""A map is a few hundred bytes, behind what else its sender sends."""

FINISHING_SECONDS = 60.0
"""A peer that has all of a state takes it over, and writes it, before it gives all of it."""

IsTheSwarms = Callable[[int, Digest], Awaitable[bool]]
"""Whether the outer state of a round has this digest. May wait until the swarm has agreed on it."""


@dataclass(slots=True, kw_only=True)
class Candidate:
    """A manifest, and who says that it is the state's."""

    manifest: Manifest
    donors: list[NodeId]


@dataclass(slots=True, kw_only=True)
class _Asked:
    """A peer that is asked for a manifest."""

    peer: NodeId = field(kw_only=False)
    patience: float  # seconds
    until: float  # then it is silent, unless something comes from it

    def hear(self) -> None:
        """Something came, or may come in a moment."""
        self.until = asyncio.get_running_loop().time() + self.patience


class _Progress:
    """How much of a state has yet to come, and how long that takes if it goes on as so far."""

    def __init__(self, arriving: Arriving, spreading: Spreading, *, began_at: float) -> None:
        self._arriving = arriving
        self._spreading = spreading
        self._at_first = len(arriving.missing)
        self._began_at = began_at

    def in_words(self, now: float) -> str:
        """What the node waits for, and of how many."""
        manifest, num_missing = self._arriving.manifest, len(self._arriving.missing)
        each = manifest.state_bytes / len(manifest.chunk_digests)
        missing, whole = (bytes_in_words(num * each) for num in (num_missing, self._at_first))
        words = f"{missing} of {whole} of the state at round {manifest.round}"
        num_asked = self._spreading.num_asked
        if not num_asked:
            return f"{words}, which nobody who is here has now"
        words += f" from {num_asked} {'node' if num_asked == 1 else 'nodes'}"
        num_come = self._at_first - num_missing
        if not num_come:
            return words
        left = (now - self._began_at) * num_missing / num_come
        return f"{words}, about {seconds_in_words(left)}"


class Download:
    """Fetches one state at a time; keeps what has come until a whole one is taken over.

    `folder` is where it keeps that, so that it survives a restart; in memory when None. `say` hears
    how far it is.
    """

    def __init__(
        self,
        *,
        run_digest: Digest,
        layout_digest: Digest,
        num_elements: int,
        heavy: Heavy,
        donors: Donors,
        folder: Path | None,
        say: Callable[[str], None],
    ) -> None:
        self._say = say
        self._run_digest = run_digest
        self._layout_digest = layout_digest
        self._num_elements = num_elements
        self._heavy = heavy
        self._donors = donors
        self._arrivals = Arrivals(folder, run_digest=run_digest, layout_digest=layout_digest)
        self._distrusted_until: dict[NodeId, float] = {}
        self._failed: set[NodeId] = set()  # gave no chunk when last asked for one
        self._looked_at: dict[NodeId, float] = {}  # when peers were asked what they have of a state
        self._finishing: dict[NodeId, float] = {}
        """Peers that fetched it until now, and until when they are asked whether they give all of it."""

    @property
    def arriving(self) -> Arriving | None:
        """What has come, all of it checked; others get it from here."""
        return self._arrivals.current

    async def fetch(self, oldest_round: int, is_the_swarms: IsTheSwarms) -> Snapshot | None:
        """The swarm's state at this round or a later one; None when nobody supplies it now.

        Then what has come is kept: ask again. `taken_over` ends it.
        """
        await self._heavy(self._arrivals.resume)
        while (candidate := await self._best_candidate(oldest_round, is_the_swarms)) is not None:
            arriving = await self._heavy(partial(self._arrivals.begin, candidate.manifest))
            await self._fetch_chunks(arriving, candidate.donors)
            if arriving.missing:
                return None
            snapshot = await self._heavy(arriving.snapshot)
            if snapshot is not None:
                return snapshot
            await self._heavy(arriving.check)
            log.warning("chunks were damaged after they came", chunks=len(arriving.missing))
        return None

    async def taken_over(self) -> None:
        """What has come is not needed any more."""
        await self._heavy(self._arrivals.discard)

    # Manifests

    async def _best_candidate(
        self, oldest_round: int, is_the_swarms: IsTheSwarms
    ) -> Candidate | None:
        """What to fetch: what has begun to come, if that is still served, or what most donors give."""
        arriving = self._arrivals.current
        begun = None if arriving is None else arriving.manifest
        others: dict[NodeId, ChunkMap] = {}  # who have something of it that we lack
        if arriving is not None and begun is not None and begun.round >= oldest_round:
            want = WantManifest(oldest_round=begun.round, newest_round=begun.round)
            candidates = await self._candidates(want)
            best = max((self._num_willing(candidate) for candidate in candidates), default=0)
            for candidate in candidates:
                is_begun = candidate.manifest == begun and self._num_willing(candidate) == best > 0
                if is_begun and await is_the_swarms(begun.round, begun.outer_digest):
                    return candidate
            others = await self._others_with(arriving)
            if others and not await is_the_swarms(begun.round, begun.outer_digest):
                others = {}
            willing = [others[peer] for peer in others if peer not in self._failed]
            if willing and np.logical_or.reduce(willing)[list(arriving.missing)].all():
                return Candidate(manifest=begun, donors=[])
        candidates = await self._candidates(WantManifest(oldest_round=oldest_round))
        candidates.sort(key=lambda c: (self._num_willing(c), c.manifest == begun, c.manifest.round))
        for candidate in reversed(candidates):
            manifest = candidate.manifest
            if await is_the_swarms(manifest.round, manifest.outer_digest):
                return candidate
            if manifest.chunks_with_values():  # else they wait for the first weights, as we do
                log.warning(
                    "a state is not the swarm's",
                    round=manifest.round,
                    peers=", ".join(candidate.donors),
                )
        if begun is not None and others:  # nobody is here who has all of any state
            return Candidate(manifest=begun, donors=[])
        return None

    def _num_willing(self, candidate: Candidate) -> int:
        """How many of its donors have not failed to give a chunk when last asked for one.

        Without this, who gives a manifest and never a chunk could keep us from all others.
        """
        return sum(donor not in self._failed for donor in candidate.donors)

    async def _candidates(self, want: WantManifest) -> list[Candidate]:
        """Asks peers, some at a time, until there are enough donors of one state.

        In place of one that is silent for a second the next is asked. A silent one is only waited for while
        nobody gives a manifest, and while others may answer sooner.
        """
        candidates: dict[Manifest, Candidate] = {}
        left = deque(self._trusted())
        asked: dict[asyncio.Task[Manifest | None], _Asked] = {}
        clock = asyncio.get_running_loop().time
        try:
            while True:
                best = max((len(each.donors) for each in candidates.values()), default=0)
                waits = [one.until - clock() for one in asked.values() if one.until > clock()]
                while left and len(waits) + best < ENOUGH_DONORS and len(asked) < MOST_ASKED:
                    patience = self._donors.silences.patience_seconds(left[0])
                    one = _Asked(left.popleft(), patience=patience, until=clock() + patience)
                    asked[asyncio.create_task(self._manifest_of(one.peer, want, one.hear))] = one
                    waits.append(patience)
                if best >= ENOUGH_DONORS or not asked or (candidates and not waits):
                    break
                timeout = min(waits, default=None)
                await asyncio.wait(asked, timeout=timeout, return_when=FIRST_COMPLETED)
                for task in [task for task in asked if task.done()]:  # the preferred peers first
                    peer = asked.pop(task).peer
                    if (manifest := task.result()) is not None:
                        candidate = Candidate(manifest=manifest, donors=[])
                        candidates.setdefault(manifest, candidate).donors.append(peer)
                        for one in asked.values():
                            one.hear()  # theirs may be a moment later
            if candidates:
                for one in asked.values():
                    self._donors.silences.note(one.peer, clock())
            return list(candidates.values())
        finally:
            await cancelled(asked)

    async def _manifest_of(
        self, peer: NodeId, want: WantManifest, heard: Callable[[], None] = do_nothing
    ) -> Manifest | None:
        with suppress(NotHeldError, TransferRefusedError):
            most_bytes = Manifest.body_bytes(self._num_elements)
            payload = await self._payload(peer, want, most_bytes, heard)
            if payload is None:
                return None
            try:
                manifest = Manifest.from_body(payload.body)
            except ManifestError as error:
                self._distrust(peer, str(error))
                return None
            ours = (payload.header.round, self._run_digest, self._layout_digest, self._num_elements)
            if ours == (
                manifest.round,
                manifest.run_digest,
                manifest.layout_digest,
                manifest.num_elements,
            ):
                return manifest
            self._distrust(peer, "its manifest is not of a state of this run")
        return None

    # Chunks

    async def _fetch_chunks(self, arriving: Arriving, donors: list[NodeId]) -> None:
        """Fetches what is missing, from these and further donors."""
        manifest = arriving.manifest
        log.info(
            "fetching a state",
            round=manifest.round,
            chunks=len(arriving.missing),
            of=len(manifest.chunk_digests),
            donors=len(donors),
        )
        spreading = Spreading(
            arriving.missing,
            donors,
            self._donors.silences,
            node_id=self._donors.node_id,
            num_chunks=len(manifest.chunk_digests),
            outer_digest=manifest.outer_digest,
        )
        clock = asyncio.get_running_loop().time
        progress = _Progress(arriving, spreading, began_at=clock())
        if not donors:
            await self._look(spreading, manifest)
        news = asyncio.Event()
        beside = [
            asyncio.create_task(self._look_on(spreading, manifest, news)),
            asyncio.create_task(self._recruit(spreading, manifest, news)),
        ]
        came_at, num_missing = clock(), len(arriving.missing)
        try:
            while True:
                await fetch_pieces(spreading, partial(self._fetch_chunk, arriving, progress), news)
                if len(arriving.missing) < num_missing:
                    came_at, num_missing = clock(), len(arriving.missing)
                is_over = clock() - came_at > self._donors.waits.recruit_seconds
                if not num_missing or not spreading.others or is_over:
                    return
                self._say(progress.in_words(clock()))
                await news.wait()
        finally:
            await cancelled(beside)

    async def _fetch_chunk(
        self,
        arriving: Arriving,
        progress: _Progress,
        index: int,
        donor: NodeId,
        heard: Callable[[], None],
    ) -> Outcome:
        manifest = arriving.manifest
        self._say(progress.in_words(asyncio.get_running_loop().time()))
        want = WantChunk(round=manifest.round, index=index, digest=manifest.chunk_digests[index])
        start, stop = manifest.span(index)
        self._failed.add(donor)
        try:
            payload = await self._payload(donor, want, stop - start, heard)
        except NotHeldError:
            log.info("a donor has gone on to another state", peer=donor, round=manifest.round)
            self._note_finishing(donor)
            return Outcome.OUT
        except TransferRefusedError:
            return Outcome.REFUSED
        if payload is None:
            return Outcome.OUT
        self._failed.discard(donor)
        # The transport has checked that the body has the digest that was asked for.
        await self._heavy(partial(arriving.put, index, payload.body))
        return Outcome.ARRIVED

    async def _recruit(self, spreading: Spreading, manifest: Manifest, news: asyncio.Event) -> None:
        """Looks for more donors of the same state, those that were out included.

        Peers that fetched it until now are asked sooner, and however many give it already.
        """
        clock, waits = asyncio.get_running_loop().time, self._donors.waits
        want = WantManifest(oldest_round=manifest.round, newest_round=manifest.round)
        due_at = clock() + waits.recruit_seconds
        while True:
            await asyncio.sleep(waits.look_seconds)
            is_due = clock() >= due_at
            if is_due:
                due_at = clock() + waits.recruit_seconds
            for peer in self._trusted():
                is_finishing = self._finishing.get(peer, 0.0) > clock()
                most = MOST_OTHERS if is_finishing else ENOUGH_DONORS if is_due else 0
                if peer in spreading.donors or spreading.num_whole >= most:
                    continue
                if await self._manifest_of(peer, want) == manifest:
                    self._finishing.pop(peer, None)
                    spreading.add_donor(peer)
                    news.set()

    async def _look_on(self, spreading: Spreading, manifest: Manifest, news: asyncio.Event) -> None:
        while True:
            await self._look(spreading, manifest)
            news.set()
            await asyncio.sleep(self._donors.waits.look_seconds)

    async def _look(self, spreading: Spreading, manifest: Manifest) -> None:
        """Asks peers which chunks they have: those that fetch the state too, and in turn all others."""
        now = asyncio.get_running_loop().time()
        others = spreading.others
        beside = [
            peer
            for peer in self._near()
            if peer not in spreading.donors and self._looked_at.get(peer, 0.0) <= now
        ]
        beside.sort(key=lambda peer: self._looked_at.get(peer, 0.0))
        asked = (*others, *beside[: max(LOOKED_AT_BESIDE, MOST_OTHERS - len(others))])
        found = await asyncio.gather(*(self._map_of(peer, manifest) for peer in asked))
        trusted = self._trusted()  # some may have lied meanwhile
        for peer, (has_answered, chunk_map) in zip(asked, found, strict=True):
            if chunk_map is not None and peer in trusted:
                alike = spreading.num_whole if chunk_map.all() else len(spreading.others)
                if peer in spreading.others or alike < MOST_OTHERS:
                    spreading.take_map(peer, chunk_map)
            elif has_answered and peer in others:
                spreading.drop_donor(peer)
                self._note_finishing(peer)
        spreading.put_in_order()

    async def _others_with(self, arriving: Arriving) -> dict[NodeId, ChunkMap]:
        """The maps of peers that fetch a state too, and have something of it that is missing here."""
        asked, missing = self._near()[:MOST_OTHERS], list(arriving.missing)
        found = await asyncio.gather(*(self._map_of(peer, arriving.manifest) for peer in asked))
        return {
            peer: chunk_map
            for peer, (_, chunk_map) in zip(asked, found, strict=True)
            if chunk_map is not None and chunk_map[missing].any()
        }

    async def _map_of(self, peer: NodeId, manifest: Manifest) -> tuple[bool, ChunkMap | None]:
        """Whether a peer answers, and which chunks it has of a state that it gives or fetches."""
        now = asyncio.get_running_loop().time()
        self._looked_at[peer] = now
        num_chunks = len(manifest.chunk_digests)
        want = WantChunkMap(round=manifest.round, outer_digest=manifest.outer_digest)
        try:
            payload = await self._payload(
                peer, want, -(-num_chunks // 8), timeout_seconds=MAP_SECONDS
            )
        except NotHeldError:
            return True, None
        except TransferRefusedError:
            payload = None
        if payload is None:
            self._looked_at[peer] = now + self._donors.waits.recruit_seconds
            return False, None
        return True, read_map(payload.body, num_chunks)

    def _note_finishing(self, peer: NodeId) -> None:
        """A peer has no part of the state any more: it may have taken it over, and give all of it soon."""
        now = asyncio.get_running_loop().time()
        self._finishing[peer] = now + FINISHING_SECONDS
        self._looked_at[peer] = now + self._donors.waits.recruit_seconds

    # Peers

    async def _payload(
        self,
        peer: NodeId,
        want: Want,
        max_body_bytes: int,
        heard: Callable[[], None] = do_nothing,
        timeout_seconds: float | None = None,
    ) -> Payload | None:
        """What a peer answers, or None when that is nothing of use.

        Raises NotHeldError, and TransferRefusedError from who may be asked again.
        """
        try:
            return await self._donors.transport.fetch(
                peer,
                want,
                max_body_bytes=max_body_bytes,
                timeout_seconds=timeout_seconds or self._donors.waits.for_fetch_of(max_body_bytes),
                heard=heard,
            )
        except FalseAnswerError as error:
            self._distrust(peer, str(error))
        except PeerUnreachableError as error:
            log.info("a donor does not deliver", peer=peer, why=str(error))
        except TransferRefusedError as error:
            log.info("a donor refuses", peer=peer, why=str(error))
            raise
        return None

    def _trusted(self) -> tuple[NodeId, ...]:
        """Whom to ask, those last that were silent lately."""
        now = asyncio.get_running_loop().time()
        trusted = (p for p in self._donors.peers() if self._distrusted_until.get(p, 0.0) <= now)
        return tuple(sorted(trusted, key=lambda peer: self._donors.silences.has(peer, now)))

    def _near(self) -> tuple[NodeId, ...]:
        """Those of them that are reached without a third member.

        What a member carries takes its uplink, which may be the holder's: that had better give the chunks.
        """
        unreachable = frozenset(self._donors.transport.seen().unreachable)
        return tuple(peer for peer in self._trusted() if peer not in unreachable)

    def _distrust(self, peer: NodeId, why: str) -> None:
        log.warning("a donor lies, and is not asked for a while", peer=peer, why=why)
        until = asyncio.get_running_loop().time() + self._donors.waits.distrust_seconds
        self._distrusted_until[peer] = until
