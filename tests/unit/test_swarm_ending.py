"""The end of the run: evaluated, taken over by all who are here, and never waiting for long."""

from dataclasses import replace

import pytest

from coordinator.swarm.deadlines import next_apply_seconds
from coordinator.swarm.events import CommitLearned, StreamBroken
from coordinator.swarm.members import MemberState
from protocol.wire.messages import EvaluationAsked, RoundCommitted, RoundOpened, RunFinished
from protocol.wire.rounds import NodeId
from tests.unit.swarm_scene import INITIAL, Scene, asked_of, digest_of, of_kind

NODES = ("node-a", "node-b")


def at_the_end(*, lease_seconds: float = 10_000) -> Scene:
    """Both nodes hold the final state, and one is asked to evaluate it; node-c is at the one before."""
    scene = Scene(min_nodes=2, rounds=2, evaluate_every=2, lease_seconds=lease_seconds)
    scene.attach(*NODES)
    scene.run_round(*NODES)
    scene.attach("node-c")
    scene.run_round(*NODES)
    scene.beat("node-c", at=1, digest=digest_of("state 1"))
    return scene


def evaluator(scene: Scene) -> str:
    assert scene.state.evaluating is not None, scene.reason
    (node_id,) = scene.state.evaluating.node_ids
    return str(node_id)


def losses(scene: Scene) -> list[tuple[int, float]]:
    return [(kept.round, kept.loss) for kept in scene.state.held_out]


def test_the_run_finishes_after_the_last_state_is_evaluated() -> None:
    scene = Scene(min_nodes=2, rounds=1, evaluate_every=1)
    scene.attach(*NODES)
    scene.run_round(*NODES)
    assert not scene.state.is_finished
    assert scene.reason == "waiting for node-b to evaluate the final state, 20 s left"
    scene.evaluate("node-b", round=1)
    (finished,) = scene.asked(RunFinished)
    assert (finished.round, finished.outer_digest) == (1, digest_of("state 1"))
    assert scene.reason == (
        "the only round is committed; the held-out loss is 1.500; "
        "'atoll export' on a machine that trained writes the model out"
    )
    assert len(of_kind(scene.log, RoundOpened)) == len(of_kind(scene.log, RoundCommitted)) == 1


def test_another_node_evaluates_the_last_state_when_the_first_is_lost() -> None:
    scene = Scene(min_nodes=2, rounds=1, evaluate_every=1)
    scene.attach(*NODES)
    scene.run_round(*NODES)
    scene.leave("node-b")
    assert asked_of(scene.actions, EvaluationAsked) == ["node-a"]
    scene.evaluate("node-a", round=1)
    assert scene.state.is_finished
    assert scene.state.finished_at == scene.now


def test_the_run_finishes_without_an_evaluation_when_its_time_is_over() -> None:
    scene = Scene(min_nodes=2, rounds=1, evaluate_every=1)
    scene.attach(*NODES)
    scene.run_round(*NODES)
    scene.leave("node-a")
    scene.leave("node-b")
    assert scene.reason.startswith("waiting for a ready node that can evaluate the final state")
    scene.wait(19)
    assert not scene.state.is_finished
    scene.wait(1)
    assert scene.state.is_finished
    assert "; no node that can evaluate the final state did so in time; " in scene.reason
    scene.attach("node-c", at=1, digest=digest_of("state 1"))
    assert not scene.asked(RoundOpened)


def test_a_node_that_comes_meanwhile_evaluates_the_last_state_and_has_its_own_time_for_it() -> None:
    scene = Scene(min_nodes=2, rounds=1, evaluate_every=1)
    scene.attach(*NODES)
    scene.run_round(*NODES)
    for name in NODES:
        scene.leave(name)
    scene.wait(19)
    scene.attach("node-b", at=1, digest=digest_of("state 1"))
    assert asked_of(scene.actions, EvaluationAsked) == ["node-b"]
    assert scene.reason == "waiting for node-b to evaluate the final state, 20 s left"
    scene.wait(19)
    assert not scene.state.is_finished
    scene.wait(1)
    assert scene.state.is_finished


def test_the_run_waits_for_nodes_that_are_behind_and_says_what_they_have_to_do() -> None:
    scene = at_the_end()
    behind = "node-c is at round 1 and has to apply round 2"
    name = evaluator(scene)
    assert scene.reason == f"waiting for {name} to evaluate the final state, 20 s left; {behind}"
    scene.evaluate(name, round=2)
    assert scene.state.evaluating is None
    assert not scene.state.is_finished
    assert scene.reason == (f"waiting for 1 node to take the final state over, 20 s left; {behind}")
    scene.beat("node-c", at=2, digest=digest_of("state 2"))
    assert scene.state.is_finished


def test_a_node_that_stays_behind_holds_the_end_up_no_longer_than_applying_may_take() -> None:
    scene = at_the_end()
    scene.evaluate(evaluator(scene), round=2)
    scene.wait(19)
    assert not scene.state.is_finished
    scene.wait(1)
    assert scene.state.is_finished
    assert "; the held-out loss is 1.500; " in scene.reason


def slow_at_the_end(*, lease_seconds: float) -> Scene:
    """Commits take 1 s to apply, the final state is evaluated, and node-c is within a long inner step."""
    scene = Scene(
        min_nodes=2,
        rounds=6,
        evaluate_every=6,
        lease_seconds=lease_seconds,
        adapts_deadlines=True,
    )
    scene.attach(*NODES)
    for _ in range(5):
        scene.run_round(*NODES)
    scene.attach("node-c")
    scene.run_round(*NODES)
    scene.beat("node-c", at=5, digest=digest_of("state 5"))
    scene.evaluate(evaluator(scene), round=6)
    assert next_apply_seconds(scene.state) == 5
    return scene


def beat_all(scene: Scene) -> None:
    for name in (*NODES, "node-c"):
        scene.beat(name, at=scene.member(name).outer_round, digest=scene.member(name).outer_digest)


def test_a_slow_node_that_is_heard_has_the_run_files_time_to_come_to_the_final_state() -> None:
    scene = slow_at_the_end(lease_seconds=15)
    ends_by = scene.now + scene.state.rules.apply_seconds
    while scene.now + 3 < ends_by:
        scene.wait(3)
        assert not scene.state.is_finished, "node-c was heard 3 s ago"
        beat_all(scene)
    scene.beat("node-c", at=6, digest=digest_of("state 6"))
    assert scene.state.is_finished


def test_a_slow_node_that_does_not_come_holds_the_end_up_no_longer_than_the_run_file_says() -> None:
    scene = slow_at_the_end(lease_seconds=15)
    ends_by = scene.now + scene.state.rules.apply_seconds
    while scene.now + 3 < ends_by:
        scene.wait(3)
        beat_all(scene)
    scene.wait_until(ends_by - 0.1)
    assert not scene.state.is_finished
    scene.wait_until(ends_by)
    assert scene.state.is_finished


@pytest.mark.parametrize(("lease", "waits"), [(15, 6), (5, 5), (30, 12)])
def test_a_node_that_falls_silent_at_the_end_is_waited_for_until_two_heartbeats_are_missing(
    lease: float, waits: float
) -> None:
    """Or for as long as commits take to apply; its lease is longer than that."""
    scene = slow_at_the_end(lease_seconds=lease)
    scene.wait(1)
    beat_all(scene)
    left = f"{waits:.0f} s left"
    assert left in scene.reason
    scene.wait(waits - 0.1)
    assert not scene.state.is_finished
    scene.wait(0.1)
    assert scene.state.is_finished


def test_a_node_whose_stream_breaks_at_the_end_is_waited_for_until_its_heartbeat_is_due() -> None:
    scene = slow_at_the_end(lease_seconds=15)
    scene.wait(1)
    beat_all(scene)
    node_c = scene.member("node-c")
    scene.do(StreamBroken(node_id=node_c.node_id, session_id=node_c.session_id))
    assert not scene.state.is_finished
    scene.wait(3)
    assert scene.state.is_finished


def test_a_silent_node_holds_the_end_up_no_longer_than_its_lease() -> None:
    scene = at_the_end(lease_seconds=10)
    for name in (*NODES, "node-c"):
        scene.beat(name, at=scene.member(name).outer_round, digest=scene.member(name).outer_digest)
    scene.evaluate(evaluator(scene), round=2)
    scene.wait(9)
    for name in NODES:
        scene.beat(name, at=2, digest=digest_of("state 2"))
    assert not scene.state.is_finished
    scene.wait(1)
    assert scene.member("node-c").state is MemberState.LOST
    assert scene.state.is_finished


def test_the_run_does_not_end_with_a_state_that_nobody_holds() -> None:
    scene = Scene(min_nodes=1, rounds=1)
    scene.attach("node-a")
    scene.commit("node-a")
    scene.apply(digest_of("final"), "node-a")
    scene.attach("node-a", at=0)  # it died before that was on its disk
    assert scene.state.evaluating is None, "nobody holds what was to be evaluated"
    assert scene.reason == (
        "nobody here holds the state after round 1: it is taken back unless a node returns with it, "
        "20 s left"
    )
    scene.wait(19)
    assert scene.state.incarnation == 0
    scene.wait(1)
    assert not scene.state.is_finished
    assert scene.reason == (
        "waiting for a ready node that can evaluate the final state, 20 s left; "
        "node-a is at round 0 and has to apply round 1"
    )
    scene.apply(INITIAL, "node-a", incarnation=1)
    scene.evaluate("node-a", round=1)
    (finished,) = scene.asked(RunFinished)
    assert finished.outer_digest == INITIAL


def test_the_loss_of_a_final_state_that_is_taken_back_does_not_count_as_the_runs() -> None:
    scene = at_the_end()
    scene.evaluate(evaluator(scene), round=2, loss=1.25)
    assert losses(scene) == [(2, 1.25)]
    for name in NODES:
        scene.leave(name)
    assert scene.reason.startswith("nobody here holds the state after round 2: it is taken back")
    scene.wait(scene.state.rules.apply_seconds)
    assert losses(scene) == []
    assert not scene.state.is_finished
    scene.apply(digest_of("state 1"), "node-c", incarnation=1)
    assert asked_of(scene.actions, EvaluationAsked) == ["node-c"]
    scene.evaluate("node-c", round=2, loss=2.5)
    assert losses(scene) == [(2, 2.5)]
    assert "; the held-out loss is 2.500; " in scene.reason


def test_when_nobody_applies_what_was_taken_back_the_run_ends_without_a_loss() -> None:
    scene = at_the_end()
    scene.evaluate(evaluator(scene), round=2)
    for name in NODES:
        scene.leave(name)
    scene.wait(2 * scene.state.rules.apply_seconds)
    assert scene.state.is_finished
    assert "; no node that can evaluate the final state did so in time; " in scene.reason


def test_who_returns_with_the_final_state_has_the_others_waited_for_anew() -> None:
    scene = at_the_end()
    scene.evaluate(evaluator(scene), round=2)
    for name in NODES:
        scene.leave(name)
    scene.wait(19)
    scene.attach("node-a", at=2, digest=digest_of("state 2"))
    scene.wait(19)
    assert not scene.state.is_finished, "node-c could not take it over from anybody"
    scene.beat("node-c", at=2, digest=digest_of("state 2"))
    assert scene.state.is_finished
    assert len(of_kind(scene.log, EvaluationAsked)) == 2, "the loss of round 2 is known"


def test_a_last_commit_of_nodes_that_were_never_here_can_be_brought_back_and_evaluated() -> None:
    """A copy of the database from before they joined does not know their speed."""
    scene = Scene(min_nodes=2, rounds=1, adapts_deadlines=True)
    scene.attach(*NODES)
    scene.run_round(*NODES)
    (commit,) = [told.commit for told in of_kind(scene.log, RoundCommitted)]
    older = Scene(min_nodes=2, rounds=1, adapts_deadlines=True)
    older.attach("node-c")
    older.attach("node-a", at=1, digest=digest_of("state 1"))
    older.do(CommitLearned(commit=commit, node_id=NodeId("node-a")))
    older.evaluate("node-a", round=1)
    assert not older.state.is_finished
    older.beat("node-c", at=1, digest=digest_of("state 1"))
    assert older.state.is_finished


def test_a_later_version_of_the_last_commit_that_is_brought_back_begins_the_end_anew() -> None:
    """This coordinator's database is older than the version that took something back."""
    scene = at_the_end()
    scene.evaluate(evaluator(scene), round=2)
    commit = of_kind(scene.log, RoundCommitted)[-1].commit
    scene.wait(5)
    scene.do(CommitLearned(commit=replace(commit, incarnation=1), node_id=NodeId("node-c")))
    assert losses(scene) == []
    assert scene.state.end_waits_until is None, "the final state is yet to be agreed on"
    scene.apply(digest_of("final"), "node-c", incarnation=1)
    scene.wait(2 * scene.state.rules.apply_seconds)  # one of three is not enough at first
    scene.evaluate("node-c", round=2, loss=2.5)
    assert losses(scene) == [(2, 2.5)]
    assert not scene.state.is_finished
    for name in NODES:
        scene.beat(name, at=2, digest=digest_of("final"), incarnation=1)
    assert scene.state.is_finished
