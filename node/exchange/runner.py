"""Carries out what the round's core decides: arithmetic beside the loop, transfers, reports, timers.

Whatever happens is an event to the core (node.exchange.round), and whatever follows from it is an action
here; nothing is decided in this file.
"""

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

import structlog

from node.exchange.codecs.codec import CodecError
from node.exchange.fetching import Donors, fetch_results
from node.exchange.giving import Push, Pushes, turns_of
from node.exchange.peers import Admission, TransferRefusedError, WantResult
from node.exchange.round.state import (
    Action,
    Closed,
    Committed,
    ContributionBegan,
    ContributionEncoded,
    ContributionEnded,
    Drop,
    Event,
    Fetch,
    FetchEnded,
    Hold,
    Links,
    MeanTaken,
    PayloadCame,
    PushBegan,
    PushEnded,
    ReceiptCame,
    Reduce,
    ResultFetched,
    ResultUndecodable,
    Rules,
    Send,
    Tell,
    TimePassed,
    contradicted,
    in_order_of_sending,
    misfit_of_result,
    opened,
    refusal,
)
from node.exchange.round.transition import is_complete, is_wanted, step
from node.exchange.state.sources import StateHere
from protocol.errors import BadDataError
from protocol.run.amendments import LOWER_RATES
from protocol.trust.receipts import AlreadySignedError, Receipt
from protocol.wire.findings import EquivocationSeen, Finding
from protocol.wire.messages import Report, RoundNews, SliceTakenOver
from protocol.wire.payload import CONTRIBUTION, RESULT, Payload, PayloadHeader, Slot
from protocol.wire.rounds import Commit, NodeId, Plan

log = structlog.get_logger()


class RoundRunner:
    """The exchange of one round. Start it with the plan, close it with the commit."""

    def __init__(
        self,
        plan: Plan,
        rules: Rules,
        here: StateHere,
        *,
        report: Callable[[int, Report], None],
        pushes: Pushes,
        donors: Donors,
        begun_at: float | None = None,
    ) -> None:
        self._outer = here.outer
        self._held = here.held
        self._heavy = here.heavy
        self._report = partial(report, plan.round)
        self._pushes = pushes  # results on their way outlive the round
        self._donors = donors
        self._turns = turns_of(plan, rules, donors.transport)
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._completed = asyncio.Event()
        self._lies_told: set[Slot] = set()
        result_bytes = sum(rules.downlink.most_bytes(part.num_elements) for part in plan.slices)
        self.state = opened(
            plan,
            rules,
            patience_seconds=rules.waits.for_fetch_of(result_bytes),
            now=asyncio.get_running_loop().time(),
            less_awaited=self._outer.less_awaited(plan),
            begun_at=begun_at,
        )
        self.feed(TimePassed(links=self._links()))

    def feed(self, event: Event, *, not_before: float = 0.0) -> str:
        """Tells the core of an event and does what follows; returns why a payload is not taken."""
        # A timer may ring a rounding error too early, and would then ring for ever.
        now = max(asyncio.get_running_loop().time(), not_before)
        transition = step(self.state, event, now)
        self.state = transition.state
        for action in transition.actions:
            self._carry_out(action)
        self._wake_in_time(transition.wake_at)
        if self.state.commit is not None and is_complete(self.state):
            self._completed.set()
        return transition.refusal

    def _carry_out(self, action: Action) -> None:
        match action:
            case Send():
                push = Push(
                    peer=action.peer,
                    payload=action.payload,
                    deadline=action.until,
                    is_wanted=lambda: is_wanted(self.state, action),
                    on_received=partial(self._note_receipt, action),
                    turns=self._turns if action.payload.header.kind == CONTRIBUTION else None,
                )
                self._pushes.start(push)
            case Reduce():
                self._start(self._reduce(action))
            case Hold(payload=payload, made=made):
                if made is not None:
                    self._outer.owing.note_result(made)
                self._held.hold(payload)
                phase, index = "handing out" if made else "holding", payload.header.slice_index
                log.debug("phase", phase=phase, round=self.state.plan.round, slice=index)
            case Drop(index=index):
                self._held.drop(self.state.plan.round, index)
            case Tell(report=report):
                if isinstance(report, Finding):
                    report = self._outer.signed_finding(report, self.state.plan.round)
                self._report(report)
            case Fetch():
                self._start(self._fetch(action))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._say_if_failed)

    def _say_if_failed(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("exchange task failed", round=self.state.plan.round, exc_info=error)

    def _wake_in_time(self, at: float | None) -> None:
        if self._timer is not None and self._timer.when() != at:
            self._timer.cancel()
            self._timer = None
        if self._timer is None and at is not None:
            self._timer = asyncio.get_running_loop().call_at(at, self._wake, at)

    def _wake(self, at: float) -> None:
        self._timer = None
        self.feed(TimePassed(links=self._links()), not_before=at)

    def _links(self) -> Links:
        transport = self._donors.transport
        link = transport.seen()
        reducers = {known.part.reducer_id for known in self.state.slices.values()}
        return Links(
            unreachable=frozenset(link.unreachable) - link.through.keys(),
            round_trip_seconds={peer: transport.round_trip_seconds(peer) for peer in reducers},
        )

    # What the daemon asks for

    def hear(self, news: RoundNews) -> None:
        """Takes in what the coordinator says of the round."""
        if isinstance(news, SliceTakenOver):
            index, round = news.slice_index, news.round
            known = self.state.slices.get(index)
            if known is not None and news.attempt > known.attempt:
                log.info("slice taken over", round=round, slice=index, reducer=news.reducer_id)
        self.feed(news)

    async def contribute(self, *, samples: int, tokens: int) -> None:
        """Encodes what this node owes for the fragment and sends each slice to its reducer.

        `samples` were used up for it, and `tokens` in them are what it weighs.

        Returns once everything is encoded and on its way; transfers go on in the background until
        they succeed or the reducers' deadline passes. Raises BadDataError when what it owes is not
        finite.
        """
        plan, owing = self.state.plan, self._outer.owing
        assignment = plan.assignment_of(self.state.rules.node_id)
        assigned = 0 if assignment is None else assignment.num_samples
        share = samples / max(samples, assigned)
        accumulate = partial(
            owing.accumulate,
            round=plan.round,
            fragment=plan.fragment,
            base_digest=plan.base_digest,
            plan_opened_at=plan.opened_at,
            share=share,
        )
        await self._heavy(accumulate)
        for part in in_order_of_sending(plan.slices, self.state.rules.node_id):
            encode = partial(owing.contribution_to, part, samples=samples, tokens=tokens)
            try:
                payload = await self._heavy(encode)
            except AlreadySignedError as error:
                log.warning("nothing is contributed a second time", why=str(error))
                return
            except CodecError as error:
                raise BadDataError(
                    f"round {plan.round}: this node's pseudo-gradient cannot be sent: {error}",
                    next_step=LOWER_RATES,
                ) from error
            if self.state.is_closed:
                return
            self.feed(ContributionEncoded(payload=payload))

    async def complete(self, commit: Commit) -> None:
        """Waits for the committed results that are on their way, and fetches those that are not.

        What nobody delivers now is still missing at the end.
        """
        self.feed(Committed(commit=commit, links=self._links()))
        await self._completed.wait()

    async def close(self) -> None:
        """Ends the round at this node: its commit is known, or the node stops.

        Results that we are pushing go on their way, and hold nothing else of the round in memory.
        """
        self.feed(Closed())
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await self._pushes.stop(kind=CONTRIBUTION)
        await asyncio.gather(*tasks, return_exceptions=True)

    # What peers bring

    def look_at(self, header: PayloadHeader) -> None:
        """Tells the coordinator, once, of a header that contradicts one that is here; both are signed.

        Or of a result's that is not as its slice must have it: its body need not come for that.
        """
        if misfit_of_result(self.state, header) and not self._donors.forgery(header):
            self.feed(ResultUndecodable(header=header))
        here = contradicted(self.state, header)
        if here is None or header.slot in self._lies_told:
            return
        if self._donors.forgery(header) or self._donors.forgery(here):
            return
        self._lies_told.add(header.slot)
        log.warning(
            f"a member has signed two different {header.kind_name}s",
            round=header.round,
            slice=header.slice_index,
            sender=header.sender_id,
        )
        self._report(EquivocationSeen(one=here.encode(), other=header.encode()))

    def admit(self, sender: NodeId, header: PayloadHeader) -> Admission:
        """Takes in that an admitted payload begins to come."""
        index = header.slice_index
        attempt = self.state.slices[index].attempt

        def is_wanted() -> bool:
            return not refusal(self.state.rules, self.state, sender, header, admitted_in=attempt)

        def end() -> None:
            if header.kind == RESULT:
                self.feed(PushEnded(index=index, attempt=attempt, sender=sender))
            else:
                self.feed(ContributionEnded(sender=sender))

        if header.kind == RESULT:
            self.feed(PushBegan(index=index))
        else:
            self.feed(ContributionBegan(sender=sender))
        return Admission(take=partial(self._take, sender, attempt), is_wanted=is_wanted, end=end)

    def _note_receipt(self, sent: Send, encoded: bytes) -> None:
        """Keeps what a reducer has signed for our contribution; one that is none is as good as none."""
        header = sent.payload.header
        if header.kind != CONTRIBUTION or not self._outer.are_receipts_due(header.round):
            return
        if not encoded:
            log.warning("a reducer gives no receipt", round=header.round, reducer=sent.peer)
            return
        try:
            receipt = Receipt.decode(encoded)
            process_id = self._donors.process_of(sent.peer)
            due = Receipt.of(header, attempt=receipt.attempt, process_id=process_id)
            why = receipt.forgery()
            if receipt.reducer_id != sent.peer or receipt.unsigned != due:
                why = "it is for something else than was sent"
        except BadDataError as error:
            why = error.what
        if why:
            log.warning("a receipt is none", round=header.round, reducer=sent.peer, why=why)
            return
        index = header.slice_index
        self.feed(ReceiptCame(index=index, attempt=receipt.attempt, receipt=encoded))

    async def _take(self, sender: NodeId, attempt: int, payload: Payload) -> bytes:
        agreement = None
        if payload.header.kind == RESULT:
            try:
                agreement = await self._heavy(self._check_of(payload))
            except CodecError as error:
                round = self.state.plan.round
                log.warning("result refused", round=round, sender=sender, why=str(error))
                self.feed(ResultUndecodable(header=payload.header))
                raise TransferRefusedError(f"the result does not decode: {error}") from error
        came = PayloadCame(sender=sender, payload=payload, admitted_in=attempt, agreement=agreement)
        if why := self.feed(came):
            raise TransferRefusedError(why)
        known = self.state.slices.get(payload.header.slice_index)
        if payload.header.kind != CONTRIBUTION or known is None:
            return b""
        return self._outer.receipt_for(payload.header, attempt=known.attempt)

    def _check_of(self, result: Payload) -> Callable[[], float | None]:
        """What checks a result, and compares it with our own contribution where there is one."""
        known = self.state.slices.get(result.header.slice_index)
        own = None if known is None else known.own
        return partial(self._outer.check_result, result, own, drawn=secrets.randbits(32))

    # What takes time

    async def _reduce(self, reduce: Reduce) -> None:
        reduction, plan = reduce.reduction, self.state.plan
        place = {"round": plan.round, "slice": reduction.slice.index}
        if reduction.late:
            missing = [str(node_id) for node_id in sorted(reduction.late)]
            log.info("reducing without some", **place, missing=missing)
        log.debug("phase", phase="reducing", **place)
        result = None
        try:
            result = await self._heavy(partial(self._outer.result_of, reduction, plan.fragment))
        except (CodecError, AlreadySignedError) as error:  # finite values whose mean is not
            log.error("slice not reduced", **place, why=str(error))
        self.feed(MeanTaken(index=reduction.slice.index, attempt=reduce.attempt, result=result))

    async def _fetch(self, fetch: Fetch) -> None:
        wanted, until = {}, None
        peers = self._donors.peers()
        if fetch.is_committed:
            late = [outcome.index for outcome in fetch.outcomes]
            log.info("results are late", round=self.state.plan.round, slices=late)
        else:
            until = self.state.commit_deadline
            peers = fetch.outcomes[0].holder_ids
        for outcome in fetch.outcomes:
            assert outcome.digest is not None, "nobody fetches what is void"
            want = WantResult(
                round=self.state.plan.round, slice_index=outcome.index, digest=outcome.digest
            )
            wanted[want] = outcome
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await fetch_results(
                        wanted,
                        self._take_fetched,
                        of=self._donors,
                        peers=peers,
                        rules_in=self._outer.rules_in,
                    )
        finally:
            self.feed(FetchEnded(is_committed=fetch.is_committed))

    async def _take_fetched(self, payload: Payload) -> None:
        self.look_at(payload.header)
        try:
            agreement = await self._heavy(self._check_of(payload))
        except CodecError:
            self.feed(ResultUndecodable(header=payload.header))
            raise
        self.feed(ResultFetched(payload=payload, agreement=agreement))
