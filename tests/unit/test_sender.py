"""The sender as a value: what follows from which event, without streams and without a clock."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.exchange.peers import LEAST_PART_BYTES, PARTS_IN_WINDOW, Limits, TransferRefusedError
from node.exchange.transport.rates.uplink import Evenness, Uplink
from node.exchange.transport.sender import (
    MOST_BODIES,
    MOST_BREAKS,
    WORTH_KEEPING,
    Action,
    Begin,
    Carry,
    Close,
    Fail,
    Open,
    OutgoingBody,
    PartStream,
    PeerSender,
    PeerState,
    SentPart,
)

PART = LEAST_PART_BYTES
LIMITS = Limits(max_streams_per_body=3)


class Scene:
    """Does what the sender asks for, at once; answers when it is told to."""

    def __init__(self, *, num_streams: int = 1, evenness: Evenness | None = None) -> None:
        self.sender = PeerSender(LIMITS, Uplink(LIMITS), evenness or Evenness(0))
        self.now = 0.0
        self.begun: list[OutgoingBody] = []
        self.closed: list[PartStream] = []
        self.failed: list[Exception] = []
        self.carried: list[tuple[OutgoingBody, int]] = []
        self._num_streams = num_streams

    def push(
        self, num_parts: float, *, even_in: int | None = None, is_prompt: bool = False
    ) -> OutgoingBody:
        body = OutgoingBody(int(num_parts * PART), even_in=even_in, is_prompt=is_prompt)
        self.do(self.sender.add(body, now=self.now))
        return body

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Begin(body=body):
                    self.begun.append(body)
                    self.do(self.sender.offered(body, num_streams=self._num_streams, now=self.now))
                case Open(stream=stream):
                    self.do(self.sender.opened(stream, now=self.now))
                case Carry(stream=stream, part=part):
                    self.carried.append((part.body, part.index))
                    self.do(self.sender.wrote(stream, part, now=self.now))
                case Close(stream=stream):
                    self.closed.append(stream)
                    self.do(self.sender.closed(stream, now=self.now))
                case Fail(error=error):
                    self.failed.append(error)

    def accept(self, body: OutgoingBody) -> None:
        self.do(self.sender.accepted(body, b"", now=self.now))

    def answer(self, stream: PartStream) -> SentPart:
        """The next part of a stream is there."""
        self.now += 0.1
        part = stream.under_way[0]
        _, actions = self.sender.received(stream, now=self.now, is_kept=False)
        self.do(actions)
        return part

    def break_stream(self, stream: PartStream) -> None:
        self.do(self.sender.closed(stream, now=self.now, error=ConnectionError("broken")))

    def end(self, body: OutgoingBody, *, has_arrived: bool = True, most_at_rest: int = 0) -> None:
        actions = self.sender.ended(
            body, has_arrived=has_arrived, most_at_rest=most_at_rest, now=self.now
        )
        self.do(actions)


def test_a_peer_goes_through_its_states_in_order() -> None:
    scene = Scene()
    assert scene.sender.state() == PeerState.AT_REST
    body = OutgoingBody(3 * PART)
    (begin,) = scene.sender.add(body, now=0.0)
    assert begin == Begin(body)
    assert scene.sender.state() == PeerState.PROBING
    (opening,) = scene.sender.offered(body, num_streams=1, now=0.0)
    assert isinstance(opening, Open)
    (carry,) = scene.sender.opened(opening.stream, now=0.0)
    assert isinstance(carry, Carry) and carry.part.index == 0
    assert scene.sender.state() == PeerState.PROBING  # it is being written
    scene.do(scene.sender.wrote(opening.stream, carry.part, now=0.0))
    assert scene.sender.state() == PeerState.WAITING  # two fit into a fresh stream's window
    assert len(opening.stream.under_way) == PARTS_IN_WINDOW
    _, (carry,) = scene.sender.received(opening.stream, now=1.0, is_kept=False)
    assert isinstance(carry, Carry)
    assert scene.sender.state() == PeerState.STREAMING
    scene.do(scene.sender.wrote(opening.stream, carry.part, now=1.0))
    scene.break_stream(opening.stream)
    assert scene.sender.state() == PeerState.BREAKING
    scene.end(body)
    assert scene.sender.state() == PeerState.AT_REST


def test_a_body_begins_when_all_of_the_one_before_is_on_its_way() -> None:
    scene = Scene()
    first, second = scene.push(4), scene.push(3)
    assert scene.begun == [first]
    (stream,) = scene.sender.streams
    for _ in range(2):
        scene.answer(stream)
    assert scene.begun == [first, second]
    assert scene.carried[:4] == [(first, index) for index in range(4)]
    assert scene.carried[4][0] is second


def test_only_so_many_bodies_wait_for_their_verdicts_at_once() -> None:
    scene = Scene()
    bodies = [scene.push(0.5) for _ in range(2 * MOST_BODIES)]  # whole
    for body in bodies[: MOST_BODIES - 1]:
        scene.do(scene.sender.went_out(body, now=0.0))
    assert scene.begun == bodies[:MOST_BODIES]
    scene.do(scene.sender.went_out(bodies[MOST_BODIES - 1], now=0.0))
    assert scene.begun == bodies[:MOST_BODIES]
    scene.end(bodies[3])
    assert scene.begun == bodies[: MOST_BODIES + 1]


def test_a_body_that_is_given_up_before_it_began_is_never_offered() -> None:
    scene = Scene()
    first, given_up, last = scene.push(4), scene.push(4), scene.push(4)
    scene.end(given_up)
    scene.end(first)
    assert scene.begun == [first, last]


def test_streams_that_break_one_after_the_other_fail_the_bodies() -> None:
    scene = Scene()
    scene.push(20)
    for _ in range(MOST_BREAKS):
        assert not scene.failed
        (stream,) = scene.sender.streams
        scene.break_stream(stream)
    assert [str(error) for error in scene.failed] == ["broken"]


def test_a_part_that_gets_through_forgives_the_breaks_before_it() -> None:
    scene = Scene()
    scene.push(20)
    for _ in range(3):
        for _ in range(MOST_BREAKS - 1):
            (stream,) = scene.sender.streams
            scene.break_stream(stream)
        (stream,) = scene.sender.streams
        scene.answer(stream)
    assert not scene.failed


def test_who_waits_in_line_opens_no_streams_for_parts_until_its_offer_is_answered() -> None:
    scene = Scene(num_streams=3)
    body = scene.push(20)
    refusal = TransferRefusedError("busy")
    for _ in range(3):
        stream = scene.sender.streams[0]
        scene.do(scene.sender.closed(stream, now=0.0, error=refusal))
    assert scene.sender.state() == PeerState.IN_LINE and not scene.sender.streams
    scene.do(scene.sender.looked(now=60.0))
    assert not scene.sender.streams and not scene.failed
    scene.sender.went_round_in(60.0)  # in line, and not on its way
    assert scene.sender.round_trip_seconds == LIMITS.first_round_trip_seconds
    scene.accept(body)
    assert len(scene.sender.streams) == 3
    assert scene.sender.state() == PeerState.WAITING


def test_a_stream_that_is_closed_carries_nothing_of_what_comes_next() -> None:
    scene = Scene()
    first = scene.push(20)
    scene.end(first, has_arrived=False, most_at_rest=1)
    assert len(scene.closed) == 1 and not scene.sender.streams
    second = scene.push(2)
    assert scene.carried[-1] == (second, 1)


def test_a_stream_stays_whose_last_parts_are_answered_after_the_whole_body_was() -> None:
    scene = Scene()
    first = scene.push(WORTH_KEEPING + 1)
    (stream,) = scene.sender.streams
    for _ in range(WORTH_KEEPING):
        scene.answer(stream)
    scene.end(first, most_at_rest=1)
    assert scene.sender.streams == [stream] and not scene.closed
    second = scene.push(3)
    assert scene.answer(stream).body is first
    assert [scene.answer(stream).body for _ in range(3)] == [second] * 3
    assert not stream.under_way


def test_a_wide_stream_that_carries_what_was_given_up_is_closed() -> None:
    scene = Scene()
    first = scene.push(WORTH_KEEPING + 1)
    (stream,) = scene.sender.streams
    for _ in range(WORTH_KEEPING):
        scene.answer(stream)
    scene.end(first, has_arrived=False, most_at_rest=1)
    assert scene.closed == [stream]


def test_a_peer_that_is_ahead_waits_until_others_have_got_on() -> None:
    evenness = Evenness(2 * PART)
    scenes = [Scene(evenness=evenness) for _ in range(3)]
    for scene in scenes:
        body = scene.push(40, even_in=1)
        scene.accept(body)
    *others, fast = scenes
    for _ in range(3):
        fast.answer(fast.sender.streams[0])
    assert fast.sender.is_held
    num_carried = len(fast.carried)
    fast.answer(fast.sender.streams[0])
    assert len(fast.carried) == num_carried
    for scene in others:
        scene.answer(scene.sender.streams[0])
        scene.answer(scene.sender.streams[0])
    fast.do(fast.sender.looked(now=fast.now))
    assert not fast.sender.is_held
    assert len(fast.carried) > num_carried


def test_a_peer_that_is_ahead_waits_briefly_for_others_that_never_get_on() -> None:
    evenness = Evenness(0)
    scenes = [Scene(evenness=evenness) for _ in range(3)]
    for scene in scenes:
        scene.accept(scene.push(5, even_in=1))
    *_, fast = scenes
    for _ in range(2):
        fast.answer(fast.sender.streams[0])
    for num_carried in (3, 4, 5):
        fast.now += LIMITS.ahead_seconds
        fast.do(fast.sender.looked(now=fast.now))
        assert len(fast.carried) == num_carried


def test_less_is_under_way_of_bodies_that_are_waited_for_one_by_one() -> None:
    num_under_way = []
    for is_prompt in (False, True):
        scene = Scene(num_streams=3)
        scene.accept(scene.push(40, is_prompt=is_prompt))
        for stream in list(scene.sender.streams):
            scene.answer(stream)  # its window is open now
        num_under_way.append(sum(len(stream.under_way) for stream in scene.sender.streams))
    assert num_under_way[1] == num_under_way[0] - PARTS_IN_WINDOW


def test_no_stream_takes_more_than_a_window_while_others_are_being_opened() -> None:
    scene = Scene()
    first = scene.push(WORTH_KEEPING)
    for _ in range(WORTH_KEEPING):
        scene.answer(scene.sender.streams[0])
    scene.end(first, most_at_rest=1)
    (kept,) = scene.sender.streams
    assert kept.is_wide

    body = OutgoingBody(8 * PART)
    scene.do(scene.sender.add(body, now=scene.now)[1:])
    opening = []
    waiting = scene.sender.offered(body, num_streams=3, now=scene.now)
    while waiting:
        match waiting.pop(0):
            case Open(stream=stream):
                opening.append(stream)
            case Carry(stream=stream, part=part):
                waiting += scene.sender.wrote(stream, part, now=scene.now)
    assert len(opening) == 2
    assert len(kept.under_way) == PARTS_IN_WINDOW
    for stream in opening:
        scene.do(scene.sender.opened(stream, now=scene.now))
    assert [len(stream.under_way) for stream in opening] == [PARTS_IN_WINDOW] * 2
    assert len(kept.under_way) >= PARTS_IN_WINDOW


def test_a_body_gets_more_streams_when_others_have_left_their_shares_of_the_link() -> None:
    scene = Scene()
    scene.push(20)
    assert len(scene.sender.streams) == 1
    scene.do(scene.sender.looked(now=0.01, num_streams=3))
    assert len(scene.sender.streams) == 3
    scene.do(scene.sender.looked(now=0.02, num_streams=1))
    assert len(scene.sender.streams) == 3


def test_an_answer_that_waited_for_others_says_nothing_of_the_way() -> None:
    limits, learnt = LIMITS, []
    uplink = Uplink(limits)
    uplink.answered = lambda *_, **told: learnt.append(told)  # type: ignore[method-assign]
    scene = Scene()
    scene.sender = PeerSender(limits, uplink, Evenness(0))
    scene.accept(scene.push(4))
    stream = scene.sender.streams[0]
    _, actions = scene.sender.received(stream, now=1.0, is_kept=False, is_held=True)
    scene.do(actions)
    assert not learnt
    scene.answer(stream)
    assert len(learnt) == 1


@pytest.mark.parametrize("round_trip_seconds", [0.05, 0.3])
def test_the_shortest_round_trip_lately_counts(round_trip_seconds: float) -> None:
    sender = PeerSender(LIMITS, Uplink(LIMITS), Evenness(0))
    assert sender.round_trip_seconds == LIMITS.first_round_trip_seconds
    sender.went_round_in(round_trip_seconds)
    sender.went_round_in(100.0)
    assert sender.round_trip_seconds == 1.25 * round_trip_seconds


@given(data=st.data())
def test_every_part_arrives_whatever_breaks_and_none_is_on_two_streams_at_once(
    data: st.DataObject,
) -> None:
    scene = Scene(num_streams=2)
    bodies = [scene.push(num_parts) for num_parts in (9, 2, 5)]
    for body in bodies:
        scene.accept(body)
    for _ in range(200):
        streams = [stream for stream in scene.sender.streams if stream.under_way]
        if not streams:
            break
        under_way = Counter(
            (part.body, part.index) for stream in streams for part in stream.under_way
        )
        assert max(under_way.values()) == 1
        assert len(scene.sender.streams) <= LIMITS.max_streams_per_body
        stream = data.draw(st.sampled_from(streams))
        if data.draw(st.integers(0, 3)) == 0 and not scene.failed:
            scene.break_stream(stream)
        else:
            scene.answer(stream)
    assert scene.failed or not any(body.missing for body in bodies)
