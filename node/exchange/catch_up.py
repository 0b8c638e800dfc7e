"""How a node gets from the outer state it holds to the committed one.

First by replay: fetch the committed results after its round from whoever holds them and apply them
in order. Failing that by a snapshot from a peer, whose digest must be the one that the swarm
settled on. Donors may lie or die: what does not match is thrown away and another one is asked.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import structlog

from node.exchange.codecs.codec import CodecError
from node.exchange.held_results import HeldResults
from node.exchange.outer import Outer, Pending, UnequalBaseError
from node.exchange.round import check_result_header
from node.exchange.snapshot import Snapshot, SnapshotError
from node.exchange.transport.transport import (
    NotHeldError,
    PeerUnreachableError,
    TransferRefusedError,
    Transport,
    WantResult,
    WantSnapshot,
)
from node.heavy import Heavy
from protocol.payload import RESULT, SNAPSHOT, Payload
from protocol.rounds import Commit, Digest, NodeId, SliceOutcome

log = structlog.get_logger()

FETCH_SECONDS = 300.0
"""A fetch that takes longer is given up and another holder is asked."""

PAUSE_SECONDS = 1.0
"""Between two rounds of asking everybody."""

ASKS_BEFORE_SNAPSHOT = 3
"""How often everybody is asked for a result before the node falls back to a snapshot."""


class CatchUp:
    """Applies commits, fetching what is missing."""

    def __init__(
        self,
        *,
        node_id: NodeId,
        run_digest: Digest,
        outer: Outer,
        held: HeldResults,
        transport: Transport,
        heavy: Heavy,
        list_commits: Callable[[int], Awaitable[tuple[Commit, ...]]],
        peers: Callable[[], tuple[NodeId, ...]],
    ) -> None:
        self.waiting_for = ""
        self._node_id = node_id
        self._run_digest = run_digest
        self._outer = outer
        self._held = held
        self._transport = transport
        self._heavy = heavy
        self._list_commits = list_commits
        self._peers = peers

    async def to_commit(self, commit: Commit, pending: Pending | None) -> None:
        """Reaches the commit's round or a later one."""
        if commit.round <= self._outer.round:
            return
        if not await self._applied(commit, pending):
            await self.to_round(commit.round, pending)

    async def to_round(self, round: int, pending: Pending | None) -> None:
        """Reaches a committed round or a later one, by replay or by snapshot."""
        while self._outer.round < round:
            commits = await self._list_commits(self._outer.round)
            if not commits:
                self.waiting_for = f"the coordinator to list round {self._outer.round + 1}"
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            for commit in commits:
                if not await self._applied(commit, pending):
                    await self._fetch_snapshot(at_least_round=commit.round, known=None)
                    break
        self.waiting_for = ""

    async def replace(self, round: int, digest: Digest) -> None:
        """Takes over a peer's state, even when we hold one of the same round."""
        await self._fetch_snapshot(at_least_round=round, known=(round, digest))
        self.waiting_for = ""

    async def _applied(self, commit: Commit, pending: Pending | None) -> bool:
        """Fetches what is missing of a commit and applies it; False when only a snapshot helps."""
        if commit.round != self._outer.round + 1 or commit.base_digest != self._outer.digest:
            log.warning(
                "our state is not the commit's base", round=commit.round, ours=self._outer.round
            )
            return False
        results: dict[int, Payload] = {}
        for outcome in commit.slices:
            if outcome.digest is None:
                continue
            payload = await self._result(commit, outcome)
            if payload is None:
                log.warning("nobody supplies a result", round=commit.round, slice=outcome.index)
                return False
            results[outcome.index] = payload
        try:
            await self._heavy(lambda: self._outer.apply(commit, results, pending))
        except (UnequalBaseError, CodecError) as error:
            log.warning("commit not applied", round=commit.round, why=str(error))
            return False
        return True

    async def _result(self, commit: Commit, outcome: SliceOutcome) -> Payload | None:
        assert outcome.digest is not None
        want = WantResult(round=commit.round, slice_index=outcome.index, digest=outcome.digest)
        max_body_bytes = self._outer.downlink.encoded_bytes(outcome.num_elements)
        for attempt in range(ASKS_BEFORE_SNAPSHOT):
            if attempt:
                await asyncio.sleep(PAUSE_SECONDS)
            payload = self._held.find(commit.round, outcome.index, outcome.digest)
            if payload is not None:
                return payload
            self.waiting_for = f"slice {outcome.index} of round {commit.round}"
            for peer in self._whom_to_ask(outcome.holder_ids):
                payload = await self._fetched(peer, want, max_body_bytes)
                if payload is None:
                    continue
                if payload.header.kind != RESULT or payload.digest != outcome.digest:
                    log.warning("a donor sent another result", peer=peer, round=commit.round)
                    continue
                try:
                    check_result_header(
                        payload.header, outcome.start, outcome.num_elements, self._outer
                    )
                except TransferRefusedError as error:
                    log.warning("a result is malformed", peer=peer, why=str(error))
                    continue
                self._held.hold(payload)
                return payload
        return None

    def _whom_to_ask(self, first: tuple[NodeId, ...]) -> tuple[NodeId, ...]:
        """The holders at the moment of commit, then everybody else who is a member now."""
        peers = self._peers()
        known = [peer for peer in first if peer in peers]
        return (*known, *(peer for peer in peers if peer not in known))

    async def _fetched(
        self, peer: NodeId, want: WantResult | WantSnapshot, max_body_bytes: int
    ) -> Payload | None:
        try:
            return await self._transport.fetch(
                peer, want, max_body_bytes=max_body_bytes, timeout_seconds=FETCH_SECONDS
            )
        except NotHeldError:
            return None
        except (PeerUnreachableError, TransferRefusedError) as error:
            log.info("a donor does not deliver", peer=peer, why=str(error))
            return None

    async def _fetch_snapshot(
        self, *, at_least_round: int, known: tuple[int, Digest] | None
    ) -> None:
        """Asks peer after peer for a snapshot until one has the swarm's digest. Never gives up.

        What this node still owed is dropped with its old state, and said: a residual belongs to the
        state it was formed on.
        """
        max_body_bytes = Snapshot.body_bytes(self._outer.layout.num_elements)
        want = WantSnapshot(at_least_round=at_least_round)
        while True:
            self.waiting_for = f"a snapshot of round {at_least_round} or later"
            for peer in self._peers():
                payload = await self._fetched(peer, want, max_body_bytes)
                snapshot = await self._checked(peer, payload, at_least_round, known)
                if snapshot is not None:
                    await self._heavy(partial(self._outer.restore, snapshot, None))
                    log.info("state fetched", round=snapshot.round, peer=peer, residual="dropped")
                    return
            await asyncio.sleep(PAUSE_SECONDS)

    async def _checked(
        self,
        peer: NodeId,
        payload: Payload | None,
        at_least_round: int,
        known: tuple[int, Digest] | None,
    ) -> Snapshot | None:
        if payload is None or payload.header.kind != SNAPSHOT:
            return None
        try:
            snapshot = await self._heavy(lambda: Snapshot.from_body(payload.body))
        except SnapshotError as error:
            log.warning("a snapshot is malformed", peer=peer, why=str(error))
            return None
        digest = await self._digest_at(snapshot.round, known)
        if (
            snapshot.round < at_least_round
            or digest is None
            or snapshot.run_digest != self._run_digest
            or snapshot.layout_digest != self._outer.layout_digest
            or await self._heavy(snapshot.outer_digest) != digest
        ):
            log.warning("a snapshot is not the swarm's state", peer=peer, round=snapshot.round)
            return None
        return snapshot

    async def _digest_at(self, round: int, known: tuple[int, Digest] | None) -> Digest | None:
        """The digest that the swarm settled on for a round, or None while it has not."""
        if known is not None and known[0] == round:
            return known[1]
        if round < 1:
            return None
        commits = await self._list_commits(round - 1)
        return commits[0].outer_digest if commits and commits[0].round == round else None
