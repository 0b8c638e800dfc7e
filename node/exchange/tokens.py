"""The run's tokens between members: what this node gives to peers, and what it asks them for.

Peers ask each other what they have, as a bit for each piece, and remember the answers; nobody else has to
know. Where tokens lie on this machine, and which are wanted, is node.island.data's business. A run of private
data has no HeldTokens, so there is nothing to give.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Protocol

import structlog

from node.exchange.peers import (
    FalseAnswerError,
    NotHeldError,
    Patience,
    PeerUnreachableError,
    TransferRefusedError,
    Transport,
    Waits,
    WantTokens,
)
from node.heavy import Heavy, cancelled
from protocol.errors import BadDataError
from protocol.wire.payload import PIECE, PIECE_MAP, TOKENS_MANIFEST, Payload
from protocol.wire.rounds import Digest, NodeId, RosterEntry

log = structlog.get_logger()

GIVE_WAY_SECONDS = 30.0
"""How long a piece waits for an exchange of this node to end. Then it shares the uplink with it: peers
without data cannot contribute either."""

LOOK_SECONDS = 0.2
ANSWER_SECONDS = 30.0
MAP_SECONDS = 5.0
"""A peer is not asked more often what it has."""

OVERDUE_SECONDS = 90.0
MOST_ASKED = 2
"""After so long a piece is asked of another member too, of so many at once: the first may hang."""

FIRST_PAUSE_SECONDS = 2.0
MOST_MANIFEST_BYTES = 64 << 20  # 16 TB of tokens
MOST_MAP_BYTES = 1 << 20
USUAL_MANIFEST_BYTES = 4 << 20  # of a terabyte


class HeldTokens(Protocol):
    """What this node has of the run's tokens: node.island.data.held implements it. Calls are heavy."""

    @property
    def digest(self) -> Digest:
        """The manifest's, as in the run file."""

    def manifest(self) -> bytes | None:
        """The manifest file; None where it is not here."""

    def piece_map(self) -> bytes:
        """A bit for each piece, by node.island.data.manifest's order; empty without a manifest."""

    def piece(self, digest: Digest) -> bytes | None:
        """A piece, None where it is not here; raises BadDataError where it is damaged."""


def is_in(piece_map: bytes, number: int) -> bool:
    """Whether a piece is in a map."""
    return number // 8 < len(piece_map) and bool(piece_map[number // 8] >> number % 8 & 1)


class PeerTokens:
    """Gives pieces to members, exchanges first, and fetches pieces from them."""

    def __init__(
        self,
        *,
        held: HeldTokens,
        is_given: bool,
        node_id: NodeId,
        run_digest: Digest,
        transport: Transport,
        heavy: Heavy,
        is_exchanging: Callable[[], bool],
        rng: random.Random,
    ) -> None:
        """`is_given` is the owner's word; without it the node only asks."""
        self._held = held
        self._is_given = is_given
        self._node_id = node_id
        self._transport = transport
        self._heavy = heavy
        self._is_exchanging = is_exchanging
        self._rng = rng
        self._seal = partial(
            Payload.seal,
            run_digest=run_digest,
            round=0,
            fragment=0,
            slice_index=0,
            start=0,
            num_elements=0,
            codec="bytes/1",
            tokens=0,
            sender_id=node_id,
        )
        self._names: dict[NodeId, str] = {}  # of the other members
        self._maps: dict[NodeId, bytes] = {}
        self._asked_at: dict[NodeId, float] = {}
        self._asking = asyncio.Lock()
        self._false: set[NodeId] = set()
        self._busy: Counter[NodeId] = Counter()
        self._patience = Patience(rng)

    def set_roster(self, members: tuple[RosterEntry, ...]) -> None:
        """Says whom to ask. Somebody new ends a pause."""
        names = {m.node_id: m.node_name for m in members if m.node_id != self._node_id}
        if names.keys() - self._names.keys():
            self._patience.tell()
        self._names = names
        for gone in self._asked_at.keys() - names.keys():
            del self._asked_at[gone]
            self._maps.pop(gone, None)

    # What peers ask for

    async def supply(self, sender: NodeId, want: WantTokens) -> Payload | None:
        """What a member asks for; None where it is not here. Raises TransferRefusedError."""
        if not self._is_given:
            raise TransferRefusedError("this node's owner does not let it give tokens")
        if want.kind != PIECE and want.digest != self._held.digest:
            return None
        body: bytes | None
        if want.kind == TOKENS_MANIFEST:
            body = await self._heavy(self._held.manifest)
        elif want.kind == PIECE_MAP:
            body = await self._heavy(self._held.piece_map)
        else:
            return await self._piece_for(sender, want.digest)
        return None if not body else self._seal(kind=want.kind, body=body)

    async def _piece_for(self, sender: NodeId, digest: Digest) -> Payload | None:
        """After a while where an exchange is under way. The transport gives few pieces at once."""
        await self._give_way()
        try:
            return await self._heavy(partial(self._sealed_piece, digest))
        except BadDataError as error:
            log.error("not given to a peer", why=str(error), to=self._name(sender))
            raise TransferRefusedError(error.what) from error

    def _sealed_piece(self, digest: Digest) -> Payload | None:
        body = self._held.piece(digest)
        return None if body is None else self._seal(kind=PIECE, body=body)

    async def _give_way(self) -> None:
        """Small steps rather than an event: exchanges begin and end all the time."""
        for _ in range(round(GIVE_WAY_SECONDS / LOOK_SECONDS)):
            if not self._is_exchanging():
                return
            await asyncio.sleep(LOOK_SECONDS)

    # What this node asks for

    async def manifest(self) -> tuple[NodeId, bytes] | None:
        """What the first member that has one gives as the manifest, unchecked; None where nobody does."""
        want = WantTokens(kind=TOKENS_MANIFEST, digest=self._held.digest)
        for peer in self._peers():
            body = await self._fetched(peer, want, MOST_MANIFEST_BYTES)
            if body is not None:
                return peer, body
        return None

    async def piece(self, digest: Digest, number: int, num_bytes: int) -> bytes | None:
        """The piece with this digest, which has that number in maps; None where nobody gives it now.

        Its digest is checked before anybody sees it.
        """
        want = WantTokens(kind=PIECE, digest=digest)
        for is_last_try in (False, True):
            content = await self._from_holders(want, number, num_bytes)
            if content is not None or is_last_try:
                return content
            await self._ask_for_maps()
        raise AssertionError("the last try returns")

    async def _from_holders(self, want: WantTokens, number: int, num_bytes: int) -> bytes | None:
        """Asks one after the other; beside one that takes long, a second one."""
        tried: set[NodeId] = set()
        fetches: set[asyncio.Task[bytes | None]] = set()
        try:
            while True:
                others = [peer for peer in self._holders(number) if peer not in tried]
                if others and len(fetches) < MOST_ASKED:
                    tried.add(others[0])
                    fetches.add(asyncio.create_task(self._asked(others[0], want, num_bytes)))
                if not fetches:
                    return None
                done, fetches = await asyncio.wait(
                    fetches, timeout=OVERDUE_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                for fetched in done:
                    if (content := fetched.result()) is not None:
                        return content
        finally:
            await cancelled(fetches)

    async def _asked(self, peer: NodeId, want: WantTokens, num_bytes: int) -> bytes | None:
        self._busy[peer] += 1
        try:
            return await self._fetched(peer, want, num_bytes)
        finally:
            self._busy[peer] -= 1

    async def pause(self, asked: int) -> None:
        """Waits after everybody was asked in vain for the `asked`-th time; news end it."""
        await self._patience.pause(asked, first_seconds=FIRST_PAUSE_SECONDS)

    def distrust(self, peer: NodeId, why: str) -> None:
        """Asks this member for nothing more: it gave something false."""
        self._false.add(peer)
        self._maps.pop(peer, None)
        log.warning(
            "a member gives false tokens, and is not asked again", peer=self._name(peer), why=why
        )

    def _name(self, peer: NodeId) -> str:
        return f"{self._names.get(peer, 'unknown')} ({peer})"

    def _peers(self) -> list[NodeId]:
        unreachable = frozenset(self._transport.seen().unreachable)
        return [p for p in self._names if p not in unreachable and p not in self._false]

    def _holders(self, number: int) -> list[NodeId]:
        """Who said to have the piece, the idle first."""
        peers = [p for p in self._peers() if is_in(self._maps.get(p, b""), number)]
        self._rng.shuffle(peers)
        return sorted(peers, key=lambda peer: self._busy[peer])

    async def _ask_for_maps(self) -> None:
        """Asks members what they have, unless they said so a moment ago."""
        clock = asyncio.get_running_loop().time
        async with self._asking:
            due = [
                peer
                for peer in self._peers()
                if clock() - self._asked_at.get(peer, -MAP_SECONDS) >= MAP_SECONDS
            ]
            want = WantTokens(kind=PIECE_MAP, digest=self._held.digest)
            found = await asyncio.gather(
                *(self._fetched(peer, want, MOST_MAP_BYTES) for peer in due)
            )
            for peer, piece_map in zip(due, found, strict=True):
                self._asked_at[peer] = clock()
                if piece_map is not None and peer not in self._false:
                    self._maps[peer] = piece_map

    async def _fetched(self, peer: NodeId, want: WantTokens, most_bytes: int) -> bytes | None:
        """What a member answers; None where that is nothing."""
        try:
            payload = await self._transport.fetch(
                peer,
                want,
                max_body_bytes=most_bytes,
                timeout_seconds=_patience_for(want, most_bytes),
            )
        except FalseAnswerError as error:
            self.distrust(peer, str(error))
        except PeerUnreachableError as error:
            self._maps.pop(peer, None)
            log.info("a member does not give tokens", peer=self._name(peer), why=str(error))
        except TransferRefusedError as error:
            log.info("a member refuses to give tokens", peer=self._name(peer), why=str(error))
        except NotHeldError:
            pass
        else:
            return payload.body
        return None


def _patience_for(want: WantTokens, most_bytes: int) -> float:
    """Seconds. For a map all wait for all members, so one that hangs must not hold it up."""
    if want.kind == PIECE_MAP:
        return ANSWER_SECONDS
    return Waits().for_fetch_of(most_bytes if want.kind == PIECE else USUAL_MANIFEST_BYTES)
