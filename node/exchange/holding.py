"""A round's third part: results come from their reducers, and are held for the commit and for peers."""

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from typing import Any

import structlog

from node.exchange.codecs.codec import CodecError
from node.exchange.fetching import Outcome, Schedule, Silences, fetch_pieces
from node.exchange.fitting import check_fits, place_of
from node.exchange.held_results import HeldResults
from node.exchange.outer import Outer
from node.exchange.transport.transport import (
    Admission,
    NotHeldError,
    PeerUnreachableError,
    TransferRefusedError,
    Transport,
    WantResult,
)
from node.heavy import Heavy
from protocol.messages import Held, Report
from protocol.payload import Payload, PayloadHeader
from protocol.rounds import Commit, Digest, NodeId, Slice, SliceOutcome

log = structlog.get_logger()

GRACE_SECONDS = 2.0
GRACE_ROUND_TRIPS = 8
"""So long nothing may come from a reducer that should push a result, until we fetch it from others.

It began to push before the commit, so only its offer's way counts. In round trips, a connection made anew
is five or six of them and a stream one; in seconds, a lost packet is one, and a router's queue of 1 MB
nearly another at 10 Mbit/s. At 500 ms that is 6 s: fetched sooner, a result would often travel twice. Where
a round trip takes a millisecond it is 2 s, and they are lost only when a reducer that lives and can be
reached pushes nothing."""

FetchResults = Callable[[Sequence[SliceOutcome]], Awaitable[None]]
"""Fetches results of the committed round from those who hold them, as far as they deliver."""


class Holding:
    """The results of one round that others reduce. `slices` says who does so now, `departed` who is gone."""

    def __init__(
        self,
        *,
        round: int,
        slices: Mapping[int, Slice],
        departed: Set[NodeId],
        outer: Outer,
        held: HeldResults,
        transport: Transport,
        heavy: Heavy,
        report: Callable[[Report], None],
        start: Callable[[Coroutine[Any, Any, None]], None],
        deadline: float,  # of results that are offered, by the loop's clock
        patience_seconds: float,  # of a push, from the commit
        silences: Silences,
    ) -> None:
        self._silences = silences
        self._round = round
        self._slices = slices
        self._departed = departed
        self._outer = outer
        self._held = held
        self._transport = transport
        self._heavy = heavy
        self._report = report
        self._start = start
        self._deadline = deadline
        self._patience_seconds = patience_seconds
        self._arriving: Counter[int] = Counter()  # slice -> pushes of its result under way to us
        self._silent_since: dict[NodeId, float] = {}  # reducer -> when its latest push ended
        self._broken: set[int] = set()  # slices whose latest push broke off
        self._fetching: set[int] = set()  # committed slices that others are asked for
        self._changed = asyncio.Event()  # what arrives, what is held, or what is fetched
        self._is_closed = False

    def admit(self, sender: NodeId, header: PayloadHeader) -> Admission:
        """Decides on a result: it comes from who reduces the slice now, or TransferRefusedError."""
        part = self._slices.get(header.slice_index)
        if part is None or part.reducer_id != sender or header.sender_id != sender:
            raise TransferRefusedError(f"{sender} does not reduce {place_of(header)}")
        if part.index in self._fetching:
            raise TransferRefusedError(f"{place_of(header)} is being fetched already")
        check_fits(header, part, self._outer.downlink)
        self._arriving[part.index] += 1
        self._broken.discard(part.index)
        return Admission(
            take=self._take, end=partial(self._end, part), is_wanted=partial(self._is_wanted, part)
        )

    def _is_wanted(self, part: Slice) -> bool:
        return not self._is_closed and self._slices[part.index].reducer_id == part.reducer_id

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

    def _end(self, part: Slice) -> None:
        self._arriving[part.index] -= 1
        if self._held.get(self._round, part.index) is None:
            self._broken.add(part.index)
        self._silent_since[part.reducer_id] = asyncio.get_running_loop().time()
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
        while self._arriving[part.index]:  # it does get through: asked for, it would come twice
            self._changed.clear()
            await self._changed.wait()
        if self._held.find(self._round, part.index, digest) is not None:
            return
        schedule = Schedule({want: ()}, peers, self._silences)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._deadline):
                await fetch_pieces(schedule, partial(self._fetch_from, part))

    async def _fetch_from(
        self, part: Slice, want: WantResult, peer: NodeId, heard: Callable[[], None]
    ) -> Outcome:
        try:
            payload = await self._transport.fetch(
                peer,
                want,
                max_body_bytes=self._outer.downlink.most_bytes(part.num_elements),
                timeout_seconds=self._deadline - asyncio.get_running_loop().time(),
                heard=heard,
            )
            check_fits(payload.header, part, self._outer.downlink)
            await self._heavy(partial(self._outer.check_result, payload))
        except NotHeldError:
            return Outcome.LACKING
        except (PeerUnreachableError, TransferRefusedError, CodecError) as error:
            log.info("a holder does not deliver", peer=peer, why=str(error))
            return Outcome.OUT
        # Another holder may have brought it in the same moment.
        if self._held.find(self._round, part.index, want.digest) is None:
            self._hold(payload)
        return Outcome.ARRIVED

    async def complete(self, commit: Commit, fetch: FetchResults) -> None:
        """Waits for committed results that are being pushed to us, and fetches those that are not.

        Links differ by a thousand: what arrives is waited for as long as it does, for fetching would
        send its bytes once more over the link that is slow. A push that stalls is broken off by the
        transport, and one that takes longer than `patience_seconds` has a donor beside it. Each slice
        is fetched once: what nobody delivers now is still missing at the end.
        """
        clock = asyncio.get_running_loop().time
        committed_at = clock()
        patient_until = committed_at + self._patience_seconds
        fetches: set[asyncio.Task[None]] = set()
        try:
            while missing := self._missing(commit):
                for fetched in [task for task in fetches if task.done()]:
                    fetches.discard(fetched)
                    fetched.result()
                due = {
                    part.index: min(self._due_at(part.index, committed_at), patient_until)
                    for part in missing
                    if part.index not in self._fetching
                }
                late = [part for part in missing if due.get(part.index, math.inf) <= clock()]
                if late:
                    indices = [part.index for part in late]
                    log.info("results are late", round=commit.round, slices=indices)
                    self._fetching.update(indices)
                    task = asyncio.ensure_future(fetch(late))
                    task.add_done_callback(lambda _: self._changed.set())
                    fetches.add(task)
                elif not due and not fetches:
                    return
                else:
                    self._changed.clear()
                    with suppress(TimeoutError):
                        async with asyncio.timeout_at(min(due.values(), default=None)):
                            await self._changed.wait()
        finally:
            for task in fetches:
                task.cancel()
            await asyncio.gather(*fetches, return_exceptions=True)

    def _missing(self, commit: Commit) -> list[SliceOutcome]:
        return [
            outcome
            for outcome in commit.slices
            if outcome.digest is not None
            and self._held.find(commit.round, outcome.index, outcome.digest) is None
        ]

    def _due_at(self, index: int, committed_at: float) -> float:
        """Until when a committed result is left to its reducer, by the loop's clock.

        A push that breaks off is not repeated once the reducer knows of the commit. What goes to one
        peer goes in order: while one result of a reducer arrives, the next one waits behind it.
        """
        if self._arriving[index]:
            return math.inf
        reducer = self._slices[index].reducer_id
        is_gone = reducer in self._departed or reducer in self._transport.unreachable
        if is_gone or index in self._broken:
            return committed_at
        if any(self._arriving[p.index] and p.reducer_id == reducer for p in self._slices.values()):
            return math.inf
        round_trip_seconds = self._transport.round_trip_seconds(reducer)
        grace_seconds = GRACE_SECONDS + GRACE_ROUND_TRIPS * round_trip_seconds
        return max(committed_at, self._silent_since.get(reducer, 0.0)) + grace_seconds

    def close(self) -> None:
        """Takes nothing more."""
        self._is_closed = True
