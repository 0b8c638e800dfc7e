"""Where the time of a node's round went. Pure: the daemon says what happened, and when."""

from dataclasses import dataclass

from node.island.island import InnerReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilisation:
    """What a node made of a round. Shares are of the time since it adopted the round before."""

    round: int
    tokens_per_second: float  # while it trained
    flops_per_second: float  # likewise
    mfu: float | None  # of the peak of its devices; None: the peak is not known
    peak_flops_per_second: float | None  # of its devices; None: not known
    is_peak_measured: bool  # here, and not taken from a table
    compute_share: float  # inner steps, without the next where that is measured
    local_communication_share: float | None  # inner steps held up by it; None: not measured
    publish_share: float
    adopt_share: float
    exchange_share: float  # bytes that travel, and encoding to applying, while ranks do nothing
    waiting_share: float  # all else: the other nodes, ranks that were started again
    peak_memory_bytes: int

    def as_fields(self) -> dict[str, int | str]:
        """For the log."""
        return {
            "round": self.round,
            "tokens_per_second": round(self.tokens_per_second),
            "gflops": f"{self.flops_per_second / 1e9:.2f}",
            "mfu": "unknown" if self.mfu is None else f"{self.mfu:.1%}",
            "peak": self._peak_in_words(),
            "compute": f"{self.compute_share:.1%}",
            "local_communication": self._communication_in_words(),
            "publish": f"{self.publish_share:.1%}",
            "adopt": f"{self.adopt_share:.1%}",
            "exchange": f"{self.exchange_share:.1%}",
            "waiting": f"{self.waiting_share:.1%}",
            "peak_memory_mb": self.peak_memory_bytes // 1_000_000,
        }

    def _communication_in_words(self) -> str:
        share = self.local_communication_share
        return "not measured" if share is None else f"{share:.1%}"

    def _peak_in_words(self) -> str:
        if self.peak_flops_per_second is None:
            return "unknown"
        origin = "measured here" if self.is_peak_measured else "by the vendor"
        return f"{self.peak_flops_per_second / 1e9:.1f} GFLOP/s, {origin}"


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
            mfu=flops_per_second / peak if peak else None,
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
