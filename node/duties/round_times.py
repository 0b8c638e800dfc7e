"""Where the time of a node's round went. Pure: the daemon says what happened, and when."""

from node.island.island import InnerReport
from protocol.vitals import Utilisation


class RoundTimes:
    """Adds up one round after the other."""

    def __init__(self) -> None:
        self._began_at: float | None = None
        self._computed_at_begin = 0.0
        self._exchanged_at_begin = 0.0
        self._report: InnerReport | None = None
        self._adopt_seconds = 0.0

    def begin(self, now: float, *, exchange_seconds: float) -> None:
        """The node is in a plan; the time runs from here unless it does already."""
        if self._began_at is None:
            self._began_at, self._exchanged_at_begin = now, exchange_seconds

    def trained(self, report: InnerReport) -> None:
        """It has trained and published."""
        self._report = report

    def adopted(self, seconds: float) -> None:
        """Its ranks have adopted the new parameters, which took so long."""
        self._adopt_seconds += seconds

    def end(
        self, round_: int, now: float, *, compute_seconds: float, exchange_seconds: float
    ) -> Utilisation | None:
        """The round is over for this node and the next begins; None when it did not train.

        `compute_seconds` are those of all inner steps since the node started: with overlap a part of
        a round is trained before the round before has ended. `exchange_seconds` likewise.
        """
        began_at, report, adopt_seconds = self._began_at, self._report, self._adopt_seconds
        computed, self._computed_at_begin = (
            compute_seconds - self._computed_at_begin,
            compute_seconds,
        )
        exchanged, self._exchanged_at_begin = (
            exchange_seconds - self._exchanged_at_begin,
            exchange_seconds,
        )
        self._began_at, self._report, self._adopt_seconds = now, None, 0.0
        if report is None or report.tokens < 1 or began_at is None or report.round != round_:
            return None
        flops_per_second = report.flops / report.seconds if report.seconds > 0 else 0.0
        peak = report.peak_flops_per_second
        seconds = max(now - began_at, 1e-9)
        parts = (computed, report.publish_seconds, adopt_seconds, exchanged)
        inner_steps, publish, adopt, exchange = (part / seconds for part in parts)
        communication = _communication_of(report, inner_steps)
        return Utilisation(
            round=round_,
            tokens_per_second=report.tokens / report.seconds if report.seconds > 0 else 0.0,
            flops_per_second=flops_per_second,
            # Above 1 the peak was measured while something else had the device: it says nothing.
            mfu=flops_per_second / peak if peak and flops_per_second <= peak else None,
            peak_flops_per_second=peak,
            is_peak_measured=report.is_peak_measured,
            compute_share=inner_steps - (communication or 0.0),
            local_communication_share=communication,
            publish_share=publish,
            adopt_share=adopt,
            exchange_share=exchange,
            waiting_share=max(0.0, 1 - inner_steps - publish - adopt - exchange),
            peak_memory_bytes=report.peak_memory_bytes,
        )


def _communication_of(report: InnerReport, inner_steps: float) -> float | None:
    """Part of the share of inner steps that waited for the island's own ranks; as in the report."""
    if report.communication_seconds is None:
        return None
    if report.seconds <= 0:
        return 0.0
    return inner_steps * min(1.0, report.communication_seconds / report.seconds)
