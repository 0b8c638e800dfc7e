"""Samples of the next round, leased with the plan of this one: asked for again, or given back."""

from coordinator.swarm.ledger import free_again
from protocol.wire.messages import RoundOpened
from protocol.wire.rounds import Assignment, NodeId
from tests.unit.swarm_scene import STEP_TOKENS, TOKENS, Scene, digest_of, of_kind


def overlapping(*names: str, rounds: int = 10) -> Scene:
    scene = Scene(min_nodes=len(names), rounds=rounds, has_overlap=True)
    scene.attach(*names)
    return scene


def next_round(scene: Scene, *names: str) -> None:
    scene.commit(*names, tokens=dict.fromkeys(names, TOKENS))
    scene.apply(digest_of(f"after {scene.state.committed_round}"), *names)


def ranges(assignments: tuple[Assignment, ...]) -> dict[str, tuple[int, int]]:
    """First and number of each node's samples."""
    return {a.node_id: (a.first_sample, a.num_samples) for a in assignments}


def test_a_plan_leases_the_next_rounds_samples_and_the_next_plan_asks_for_them() -> None:
    scene = overlapping("node-a", "node-b")
    (first,) = scene.asked(RoundOpened) or [of_kind(scene.log, RoundOpened)[-1]]
    assert ranges(first.plan.assignments) == {"node-a": (0, 10), "node-b": (10, 10)}
    assert ranges(first.plan.ahead) == {"node-a": (20, 10), "node-b": (30, 10)}
    next_round(scene, "node-a", "node-b")
    assert scene.round.number == 2
    assert scene.round.assignments == first.plan.ahead
    assert ranges(scene.round.ahead) == {"node-a": (40, 10), "node-b": (50, 10)}


def test_without_overlap_nothing_is_leased_ahead() -> None:
    scene = Scene(min_nodes=2)
    scene.attach("node-a", "node-b")
    assert scene.round.ahead == scene.state.ledger.ahead == ()
    assert len(scene.state.ledger.leased) == 2


def test_nothing_is_leased_ahead_of_the_last_round() -> None:
    scene = overlapping("node-a", "node-b", rounds=2)
    next_round(scene, "node-a", "node-b")
    assert scene.round.number == 2
    assert scene.round.ahead == scene.state.ledger.ahead == ()
    next_round(scene, "node-a", "node-b")
    assert scene.state.ledger.leased == ()


def test_what_was_leased_ahead_to_who_left_is_leased_to_others_first() -> None:
    scene = overlapping("node-a", "node-b", "node-c")
    assert ranges(scene.round.ahead)["node-b"] == (40, 10)
    scene.leave("node-b")
    next_round(scene, "node-a", "node-c")
    scene.attach("node-d", at=1, digest=digest_of("after 1"))
    assert ranges(scene.round.assignments) == {
        "node-a": (30, 10),
        "node-c": (50, 10),
        "node-d": (10, 10),  # what it was to train in the first round
    }
    assert ranges(scene.round.ahead)["node-a"] == (40, 10)  # and what ahead


def test_a_node_that_comes_back_in_time_is_asked_for_what_it_was_leased() -> None:
    scene = overlapping("node-a", "node-b")
    ahead = scene.round.ahead
    scene.leave("node-b")
    next_round(scene, "node-a")
    assert scene.state.open_round is None  # two are needed
    scene.attach("node-b", at=1, digest=digest_of("after 1"))
    assert scene.round.assignments == ahead


def test_a_void_rounds_samples_are_free_and_those_ahead_are_kept() -> None:
    scene = overlapping("node-a", "node-b")
    ahead = scene.round.ahead
    scene.wait(80)
    assert scene.round.number == 2
    assert scene.round.assignments == ahead
    assert ranges(scene.round.ahead) == {"node-a": (0, 10), "node-b": (10, 10)}


def test_what_is_leased_ahead_goes_by_the_speeds_known_then() -> None:
    scene = overlapping("node-a", "node-b")
    scene.train("node-a", seconds=1)
    scene.train("node-b", seconds=5)
    next_round(scene, "node-a", "node-b")
    assert {a.node_id: a.inner_steps for a in scene.round.assignments} == {"node-a": 5, "node-b": 5}
    assert {a.node_id: a.inner_steps for a in scene.round.ahead} == {"node-a": 5, "node-b": 1}
    next_round(scene, "node-a", "node-b")
    assert {a.node_id: a.inner_steps for a in scene.round.assignments} == {"node-a": 5, "node-b": 1}
    assert scene.round.round_tokens == STEP_TOKENS * 6


def test_every_sample_is_committed_leased_or_free() -> None:
    scene = overlapping("node-a", "node-b", "node-c")
    for _ in range(3):
        next_round(scene, "node-a", "node-b", "node-c")
    ledger = scene.state.ledger
    assert sum(p.num_samples for p in ledger.committed) == 90
    assert sum(p.num_samples for p in ledger.leased) == 60
    assert free_again(ledger) == ()
    assert ledger.frontier() == 150
    assert NodeId("node-a") in {a.node_id for a in scene.state.ledger.ahead}
