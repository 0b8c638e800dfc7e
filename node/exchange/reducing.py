"""A round's second part: contributions to the slices that this node reduces become results for all."""

from collections.abc import Callable, Coroutine, Iterable, Set
from functools import partial
from typing import Any

import structlog

from node.exchange.codecs.codec import CodecError
from node.exchange.fitting import place_of
from node.exchange.held_results import HeldResults
from node.exchange.outer import Outer
from node.exchange.pushes import Pushes
from node.exchange.reduction import Reduction
from node.exchange.transport.transport import Admission, TransferRefusedError
from node.heavy import Heavy
from protocol.messages import Held, Reduced, Report
from protocol.payload import Payload, PayloadHeader
from protocol.rounds import NodeId, Plan, Slice

log = structlog.get_logger()


class Reducing:
    """The slices of one round that this node reduces. `departed` says who is gone."""

    def __init__(
        self,
        *,
        plan: Plan,
        context: int,
        node_id: NodeId,
        departed: Set[NodeId],
        outer: Outer,
        held: HeldResults,
        heavy: Heavy,
        report: Callable[[Report], None],
        start: Callable[[Coroutine[Any, Any, None]], None],
        results_out: Pushes,
        deadline: float,  # of contributions, by the loop's clock
        hand_out_deadline: float,  # of results; nobody waits for a push after that
    ) -> None:
        self._plan = plan
        self._context = context
        self._node_id = node_id
        self._departed = departed
        self._outer = outer
        self._held = held
        self._heavy = heavy
        self._report = report
        self._start = start
        self._results_out = results_out  # these outlive the round's commit
        self._hand_out_deadline = hand_out_deadline
        self._silent: frozenset[NodeId] = frozenset()  # nothing more comes from these
        self._reductions: dict[int, Reduction] = {}
        for part in plan.slices:
            if part.reducer_id == node_id:
                self._begin(part, deadline)

    def _begin(self, part: Slice, deadline: float) -> None:
        reduction = Reduction(
            plan=self._plan, slice_=part, uplink=self._outer.uplink, context=self._context
        )
        reduction.depart(self._silent)
        self._reductions[part.index] = reduction
        self._start(self._reduce(reduction, deadline))

    def admit(self, sender: NodeId, header: PayloadHeader) -> Admission:
        """Decides on a contribution; raises TransferRefusedError."""
        reduction = self._reductions.get(header.slice_index)
        if reduction is None or header.fragment != self._plan.fragment:
            raise TransferRefusedError(f"this node does not reduce {place_of(header)}")
        return reduction.admit(sender, header)

    def add_own(self, contribution: Payload) -> None:
        """Takes what this node itself contributes to a slice that it reduces."""
        self._reductions[contribution.header.slice_index].add(contribution)

    def excuse(self, node_ids: Iterable[NodeId]) -> None:
        """Stops waiting for contributions of these."""
        self._silent |= frozenset(node_ids)
        for reduction in self._reductions.values():
            reduction.depart(node_ids)

    def missing(self) -> frozenset[NodeId]:
        """Whose contributions are waited for."""
        return frozenset(peer for r in self._reductions.values() for peer in r.missing)

    def reduce_until(self, part: Slice, deadline: float) -> None:
        """Takes a slice over, or back: what has come of it counts unless it was reduced already."""
        known = self._reductions.get(part.index)
        if known is not None and not known.is_closed:
            known.extend(deadline)
        else:
            self.give_up(part.index)
            self._begin(part, deadline)

    def give_up(self, index: int) -> None:
        """Another node reduces this slice, if we did so."""
        if (reduction := self._reductions.pop(index, None)) is not None:
            reduction.give_up()

    def close(self) -> None:
        """Reduces nothing more. Results on their way go on, and hold nothing else in memory."""
        for index in list(self._reductions):
            self.give_up(index)

    async def _reduce(self, reduction: Reduction, deadline: float) -> None:
        await reduction.collected(deadline=deadline)
        if reduction.is_given_up:
            return
        round, index = self._plan.round, reduction.slice.index
        log.debug("phase", phase="reducing", round=round, slice=index)
        try:
            reduced = await self._heavy(
                partial(self._outer.result_of, reduction, self._plan.fragment)
            )
        except CodecError as error:  # finite contributions whose mean is not
            log.error("slice not reduced", round=round, slice=index, why=str(error))
            reduced = None
        if reduction.is_given_up:
            return
        if reduced is None:
            self._report(Reduced(slice_index=index, digest=None, contributors=(), contributions=()))
            return
        digest = reduced.payload.digest
        self._outer.owing.note_result(reduced)
        self._held.hold(reduced.payload)
        self._report(
            Reduced(
                slice_index=index,
                digest=digest,
                contributors=reduced.contributors,
                contributions=reduced.contributions,
            )
        )
        self._report(Held(slice_index=index, digest=digest))
        log.debug("phase", phase="handing out", round=round, slice=index)
        for peer in self._plan.participants:
            if peer != self._node_id:
                self._results_out.start(
                    peer,
                    reduced.payload,
                    deadline=self._hand_out_deadline,
                    # Once the round is committed, who lacks it fetches it.
                    is_wanted=lambda peer=peer: (  # type: ignore[misc]
                        peer not in self._departed and not reduction.is_given_up
                    ),
                )
