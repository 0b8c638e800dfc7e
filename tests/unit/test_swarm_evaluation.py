"""Which states are evaluated, by whom, and which losses are kept."""

from swarm_scene import Scene, asked_of, digest_of, of_kind

from coordinator.swarm.actions import Tell
from protocol.messages import EvaluationAsked, RoundOpened

NODES = ("node-a", "node-b")


def run_round(scene: Scene) -> None:
    scene.commit(*NODES)
    number = scene.state.committed_round
    scene.apply(digest_of(f"state {number}"), *NODES)


def test_states_that_are_due_are_evaluated_by_one_node_each_in_turn() -> None:
    scene = Scene(min_nodes=2, rounds=5, evaluate_every=2)
    scene.attach(*NODES)
    for _ in range(5):
        run_round(scene)
    rounds = [ask.round for ask in of_kind(scene.log, EvaluationAsked)]
    asked = list(zip(rounds, asked_of(scene.log, EvaluationAsked), strict=True))
    assert asked == [(0, "node-a"), (2, "node-b"), (4, "node-a"), (5, "node-a")]


def test_who_evaluates_is_sent_its_plan_first_and_so_trains_first() -> None:
    scene = Scene(min_nodes=2, rounds=5, evaluate_every=1)
    scene.attach(*NODES)
    for _ in range(3):
        told = [type(action.message) for action in scene.actions[-2:] if isinstance(action, Tell)]
        assert told == [RoundOpened, EvaluationAsked]
        run_round(scene)


def test_an_evaluation_has_time_until_the_round_that_its_node_trains_in_is_applied() -> None:
    scene = Scene(min_nodes=2, rounds=5)
    scene.attach(*NODES)
    asked = scene.state.evaluating
    assert asked is not None
    assert asked.until == scene.round.commit_deadline + scene.state.rules.apply_seconds


def test_a_state_is_evaluated_at_once_when_no_round_follows_it_yet() -> None:
    scene = Scene(min_nodes=2, rounds=5, evaluate_every=1)
    scene.attach(*NODES)
    scene.evaluate("node-a", round=0)
    scene.commit(*NODES)
    scene.apply(digest_of("state 1"), "node-a")
    scene.leave("node-b")
    assert scene.state.open_round is None
    (asked,) = scene.asked(EvaluationAsked)
    assert asked.round == 1 and asked_of(scene.actions, EvaluationAsked) == ["node-a"]
    scene.evaluate("node-a", round=1)
    scene.attach("node-b", at=1, digest=digest_of("state 1"))
    assert scene.round.number == 2
    assert len(of_kind(scene.log, EvaluationAsked)) == 2, "once for each state"


def test_an_evaluation_counts_once_and_only_from_the_node_that_was_asked() -> None:
    scene = Scene(min_nodes=2)
    scene.attach(*NODES)
    scene.evaluate("node-b", round=0)
    scene.evaluate("node-a", round=1)
    assert list(scene.state.held_out) == []
    scene.evaluate("node-a", round=0, loss=3.25)
    scene.evaluate("node-a", round=0, loss=9.0)
    assert [(kept.round, kept.loss) for kept in scene.state.held_out] == [(0, 3.25)]


def test_an_evaluation_never_holds_up_a_round() -> None:
    scene = Scene(min_nodes=2, evaluate_every=1)
    scene.attach(*NODES)
    run_round(scene)
    run_round(scene)
    assert scene.round.number == 3
    scene.evaluate("node-b", round=1)  # too late: superseded
    scene.evaluate("node-a", round=2)
    assert [loss.round for loss in scene.state.held_out] == [2]
