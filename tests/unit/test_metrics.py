"""Metrics mean what docs say: declared once, put as declared, and left out when not known."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from coordinator.dashboard.run_metrics import RUN_METRICS, board_of
from coordinator.dashboard.timeline import RoundTally
from coordinator.swarm.events import Tell
from coordinator.swarm.transition import Transition
from protocol.v1 import session_pb2
from protocol.v1 import status_pb2 as pb
from protocol.web.metrics import NODE_METRICS, PARTS, Board, Metric
from protocol.wire.messages import AuditAsked, Reduced, RoundCommitted, SliceTakenOver
from protocol.wire.rounds import Commit, NodeId, SliceOutcome
from tests.unit.swarm_scene import INITIAL, Scene

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference.md"
ALL = (*RUN_METRICS, *NODE_METRICS)


def test_every_metric_stands_in_the_docs_with_its_labels_and_no_other() -> None:
    of_run, of_nodes = REFERENCE.read_text().split(
        "Each has the labels\n`node` and `node_id`, and:"
    )
    written = []
    for page, of_all in ((of_run, ()), (of_nodes, ("node", "node_id"))):
        for name, told in re.findall(r"^\| `(atoll_\w+)` \| (.*?) ?\|", page, re.M):
            written.append((name, (*of_all, *re.findall(r"`(\w+)`", told))))
    assert written == [(metric.name, metric.labels) for metric in ALL]


def test_names_follow_prometheus() -> None:
    for metric in ALL:
        assert re.fullmatch(r"atoll_[a-z_]+", metric.name)
        assert not metric.name.endswith(("_count", "_sum", "_bucket")), metric.name


def test_a_metric_without_a_value_is_left_out_and_not_told_as_0() -> None:
    board = Board()
    plain: Metric[float | None] = Metric(name="atoll_a", meaning="a", of=lambda told: told)
    board.tell([plain], None)
    assert board.text() == b""
    board.tell([plain], 0)
    assert b"\natoll_a 0.0\n" in board.text()


def test_labels_that_were_not_declared_cannot_be_told() -> None:
    plain: Metric[int] = Metric(name="atoll_a", meaning="a", labels=("b",), of=lambda told: told)
    with pytest.raises(ValueError, match="has the labels"):
        Board().tell([plain], 1)
    with pytest.raises(ValueError, match="has the labels"):
        Board().tell([plain], 1, "x", "y")
    by_word: Metric[int] = Metric(name="atoll_a", meaning="a", of=lambda told: {("x",): told})
    with pytest.raises(ValueError, match="has the labels"):
        Board().tell([by_word], 1)


def test_names_of_nodes_cannot_break_out_of_their_place() -> None:
    node = pb.NodeStatus(node_id="1", node_name='a"} 1\nfake 2', state=pb.NODE_STATE_READY)
    counts = RoundTally(Scene().state, now=0.0).counts(0.0)
    status = pb.GetStatusResponse(nodes=[node])
    text = board_of(status, None, counts, version="0").text().decode()
    families = list(text_string_to_metric_families(text))
    assert "fake" not in {family.name for family in families}
    (info,) = (f for f in families if f.name == "atoll_node_info")
    assert info.samples[0].labels["node"] == node.node_name


def test_a_fresh_run_can_be_told() -> None:
    counts = RoundTally(Scene().state, now=0.0).counts(0.0)
    text = board_of(pb.GetStatusResponse(), None, counts, version="0").text().decode()
    names = {family.name for family in text_string_to_metric_families(text)}
    assert "atoll_committed_round" in names
    unknown = {"atoll_open_round", "atoll_held_out_loss_nats", "atoll_training_loss_nats"}
    assert not names & (unknown | {"atoll_digests_agree", "atoll_parameters"})


def told_of(backups: list[pb.BackupStatus]) -> list[str]:
    counts = RoundTally(Scene().state, now=0.0).counts(0.0)
    status = pb.GetStatusResponse(run=pb.RunStatus(backups=backups))
    text = board_of(status, None, counts, version="0").text().decode()
    return [line for line in text.splitlines() if "backup" in line and not line.startswith("#")]


def test_backups_are_told_without_their_places_and_nothing_is_due_where_none_follows() -> None:
    failing = pb.BackupStatus(
        target="s3://b/run", place="s3://b/run/one", num_failures=4, next_seconds=5, made_seconds=90
    )
    late = pb.BackupStatus(target="/mnt/b", next_seconds=-2000, is_abandoned=True)
    once = pb.BackupStatus(made_seconds=60)
    assert told_of([failing, late, once]) == [
        "atoll_backup_age_seconds 60.0",
        "atoll_backup_failures 4.0",
        "atoll_backup_abandoned 1.0",
    ]
    assert told_of([once]) == ["atoll_backup_age_seconds 60.0"]
    assert told_of([]) == []


def test_a_run_that_waits_for_its_owner_and_a_disk_that_does_can_ring() -> None:
    counts = RoundTally(Scene().state, now=0.0).counts(0.0)

    def told(run: pb.RunStatus) -> dict[str, float]:
        text = board_of(pb.GetStatusResponse(run=run), None, counts, version="0").text().decode()
        families = text_string_to_metric_families(text)
        samples = (sample for family in families for sample in family.samples)
        return {
            s.name: s.value for s in samples if s.name.startswith(("atoll_disk", "atoll_run_p"))
        }

    paused = pb.RunStatus(
        paused="paused by the coordinator",
        disk_free_bytes=5,
        is_disk_low=True,
        disk_write_seconds=0.5,
    )
    assert told(paused) == {
        "atoll_run_paused": 1,
        "atoll_disk_free_bytes": 5,
        "atoll_disk_low": 1,
        "atoll_disk_write_seconds": 0.5,
    }
    assert told(pb.RunStatus()) == {"atoll_run_paused": 0}


def test_the_parts_of_a_rounds_time_are_those_of_the_wire() -> None:
    fields = session_pb2.Utilisation.DESCRIPTOR.fields_by_name
    assert {f"{part}_share" for part in PARTS} == {n for n in fields if n.endswith("_share")}


def test_seconds_are_counted_in_the_phase_that_they_were_spent_in() -> None:
    scene = Scene()
    tally = RoundTally(scene.state, now=10.0)
    assert tally.counts(13.0).phase_seconds == {"waiting": 3.0}
    tally.hear(Transition(state=replace(scene.state, finished_at=15.0), actions=(), at=15.0))
    assert tally.counts(16.0).phase_seconds == {"waiting": 5.0, "finished": 1.0}
    assert tally.counts(16.0).commits == 0


def test_void_slices_takeovers_and_audits_are_counted() -> None:
    scene = Scene()
    tally = RoundTally(scene.state, now=0.0)
    slices = (
        SliceOutcome(index=0, start=0, num_elements=4, digest=INITIAL),
        SliceOutcome(index=1, start=4, num_elements=4, digest=None, void_reason="nobody is left"),
    )
    closed = Commit(round=1, fragment=0, base_digest=INITIAL, slices=slices)
    takeover = SliceTakenOver(
        round=1, slice_index=0, reducer_id=NodeId("x"), attempt=1, contribute_seconds=1.0
    )
    nothing = Reduced(slice_index=0, digest=None, contributors=(), contributions=())
    asked = AuditAsked(round=1, reducer_id=NodeId("x"), attempt=0, seconds=1.0, reduced=nothing)
    actions = (
        *(Tell(message=RoundCommitted(commit=closed)), Tell(message=takeover)),
        Tell(message=asked, to=(NodeId("y"), NodeId("z"))),
    )
    tally.hear(Transition(state=scene.state, actions=actions, at=1.0))
    counts = tally.counts(1.0)
    assert (counts.commits, counts.void_slices, counts.takeovers, counts.audits) == (1, 1, 1, 2)
