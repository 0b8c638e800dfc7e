"""What of the run's tokens is still to come from peers: which pieces samples need, in which order.

The daemon has it, for it has the way to the peers. Ranks are asked to train what is here, and read it
from the folder that pieces are put into.
"""

import asyncio
from collections.abc import Container, Iterable, Sequence
from functools import partial
from typing import Protocol

import structlog

from node.heavy import Heavy, cancelled
from node.island.data.dataset import Indices, SampleOrder, held_out_choice
from node.island.data.held import TokensHere
from node.island.data.manifest import Piece, Split
from node.island.data.opening import open_dataset
from node.island.data.places import DataPlaces
from node.island.data.token_shards import TokenShards
from node.island.island import InnerWork
from node.island.ranks.faults import LostPieceError
from protocol.errors import BadDataError, ConfigError, UnavailableError
from protocol.run.run_spec import RunSpec
from protocol.wire.rounds import Digest, NodeId

log = structlog.get_logger()

FETCHES_AT_ONCE = 4
"""Pieces under way: with 16 MiB each, 64 MiB of memory."""

MOST_SAMPLES = 1 << 14
"""Of a round that pieces are looked up for at a time."""

NEXT_STEP = "name a folder that has it with data = in node.toml, or start a node that has it"

MOST_LOSSES = 3
LOSSES_SECONDS = 3600.0
"""A piece that is damaged or gone so often, in so long, is this machine's fault."""

Needs = Sequence[frozenset[Piece]]
"""The pieces that each of some inner steps reads and that are in no folder of this node."""


class TokenSource(Protocol):
    """Where tokens come from: node.exchange.tokens asks the other members."""

    async def manifest(self) -> tuple[NodeId, bytes] | None:
        """What a member gives as the manifest, unchecked; None where nobody does."""

    async def piece(self, digest: Digest, number: int, num_bytes: int) -> bytes | None:
        """A piece, checked; None where nobody gives it now."""

    async def pause(self, asked: int) -> None:
        """Waits after everybody was asked in vain for the `asked`-th time."""

    def distrust(self, peer: NodeId, why: str) -> None:
        """Asks this member for nothing more."""


class TokenSupply:
    """Fetches what is wanted, in that order, and tells what nobody gives."""

    def __init__(
        self, *, spec: RunSpec, places: DataPlaces, held: TokensHere, heavy: Heavy
    ) -> None:
        self._spec = spec
        self._places = places
        self._held = held
        self._heavy = heavy
        self._shards: TokenShards | None = None
        self._order: SampleOrder | None = None
        self._wanted: dict[Piece, None] = {}
        self._under_way: set[Piece] = set()
        self._resting: set[Piece] = set()  # asked for in vain, until the next time
        self._lacking: set[Piece] = set()  # likewise, until they come or are not wanted any more
        self._spared: set[str] = set()  # digests of what is read now, and next
        self._sparing = asyncio.Lock()  # what comes makes no room of what is being found here
        self._has_manifest = False
        self._told: set[str] = set()
        self._losses: dict[str, tuple[float, ...]] = {}  # by digest: when it was damaged or gone
        self.changed = asyncio.Event()
        """Something has come, or nobody gives it; whoever waits clears it."""
        self._work = asyncio.Event()

    # What is here

    async def has_manifest(self) -> bool:
        """Whether ranks can be started."""
        self._has_manifest = await self._heavy(self._held.listed) is not None
        return self._has_manifest

    @property
    def has_all(self) -> bool:
        """Whether folders of this node have every shard: then nothing has to come."""
        return self._held.has_all

    @property
    def lacks(self) -> str:
        """What this node waits for and nobody gives, in words; empty where there is nothing of it."""
        if not self._has_manifest:
            return "the manifest of the run's tokens"
        if not self._lacking:
            return ""
        first = min(self._lacking, key=lambda piece: piece.place)
        more = f" and {len(self._lacking) - 1} more" if len(self._lacking) > 1 else ""
        return f"{self._named(first)}{more}"

    @property
    def waiting_for(self) -> str:
        """What is to come, for people; empty where nothing is."""
        if lacks := self.lacks:
            return f"{lacks}, which no member gives: {NEXT_STEP}"
        num = len(self._wanted)
        return f"{num} piece{'s' if num > 1 else ''} of the tokens from peers" if num else ""

    async def needs_of(self, work: InnerWork, first_step: int) -> Needs:
        """What the steps of a round's work need, from one on; not all of them where they are many."""
        return await self._heavy(partial(self._needs_of, work, first_step))

    def _needs_of(self, work: InnerWork, first_step: int) -> Needs:
        shards, order = self._opened()
        batch = self._spec.inner.batch
        most = min(
            min(work.inner_steps, work.num_samples // batch) - first_step,
            max(1, MOST_SAMPLES // batch),
        )
        indices = order.indices(work.first_sample + first_step * batch, most * batch)
        return [
            self._far(shards, "training", indices[step * batch : (step + 1) * batch])
            for step in range(most)
        ]

    async def held_out_needs(self) -> frozenset[Piece]:
        """What an evaluation needs."""
        return await self._heavy(self._held_out_needs)

    def _held_out_needs(self) -> frozenset[Piece]:
        shards, _ = self._opened()
        chosen = held_out_choice(self._spec.evaluation.samples, shards.num_held_out_samples)
        return self._far(shards, "held_out", chosen)

    async def first_needs(self) -> frozenset[Piece]:
        """What ranks read when they compile: the first batch, and an evaluation."""
        batch = self._spec.inner.batch
        shards, order = await self._heavy(self._opened)
        first = self._far(shards, "training", order.indices(0, batch))
        return first | await self.held_out_needs()

    def _far(self, shards: TokenShards, split: Split, indices: Indices) -> frozenset[Piece]:
        listed = self._held.listed()
        assert listed is not None
        return frozenset(
            listed.by_place[place]
            for place in shards.pieces_of(split, indices)
            if self._held.path_of(listed, listed.by_place[place]) is None
        )

    def _opened(self) -> tuple[TokenShards, SampleOrder]:
        if self._shards is None or self._order is None:
            shards = open_dataset(self._spec, self._places)
            assert isinstance(shards, TokenShards)
            self._shards = shards
            self._order = SampleOrder.of(self._spec.run.seed, shards)
        return self._shards, self._order

    async def arrange(self, needs: Needs) -> int:
        """How many of the first steps have all they need here; what others need is wanted from now on.

        Raises ConfigError where one step does not fit into the cache.
        """
        first = _bytes_of(needs[0])
        if first > self._held.cache_bytes:
            raise ConfigError(
                f"one inner step reads {len(needs[0])} pieces of the tokens that are not on this machine, "
                f"{first:,} bytes, and data_cache holds {self._held.cache_bytes:,}",
                next_step="let data_cache in node.toml be larger, or lower [inner] batch",
            )
        async with self._sparing:
            here = await self._heavy(self._held.cache.digests)
            room = max(first, await self._heavy(self._held.cache.room_bytes))
            num_ready, ready, wanted = ready_steps(needs, here, limit_bytes=room)
            self._spared = {piece.digest for piece in ready}
            self._spared |= {p.digest for p in wanted if p in needs[num_ready]} if wanted else set()
        await self._heavy(partial(self._touch, (*wanted, *ready)))
        self.want(piece for piece in wanted if piece.digest not in here)
        return num_ready

    async def missing(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Those that are not here."""
        here = await self._heavy(self._held.cache.digests)
        return _in_order(piece for piece in pieces if piece.digest not in here)

    def _touch(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            self._held.cache.touch(piece.digest)

    def lacks_any(self, pieces: Iterable[Piece]) -> bool:
        """Whether nobody gives one of them now."""
        return not self._lacking.isdisjoint(pieces)

    async def lose(self, lost: LostPieceError) -> None:
        """A rank met a piece that is damaged or gone, so it is fetched again.

        Raises UnavailableError where that happens to it again and again.
        """
        now = asyncio.get_running_loop().time()
        before = self._losses.get(lost.piece, ())
        losses = (*(at for at in before if now - at < LOSSES_SECONDS), now)
        self._losses[lost.piece] = losses
        if len(losses) >= MOST_LOSSES:
            raise UnavailableError(
                f"{MOST_LOSSES} times: {lost.what}", next_step=lost.next_step
            ) from lost
        await self._heavy(partial(self._held.lose, lost.piece))
        log.warning("a piece of the run's tokens is fetched again", why=lost.what)

    # What comes

    @property
    def wanted(self) -> tuple[Piece, ...]:
        """What is to come, in this order."""
        return tuple(self._wanted)

    def want(self, pieces: Iterable[Piece]) -> None:
        """Fetches these in this order, and nothing else that is not under way."""
        self._wanted = dict.fromkeys(pieces)
        self._lacking &= self._wanted.keys()
        self._resting &= self._wanted.keys()
        self._work.set()

    async def fetch_manifest(self, source: TokenSource) -> None:
        """Returns once the manifest is here, from whichever member has it."""
        asked = 0
        while not await self.has_manifest():
            found = await source.manifest()
            if found is None:
                asked += 1
                if asked > 1:  # at first the node has yet to hear of any member
                    self._tell(self.lacks)
                await source.pause(asked)
                continue
            peer, text = found
            try:
                await self._heavy(
                    partial(self._held.keep_manifest, text, origin=f"what {peer} gave")
                )
            except BadDataError as error:
                source.distrust(peer, error.what)
            else:
                log.info("the manifest of the run's tokens has come", peer=peer)

    async def fetch_tokenizer(self, source: TokenSource) -> None:
        """Returns once the tokenizer's files are here: ranks do without, `atoll export` does not."""
        asked = 0
        while names := await self._heavy(self._held.lacking_tokenizer):
            listed = self._held.listed()
            assert listed is not None
            for name in names:
                pieces = [piece for piece in listed.pieces if piece.file == name]
                contents = [await self._content(source, piece) for piece in pieces]
                whole = [content for content in contents if content is not None]
                if len(whole) < len(pieces):
                    asked += 1
                    await source.pause(asked)
                    break
                await self._heavy(partial(self._held.keep_tokenizer, name, b"".join(whole)))

    async def run(self, source: TokenSource) -> None:
        """Fetches what is wanted, some pieces at a time, until it is cancelled. Raises AtollError."""
        tasks: dict[asyncio.Task[bool], Piece] = {}
        pausing: asyncio.Task[None] | None = None
        asked = 0
        try:
            while True:
                for piece in self._due(len(tasks)):
                    self._under_way.add(piece)
                    tasks[asyncio.ensure_future(self._fetch(source, piece))] = piece
                if pausing is None and self._resting:
                    asked += 1
                    pausing = asyncio.ensure_future(source.pause(asked))
                self._work.clear()
                work = asyncio.ensure_future(self._work.wait())
                waits = [work, *tasks, *([pausing] if pausing is not None else [])]
                try:
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    work.cancel()
                for task in [task for task in tasks if task.done()]:
                    self._under_way.discard(tasks.pop(task))
                    asked = 0 if task.result() else asked
                if pausing is not None and pausing.done():
                    pausing = None
                    self._resting.clear()
        finally:
            if pausing is not None:
                pausing.cancel()
            await cancelled(tasks)

    def _due(self, num_under_way: int) -> list[Piece]:
        due = [p for p in self._wanted if p not in self._under_way and p not in self._resting]
        return due[: max(0, FETCHES_AT_ONCE - num_under_way)]

    async def _fetch(self, source: TokenSource, piece: Piece) -> bool:
        """Whether it came."""
        content = await self._content(source, piece)
        if content is not None:
            async with self._sparing:
                keep = partial(self._held.keep, piece, content, spare=self._spared)
                await self._heavy(keep)
            self._wanted.pop(piece, None)
            self._lacking.discard(piece)
        elif piece in self._wanted:
            self._lacking.add(piece)
            self._resting.add(piece)
            self._tell(self._named(piece))
        self.changed.set()
        return content is not None

    @staticmethod
    async def _content(source: TokenSource, piece: Piece) -> bytes | None:
        digest = Digest(bytes.fromhex(piece.digest))
        return await source.piece(digest, piece.place, piece.bytes)

    def _named(self, piece: Piece) -> str:
        damaged = self._held.damaged_file(piece)
        at = "" if damaged is None else f" (damaged in {damaged})"
        return f"piece {piece.number} of {piece.file}{at}"

    def _tell(self, what: str) -> None:
        """Once for each, however often peers are asked for it."""
        if what not in self._told:
            self._told.add(what)
            log.warning(f"no member gives {what}: {NEXT_STEP}")


def ready_steps(
    needs: Needs, here: Container[str], *, limit_bytes: int
) -> tuple[int, list[Piece], list[Piece]]:
    """How many first steps can be taken now, what they read, and what to have here for the next ones.

    `here` are digests. The first list is half of the limit, or one step's; both together fit into it, so
    that neither drives the other out.
    """
    num_ready = 0
    ready: dict[Piece, None] = {}
    for step in needs:
        if not all(piece.digest in here for piece in step):
            break
        if num_ready and _bytes_of(ready.keys() | step) > limit_bytes // 2:
            break
        ready |= dict.fromkeys(_in_order(step))
        num_ready += 1
    left = limit_bytes - _bytes_of(ready)
    wanted: dict[Piece, None] = {}
    for step in needs[num_ready:]:
        for piece in _in_order(step - ready.keys() - wanted.keys()):
            left -= piece.bytes
            if left < 0:
                return num_ready, list(ready), list(wanted)
            wanted[piece] = None
    return num_ready, list(ready), list(wanted)


def _in_order(pieces: Iterable[Piece]) -> list[Piece]:
    return sorted(pieces, key=lambda piece: piece.place)


def _bytes_of(pieces: Iterable[Piece]) -> int:
    return sum(piece.bytes for piece in pieces)
