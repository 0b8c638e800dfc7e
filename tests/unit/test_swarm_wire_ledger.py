"""The wire ledger: what rounds cost, told by nodes that restart, repeat themselves and are late."""

import pytest

from coordinator.swarm.state import ClosedRound
from tests.unit.swarm_scene import INITIAL, STEP_TOKENS, Scene, digest_of

ONE, TWO = digest_of("one"), digest_of("two")
NUM_PARAMETERS = 1024


def told(sent: int, received: int = 0) -> dict[str, tuple[int, int]]:
    return {"contribution": (sent, received), "control": (1, 1)}


def commit_round(scene: Scene) -> None:
    for name in "ab":
        scene.train(name)
    for part in scene.round.slices:
        reducer = part.slice.reducer_id
        scene.reduce(reducer, part.slice.index, digest_of("result"))
        for name in "ab":
            scene.hold(name, part.slice.index, digest_of("result"))


def closed(scene: Scene) -> ClosedRound:
    assert scene.state.last_closed is not None
    return scene.state.last_closed


@pytest.fixture
def scene() -> Scene:
    scene = Scene(min_nodes=2)
    scene.attach("a", "b")
    commit_round(scene)
    return scene


def test_a_round_costs_what_its_nodes_say_and_a_repeated_report_nothing_more(scene: Scene) -> None:
    for _ in range(2):
        scene.apply(ONE, "a", wire=told(100, 50))
    assert scene.state.wire == {"contribution": (100, 50), "control": (1, 1)}
    scene.apply(ONE, "b", wire=told(30, 70))
    assert closed(scene).wire == {"contribution": (130, 120), "control": (2, 2)}
    assert scene.state.wire == closed(scene).wire


def test_the_next_round_costs_only_what_came_since(scene: Scene) -> None:
    scene.apply(ONE, "a", "b", wire=told(100))
    commit_round(scene)
    scene.apply(TWO, "a", "b", wire=told(110))
    assert closed(scene).wire["contribution"] == (20, 0)
    assert scene.state.wire["contribution"] == (220, 0)


def test_a_report_that_was_lost_is_in_the_next_one(scene: Scene) -> None:
    scene.apply(ONE, "a", wire=told(100))
    scene.apply(ONE, "b")
    commit_round(scene)
    scene.apply(TWO, "a", "b", wire=told(120))
    assert scene.state.wire["contribution"] == (240, 0)


def test_a_process_that_began_anew_counts_from_zero_and_what_it_told_before_stays(
    scene: Scene,
) -> None:
    scene.apply(ONE, "a", "b", wire=told(100))
    scene.attach("a", at=1, digest=ONE)
    commit_round(scene)
    scene.apply(TWO, "a", wire=told(40))
    assert scene.state.wire["contribution"] == (240, 0)


def test_a_session_that_broke_begins_nothing_anew(scene: Scene) -> None:
    scene.apply(ONE, "a", "b", wire=told(100))
    scene.attach("a", at=1, digest=ONE, is_new_process=False)
    scene.apply(ONE, "a", wire=told(100))
    assert scene.state.wire["contribution"] == (200, 0)


def test_what_is_late_counts_in_all_and_in_no_other_round(scene: Scene) -> None:
    scene.apply(ONE, "a", "b", wire=told(100))
    commit_round(scene)
    scene.apply(ONE, "a", round=1, wire=told(105))
    assert scene.state.wire["contribution"] == (205, 0)
    scene.apply(TWO, "a", "b", wire=told(110))
    assert closed(scene).wire["contribution"] == (5 + 10, 0)


def test_the_baseline_is_a_ring_all_reduce_of_fp32_gradients_at_every_committed_inner_step(
    scene: Scene,
) -> None:
    steps_of_both = 2 * 5
    assert sum(t.tokens for t in closed(scene).trained.values()) == steps_of_both * STEP_TOKENS
    # Each of two nodes sends 2 * (2 - 1) / 2 of the vector.
    assert scene.state.all_reduce_bytes == steps_of_both * 1 * 4 * NUM_PARAMETERS


def test_nothing_was_saved_by_what_did_not_commit() -> None:
    scene = Scene(min_nodes=2)
    scene.attach("a", "b")
    assert scene.state.all_reduce_bytes == 0
    assert scene.state.outer_digest == INITIAL
