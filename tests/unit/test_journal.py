"""What is news to who runs a swarm, down to the phases of rounds."""

from dataclasses import replace

from coordinator.dashboard.news_file import sentence_of
from coordinator.journal import News, farewell, news_of
from coordinator.swarm.events import Started, StreamBroken, Ticked
from coordinator.swarm.ledger import num_reached
from coordinator.swarm.state import SwarmState
from coordinator.swarm.transition import Transition
from protocol.wire.messages import RefetchAsked
from protocol.wire.rounds import Digest, NodeId
from tests.unit.swarm_scene import CORPUS, INITIAL, Scene, digest_of


class ToldScene(Scene):
    """A scene whose news are kept."""

    def __init__(self, *, min_nodes: int = 1, first_digest: Digest | None = None) -> None:
        self.news: list[News] = []
        super().__init__(min_nodes=min_nodes, first_digest=first_digest)

    def hear(self, before: SwarmState, told: Transition) -> None:
        self.news += news_of(before, told)

    def phases(self) -> list[tuple[object, object]]:
        return [(n.facts["phase"], n.facts["round"]) for n in self.news if n.what == "phase"]


def test_each_phase_of_each_round_is_told_once() -> None:
    scene = ToldScene(min_nodes=2)
    scene.attach("a", "b")
    scene.train("a")
    scene.train("b")
    scene.commit("a", "b")
    scene.apply(digest_of("state 1"), "a", "b")
    assert scene.phases() == [
        ("opened", 1),
        ("exchanging", 1),
        ("committed", 1),
        ("settled", 1),
        ("opened", 2),
    ]


def test_a_void_round_is_committed_and_settled_in_one_step() -> None:
    scene = ToldScene()
    scene.attach("a")
    scene.leave("a")
    assert scene.phases() == [("opened", 1), ("committed", 1), ("settled", 1)]


def test_a_node_that_fetches_the_first_weights_is_no_news_of_another_state() -> None:
    scene = ToldScene(min_nodes=2, first_digest=digest_of("given"))
    scene.attach("a", digest=INITIAL)
    assert scene.asked(RefetchAsked)
    scene.attach("b", digest=digest_of("given"))
    scene.beat("a", at=0, digest=digest_of("given"))
    told = [(n.what, n.facts["node"]) for n in scene.news if "node" in n.facts]
    assert told == [
        *(("node attached", "a"), ("node attached", "b"), ("node ready", "b"), ("node ready", "a"))
    ]


def test_why_a_node_is_gone_is_told() -> None:
    scene = ToldScene(min_nodes=3)
    scene.attach("a", "b", "c")
    scene.leave("a")
    session_id = scene.member("c").session_id
    scene.do(StreamBroken(node_id=NodeId("c"), session_id=session_id))
    lease = scene.state.rules.lease_seconds
    scene.now += lease
    scene.do(Ticked())
    why = {
        n.facts["node"]: n.facts["why"] for n in scene.news if n.what in ("node left", "node lost")
    }
    assert why == {
        "a": "tired",
        "b": f"silent for {lease:g} s",
        "c": "its connection ended, and it has not come back",
    }
    left = next(n for n in scene.news if n.what == "node left")
    assert sentence_of(left) == "a has left: tired"


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
    scene = ToldScene(min_nodes=3)
    scene.attach("a", "b")
    scene.attach("h", is_helper=True)
    scene.news.clear()
    scene.beat("a", at=0, digest=INITIAL, unreachable=("b",))
    told = [(n.what, n.level, n.facts.get("helper")) for n in scene.news]
    assert ("two nodes reach each other through", "info", "h") in told
    scene.news.clear()
    scene.beat("b", at=0, digest=INITIAL, unreachable=("h",))
    assert [n.facts["nodes"] for n in scene.news if n.level == "warning"] == [["b", "h"]]


def test_a_round_goes_on_without_those_that_should_have_trained_and_never_without_a_helper() -> (
    None
):
    def missed(*training: str) -> list[object]:
        scene = ToldScene(min_nodes=2)
        scene.attach("h", is_helper=True, cannot_train=True)
        scene.attach("a", "b")
        assert {str(a.node_id) for a in scene.round.assignments} == {"a", "b", "h"}
        for name in training:
            scene.train(name)
        scene.commit("a", "b", "h", tokens=dict.fromkeys(training, 80))
        told = [n for n in scene.news if n.what == "went on without contributions of"]
        return [one.facts["nodes"] for one in told]

    assert missed("a", "b") == []
    assert missed("a") == ["b"]


def test_that_the_data_begins_anew_is_told_once_for_each_epoch() -> None:
    scene = ToldScene()
    scene.attach("a", corpus=replace(CORPUS, num_samples=NUM_SAMPLES))
    epochs = 1
    while num_reached(scene.state.ledger) <= 3 * NUM_SAMPLES:
        assert len([one for one in scene.news if one.what == BEGINS_ANEW]) == epochs - 1
        scene.run_round("a")
        epochs = (num_reached(scene.state.ledger) - 1) // NUM_SAMPLES + 1
    told = [one for one in scene.news if one.what == BEGINS_ANEW]
    assert [one.facts["epoch"] for one in told] == [2, 3, 4]
    assert sentence_of(told[0]) == ("The data begins anew in another order: epoch 2 of 12 samples")


BEGINS_ANEW = "the data begins anew"
NUM_SAMPLES = 12
