"""Whatever donors answer and however long they take, the schedule keeps its limits and its pieces."""

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from node.exchange.fetching import (
    FIRST_FROM_ONE,
    MOST_AT_ONCE,
    MOST_FROM_ONE,
    Job,
    Outcome,
    Schedule,
    Silences,
)
from node.exchange.peers import Waits
from protocol.wire.rounds import NodeId
from tests.property.effort import examples

DONORS = tuple(NodeId(name) for name in "abcd")
ANSWERS = st.lists(
    st.tuples(
        st.integers(0, 100),  # which of those under way is answered
        st.sampled_from([Outcome.ARRIVED] * 6 + [Outcome.LACKING, Outcome.REFUSED, Outcome.OUT]),
        st.sampled_from([0.0, 0.1, 1.0, 4.0, 20.0]),  # how long after the answer before
    ),
    max_size=150,
)


@given(num_pieces=st.integers(1, 60), num_donors=st.integers(1, 4), answers=ANSWERS)
@examples(150)
def test_no_limit_is_broken_and_no_piece_is_lost(
    num_pieces: int, num_donors: int, answers: list[tuple[int, Outcome, float]]
) -> None:
    donors = DONORS[:num_donors]
    schedule = Schedule(
        dict.fromkeys(range(num_pieces), ()), donors, Silences(lambda donor: 0.0, Waits())
    )
    under_way: list[Job[int]] = []
    arrived: Counter[int] = Counter()
    now = 0.0

    def begin() -> None:
        while (job := schedule.begin(now)) is not None:
            assert job not in under_way
            under_way.append(job)
        from_each = Counter(job.donor for job in under_way)
        assert len(under_way) <= MOST_AT_ONCE
        assert all(number <= MOST_FROM_ONE for number in from_each.values())

    def end(job: Job[int], outcome: Outcome) -> None:
        under_way.remove(job)
        arrived[job.key] += outcome is Outcome.ARRIVED
        for other in schedule.end(job, outcome, now):
            under_way.remove(other)

    begin()
    for which, outcome, seconds in answers:
        if not under_way:
            break
        now += seconds
        schedule.fallen_silent(now)
        end(under_way[which % len(under_way)], outcome)
        begin()
    # Now a donor comes that has everything, and all that are asked give what they are asked for.
    schedule.add_donor(NodeId("last"))
    begin()
    while under_way:
        end(under_way[0], Outcome.ARRIVED)
        begin()
    assert arrived == Counter(range(num_pieces))


@given(
    round_trips=st.floats(0.001, 1.0),
    bytes_per_second=st.floats(1e3, 1e9),
)
@examples(150)
def test_what_is_under_way_follows_what_the_way_carries(
    round_trips: float, bytes_per_second: float
) -> None:
    """One donor, whose pieces of 2 MiB take six round trips, or their share of the link."""
    piece_bytes = 2 << 20
    schedule = Schedule(
        dict.fromkeys(range(400), ()), (DONORS[0],), Silences(lambda donor: 0.0, Waits())
    )
    now = 0.0
    under_way: dict[Job[int], float] = {}
    widths = []
    for _ in range(200):
        while (job := schedule.begin(now)) is not None:
            under_way[job] = 0.0
            under_way[job] = now + max(
                6 * round_trips, len(under_way) * piece_bytes / bytes_per_second
            )
        job = min(under_way, key=lambda job: under_way[job])
        now = max(now, under_way.pop(job))
        assert schedule.end(job, Outcome.ARRIVED, now) == ()
        widths.append(schedule.width_of(DONORS[0]))
    assert all(abs(one - other) <= 1 for one, other in pairwise(widths))
    settled = widths[100:]
    if bytes_per_second < piece_bytes / 3:  # two fill it for longer than 6 s
        assert set(settled) == {FIRST_FROM_ONE}
    if 6 * round_trips < 3.0 and bytes_per_second > MOST_FROM_ONE * piece_bytes / 3.0:
        assert set(settled) == {MOST_FROM_ONE}
