"""The phases that the coordinator's log tells of, for who looks for a fault."""

from structlog.testing import capture_logs
from swarm_scene import INITIAL, Scene, digest_of

from coordinator.journal import farewell, log_transition
from coordinator.swarm.events import Event, Started
from coordinator.swarm.transition import Transition


class LoggedScene(Scene):
    """A scene whose steps are logged."""

    def do(self, event: Event) -> None:
        before = self.state
        super().do(event)
        log_transition(before, Transition(state=self.state, actions=self.actions, at=self.now))


def test_each_phase_of_each_round_is_told_once() -> None:
    scene = LoggedScene(min_nodes=2)
    with capture_logs() as logs:
        scene.attach("a", "b")
        scene.train("a")
        scene.train("b")
        scene.commit("a", "b")
        scene.apply(digest_of("state 1"), "a", "b")
    phases = [(line["phase"], line["round"]) for line in logs if line["event"] == "phase"]
    assert phases == [
        ("opened", 1),
        ("exchanging", 1),
        ("committed", 1),
        ("settled", 1),
        ("opened", 2),
    ]


def test_a_void_round_is_committed_and_settled_in_one_step() -> None:
    scene = LoggedScene()
    with capture_logs() as logs:
        scene.attach("a")
        scene.leave("a")
    phases = [(line["phase"], line["round"]) for line in logs if line["event"] == "phase"]
    assert phases == [("opened", 1), ("committed", 1), ("settled", 1)]


def test_a_stopping_coordinator_says_what_becomes_of_its_nodes() -> None:
    scene = Scene(min_nodes=2, rounds=1)
    assert farewell(scene.state) == (
        "no node is attached; nodes that are started meanwhile wait for the coordinator"
    )
    scene.attach("a")
    assert farewell(scene.state) == (
        "1 node is attached: it keeps what it has trained, and comes back when the coordinator "
        "starts again"
    )
    scene.attach("b")
    assert farewell(scene.state) == (
        "2 nodes are attached: they train to the end of round 1, keep what they have trained, and "
        "come back when the coordinator starts again"
    )
    scene.train("a")
    scene.train("b")
    assert "train to the end" not in farewell(scene.state)
    scene.do(Started())  # nobody has come back yet
    assert "no node is attached" in farewell(scene.state)
    scene.attach("a", "b", is_new_process=False, digest=INITIAL)
    scene.commit("a", "b")
    scene.apply(digest_of("state 1"), "a", "b")
    scene.evaluate("a", round=1)
    assert scene.state.is_finished, scene.reason
    assert farewell(scene.state) == "the run is finished, so no node needs the coordinator"


def test_who_reaches_whom_only_through_a_helper_is_no_warning() -> None:
    scene = LoggedScene(min_nodes=3)
    scene.attach("a", "b")
    scene.attach("h", is_helper=True)
    with capture_logs() as logs:
        scene.beat("a", at=0, digest=INITIAL, unreachable=("b",))
    told = [(line["event"], line["log_level"], line.get("helper")) for line in logs]
    assert ("two nodes reach each other through", "info", "h") in told
    with capture_logs() as logs:
        scene.beat("b", at=0, digest=INITIAL, unreachable=("h",))
    assert [line["nodes"] for line in logs if line["log_level"] == "warning"] == [["b", "h"]]
