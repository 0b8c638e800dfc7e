"""What the page is told: the figures of the status, curves that fit a screen, and news as sentences."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from coordinator.dashboard import run_view
from coordinator.dashboard.news_file import KEPT, KEPT_ROUTINE, SENTENCES, NewsFile, sentence_of
from coordinator.dashboard.run_view import (
    MOST_NODES,
    MOST_POINTS,
    curves_stamp,
    history_of,
    view_of,
)
from coordinator.dashboard.timeline import Timeline, shown
from coordinator.journal import News
from coordinator.swarm.state import SwarmState
from coordinator.swarm.transition import Transition
from protocol.run.models import FunctionModel
from protocol.run.run_spec import DataSection, RunSpec
from protocol.v1 import session_pb2
from protocol.v1 import status_pb2 as pb
from tests.unit.swarm_scene import Scene, digest_of


def test_what_is_not_known_is_a_dash_and_not_a_number() -> None:
    status = pb.GetStatusResponse(run=pb.RunStatus(run_name="run", total_rounds=3))
    status.nodes.add(node_id="1", node_name="attic", state=pb.NODE_STATE_READY)
    view = view_of(status, [])
    nodes: Any = view["nodes"]
    (node,) = nodes
    unknown = ("loss", "tokensPerSecond", "time", "mfu", "memory", "link", "upload", "sent", "work")
    assert {node[figure] for figure in unknown} == {"-"}
    assert view["run"]["loss"] is None  # type: ignore[index]


def test_a_loss_below_zero_is_a_loss_in_all_places() -> None:
    status = pb.GetStatusResponse()
    node = status.nodes.add(node_id="1", state=pb.NODE_STATE_READY)
    node.heartbeat.CopyFrom(session_pb2.HeartbeatRequest(loss=-1.5))
    rounds = [pb.RoundSummary(round=1, tokens=10, loss=-1.25)]
    view: Any = view_of(status, rounds)
    assert (view["run"]["loss"], view["nodes"][0]["loss"]) == ("-1.500", "-1.500")
    assert view["rounds"][0]["loss"] == "-1.250"
    assert history_of(status.run, rounds)["loss"] == [-1.25]


def test_losses_of_any_size_are_seen_in_all_places() -> None:
    status = pb.GetStatusResponse()
    node = status.nodes.add(node_id="1", state=pb.NODE_STATE_READY)
    node.heartbeat.CopyFrom(session_pb2.HeartbeatRequest(loss=0.0000312))
    status.run.held_out_losses.add(round=0, loss=1234567.8)
    status.run.held_out_losses.add(round=5, loss=-0.0421)
    rounds = [pb.RoundSummary(round=1, tokens=10, loss=0.0000312)]
    view: Any = view_of(status, rounds)
    assert (view["run"]["loss"], view["nodes"][0]["loss"]) == ("3.12e-05", "3.12e-05")
    assert (view["run"]["heldOutFirst"], view["run"]["heldOutNow"]) == ("1.235e+06", "-0.0421")
    assert view["rounds"][0]["loss"] == "3.12e-05"
    curves = history_of(status.run, rounds)
    assert (curves["loss"], curves["heldLoss"]) == ([3.12e-05], [1234570.0, -0.0421])


def test_a_run_that_stands_says_so_where_its_time_left_would_run_down() -> None:
    run = pb.RunStatus(phase=pb.RUN_PHASE_WAITING, committed_round=4, total_rounds=9)
    run.estimated_seconds_left = 3700.0
    told = view_of(pb.GetStatusResponse(run=run), [])["run"]
    assert told["sentence"] == (  # type: ignore[index]
        "After round 4 the run is waiting, with about 1 h 1 min left once it goes on; 0 of 0 nodes ready."
    )
    assert told["isStanding"]  # type: ignore[index]


def test_figures_that_are_no_numbers_are_left_out_of_the_json() -> None:
    run = pb.RunStatus(token_clock=10)
    run.held_out_losses.add(round=1, loss=float("nan"))
    status = pb.GetStatusResponse(run=run)
    node = status.nodes.add(node_id="1", state=pb.NODE_STATE_READY)
    node.heartbeat.CopyFrom(session_pb2.HeartbeatRequest(loss=float("inf")))
    rounds = [pb.RoundSummary(round=1, tokens=10, loss=float("inf"))]
    for told in (view_of(status, rounds), history_of(run, rounds)):
        json.dumps(told, allow_nan=False)


def test_nodes_that_need_somebody_stand_first_and_of_very_many_only_those_are_sent() -> None:
    status = pb.GetStatusResponse()
    for number in range(MOST_NODES + 5):
        is_lost = number == MOST_NODES
        state = pb.NODE_STATE_LOST if is_lost else pb.NODE_STATE_READY
        status.nodes.add(node_id=f"{number:04}", node_name=f"n{number:04}", state=state)
    view = view_of(status, [])
    assert view["nodes"][0]["name"] == f"n{MOST_NODES:04}"  # type: ignore[index]
    assert (len(view["nodes"]), view["moreNodes"]) == (MOST_NODES, 5)  # type: ignore[arg-type]


def test_nodes_that_do_not_reach_each_other_are_a_pair_and_a_sentence() -> None:
    status = pb.GetStatusResponse()
    for name, other in (("one", "two"), ("two", "")):
        node = status.nodes.add(node_id=name, node_name=name, state=pb.NODE_STATE_READY)
        node.heartbeat.unreachable_ids.extend([other] if other else [])
    view = view_of(status, [])
    assert view["cutPairs"] == [("one", "two")]
    assert view["run"]["trouble"] == ["one and two do not reach each other"]  # type: ignore[index]


def test_what_sets_nodes_apart_in_a_status_is_also_on_the_page() -> None:
    status = pb.GetStatusResponse(run=pb.RunStatus(alike="a and b …", differing="a finds 2"))
    for name in ("one", "two"):
        node = status.nodes.add(node_id=name, node_name=name, state=pb.NODE_STATE_READY)
        node.heartbeat.CopyFrom(
            session_pb2.HeartbeatRequest(software=f"torch of {name}", evaluates_by=f"by {name}")
        )
    trouble: Any = view_of(status, [])["run"]["trouble"]  # type: ignore[index]
    assert trouble[:2] == ["a and b …", "a finds 2"]
    assert ["by one: one" in trouble[2], "torch of one: one" in trouble[3]] == [True, True]


@given(
    kept=st.lists(st.integers(1, 100_000), unique=True, max_size=40).map(sorted),
    clock=st.integers(1, 10**12),
)
def test_a_curve_grows_to_the_token_clock_whatever_rounds_are_kept(
    kept: list[int], clock: int
) -> None:
    rounds = [pb.RoundSummary(round=n, tokens=7, seconds=2.0, loss=3.0) for n in reversed(kept)]
    told = history_of(pb.RunStatus(token_clock=clock), rounds)
    assert told["rounds"] == kept
    tokens: list[int] = told["tokens"]  # type: ignore[assignment]
    assert tokens == sorted(tokens)
    assert not kept or tokens[-1] == pytest.approx(clock, abs=1)
    seconds: list[float] = told["seconds"]  # type: ignore[assignment]
    assert not kept or seconds[-1] == pytest.approx(2.0 * kept[-1])


def test_a_curve_of_very_many_rounds_fits_a_screen_and_keeps_its_ends() -> None:
    rounds = [pb.RoundSummary(round=n, tokens=1, loss=1.0) for n in range(9 * MOST_POINTS, 0, -1)]
    told: list[int] = history_of(pb.RunStatus(token_clock=5), rounds)["rounds"]  # type: ignore[assignment]
    assert len(told) == MOST_POINTS
    assert (told[0], told[-1]) == (1, 9 * MOST_POINTS)


class DrawnScene(Scene):
    """A scene whose timeline is kept."""

    def __init__(self, *, min_nodes: int = 1) -> None:
        self.timeline = Timeline()
        super().__init__(min_nodes=min_nodes)

    def hear(self, before: SwarmState, told: Transition) -> None:
        self.timeline.hear(before, told)


def test_a_round_is_drawn_stage_by_stage_and_says_who_was_waited_for() -> None:
    scene = DrawnScene(min_nodes=2)
    scene.attach("a", "b")
    scene.now += 1
    scene.train("a")
    scene.now += 9
    scene.train("b")
    scene.commit("a", "b")
    scene.now += 2
    scene.apply(digest_of("state 1"), "a", "b")
    current, closed = shown(scene.timeline.rounds, now=scene.now)
    assert (current["round"], current["isOpen"]) == (2, True)
    assert (closed["round"], closed["seconds"], closed["committed"]) == (1, 12.0, 10.0)
    nodes = {node["name"]: node for node in closed["nodes"]}  # type: ignore[attr-defined]
    assert [node["trained"] for node in nodes.values()] == [1.0, 10.0]
    assert [node["held"] for node in nodes.values()] == [10.0, 10.0]
    assert [node["applied"] for node in nodes.values()] == [12.0, 12.0]
    assert closed["waitedFor"] == f"{list(nodes)[1]} was last to train"


def test_every_sentence_has_all_its_facts_or_the_log_s_own_words_stand_there() -> None:
    for what in SENTENCES:
        assert sentence_of(News(level="info", what=what, facts={})) == what
    lost = News(level="info", what="node lost", facts={"node": "attic", "round": 3})
    assert sentence_of(lost) == "attic has not been heard for longer than its lease"


def test_news_come_back_after_a_start_and_a_torn_or_foreign_line_costs_only_itself(
    tmp_path: Path,
) -> None:
    path = tmp_path / "news.jsonl"
    first = NewsFile(path)
    for number in range(KEPT + 3):
        news = News(level="warning", what="went on", facts={"round": number})
        first.add([news, News(level="debug", what="untold", facts={})], unix_seconds=number)
    with path.open("a") as file:
        file.write('[1]\n{"at": 1}\n{"at": 9, "lev')
    again = NewsFile(path).latest
    assert [line["text"] for line in again[:2]] == [
        f"went on (round {KEPT + 2})",
        f"went on (round {KEPT + 1})",
    ]
    assert all("untold" not in str(line["text"]) for line in again)


def test_an_audit_is_told_with_its_reason_and_without_what_nobody_found() -> None:
    facts = {"slice": 2, "round": 10, "reducer": "campus", "verdict": "unanswered"}
    told = News(level="warning", what="slice audited", facts={**facts, "why": "", "differing": []})
    sentence = "Slice 2 of round 10, which campus reduced, was audited: unanswered"
    assert sentence_of(told) == sentence
    told = News(level="warning", what="slice audited", facts={**facts, "why": "no inputs"})
    assert sentence_of(told) == f"{sentence}; no inputs"


def committed(number: int, slices: str = "4 of 4") -> News:
    facts = {"round": number, "slices": slices, "tokens": 1, "seconds": 1.0, "reason": "well"}
    return News(level="info", what="round committed", facts=facts)


def test_what_is_wrong_is_found_after_any_number_of_rounds_in_which_nothing_was(
    tmp_path: Path,
) -> None:
    news = NewsFile(tmp_path / "news.jsonl")
    news.add([News(level="warning", what="node lost", facts={"node": "hut"})], unix_seconds=1)
    news.add([committed(1, slices="3 of 4")], unix_seconds=2)
    for number in range(2, 4000):
        evaluated = News(level="info", what="evaluated", facts={"round": number})
        news.add([committed(number), evaluated], unix_seconds=number)
    for each in (news, NewsFile(tmp_path / "news.jsonl")):
        lines = [line["text"] for line in each.latest]
        assert len(lines) == KEPT_ROUTINE + 2
        assert lines[0] == "evaluated (round 3999)"
        assert str(lines[-2]).startswith("Round 1 is committed: 3 of 4 slices")
        assert lines[-1] == "hut has not been heard for longer than its lease"


def test_readers_ask_for_curves_when_a_point_is_new_and_not_at_each_of_very_many_rounds() -> None:
    def stamps(first: int, last: int) -> int:
        runs = (pb.RunStatus(committed_round=number) for number in range(first, last))
        return len({curves_stamp(run) for run in runs})

    assert stamps(0, MOST_POINTS) == MOST_POINTS
    assert stamps(100_000, 101_000) <= 1000 * MOST_POINTS / 100_000 + 2
    run = pb.RunStatus(committed_round=10)
    before = curves_stamp(run)
    run.held_out_losses.add(round=10, loss=1.0)
    assert curves_stamp(run) != before, "a held-out loss is a point too"
    before = curves_stamp(run)
    run.went_back.append("to round 10")
    assert curves_stamp(run) != before, "and so are rounds that are made again"


def test_a_news_file_that_grows_too_large_begins_anew_with_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.dashboard.news_file.MOST_BYTES", 2000)
    path = tmp_path / "news.jsonl"
    news = NewsFile(path)
    for number in range(2 * KEPT):
        told = News(level="info", what="went on", facts={"round": number})
        news.add([told], unix_seconds=number)
    assert len(path.read_text().splitlines()) <= KEPT + 1
    assert NewsFile(path).latest[0]["text"] == f"went on (round {2 * KEPT - 1})"


def test_news_that_cannot_be_kept_are_said_once_and_shown_all_the_same(
    tmp_path: Path,
) -> None:
    news = NewsFile(tmp_path / "not there" / "news.jsonl")
    with capture_logs() as logs:
        for number in range(3):
            told = News(level="info", what="went on", facts={"round": number})
            news.add([told], unix_seconds=number)
    assert [line["event"] for line in logs] == ["news are not kept for the page"]
    assert len(news.latest) == 3


def test_the_page_is_told_what_the_run_counts_and_whose_loss_it_has() -> None:
    old = view_of(pb.GetStatusResponse(), [])["run"]
    run = pb.RunStatus(counted="samples", has_own_loss=True)
    new = view_of(pb.GetStatusResponse(run=run), [])["run"]
    assert (old["counted"], old["hasOwnLoss"]) == ("tokens", False)  # type: ignore[index]
    assert (new["counted"], new["hasOwnLoss"]) == ("samples", True)  # type: ignore[index]


def test_nobody_is_told_that_the_losses_of_loops_are_nats() -> None:
    status = pb.GetStatusResponse()
    status.nodes.add(node_id="1", state=pb.NODE_STATE_READY, device="own loop")
    view: Any = view_of(status, [])
    assert view["run"]["hasOwnLoss"]


def test_images_are_samples_and_what_a_function_makes_of_text_is_tokens() -> None:
    net, samples = "tests.run_functions:net", "tests.run_functions:samples"
    data = DataSection(source="function", function=samples)
    images = RunSpec(model=FunctionModel(source="function", function=net), data=data)
    assert (images.counted, images.has_own_loss) == ("samples", True)
    rows = FunctionModel(source="function", function=net, context=64)
    assert RunSpec(model=rows, data=data).counted == "tokens"
    assert (RunSpec().counted, RunSpec().has_own_loss) == ("tokens", False)


def contrast(one: str, other: str) -> float:
    """Of two colours, as WCAG 2 has it."""

    def luminance(colour: str) -> float:
        parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
        linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_what_the_page_says_and_draws_stands_out_by_day_and_at_night() -> None:
    page = Path(run_view.__file__).parent / "site" / "page.css"
    schemes = re.findall(r":root \{([^}]*)\}", page.read_text())
    assert len(schemes) == 2
    for scheme in schemes:
        colours = dict(re.findall(r"--([a-z0-9]+): (#[0-9a-f]{6})", scheme))
        sheet, ground = colours["sheet"], colours["ground"]
        for words in ("ink", "quiet", "accent", "good", "busy", "bad"):  # and the sheet's on those
            assert contrast(colours[words], sheet) >= 4.5, words
        assert all(contrast(colours[words], ground) >= 4.5 for words in ("ink", "quiet", "accent"))
        assert all(contrast(colours[drawn], sheet) >= 3 for drawn in ("s0", "s1", "s2", "held"))
