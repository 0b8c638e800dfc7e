"""One round as this node lives it: contribute to every slice, reduce its own, hold the results."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

import structlog

from node.exchange.codecs.codec import CodecError
from node.exchange.fitting import check_fits, place_of
from node.exchange.held_results import HeldResults
from node.exchange.outer import Outer, Pending
from node.exchange.pushes import Pushes
from node.exchange.reduction import Reduction, most_tokens
from node.exchange.reports import Held, Reduced, Report
from node.exchange.transport.transport import (
    Admission,
    NotHeldError,
    PeerUnreachableError,
    TransferRefusedError,
    Transport,
    WantResult,
)
from node.heavy import Heavy
from protocol.errors import BadDataError
from protocol.payload import CONTRIBUTION, RESULT, Payload, PayloadHeader
from protocol.rounds import Commit, Digest, NodeId, Plan, Slice

log = structlog.get_logger()

GRACE_SECONDS = 2.0
"""How long after the commit the push of a result may begin, before we fetch it ourselves."""

ARRIVING_SECONDS = 60.0
"""How long after the commit a push that has begun may take, before we fetch the result ourselves."""


class ExchangeRound:
    """The exchange of one round. Start it with the plan, close it with the commit."""

    def __init__(
        self,
        *,
        plan: Plan,
        context: int,
        node_id: NodeId,
        run_digest: Digest,
        outer: Outer,
        held: HeldResults,
        transport: Transport,
        heavy: Heavy,
        report: Callable[[int, Report], None],
        results_out: Pushes,
    ) -> None:
        self.plan = plan
        self.pending: Pending | None = None
        self._node_id = node_id
        self._run_digest = run_digest
        self._outer = outer
        self._held = held
        self._transport = transport
        self._heavy = heavy
        self._report = report
        self._opened_at = asyncio.get_running_loop().time()
        self._max_tokens = most_tokens(plan.assignments, context=context)
        self._slices = {part.index: part for part in plan.slices}  # with who reduces them now
        self._attempts: Counter[int] = Counter()  # slice -> takeovers that we know of
        self._departed: frozenset[NodeId] = frozenset()
        self._silent: frozenset[NodeId] = frozenset()  # nothing more comes from these
        self._is_closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._contributions_out = Pushes(transport)
        self._results_out = results_out  # these outlive the round's commit
        self._contributions: dict[int, Payload] = {}  # slice -> ours, once encoded
        self._arriving: Counter[int] = Counter()  # slice -> pushes of its result under way to us
        self._arrivals_changed = asyncio.Event()
        self._reductions: dict[int, Reduction] = {}
        for part in plan.slices:
            if part.reducer_id == node_id:
                self._begin_reduction(part, self._deadline(plan.contribute_seconds))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._say_if_failed)

    def _say_if_failed(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("exchange task failed", round=self.plan.round, exc_info=error)

    def _deadline(self, seconds: float) -> float:
        """When so many seconds of the round are over, by the loop's clock."""
        return self._opened_at + seconds

    def goes_by(self, plan: Plan) -> bool:
        """Whether the plan asks the same of everybody, apart from who reduces and until when."""
        ours, theirs = (
            (p.round, p.base_digest, p.assignments, [(s.start, s.num_elements) for s in p.slices])
            for p in (self.plan, plan)
        )
        return ours == theirs

    def waiting_for(self) -> str:
        """What the exchange waits for, in words; empty when for nothing."""
        missing = sorted({peer for r in self._reductions.values() for peer in r.missing})
        if len(missing) < 2:
            return "one contribution" if missing else ""
        return f"contributions of {len(missing)} nodes"

    # Contributing

    async def contribute(self, tokens: int) -> None:
        """Encodes what this node owes for the fragment and sends each slice to its reducer.

        Returns once everything is encoded and on its way; transfers go on in the background until
        they succeed or the reducers' deadline passes. Raises BadDataError when what it owes is not
        finite.
        """
        self.pending = await self._heavy(
            lambda: self._outer.accumulate(round=self.plan.round, fragment=self.plan.fragment)
        )
        for part in self._in_order_of_sending():
            try:
                payload = await self._heavy(partial(self._encoded, part, tokens))
            except CodecError as error:
                raise BadDataError(
                    f"round {self.plan.round}: this node's pseudo-gradient cannot be sent: {error}",
                    next_step="lower [inner] learning_rate or [outer] learning_rate in run.toml",
                ) from error
            self.pending.bodies[part.index] = payload.body
            self._contributions[part.index] = payload
            self._send(payload, self._deadline(self.plan.contribute_seconds))

    def _in_order_of_sending(self) -> list[Slice]:
        """Each reducer's first slice, then each one's second, and so on: all begin to reduce at once.

        Our own slices come after the others', which have a way to go, and not all nodes begin with
        the same reducer.
        """
        reducers = list(dict.fromkeys(part.reducer_id for part in self.plan.slices))
        own = reducers.index(self._node_id) if self._node_id in reducers else 0
        seen: Counter[NodeId] = Counter()
        places: dict[int, tuple[int, int]] = {}
        for part in self.plan.slices:
            after_own = (reducers.index(part.reducer_id) - own - 1) % len(reducers)
            places[part.index] = seen[part.reducer_id], after_own
            seen[part.reducer_id] += 1
        return sorted(self.plan.slices, key=lambda part: places[part.index])

    def _encoded(self, part: Slice, tokens: int) -> Payload:
        assert self.pending is not None
        codec = self._outer.uplink
        end = part.start + part.num_elements
        return Payload.seal(
            kind=CONTRIBUTION,
            run_digest=self._run_digest,
            round=self.plan.round,
            fragment=self.plan.fragment,
            slice_index=part.index,
            start=part.start,
            num_elements=part.num_elements,
            codec=codec.name,
            tokens=tokens,
            sender_id=self._node_id,
            body=codec.encode(self.pending.accumulated[part.start : end]),
        )

    def _send(self, contribution: Payload, deadline: float) -> None:
        """To whoever reduces the slice now; until then, and as long as that is so."""
        index = contribution.header.slice_index
        reducer = self._slices[index].reducer_id
        if reducer == self._node_id:
            self._reductions[index].add(contribution)
            return
        attempt = self._attempts[index]
        self._contributions_out.start(
            reducer,
            contribution,
            deadline=deadline,
            is_wanted=lambda: (
                self._attempts[index] == attempt
                and reducer not in self._departed
                and not self._is_closed
            ),
        )

    # Reducing

    def _begin_reduction(self, part: Slice, deadline: float) -> None:
        reduction = Reduction(
            plan=self.plan, slice_=part, uplink=self._outer.uplink, max_tokens=self._max_tokens
        )
        reduction.depart(self._silent)
        self._reductions[part.index] = reduction
        self._start(self._reduce(reduction, deadline))

    async def _reduce(self, reduction: Reduction, deadline: float) -> None:
        await reduction.collected(deadline=deadline)
        index = reduction.slice.index
        if reduction.is_given_up:
            return
        log.debug("phase", phase="reducing", round=self.plan.round, slice=index)
        try:
            reduced = await self._heavy(
                lambda: self._outer.result_of(reduction, self.plan.fragment)
            )
        except CodecError as error:  # finite contributions whose mean is not
            log.error("slice not reduced", round=self.plan.round, slice=index, why=str(error))
            reduced = None
        if reduction.is_given_up:
            return
        if reduced is None:
            self._report(self.plan.round, Reduced(slice_index=index, digest=None, contributors=()))
            return
        payload, contributors = reduced.payload, reduced.contributors
        self._outer.note_result(reduced)
        self._held.hold(payload)
        digest = payload.digest
        self._report(
            self.plan.round, Reduced(slice_index=index, digest=digest, contributors=contributors)
        )
        self._report(self.plan.round, Held(slice_index=index, digest=digest))
        log.debug("phase", phase="handing out", round=self.plan.round, slice=index)
        for peer in self.plan.participants:
            if peer != self._node_id:
                self._results_out.start(
                    peer,
                    payload,
                    deadline=self._deadline(self.plan.commit_seconds),
                    # Once the round is committed, who lacks it fetches it.
                    is_wanted=lambda peer=peer: (  # type: ignore[misc]
                        peer not in self._departed and not reduction.is_given_up
                    ),
                )

    # What the coordinator says meanwhile

    def depart(self, node_ids: tuple[NodeId, ...]) -> None:
        """Stops waiting for participants that are gone, and sends them nothing more."""
        self._departed |= frozenset(node_ids)
        self.excuse(node_ids)

    def excuse(self, node_ids: tuple[NodeId, ...]) -> None:
        """Stops waiting for contributions of participants that have nothing to contribute."""
        self._silent |= frozenset(node_ids)
        for reduction in self._reductions.values():
            reduction.depart(node_ids)

    def take_over(self, index: int, reducer_id: NodeId, attempt: int, deadline: float) -> None:
        """Another node reduces a slice from now on; it is sent our contribution anew.

        `deadline` is when it takes the mean, by the loop's clock. An old message changes nothing.
        """
        if index not in self._slices or attempt <= self._attempts[index]:
            return
        self._attempts[index] = attempt
        self._departed -= {reducer_id}  # if it was gone, it is back
        part = self._slices[index] = replace(self._slices[index], reducer_id=reducer_id)
        log.info("slice taken over", round=self.plan.round, slice=index, reducer=reducer_id)
        self._held.drop(self.plan.round, index)  # the coordinator has given up on that result
        known = self._reductions.get(index)
        if reducer_id == self._node_id and known is not None and not known.is_closed:
            known.extend(deadline)
        else:
            if known is not None:
                self._reductions.pop(index).give_up()
            if reducer_id == self._node_id:
                self._begin_reduction(part, deadline)
        if (contribution := self._contributions.get(index)) is not None:
            self._send(contribution, deadline)

    def fetch_offered(self, index: int, digest: Digest, holder_ids: tuple[NodeId, ...]) -> None:
        """Fetches a result that its reducer did not hand out, unless it is held already."""
        if index in self._slices and self._held.find(self.plan.round, index, digest) is None:
            self._start(self._fetch(self._slices[index], digest, holder_ids))

    async def _fetch(self, part: Slice, digest: Digest, holder_ids: tuple[NodeId, ...]) -> None:
        want = WantResult(round=self.plan.round, slice_index=part.index, digest=digest)
        deadline = self._deadline(self.plan.commit_seconds)
        for peer in (holder for holder in holder_ids if holder != self._node_id):
            left = deadline - asyncio.get_running_loop().time()
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
                self._keep(payload)
                return
            except (
                NotHeldError,
                PeerUnreachableError,
                TransferRefusedError,
                CodecError,
            ) as error:
                log.info("a holder does not deliver", peer=peer, why=str(error))

    # What peers send

    def admit(self, sender: NodeId, header: PayloadHeader) -> Admission:
        """Decides on an offered payload by its header alone."""
        if header.kind == CONTRIBUTION:
            reduction = self._reductions.get(header.slice_index)
            if reduction is None or header.fragment != self.plan.fragment:
                raise TransferRefusedError(f"this node does not reduce {place_of(header)}")
            return reduction.admit(sender, header)
        if header.kind == RESULT:
            return self._admit_result(sender, header)
        raise TransferRefusedError(f"a {header.kind_name} is fetched, never pushed")

    def _admit_result(self, sender: NodeId, header: PayloadHeader) -> Admission:
        part = self._slices.get(header.slice_index)
        if part is None or part.reducer_id != sender or header.sender_id != sender:
            raise TransferRefusedError(f"{sender} does not reduce {place_of(header)}")
        check_fits(header, part, self._outer.downlink)
        self._arriving[part.index] += 1
        return Admission(take=self._take_result, end=partial(self._end_arrival, part.index))

    async def _take_result(self, payload: Payload) -> None:
        """Keeps an admitted result and reports it, unless something has changed meanwhile."""
        sender, place = payload.header.sender_id, place_of(payload.header)
        try:
            await self._heavy(lambda: self._outer.check_result(payload))
        except CodecError as error:
            log.warning("result refused", round=payload.header.round, sender=sender, why=str(error))
            raise TransferRefusedError(f"the result does not decode: {error}") from error
        if self._is_closed:
            raise TransferRefusedError(f"round {payload.header.round} has closed meanwhile")
        if sender != self._slices[payload.header.slice_index].reducer_id:
            raise TransferRefusedError(f"another node has taken {place} over meanwhile")
        held = self._held.get(self.plan.round, payload.header.slice_index)
        if held is None:
            self._keep(payload)
        elif held.digest != payload.digest:
            raise TransferRefusedError(f"another result of {place} is held already")

    def _keep(self, payload: Payload) -> None:
        index = payload.header.slice_index
        self._held.hold(payload)
        log.debug("phase", phase="holding", round=self.plan.round, slice=index)
        self._report(self.plan.round, Held(slice_index=index, digest=payload.digest))
        self._arrivals_changed.set()

    def _end_arrival(self, index: int) -> None:
        """Nothing more comes of a push: who waits for it need not wait longer."""
        self._arriving[index] -= 1
        self._arrivals_changed.set()

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
            self._arrivals_changed.clear()
            try:
                async with asyncio.timeout_at(committed_at + patience_seconds):
                    await self._arrivals_changed.wait()
            except TimeoutError:
                log.info("results are late", round=commit.round, slices=missing)
                return

    async def close(self) -> None:
        """Ends the round at this node: its commit is known, or the node stops.

        Results that we are pushing go on their way, and hold nothing else of the round in memory.
        """
        self._is_closed = True
        for reduction in self._reductions.values():
            reduction.give_up()
        self._reductions.clear()
        self._contributions.clear()
        await self._contributions_out.stop()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
