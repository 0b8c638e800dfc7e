"""One round as this node lives it: contribute to every slice, reduce its own, hold the results.

Each of the three has its room, in that order; here is what they share: who reduces which slice now,
who is gone, and the tasks that end with the round.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

import structlog

from node.exchange.contributing import Contributing
from node.exchange.fetching import Silences, fetch_seconds
from node.exchange.held_results import HeldResults
from node.exchange.holding import FetchResults, Holding
from node.exchange.outer import Outer
from node.exchange.pushes import Pushes
from node.exchange.reducing import Reducing
from node.exchange.transport.transport import Admission, TransferRefusedError, Transport
from node.heavy import Heavy
from protocol.messages import Report
from protocol.payload import CONTRIBUTION, RESULT, PayloadHeader
from protocol.rounds import Commit, Digest, NodeId, Plan

log = structlog.get_logger()


class ExchangeRound:
    """The exchange of one round. Start it with the plan, close it with the commit."""

    def __init__(
        self,
        *,
        plan: Plan,
        context: int,
        node_id: NodeId,
        outer: Outer,
        held: HeldResults,
        transport: Transport,
        heavy: Heavy,
        report: Callable[[int, Report], None],
        results_out: Pushes,
        silences: Silences,
    ) -> None:
        self.plan = plan
        self._node_id = node_id
        self._slices = {part.index: part for part in plan.slices}  # with who reduces them now
        self._attempts: Counter[int] = Counter()  # slice -> takeovers that we know of
        self._departed: set[NodeId] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        opened_at = asyncio.get_running_loop().time()
        patience_seconds = fetch_seconds(
            sum(outer.downlink.most_bytes(part.num_elements) for part in plan.slices)
        )
        self._holding = Holding(
            round=plan.round,
            slices=self._slices,
            departed=self._departed,
            outer=outer,
            held=held,
            transport=transport,
            heavy=heavy,
            report=partial(report, plan.round),
            start=self._start,
            deadline=opened_at + plan.commit_seconds,
            patience_seconds=patience_seconds,
            silences=silences,
        )
        self._reducing = Reducing(
            plan=plan,
            context=context,
            node_id=node_id,
            departed=self._departed,
            outer=outer,
            held=held,
            heavy=heavy,
            report=partial(report, plan.round),
            start=self._start,
            results_out=results_out,
            deadline=opened_at + plan.contribute_seconds,
            hand_out_deadline=opened_at + plan.commit_seconds + patience_seconds,
        )
        self._contributing = Contributing(
            plan=plan,
            node_id=node_id,
            slices=self._slices,
            departed=self._departed,
            owing=outer.owing,
            transport=transport,
            heavy=heavy,
            deadline=opened_at + plan.contribute_seconds,
            assigned_samples=0 if (own := plan.assignment_of(node_id)) is None else own.num_samples,
            keep_own=self._reducing.add_own,
        )

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._say_if_failed)

    def _say_if_failed(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("exchange task failed", round=self.plan.round, exc_info=error)

    def goes_by(self, plan: Plan) -> bool:
        """Whether the plan asks the same of everybody, apart from who reduces and until when."""
        ours, theirs = (
            (p.round, p.base_digest, p.assignments, [(s.start, s.num_elements) for s in p.slices])
            for p in (self.plan, plan)
        )
        return ours == theirs

    def waiting_for(self) -> str:
        """What the exchange waits for, in words; empty when for nothing."""
        missing = self._reducing.missing()
        if len(missing) < 2:
            return "one contribution" if missing else ""
        return f"contributions of {len(missing)} nodes"

    @property
    def is_sending(self) -> bool:
        """Whether contributions are on their way."""
        return self._contributing.is_sending

    async def contribute(self, *, samples: int, tokens: int) -> None:
        """See Contributing.contribute."""
        await self._contributing.contribute(samples=samples, tokens=tokens)

    async def complete(self, commit: Commit, fetch: FetchResults) -> None:
        """See Holding.complete."""
        await self._holding.complete(commit, fetch)

    def admit(self, sender: NodeId, header: PayloadHeader) -> Admission:
        """Decides on what a peer offers, by its header alone; raises TransferRefusedError."""
        if header.kind == CONTRIBUTION:
            return self._reducing.admit(sender, header)
        if header.kind == RESULT:
            return self._holding.admit(sender, header)
        raise TransferRefusedError(f"a {header.kind_name} is fetched, never pushed")

    # What the coordinator says meanwhile

    def depart(self, node_ids: tuple[NodeId, ...]) -> None:
        """Stops waiting for participants that are gone, and sends them nothing more."""
        self._departed.update(node_ids)
        self.excuse(node_ids)

    def excuse(self, node_ids: tuple[NodeId, ...]) -> None:
        """Stops waiting for contributions of participants that have nothing to contribute."""
        self._reducing.excuse(node_ids)

    def take_over(self, index: int, reducer_id: NodeId, attempt: int, deadline: float) -> None:
        """Another node reduces a slice from now on; it is sent our contribution anew.

        `deadline` is when it takes the mean, by the loop's clock. An old message changes nothing.
        """
        if index not in self._slices or attempt <= self._attempts[index]:
            return
        self._attempts[index] = attempt
        self._departed.discard(reducer_id)  # if it was gone, it is back
        # Another value each time, by which a push knows that it is for who reduced before.
        part = self._slices[index] = replace(self._slices[index], reducer_id=reducer_id)
        log.info("slice taken over", round=self.plan.round, slice=index, reducer=reducer_id)
        self._holding.drop(index)
        if reducer_id == self._node_id:
            self._reducing.reduce_until(part, deadline)
        else:
            self._reducing.give_up(index)
        self._contributing.send(index, deadline)

    def fetch_offered(self, index: int, digest: Digest, holder_ids: tuple[NodeId, ...]) -> None:
        """Fetches a result that its reducer did not hand out, unless it is held already."""
        others = [holder for holder in holder_ids if holder != self._node_id]
        self._holding.fetch_offered(index, digest, others)

    async def close(self) -> None:
        """Ends the round at this node: its commit is known, or the node stops.

        Results that we are pushing go on their way, and hold nothing else of the round in memory.
        """
        self._holding.close()
        self._reducing.close()
        await self._contributing.close()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
