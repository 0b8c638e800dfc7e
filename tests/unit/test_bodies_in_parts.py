"""Bodies in parts: what is here, what is still to be sent, over how many streams."""

import pytest

from node.exchange.peers import LEAST_PART_BYTES, WINDOW_BYTES, Limits
from node.exchange.transport.rates.uplink import (
    FIRST_BYTES_PER_SECOND,
    FIRST_WINDOW_BYTES,
    Widening,
    Window,
    first_streams,
)
from node.exchange.transport.receiver import Assembly
from node.exchange.transport.sender import OutgoingBody
from node.exchange.transport.streams import (
    MOST_PARTS,
    PartError,
    held_in,
    num_parts_of,
    part_bytes_for,
)

PART = LEAST_PART_BYTES
MOST_STREAMS = Limits().max_streams_per_body
WIDEN_SECONDS, WINDOW_SECONDS = Limits().widen_seconds, Limits().window_seconds
SIZE = 5 * PART + 100  # six parts


def taken(assembly: Assembly, index: int, body: bytes) -> None:
    span = assembly.begin(index)
    assembly.write(span.start, body[span])
    assembly.end(index)


def test_a_map_names_the_parts_that_are_here_and_a_new_attempt_sends_only_the_others() -> None:
    assembly = Assembly(body_bytes=SIZE, part_bytes=LEAST_PART_BYTES)
    assert held_in(assembly.held_map()) == frozenset()
    for index in (0, 5):
        taken(assembly, index, bytes(SIZE))
    assert held_in(assembly.held_map()) == {0, 5}
    out = OutgoingBody(SIZE)
    out.accept(assembly.held_map())
    assert [out.take() for _ in range(5)] == [1, 2, 3, 4, None]
    for index in (1, 2, 3, 4):
        out.acknowledge(index)
    assert not out.missing


def test_what_the_receiver_had_and_was_under_way_already_is_not_sent_again() -> None:
    out = OutgoingBody(SIZE)
    under_way = [out.take() for _ in range(2)]
    out.accept(bytes([1 | 1 << 5, *bytes(11), 1 << 3]))  # 0, 5, and 99
    assert under_way == [0, 1]
    out.give_back([0, 1])
    assert [out.take() for _ in range(5)] == [1, 2, 3, 4, None]


def test_parts_that_cannot_be_are_refused() -> None:
    with pytest.raises(PartError, match="parts of 7 bytes"):
        Assembly(body_bytes=SIZE, part_bytes=7)
    assembly = Assembly(body_bytes=SIZE, part_bytes=LEAST_PART_BYTES)
    with pytest.raises(PartError, match="no part 6"):
        assembly.begin(6)
    with pytest.raises(PartError, match="no part 9"):
        OutgoingBody(SIZE).span(9)


def test_a_part_may_come_twice_and_a_body_not_over_and_over() -> None:
    assembly = Assembly(body_bytes=SIZE, part_bytes=LEAST_PART_BYTES)
    with pytest.raises(PartError, match=f"of a body of {SIZE}"):
        for _ in range(16):
            assembly.begin(0)
    assert assembly.held == set()


def test_what_is_written_after_the_body_was_taken_does_not_change_it() -> None:
    assembly = Assembly(body_bytes=4, part_bytes=LEAST_PART_BYTES)
    taken(assembly, 0, b"good")
    body = assembly.body()
    assembly.write(0, b"evil")
    assert body == b"good"


def test_the_largest_bodies_have_larger_parts_and_their_map_fits_into_a_frame() -> None:
    body_bytes = 64 << 30
    part_bytes = part_bytes_for(body_bytes)
    assert num_parts_of(body_bytes, part_bytes) <= MOST_PARTS
    assert MOST_PARTS // 8 < 4096
    assert part_bytes_for(SIZE) == LEAST_PART_BYTES


def test_a_broken_stream_gives_back_only_what_was_not_acknowledged_and_first() -> None:
    out = OutgoingBody(SIZE)
    under_way = [out.take() for _ in range(3)]
    assert under_way == [0, 1, 2]
    out.acknowledge(1)
    out.give_back([0, 1, 2])
    assert [out.take() for _ in range(3)] == [0, 2, 3]
    assert out.num_waiting == 2


def test_an_acknowledgement_counts_once() -> None:
    out = OutgoingBody(SIZE)
    assert out.acknowledge(0)
    assert not out.acknowledge(0)


def test_a_long_way_takes_several_streams_and_a_short_one_a_single_one() -> None:
    def streams(milliseconds: float, **more: float) -> int:
        others = int(more.pop("num_others", 0))
        return first_streams(
            round_trip_seconds=milliseconds / 1e3, num_others=others, most=MOST_STREAMS, **more
        )

    assert streams(1) == 1
    assert streams(20) == 2
    assert streams(50) == 5
    assert streams(2000) == MOST_STREAMS
    assert streams(50, num_others=4) == 1  # together they fill the link
    assert streams(100, bytes_per_second=WINDOW_BYTES) == 1
    assert streams(100, bytes_per_second=FIRST_BYTES_PER_SECOND * 2) == MOST_STREAMS


def test_streams_are_added_as_long_as_each_brings_something() -> None:
    widening = Widening(Limits(), now=0.0)
    assert not widening.is_wider_better(10**6, WIDEN_SECONDS / 2)  # too soon to say
    told = [
        widening.is_wider_better(total, WIDEN_SECONDS * (1 + number))
        for number, total in enumerate((100, 300, 510, 1000))
    ]
    # 100, then 200, then 210 in equal times: the last stream brought 5 %, and it stays at that.
    assert told == [True, True, False, False]


def test_what_is_under_way_grows_with_what_was_answered_lately() -> None:
    window = Window(Limits())
    assert sent(window, now=0) == FIRST_WINDOW_BYTES
    window.end(PART, now=1, is_answered=True)
    assert sent(window, now=1) == 2 * PART
    window.end(PART, now=1)  # lost with its stream
    assert sent(window, now=1) == PART
    window.end(PART, now=1)
    assert sent(window, now=1 + WINDOW_SECONDS) == 0  # on a link that stalls


def test_a_pause_takes_nothing_of_what_may_be_under_way() -> None:
    window = Window(Limits())
    window.begin(10 * PART, now=0)
    window.end(10 * PART, now=1, is_answered=True)
    assert sent(window, now=1000) == FIRST_WINDOW_BYTES + 10 * PART
    window.end(FIRST_WINDOW_BYTES + 10 * PART, now=1000 + WINDOW_SECONDS)
    assert sent(window, now=2000) == FIRST_WINDOW_BYTES


@pytest.mark.parametrize("round_trip_seconds", [0.01, 0.9 * WINDOW_SECONDS, WINDOW_SECONDS, 3.0])
def test_a_long_way_is_filled_within_a_few_round_trips(round_trip_seconds: float) -> None:
    window, under_way, num_round_trips = Window(Limits()), 0, 0
    window.goes_round_in(round_trip_seconds)
    while under_way < 100 * PART:
        now = num_round_trips * round_trip_seconds
        window.end(under_way, now=now, is_answered=True)
        under_way = sent(window, now=now)
        num_round_trips += 1
        assert num_round_trips < 10


def sent(window: Window, *, now: float) -> int:
    """Sends as many parts as there is room for; returns their bytes."""
    num_bytes = 0
    while window.has_room(now):
        window.begin(PART, now=now)
        num_bytes += PART
    return num_bytes
