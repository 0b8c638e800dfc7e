"""Held-out losses of sources travel to the coordinator, and are told wherever the whole loss is."""

import math
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from coordinator.dashboard.run_metrics import board_of
from coordinator.dashboard.timeline import RoundTally
from coordinator.services import checks
from lab.simulation.swarm import Life, simulate
from node.island.data.opening import open_dataset
from node.island.data.places import DataPlaces
from protocol.errors import BadDataError
from protocol.terminal.status_words import held_out_in_words
from protocol.v1 import session_pb2
from protocol.v1 import status_pb2 as pb
from protocol.wire.messages import Evaluated, report_from_wire, report_to_wire
from protocol.wire.rounds import SourceLoss
from tests.tiny_runs import tiny
from tests.unit.swarm_scene import Scene
from tests.unit.test_journal import ToldScene
from tests.unit.test_sources_held_out import write_sources
from tests.unit.tokens_scene import prepared

SOURCES = (
    SourceLoss(source="code", loss=1.25, tokens=40),
    SourceLoss(source="", loss=2.0, tokens=24),
)
TOLD = Evaluated(held_out_loss=1.5, tokens=64, by_source=SOURCES)


def told_of(*sources: tuple[str, float]) -> pb.RunStatus:
    held_out = pb.HeldOutLoss(round=2, loss=3.0)
    for name, loss in sources:
        held_out.by_source.add(source=name, loss=loss)
    return pb.RunStatus(held_out_losses=[held_out])


def test_a_report_holds_them_and_one_without_is_as_before() -> None:
    assert report_from_wire(report_to_wire(7, TOLD), most_contributors=0) == TOLD
    plain = Evaluated(held_out_loss=1.5, tokens=64)
    as_before = session_pb2.EvaluatedReport(held_out_loss=1.5, tokens=64).SerializeToString()
    assert report_to_wire(7, plain).evaluated.SerializeToString() == as_before


def test_what_a_node_calls_sources_cannot_steer_a_terminal_and_no_node_is_refused_for_it() -> None:
    hostile = SourceLoss(source="\x1b]0;owned\x07co\nde" + "x" * 200, loss=1.0, tokens=1)
    found = checks.report(Evaluated(held_out_loss=1.0, tokens=1, by_source=(hostile,)))
    assert isinstance(found, Evaluated)
    (one,) = found.by_source
    assert one.source.isprintable() and len(one.source) <= checks.MAX_SOURCE_LENGTH + 1
    ruined = SourceLoss(source="code", loss=math.nan, tokens=1)
    found = checks.report(Evaluated(held_out_loss=1.0, tokens=1, by_source=(ruined,)))
    assert isinstance(found, Evaluated) and found.by_source == ()
    with pytest.raises(BadDataError, match="65 sources"):
        checks.report(Evaluated(held_out_loss=1.0, tokens=1, by_source=(hostile,) * 65))


def test_the_coordinator_keeps_and_logs_them() -> None:
    scene = ToldScene(min_nodes=2)
    scene.attach("node-a", "node-b")
    scene.report("node-a", TOLD, round=0)
    (kept,) = scene.state.held_out
    assert kept.by_source == SOURCES
    (news,) = (one for one in scene.news if one.what == "evaluated")
    assert news.facts["by_source"] == {"code": 1.25, "others": 2.0}


def test_the_status_names_each_or_from_the_least_to_the_most() -> None:
    assert held_out_in_words(told_of()) == "3.000"
    some = told_of(("code", 2.0), ("", 4.0))
    assert held_out_in_words(some) == "3.000 (code 2.000, others 4.000)"
    many = told_of(*((f"s{i}", float(i + 1)) for i in range(9)))
    assert held_out_in_words(many) == "3.000 (9 sources, 1.000 to 9.000)"


def test_metrics_have_one_for_each() -> None:
    counts = RoundTally(Scene().state, now=0.0).counts(0.0)
    status = pb.GetStatusResponse(run=told_of(("code", 2.0), ("", 4.0)))
    text = board_of(status, None, counts, version="0").text().decode()
    families = {family.name: family.samples for family in text_string_to_metric_families(text)}
    found = families["atoll_held_out_source_loss_nats"]
    assert {one.labels["source"]: one.value for one in found} == {"code": 2.0, "others": 4.0}


def test_a_swarm_tells_the_loss_of_each_source_of_its_data(tmp_path: Path) -> None:
    write_sources(tmp_path)
    made = prepared(
        *(tmp_path / name for name in ("code", "prose")),
        out=tmp_path / "out",
        repeated=((str(tmp_path / "code"), 1.5),),
    )
    spec = tiny(
        model={"vocab_size": 256},
        data={
            "source": "tokens",
            "paths": [str(tmp_path / "out")],
            "digest": made.manifest.digest().hex(),
        },
    )
    corpus = open_dataset(spec, DataPlaces(folder=tmp_path))
    finished = simulate(spec, lives=[Life()] * 3, corpus=corpus)
    assert len(finished.held_out) > 1
    for each in finished.held_out:
        assert {one.source for one in each.by_source} == {"code", ""}
        whole = sum(one.loss * one.tokens for one in each.by_source)
        assert whole / each.tokens == pytest.approx(each.loss, rel=1e-6)


def test_names_of_private_sources_stay_with_their_holder(tmp_path: Path) -> None:
    write_sources(tmp_path)
    repeated = ((str(tmp_path / "code"), 1.5),)
    prepared(tmp_path / "code", tmp_path / "prose", out=tmp_path / "out", repeated=repeated)
    spec = tiny(model={"vocab_size": 256}, data={"source": "tokens", "private": True})
    corpus = open_dataset(spec, DataPlaces(folder=tmp_path, own=str(tmp_path / "out")))
    finished = simulate(spec, lives=[Life()] * 3, corpus=corpus)
    assert len(finished.held_out) > 1
    for each in finished.held_out:
        assert each.holders and each.by_source == ()
        assert all(holder.by_source == () for holder in each.holders)
