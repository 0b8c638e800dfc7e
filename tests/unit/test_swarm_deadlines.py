"""Deadlines follow what rounds really take."""

from dataclasses import replace

from coordinator.swarm.deadlines import quantile
from protocol.wire.rounds import LayoutSummary
from tests.unit.deadline_scene import (
    A,
    B,
    C,
    a_round,
    apply,
    given,
    last_plan,
    reduce_and_hold,
    swarm_of,
    train,
)
from tests.unit.swarm_scene import LAYOUT, Scene


def test_the_run_file_decides_until_three_rounds_are_measured() -> None:
    scene = swarm_of(A, B)
    for _ in range(3):
        assert given(scene) == (60, 10, 10, 20)
        assert last_plan(scene).reason == (
            "2 nodes are ready; deadlines of the run file until 3 rounds are measured"
        )
        a_round(scene, train_seconds=28, exchange_seconds=6, commit_seconds=1, apply_seconds=4)
    assert given(scene) == (42, 9, 5, 6)
    assert last_plan(scene).reason == (
        "2 nodes are ready; deadlines: "
        "train 42 s (1.5 × 28 s, the 90 % quantile of 3 rounds), "
        "exchange 9.0 s (1.5 × 6.0 s, the 90 % quantile of 3 rounds), "
        "commit 5.0 s (the floor), "
        "apply 6.0 s (1.5 × 4.0 s, the 90 % quantile of 3 rounds)"
    )


def test_a_plan_that_does_not_adapt_keeps_the_run_file_and_says_nothing() -> None:
    scene = Scene(min_nodes=2)
    scene.attach(A, B)
    for _ in range(4):
        assert given(scene) == (60, 10, 10, 20)
        assert last_plan(scene).reason == "2 nodes are ready"
        a_round(scene)


def test_no_phase_gets_more_than_the_run_file_leaves_it() -> None:
    scene = swarm_of(A, B)
    for _ in range(3):
        a_round(scene, train_seconds=50, exchange_seconds=15, commit_seconds=14, apply_seconds=19)
    plan = last_plan(scene)
    assert (plan.train_seconds, plan.contribute_seconds, plan.commit_seconds) == (60, 70, 80)
    assert scene.round.apply_seconds == 20
    assert plan.reason.count("the run file's bound") == 4


def test_a_phase_may_use_what_those_before_it_leave() -> None:
    scene = swarm_of(A, B)
    for _ in range(3):
        a_round(scene, train_seconds=10, exchange_seconds=20)
    assert given(scene)[:2] == (15, 30)


def test_the_floor_yields_to_a_shorter_bound() -> None:
    scene = swarm_of(A, B)
    for _ in range(3):
        a_round(scene, train_seconds=59, exchange_seconds=9, commit_seconds=1)
    assert given(scene)[:3] == (60, 10, 5)
    for _ in range(3):
        a_round(scene, train_seconds=59, exchange_seconds=1, commit_seconds=1)
    assert given(scene)[:3] == (60, 10, 5)


def of_fragments(*elements: int) -> LayoutSummary:
    return replace(LAYOUT, fragment_elements=elements)


def test_a_larger_fragment_is_given_as_many_times_longer_before_it_was_ever_exchanged() -> None:
    scene = swarm_of(A, B, layout=of_fragments(4096, 1024, 1024, 2048))
    a_round(scene, train_seconds=20, exchange_seconds=4, apply_seconds=2)
    a_round(scene, train_seconds=20, exchange_seconds=4, apply_seconds=2)
    a_round(scene, train_seconds=20, exchange_seconds=8, apply_seconds=4)
    assert scene.round.fragment == 0
    assert given(scene) == (30, 24, 6, 12)
    assert "exchange 24 s (1.5 × 16 s, the 90 % quantile of 3 rounds)" in last_plan(scene).reason
    a_round(scene, train_seconds=20, exchange_seconds=16, commit_seconds=4, apply_seconds=8)
    assert given(scene)[:2] == (30, 24), "a part of what it took are round trips"


def test_a_large_fragment_that_was_cut_off_is_given_more_when_its_turn_comes_again() -> None:
    scene = swarm_of(A, B, layout=of_fragments(4096, 1024, 1024, 1024), commit_seconds=200)
    scene.amend(contribute_seconds=190)
    for _ in range(3):
        a_round(scene, train_seconds=10, exchange_seconds=4)
    assert given(scene)[:2] == (15, 24)
    scene.wait(10)
    train(scene, A, B)
    scene.wait_until(scene.round.contribute_deadline)  # it takes longer than its size explains
    reduce_and_hold(scene, A, B, seconds=0, of=(A,))
    apply(scene, A, B)
    for _ in range(3):
        a_round(scene, train_seconds=10, exchange_seconds=4)
    assert scene.round.fragment == 0
    assert given(scene)[1] == 1.5 * (15 + 24 - 10)


def test_one_unusual_round_in_ten_is_passed_over() -> None:
    scene = swarm_of(A, B)
    for seconds in (20, 20, 20, 20, 28, 20, 20, 20, 20):
        a_round(scene, train_seconds=seconds)
    assert given(scene)[0] == 42
    a_round(scene, train_seconds=20)
    assert given(scene)[0] == 30


def test_the_quantile_is_one_of_the_values() -> None:
    assert quantile([7.0]) == 7
    assert quantile([3.0, 1.0, 2.0]) == 3
    assert quantile([float(value) for value in range(10)]) == 8
    assert quantile([float(value) for value in range(16)]) == 14


def test_only_the_latest_rounds_count() -> None:
    scene = swarm_of(A, B)
    for _ in range(5):
        a_round(scene, train_seconds=40)
    for _ in range(15):
        a_round(scene, train_seconds=10)
    assert given(scene)[0] == 15
    times = scene.state.phase_times
    assert len(times.train) == len(times.apply) == 16


def a_round_in_which_one_runs_out_of_time(scene: Scene) -> float:
    """Node b stops at the deadline with two of five steps. What it was given."""
    seconds = last_plan(scene).train_seconds
    train(scene, A)
    scene.wait(seconds)
    train(scene, B, inner_steps=2)
    reduce_and_hold(scene, A, B, seconds=0)
    apply(scene, A, B)
    return seconds


def test_training_that_was_cut_off_gets_half_as_long_again_until_it_fits_or_the_bound_is_reached() -> (
    None
):
    scene = swarm_of(A, B)
    for _ in range(12):
        a_round(scene, train_seconds=8)
    seconds = [a_round_in_which_one_runs_out_of_time(scene) for _ in range(4)]
    assert seconds == [12, 18, 27, 40.5]
    assert given(scene)[0] == 60
    assert "train 60 s (the run file's bound)" in last_plan(scene).reason
    a_round(scene, train_seconds=55)
    assert given(scene)[0] == 60


def test_a_plan_says_for_how_many_nodes_the_last_round_was_too_short() -> None:
    scene = swarm_of(A, B)
    for _ in range(12):
        a_round(scene, train_seconds=8)
    a_round_in_which_one_runs_out_of_time(scene)
    assert "train 18 s (1.5 × 12 s, too short for 1 node)" in last_plan(scene).reason


def test_a_node_that_never_reports_stretches_nothing_though_it_is_present() -> None:
    scene = swarm_of(A, B, C)
    for _ in range(3):
        a_round(scene, train_seconds=20)
    assert given(scene)[:3] == (30, 6, 5)
    scene.wait(20)
    train(scene, A, B)
    scene.wait_until(scene.round.contribute_deadline)
    reduce_and_hold(scene, A, B, seconds=1)
    scene.wait_until(scene.round.commit_deadline)  # for node c's slice
    apply(scene, A, B)  # nobody waits for node c to apply it
    # All waited for it, which tells nothing of the exchange and the commit.
    assert given(scene)[:3] == (30, 6, 5)
    assert [str(a.node_id) for a in scene.round.assignments] == [A, B]
    a_round(scene, train_seconds=20)
    assert given(scene)[:3] == (30, 6, 5)


def test_a_node_that_is_given_up_is_no_measurement() -> None:
    scene = swarm_of(A, B, C, lease_seconds=50)
    for _ in range(3):
        a_round(scene, train_seconds=10, exchange_seconds=2)
        for name in (A, B, C):
            scene.beat(name, at=scene.state.committed_round, digest=scene.state.outer_digest)
    assert given(scene)[:2] == (15, 5)
    scene.wait(10)
    train(scene, A, B)
    scene.wait(7)
    for name in (A, B):
        scene.beat(name, at=scene.state.committed_round, digest=scene.state.outer_digest)
    deadline = scene.round.commit_deadline
    scene.leave(C)
    scene.wait(2)
    reduce_and_hold(scene, A, B, seconds=1)
    assert scene.now < deadline
    apply(scene, A, B)
    assert given(scene)[:2] == (15, 5)
    assert [m.seconds for m in scene.state.phase_times.exchange] == [2, 2, 2, 2]
    assert [m.cut_session_ids for m in scene.state.phase_times.train] == [()] * 4


def test_a_node_that_began_a_new_session_meanwhile_is_no_measurement() -> None:
    scene = swarm_of(A, B)
    for _ in range(3):
        a_round(scene, train_seconds=20)
    before = scene.state.phase_times
    digest = scene.state.outer_digest
    scene.wait(20)
    train(scene, A)
    scene.attach(B, at=scene.state.committed_round, digest=digest)
    scene.wait(10)
    train(scene, B, inner_steps=1)
    reduce_and_hold(scene, A, B, seconds=0)
    times = scene.state.phase_times
    assert [m.seconds for m in times.train] == [20] * 4
    assert not any(m.cut_session_ids for m in times.train)
    assert (times.exchange, times.commit) == (before.exchange, before.commit)
