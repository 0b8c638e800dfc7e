"""`atoll track --to opentelemetry`: what a receiver decodes of a round, once, also when it was away."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import BadDataError, ExitCode, UsageError
from protocol.terminal import console
from protocol.terminal.cli import root
from protocol.terminal.query import StatusLink
from protocol.terminal.sinks import HEADERS_VARIABLE, ReceiverAwayError, Row, Traces, poster_of
from protocol.terminal.spans import spans_of
from protocol.terminal.track import NOTE_FILE, RETRY_SECONDS, Away
from protocol.v1 import status_pb2 as pb
from tests.otlp_receiver import Receiver, service, value_of

SWARM = "5d41402abc4b2a76b9719d911017c592"


def a_round(number: int = 41, **changes: object) -> pb.GetRoundResponse:
    told = pb.GetRoundResponse(
        summary=pb.RoundSummary(
            round=number,
            num_participants=2,
            num_slices=2,
            num_committed_slices=2,
            tokens=1000,
            seconds=9.0,
            loss=2.5,
            outer_digest=b"d",
        ),
        seconds=10.0,
        committed_seconds=8.0,
        opened_unix_seconds=1000.0,
        waited_for="attic was last to train",
        nodes=[
            pb.NodeInRound(
                node_id="aa",
                node_name="attic",
                inner_steps=30,
                num_slices_reduced=1,
                trained_seconds=5.0,
                reduced_seconds=6.0,
                held_seconds=7.0,
                applied_seconds=9.0,
            ),
            pb.NodeInRound(node_id="bb", node_name="hut", inner_steps=30, applied_seconds=9.5),
            pb.NodeInRound(node_id="cc", node_name="silent", inner_steps=30),
        ],
    )
    told.MergeFrom(pb.GetRoundResponse(**changes))  # type: ignore[arg-type]
    return told


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[pb.GetRoundResponse]]:
    rounds = [a_round(number) for number in (40, 41)]

    def status(link: StatusLink) -> pb.GetStatusResponse:
        newest = rounds[-1].summary.round
        run = pb.RunStatus(swarm_id=SWARM, run_name="run", committed_round=newest, total_rounds=100)
        return pb.GetStatusResponse(run=run, unix_seconds=2000.0)

    def listed(link: StatusLink, limit: int) -> pb.ListRoundsResponse:
        return pb.ListRoundsResponse(rounds=[one.summary for one in reversed(rounds)][:limit])

    def one(link: StatusLink, number: int) -> pb.GetRoundResponse:
        return next(told for told in rounds if told.summary.round == number)

    monkeypatch.setattr(StatusLink, "status", status)
    monkeypatch.setattr(StatusLink, "rounds", listed)
    monkeypatch.setattr(StatusLink, "round", one)
    yield rounds


def tracked(receiver: Receiver, folder: Path) -> int:
    words = ["track", "--to", "opentelemetry", "--endpoint", receiver.endpoint, "--once"]
    return console.run(root, [*words, "--out", str(folder)])


def test_a_receiver_decodes_a_round_with_its_nodes_and_what_each_did(
    receiver: Receiver, told: list[pb.GetRoundResponse], tmp_path: Path
) -> None:
    del told[0]
    assert tracked(receiver, tmp_path) == ExitCode.OK
    by_id = {span.span_id: span for span in receiver.spans}
    assert len(by_id) == len(receiver.spans) == 8
    assert {(len(span.trace_id), len(span.span_id)) for span in receiver.spans} == {(16, 8)}
    assert len({span.trace_id for span in receiver.spans}) == 1

    def path(span: Any) -> str:
        above = by_id.get(span.parent_span_id)
        return span.name if above is None else f"{path(above)}/{span.name}"

    times = {
        path(span): (span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9)
        for span in receiver.spans
    }
    assert times == {
        "round": (1000.0, 1010.0),
        "round/attic": (1000.0, 1009.0),
        "round/attic/train": (1000.0, 1005.0),
        "round/attic/send and reduce": (1005.0, 1006.0),
        "round/attic/send and receive": (1006.0, 1007.0),
        "round/attic/apply": (1008.0, 1009.0),
        "round/hut": (1000.0, 1009.5),
        "round/hut/apply": (1008.0, 1009.5),
    }
    whole = next(span for span in receiver.spans if span.name == "round")
    assert value_of(whole, "atoll.round") == 41
    assert value_of(whole, "atoll.loss") == 2.5
    assert value_of(whole, "atoll.waited_for") == "attic was last to train"
    late = [(span.name, span.status.message) for span in receiver.spans if span.status.code == 2]
    assert late == [("hut", "it did not finish training in time")]


def test_each_round_is_sent_once_also_when_the_command_is_started_again(
    receiver: Receiver, told: list[pb.GetRoundResponse], tmp_path: Path
) -> None:
    for _ in range(2):
        assert tracked(receiver, tmp_path) == ExitCode.OK
    told.append(a_round(42))
    assert tracked(receiver, tmp_path) == ExitCode.OK
    assert receiver.rounds == [40, 41, 42]


def test_a_round_that_is_sent_again_is_the_same_spans_and_one_that_is_made_again_is_not() -> None:
    def ids(told: pb.GetRoundResponse) -> list[bytes]:
        return [
            span.trace_id + span.span_id
            for span in spans_of(told, swarm_id=SWARM, run_name="run", closed_at=0.0)
        ]

    again = a_round(summary=pb.RoundSummary(incarnation=1))
    assert ids(a_round()) == ids(a_round())
    assert not set(ids(a_round())) & set(ids(again))
    assert not set(ids(a_round())) & set(ids(a_round(42)))


def test_rounds_wait_while_the_receiver_is_away_and_then_come_once(
    receiver: Receiver, told: list[pb.GetRoundResponse], tmp_path: Path
) -> None:
    receiver.answers = [(503, b"")]
    assert tracked(receiver, tmp_path) == ExitCode.UNAVAILABLE
    assert not (tmp_path / NOTE_FILE).exists()
    assert tracked(receiver, tmp_path) == ExitCode.OK
    assert receiver.rounds == [40, 41]
    assert json.loads((tmp_path / NOTE_FILE).read_text())["round"] == 41


def test_who_follows_a_run_says_once_that_the_receiver_is_away_and_asks_again_after_a_while() -> (
    None
):
    now, said, looks = [0.0], list[str](), list[float]()
    away = Away(clock=lambda: now[0])

    def look() -> None:
        looks.append(now[0])
        if now[0] < 3 * RETRY_SECONDS:
            raise ReceiverAwayError("no receiver answers at x")

    for second in range(40):
        now[0] = float(second)
        away.trying(look, said.append)
        assert (away.error is None) == (second >= 3 * RETRY_SECONDS)
    assert looks[:4] == [0.0, 10.0, 20.0, 30.0]
    assert said == ["no receiver answers at x; what is new waits"]


def test_what_is_no_receiver_is_refused_with_what_to_check(
    receiver: Receiver, told: list[pb.GetRoundResponse], tmp_path: Path
) -> None:
    post = poster_of(receiver.endpoint)
    for status in (302, 400, 404):
        receiver.answers = [(status, b"")]
        with pytest.raises(UsageError, match=f"answers {status} .*; check --endpoint"):
            post(b"")
    for address in ("localhost:4318", "ftp://x", "http://", "4318"):
        with pytest.raises(UsageError, match="is not the address of a receiver"):
            poster_of(address)
    receiver.answers = [(200, b"<!doctype html>")]
    assert tracked(receiver, tmp_path) == ExitCode.BAD_DATA
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nobody = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(ReceiverAwayError, match=rf"no receiver answers at {nobody}/v1/traces"):
        poster_of(nobody)(b"")


def test_what_a_receiver_has_not_taken_is_said(
    receiver: Receiver, told: list[pb.GetRoundResponse], tmp_path: Path, capsys: Any
) -> None:
    partly = service.ExportTracePartialSuccess(rejected_spans=3, error_message="too old")
    answer = service.ExportTraceServiceResponse(partial_success=partly).SerializeToString()
    receiver.answers = [(200, answer)]
    assert tracked(receiver, tmp_path) == ExitCode.OK
    assert "has not taken 3 of 16 spans: too old" in capsys.readouterr().err


def test_headers_come_as_opentelemetry_has_them(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HEADERS_VARIABLE, "x-key=a%20b,other=1")
    poster_of(f"{receiver.endpoint}/v1/traces/")(b"")
    assert receiver.headers["x-key"] == "a b"
    assert receiver.headers["content-type"] == "application/x-protobuf"


def test_of_a_round_whose_times_are_not_kept_the_round_itself_is_sent() -> None:
    told = pb.GetRoundResponse(summary=pb.RoundSummary(round=3, seconds=4.0))
    (whole,) = spans_of(told, swarm_id=SWARM, run_name="run", closed_at=100.0)
    assert (whole.begin, whole.end) == (96.0, 100.0)
    assert whole.attributes["atoll.times_are_exact"] is False
    assert whole.trouble == "no slice is committed"


def test_a_receiver_that_answers_nonsense_is_no_receiver() -> None:
    sink = Traces(lambda body: b"\xff\xff", swarm_id=SWARM, run_name="run", warn=pytest.fail)
    with pytest.raises(BadDataError, match="is no receiver of OpenTelemetry"):
        sink.put(
            [Row(round=1, at=0.0, values={}, told=a_round())], lambda size: pytest.fail("note")
        )
