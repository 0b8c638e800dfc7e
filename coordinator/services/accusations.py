"""What members show against others: what proves something is acted on, and what proves nothing is logged."""

import structlog

from coordinator.driver import Driver, Session
from coordinator.services import checks
from coordinator.services.ruling import Rulings
from coordinator.swarm.events import LeftOutProven, RefusalSeen
from coordinator.swarm.state import Round, name_of
from protocol.errors import BadDataError
from protocol.trust.evidence import equivocation_in, of_equivocation, of_omission
from protocol.trust.receipts import Receipt, omission_in
from protocol.wire.findings import EquivocationSeen, LeftOutSeen, ResultRefused
from protocol.wire.messages import Reduced
from protocol.wire.rounds import NodeId

_log = structlog.get_logger()


class Accusations:
    """Weighs them. `of` is who shows one, in its session."""

    def __init__(self, driver: Driver, rulings: Rulings) -> None:
        self._driver = driver
        self._rulings = rulings

    async def heed_equivocation(self, proof: EquivocationSeen, *, of: NodeId) -> None:
        """Expels the member that a proof is of. One that proves nothing does nothing, and is logged."""
        run_digest = self._driver.state.run_digest
        try:
            found = equivocation_in(proof.one, proof.other, run_digest=run_digest)
        except BadDataError as error:
            self._proves_nothing(error, of)
            return
        evidence = of_equivocation(proof.one, proof.other)
        is_member = found.node_id in self._driver.state.members
        if is_member and await self._rulings.expel_for(found, evidence):
            _log.warning(
                "member expelled",
                node=self._called(found.node_id),
                why=found.reason,
                shown_by=self._called(of),
            )

    async def heed_left_out(self, shown: LeftOutSeen, *, of: NodeId, session: Session) -> None:
        """Has the reducer convicted that a receipt proves a lie of; others do nothing, and are logged.

        What a receipt is held against is known until its round is settled, which waits for all who are here.
        """
        state = self._driver.state
        try:
            receipt = Receipt.decode(shown.receipt)
            told = _report_on(state.open_round, receipt)
            omission = omission_in(shown.receipt, told, run_digest=state.run_digest)
        except BadDataError as error:
            self._proves_nothing(error, of)
            return
        _log.warning(
            "a reducer has left out what it gave a receipt for",
            round=omission.round,
            slice=omission.slice_index,
            reducer=self._called(omission.reducer_id),
            contributor=self._called(omission.contributor_id),
        )
        proven = LeftOutProven(omission=omission, evidence=of_omission(shown.receipt, told))
        await self._driver.apply(proven, session=session)

    async def heed_refusal(self, told: ResultRefused, *, of: NodeId, session: Session) -> None:
        """Takes in that a member cannot decode a result. Of one that nobody has signed nothing follows."""
        try:
            result = checks.refused_result(told)
        except BadDataError as error:
            self._proves_nothing(error, of)
            return
        was_known = _has_refused(self._driver.state.open_round, told, of)
        seen = RefusalSeen(node_id=of, refused=told, result=result)
        await self._driver.apply(seen, session=session)
        if not was_known and _has_refused(self._driver.state.open_round, told, of):
            _log.warning(
                "a result does not decode, says a member",
                round=result.round,
                slice=result.slice_index,
                reducer=self._called(result.sender_id),
                by=self._called(of),
            )

    def _proves_nothing(self, error: BadDataError, by: NodeId) -> None:
        _log.warning("an accusation proves nothing", by=self._called(by), why=error.what)

    def _called(self, node_id: NodeId) -> str:
        return name_of(self._driver.state, node_id)


def _report_on(current: Round | None, receipt: Receipt) -> Reduced:
    """What the reducer of a receipt's slice has reported. Raises BadDataError where that is not known."""
    if current is not None and current.number == receipt.round:
        for progress in current.slices:
            if progress.slice.index == receipt.slice_index and progress.reduced is not None:
                return progress.reduced
    raise BadDataError(
        f"no report on slice {receipt.slice_index} of round {receipt.round} is known here any more"
    )


def _has_refused(current: Round | None, told: ResultRefused, node_id: NodeId) -> bool:
    """Whether it is known of the open round: who says it again and again fills no log."""
    return current is not None and any(
        (refusal.node_id, refusal.refused.digest) == (node_id, told.digest)
        for progress in current.slices[told.slice_index : told.slice_index + 1]
        for refusal in progress.refusals
    )
