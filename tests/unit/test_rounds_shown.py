"""One round for people: what is told of it, drawn as a chart of text, and what is kept of its times."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from coordinator.dashboard.timeline import MOST_NODES, RoundTimes, Stages, Timeline, TimesFile
from coordinator.services.one_round import NO_TIMES, closed_round, open_round
from coordinator.swarm.state import SwarmState
from coordinator.swarm.transition import Transition
from protocol.errors import NoInputError
from protocol.files.rolling import RollingFile, lines_of, old_of
from protocol.terminal import console
from protocol.terminal.cli import root
from protocol.terminal.query import StatusLink
from protocol.terminal.rounds import (
    APPLIES,
    BAR_WIDTH,
    MISSING,
    RECEIVES,
    REDUCES,
    TRAINS,
    _row,
    bar,
    chart,
)
from protocol.v1 import status_pb2 as pb
from protocol.wire.rounds import NodeId
from tests.unit.swarm_scene import Scene, digest_of


def a_node(name: str = "attic", **told: object) -> pb.NodeInRound:
    settings = {"inner_steps": 30, "num_slices_reduced": 1, **told}
    return pb.NodeInRound(node_id=f"{name}-id", node_name=name, **settings)  # type: ignore[arg-type]


def stages_of(drawn: str) -> str:
    """Each mark once, in its order."""
    return "".join(mark for at, mark in enumerate(drawn) if at == 0 or drawn[at - 1] != mark)


def whole(name: str = "attic", **changes: object) -> pb.NodeInRound:
    times = {"trained": 6.0, "reduced": 8.0, "held": 9.0, "applied": 10.0}
    return a_node(name, **{f"{stage}_seconds": at for stage, at in times.items()} | changes)


def test_a_bar_shows_each_stage_for_as_long_as_it_took() -> None:
    drawn = bar(whole(), whole=12.0, is_open=False)
    assert stages_of(drawn) == TRAINS + REDUCES + RECEIVES + APPLIES
    assert [drawn.count(mark) for mark in (TRAINS, REDUCES, RECEIVES, APPLIES)] == [30, 10, 5, 5]


def test_a_stage_that_nobody_saw_the_end_of_goes_on_or_is_missing() -> None:
    node = a_node(trained_seconds=5.0)
    assert stages_of(bar(node, whole=10.0, is_open=True)) == TRAINS + REDUCES
    assert stages_of(bar(node, whole=10.0, is_open=False)) == TRAINS + MISSING
    assert stages_of(bar(a_node(), whole=10.0, is_open=True)) == TRAINS
    assert stages_of(bar(a_node(), whole=10.0, is_open=False)) == MISSING


def test_a_helper_trains_nothing_and_a_node_without_slices_reduces_nothing() -> None:
    helper = a_node(inner_steps=0, reduced_seconds=4.0, held_seconds=8.0, applied_seconds=10.0)
    assert stages_of(bar(helper, whole=10.0, is_open=False)) == REDUCES + RECEIVES + APPLIES
    spared = whole(num_slices_reduced=0)
    assert stages_of(bar(spared, whole=10.0, is_open=False)) == TRAINS + RECEIVES + APPLIES


def test_of_a_round_whose_plan_is_not_kept_the_times_say_what_a_node_did() -> None:
    forgotten = whole(inner_steps=0, num_slices_reduced=0)
    assert bar(forgotten, whole=10.0, is_open=False) == bar(whole(), whole=10.0, is_open=False)
    assert _row(forgotten)["steps"] == "-", "and not a helper"
    assert _row(a_node(inner_steps=0, reduced_seconds=4.0))["steps"] == "helper"


@given(
    times=st.lists(st.none() | st.floats(0, 100), min_size=4, max_size=4),
    whole_seconds=st.floats(0.001, 100),
    is_open=st.booleans(),
)
def test_no_bar_is_wider_than_its_chart(
    times: list[float | None], whole_seconds: float, is_open: bool
) -> None:
    stages = ("trained", "reduced", "held", "applied")
    known: dict[str, Any] = {
        f"{s}_seconds": at for s, at in zip(stages, times, strict=True) if at is not None
    }
    assert len(bar(a_node(**known), whole=whole_seconds, is_open=is_open)) <= BAR_WIDTH


def a_round(*nodes: pb.NodeInRound, **changes: object) -> pb.GetRoundResponse:
    summary = pb.RoundSummary(
        **{"round": 41, "num_participants": 2, "num_contributors": 2, "tokens": 2000}  # type: ignore[arg-type]
        | {"num_slices": 2, "num_committed_slices": 1, "loss": 2.5, "reason": "slice 1 is void"},
    )
    told = {"summary": summary, "seconds": 12.0, "committed_seconds": 9.0, "nodes": nodes}
    return pb.GetRoundResponse(**told | changes)  # type: ignore[arg-type]


def shown(answer: pb.GetRoundResponse, *options: str) -> str:
    status = pb.GetStatusResponse()
    with (
        patch.object(StatusLink, "round", lambda link, number: answer),
        patch.object(StatusLink, "status", lambda link: status),
    ):
        result = CliRunner().invoke(root, ["rounds", "show", *options], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    return result.output


def test_a_closed_round_fits_80_columns_and_says_what_became_of_each_contribution() -> None:
    clipped = pb.Screening(node_id="b", num_contributions=2, num_clipped=1)
    taken = pb.Screening(node_id="a", num_contributions=2)
    answer = a_round(
        whole("attic-with-a-very-long-name-of-its-own", screening=taken),
        whole("basement", trained_inner_steps=28, loss=2.25, screening=clipped),
        void_slices=[pb.VoidSlice(index=1, reason="its reducer is gone")],
        waited_for="basement was last to train",
        not_kept="something is not known",
    )
    output = shown(answer, "41")
    assert max(map(len, output.splitlines())) <= 80
    for words in (
        "round 41, 12 s",
        "2 of 2 nodes are in it, 1 of 2 slices are committed, 2.0k tokens, loss 2.500",
        "basement was last to train",
        "commit at 9.0 s ↑",
        "all 2 taken",
        "1 clipped of 2",
        "slice 1 is void: its reducer is gone",
        "something is not known",
    ):
        assert words in output
    told = json.loads(shown(answer, "--json"))
    assert told["nodes"][1]["trained_seconds"] == 6.0
    assert told["void_slices"] == [{"index": 1, "reason": "its reducer is gone"}]


def test_a_round_in_flight_says_so_and_one_without_times_has_no_chart() -> None:
    flying = a_round(a_node(trained_seconds=3.0), is_open=True)
    flying.ClearField("committed_seconds")
    assert "round 41, in flight, 12 s so far" in shown(flying)
    assert chart(a_round(a_node())) == []


def test_a_round_that_there_is_not_ends_with_the_coordinator_s_sentence() -> None:
    def refuse(link: StatusLink, number: int) -> pb.GetRoundResponse:
        raise NoInputError(f"round {number} has not begun: the newest is 3", next_step="list them")

    with patch.object(StatusLink, "round", refuse):
        assert console.run(root, ["rounds", "show", "9"]) == NoInputError.exit_code


class WatchedScene(Scene):
    """A scene whose timeline is kept."""

    def __init__(self, *, min_nodes: int = 1) -> None:
        self.kept: list[RoundTimes] = []
        self.timeline = Timeline(keep=self.kept.append)
        super().__init__(min_nodes=min_nodes)

    def hear(self, before: SwarmState, told: Transition) -> None:
        self.timeline.hear(before, told)


def scene_with_a_closed_round() -> WatchedScene:
    scene = WatchedScene(min_nodes=2)
    scene.attach("a", "b")
    scene.now += 3
    scene.train("a")
    scene.train("b")
    scene.commit("a", "b")
    scene.now += 2
    scene.apply(digest_of("state 1"), "a", "b")
    return scene


def test_what_is_not_kept_of_a_round_is_said() -> None:
    scene = scene_with_a_closed_round()
    figures = pb.RoundSummary(round=1, seconds=3.0)
    closed = scene.state.recent[-1]
    times = scene.kept[0]
    assert closed_round(scene.state, figures, closed, times).not_kept == ""
    assert closed_round(scene.state, figures, closed, None).not_kept == NO_TIMES
    thin = closed_round(scene.state, figures, None, None)
    assert thin.not_kept == f"of rounds more than 1000 back only the figures are kept; {NO_TIMES}"
    assert (thin.seconds, list(thin.nodes)) == (3.0, [])
    alone = closed_round(scene.state, figures, None, times)
    assert [node.trained_seconds for node in alone.nodes] == [3.0, 3.0]
    learned = closed_round(scene.state, pb.RoundSummary(round=1), closed, None)
    assert not learned.HasField("seconds"), "nobody knows how long a round took that nodes told of"


def test_a_coordinator_that_started_in_mid_round_says_from_when_it_has_heard() -> None:
    scene = scene_with_a_closed_round()
    scene.timeline = Timeline()
    scene.now += 7
    scene.train("a")
    current = scene.round
    told = open_round(scene.state, current, None, scene.timeline.of(current.number), now=scene.now)
    assert told.not_kept.startswith("the coordinator was started 7 s into this round")


def test_times_come_back_from_their_file_and_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "times.jsonl"
    file = TimesFile(path)
    times = scene_with_a_closed_round().kept[0]
    file.add(times)
    again = RoundTimes(number=1, opened=5.0, heard=5.0, ended=9.0)
    file.add(again)
    file.add(RoundTimes(number=11, opened=9.0, heard=9.0, ended=10.0))
    with path.open("a") as torn:
        torn.write('{"number":1,"opened":')
    found = TimesFile(path)
    assert found.of(1) == again, "a run that went back has made the round twice"
    assert found.of(2) is None
    assert [one.number for one in found.latest()] == [1, 1, 11]
    assert found.latest()[0] == times


def test_of_a_round_of_very_many_nodes_those_that_were_last_are_kept() -> None:
    kept: list[RoundTimes] = []
    scene = WatchedScene(min_nodes=MOST_NODES + 3)
    scene.timeline = Timeline(keep=kept.append)
    names = [f"n{number:03}" for number in range(MOST_NODES + 3)]
    scene.attach(*names)
    for name in names:
        scene.now += 0.01
        scene.train(name)
    scene.commit(*names)
    for name in names:
        scene.now += 0.01
        scene.apply(digest_of("state 1"), name)
    assert len(kept[0].nodes) == MOST_NODES
    assert NodeId(names[0]) not in kept[0].nodes and NodeId(names[-1]) in kept[0].nodes


def test_times_that_the_disk_refuses_are_said_once(
    tmp_path: Path,
) -> None:
    file = TimesFile(tmp_path / "not there" / "times.jsonl")
    nodes = {NodeId("a"): Stages(name="a")}
    with capture_logs() as logs:
        for number in range(3):
            file.add(RoundTimes(number=number, opened=0.0, heard=0.0, nodes=nodes))
    assert [line["event"] for line in logs] == ["times of rounds are not kept"]


@given(sizes=st.lists(st.integers(0, 40), max_size=60))
def test_a_rolling_file_keeps_the_latest_lines_whole_and_never_grows_past_its_bound(
    sizes: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("rolling") / "lines"
    file = RollingFile(path, most_bytes=100)
    written = [f"{number}:" + "x" * size for number, size in enumerate(sizes)]
    for line in written:
        file.append([line])
    kept = list(lines_of(path))
    assert kept == written[len(written) - len(kept) :]
    assert all(each.stat().st_size <= 100 for each in (path, old_of(path)) if each.exists())
    assert not written or len(kept) >= 1
