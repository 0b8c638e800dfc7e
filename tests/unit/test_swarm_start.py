"""A coordinator that starts waits for the newest round's nodes, and for no longer than a round may last."""

import math

import pytest

from coordinator.swarm.events import Started, Woke
from coordinator.swarm.members import MemberState
from coordinator.swarm.start import RETURN_SECONDS
from coordinator.swarm.state import trimmed
from protocol.wire.messages import RoundCommitted, RoundOpened
from tests.unit.swarm_scene import INITIAL, Scene, digest_of, of_kind

AFTER = digest_of("after 1")


def started(*, in_flight: bool = True, lease_seconds: float = 15) -> Scene:
    """Three nodes have committed and applied round 1; the coordinator starts again."""
    scene = Scene(min_nodes=2, lease_seconds=lease_seconds)
    scene.attach("node-a", "node-b", "node-c")
    scene.commit("node-a", "node-b")
    if in_flight:
        scene.apply(AFTER, "node-a", "node-b", "node-c")
        assert scene.round.number == 2
    scene.do(Started())
    return scene


def test_no_round_is_closed_or_opened_until_the_newest_rounds_nodes_are_back() -> None:
    scene = started()
    scene.wait(20)  # all leases are over
    assert scene.round.number == 2
    assert scene.reason.startswith(
        "the coordinator has started and waits for these nodes of round 2 to come back: "
        "node-a, node-b, node-c, "
    )
    left = scene.round.commit_deadline - scene.now
    scene.attach("node-a", "node-b", at=1, digest=AFTER)
    assert "node-c" in scene.reason and "node-a" not in scene.reason
    assert scene.state.awaited is not None
    scene.attach("node-c", at=1, digest=AFTER)
    assert scene.state.awaited is None
    assert scene.round.commit_deadline - scene.now <= 80 < left, "the round has the time it had"
    scene.commit("node-a", "node-b")


def test_nothing_is_decided_while_a_node_that_is_back_has_commits_to_bring() -> None:
    scene = started()
    scene.attach("node-a", at=2, digest=digest_of("after 2"))
    scene.attach("node-b", "node-c", at=1, digest=AFTER)
    begin, left = scene.now, scene.round.commit_deadline
    assert scene.state.awaited is not None
    while scene.now < begin + 30:
        scene.beat("node-a", at=2, digest=digest_of("after 2"))
        for name in ("node-b", "node-c"):
            scene.beat(name, at=1, digest=AFTER)
        scene.wait(5)
        assert scene.state.awaited is not None and scene.round.commit_deadline == left
    scene.leave("node-a")
    assert scene.state.awaited is None


def seconds_until_it_goes_on(scene: Scene, *back: str, within: float = math.inf) -> float:
    """These nodes are back, and say so again and again."""
    begin = scene.now
    scene.attach(*back, at=1, digest=AFTER)
    while scene.state.awaited is not None and scene.now < begin + within:
        for name in back:
            scene.beat(name, at=1, digest=AFTER)
        scene.wait(1)
    return scene.now - begin


@pytest.mark.parametrize("back", [("node-a", "node-b"), ("node-a", "node-new")])
def test_with_enough_for_a_round_who_is_not_back_is_given_up_like_a_node_that_falls_silent(
    back: tuple[str, str],
) -> None:
    scene = started()
    rules = scene.state.rules
    assert rules.lease_seconds < RETURN_SECONDS < rules.commit_seconds / 2
    assert RETURN_SECONDS <= seconds_until_it_goes_on(scene, *back) <= RETURN_SECONDS + 1
    assert scene.member("node-c").state is MemberState.LOST
    scene.commit(*back)  # the round in flight; or the next, where too few of its nodes are back


@pytest.mark.parametrize("back", [("node-a",), ("node-new", "node-newer")])
def test_without_enough_for_a_round_or_anybody_of_the_newest_the_wait_is_that_of_a_long_round(
    back: tuple[str, ...],
) -> None:
    scene = started()
    rules = scene.state.rules
    assert rules.commit_seconds / 2 <= seconds_until_it_goes_on(scene, *back)
    assert scene.member("node-c").state is MemberState.LOST


def test_a_coordinator_that_slept_while_it_waited_gives_living_nodes_time_to_come_back() -> None:
    scene = started(lease_seconds=5)
    seconds_until_it_goes_on(scene, "node-a", "node-b", within=RETURN_SECONDS - 2)
    scene.do(Woke(pause_seconds=6.0))
    more = seconds_until_it_goes_on(scene, "node-a", "node-b")
    assert 6 + 5 <= more <= 6 + 5 + 1


def test_who_said_goodbye_is_not_waited_for() -> None:
    scene = started()
    scene.attach("node-a", "node-b", at=1, digest=AFTER)
    scene.attach("node-c", at=1, digest=AFTER)
    scene.leave("node-c")
    scene.do(Started())
    assert scene.state.awaited is not None
    assert [str(node_id) for node_id in scene.state.awaited.node_ids] == ["node-a", "node-b"]


def test_a_second_start_while_nodes_are_waited_for_moves_no_deadline_twice() -> None:
    scene = started()
    before = scene.state
    scene.do(Started())
    assert scene.state == before
    scene.wait(10)
    scene.do(Started())
    moved = scene.round.commit_deadline - before.open_round.commit_deadline  # type: ignore[union-attr]
    assert moved == 10


def test_who_has_not_come_back_is_in_no_plan() -> None:
    scene = started(in_flight=False)
    scene.attach("node-a", "node-b", at=1, digest=AFTER)
    scene.wait(scene.state.rules.commit_seconds)
    for name in ("node-a", "node-b"):
        scene.attach(name, at=1, digest=AFTER)
    plan = [told.plan for told in of_kind(scene.log, RoundOpened)][-1]
    assert [str(node_id) for node_id in plan.participants] == ["node-a", "node-b"]


def test_who_has_not_come_back_counts_as_lost_whatever_its_lease_was() -> None:
    scene = started(lease_seconds=10_000)
    scene.attach("node-a", "node-b", at=1, digest=AFTER)
    scene.wait(scene.state.rules.commit_seconds)
    assert scene.member("node-c").state is MemberState.LOST
    assert scene.member("node-a").state is MemberState.READY


def test_the_newest_round_with_results_is_kept_however_many_void_ones_follow() -> None:
    scene = Scene(min_nodes=1, rounds=50)
    scene.attach("node-a")
    scene.commit("node-a")
    scene.apply(AFTER, "node-a")
    for _ in range(12):
        scene.wait_until(scene.round.commit_deadline)
    assert [closed.is_void for closed in scene.state.recent] == [False] + 12 * [True]
    assert trimmed(scene.state.recent) == scene.state.recent
    commits = [told.commit for told in of_kind(scene.log, RoundCommitted)]
    assert scene.state.recent[0].commit.round == commits[0].round == 1
    assert scene.state.outer_digest == AFTER != INITIAL


def test_a_round_in_flight_commits_nothing_with_fewer_nodes_than_one_may_open_with() -> None:
    """The others may have committed it, and more, since the copy was made."""
    scene = started()
    scene.attach("node-a", at=1, digest=AFTER)
    for progress in scene.round.slices:
        result = digest_of(f"result {progress.slice.index}")
        scene.reduce(progress.slice.reducer_id, progress.slice.index, result)
        scene.hold("node-a", progress.slice.index, result)
    while scene.state.awaited is not None:
        scene.beat("node-a", at=1, digest=AFTER)
        scene.wait(5)
    newest = scene.state.recent[-1]
    assert newest.commit.round == 2 and newest.is_void
    assert newest.commit.slices[0].void_reason == (
        "only 1 of its nodes came back after the coordinator started"
    )


def test_after_the_run_too_a_process_that_began_anew_meanwhile_is_no_copy() -> None:
    scene = Scene(min_nodes=1, rounds=1)
    scene.attach("node-a")
    scene.commit("node-a")
    scene.apply(AFTER, "node-a")
    scene.evaluate("node-a", round=1)
    assert scene.state.is_finished
    scene.do(Started())
    assert scene.state.is_finished and not scene.member("node-a").is_heard
    old = scene.member("node-a").session_id
    scene.attach("node-a", at=1, digest=AFTER, is_beside=True)
    assert scene.member("node-a").session_id > old
