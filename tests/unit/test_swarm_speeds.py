"""Step budgets follow measured speed."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.swarm.shares import FASTEST, FILLED, measured, shared_out, step_budgets
from protocol.run.run_spec import InnerSection
from protocol.run.schedule import Schedule, Term
from protocol.wire.messages import Trained
from protocol.wire.rounds import NodeId
from tests.unit.swarm_scene import STEP_TOKENS, Scene, digest_of, three_nodes


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


def test_slower_nodes_get_fewer_inner_steps_and_samples_and_the_plan_says_so() -> None:
    scene = three_nodes()
    assert set(budgets(scene).values()) == {5}
    a_round(scene, {"node-a": 1.0, "node-b": 2.5, "node-c": 100.0})
    assert budgets(scene) == {"node-a": 5, "node-b": 2, "node-c": 1}
    assert [a.num_samples for a in scene.round.assignments] == [10, 4, 2]
    assert scene.round.round_tokens == STEP_TOKENS * (5 + 2 + 1)
    assert scene.round.reason == (
        "3 nodes are ready; 2 slower nodes take 1 to 2 of 5 inner steps; "
        "1 node is asked for no more than 2 times the mean"
    )


def test_small_differences_leave_the_plan_as_it_is() -> None:
    scene = three_nodes()
    a_round(scene, {"node-a": 1.0, "node-b": 1.25, "node-c": 1.1})
    assert set(budgets(scene).values()) == {5}
    assert scene.round.reason == "3 nodes are ready"
    assert scene.round.round_tokens == 3 * 5 * STEP_TOKENS


def test_who_says_to_train_a_million_steps_a_second_leaves_the_others_most_of_theirs() -> None:
    scene = Scene(min_nodes=8, inner_steps=20)
    names = [f"node-{n}" for n in range(7)]
    scene.attach(*names)
    scene.attach("liar", device="a device of its own")
    for _ in range(6):
        scene.wait(1)  # since the plan
        a_round(scene, {**dict.fromkeys(names, 20.0), "liar": 1e-6})
        asked = budgets(scene)
        assert asked[NodeId("liar")] == 20
        assert {asked[NodeId(name)] for name in names} == {9}  # 20 × 1 / (2 × mean of 1, …, c)
    assert scene.round.reason.endswith("1 node is asked for no more than 2 times the mean")


def test_a_node_is_no_faster_than_the_time_from_its_plan_to_its_report_says() -> None:
    scene = Scene()
    scene.attach("node-a")
    scene.wait(10)
    scene.train("node-a", seconds=0.001)
    assert scene.member("node-a").inner_steps_per_second == 0.5


def test_a_speed_grows_slowly_and_what_nobody_believes_earns_nothing() -> None:
    told = Trained(inner_steps=100, samples=1, tokens=1, loss=1.0, seconds=1.0)
    slow = measured(1.0, told)
    assert (slow.speed, slow.credible_steps) == (2.5, 4)
    alike = measured(1.0, told, usual=0.2)
    assert (alike.speed, alike.credible_steps) == (1.5, 2)
    scene = Scene(min_nodes=2)
    scene.attach("honest", "liar")
    scene.change("honest", "liar", inner_steps_per_second=1.0)
    scene.train("honest", seconds=5.0)
    scene.train("liar", seconds=0.5)
    scene.commit("honest", "liar")
    tokens = {str(n): m.work.newest_tokens for n, m in scene.state.members.items()}
    assert tokens == {"honest": 5 * STEP_TOKENS, "liar": 2 * STEP_TOKENS}


@given(st.dictionaries(st.integers(0, 99).map(str).map(NodeId), st.floats(1e-3, 1e6), min_size=1))
def test_no_node_is_asked_for_more_than_twice_the_mean(speeds: dict[NodeId, float]) -> None:
    scene = Scene(inner_steps=1000)
    scene.attach("node-a")
    some = scene.member("node-a")
    members = [replace(some, node_id=n, inner_steps_per_second=s) for n, s in speeds.items()]
    asked = step_budgets(members, scene.state.rules)
    assert max(asked.values()) <= 2 * sum(asked.values()) / len(asked) + 1
    assert max(asked.values()) == 1000


def test_a_node_that_was_never_measured_gets_all_inner_steps() -> None:
    scene = Scene(min_nodes=2)
    scene.attach("node-a", "node-b")
    a_round(scene, {"node-a": 0.0, "node-b": 5.0})
    assert budgets(scene) == {"node-a": 5, "node-b": 5}
    assert scene.member("node-a").inner_steps_per_second is None


def test_a_node_that_becomes_faster_again_gets_its_steps_back() -> None:
    scene = three_nodes()
    a_round(scene, {"node-a": 1.0, "node-b": 1.0, "node-c": 5.0})
    assert budgets(scene)[NodeId("node-c")] == 1
    for _ in range(3):
        steps = budgets(scene)
        a_round(scene, {name: steps[name] / 5 for name in steps})
    assert budgets(scene)[NodeId("node-c")] == 5


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
    first = measured(None, Trained(inner_steps=6, samples=1, tokens=1, loss=1.0, seconds=2.0))
    assert first.speed == 3.0
    second = measured(
        first.speed, Trained(inner_steps=5, samples=1, tokens=1, loss=1.0, seconds=1.0)
    )
    assert second.speed == 4.0


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


def sharing(*names: str, round_steps: int = 12) -> Scene:
    """Nodes that share the inner steps of a round."""
    scene = Scene(round_steps=round_steps)
    scene.attach(*names)
    return scene


def next_round(scene: Scene, *names: str, coming: tuple[str, ...] = (), left: str = "") -> None:
    """All take their steps, at one a second; then some come, and one leaves."""
    scene.attach(*coming)
    for a in scene.round.assignments:
        tokens = a.num_samples * scene.state.rules.context
        seconds = float(a.inner_steps)
        scene.train(a.node_id, inner_steps=a.inner_steps, tokens=tokens, seconds=seconds)
    scene.commit(*names)
    if left:
        scene.leave(left)
    here = [name for name in (*coming, *names) if name != left]
    scene.apply(digest_of(f"after {scene.state.committed_round}"), *here)


def test_a_round_keeps_its_tokens_as_nodes_come_and_go() -> None:
    scene = sharing("node-a")
    assert budgets(scene) == {"node-a": 12}
    assert scene.round.reason == "1 node is ready; 12 inner steps make round_tokens = 192"
    next_round(scene, "node-a", coming=("node-b", "node-c"))
    assert budgets(scene) == {"node-a": 4, "node-b": 4, "node-c": 4}
    assert scene.reason.endswith("60 s left; 4 inner steps each make round_tokens = 192")
    assert scene.round.round_tokens == 12 * STEP_TOKENS
    assert scene.round.reason == ("3 nodes are ready; 4 inner steps each make round_tokens = 192")
    next_round(scene, "node-a", "node-b", "node-c", left="node-b")
    assert budgets(scene) == {"node-a": 6, "node-c": 6}


def test_nodes_share_the_steps_of_a_round_by_their_speeds() -> None:
    scene = Scene(min_nodes=2, round_steps=12)
    scene.attach("node-a", "node-b")
    a_round(scene, {"node-a": 2.0, "node-b": 6.0})
    assert budgets(scene) == {"node-a": 9, "node-b": 3}
    assert (
        scene.round.reason == "2 nodes are ready; 3 to 9 inner steps each make round_tokens = 192"
    )


def test_no_more_is_asked_than_fits_into_the_longest_training_and_the_plan_says_so() -> None:
    scene = sharing("node-a", round_steps=1000)
    scene.train("node-a", inner_steps=60, tokens=60 * STEP_TOKENS, seconds=60.0)
    scene.commit("node-a", tokens={"node-a": 60 * STEP_TOKENS})
    scene.apply(digest_of("after 1"), "node-a")
    assert budgets(scene) == {"node-a": 48}  # one a second, in 0.8 of 60 seconds
    assert "; 48 inner steps make 768 tokens, less than round_tokens = 16000" in scene.round.reason
    assert "no more fit into 48 s of [deadlines] train = 60" in scene.round.reason


def test_more_nodes_than_steps_take_one_each_and_the_plan_says_so() -> None:
    scene = Scene(min_nodes=3, round_steps=2)
    scene.attach("node-a", "node-b", "node-c")
    assert set(budgets(scene).values()) == {1}
    assert scene.round.reason.endswith(
        "; 1 inner steps each make 48 tokens, more than round_tokens = 32: a node takes one at least"
    )


def test_what_was_leased_ahead_stays_until_the_next_round_makes_up_for_who_came_or_left() -> None:
    scene = Scene(min_nodes=2, round_steps=12, has_overlap=True)
    scene.attach("node-a", "node-b")
    assert [a.inner_steps for a in scene.round.ahead] == [6, 6]
    next_round(scene, "node-a", "node-b", coming=("node-c",))
    assert budgets(scene) == {"node-a": 6, "node-b": 6, "node-c": 1}
    assert "more than round_tokens = 192: nodes came after steps" in scene.round.reason
    assert [a.inner_steps for a in scene.round.ahead] == [4, 4, 4]
    next_round(scene, "node-a", "node-b", "node-c", left="node-b")
    assert budgets(scene) == {"node-a": 4, "node-c": 4}
    assert "less than round_tokens = 192" in scene.round.reason
    assert [a.inner_steps for a in scene.round.ahead] == [6, 6]


SPEEDS = st.dictionaries(
    st.text("abcdefgh", min_size=1, max_size=2).map(NodeId),
    st.floats(1e-3, 1e3),
    min_size=1,
    max_size=8,
)


@given(num_steps=st.integers(-5, 10_000), speeds=SPEEDS, longest=st.floats(1, 1e6))
def test_shared_steps_are_all_given_out_unless_time_or_nodes_forbid(
    num_steps: int, speeds: dict[NodeId, float], longest: float
) -> None:
    shared = shared_out(num_steps, speeds, longest)
    assert shared.keys() == speeds.keys() and min(shared.values()) >= 1
    total = sum(shared.values())
    if total > num_steps:
        assert total == len(speeds)
    elif total < num_steps:  # everybody trains as long as may be
        assert all(s == max(1, int(longest * speeds[n])) for n, s in shared.items())
    for node_id, steps in shared.items():
        assert steps <= max(1, longest * speeds[node_id]) + 1
    together = [steps / speeds[n] for n, steps in shared.items() if steps > 1]
    for node_id, steps in shared.items():  # none trains longer than another by more than a step
        if together and steps > 1:
            assert (steps - 1) / speeds[node_id] <= min(together) * (1 + 1e-9) + 1 / min(
                speeds[n] for n in shared if shared[n] / speeds[n] == min(together)
            )


def test_without_measurements_all_share_alike() -> None:
    assert shared_out(7, {NodeId("a"): 1.0, NodeId("b"): 1.0, NodeId("c"): 1.0}, math.inf) == {
        "a": 3,
        "b": 2,
        "c": 2,
    }
    assert FILLED < 1


def test_the_plan_says_when_the_schedule_has_ended_before_the_run() -> None:
    inner = InnerSection(total_tokens=2 * 5 * STEP_TOKENS)
    scene = Scene(schedule=Schedule(terms=(Term(inner=inner),)))
    scene.attach("node-a")
    for _ in range(2):
        assert "learning rate" not in scene.round.reason
        a_round(scene, {"node-a": 1.0})
    told = "; the learning rate stays at its end: total_tokens = 160 are trained"
    assert told in scene.round.reason and scene.reason.endswith(told)
