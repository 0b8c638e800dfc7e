"""A round's third part: results come from their reducers, and are held for the commit and for peers."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any

import structlog

from node.exchange.codecs.codec import CodecError
from node.exchange.fitting import check_fits, place_of
from node.exchange.held_results import HeldResults
from node.exchange.outer import Outer
from node.exchange.reports import Held, Report
from node.exchange.transport.transport import (
    Admission,
    NotHeldError,
    PeerUnreachableError,
    TransferRefusedError,
    Transport,
    WantResult,
)
from node.heavy import Heavy
from protocol.payload import Payload, PayloadHeader
from protocol.rounds import Commit, Digest, NodeId, Slice

log = structlog.get_logger()

GRACE_SECONDS = 2.0
"""How long after the commit the push of a result may begin, before we fetch it ourselves."""

ARRIVING_SECONDS = 60.0
"""How long after the commit a push that has begun may take, before we fetch the result ourselves."""


class Holding:
    """The results of one round that others reduce. `slices` says who does so now."""

    def __init__(
        self,
        *,
        round: int,
        slices: Mapping[int, Slice],
        outer: Outer,
        held: HeldResults,
        transport: Transport,
        heavy: Heavy,
        report: Callable[[Report], None],
        start: Callable[[Coroutine[Any, Any, None]], None],
        deadline: float,  # of results that are offered, by the loop's clock
    ) -> None:
        self._round = round
        self._slices = slices
        self._outer = outer
        self._held = held
        self._transport = transport
        self._heavy = heavy
        self._report = report
        self._start = start
        self._deadline = deadline
        self._arriving: Counter[int] = Counter()  # slice -> pushes of its result under way to us
        self._changed = asyncio.Event()  # what arrives, or what is held
        self._is_closed = False

    def admit(self, sender: NodeId, header: PayloadHeader) -> Admission:
        """Decides on a result: it comes from who reduces the slice now, or TransferRefusedError."""
        part = self._slices.get(header.slice_index)
        if part is None or part.reducer_id != sender or header.sender_id != sender:
            raise TransferRefusedError(f"{sender} does not reduce {place_of(header)}")
        check_fits(header, part, self._outer.downlink)
        self._arriving[part.index] += 1
        return Admission(take=self._take, end=partial(self._end, part.index))

    async def _take(self, payload: Payload) -> None:
        header, place = payload.header, place_of(payload.header)
        try:
            await self._heavy(partial(self._outer.check_result, payload))
        except CodecError as error:
            log.warning(
                "result refused", round=self._round, sender=header.sender_id, why=str(error)
            )
            raise TransferRefusedError(f"the result does not decode: {error}") from error
        # Only now, when nothing is awaited any more.
        if self._is_closed:
            raise TransferRefusedError(f"round {self._round} has closed meanwhile")
        if self._slices[header.slice_index].reducer_id != header.sender_id:
            raise TransferRefusedError(f"another node has taken {place} over meanwhile")
        held = self._held.get(self._round, header.slice_index)
        if held is None:
            self._hold(payload)
        elif held.digest != payload.digest:
            raise TransferRefusedError(f"another result of {place} is held already")

    def _end(self, index: int) -> None:
        self._arriving[index] -= 1
        self._changed.set()

    def _hold(self, payload: Payload) -> None:
        index = payload.header.slice_index
        self._held.hold(payload)
        log.debug("phase", phase="holding", round=self._round, slice=index)
        self._report(Held(slice_index=index, digest=payload.digest))
        self._changed.set()

    def drop(self, index: int) -> None:
        """The coordinator has given up on the result that was made of a slice."""
        self._held.drop(self._round, index)

    def fetch_offered(self, index: int, digest: Digest, peers: Iterable[NodeId]) -> None:
        """Fetches a result that its reducer did not hand out, unless it is held already."""
        if index in self._slices and self._held.find(self._round, index, digest) is None:
            self._start(self._fetch(self._slices[index], digest, peers))

    async def _fetch(self, part: Slice, digest: Digest, peers: Iterable[NodeId]) -> None:
        want = WantResult(round=self._round, slice_index=part.index, digest=digest)
        for peer in peers:
            left = self._deadline - asyncio.get_running_loop().time()
            if left <= 0:
                return
            try:
                payload = await self._transport.fetch(
                    peer,
                    want,
                    max_body_bytes=self._outer.downlink.most_bytes(part.num_elements),
                    timeout_seconds=left,
                )
                check_fits(payload.header, part, self._outer.downlink)
                await self._heavy(partial(self._outer.check_result, payload))
                self._hold(payload)
                return
            except (
                NotHeldError,
                PeerUnreachableError,
                TransferRefusedError,
                CodecError,
            ) as error:
                log.info("a holder does not deliver", peer=peer, why=str(error))

    async def await_pushed(self, commit: Commit) -> None:
        """Waits for committed results that are being pushed to us: fetching them would send them twice."""
        committed_at = asyncio.get_running_loop().time()
        while missing := [
            outcome.index
            for outcome in commit.slices
            if outcome.digest is not None
            and self._held.find(commit.round, outcome.index, outcome.digest) is None
        ]:
            is_arriving = any(self._arriving[index] > 0 for index in missing)
            patience_seconds = ARRIVING_SECONDS if is_arriving else GRACE_SECONDS
            self._changed.clear()
            try:
                async with asyncio.timeout_at(committed_at + patience_seconds):
                    await self._changed.wait()
            except TimeoutError:
                log.info("results are late", round=commit.round, slices=missing)
                return

    def close(self) -> None:
        """Takes nothing more."""
        self._is_closed = True
