"""Every second of a round is in one share, none is made up, and the exchange's own time is counted once."""

import pytest

from node.duties.work import RoundTimes, log_fields_of
from node.heavy import ExchangeTime
from node.island.island import InnerReport


def report_of(
    round_: int = 1,
    tokens: int = 800,
    peak: float | None = 4e9,
    *,
    is_measured: bool = False,
    communication_seconds: float | None = 0.0,
) -> InnerReport:
    return InnerReport(
        round=round_,
        inner_steps=2,
        samples=tokens,
        tokens=tokens,
        loss=1.0,
        seconds=4.0,
        flops=8e9,
        peak_flops_per_second=peak,
        is_peak_measured=is_measured,
        peak_memory_bytes=123,
        publish_seconds=1.0,
        communication_seconds=communication_seconds,
    )


def times_after(report: InnerReport | None) -> RoundTimes:
    times = RoundTimes()
    times.begin(100.0, exchange_seconds=50.0)  # it has downloaded the state before
    if report is not None:
        times.trained(report)
    times.adopted(0.5)
    return times


def test_the_time_of_a_round_is_shared_out_and_the_rest_is_waiting() -> None:
    made = times_after(report_of()).end(1, 110.0, compute_seconds=4.0, exchange_seconds=52.0)
    assert made is not None
    assert (made.compute_share, made.publish_share, made.adopt_share) == (0.4, 0.1, 0.05)
    assert (made.local_communication_share, made.exchange_share) == (0.0, 0.2)
    assert made.waiting_share == pytest.approx(0.25)
    assert (made.tokens_per_second, made.flops_per_second, made.mfu) == (200.0, 2e9, 0.5)
    assert (made.round, made.peak_memory_bytes) == (1, 123)


def test_without_a_known_peak_the_mfu_is_unknown() -> None:
    made = times_after(report_of(peak=None)).end(
        1, 110.0, compute_seconds=4.0, exchange_seconds=52.0
    )
    assert made is not None
    assert made.mfu is None
    assert log_fields_of(made)["mfu"] == log_fields_of(made)["peak"] == "unknown"


def test_more_than_the_peak_is_no_utilisation_and_is_not_shown() -> None:
    at_peak, above = (
        times_after(report_of(peak=peak)).end(1, 110.0, compute_seconds=4.0, exchange_seconds=52.0)
        for peak in (2e9, 1.99e9)
    )
    assert at_peak is not None and at_peak.mfu == 1.0
    assert above is not None and above.mfu is None


def test_a_peak_that_was_measured_is_never_shown_as_the_vendors() -> None:
    made = times_after(report_of(is_measured=True)).end(
        1, 110.0, compute_seconds=4.0, exchange_seconds=52.0
    )
    assert made is not None
    assert made.mfu == 0.5
    assert log_fields_of(made)["peak"] == "4.0 GFLOP/s, measured here"


def test_the_next_round_counts_from_the_end_of_the_one_before() -> None:
    times = times_after(report_of())
    times.end(1, 110.0, compute_seconds=4.0, exchange_seconds=52.0)
    times.begin(118.0, exchange_seconds=53.0)  # its plan came later: that was waiting, too
    times.trained(report_of(2))
    made = times.end(2, 130.0, compute_seconds=8.0, exchange_seconds=57.0)
    assert made is not None
    assert (made.compute_share, made.adopt_share, made.exchange_share) == (0.2, 0.0, 0.25)
    assert made.waiting_share == pytest.approx(0.5)


@pytest.mark.parametrize("report", [None, report_of(tokens=0), report_of(round_=2)])
def test_a_round_without_training_has_no_figures(report: InnerReport | None) -> None:
    times = times_after(report)
    assert times.end(1, 110.0, compute_seconds=4.0, exchange_seconds=52.0) is None
    assert (
        times.end(2, 120.0, compute_seconds=4.0, exchange_seconds=52.0) is None
    )  # nor do they turn up in the next


def test_what_inner_steps_wait_for_in_the_island_is_not_computing() -> None:
    """The report says a quarter of its inner steps; some of the steps were taken in another round."""
    times = times_after(report_of(communication_seconds=1.0))
    made = times.end(1, 110.0, compute_seconds=6.0, exchange_seconds=51.0)
    assert made is not None
    assert made.local_communication_share == pytest.approx(0.15)
    assert made.compute_share == pytest.approx(0.45)
    assert log_fields_of(made)["local_communication"] == "15.0%"


@pytest.mark.parametrize("seconds", [None, 0.0, 1.0])
def test_all_shares_together_are_the_whole_round(seconds: float | None) -> None:
    made = times_after(report_of(communication_seconds=seconds)).end(
        1, 110.0, compute_seconds=4.0, exchange_seconds=52.0
    )
    assert made is not None
    parts = ("compute", "local_communication", "publish", "adopt", "exchange", "waiting")
    assert sum(getattr(made, f"{part}_share") or 0.0 for part in parts) == pytest.approx(1.0)


def test_what_was_not_measured_is_never_shown_as_nothing() -> None:
    made = times_after(report_of(communication_seconds=None)).end(
        1, 110.0, compute_seconds=4.0, exchange_seconds=52.0
    )
    assert made is not None
    assert made.local_communication_share is None
    assert made.compute_share == 0.4
    assert log_fields_of(made)["local_communication"] == "not measured"


def test_the_log_names_every_share() -> None:
    made = times_after(report_of()).end(1, 110.0, compute_seconds=4.0, exchange_seconds=52.0)
    assert made is not None
    assert log_fields_of(made) == {
        "round": 1,
        "tokens_per_second": 200,
        "gflops": "2.00",
        "mfu": "50.0%",
        "peak": "4.0 GFLOP/s, by the vendor",
        "compute": "40.0%",
        "local_communication": "0.0%",
        "publish": "10.0%",
        "adopt": "5.0%",
        "exchange": "20.0%",
        "waiting": "25.0%",
        "peak_memory_mb": 0,
    }


def test_what_is_trained_ahead_counts_when_it_is_trained() -> None:
    """The report of a round holds steps that were taken before the round before had ended."""
    times = times_after(report_of())
    times.end(1, 110.0, compute_seconds=7.0, exchange_seconds=52.0)  # four of its own, three ahead
    times.trained(report_of(2))
    made = times.end(2, 120.0, compute_seconds=8.0, exchange_seconds=53.0)
    assert made is not None
    assert made.compute_share == pytest.approx(0.1)


class Clock:
    now = 10.0

    def __call__(self) -> float:
        return self.now


def test_transfers_at_once_take_their_time_together() -> None:
    clock = Clock()
    time = ExchangeTime(clock)
    clock.now += 5
    with time.exchanging():
        clock.now += 1
        with time.exchanging():
            clock.now += 2
        clock.now += 4
    clock.now += 8
    assert time.seconds == 7


def test_what_overlaps_with_the_ranks_work_costs_no_time() -> None:
    clock = Clock()
    time = ExchangeTime(clock)
    with time.exchanging():
        clock.now += 1
        with time.ranks_at_work():
            clock.now += 2
            assert time.seconds == 1
        clock.now += 4
        assert time.seconds == 5


async def test_heavy_work_counts_also_when_it_fails() -> None:
    clock = Clock()
    time = ExchangeTime(clock)

    def work() -> int:
        clock.now += 3
        if clock.now > 14:
            raise ValueError("too late")
        return 7

    async def run(heavy_work):  # type: ignore[no-untyped-def]  # generic, as Heavy has it
        return heavy_work()

    heavy = time.over(run)
    assert await heavy(work) == 7
    with pytest.raises(ValueError, match="too late"):
        await heavy(work)
    clock.now += 100
    assert time.seconds == 6
