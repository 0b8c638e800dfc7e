"""The exchange's own time: counted once, and only while the ranks do nothing."""

import pytest

from node.duties.times import ExchangeTime


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
