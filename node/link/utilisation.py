"""Where the time of a round went, as a value: for heartbeats and the log."""

from dataclasses import dataclass


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
