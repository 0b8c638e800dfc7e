"""Members that do not train, or do not evaluate: training loops of contributors' own come and go."""

from coordinator.journal import news_of
from coordinator.swarm.explain import differing_in_words, explain
from coordinator.swarm.transition import Transition
from protocol.wire.messages import EvaluationAsked, RunFinished
from tests.unit.swarm_scene import INITIAL, Scene, asked_of, digest_of


def test_a_member_without_its_loop_is_in_no_plan_until_a_heartbeat_says_that_it_trains() -> None:
    scene = Scene(min_nodes=2)
    scene.attach("node-a")
    scene.attach("node-b", cannot_train=True)
    assert scene.state.open_round is None
    assert "1 of 2 is ready; node-b trains nothing now: its own line says why" in explain(
        scene.state, scene.now
    )
    scene.beat("node-b", at=0, digest=INITIAL)
    assert [a.node_id for a in scene.round.assignments] == ["node-a", "node-b"]


def test_a_member_whose_loop_has_gone_takes_commits_over_and_no_further_plan_counts_on_it() -> None:
    scene = Scene(min_nodes=1)
    scene.attach("node-a", "node-b")
    scene.commit("node-a")
    scene.beat("node-b", at=0, digest=INITIAL, cannot_train=True)
    scene.apply(digest_of("state 1"), "node-a", "node-b")
    assert scene.round.number == 2
    assert [a.node_id for a in scene.round.assignments] == ["node-a"]
    assert scene.member("node-b").outer_round == 1


def test_only_members_that_can_are_asked_to_evaluate() -> None:
    scene = Scene(min_nodes=2, rounds=5, evaluate_every=1)
    scene.attach("node-a", cannot_evaluate=True)
    scene.attach("node-b")
    for number in (1, 2):
        scene.commit("node-a", "node-b")
        scene.apply(digest_of(f"state {number}"), "node-a", "node-b")
        scene.beat("node-a", at=number, digest=digest_of(f"state {number}"), cannot_evaluate=True)
    assert asked_of(scene.log, EvaluationAsked) == ["node-b"] * 3


def test_that_nobody_evaluates_is_said_after_the_first_round_and_until_somebody_can() -> None:
    scene = Scene(min_nodes=1, rounds=5, evaluate_every=1)
    scene.attach("node-a", cannot_evaluate=True)
    assert differing_in_words(scene.state) == ""
    before = scene.state
    scene.commit("node-a")
    scene.apply(digest_of("state 1"), "node-a")
    assert "no node here evaluates" in differing_in_words(scene.state)
    told = news_of(before, Transition(state=scene.state, actions=(), at=scene.now))
    (said,) = [news for news in told if news.what == "nobody evaluates"]
    assert said.level == "warning" and "evaluate=…" in str(said.facts["why"])
    scene.attach("node-b")
    assert differing_in_words(scene.state) == ""


def test_the_end_waits_for_no_evaluation_where_nobody_can() -> None:
    scene = Scene(rounds=1)
    scene.attach("node-a", cannot_evaluate=True)
    scene.commit("node-a")
    scene.apply(digest_of("state 1"), "node-a")
    (finished,) = scene.asked(RunFinished)
    assert "no node here evaluates, so nobody has measured a held-out loss" in finished.reason
    scene.leave("node-a")
    assert explain(scene.state, scene.now) == finished.reason
