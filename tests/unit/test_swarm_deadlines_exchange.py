"""What makes the exchange, the commit and its application longer, and what is no measurement."""

from dataclasses import replace

from coordinator.swarm.members import Standing
from protocol.wire.rounds import NodeId
from tests.unit.deadline_scene import (
    A,
    B,
    C,
    a_round,
    apply,
    given,
    last_plan,
    late_in,
    participants,
    reduce_and_hold,
    swarm_of,
    train,
)
from tests.unit.swarm_scene import TOKENS, digest_of


def test_a_contribution_that_came_too_late_makes_the_exchange_longer() -> None:
    scene = swarm_of(A, B)
    for _ in range(3):
        a_round(scene, train_seconds=20, exchange_seconds=4)
    assert given(scene)[1] == 6
    scene.wait(20)
    train(scene, A, B)
    scene.wait_until(scene.round.contribute_deadline)
    reduce_and_hold(scene, A, B, seconds=1, of=(A,))
    apply(scene, A, B)
    # Training ended 10 s before its deadline, so 16 s were too short.
    assert given(scene)[1] == 24
    assert late_in(scene.state.phase_times.exchange, scene) == {B}


def test_a_contribution_that_reducers_did_not_wait_for_to_the_deadline_makes_nothing_longer() -> (
    None
):
    scene = swarm_of(A, B, C)
    for _ in range(20):
        scene.wait(20)
        train(scene, A, B, C)
        scene.wait(4)
        reduce_and_hold(scene, A, B, C, seconds=1, of=(A, B))
        scene.state = replace(  # it keeps them from one reducer, so it is not at fault
            scene.state,
            members={
                **scene.state.members,
                NodeId(C): replace(scene.member(C), standing=Standing()),
            },
        )
        apply(scene, A, B, C)
    assert given(scene)[1] == 6


def test_a_slice_with_nothing_to_reduce_makes_the_exchange_longer() -> None:
    scene = swarm_of(A, B)
    for _ in range(3):
        a_round(scene, train_seconds=20, exchange_seconds=4)
    scene.wait(20)
    train(scene, A, B)
    scene.wait_until(scene.round.contribute_deadline)
    scene.reduce(A, 0, None)
    scene.reduce(B, 1, digest_of("result"))
    scene.hold(A, 1, digest_of("result"))
    apply(scene, A, B)
    assert given(scene)[1] == 24
    assert late_in(scene.state.phase_times.exchange, scene) == {A, B}
    assert late_in(scene.state.phase_times.commit, scene) == set()


def test_slices_that_are_all_void_are_measured_too() -> None:
    scene = swarm_of(A, B)
    for _ in range(3):
        a_round(scene, train_seconds=20, exchange_seconds=4)
    scene.wait(20)
    train(scene, A, B)
    scene.wait_until(scene.round.contribute_deadline)
    scene.reduce(A, 0, None)
    scene.reduce(B, 1, None)
    assert given(scene)[1] == 24


def test_results_that_reached_too_few_make_the_commit_longer() -> None:
    scene = swarm_of(A, B, C)
    for _ in range(3):
        a_round(scene, train_seconds=20, exchange_seconds=4, commit_seconds=4)
    assert given(scene)[2] == 6
    scene.wait(20)
    train(scene, A, B, C)
    scene.wait(4)
    for index in range(3):
        scene.reduce(participants(scene)[index], index, digest_of("result"))
    scene.hold(A, 1, digest_of("result"))
    scene.hold(A, 2, digest_of("result"))
    scene.wait_until(scene.round.commit_deadline)
    apply(scene, A, B, C)
    # 12 s were left of the phases before, and 6 s were its own.
    assert given(scene)[2] == 27
    assert late_in(scene.state.phase_times.commit, scene) == {B, C}  # of slice 0


def test_a_reducer_that_does_not_report_in_time_makes_the_commit_longer() -> None:
    scene = swarm_of(A, B)
    for _ in range(3):
        a_round(scene, train_seconds=20, exchange_seconds=4, commit_seconds=4)
    scene.wait(20)
    train(scene, A, B)
    scene.wait(4)
    scene.reduce(A, 0, digest_of("result"))
    scene.hold(B, 0, digest_of("result"))
    scene.wait_until(scene.round.commit_deadline)
    apply(scene, A, B)
    assert given(scene)[2] == 27
    assert late_in(scene.state.phase_times.commit, scene) == {B}


def test_a_node_that_applies_too_late_gets_more_time_once() -> None:
    scene = swarm_of(A, B, C)
    for _ in range(3):
        a_round(scene, apply_seconds=4)
    assert given(scene)[3] == 6
    for expected in (9, 6, 6):  # once more, and it is not waited for
        names = participants(scene)
        train(scene, *names)
        reduce_and_hold(scene, *names, seconds=1)
        apply(scene, *[name for name in names if name != C])
        scene.wait_until(scene.round.apply_deadline)
        scene.apply(scene.state.outer_digest, C)
        assert given(scene)[3] == expected


def test_when_the_fastest_node_leaves_the_others_get_the_time_that_their_steps_take() -> None:
    scene = swarm_of(A, B, C)
    for _ in range(3):
        scene.wait(2)
        for a in scene.round.assignments:
            speed = 2.5 if a.node_id == A else 0.25
            tokens = a.inner_steps * TOKENS // 5
            seconds = a.inner_steps / speed
            scene.train(a.node_id, inner_steps=a.inner_steps, tokens=tokens, seconds=seconds)
        reduce_and_hold(scene, *participants(scene), seconds=0)
        apply(scene, A, B, C)
    # The slower ones took one step in 4 s by their own clocks.
    assert given(scene)[0] == 6
    assert "train 6.0 s (1.5 × 4.0 s, by the nodes' speeds)" in last_plan(scene).reason
    train(scene, A, B, C)
    reduce_and_hold(scene, A, B, C, seconds=0)
    scene.leave(A)
    apply(scene, B, C)
    assert {a.node_id: a.inner_steps for a in scene.round.assignments} == {
        NodeId(B): 5,
        NodeId(C): 5,
    }
    assert given(scene)[0] == 30


def test_a_round_that_was_in_flight_when_nothing_was_measured_yet_is_passed_over() -> None:
    """A database of an earlier version: its round carries no times."""
    scene = swarm_of(A, B)
    current = replace(scene.round, later_session_id=0, apply_seconds=None)
    scene.state = replace(scene.state, open_round=current)
    train(scene, A, B)
    scene.state = replace(scene.state, open_round=replace(scene.round, trained_at={}))
    before = scene.state.phase_times
    reduce_and_hold(scene, A, B, seconds=0)
    assert scene.round.apply_deadline == scene.now + 20
    assert scene.state.phase_times == before


def test_a_round_that_closes_before_training_can_be_over_is_no_measurement() -> None:
    scene = swarm_of(A, B)
    scene.wait(20)
    train(scene, A)
    reduce_and_hold(scene, A, B, seconds=1)
    assert scene.state.committed_round == 1
    assert scene.state.phase_times.train == ()


def test_what_a_node_that_left_did_not_send_is_not_missed() -> None:
    scene = swarm_of(A, B, C)
    scene.wait(20)
    train(scene, A, B, C)
    scene.leave(C)
    scene.wait(3)
    reduce_and_hold(scene, A, B, seconds=1, of=(A, B))
    assert [m.seconds for m in scene.state.phase_times.exchange] == [3]


def test_the_time_in_which_a_contribution_was_awaited_until_its_node_left_is_no_measurement() -> (
    None
):
    scene = swarm_of(A, B, C)
    scene.wait(20)
    train(scene, A, B, C)
    scene.wait(4)
    scene.leave(C)
    scene.wait(3)
    reduce_and_hold(scene, A, B, seconds=1, of=(A, B))
    assert [m.seconds for m in scene.state.phase_times.exchange] == [3]


def test_the_time_in_which_a_reducer_was_missed_until_it_left_is_no_measurement() -> None:
    scene = swarm_of(A, B, C)
    scene.wait(20)
    train(scene, A, B, C)
    reduce_and_hold(scene, A, B, seconds=1)
    scene.wait(5)
    scene.leave(C)
    scene.wait(2)
    reduce_and_hold(scene, A, B, seconds=1)  # what it should have reduced
    assert [m.seconds for m in scene.state.phase_times.commit] == [1]


def test_a_bystander_that_leaves_changes_no_measurement() -> None:
    scene = swarm_of(A, B)
    scene.attach(C)
    scene.wait(20)
    train(scene, A, B)
    scene.wait(3)
    scene.leave(C)
    reduce_and_hold(scene, A, B, seconds=1)
    assert [m.seconds for m in scene.state.phase_times.exchange] == [3]


def test_the_time_in_which_a_node_was_awaited_to_apply_until_it_left_is_no_measurement() -> None:
    scene = swarm_of(A, B)
    scene.attach(C)
    train(scene, A, B)
    reduce_and_hold(scene, A, B, seconds=1)
    apply(scene, A, B, seconds=2)
    scene.wait(5)
    scene.leave(C)
    assert scene.round.number == 2
    assert [m.seconds for m in scene.state.phase_times.apply] == [0]


def test_who_joined_before_the_commit_is_measured_as_it_applies_it_and_who_came_after_is_not() -> (
    None
):
    scene = swarm_of(A, B)
    scene.attach(C)
    train(scene, A, B)
    reduce_and_hold(scene, A, B, seconds=1)
    apply(scene, A, B, C)
    assert [m.seconds for m in scene.state.phase_times.apply] == [2]
    train(scene, A, B, C)
    reduce_and_hold(scene, A, B, C, seconds=1)
    scene.attach(B, at=1)
    apply(scene, A, B, C)
    assert scene.round.number == 3
    assert [m.seconds for m in scene.state.phase_times.apply] == [2]


def test_training_that_took_all_the_time_of_the_exchange_leaves_nothing_to_measure() -> None:
    scene = swarm_of(A, B)
    train(scene, A)
    scene.wait_until(scene.round.contribute_deadline)
    train(scene, B)
    reduce_and_hold(scene, A, B, seconds=1, of=(A,))
    times = scene.state.phase_times
    assert ([m.seconds for m in times.train], times.exchange) == ([70], ())


def test_a_node_that_trained_nothing_is_not_missed() -> None:
    """Its ranks died and came back too late, so it has nothing to contribute."""
    scene = swarm_of(A, B)
    train(scene, A)
    train(scene, B, inner_steps=0)
    scene.wait_until(scene.round.contribute_deadline)
    reduce_and_hold(scene, A, B, seconds=1, of=(A,))
    assert scene.state.committed_round == 1
    assert scene.state.phase_times.exchange == ()
