from swarm_scene import INITIAL, Scene, digest_of, of_kind

from coordinator.swarm.actions import AskEvaluation, SendCommit, SendFinished, SendPlan

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
    asked = [(ask.round, ask.node_id) for ask in of_kind(scene.log, AskEvaluation)]
    assert asked == [(0, "node-a"), (2, "node-b"), (4, "node-a"), (5, "node-a")]


def test_who_evaluates_is_sent_its_plan_first_and_so_trains_first() -> None:
    scene = Scene(min_nodes=2, rounds=5, evaluate_every=1)
    scene.attach(*NODES)
    for _ in range(3):
        assert [type(action) for action in scene.actions[-2:]] == [SendPlan, AskEvaluation]
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
    (asked,) = scene.asked(AskEvaluation)
    assert (asked.node_id, asked.round) == ("node-a", 1)
    scene.evaluate("node-a", round=1)
    scene.attach("node-b", at=1, digest=digest_of("state 1"))
    assert scene.round.number == 2
    assert len(of_kind(scene.log, AskEvaluation)) == 2, "once for each state"


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


def test_the_run_finishes_after_the_last_state_is_evaluated() -> None:
    scene = Scene(min_nodes=2, rounds=1, evaluate_every=1)
    scene.attach(*NODES)
    run_round(scene)
    assert not scene.state.is_finished
    assert scene.reason == "waiting for node-b to evaluate the final state, 20 s left"
    scene.evaluate("node-b", round=1)
    (finished,) = scene.asked(SendFinished)
    assert (finished.round, finished.outer_digest) == (1, digest_of("state 1"))
    assert scene.reason == "the only round is committed; the held-out loss is 1.500 nats per token"
    assert len(of_kind(scene.log, SendPlan)) == len(of_kind(scene.log, SendCommit)) == 1


def test_another_node_evaluates_the_last_state_when_the_first_is_lost() -> None:
    scene = Scene(min_nodes=2, rounds=1, evaluate_every=1)
    scene.attach(*NODES)
    run_round(scene)
    scene.leave("node-b")
    assert [ask.node_id for ask in scene.asked(AskEvaluation)] == ["node-a"]
    scene.evaluate("node-a", round=1)
    assert scene.state.is_finished


def test_the_run_finishes_without_an_evaluation_when_its_time_is_over() -> None:
    scene = Scene(min_nodes=2, rounds=1, evaluate_every=1)
    scene.attach(*NODES)
    run_round(scene)
    scene.leave("node-a")
    scene.leave("node-b")
    assert scene.reason.startswith("waiting for a ready node that can evaluate the final state")
    scene.wait(19)
    assert not scene.state.is_finished
    scene.wait(1)
    assert scene.state.is_finished
    assert scene.reason.endswith("nobody could evaluate the final state in time")
    scene.attach("node-c", at=1, digest=digest_of("state 1"))
    assert not scene.asked(SendPlan)


def test_the_run_does_not_end_with_a_state_that_nobody_holds() -> None:
    scene = Scene(min_nodes=1, rounds=1)
    scene.attach("node-a")
    scene.commit("node-a")
    scene.apply(digest_of("final"), "node-a")
    scene.attach("node-a", at=0)  # it died before that was on its disk
    scene.wait(scene.state.rules.apply_seconds - 1)
    assert not scene.state.is_finished
    scene.leave("node-a")
    scene.attach("node-a", at=0)
    scene.wait(2)  # the evaluation is given up
    assert scene.state.evaluating is None
    assert not scene.state.is_finished
    assert scene.reason.startswith("nobody here holds the state after round 1: it is taken back")
    scene.wait(scene.state.rules.apply_seconds)
    assert scene.state.is_finished
    (finished,) = of_kind(scene.log, SendFinished)
    assert finished.outer_digest == INITIAL


def test_the_run_does_not_end_while_a_node_here_has_yet_to_take_the_final_state_over() -> None:
    scene = Scene(min_nodes=2, rounds=2, evaluate_every=2)
    scene.attach(*NODES)
    run_round(scene)
    scene.attach("node-c")
    run_round(scene)
    assert scene.state.evaluating is not None
    scene.evaluate(str(scene.state.evaluating.node_id), round=2)
    assert not scene.state.is_finished
    assert scene.reason == "waiting for node-c to take the final state over, 20 s left"
    scene.beat("node-c", at=2, digest=digest_of("state 2"))
    assert scene.state.is_finished


def test_a_node_that_stays_behind_holds_the_end_up_no_longer_than_applying_may_take() -> None:
    scene = Scene(min_nodes=2, rounds=2, evaluate_every=2, lease_seconds=1000)
    scene.attach(*NODES)
    run_round(scene)
    scene.attach("node-c")
    run_round(scene)
    assert scene.state.evaluating is not None
    scene.evaluate(str(scene.state.evaluating.node_id), round=2)
    scene.wait(19)
    assert not scene.state.is_finished
    scene.wait(1)
    assert scene.state.is_finished
    assert scene.reason.endswith("the held-out loss is 1.500 nats per token")
