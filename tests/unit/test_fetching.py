"""Who is asked for which piece next, and what a failure means."""

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping

import pytest

from node.exchange.fetching import (
    FIRST_FROM_ONE,
    MOST_AT_ONCE,
    MOST_FROM_ONE,
    OVERDUE_FACTOR,
    SILENT_ROUND_TRIPS,
    Job,
    Outcome,
    Schedule,
    Silences,
    fetch_pieces,
)
from node.exchange.peers import Waits
from protocol.wire.rounds import NodeId
from tests.unit.exchange_scene import A, B, C, in_virtual_time

WAITS = Waits()


def silences_of(round_trip_seconds: float = 0.0) -> Silences:
    return Silences(lambda donor: round_trip_seconds, WAITS)


def schedule_of(
    wanted: Mapping[str, Iterable[NodeId]],
    donors: Iterable[NodeId],
    silences: Silences | None = None,
) -> Schedule[str]:
    return Schedule(wanted, donors, silences or silences_of())


def begun(schedule: Schedule[str], now: float = 0.0) -> list[str]:
    """Begins all that may be under way; "pa" is piece p asked of donor a."""
    jobs = iter(lambda: schedule.begin(now), None)
    return [job.key + job.donor for job in jobs]


def pieces(names: str) -> dict[str, tuple[NodeId, ...]]:
    return dict.fromkeys(names, ())


def job(name: str) -> Job[str]:
    return Job(key=name[0], donor=NodeId(name[1]))


def test_the_preferred_donor_is_asked_first_and_the_idle_one_before_the_busy() -> None:
    assert begun(schedule_of(pieces("pqr"), (B, A))) == ["pb", "qa", "rb"]


MANY = "".join(map(chr, range(ord("A"), ord("A") + 60)))
"""Names of pieces; donors have small letters."""


def delivered(schedule: Schedule[str], name: str, *, seconds: float, at: float) -> list[str]:
    """One piece comes that was asked for so long ago; what is asked for then."""
    piece = job(name)
    schedule._under_way[piece] = at - seconds
    schedule.end(piece, Outcome.ARRIVED, at)
    return begun(schedule, at)


def widened(schedule: Schedule[str], *, seconds: float, num_pieces: int) -> int:
    """How many are under way when so many pieces have come from all donors in turn."""
    under_way = begun(schedule)
    for _ in range(num_pieces):
        under_way += delivered(schedule, under_way.pop(0), seconds=seconds, at=100.0)
    return len(under_way)


def test_a_donor_gives_few_pieces_at_first() -> None:
    assert len(begun(schedule_of(pieces(MANY), (A,)))) == FIRST_FROM_ONE
    assert len(begun(schedule_of(pieces(MANY), (A, B, C)))) == 3 * FIRST_FROM_ONE


def test_each_piece_that_comes_soon_puts_one_more_under_way_up_to_the_limits() -> None:
    soon = WAITS.soon_seconds / 2
    assert (
        widened(schedule_of(pieces(MANY), (A,)), seconds=soon, num_pieces=1) == FIRST_FROM_ONE + 1
    )
    assert widened(schedule_of(pieces(MANY), (A,)), seconds=soon, num_pieces=20) == MOST_FROM_ONE
    assert (
        widened(schedule_of(pieces(MANY), (A, B, C)), seconds=soon, num_pieces=40) == MOST_AT_ONCE
    )


def test_where_pieces_take_their_time_no_more_are_asked_for() -> None:
    steady = (WAITS.soon_seconds + WAITS.late_seconds) / 2
    assert widened(schedule_of(pieces(MANY), (A,)), seconds=steady, num_pieces=20) == FIRST_FROM_ONE


def test_a_donor_whose_pieces_come_late_gives_fewer_at_a_time_and_never_less_than_at_first() -> (
    None
):
    schedule = schedule_of(pieces(MANY), (A,))
    widened(schedule, seconds=WAITS.soon_seconds / 2, num_pieces=20)
    under_way = list(schedule._under_way)
    for piece in under_way:
        schedule._under_way[piece] = 100.0 - WAITS.late_seconds - 1
        schedule.end(piece, Outcome.ARRIVED, 100.0)
    assert schedule.width_of(A) == FIRST_FROM_ONE


def test_one_donor_that_is_near_does_not_widen_the_other() -> None:
    schedule = schedule_of(pieces(MANY), (A, B))
    begun(schedule)
    delivered(schedule, "Aa", seconds=WAITS.soon_seconds / 2, at=100.0)
    assert (schedule.width_of(A), schedule.width_of(B)) == (FIRST_FROM_ONE + 1, FIRST_FROM_ONE)


def test_a_donor_that_refuses_one_more_goes_on_with_those_it_has() -> None:
    schedule = schedule_of(pieces("pqrst"), (A, B))
    assert begun(schedule) == ["pa", "qb", "ra", "sb"]
    schedule.end(job("ra"), Outcome.REFUSED, 1.0)
    assert begun(schedule) == []
    assert schedule.end(job("qb"), Outcome.ARRIVED, WAITS.soon_seconds) == ()
    assert begun(schedule) == ["rb"]  # what it refused comes before all others
    assert schedule.end(job("pa"), Outcome.ARRIVED, WAITS.soon_seconds) == ()
    assert begun(schedule) == ["ta"]


def test_a_donor_that_refuses_all_is_out() -> None:
    schedule = schedule_of(pieces("pq"), (A, B))
    assert begun(schedule) == ["pa", "qb"]
    schedule.end(job("pa"), Outcome.REFUSED, 1.0)
    assert schedule.donors == [B]
    assert begun(schedule) == ["pb"]


def test_who_delivers_is_asked_for_the_next_piece() -> None:
    schedule = schedule_of(pieces("pqrst"), (A, B))
    assert begun(schedule) == ["pa", "qb", "ra", "sb"]
    assert schedule.end(job("sb"), Outcome.ARRIVED, 1.0) == ()
    assert begun(schedule) == ["tb"]


def test_a_holder_is_asked_before_others_even_when_it_is_busy() -> None:
    schedule = schedule_of({"p": (C,), "q": (C,), "r": (C,)}, (A, B, C))
    assert begun(schedule) == ["pc", "qc", "ra"]


def test_a_holder_that_is_no_donor_is_not_asked() -> None:
    assert begun(schedule_of({"p": (C,)}, (A,))) == ["pa"]


def test_a_donor_that_lacks_a_piece_is_asked_for_others_only() -> None:
    schedule = schedule_of(pieces("pq"), (A,))
    assert begun(schedule) == ["pa", "qa"]
    schedule.end(job("pa"), Outcome.LACKING, 1.0)
    assert begun(schedule) == []
    schedule.add_donor(B)
    assert begun(schedule) == ["pb"]


def test_a_donor_that_is_out_gives_its_piece_to_the_next_before_all_others() -> None:
    schedule = schedule_of(pieces("pqrst"), (A, B))
    assert begun(schedule) == ["pa", "qb", "ra", "sb"]
    schedule.end(job("pa"), Outcome.OUT, 1.0)
    schedule.end(job("qb"), Outcome.ARRIVED, WAITS.soon_seconds)
    assert begun(schedule) == ["pb"]
    schedule.end(
        job("ra"), Outcome.ARRIVED, WAITS.soon_seconds
    )  # what was under way may still come
    schedule.add_donor(A)
    assert begun(schedule) == ["ta"]


def test_what_is_overdue_at_the_end_is_asked_of_another_and_the_first_to_come_counts() -> None:
    schedule = schedule_of(pieces("pq"), (A, B))
    assert begun(schedule) == ["pa", "qb"]
    schedule.end(job("qb"), Outcome.ARRIVED, 1.0)
    schedule.hear(A, WAITS.overdue_seconds - 0.1)
    assert begun(schedule, WAITS.overdue_seconds - 0.1) == []
    assert schedule.seconds_until_overdue(WAITS.overdue_seconds - 0.1) == pytest.approx(0.1)
    assert begun(schedule, WAITS.overdue_seconds) == ["pb"]
    schedule.hear(A, 5 * WAITS.overdue_seconds)
    schedule.hear(B, 5 * WAITS.overdue_seconds)
    assert begun(schedule, 5 * WAITS.overdue_seconds) == []  # two that send are enough
    assert schedule.seconds_until_overdue(6 * WAITS.overdue_seconds) == math.inf
    assert schedule.end(job("pb"), Outcome.ARRIVED, 20.0) == (job("pa"),)
    assert begun(schedule, 100.0) == []


def test_nothing_is_asked_twice_while_there_is_something_else_to_ask_for() -> None:
    schedule = schedule_of(pieces("pqrst"), (A, B))
    begun(schedule)
    schedule.hear(A, WAITS.overdue_seconds + 1)
    schedule.hear(B, WAITS.overdue_seconds + 1)
    assert schedule.seconds_until_overdue(WAITS.overdue_seconds + 1) == WAITS.silent_seconds
    schedule.end(job("qb"), Outcome.ARRIVED, WAITS.overdue_seconds + 1)
    assert begun(schedule, WAITS.overdue_seconds + 1) == ["tb"]


def test_where_all_are_slow_a_slow_piece_is_not_overdue() -> None:
    schedule = schedule_of(pieces("pq"), (A, B))
    begun(schedule)
    schedule.end(job("qb"), Outcome.ARRIVED, 20.0)
    schedule.hear(A, 20.0 * OVERDUE_FACTOR - 1)
    assert begun(schedule, 20.0 * OVERDUE_FACTOR - 1) == []
    assert begun(schedule, 20.0 * OVERDUE_FACTOR) == ["pb"]


def test_a_piece_that_two_were_asked_for_waits_only_when_both_have_failed() -> None:
    schedule = schedule_of(pieces("p"), (A, B))
    assert begun(schedule) == ["pa"]
    assert begun(schedule, WAITS.overdue_seconds) == ["pb"]
    schedule.end(job("pb"), Outcome.LACKING, 11.0)
    assert begun(schedule, 11.0) == []
    schedule.end(job("pa"), Outcome.OUT, 12.0)
    assert begun(schedule, 12.0) == []
    schedule.add_donor(A)
    assert begun(schedule, 12.0) == ["pa"]


def test_a_silent_donor_costs_a_second_and_each_that_is_silent_after_it_one_more() -> None:
    schedule = schedule_of(pieces("p"), (A, B, C))
    assert begun(schedule) == ["pa"]
    assert schedule.seconds_until_overdue(0.0) == WAITS.silent_seconds
    assert begun(schedule, 0.9 * WAITS.silent_seconds) == []
    assert begun(schedule, WAITS.silent_seconds) == ["pb"]
    assert begun(schedule, 1.9 * WAITS.silent_seconds) == []
    assert begun(schedule, 2 * WAITS.silent_seconds) == ["pc"]
    assert set(schedule.end(job("pc"), Outcome.ARRIVED, 2.1)) == {job("pa"), job("pb")}


def test_a_donor_that_sends_is_not_silent_however_long_its_pieces_take() -> None:
    schedule = schedule_of(pieces("pq"), (A, B))
    begun(schedule)
    schedule.end(job("qb"), Outcome.ARRIVED, 0.5)
    for tenths in range(1, 10 * int(WAITS.overdue_seconds)):
        schedule.hear(A, tenths / 10)
        assert schedule.fallen_silent(tenths / 10) == ()
        assert begun(schedule, tenths / 10) == []


def test_over_a_long_way_the_first_bytes_have_some_round_trips() -> None:
    schedule = schedule_of(pieces("p"), (A, B), silences_of(round_trip_seconds=0.5))
    begun(schedule)
    assert begun(schedule, 0.5 * SILENT_ROUND_TRIPS - 0.1) == []
    assert begun(schedule, 0.5 * SILENT_ROUND_TRIPS) == ["pb"]


def test_a_donor_that_was_silent_is_asked_last_for_a_while_and_no_longer_when_it_speaks() -> None:
    silences = silences_of()
    first = schedule_of(pieces("p"), (A, B), silences)
    begun(first)
    assert first.fallen_silent(0.9 * WAITS.silent_seconds) == ()
    assert first.fallen_silent(WAITS.silent_seconds) == (A,)
    assert first.fallen_silent(2 * WAITS.silent_seconds) == ()  # known already

    def next_asked(now: float) -> list[str]:
        return begun(schedule_of(pieces("pqr"), (A, B), silences), now)

    assert next_asked(10.0) == ["pb", "qb"]  # r waits for b, which is only busy
    assert next_asked(WAITS.silent_seconds + WAITS.asked_last_seconds) == ["pa", "qb", "ra"]
    first.hear(A, 20.0)
    assert next_asked(20.0) == ["pa", "qb", "ra"]


def test_a_silent_donor_is_asked_where_nobody_else_is_left() -> None:
    silences = silences_of()
    silences.note(A, 0.0)
    schedule = schedule_of(pieces("p"), (A, B), silences)
    assert begun(schedule) == ["pb"]
    schedule.end(job("pb"), Outcome.LACKING, 0.1)
    assert begun(schedule, 0.1) == ["pa"]


def test_who_was_asked_for_nothing_for_long_has_a_second_from_when_it_is_asked() -> None:
    schedule = schedule_of(pieces("pq"), (A, B))
    begun(schedule)
    schedule.end(job("qb"), Outcome.ARRIVED, 0.5)
    schedule.hear(A, 100.0)
    assert schedule.fallen_silent(100.0) == ()
    assert begun(schedule, 100.0) == ["pb"]
    assert schedule.fallen_silent(100.0) == ()


@in_virtual_time
async def test_all_pieces_come_and_a_late_double_is_called_off() -> None:
    came: list[str] = []
    called_off: list[str] = []

    async def fetch(key: str, donor: NodeId, heard: Callable[[], None]) -> Outcome:
        try:
            for _ in range(1000 if donor == A and key == "p" else 1):
                await asyncio.sleep(0.9)
                heard()
        except asyncio.CancelledError:
            called_off.append(key + donor)
            raise
        came.append(key)
        return Outcome.ARRIVED

    await fetch_pieces(schedule_of(pieces("pqrst"), (A, B)), fetch)
    assert sorted(came) == list("pqrst")
    assert called_off == ["pa"]
    assert asyncio.get_running_loop().time() < WAITS.overdue_seconds + 5


@in_virtual_time
async def test_what_nobody_supplies_is_not_waited_for() -> None:
    async def fetch(key: str, donor: NodeId, heard: Callable[[], None]) -> Outcome:
        return Outcome.LACKING if key == "p" else Outcome.OUT

    await asyncio.wait_for(fetch_pieces(schedule_of(pieces("pq"), (A, B)), fetch), 1)


@in_virtual_time
async def test_a_fault_ends_what_is_under_way_and_is_raised() -> None:
    async def fetch(key: str, donor: NodeId, heard: Callable[[], None]) -> Outcome:
        if key == "q":
            raise ZeroDivisionError
        await asyncio.sleep(1000)
        return Outcome.ARRIVED

    with pytest.raises(ZeroDivisionError):
        await fetch_pieces(schedule_of(pieces("pqr"), (A, B)), fetch)
    assert asyncio.all_tasks() == {asyncio.current_task()}
