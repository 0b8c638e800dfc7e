"""When ranks that say nothing count as hung, and when not."""

import asyncio

import pytest

from node.island.ranks.launcher import (
    FIRST_TIME_FACTOR,
    LOOK_SECONDS,
    MOST_COUNTED_SECONDS,
    SLOWEST_FACTOR,
    HangWatch,
    Silence,
)
from tests.unit.exchange_scene import in_virtual_time

PATIENCE = 60.0


def silent_after(silence: Silence, start: float, seconds: float) -> str | None:
    """Looks every second; what is said at the end."""
    now = start
    verdict = None
    while now < start + seconds:
        now = min(now + LOOK_SECONDS, start + seconds)
        verdict = silence.verdict(now)
    return verdict


def used_to(kind: str, *gaps: float) -> Silence:
    """One that has heard signs of life after so long, in that work."""
    silence = Silence(patience_seconds=PATIENCE)
    now = 0.0
    silence.begin(kind, now)
    for gap in gaps:
        silent_after(silence, now, gap)
        now += gap
        silence.heard(now)
    silence.end()
    return silence


def test_what_is_done_the_first_time_may_take_ten_times_as_long() -> None:
    silence = Silence(patience_seconds=PATIENCE)
    silence.begin("train", 0.0)
    assert silent_after(silence, 0.0, FIRST_TIME_FACTOR * PATIENCE) is None
    why = silence.verdict(FIRST_TIME_FACTOR * PATIENCE + 1)
    assert why == "gave no sign of life for 601 s in train (600 s are given: the first time)"


def test_after_quick_steps_the_patience_is_what_counts() -> None:
    silence = used_to("train", 0.5, 2.0, 0.5)
    silence.begin("train", 100.0)
    assert silent_after(silence, 100.0, PATIENCE) is None
    why = silence.verdict(100.0 + PATIENCE + 1)
    assert why is not None
    assert "(60 s are given: 2.0 s was the longest until now)" in why


def test_ranks_with_slow_steps_get_a_multiple_of_the_slowest() -> None:
    silence = used_to("train", 40.0, 10.0)
    silence.begin("train", 100.0)
    assert silent_after(silence, 100.0, SLOWEST_FACTOR * 40.0) is None
    assert silence.verdict(101.0 + SLOWEST_FACTOR * 40.0) is not None


def test_how_fast_ranks_train_says_nothing_of_how_fast_they_evaluate() -> None:
    silence = used_to("train", 0.5)
    silence.begin("evaluate", 100.0)
    assert silent_after(silence, 100.0, 5 * PATIENCE) is None


def test_a_sign_of_life_begins_the_silence_anew() -> None:
    silence = used_to("train", 0.5)
    silence.begin("train", 0.0)
    for minute in range(10):
        assert silent_after(silence, minute * PATIENCE, PATIENCE) is None
        silence.heard((minute + 1) * PATIENCE)


def test_time_in_which_this_process_did_not_run_is_no_silence() -> None:
    silence = used_to("train", 0.5)
    silence.begin("train", 0.0)
    assert silent_after(silence, 0.0, PATIENCE / 2) is None
    asleep = 9 * 3600.0
    assert silence.verdict(asleep) is None
    awake_for = PATIENCE / 2 - MOST_COUNTED_SECONDS
    assert silent_after(silence, asleep, awake_for) is None
    assert silence.verdict(asleep + awake_for + 1) is not None


def test_ranks_without_an_order_may_be_silent_for_ever() -> None:
    silence = used_to("train", 0.5)
    assert silent_after(silence, 100.0, 100 * PATIENCE) is None
    silence.heard(100.0 + 100 * PATIENCE)  # what a cancelled order still had to say
    silence.begin("train", 10_000.0)
    assert silent_after(silence, 10_000.0, PATIENCE) is None
    assert silence.verdict(10_001.0 + PATIENCE) is not None


@in_virtual_time
async def test_a_watch_tells_once_of_ranks_that_hang() -> None:
    told: list[str] = []
    watch = HangWatch(patience_seconds=PATIENCE, on_hang=told.append)
    with watch.over("train"):
        for _ in range(5):
            await asyncio.sleep(PATIENCE / 2)
            watch.heard()
        assert not told
        await asyncio.sleep(10 * PATIENCE)
        assert len(told) == 1


@in_virtual_time
async def test_a_watch_is_over_with_the_order() -> None:
    told: list[str] = []
    watch = HangWatch(patience_seconds=PATIENCE, on_hang=told.append)
    with pytest.raises(KeyError), watch.over("train"):
        raise KeyError
    await asyncio.sleep(100 * PATIENCE)
    assert not told


@in_virtual_time
async def test_without_patience_nobody_looks() -> None:
    told: list[str] = []
    watch = HangWatch(patience_seconds=0, on_hang=told.append)
    with watch.over("train"):
        await asyncio.sleep(1e6)
    assert not told
