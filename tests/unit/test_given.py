"""What a node has given is counted over its starts and the coordinator's, and shown to who asks for it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from coordinator.dashboard import given
from coordinator.dashboard.given import Given, GivenFile, Tally
from coordinator.swarm.state import SwarmState
from coordinator.swarm.transition import Transition
from node.me import facts, facts_of_folder, folder_in_words, in_words, of_folder, refusal
from protocol.errors import NoInputError, UsageError
from protocol.trust.pki import Role
from protocol.v1 import status_pb2 as pb
from protocol.wire.rounds import NodeId
from tests.unit.swarm_scene import Scene, digest_of

if TYPE_CHECKING:
    from coordinator.swarm.state import ClosedRound

A, B = NodeId("a"), NodeId("b")


class CountedScene(Scene):
    """A scene of which a file counts what nodes give."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.closed: list[ClosedRound] = []  # as the database keeps them, newest first
        self.start()
        super().__init__(min_nodes=2)

    def start(self) -> None:
        self.file = GivenFile(
            self.path, closed=lambda: self.closed, now=getattr(self, "now", 1000.0)
        )

    def hear(self, before: SwarmState, told: Transition) -> None:
        last = told.state.last_closed
        if last is not None and told.state.committed_round > before.committed_round:
            self.closed.insert(0, last)
        self.file.hear(told)

    def go_through_a_round(self) -> None:
        for name in ("a", "b"):
            self.now += 20
            self.train(name)
        self.commit("a", "b")
        self.apply(digest_of(f"state {self.state.committed_round}"), "a", "b")

    def of(self, node_id: NodeId) -> Given:
        return self.file.tally.of(node_id)


@pytest.fixture
def scene(tmp_path: Path) -> CountedScene:
    scene = CountedScene(tmp_path / "given.json")
    scene.attach("a", "b")
    return scene


def test_rounds_and_the_time_of_who_is_present_are_counted(scene: CountedScene) -> None:
    scene.go_through_a_round()
    scene.go_through_a_round()
    assert (scene.of(A).num_rounds, scene.of(A).present_seconds) == (2, 80.0)
    scene.leave("b")
    scene.now += 1000
    scene.beat("a", at=2, digest=digest_of("state 2"))
    assert scene.of(A).present_seconds == 1080.0
    assert scene.of(B).present_seconds == 80.0, "who has left gives no time"


def test_after_a_crash_rounds_are_counted_from_the_database_and_none_twice(
    scene: CountedScene,
) -> None:
    scene.go_through_a_round()
    scene.file.save()
    scene.go_through_a_round()
    scene.start()  # without a save
    assert scene.of(A).num_rounds == 2
    scene.go_through_a_round()
    assert scene.of(A).num_rounds == 3
    scene.file.save()
    scene.start()
    assert (scene.of(A).num_rounds, scene.of(A).present_seconds) == (3, 100.0), "a save each minute"


def test_bytes_go_on_when_a_node_s_process_begins_at_zero(scene: CountedScene) -> None:
    member = scene.member("a")
    tally = Tally()

    def told(process_id: int, sent: int) -> int:
        wire = {"result": (sent, 2 * sent)}
        tally.look({A: replace(member, process_id=process_id, wire_told=wire)}, seconds=1.0)
        assert tally.of(A).received_bytes == 2 * tally.of(A).sent_bytes
        return tally.of(A).sent_bytes

    assert [told(1, 100), told(1, 150), told(2, 0), told(2, 30), told(2, 30)] == [
        *(100, 150, 150, 180, 180),
    ]


def test_a_round_of_a_run_that_went_back_is_counted_when_it_is_made_again(
    scene: CountedScene,
) -> None:
    scene.go_through_a_round()
    scene.go_through_a_round()
    back = replace(scene.state, committed_round=1, recent=scene.state.recent[:1])
    scene.file.hear(Transition(state=back, actions=(), at=scene.now))
    scene.file.hear(Transition(state=scene.state, actions=(), at=scene.now))
    assert scene.of(A).num_rounds == 3


def test_who_had_a_part_in_no_round_is_forgotten_once_gone(scene: CountedScene) -> None:
    scene.attach("idle")
    scene.go_through_a_round()
    tally = scene.file.tally
    tally.forget_idle(scene.state.members)
    assert tally.by_node.keys() == {A, B, NodeId("idle")}
    scene.state = replace(
        scene.state, members={A: scene.member("a")}
    )  # as long after the others left
    scene.now += given.SAVE_SECONDS
    scene.beat("a", at=1, digest=digest_of("state 1"))
    assert tally.by_node.keys() == {A, B}
    assert json.loads(scene.path.read_text())["by_node"].keys() == {"a", "b"}


def test_a_damaged_file_is_counted_anew_and_a_full_disk_is_said_once(
    tmp_path: Path,
) -> None:
    path = tmp_path / "given.json"
    path.write_text('{"through_round": "ma')
    with capture_logs() as logs:
        GivenFile(path, closed=list, now=0.0)
        file = GivenFile(tmp_path / "not there" / "given.json", closed=list, now=0.0)
        file.save()
        file.save()
    said = [line["event"] for line in logs]
    assert said == ["what nodes have given is counted anew", "what nodes have given is not kept"]


def a_node() -> pb.NodeStatus:
    told = pb.Given(
        num_rounds=4, sent_bytes=1_500_000, received_bytes=2_000_000, present_seconds=90
    )
    return pb.NodeStatus(
        node_id="1234",
        node_name="attic",
        state=pb.NODE_STATE_READY,
        committed_tokens=250,
        given=told,
    )


def test_a_node_s_part_is_told_beside_the_run_s() -> None:
    run = pb.RunStatus(run_name="run", token_clock=1000, committed_round=5)
    words = in_words(a_node(), run)
    assert words["tokens"] == "250 of 1.0k committed, 25.0% of the run"
    assert (words["rounds"], words["time"]) == ("4 of 5", "1 min 30 s present")
    assert words["bytes"] == "1.5 MB sent, 2.0 MB received"
    assert json.loads(json.dumps(facts(a_node(), run)))["share"] == 0.25
    assert facts(a_node(), pb.RunStatus())["share"] == 0.0


def test_without_a_coordinator_the_commits_of_the_folder_are_counted(scene: CountedScene) -> None:
    for _ in range(3):
        scene.go_through_a_round()
    commits = [closed.commit for closed in reversed(scene.closed)]
    known = of_folder(commits, A)
    assert known is not None
    assert (known.first_round, known.last_round, known.num_rounds) == (1, 3, 3)
    assert known.tokens == scene.state.members[A].committed_tokens > 0
    assert known.run_tokens == scene.state.token_clock
    assert of_folder([], A) is None
    later = of_folder(commits[1:], NodeId("c"))
    assert later is not None and (later.num_rounds, later.tokens) == (0, 0)
    words = folder_in_words(known, "a", "attic", "run")
    assert words["node"] == "attic in run, as its folder knows it"
    assert words["tokens"].endswith("62.5% of rounds 1 to 3") and words["rounds"] == "3 of those 3"
    assert "samples" in folder_in_words(known, "a", "attic", "run", counted="samples")
    assert in_words(a_node(), pb.RunStatus(counted="samples"))["samples"].endswith("of the run")
    told, answer = facts_of_folder(known, "a", "attic", "run"), facts(a_node(), pb.RunStatus())
    assert told.keys() == answer.keys()
    assert (told["source"], answer["source"]) == ("folder", "coordinator")
    assert told["sent_bytes"] is None


def test_who_has_given_nothing_learns_why() -> None:
    answer = pb.GetStatusResponse(run=pb.RunStatus(run_name="run"))
    for role, whose in ((Role.OPERATOR, "the run owner's"), (Role.VIEWER, "a viewer's")):
        never = refusal(Path("home"), answer, role=role)
        assert isinstance(never, UsageError) and f"home is {whose} folder" in never.what
    helper = refusal(Path("home"), answer, role=Role.HELPER)
    assert helper.next_step == "start it: atoll helper start --dir home"
    not_yet = refusal(Path("my home"), answer, role=Role.NODE)
    assert isinstance(not_yet, NoInputError)
    assert not_yet.next_step == 'start it: atoll node start --dir "my home"'
