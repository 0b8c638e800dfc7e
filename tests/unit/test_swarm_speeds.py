"""Step budgets follow measured speed."""

import pytest
from swarm_scene import STEP_TOKENS, Scene, digest_of

from coordinator.swarm.speeds import FASTEST, measured
from coordinator.swarm.state import Trained
from protocol.rounds import NodeId


def a_round(scene: Scene, seconds: dict[str, float]) -> None:
    """All take their budgets, in these times; the next round opens."""
    context = scene.state.rules.context
    for assignment in scene.round.assignments:
        scene.train(
            assignment.node_id,
            inner_steps=assignment.inner_steps,
            tokens=assignment.num_samples * context,
            seconds=seconds[assignment.node_id],
        )
    scene.commit(*seconds)
    scene.apply(digest_of(f"after {scene.state.committed_round}"), *seconds)


def budgets(scene: Scene) -> dict[NodeId, int]:
    return {a.node_id: a.inner_steps for a in scene.round.assignments}


def three_nodes() -> Scene:
    scene = Scene(min_nodes=3)
    scene.attach("node-a", "node-b", "node-c")
    return scene


def test_slower_nodes_get_fewer_inner_steps_and_samples_and_the_plan_says_so() -> None:
    scene = three_nodes()
    assert set(budgets(scene).values()) == {5}
    a_round(scene, {"node-a": 1.0, "node-b": 2.5, "node-c": 100.0})
    assert budgets(scene) == {"node-a": 5, "node-b": 2, "node-c": 1}
    assert [a.num_samples for a in scene.round.assignments] == [10, 4, 2]
    assert scene.round.round_tokens == STEP_TOKENS * (5 + 2 + 1)
    assert scene.round.reason == ("3 nodes are ready; 2 slower nodes take 1 to 2 of 5 inner steps")


def test_small_differences_leave_the_plan_as_it_is() -> None:
    scene = three_nodes()
    a_round(scene, {"node-a": 1.0, "node-b": 1.25, "node-c": 1.1})
    assert set(budgets(scene).values()) == {5}
    assert scene.round.reason == "3 nodes are ready"
    assert scene.round.round_tokens == 3 * 5 * STEP_TOKENS


def test_a_node_that_was_never_measured_gets_all_inner_steps() -> None:
    scene = Scene(min_nodes=2)
    scene.attach("node-a", "node-b")
    a_round(scene, {"node-a": 0.0, "node-b": 5.0})
    assert budgets(scene) == {"node-a": 5, "node-b": 5}
    assert scene.member("node-a").inner_steps_per_second is None


def test_a_node_that_becomes_faster_again_gets_its_steps_back() -> None:
    scene = three_nodes()
    a_round(scene, {"node-a": 1.0, "node-b": 1.0, "node-c": 5.0})
    assert budgets(scene)["node-c"] == 1
    for _ in range(3):
        steps = budgets(scene)
        a_round(scene, {name: steps[name] / 5 for name in steps})
    assert budgets(scene)["node-c"] == 5


def test_a_speed_is_kept_over_a_restart_but_not_for_another_device() -> None:
    scene = Scene()
    scene.attach("node-a")
    scene.train("node-a", seconds=2.0)
    scene.attach("node-a")
    assert scene.member("node-a").inner_steps_per_second == 2.5
    scene.attach("node-a", num_ranks=4)
    assert scene.member("node-a").inner_steps_per_second is None


def test_a_report_counts_as_a_measurement_once() -> None:
    scene = Scene()
    scene.attach("node-a")
    scene.train("node-a", seconds=1.0)
    scene.train("node-a", seconds=9.0)
    assert scene.member("node-a").inner_steps_per_second == 5.0


def test_the_first_measurement_counts_fully_and_later_ones_half() -> None:
    first = measured(None, Trained(inner_steps=6, tokens=1, loss=1.0, seconds=2.0))
    assert first == 3.0
    second = measured(first, Trained(inner_steps=5, tokens=1, loss=1.0, seconds=1.0))
    assert second == 4.0


@pytest.mark.parametrize("seconds", [0.0, -1.0, 5e-324, 1.0 / (FASTEST * 10), 1e300])
def test_an_impossible_training_time_is_no_measurement(seconds: float) -> None:
    scene = Scene()
    scene.attach("node-a")
    scene.train("node-a", seconds=seconds)
    assert scene.member("node-a").inner_steps_per_second is None
    assert NodeId("node-a") in scene.round.trained


def test_a_report_of_more_inner_steps_than_were_asked_for_changes_nothing() -> None:
    scene = Scene()
    scene.attach("node-a")
    before = scene.state
    scene.train("node-a", inner_steps=6)
    assert scene.state == before
