"""How long things still take, by what they took, beside the deadlines that bound them."""

import random
from dataclasses import replace
from itertools import pairwise
from statistics import mean

from coordinator.swarm.deadlines import ROUNDS_NEEDED
from coordinator.swarm.explain import explain, phase_seconds_left, round_seconds, run_seconds_left
from coordinator.swarm.state import RoundPhase
from tests.unit.deadline_scene import A, B, a_round, swarm_of, train
from tests.unit.swarm_scene import LAYOUT, Scene


def after_rounds(number: int) -> Scene:
    scene = swarm_of(A, B)
    for _ in range(number):
        a_round(scene)
    return scene


def test_before_some_rounds_were_measured_nobody_knows_and_the_deadline_alone_is_told() -> None:
    scene = after_rounds(ROUNDS_NEEDED - 1)
    assert phase_seconds_left(scene.state, scene.now) is None
    assert run_seconds_left(scene.state, scene.now) is None
    assert scene.reason == "training: 0 of 2 nodes are done, 60 s left"


def test_the_time_left_does_not_swing_where_some_rounds_are_long_and_others_short() -> None:
    scene = swarm_of(A, B)
    lengths = random.Random(0)
    found = []
    for number in range(48):
        a_round(scene, train_seconds=lengths.choice((5, 45)))
        if number >= 16:
            found.append(round_seconds(scene.state) or 0.0)
    assert max(abs(later - earlier) for earlier, later in pairwise(found)) < 0.2 * mean(found)
    assert 0.6 * 30 < min(found) < max(found) < 1.6 * 30


def test_one_odd_round_is_passed_over_when_it_is_told_how_long_rounds_take() -> None:
    scene = after_rounds(ROUNDS_NEEDED)
    a_round(scene, train_seconds=29)  # one slow round is passed over
    assert round_seconds(scene.state) == 20 + 4 + 1 + apply_seconds(scene)


def apply_seconds(scene: Scene) -> float:
    taken = sorted(m.seconds or m.given_seconds for m in scene.state.phase_times.apply)
    return taken[len(taken) // 2]


def test_the_reason_tells_the_usual_end_first_and_the_deadline_beside_it() -> None:
    scene = after_rounds(4)
    scene.wait(5)
    deadline = scene.round.train_deadline - scene.now
    assert phase_seconds_left(scene.state, scene.now) == 15
    assert explain(scene.state, scene.now) == (
        f"training: 0 of 2 nodes are done, about 15 s left, {deadline:.0f} s at most"
    )
    scene.wait(14.5)
    assert explain(scene.state, scene.now).endswith(
        f"later than usual, {deadline - 14.5:.0f} s left at most"
    )


def test_an_exchange_is_estimated_from_the_end_of_training() -> None:
    scene = after_rounds(4)
    scene.wait(10)
    train(scene, A, B)
    assert phase_seconds_left(scene.state, scene.now) == 4 + 1
    scene.wait(2)
    assert phase_seconds_left(scene.state, scene.now) == 3
    scene.wait(4)
    assert phase_seconds_left(scene.state, scene.now) == 0


def test_an_estimate_goes_by_the_size_of_the_rounds_fragment() -> None:
    scene = swarm_of(A, B, layout=replace(LAYOUT, fragment_elements=(4096, 1024, 1024, 2048)))
    for times in (1, 1, 2):
        a_round(scene, exchange_seconds=4 * times, commit_seconds=times, apply_seconds=2 * times)
    train(scene, A, B)
    assert scene.round.fragment == 0
    assert phase_seconds_left(scene.state, scene.now) == 16 + 4
    assert round_seconds(scene.state) == 20 + 2 * (4 + 1 + 2)  # the mean fragment has 2048


def test_the_runs_end_comes_closer_as_time_goes_by_and_is_no_sooner_than_its_rounds() -> None:
    scene = after_rounds(4)
    a_round_takes = round_seconds(scene.state)
    assert a_round_takes is not None
    rounds_left = scene.state.rules.total_rounds - scene.state.committed_round
    assert run_seconds_left(scene.state, scene.now) == rounds_left * a_round_takes
    scene.wait(5)
    assert run_seconds_left(scene.state, scene.now) == rounds_left * a_round_takes - 5
    scene.wait(24)  # longer than rounds take: the others still take what they took
    assert run_seconds_left(scene.state, scene.now) == (rounds_left - 1) * a_round_takes


def test_a_round_whose_commit_is_being_applied_is_not_over_yet() -> None:
    scene = after_rounds(4)
    a_round_takes = round_seconds(scene.state)
    assert a_round_takes is not None
    rounds_left = scene.state.rules.total_rounds - scene.state.committed_round
    began_at = scene.now
    train(scene, A, B)
    scene.wait(1)
    scene.commit("node-a", "node-b")
    assert scene.round.phase is RoundPhase.APPLYING
    spent = scene.now - began_at
    assert run_seconds_left(scene.state, scene.now) == rounds_left * a_round_takes - spent
